"""What it costs to have a backend in a child process: `python benchmarks/isolation.py --folder /mnt/disk`.

A Tier over `fs`, called in three ways: by threads in the engine's process, by threads that wait for a child process, and in a child whose
answers the engine's thread takes when it comes by. With a main thread that is idle, one that is busy in pure Python all the time, and one
that waits half of it; with records that are staged, and with those that a host tier holds.

What is compared is who gets the interpreter, so the machine must have two cores to spare: where others wait for them too, whoever has more
threads wins. `chrt -r 1` keeps others away from a machine that is shared.
"""

from __future__ import annotations

import argparse
import itertools
import random
import shutil
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from child import Child
from harness import CellResult, filesystem_of, machine_facts, report, save

HERE = Path(__file__).parent
SIZES = {"64 KiB": (64 << 10, 512), "1 MiB": (1 << 20, 64)}
"""Of a chunk, and how many."""
STEPS = {"idle": (0.0, 0.0005), "busy": (0.005, 0.0), "half busy": (0.005, 0.005)}
"""Of the main thread: seconds of pure Python, and of sleep."""
SIDES = ("threads", "isolated", "polled")
PAIRS = (("polled", "threads"), ("polled", "isolated"), ("isolated", "threads"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--ways", default="direct,staged")
    parser.add_argument("--operations", default="put,get")
    parser.add_argument("--steps", default=",".join(STEPS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()

    folder = Path(tempfile.mkdtemp(prefix="kvstore-bench-", dir=args.folder))
    rng = random.Random(args.seed)
    facts = machine_facts() | {"filesystem": filesystem_of(args.folder), "rounds": str(args.rounds)}
    results: dict[str, list[CellResult]] = defaultdict(list)
    engine = "## The engine's thread\n\n| cell | side | us of its CPU time in the tier, a chunk | share of the time for its own work |\n"
    engine += "|---|---|---|---|\n"
    try:
        for way in args.ways.split(","):
            children = {side: Child(HERE / "isolation_child.py", side, way, str(folder)) for side in SIDES}
            try:
                for op, size, step in itertools.product(args.operations.split(","), SIZES, args.steps.split(",")):
                    cell = f"{way} {op} {size}, {step}"
                    length, chunks = SIZES[size]
                    busy_s, sleep_s = STEPS[step]
                    question = {"op": op, "bytes": length, "chunks": chunks, "busy_s": busy_s, "sleep_s": sleep_s}
                    seen = rounds_of(children, question, args.rounds, rng)
                    rates = {side: [answer["rate"] / 1e6 for answer in answers] for side, answers in seen.items()}
                    for ours, theirs in PAIRS:
                        again = rates["polled again" if ours == "polled" else "isolated again"]
                        results[f"{ours} (ours) against {theirs} (theirs)"].append(
                            CellResult(cell, True, rates[ours], rates[theirs], again)
                        )
                    for side in SIDES:
                        cpu_us, kept = (statistics.median(answer[what] for answer in seen[side]) for what in ("cpu_us", "kept"))
                        engine += f"| {cell} | {side} | {cpu_us:.0f} | {kept:.2f} |\n"
                    print(cell, {side: round(statistics.median(of)) for side, of in rates.items()}, file=sys.stderr)
            finally:
                for child in children.values():
                    child.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    text = "\n".join(report(title, "MB/s", cells, facts) for title, cells in results.items()) + "\n" + engine
    print(text)
    if args.json:
        save(args.json, "Isolation", "MB/s", [cell for cells in results.values() for cell in cells], facts)
    if args.markdown:
        args.markdown.write_text(text)


def rounds_of(children: dict[str, Child], question: dict[str, Any], rounds: int, rng: random.Random) -> dict[str, list[dict[str, Any]]]:
    """Ask each side once a round, in a random order, and those that run in a child a second time, after a round that is not counted."""
    seen: dict[str, list[dict[str, Any]]] = {name: [] for name in (*SIDES, "polled again", "isolated again")}
    for number in range(rounds + 1):
        for name in rng.sample(list(seen), len(seen)):
            # Keys of its own for each: what is there already is not stored.
            answer = children[name.split()[0]].ask(question | {"round": f"{question} {number} {name}"})
            if number:
                seen[name].append(answer)
    return seen


if __name__ == "__main__":
    main()
