"""The `fs` backend, integrity on, against the file I/O of vLLM's own fs tier: `python benchmarks/fs.py --folder /mnt/disk`.

Rates are payload MB/s. Every put stores chunks of new names in folders that are there; nothing is deleted before a mode is done, since a
filesystem that is freeing blocks is slow at creating files. It takes some 15 GB. Direct cells are judged, buffered ones are shown: what a
page cache does with a write says little about a store.
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
from harness import Cell, CellResult, filesystem_of, machine_facts, report, run_cell, save, verdict

HERE = Path(__file__).parent
BYTES_PER_ROUND = 64 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the filesystem to measure")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sizes", default="128KiB,1MiB,4MiB")
    parser.add_argument("--threads", default="1,8")
    parser.add_argument("--modes", default="direct,buffered")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()

    folder = Path(tempfile.mkdtemp(prefix="kvstore-bench-", dir=args.folder))
    results: list[CellResult] = []
    rng = random.Random(args.seed)
    try:
        for mode in args.modes.split(","):
            folder.mkdir(exist_ok=True)
            children = {side: Child(HERE / "fs_child.py", side, str(folder / f"{side}-{mode}"), mode) for side in ("ours", "vllm")}
            for size, threads in itertools.product(map(parse_size, args.sizes.split(",")), map(int, args.threads.split(","))):
                results += compare(children, mode, size, threads, args.rounds, rng)
                print("\n".join(report("so far", "MB/s", results, {}).splitlines()[6:]), flush=True)
            for child in children.values():
                child.close()
            shutil.rmtree(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    facts = machine_facts() | {"filesystem": filesystem_of(args.folder), "rounds": str(args.rounds)}
    title = "fs backend against vLLM's fs tier I/O"
    text = report(title, "MB/s", results, facts)
    text += "\n" + ("\n".join(f"- Missed: {miss}." for miss in verdict(results, 0.9, 0.85)) or "Nothing missed.") + "\n"
    print(text)
    if args.json:
        save(args.json, title, "MB/s", results, facts)
    if args.markdown:
        args.markdown.write_text(text)


def compare(children: dict[str, Child], mode: str, size: int, threads: int, rounds: int, rng: random.Random) -> list[CellResult]:
    """A put cell and a get cell."""
    chunks = max(threads, BYTES_PER_ROUND // size)
    megabytes = chunks * size / 1e6

    def ask(side: str, op: str, tag: str) -> float:
        question = {"op": op, "chunk_bytes": size, "threads": threads, "chunks": chunks, "tag": tag}
        # The C module is called once a batch; counting chunks errs on the safe side.
        return megabytes / children[side].ask(question, calls=chunks)["seconds"]

    cell = f"{size}-{threads}"
    numbers = itertools.count()

    def put(side: str) -> Callable[[], float]:
        return lambda: ask(side, "put", f"{cell}-{next(numbers)}")

    def get(side: str) -> Callable[[], float]:
        return lambda: ask(side, "get", cell)

    name = f"{size >> 10} KiB, {threads} thread{'s' if threads > 1 else ''}, {mode}"
    judged = mode == "direct"
    stored = run_cell(Cell(f"put {name}", put("ours"), put("vllm"), judged), rounds, rng)
    for side in ("ours", "vllm"):
        ask(side, "put", cell)
    loaded = run_cell(Cell(f"get {name}", get("ours"), get("vllm"), judged), rounds, rng)
    return [stored, loaded]


def parse_size(text: str) -> int:
    for suffix, factor in (("KiB", 1 << 10), ("MiB", 1 << 20)):
        if text.endswith(suffix):
            return int(text.removesuffix(suffix)) * factor
    return int(text)


if __name__ == "__main__":
    main()
