"""The `fs` backend, integrity on, against the file I/O of vLLM's own fs tier: `python benchmarks/fs.py --folder /mnt/disk`.

Rates are payload MB/s. Every put stores chunks of new names in folders that are there, and what a size took is removed before the next one.
It takes some 14 GB and, with the default rounds, eight minutes. Modes:

    direct      past the page cache; judged, over all cells and over each size
    warm        gets of what the page cache holds; judged
    cold        gets through the page cache of files that it has forgotten; shown
    buffered    puts into the page cache, which say little about a store; shown
    unchecked   direct, ours without seal and verify: what integrity costs; shown

What is only shown is measured with one number of threads, the second of `--threads`, and half the rounds.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from child import Child
from harness import Cell, CellResult, add_outputs, bootstrap, filesystem_of, geometric_mean, machine_facts, publish, report, run_cell
from targets import judge

HERE = Path(__file__).parent
SIDES = ("ours", "vllm")
SMALL_BYTES = 128 << 10
SETTLE_S = 1.0


@dataclass(frozen=True)
class Mode:
    """How files are read and written, and which operations are compared."""

    direct: bool
    operations: tuple[str, ...]
    judged: bool = False
    checks: bool = True
    drop: bool = False


MODES = {
    "direct": Mode(True, ("put", "get"), judged=True),
    "warm": Mode(False, ("get",), judged=True),
    "cold": Mode(False, ("get",), drop=True),
    "buffered": Mode(False, ("put",)),
    "unchecked": Mode(True, ("put", "get"), checks=False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the filesystem to measure")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sizes", type=parse_sizes, default="32KiB,128KiB,512KiB,1MiB,4MiB,16MiB")
    parser.add_argument("--threads", type=parse_numbers, default="1,8,16")
    parser.add_argument("--modes", type=parse_modes, default=",".join(MODES))
    add_outputs(parser)
    args = parser.parse_args()

    folder = Path(tempfile.mkdtemp(prefix="kvstore-bench-", dir=args.folder))
    results: list[CellResult] = []
    rng = random.Random(args.seed)
    children = {side: Child(HERE / "fs_child.py", side) for side in SIDES}
    try:
        for mode, size in itertools.product(args.modes, args.sizes):
            shown = args.threads[min(1, len(args.threads) - 1)]
            for threads in args.threads if MODES[mode].judged else [shown]:
                rounds = args.rounds if MODES[mode].judged else max(2, args.rounds // 2)
                found = compare(children, folder / f"{mode}-{size}", mode, size, threads, rounds, rng)
                print("\n".join(report("", "MB/s", found, {}).splitlines()[6:-2]), flush=True)
                results += found
            shutil.rmtree(folder / f"{mode}-{size}")
            # A filesystem that is freeing blocks is slow at creating files.
            os.sync()
            time.sleep(SETTLE_S)
    finally:
        for child in children.values():
            child.close()
        shutil.rmtree(folder, ignore_errors=True)
    facts = machine_facts() | {"filesystem": filesystem_of(args.folder), "rounds": str(args.rounds)}
    by_size = [(name_of(size), [r for r in direct(results) if f" {name_of(size)}," in r.name]) for size in args.sizes]
    notes = [f"- Direct, {name}: {told(cells)}." for name, cells in by_size if cells]
    if warm := [r for r in results if r.name.endswith(", warm")]:
        notes.append(f"- Warm gets: {told(warm)}.")
    publish(args, "fs backend against vLLM's fs tier I/O", "MB/s", results, facts, notes, judged(results, by_size))


def direct(results: Sequence[CellResult]) -> list[CellResult]:
    return [r for r in results if r.name.endswith(", direct")]


def mean(cells: Sequence[CellResult]) -> float:
    return geometric_mean([r.ratio for r in cells])


def told(cells: Sequence[CellResult]) -> str:
    """The mean over cells, with the interval over their rounds."""
    low, high = bootstrap(rounds_of(cells))
    return f"{mean(cells):.2f} ({low:.2f} to {high:.2f})"


def rounds_of(cells: Sequence[CellResult]) -> list[float]:
    """For each round the mean over the cells."""
    return [geometric_mean([a / b for a, b in pairs]) for pairs in zip(*(zip(r.ours, r.theirs, strict=True) for r in cells), strict=True)]


def judged(results: Sequence[CellResult], by_size: Sequence[tuple[str, Sequence[CellResult]]]) -> list[dict[str, str | bool]]:
    """What this run says of the targets: of those whose cells it has."""
    found = []
    if cells := direct(results):
        found.append(judge("fs", mean(cells) >= 1.0, told(cells)))
        told_sizes = ", ".join(f"{name} {told(of_size)}" for name, of_size in by_size if of_size)
        found.append(judge("fs-sizes", all(mean(of_size) >= 1.0 for _, of_size in by_size if of_size), told_sizes))
    if warm := [r for r in results if r.name.endswith(", warm")]:
        found.append(judge("fs-warm", mean(warm) >= 0.9, told(warm)))
    return found


def compare(
    children: dict[str, Child], folder: Path, mode: str, size: int, threads: int, rounds: int, rng: random.Random
) -> list[CellResult]:
    """A cell for each operation of the mode."""
    how = MODES[mode]
    chunks = max(threads, bytes_per_round(size) // size)
    megabytes = chunks * size / 1e6

    def ask(side: str, op: str, tag: str) -> float:
        place = {"folder": str(folder / side), "direct": how.direct, "drop": how.drop and op == "get", "checks": how.checks}
        question = {"op": op, "chunk_bytes": size, "threads": threads, "chunks": chunks, "tag": tag} | place
        # The C module is called once a batch, of 16 or fewer.
        return megabytes / children[side].ask(question, calls=chunks // 16 + threads)["seconds"]

    cell = f"{size}-{threads}"
    numbers = itertools.count()

    def put(side: str) -> Callable[[], float]:
        return lambda: ask(side, "put", f"{cell}-{next(numbers)}")

    def get(side: str) -> Callable[[], float]:
        return lambda: ask(side, "get", cell)

    folder.mkdir(parents=True, exist_ok=True)
    name = f"{name_of(size)}, {threads} thread{'s' if threads > 1 else ''}, {mode}"
    results = []
    if "put" in how.operations:
        results.append(run_cell(Cell(f"put {name}", put("ours"), put("vllm"), how.judged), rounds, rng))
    if "get" in how.operations:
        for side in SIDES:
            ask(side, "put", cell)
        # What is still to be written would be written while it is read.
        os.sync()
        results.append(run_cell(Cell(f"get {name}", get("ours"), get("vllm"), how.judged), rounds, rng))
    return results


def bytes_per_round(size: int) -> int:
    """Less for what is slow, more for what is fast."""
    return 32 << 20 if size < SMALL_BYTES else 64 << 20


def name_of(size: int) -> str:
    return f"{size >> 10} KiB"


def parse_size(text: str) -> int:
    for suffix, factor in (("KiB", 1 << 10), ("MiB", 1 << 20)):
        if text.endswith(suffix):
            return int(text.removesuffix(suffix)) * factor
    return int(text)


def parse_sizes(text: str) -> list[int]:
    return [parse_size(size) for size in text.split(",")]


def parse_numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def parse_modes(text: str) -> list[str]:
    modes = text.split(",")
    if unknown := set(modes) - set(MODES):
        raise argparse.ArgumentTypeError(f"no mode {', '.join(sorted(unknown))}; there are {', '.join(MODES)}")
    return modes


if __name__ == "__main__":
    main()
