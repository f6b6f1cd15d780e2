"""A schedule is drawn from its seed, holds its times, and leaves nothing out."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest

from kvstore_sdk.backend import Deadline, Failure, GetStatus, PutStatus
from kvstore_sdk.testing import (
    BREACHES,
    KINDS,
    Fault,
    FaultyBackend,
    Raise,
    Say,
    Schedule,
    draw_episodes,
)

SOON = 30.0


class Clock:
    """A clock that stands where it is put."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def told(backend: FaultyBackend, name: str = "a", timeout_s: float = SOON) -> object:
    return backend.exists([name], Deadline.after(timeout_s))[0]


def test_equal_seeds_are_equal_schedules_and_others_are_not() -> None:
    first, again, other = Schedule(300, seed=1), Schedule(300, seed=1), Schedule(300, seed=2)
    assert first.episodes == again.episodes
    assert [(fault.op, fault.probability, fault.begins_s) for fault in first] == [
        (fault.op, fault.probability, fault.begins_s) for fault in again
    ]
    assert list(map(repr, first[:5])) != list(map(repr, other[:5]))
    assert first.episodes != other.episodes


def test_episodes_follow_each_other_and_end_in_time() -> None:
    episodes = draw_episodes(300.0, KINDS, seed=3, episode_s=(1.0, 4.0))
    assert all(one.ends_s <= two.begins_s for one, two in pairwise(episodes))
    assert all(0.99 <= one.ends_s - one.begins_s <= 4.01 for one in episodes)
    assert 285.0 < episodes[-1].ends_s <= 300.0


@pytest.mark.parametrize("calm", [0.0, 0.3, 0.8])
def test_calm_is_the_part_of_the_time_in_which_nothing_goes_wrong(calm: float) -> None:
    episodes = draw_episodes(10_000.0, KINDS, seed=4, calm=calm)
    bad_s = sum(one.ends_s - one.begins_s for one in episodes)
    assert bad_s / 10_000.0 == pytest.approx(1.0 - calm, abs=0.05)


def test_every_kind_comes_once_before_any_comes_again() -> None:
    kinds = [one.kind for one in draw_episodes(500.0, KINDS, seed=5)]
    for start in range(0, len(kinds) - len(KINDS), len(KINDS)):
        assert set(kinds[start : start + len(KINDS)]) == set(KINDS)


def test_breaches_come_only_when_they_are_named() -> None:
    assert not BREACHES & {one.kind for one in Schedule(500, seed=6).episodes}
    assert {one.kind for one in Schedule(500, seed=6, kinds=KINDS).episodes} == set(KINDS)


def test_what_a_backend_offers_does_not_depend_on_what_was_drawn(inner: Any) -> None:
    for seconds in (0.1, 60.0):
        assert FaultyBackend(inner, Schedule(seconds, seed=1)).capabilities.in_doubt
        assert not FaultyBackend(inner, Schedule(seconds, seed=1, kinds=["errors"])).capabilities.in_doubt


def test_rules_have_the_probabilities_that_are_asked_for() -> None:
    assert {fault.probability for fault in Schedule(300, seed=1, probabilities=(0.1, 0.9)) if fault.times is None} == {0.1, 0.9}


def test_the_rules_of_an_episode_have_its_time() -> None:
    schedule = Schedule(120, seed=7)
    times = {(fault.begins_s, fault.ends_s) for fault in schedule if fault.times is None}
    assert times == {(one.begins_s, one.ends_s) for one in schedule.episodes}
    assert len(schedule) >= len(schedule.episodes) > 20


