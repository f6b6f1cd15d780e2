"""Ratios and their intervals: wrong statistics would make any figure look right."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_sdk.bench.statistics import bootstrap, geometric_mean, percentile, ratio_of

RATES = st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=12)


@given(RATES)
def test_a_geometric_mean_is_the_one_of_the_standard_library(rates: list[float]) -> None:
    assert geometric_mean(rates) == pytest.approx(statistics.geometric_mean(rates))


@settings(max_examples=20)
@given(RATES)
def test_an_interval_is_ordered_within_the_values_and_the_same_each_time(rates: list[float]) -> None:
    low, high = bootstrap(rates)
    assert min(rates) * (1 - 1e-9) <= low <= high <= max(rates) * (1 + 1e-9)
    assert bootstrap(rates) == (low, high)


def test_an_interval_is_the_normal_one_where_that_is_known() -> None:
    """Of many values whose logarithms have the deviation s, the interval of the mean is 1.96 s / sqrt(n) to both sides."""
    deviates = statistics.NormalDist()
    logs = [0.3 * deviates.inv_cdf((number + 0.5) / 400) for number in range(400)]
    low, high = bootstrap([math.exp(value) for value in logs])
    half = 1.96 * statistics.pstdev(logs) / math.sqrt(len(logs))
    assert math.log(low) == pytest.approx(-half, rel=0.1)
    assert math.log(high) == pytest.approx(half, rel=0.1)


@settings(max_examples=20)
@given(RATES, st.floats(0.01, 100))
def test_what_is_so_many_times_as_fast_in_every_round_has_that_ratio_without_doubt(rates: list[float], factor: float) -> None:
    ratio = ratio_of([rate * factor for rate in rates], rates)
    assert ratio == (pytest.approx(factor), pytest.approx(factor), pytest.approx(factor))


def test_rounds_that_do_not_belong_together_have_no_ratio() -> None:
    with pytest.raises(ValueError, match="zip"):
        ratio_of([1.0, 2.0], [1.0])


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0.01, 1.0))
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(values: list[float], share: float) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) - 1e-9
    below = [value for value in values if value < found]
    assert not below or len(below) < share * len(values)


def test_percentiles_of_known_values() -> None:
    values = [float(number) for number in range(100, 0, -1)]
    assert [percentile(values, share) for share in (0.5, 0.99, 1.0)] == [50.0, 99.0, 100.0]
