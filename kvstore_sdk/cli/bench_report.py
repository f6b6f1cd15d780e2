"""What `kvstore bench` found, as tables for people and as a plot."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from kvstore_sdk.bench.cells import AGAIN, AGAINST, FIO, MEMCPY, PLAIN, TARGET, UNSEALED, Cell, Latency
from kvstore_sdk.bench.plot import Bar, bars
from kvstore_sdk.bench.statistics import bootstrap, geometric_mean
from kvstore_sdk.cli.table import columns

__all__ = ["Results", "markdown", "picture", "text"]

_MOVES = ("put", "get")
_RATIOS = (AGAINST, PLAIN, FIO)


class Results(NamedTuple):
    """All that one run found."""

    cells: Sequence[Cell]
    latencies: Sequence[Latency]
    facts: dict[str, str]
    notes: Sequence[str]


class _Table(NamedTuple):
    title: str
    rows: list[list[str]]


def text(results: Results) -> str:
    """For a terminal."""
    parts = [f"{title}\n{columns(rows, indent='  ')}" for title, rows in _tables(results)]
    return "\n\n".join([*parts, "\n".join([*_sums(results), *_notes(results), _facts(results)])])


def markdown(results: Results) -> str:
    """For a page."""
    lines = [f"## kvstore bench of {results.facts['target']}", "", _facts(results) + "."]
    for title, [head, *rows] in _tables(results):
        lines += ["", f"{title}:", "", _row(head), _row(["---"] * len(head)), *map(_row, rows)]
    return "\n".join([*lines, "", *(f"- {line}." for line in [*_sums(results), *_notes(results)])]) + "\n"


def picture(results: Results) -> str:
    """Rates of puts and gets with their intervals, as SVG."""
    groups = {}
    for cell in [cell for cell in results.cells if cell.operation in _MOVES]:
        label = f"{cell.name}, {_size(cell.payload_bytes)}, {cell.threads} thread{'s' if cell.threads > 1 else ''}"
        groups[label] = {side: _bar([rate * cell.payload_bytes / 1e6 for rate in cell.rates[side]]) for side in _sides([cell])}
    title = f"kvstore bench of {results.facts['target']}"
    return bars(title, "MB/s of payload, geometric means of rounds with 95 % intervals", groups, text="{:,.0f}")


def _bar(rates: Sequence[float]) -> Bar:
    # As for ratios.
    return Bar(geometric_mean(rates), *(bootstrap(rates) if len(rates) > 2 else ()))


def _sides(cells: Sequence[Cell]) -> list[str]:
    """In the order in which they are explained, whichever came first in a round."""
    sides = {side for cell in cells for side in cell.rates} - {AGAIN, MEMCPY}
    return sorted(sides, key=[TARGET, UNSEALED, AGAINST, PLAIN, FIO].index)


def _tables(results: Results) -> list[_Table]:
    moves = [cell for cell in results.cells if cell.operation in _MOVES]
    names = [cell for cell in results.cells if cell.operation not in _MOVES]
    found = []
    if moves:
        found.append(_rates("MB/s of payload, medians of rounds", moves, 1e6, [MEMCPY]))
    if names:
        found.append(_rates("records a second, medians of rounds", names, None, []))
    if results.latencies:
        head = ["milliseconds, one record at a time", "side", "record", "p50", "p99", "samples"]
        rows = [
            [f"{one.operation} {one.place}".rstrip(), one.side, _size(one.payload_bytes), _ms(one.p50_s), _ms(one.p99_s), str(one.samples)]
            for one in results.latencies
        ]
        found.append(_Table("Latency", [head, *rows]))
    return found


def _rates(title: str, cells: Sequence[Cell], divisor: float | None, last: list[str]) -> _Table:
    """A column for each side; ratios with their intervals; and how far the target is from itself."""
    sides = _sides(cells)
    others = [side for side in _RATIOS if side in sides]
    head = ["operation", "record", "threads", *sides, *last, *(f"target / {side}" for side in others), "target / target (noise)", "rounds"]
    rows = []
    for cell in cells:
        factor = cell.payload_bytes / divisor if divisor else 1.0
        rates = [f"{statistics.median(cell.rates[side]) * factor:,.0f}" if side in cell.rates else "" for side in [*sides, *last]]
        ratios = [_ratio(cell, side) for side in [*others, AGAIN]]
        rows.append([cell.name, _size(cell.payload_bytes), str(cell.threads), *rates, *ratios, str(len(cell.rates.get(TARGET, [])))])
    return _Table(title, [head, *rows])


def _ratio(cell: Cell, side: str) -> str:
    found = cell.ratio(TARGET, side)
    if found is None:
        return ""
    # Of one or two rounds an interval would say that there is no doubt.
    return str(found) if len(cell.rates[side]) > 2 else f"{found.mean:.2f}"


def _sums(results: Results) -> list[str]:
    """The geometric mean over all puts and gets, for each side that the target is compared with."""
    said = []
    for side in _RATIOS:
        ratios = [ratio.mean for cell in results.cells if cell.operation in _MOVES and (ratio := cell.ratio(TARGET, side))]
        if ratios:
            said.append(f"geometric mean over puts and gets: {geometric_mean(ratios):.2f} of {side}")
    return said


def _notes(results: Results) -> list[str]:
    return [f"note: {note}" for note in results.notes]


def _facts(results: Results) -> str:
    return ", ".join(f"{name} {value}" for name, value in results.facts.items())


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


def _size(count: int) -> str:
    """Whole units, as options are written."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count % factor == 0:
            return f"{count // factor} {unit}"
    return f"{count} B"
