"""Text in columns."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["columns", "human_age", "human_bytes"]


def columns(rows: Sequence[Sequence[object]], *, indent: str = "", numbers: bool = False) -> str:
    """Lines with aligned columns. With `numbers`, all columns but the first are set to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]

    def line(row: Sequence[str]) -> str:
        set_right = [numbers and number > 0 for number in range(len(row))]
        padded = [cell.rjust(width) if right else cell.ljust(width) for cell, width, right in zip(row, widths, set_right, strict=True)]
        return indent + "  ".join(padded).rstrip()

    return "\n".join(map(line, cells))


def human_bytes(count: float) -> str:
    """A size as people read it, in the units that options take."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def human_age(seconds: float) -> str:
    """How long ago, in the one unit that fits; "in the future" of a clock that is ahead by more than a minute."""
    if seconds < -60:
        return "in the future"
    for unit, factor in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * factor:
            return f"{seconds / factor:.0f} {unit}"
    return f"{max(seconds, 0.0):.0f} s"
