"""What is said of growth follows from the times of rounds."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

Script = Callable[[str], ModuleType]


def curve(scale: ModuleType, subject: str, few_us: float, many_us: float) -> Any:
    return scale.Curve(subject, "lookup", "look up", {1_000: [few_us] * 2, 1_000_000: [many_us] * 2}, [few_us] * 2)


def test_growth_is_judged_without_what_a_dict_came_to_cost(script: Script) -> None:
    scale = script("scale")
    table, flat = curve(scale, "dict", 0.05, 0.45), scale.Held("tier", {10_000: 50.0, 1_000_000: 60.0}, {})
    like_a_dict, worse = curve(scale, "tier", 0.25, 0.65), curve(scale, "tier", 0.25, 0.95)
    assert like_a_dict.growth == pytest.approx(2.6)
    assert like_a_dict.judged_growth(scale.dict_us([table])) == pytest.approx(1.0)
    assert scale.verdict([table, like_a_dict], [flat])["met"] is True
    assert scale.verdict([table, worse], [flat])["met"] is False
    assert scale.verdict([like_a_dict], [flat])["met"] is False, "without the dict nothing is taken away"


def test_memory_of_a_key_that_grows_misses_the_target(script: Script) -> None:
    scale = script("scale")
    heavy = scale.Held("host-lru", {10_000: 500.0, 1_000_000: 800.0}, {})
    assert scale.verdict([curve(scale, "tier", 1.0, 1.0)], [heavy])["met"] is False
    assert not scale.Held("vllm-lru", {10_000: 500.0, 1_000_000: 800.0}, {}).misses, "theirs is not judged"
