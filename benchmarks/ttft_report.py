"""What times to the first token say: ratios beside recomputing and beside another tier, and from which length of a prompt a tier pays."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore_sdk.bench.plot import Bar, bars, lines
from kvstore_sdk.bench.statistics import Ratio, ratio_of

__all__ = ["Line", "Times", "break_even_section", "crossing", "fit", "pays_from", "plot", "ratio", "side_section"]


@dataclass
class Times:
    """Seconds to the first token of one side, by length of the prompt in tokens, round by round; `again` is the same side again."""

    first: dict[int, list[float]] = field(default_factory=dict)
    again: dict[int, list[float]] = field(default_factory=dict)

    def add(self, tokens: int, column: str, seconds: float) -> None:
        (self.again if column == "again" else self.first).setdefault(tokens, []).append(seconds)

    def median_ms(self, tokens: int) -> float:
        return statistics.median(self.first[tokens]) * 1e3


class Line(NamedTuple):
    """Seconds to the first token of a prompt of n tokens: `fixed_s + n * token_s`."""

    fixed_s: float
    token_s: float


def ratio(times: Times, other: Times, tokens: int) -> Ratio:
    """How many times as fast `times` is as `other`, above 1 where it is faster."""
    return ratio_of(other.first[tokens], times.first[tokens])


def fit(times: Times) -> Line:
    """Least squares through the medians of each length, in relative errors: short prompts count as much as long ones.

    Raises:
        ValueError: there are fewer than two lengths.
    """
    points = [(float(tokens), statistics.median(seconds)) for tokens, seconds in sorted(times.first.items())]
    if len(points) < 2:
        raise ValueError(f"a line needs two lengths, there are {len(points)}")
    weights = [1 / seconds**2 for _, seconds in points]
    whole = sum(weights)
    x = sum(w * p[0] for w, p in zip(weights, points, strict=True)) / whole
    y = sum(w * p[1] for w, p in zip(weights, points, strict=True)) / whole
    slope = sum(w * (p[0] - x) * (p[1] - y) for w, p in zip(weights, points, strict=True)) / sum(
        w * (p[0] - x) ** 2 for w, p in zip(weights, points, strict=True)
    )
    return Line(y - slope * x, slope)


def crossing(compute: Line, tier: Line) -> float | None:
    """The length in tokens from which on the tier is the faster one; 0 where it always is, None where it never is."""
    gain_s = compute.token_s - tier.token_s
    if gain_s <= 0:
        return None
    return max(0.0, (tier.fixed_s - compute.fixed_s) / gain_s)


def pays_from(tier: Times, compute: Times) -> int | None:
    """The shortest measured length at which the tier is faster than computing beyond noise, as at each longer one."""
    found = None
    for tokens in sorted(tier.first, reverse=True):
        if ratio(tier, compute, tokens).low <= 1:
            break
        found = tokens
    return found


def side_section(names: Mapping[str, str], times: Mapping[str, Times], tokens: int, compute: str, rival: str | None) -> list[str]:
    """A Markdown table: a row for each side."""
    beside_whom = f"times as fast as {names[rival]}" if rival else "beside nobody"
    rows = [
        f"| side | ms, median | times as fast as recomputing | {beside_whom} | same / same (noise) |",
        "|---|---|---|---|---|",
    ]
    for side, found in times.items():
        beside = str(ratio(found, times[rival], tokens)) if rival and side not in (compute, rival) else ""
        faster = str(ratio(found, times[compute], tokens)) if side != compute else ""
        noise = ratio_of(found.again[tokens], found.first[tokens])
        rows.append(f"| {names[side]} | {found.median_ms(tokens):,.0f} | {faster} | {beside} | {noise.low:.2f} to {noise.high:.2f} |")
    return rows


def break_even_section(names: Mapping[str, str], times: Mapping[str, Times], compute: str, cached: str, token_bytes: int) -> list[str]:
    """Two Markdown tables: medians by length, and what a line through them says.

    A token's share of MB/s is what it takes beside a prompt in the engine's own cache, `cached`, where that is among the sides.
    """
    swept = {side: found for side, found in times.items() if len(found.first) > 1}
    lengths = sorted(swept[compute].first)
    rows = [f"| side | {' | '.join(f'{tokens} tokens, ms' for tokens in lengths)} |", "|---" * (len(lengths) + 1) + "|"]
    rows += [f"| {names[side]} | {' | '.join(f'{found.median_ms(tokens):,.0f}' for tokens in lengths)} |" for side, found in swept.items()]
    rows += [
        "",
        "| side | fixed, ms | a token, us | MB/s | pays from, tokens (line) | pays from, tokens (measured) |",
        "|---|---|---|---|---|---|",
    ]
    computed = fit(swept[compute])
    for side, found in swept.items():
        line = fit(found)
        moved_s = line.token_s - (fit(swept[cached]).token_s if cached in swept else 0.0)
        rate = f"{token_bytes / moved_s / 1e6:,.0f}" if side not in (compute, cached) and moved_s > 0 else ""
        if side == compute:
            ends = ["", ""]
        else:
            at, seen = crossing(computed, line), pays_from(found, swept[compute])
            ends = ["never" if at is None else f"{at:,.0f}", "at none" if seen is None else str(seen)]
        rows.append(f"| {names[side]} | {line.fixed_s * 1e3:,.1f} | {line.token_s * 1e6:,.0f} | {rate} | {' | '.join(ends)} |")
    return rows


def plot(names: Mapping[str, str], times: Mapping[str, Times], tokens: int, compute: str) -> str:
    """SVG: by length where lengths were measured, otherwise a bar for each side."""
    swept: dict[str, Sequence[tuple[float, float]]] = {
        names[side]: [(length, found.median_ms(length)) for length in sorted(found.first)]
        for side, found in times.items()
        if len(found.first) > 1
    }
    if len(swept) > 1:
        return lines("Time to the first token", "tokens of the prompt", "ms", swept, log=False)
    found = {names[side]: ratio(of, times[compute], tokens) for side, of in times.items() if side != compute}
    groups = {name: {"times as fast": Bar(*faster)} for name, faster in found.items()}
    return bars(f"First token of {tokens} tokens, times as fast as recomputing", "times", groups, mark=1.0)
