"""What becomes of calls, without a child."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvstore_sdk.backend import ClosedError, Failure, GetStatus, PutStatus, UnavailableError
from kvstore_sdk.isolation.calls import LATE_S, Call, Calls, failed
from kvstore_sdk.isolation.wire import WireError

DIED = UnavailableError("died")


def _asked(calls: Calls, op: str = "get", count: int = 1, deadline_s: float = 10.0, generation: int = 1) -> Call:
    call = calls.new(op, count, deadline_s, threading.Event())
    calls.asked_of(call, generation)
    return call


def _settling(calls: Calls, *tickets: Any, deadline_s: float = 100.0) -> Call:
    call = calls.new("settle", len(tickets), deadline_s, None)
    calls.settle(call, tickets)
    return call


def test_an_answer_ends_its_call_and_no_other() -> None:
    calls = Calls("it")
    first, second = _asked(calls), _asked(calls)
    calls.answer(second.number, True, ["found"])
    assert (first.ended, second.ended) == (False, True)
    assert second.wake is not None
    assert second.wake.is_set()


@pytest.mark.parametrize("number", [99, -1, None, "1", 1.0, True, [1], {}])
def test_an_answer_to_nothing_is_refused(number: Any) -> None:
    calls = Calls("it")
    calls.new("get", 1, 10.0, None)
    call = _asked(calls)
    with pytest.raises(WireError):
        calls.answer(number, True, ["found"])
    assert not call.ended


def test_an_answer_comes_once() -> None:
    calls = Calls("it")
    call = _asked(calls)
    calls.answer(call.number, True, ["missing"])
    with pytest.raises(WireError):
        calls.answer(call.number, True, ["missing"])


def test_a_call_expires_a_little_after_its_deadline_and_its_late_answer_frees_it() -> None:
    calls = Calls("it")
    calls.may_doubt = False
    call = _asked(calls, count=2)
    calls.expire(10.0 + LATE_S - 0.01)
    assert not call.ended
    calls.expire(10.0 + LATE_S)
    assert [result.status for result in call.answer] == [GetStatus.IN_DOUBT] * 2
    tickets = [result.ticket for result in call.answer]
    settle = _settling(calls, *tickets)
    assert calls.advance(11.0) == []
    assert not settle.ended
    calls.answer(call.number, True, ["found", "missing"])
    calls.advance(12.0)
    assert settle.answer == [True, True]
    # What was told stays as it is.
    assert [result.status for result in call.answer] == [GetStatus.IN_DOUBT] * 2


@pytest.mark.parametrize("body", [["found"], ["found", "odd"], None, [1, 2, 3]])
@pytest.mark.parametrize("may_doubt", [True, False])
def test_a_late_answer_that_cannot_be_read_frees_only_what_cannot_be_in_doubt(may_doubt: bool, body: Any) -> None:
    calls = Calls("it")
    calls.may_doubt = may_doubt
    call = _asked(calls, count=2)
    calls.expire(20.0)
    settle = _settling(calls, *(result.ticket for result in call.answer))
    calls.answer(call.number, True, body)
    calls.advance(21.0)
    assert settle.ended is not may_doubt
    assert bool(calls.unreadable) is may_doubt
    calls.gone(1, DIED)
    calls.advance(22.0)
    assert settle.answer == [True, True]


def test_what_is_no_ticket_is_over() -> None:
    calls = Calls("it")
    settle = _settling(calls, [], "x", None, 2.5, 99)
    calls.advance(1.0)
    assert settle.answer == [True] * 5


def test_only_the_calls_of_the_dead_child_end() -> None:
    calls = Calls("it")
    old, new = _asked(calls, "put", generation=1), _asked(calls, "put", generation=2)
    late = _asked(calls, "put", deadline_s=1.0, generation=1)
    calls.expire(5.0)
    calls.gone(1, DIED)
    assert old.answer[0].status is PutStatus.UNKNOWN
    assert old.lost
    assert not new.ended
    settle = _settling(calls, late.answer[0].ticket)
    calls.advance(6.0)
    assert settle.answer == [True]


def test_the_child_is_asked_for_its_own_tickets_and_only_for_those() -> None:
    calls = Calls("it")
    doubted = _asked(calls, count=2)
    calls.answer(doubted.number, True, [["in_doubt", None, 7, None, None], ["in_doubt", None, 8, None, None]])
    late = _asked(calls)
    calls.expire(20.0)
    settle = _settling(calls, *(result.ticket for result in [*doubted.answer, *late.answer]))
    [(question, tickets)] = calls.advance(21.0)
    assert tickets == [7, 8]
    calls.asked_of(question, question.generation)
    assert calls.advance(21.0) == []
    calls.answer(question.number, True, [True, False])
    assert calls.advance(22.0) == []
    assert not settle.ended
    calls.answer(late.number, True, ["missing"])
    calls.advance(23.0)
    # The child has said no for one, and nothing else is waited for: the caller may ask again.
    assert settle.answer == [True, False, True]


def test_a_settle_ends_at_its_deadline_also_when_the_child_does_not_answer() -> None:
    calls = Calls("it")
    doubted = _asked(calls)
    calls.answer(doubted.number, True, [["in_doubt", None, 7, None, None]])
    settle = _settling(calls, doubted.answer[0].ticket, deadline_s=30.0)
    [(question, _)] = calls.advance(21.0)
    calls.asked_of(question, question.generation)
    calls.expire(30.0 + LATE_S)
    calls.advance(30.0 + LATE_S)
    assert settle.answer == [False]
    # Late, and without effect on who has gone.
    calls.answer(question.number, True, [True])
    again = _settling(calls, doubted.answer[0].ticket)
    calls.advance(31.0)
    assert again.answer == [True]


def test_the_next_expiry_is_the_first_of_those_that_matter() -> None:
    calls = Calls("it")
    assert calls.next_expiry_s(polled=False) is None
    _asked(calls, deadline_s=5.0)
    polled = calls.new("get", 1, 7.0, None)
    calls.asked_of(polled, 1)
    assert calls.next_expiry_s(polled=False) == 5.0 + LATE_S
    assert calls.next_expiry_s(polled=True) == 7.0 + LATE_S


def test_what_nobody_answered_says_what_may_have_been_done() -> None:
    assert failed("put", 1, DIED, sent=True)[0].status is PutStatus.UNKNOWN
    assert failed("put", 1, DIED, sent=False)[0].status is PutStatus.FAILED
    assert failed("put", 1, ClosedError("x"), sent=False)[0].status is PutStatus.CLOSED
    assert failed("get", 1, ClosedError("x"), sent=True)[0].status is GetStatus.CLOSED
    assert failed("exists", 2, DIED, sent=True) == [Failure(DIED)] * 2
    assert failed("usage", 1, DIED, sent=True) is DIED
