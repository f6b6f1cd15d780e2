"""Memory in doubt comes back when the peer says so, or when the child that it was to be written through is gone; never before."""

from __future__ import annotations

import threading
import time

import pytest

from kvstore_sdk.backend import Deadline
from kvstore_sdk_backends.p2p import doubts as doubts_module
from kvstore_sdk_backends.p2p.doubts import CallDoubt, Doubts, LandingDoubt

LIMIT_S = 20.0


class Child:
    """A data plane that is only its generations. `slow`: a fence does not end it at once."""

    def __init__(self, slow: bool = False) -> None:
        self.generation = 1
        self.fences = 0
        self._slow = slow

    def fence(self) -> None:
        self.fences += 1
        if not self._slow:
            self.generation += 1


@pytest.fixture
def child() -> Child:
    return Child()


@pytest.fixture
def doubts(child: Child) -> Doubts:
    return Doubts(child)


def land(doubts: Doubts, child: Child, size_bytes: int = 10, ended: bool = False, region: int = 7) -> LandingDoubt:
    return doubts.landing(child.generation, lambda: ended, size_bytes, frozenset({region}))


def at_once(doubts: Doubts, *tickets: object) -> list[bool]:
    return doubts.settle(tickets, Deadline.after(0))


def test_it_is_over_when_the_peer_says_so(doubts: Doubts, child: Child) -> None:
    one, other = land(doubts, child), land(doubts, child)
    assert at_once(doubts, one, other) == [False, False]
    one.close()
    assert at_once(doubts, one, other) == [True, False]
    assert at_once(doubts, one) == [True]


def test_it_is_over_when_the_child_is_gone_and_stays_so(doubts: Doubts, child: Child) -> None:
    doubt = land(doubts, child)
    child.generation = 0
    assert at_once(doubts, doubt) == [True]
    child.generation = 1
    assert at_once(doubts, doubt) == [True]


def test_asking_waits_until_it_is_over_or_for_its_time(doubts: Doubts, child: Child) -> None:
    doubt = land(doubts, child)
    began_s = time.monotonic()
    assert doubts.settle([doubt], Deadline.after(0.1)) == [False]
    assert 0.09 <= time.monotonic() - began_s < LIMIT_S
    closing = threading.Timer(0.05, doubt.close)
    closing.start()
    assert doubts.settle([doubt], Deadline.after(60)) == [True]
    closing.join()


def test_the_end_of_a_session_settles_nothing_and_has_the_child_ended_after_a_while(
    doubts: Doubts, child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = land(doubts, child, ended=True)
    doubts.look()
    assert child.fences == 0
    assert at_once(doubts, gone) == [False]
    monkeypatch.setattr(doubts_module, "FENCE_AFTER_S", 0.0)
    doubts.look()
    assert child.fences == 1
    assert at_once(doubts, gone) == [True]
    assert not doubts.look()


def test_what_others_have_under_way_does_not_keep_the_child_from_being_ended(
    doubts: Doubts, child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doubts_module, "FENCE_AFTER_S", 0.0)
    running, gone = land(doubts, child), land(doubts, child, ended=True)
    doubts.look()
    assert at_once(doubts, running, gone) == [True, True]


def test_a_load_that_its_caller_waits_for_is_no_reason(doubts: Doubts, child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doubts_module, "FENCE_OLD_S", 0.0)
    doubt = land(doubts, child, size_bytes=doubts_module.MAX_DOUBT_BYTES + 1)
    assert doubts.look()
    assert child.fences == 0
    assert doubts.late_bytes == 0
    doubt.leave()
    assert doubts.late_bytes == doubts_module.MAX_DOUBT_BYTES + 1
    doubts.look()
    assert child.fences == 1


def test_too_much_memory_in_doubt_is_taken_back_at_once(doubts: Doubts, child: Child) -> None:
    for _ in range(5):
        land(doubts, child, size_bytes=doubts_module.MAX_DOUBT_BYTES // 4).leave()
        if _ < 4:
            doubts.look()
            assert child.fences == 0
    doubts.look()
    assert child.fences == 1
    assert doubts.late_bytes == 0


def test_children_are_not_ended_more_often_than_once_a_second(doubts: Doubts, child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doubts_module, "FENCE_AFTER_S", 0.0)
    monkeypatch.setattr(doubts_module, "FENCE_EVERY_S", 3600.0)
    for _ in range(10):
        land(doubts, child, ended=True)
        assert doubts.look()
    assert (child.fences, doubts.fences) == (1, 1)


def test_a_child_that_takes_long_to_die_is_ended_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is told to end twice is the next one, while it starts."""
    monkeypatch.setattr(doubts_module, "FENCE_AFTER_S", 0.0)
    monkeypatch.setattr(doubts_module, "FENCE_EVERY_S", 0.0)
    child = Child(slow=True)
    doubts = Doubts(child)
    doubt = land(doubts, child, ended=True)
    for _ in range(10):
        assert doubts.look()
        doubts.fence("its memory is taken back")
    assert (child.fences, doubts.fences) == (1, 1)
    child.generation += 1
    assert at_once(doubts, doubt) == [True]
    land(doubts, child, ended=True)
    doubts.look()
    assert (child.fences, doubts.fences) == (2, 2)


def test_a_region_is_in_doubt_as_long_as_something_may_be_written_there(doubts: Doubts, child: Child) -> None:
    doubt = land(doubts, child, region=7)
    assert doubts.touch(7)
    assert not doubts.touch(8)
    doubt.close()
    assert not doubts.touch(7)


def test_a_call_is_over_when_it_never_began_or_has_ended_with_all_it_left(doubts: Doubts, child: Child) -> None:
    call = CallDoubt()
    assert call.over
    call.begin()
    assert not call.over
    left = land(doubts, child)
    call.end([left])
    assert not call.over
    left.close()
    assert call.over
    assert at_once(doubts, call) == [True]
