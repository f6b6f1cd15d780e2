"""Side-by-side timing: interleaved rounds, a ratio for each round, an interval, and an A/A column that shows what noise alone does.

A single cell on a shared machine differs from itself by a third. So nothing here compares two numbers that were not taken next to each
other: each round runs *ours*, *theirs* and *ours again* in a random order, and gives one ratio ours/theirs and one ratio ours/ours. Ratios
are averaged geometrically; the interval is a bootstrap over rounds.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

RESAMPLES = 2000


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


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))


def bootstrap(ratios: Sequence[float], seed: int = 1) -> tuple[float, float]:
    """95 % interval of the geometric mean of `ratios`, by resampling rounds."""
    rng = random.Random(seed)
    logs = [math.log(ratio) for ratio in ratios]
    means = sorted(statistics.fmean(rng.choices(logs, k=len(logs))) for _ in range(RESAMPLES))
    return math.exp(means[int(RESAMPLES * 0.025)]), math.exp(means[int(RESAMPLES * 0.975)])


def machine_facts() -> dict[str, str]:
    """What a reader needs to judge the figures."""
    model = next((line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), platform.machine())
    memory_kib = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": f"{os.cpu_count()} x {model}",
        "memory": f"{memory_kib / 2**20:.0f} GiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def filesystem_of(path: Path) -> str:
    """Type of the filesystem that holds `path`."""
    found = [line.split()[1:3] for line in _lines("/proc/mounts")]
    return max((mount for mount in found if path.resolve().is_relative_to(mount[0])), key=lambda mount: len(mount[0]))[1]


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


def save(path: Path, title: str, unit: str, results: Sequence[CellResult], facts: dict[str, str]) -> None:
    """All rates by round, as JSON."""
    body = {"title": title, "unit": unit, "facts": facts, "cells": [dataclasses.asdict(r) for r in results]}
    path.write_text(json.dumps(body, indent=1) + "\n")


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