@pytest.mark.parametrize(
    "wrong", [{"kinds": ["errors", "earthquakes"]}, {"kinds": []}, {"calm": 1.0}, {"episode_s": (0.0, 1.0)}, {"episode_s": (2.0, 1.0)}]
)
def test_a_schedule_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"kinds|episode_s"):
        Schedule(60, seed=1, **wrong)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_a_script_that_a_backend_takes_and_that_hits(kind: str, inner: Any, bench: Any) -> None:
    """Whatever happens to them, calls end, and what hits is of the kind."""
    clock = Clock()
    schedule = Schedule(60, seed=8, kinds=[kind], hang_s=0.02, episode_s=(60.0, 60.0), calm=0.0)
    backend = FaultyBackend(inner, schedule, seed=8, clock=clock)
    clock.now_s += 30.0
    for number in range(20):
        with suppress(Exception):
            bench.store(backend, f"new-{number}", b"x", timeout_s=0.01)
        with suppress(Exception):
            bench.fetch(backend, "a", timeout_s=0.01)
        with suppress(Exception):
            told(backend, timeout_s=0.01)
    assert sum(backend.fired(fault) for fault in schedule) > 0
    backend.close()


def test_a_rule_hits_in_its_time_only(inner: Any) -> None:
    clock = Clock()
    rule = Fault("exists", Say(False), begins_s=10.0, ends_s=20.0)
    backend = FaultyBackend(inner, [rule], clock=clock)
    seen = []
    for at_s in (0.0, 9.9, 10.0, 19.9, 20.0, 30.0):
        clock.now_s = 1000.0 + at_s
        seen.append(told(backend))
    assert seen == [True, True, False, False, True, True]
    assert backend.fired(rule) == 2


def test_times_count_from_when_a_rule_is_armed(inner: Any) -> None:
    clock = Clock()
    backend = FaultyBackend(inner, clock=clock)
    clock.now_s += 100.0
    backend.arm(Fault("exists", Say(False), begins_s=1.0))
    assert told(backend) is True
    clock.now_s += 1.0
    assert told(backend) is False


def test_rules_with_and_without_a_time_apply_in_the_order_of_the_script(inner: Any) -> None:
    clock = Clock()
    first, second, third = Fault("exists", Say(True), begins_s=5.0), Fault("exists", Say(None)), Fault("exists", Raise(), begins_s=1.0)
    backend = FaultyBackend(inner, [first, second, third], clock=clock)
    clock.now_s += 6.0
    assert told(backend, "z") is True
    assert backend.log[-1].faults == [first]


def test_heal_drops_what_was_still_to_come(inner: Any) -> None:
    clock = Clock()
    backend = FaultyBackend(inner, [Fault("exists", Say(False), begins_s=1.0)], clock=clock)
    backend.heal()
    clock.now_s += 2.0
    assert told(backend) is True


def test_a_rule_whose_time_is_over_forgets_what_it_drew(inner: Any) -> None:
    """A schedule of hours must not fill the memory."""
    clock = Clock()
    backend = FaultyBackend(inner, [Fault("exists", Say(False), probability=0.5, ends_s=1.0)], clock=clock)
    for number in range(100):
        told(backend, f"name-{number}")
    [rule] = backend._rules
    assert len(rule.draws) == 100
    clock.now_s += 1.0
    told(backend)
    assert rule.draws == Counter()


@pytest.mark.parametrize("wrong", [{"begins_s": -1.0}, {"begins_s": 2.0, "ends_s": 1.0}])
def test_a_time_that_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="begins_s"):
        Fault("get", Raise(), **wrong)


def test_the_log_is_as_long_as_it_is_asked_to_be(inner: Any) -> None:
    backend = FaultyBackend(inner, max_events=3)
    for number in range(5):
        told(backend, f"name-{number}")
    assert [event.names for event in backend.log] == [("name-2",), ("name-3",), ("name-4",)]


def test_a_schedule_leaves_a_store_usable(inner: Any, bench: Any) -> None:
    clock = Clock()
    backend = FaultyBackend(inner, Schedule(60, seed=9, hang_s=0.01), clock=clock)
    for _ in range(30):
        clock.now_s += 2.0
        with suppress(Exception):
            told(backend, timeout_s=0.01)
    clock.now_s += 10.0
    assert not isinstance(told(backend), Failure)
    assert bench.store(backend, "new", bench.record("n")).status is PutStatus.STORED
    assert bench.fetch(backend, "new")[0].status is GetStatus.FOUND
    backend.close()
