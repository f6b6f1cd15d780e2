"""What a tier costs the engine's own thread, against vLLM's fs tier: `python benchmarks/calls.py --folder /mnt/disk`.

For each call that vLLM's scheduler makes, and for whole steps of it: how many chunks a second its thread gets through. Everything else
happens on other threads. Ours is to take half the time of vLLM's at most, so each cell is judged against a ratio of 2.
"""

from __future__ import annotations

import argparse
import itertools
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from child import Child
from harness import Cell, CellResult, add_outputs, geometric_mean, machine_facts, publish, run_cell, verdict
from targets import judge

HERE = Path(__file__).parent
OPERATIONS = {
    "lookup": "look-up of a known chunk",
    "lookup_new": "look-ups of a stored chunk until the answer is known",
    "lookup_missing": "look-ups of a chunk that nobody stored until the answer is known",
    "submit_store": "submit a store, a chunk",
    "submit_load": "submit a load, a chunk",
    "poll": "poll until stored, a chunk",
    "store": "submit a store and poll until it is done, a chunk",
    "load": "submit a load and poll until it is done, a chunk",
    "idle_poll": "poll with nothing to report, a call",
    "step_1000": "a request of 1,000 chunks, a chunk",
    "step_10000": "a request of 10,000 chunks, a chunk",
}
WANTED = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=list(OPERATIONS), action="append", help="this cell; may be repeated")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: the thread's own processor time, for a busy machine")
    add_outputs(parser)
    args = parser.parse_args()

    folder = Path(tempfile.mkdtemp(prefix="kvstore-bench-", dir=args.folder))
    children = {side: Child(HERE / "calls_child.py", side, str(folder / side), args.clock) for side in ("ours", "vllm")}
    numbers = itertools.count()
    rng = random.Random(args.seed)
    results: list[CellResult] = []

    def ask(side: str, op: str) -> Callable[[], float]:
        return lambda: float(children[side].ask({"op": op, "round": next(numbers)}, calls=64)["rate"])

    try:
        cells = [Cell(OPERATIONS[op], ask("ours", op), ask("vllm", op)) for op in args.only or OPERATIONS]
        results += [run_cell(cell, args.rounds, rng) for cell in cells]
    finally:
        for child in children.values():
            child.close()
        shutil.rmtree(folder, ignore_errors=True)
    import vllm

    facts = machine_facts() | {"vllm": vllm.__version__, "rounds": str(args.rounds), "clock": args.clock}
    title = "Time on the calling thread against vLLM's fs tier"
    misses = verdict(results, WANTED, WANTED)
    mean = geometric_mean([result.ratio for result in results])
    found = judge("calls", not misses, f"{mean:.2f} times as fast; {len(misses) or 'nothing'} missed")
    publish(args, title, "1/s", results, facts, [f"- Missed: {miss}." for miss in misses] or ["Nothing missed."], [found])


if __name__ == "__main__":
    main()
