"""Back-off and limit of restarts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore_sdk.isolation.restarts import CALM_S, FIRST_WAIT_S, LONGEST_WAIT_S, WINDOW_S, Restarts


def test_the_wait_doubles_with_each_death_within_a_minute() -> None:
    restarts = Restarts(100)
    waits = [restarts.died(now_s)[0] - now_s for now_s in range(10)]
    assert [round(wait, 3) for wait in waits] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0, 10.0]
    assert round(restarts.died(10 + CALM_S)[0] - 10 - CALM_S, 3) == FIRST_WAIT_S


def test_after_too_many_within_ten_minutes_it_pauses_and_starts_over() -> None:
    restarts = Restarts(3)
    assert [restarts.died(now_s)[1] for now_s in (0.0, 100.0, 200.0)] == [False] * 3
    assert restarts.died(300.0) == (300.0 + WINDOW_S, True)
    assert restarts.died(900.0) == (900.0 + FIRST_WAIT_S, False)


def test_deaths_of_long_ago_do_not_count() -> None:
    restarts = Restarts(2)
    assert not any(restarts.died(number * (WINDOW_S / 2 + 1))[1] for number in range(50))


@given(st.lists(st.floats(0, 100), max_size=60), st.integers(0, 10))
def test_every_wait_is_bounded_and_never_in_the_past(steps: list[float], limit: int) -> None:
    restarts, now_s = Restarts(limit), 0.0
    for step_s in steps:
        now_s += step_s
        again_s, paused = restarts.died(now_s)
        assert FIRST_WAIT_S * 0.99 <= again_s - now_s <= (WINDOW_S if paused else LONGEST_WAIT_S) + 1e-6
