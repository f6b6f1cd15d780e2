"""What a tier's I/O takes from the engine's thread by sharing its interpreter: `python benchmarks/gil.py --folder /mnt/disk`.

A main loop in pure Python runs alone, beside a Tier over `fs` in its own process, and beside the same Tier in another process that moves as
many bytes a second: so both have the same device, processors and memory to share, and only one of them the interpreter. In a random order,
one after the other, in every round. *Points* are the slow-down of the loop with the Tier in its process, in per cent of its speed alone,
less the slow-down with the Tier in another one.

The loop is what vLLM's scheduler is to a tier: after each 5 ms of its own it polls, submits and flushes, and what that takes counts. I/O is
direct, of whole records, with the checksum taken or verified as the tier does. As many jobs as go are offered (*flat out*), or some MB/s.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from child import Child
from harness import RESAMPLES, filesystem_of, machine_facts
from targets import judge

from kvstore_sdk.bench.plot import Bar, bars

HERE = Path(__file__).parent
TITLE = "A main loop in pure Python beside a tier's I/O, in its process and in another"
SIZES = {"64 KiB": 64 << 10, "1 MiB": 1 << 20, "4 MiB": 4 << 20}
OPERATIONS = ("put", "get")
LEAD_S, SECONDS = 0.05, 0.25
MOST_POINTS = 5.0
SIDES = ("alone", "in", "out", "alone again")


@dataclass(frozen=True)
class Points:
    """One cell, by round: turns of the loop a second on each side, and what was moved meanwhile."""

    name: str
    loops: dict[str, list[float]]
    own: list[float]
    rates: dict[str, list[float]]
    points: float = field(init=False)
    interval: tuple[float, float] = field(init=False)
    lock_points: float = field(init=False)
    noise: tuple[float, float] = field(init=False)

    def __post_init__(self) -> None:
        alone = [(a + b) / 2 for a, b in zip(self.loops["alone"], self.loops["alone again"], strict=True)]
        found = [100 * (out - of) / base for of, out, base in zip(self.loops["in"], self.loops["out"], alone, strict=True)]
        own = [100 * (out - of) / base for of, out, base in zip(self.own, self.loops["out"], alone, strict=True)]
        same = [100 * (a - b) / base for a, b, base in zip(self.loops["alone"], self.loops["alone again"], alone, strict=True)]
        object.__setattr__(self, "points", statistics.fmean(found))
        object.__setattr__(self, "interval", interval(found))
        object.__setattr__(self, "lock_points", statistics.fmean(own))
        object.__setattr__(self, "noise", interval(same))

    def slow_down(self, side: str) -> float:
        """Of the loop, in per cent of its speed alone."""
        alone = statistics.fmean(self.loops["alone"] + self.loops["alone again"])
        return 100 * (1 - statistics.fmean(self.loops[side]) / alone)


def interval(values: Sequence[float], seed: int = 1) -> tuple[float, float]:
    """95 % interval of the mean, by resampling rounds."""
    rng = random.Random(seed)
    means = sorted(statistics.fmean(rng.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return means[int(RESAMPLES * 0.025)], means[int(RESAMPLES * 0.975)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--ways", default="direct", help="of rows: direct (records, as a host tier's), staged (an engine's), or both")
    parser.add_argument("--operations", default=",".join(OPERATIONS))
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--offered", default="200,0", help="MB/s; 0 for as many as go")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args()

    folder = Path(tempfile.mkdtemp(prefix="kvstore-bench-", dir=args.folder))
    rng = random.Random(args.seed)
    cells: list[Points] = []
    try:
        for way in args.ways.split(","):
            # Both are children, which loop and move alike.
            children = {side: Child(HERE / "gil_child.py", way, str(folder / side)) for side in ("loop", "move")}
            try:
                for size, op, offered in itertools.product(args.sizes.split(","), args.operations.split(","), args.offered.split(",")):
                    name = f"{way} {op} {size}, {f'{offered} MB/s' if float(offered) else 'flat out'}"
                    question = {"op": op, "bytes": SIZES[size], "rate": float(offered) * 1e6, "lead_s": LEAD_S, "seconds": SECONDS}
                    cells.append(run_cell(name, children, question, args.rounds, rng))
                    print(line(cells[-1]), flush=True)
            finally:
                for child in children.values():
                    child.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    facts = machine_facts() | {"filesystem": filesystem_of(args.folder), "rounds": str(args.rounds)}
    text = report(cells, facts)
    print("\n" + text)
    if args.json:
        body = {"title": TITLE, "unit": "points", "facts": facts, "targets": [found(cells)], "cells": [asdict(cell) for cell in cells]}
        args.json.write_text(json.dumps(body, indent=1) + "\n")
    if args.markdown:
        args.markdown.write_text(text)
    if args.svg:
        args.svg.write_text(plot(cells))


def run_cell(name: str, children: dict[str, Child], question: dict[str, Any], rounds: int, rng: random.Random) -> Points:
    """Every side once a round, after a round that is not counted. The other process moves what this one was seen to move, no more."""
    loops: dict[str, list[float]] = {side: [] for side in SIDES}
    rates: dict[str, list[float]] = {"in": [], "out": []}
    own: list[float] = []
    for child in children.values():
        child.ask({"do": "ready", **question})
    for number in range(rounds + 1):
        # In the first round in this order, so that it is known what is to be moved.
        for side in SIDES if not number else rng.sample(SIDES, len(SIDES)):
            found = ask(side, children, question | ({"rate": statistics.median(rates["in"])} if side == "out" else {}))
            loops[side].append(found["loop"])
            if side in rates:
                rates[side].append(found["rate"])
            if side == "in":
                own.append(found["own"])
    counted = {side: values[1:] for side, values in loops.items()}
    return Points(name, counted, own[1:], {side: values[1:] for side, values in rates.items()})


def ask(side: str, children: dict[str, Child], question: dict[str, Any]) -> dict[str, Any]:
    """One side, once: turns of the loop a second, and bytes that were moved a second."""
    if side != "out":
        return children["loop"].ask({"do": "both" if side == "in" else "loop", **question})
    with ThreadPoolExecutor(1) as pool:
        moving = pool.submit(children["move"].ask, {"do": "move", **question})
        found = children["loop"].ask({"do": "loop", **question})
        return found | {"rate": moving.result()["rate"]}


def line(cell: Points) -> str:
    """A row of the table."""
    rates = " | ".join(f"{statistics.median(cell.rates[side]) / 1e6:,.0f}" for side in ("in", "out"))
    slow = " | ".join(f"{cell.slow_down(side):.1f}" for side in ("in", "out"))
    low, high = cell.interval
    noise = f"{cell.noise[0]:.1f} to {cell.noise[1]:.1f}"
    return f"| {cell.name} | {rates} | {slow} | {cell.points:.1f} | {low:.1f} to {high:.1f} | {cell.lock_points:.1f} | {noise} |"


def report(cells: Sequence[Points], facts: dict[str, str]) -> str:
    """A Markdown section."""
    head = [
        f"## {TITLE}",
        "",
        ", ".join(f"{name} {value}" for name, value in facts.items()) + ".",
        "",
        "| cell | moved in its process, MB/s | in another, MB/s | slow-down in its process, % | in another, % | points | 95 % interval "
        "| points without the tier's calls | alone / alone (noise), points |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    misses = [
        f"- Missed: {cell.name}: {cell.points:.1f} ({cell.interval[0]:.1f} to {cell.interval[1]:.1f}), wanted {MOST_POINTS:.0f} at most."
        for cell in cells
        if cell.points > MOST_POINTS
    ]
    mean = statistics.fmean(cell.points for cell in cells)
    return (
        "\n".join([*head, *map(line, cells), "", f"Mean over the cells: **{mean:.1f}** points.", "", *(misses or ["Nothing missed."])])
        + "\n"
    )


def plot(cells: Sequence[Points]) -> str:
    """Points and their interval, a bar for each cell, as SVG. What is below 0 has no bar."""
    groups = {cell.name: {"points": Bar(cell.points, *cell.interval)} for cell in cells}
    title = "Slow-down of a main loop by I/O in its process less that by I/O in another"
    return bars(title, "points, 95 % intervals", groups, mark=MOST_POINTS, text="{:.1f}")


def found(cells: Sequence[Points]) -> dict[str, str | bool]:
    """What is said of the target: every cell has to meet it."""
    worst = max(cells, key=lambda cell: cell.points)
    mean = statistics.fmean(cell.points for cell in cells)
    text = (
        f"{worst.points:.1f} points ({worst.interval[0]:.1f} to {worst.interval[1]:.1f}) at most, {worst.name}; {mean:.1f} over all cells"
    )
    return judge("gil", worst.points <= MOST_POINTS, text)


if __name__ == "__main__":
    main()
