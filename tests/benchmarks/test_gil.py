"""What is said of interference follows from the speeds of the loop, round by round."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

Script = Callable[[str], ModuleType]


def cell(gil: ModuleType, inside: float, outside: float, name: str = "cell") -> Any:
    loops = {"alone": [101.0, 99.0], "alone again": [99.0, 101.0], "in": [inside] * 2, "out": [outside] * 2}
    return gil.Points(name, loops, [inside + 1] * 2, {"in": [1e6] * 2, "out": [1e6] * 2})


def test_points_are_the_slow_down_inside_less_that_outside(script: Script) -> None:
    gil = script("gil")
    found = cell(gil, inside=80.0, outside=90.0)
    assert found.points == pytest.approx(10.0)
    assert found.interval == pytest.approx((10.0, 10.0))
    assert found.lock_points == pytest.approx(9.0)
    assert (found.slow_down("in"), found.slow_down("out")) == pytest.approx((20.0, 10.0))
    assert found.noise[0] < 0 < found.noise[1]


def test_one_cell_with_too_many_points_misses_the_target(script: Script) -> None:
    gil = script("gil")
    good, bad = cell(gil, 89.0, 90.0, "good"), cell(gil, 84.0, 90.0, "bad")
    assert gil.found([good])["met"] is True
    assert gil.found([good, bad])["met"] is False
    assert "Missed: bad" in gil.report([good, bad], {"cpu": "x"})
    assert "bad" in gil.plot([good, bad])
