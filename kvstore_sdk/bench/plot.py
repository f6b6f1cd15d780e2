"""Small plots as SVG, without a plotting library: grouped bars with intervals, and lines. Readable on light and on dark pages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

__all__ = ["Bar", "bars", "lines"]

_STYLE = """
text{font-family:sans-serif;fill:#24292f}.grid{stroke:#d0d7de;stroke-width:1}.mark{stroke:#57606a;stroke-width:1.5;stroke-dasharray:4 3}
.whisker{stroke:#24292f;stroke-width:1.3}.page{fill:#fff}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.grid{stroke:#30363d}.mark{stroke:#8b949e}.whisker{stroke:#e6edf3}.page{fill:#0d1117}}
"""
# Told apart in both themes, and by most people who see fewer colours.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999999")
_WIDTH, _RIGHT, _TOP = 960, 70, 66
_BAR, _GAP = 13, 12
_LETTER = 6.4
"""Width of a letter of size 11, about."""
_SMALLEST = 1e-12
"""On an axis: nothing that is measured here is smaller, and its powers of ten are numbers."""


class Bar(NamedTuple):
    """A value, and the interval that is drawn over it, if it has one. Not below 0."""

    value: float
    low: float | None = None
    high: float | None = None


def bars(title: str, unit: str, groups: Mapping[str, Mapping[str, Bar]], *, mark: float | None = None, text: str = "{:.3g}") -> str:
    """Horizontal bars from 0, in groups, one below the other.

    Args:
        title: Above the plot.
        unit: Of the axis.
        groups: Bars by name, by the name of the group. The same name has the same colour everywhere. What is no finite number has no bar.
        mark: A value with a line of its own, 1 for ratios.
        text: Format of the value at the end of a bar.
    """
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    left = 24 + _LETTER * max((len(name) for name in groups), default=0)
    values = [part for group in groups.values() for bar in group.values() for part in bar if part is not None and math.isfinite(part)]
    scale = _Linear(max([*values, mark or 0.0]), left, _WIDTH - _RIGHT)
    height = _TOP + sum(_BAR * len(group) + _GAP for group in groups.values()) + 44
    page = _Page(title, height)
    page.legend(names)
    bottom = height - 40
    for tick in scale.ticks:
        page.line("grid", scale(tick), _TOP, scale(tick), bottom)
        page.text(scale(tick), bottom + 15, f"{tick:g}", "middle")
    page.text((left + _WIDTH - _RIGHT) / 2, bottom + 32, unit, "middle")
    y = float(_TOP + _GAP / 2)
    for label, group in groups.items():
        page.text(left - 8, y + _BAR * len(group) / 2 + 4, label, "end")
        for name, bar in group.items():
            if math.isfinite(bar.value):
                page.bar(scale, y, bar, _COLOURS[names.index(name) % len(_COLOURS)], f"{label}, {name}", text.format(bar.value))
            y += _BAR
        y += _GAP
    if mark is not None:
        page.line("mark", scale(mark), _TOP, scale(mark), bottom)
    return page.whole()


def lines(title: str, x_title: str, y_title: str, series: Mapping[str, Sequence[tuple[float, float]]], *, log: bool = True) -> str:
    """Lines through points (x, y).

    Args:
        title: Above the plot.
        x_title: Of the axis, with its unit.
        y_title: As well.
        series: Points by the name of the line. Those that are not finite, below 0, or below 1e-12 on log axes, are left out.
        log: Both axes are logarithmic; otherwise both begin at 0.
    """
    least = _SMALLEST if log else 0.0
    kept = {
        name: [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y) and min(x, y) >= least] for name, points in series.items()
    }
    xs = [x for points in kept.values() for x, _ in points] or [1.0]
    ys = [y for points in kept.values() for _, y in points] or [1.0]
    page = _Page(title, 460)
    page.legend(list(kept))
    left, bottom = 84, 460 - 56
    make = _Log if log else _from_zero
    across, up = make(xs, left, _WIDTH - _RIGHT), make(ys, bottom, _TOP)
    for tick in across.ticks:
        page.line("grid", across(tick), _TOP, across(tick), bottom)
        page.text(across(tick), bottom + 16, _short(tick), "middle")
    for tick in up.ticks:
        page.line("grid", left, up(tick), _WIDTH - _RIGHT, up(tick))
        page.text(left - 6, up(tick) + 4, _short(tick), "end")
    page.text((left + _WIDTH - _RIGHT) / 2, bottom + 38, x_title, "middle")
    page.text(left - 6, _TOP - 8, y_title, "start")
    for number, (name, points) in enumerate(kept.items()):
        page.curve([(across(x), up(y), f"{name}: {_short(x)}, {y:.4g}") for x, y in sorted(points)], _COLOURS[number % len(_COLOURS)])
    return page.whole()


class _Linear:
    """From 0 to a round number that is not below `most`, onto pixels."""

    def __init__(self, most: float, start: float, end: float) -> None:
        step = _round_up(max(most, _SMALLEST) / 5)
        count = max(1, math.ceil(most / step - 1e-9))
        self.ticks = [step * number for number in range(count + 1)]
        self._start, self._end = start, end

    def __call__(self, value: float) -> float:
        return self._start + (self._end - self._start) * value / self.ticks[-1]


def _from_zero(values: Sequence[float], start: float, end: float) -> _Linear:
    return _Linear(max(values), start, end)


class _Log:
    """Whole powers of ten around the values, onto pixels."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        self._first = math.floor(math.log10(min(values)))
        last = max(self._first + 1, math.ceil(math.log10(max(values))))
        self._powers = last - self._first
        every = -(-self._powers // 12)
        self.ticks = [10.0**power for power in range(self._first, last + 1, every)]
        self._start, self._end = start, end

    def __call__(self, value: float) -> float:
        return self._start + (self._end - self._start) * (math.log10(value) - self._first) / self._powers


class _Page:
    def __init__(self, title: str, height: float) -> None:
        self._height = height
        self._parts = [f'<rect class="page" width="100%" height="100%"/><text x="16" y="26" font-size="15">{escape(title)}</text>']

    def text(self, x: float, y: float, text: str, anchor: str) -> None:
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="11">{escape(text)}</text>')

    def line(self, kind: str, x1: float, y1: float, x2: float, y2: float) -> None:
        self._parts.append(f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')

    def legend(self, names: Sequence[str]) -> None:
        x = 16.0
        for number, name in enumerate(names):
            self._parts.append(f'<rect x="{x:.1f}" y="38" width="11" height="11" fill="{_COLOURS[number % len(_COLOURS)]}"/>')
            self.text(x + 16, 48, name, "start")
            x += 36 + _LETTER * len(name)

    def bar(self, scale: _Linear, y: float, bar: Bar, colour: str, tip: str, text: str) -> None:
        start, end = scale(0), scale(max(0.0, bar.value))
        self._parts.append(
            f'<rect x="{start:.1f}" y="{y:.1f}" width="{end - start:.1f}" height="{_BAR - 2}" fill="{colour}">'
            f"<title>{escape(tip)}: {escape(text)}</title></rect>"
        )
        if bar.low is not None and bar.high is not None and math.isfinite(bar.low) and math.isfinite(bar.high):
            low, high, middle = scale(max(0.0, bar.low)), scale(max(0.0, bar.high)), y + _BAR / 2 - 1
            self.line("whisker", low, middle, high, middle)
            for x in (low, high):
                self.line("whisker", x, middle - 3, x, middle + 3)
            end = max(end, high)
        self.text(end + 5, y + _BAR - 3, text, "start")

    def curve(self, points: Sequence[tuple[float, float, str]], colour: str) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
        self._parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        for x, y, tip in points:
            self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"><title>{escape(tip)}</title></circle>')

    def whole(self) -> str:
        body = "\n".join(self._parts)
        size = f'width="{_WIDTH}" height="{self._height:.0f}" viewBox="0 0 {_WIDTH} {self._height:.0f}"'
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{_STYLE}</style>\n{body}\n</svg>\n'


def _round_up(value: float) -> float:
    """The next of 1, 2, 2.5, 5 times a power of ten."""
    power: float = 10.0 ** math.floor(math.log10(value))
    return next(power * step for step in (1, 2, 2.5, 5, 10, 20) if power * step >= value * (1 - 1e-9))


def _short(value: float) -> str:
    """A number on an axis: 4 instead of 4e0, 1e6 instead of 1000000."""
    return f"{value:g}" if 1e-3 <= value < 1e5 or not value else f"{value:.3g}".replace("e+0", "e").replace("e-0", "e-")
