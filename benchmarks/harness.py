"""Side-by-side timing: interleaved rounds, a ratio for each round, an interval, and an A/A column that shows what noise alone does.

A single cell on a shared machine differs from itself by a third. So nothing here compares two numbers that were not taken next to each
other: each round runs *ours*, *theirs* and *ours again* in a random order, and gives one ratio ours/theirs and one ratio ours/ours. Ratios
are averaged geometrically; the interval is a bootstrap over rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvstore_sdk.bench.machine import filesystem_of, machine_facts
from kvstore_sdk.bench.plot import Bar, bars
from kvstore_sdk.bench.statistics import RESAMPLES, bootstrap, geometric_mean

__all__ = [
    "RESAMPLES",
    "Cell",
    "CellResult",
    "add_outputs",
    "bootstrap",
    "chart",
    "filesystem_of",
    "geometric_mean",
    "machine_facts",
    "publish",
    "report",
    "run_cell",
    "save",
    "verdict",
]


@dataclass(frozen=True)
class Cell:
    """One thing that is compared. `ours` and `theirs` do it once and return a rate: higher is better."""

    name: str
    ours: Callable[[], float]
    theirs: Callable[[], float]
    judged: bool = True


@dataclass(frozen=True)
class CellResult:
    """Rates by round, and what follows from them."""

    name: str
    judged: bool
    ours: list[float]
    theirs: list[float]
    again: list[float]
    ratio: float = field(init=False)
    interval: tuple[float, float] = field(init=False)
    noise: tuple[float, float] = field(init=False)

    def __post_init__(self) -> None:
        ratios = [a / b for a, b in zip(self.ours, self.theirs, strict=True)]
        same = [a / b for a, b in zip(self.ours, self.again, strict=True)]
        object.__setattr__(self, "ratio", geometric_mean(ratios))
        object.__setattr__(self, "interval", bootstrap(ratios))
        object.__setattr__(self, "noise", bootstrap(same))


def run_cell(cell: Cell, rounds: int, rng: random.Random) -> CellResult:
    """Run `rounds` rounds after one that is not counted."""
    seen: dict[str, list[float]] = {"ours": [], "theirs": [], "again": []}
    for number in range(rounds + 1):
        order = list(seen)
        rng.shuffle(order)
        for side in order:
            rate = cell.theirs() if side == "theirs" else cell.ours()
            if number:
                seen[side].append(rate)
    return CellResult(cell.name, cell.judged, seen["ours"], seen["theirs"], seen["again"])


def verdict(results: Sequence[CellResult], mean: float, least: float) -> list[str]:
    """What speaks against *ours* keeping up: the geometric mean over the judged cells, and each whose whole interval lies below `least`."""
    judged = [r for r in results if r.judged]
    over_all = geometric_mean([r.ratio for r in judged])
    misses = [f"geometric mean {over_all:.2f}, wanted {mean:.2f}"] if over_all < mean else []
    return misses + [f"{r.name}: {r.interval[0]:.2f} to {r.interval[1]:.2f}, wanted {least:.2f}" for r in judged if r.interval[1] < least]


def report(title: str, unit: str, results: Sequence[CellResult], facts: dict[str, str]) -> str:
    """A Markdown section: one row a cell, the geometric mean over the judged ones below."""
    lines = [
        f"## {title}",
        "",
        ", ".join(f"{name} {value}" for name, value in facts.items()) + ".",
        "",
        f"| cell | ours, {unit} | theirs, {unit} | ours / theirs | 95 % interval | ours / ours (noise) | judged |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.name} | {statistics.median(r.ours):,.0f} | {statistics.median(r.theirs):,.0f} | {r.ratio:.2f} "
        f"| {r.interval[0]:.2f} to {r.interval[1]:.2f} | {r.noise[0]:.2f} to {r.noise[1]:.2f} | {'yes' if r.judged else 'no'} |"
        for r in results
    ]
    if judged := [r.ratio for r in results if r.judged]:
        lines += ["", f"Geometric mean over the judged cells: **{geometric_mean(judged):.2f}**."]
    return "\n".join(lines) + "\n"


def save(
    path: Path,
    title: str,
    unit: str,
    results: Sequence[CellResult],
    facts: dict[str, str],
    targets: Sequence[dict[str, str | bool]] = (),
) -> None:
    """All rates by round, as JSON; and what `targets.judge` says of them."""
    body = {"title": title, "unit": unit, "facts": facts, "targets": list(targets), "cells": [dataclasses.asdict(r) for r in results]}
    path.write_text(json.dumps(body, indent=1) + "\n")


def chart(title: str, results: Sequence[CellResult]) -> str:
    """The ratios with their intervals, as SVG: each cell's, and beside it what noise alone does to ours against itself."""
    cells = {
        r.name: {
            "ours / theirs": Bar(r.ratio, *r.interval),
            "ours / ours (noise)": Bar(geometric_mean([a / b for a, b in zip(r.ours, r.again, strict=True)]), *r.noise),
        }
        for r in results
    }
    return bars(title, "ratio of rates, 95 % intervals", cells, mark=1.0, text="{:.2f}")


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Add `--json`, `--markdown` and `--svg`: files that `publish` writes."""
    for name, what in (("json", "all rates by round"), ("markdown", "the table"), ("svg", "a plot of the ratios")):
        parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=f"{what} goes here, too")


def publish(
    args: argparse.Namespace,
    title: str,
    unit: str,
    results: Sequence[CellResult],
    facts: dict[str, str],
    notes: Sequence[str] = (),
    targets: Sequence[dict[str, str | bool]] = (),
) -> None:
    """Print the report with `notes` below it, a line each, and write the files that `add_outputs` was told. `targets`: as `save`."""
    text = report(title, unit, results, facts) + "".join(f"\n{note}\n" for note in notes)
    print(text)
    if args.json:
        save(args.json, title, unit, results, facts, targets)
    if args.markdown:
        args.markdown.write_text(text)
    if args.svg:
        args.svg.write_text(chart(title, results))
