"""A soak as a picture: an SVG of lines over time, without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

__all__ = ["Band", "Panel", "draw"]

WIDTH, LEFT, RIGHT = 1100, 78, 150
PANEL, GAP, TOP = 110, 34, 54
LANE = 16
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b")


@dataclass(frozen=True, slots=True)
class Band:
    """Something that held for a while: `kind` is its text and chooses its colour."""

    begins_s: float
    ends_s: float
    kind: str


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines with one axis."""

    title: str
    lines: dict[str, Sequence[float]]
    unit: str = ""


@dataclass(slots=True)
class _Page:
    parts: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, text: str, anchor: str = "start", size: int = 11, fill: str = "#333") -> None:
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{fill}">{escape(text)}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1.0) -> None:
        self.parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{width:g}"/>')


def draw(
    title: str,
    times_s: Sequence[float],
    panels: Sequence[Panel],
    *,
    lanes: dict[str, Sequence[Band]],
    marks_s: Sequence[float] = (),
    from_s: float = 0.0,
) -> str:
    """The picture.

    Args:
        title: Above it.
        times_s: Of the values of every line.
        panels: One below the other.
        lanes: What held when, by whose it was; drawn above the panels.
        marks_s: Times that are marked across all panels.
        from_s: What lies before is shaded.
    """
    end_s = max([1.0, *times_s])
    page = _Page()
    height = TOP + len(lanes) * LANE + 12 + len(panels) * (PANEL + GAP) + 10
    page.text(LEFT, 22, title, size=15)

    def at(seconds: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * min(seconds, end_s) / end_s

    kinds = sorted({band.kind for bands in lanes.values() for band in bands})
    y = TOP - 14
    for name, bands in lanes.items():
        page.text(LEFT - 6, y + 11, name, "end", 10)
        for band in bands:
            hue = 360 * kinds.index(band.kind) // max(1, len(kinds))
            x, width = at(band.begins_s), at(band.ends_s) - at(band.begins_s)
            tip = f"{band.kind} {band.begins_s:.1f} to {band.ends_s:.1f} s"
            page.parts.append(
                f'<rect x="{x:.1f}" y="{y + 2:.1f}" width="{max(width, 0.5):.1f}" height="{LANE - 4}" fill="hsl({hue},65%,60%)">'
                f"<title>{escape(tip)}</title></rect>"
            )
        y += LANE
    y += 22
    for panel in panels:
        _panel(page, panel, y, times_s, at, end_s, marks_s, from_s)
        y += PANEL + GAP
    body = "\n".join(page.parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="sans-serif">\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def _panel(
    page: _Page,
    panel: Panel,
    y: float,
    times_s: Sequence[float],
    at: Callable[[float], float],
    end_s: float,
    marks_s: Sequence[float],
    from_s: float,
) -> None:
    top = _nice(max([0.0, *(value for line in panel.lines.values() for value in line)]))
    bottom = y + PANEL
    page.text(LEFT, y - 5, panel.title + (f" ({panel.unit})" if panel.unit else ""), size=12)
    if from_s:
        page.parts.append(f'<rect x="{LEFT}" y="{y:.1f}" width="{at(from_s) - LEFT:.1f}" height="{PANEL}" fill="#f1f1f1"/>')
    for part in range(5):
        height = bottom - PANEL * part / 4
        page.line(LEFT, height, WIDTH - RIGHT, height, "#ddd")
        page.text(LEFT - 6, height + 4, f"{top * part / 4:g}", "end", 10)
    for seconds in _ticks(end_s):
        page.text(at(seconds), bottom + 14, f"{seconds:g} s", "middle", 10)
        page.line(at(seconds), bottom, at(seconds), bottom + 3, "#888")
    for mark_s in marks_s:
        page.line(at(mark_s), y, at(mark_s), bottom, "#c0c0c0", 0.8)
    for number, (name, values) in enumerate(panel.lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(f"{at(seconds):.1f},{bottom - PANEL * value / top:.1f}" for seconds, value in zip(times_s, values, strict=True))
        page.parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.3"/>')
        page.text(WIDTH - RIGHT + 8, y + 12 + 14 * number, name, size=11, fill=colour)


def _nice(value: float) -> float:
    """The next of 1, 2, 4, 8 times a power of ten, so that quarters of it are short numbers."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * step for step in (1, 2, 4, 8, 10) if power * step >= value)


def _ticks(end_s: float) -> list[float]:
    step = next((step for step in (1, 2, 5, 10, 20, 30, 60, 120, 300, 600) if end_s / step <= 12), 3600)
    return [float(step * number) for number in range(int(end_s / step) + 1)]
