"""Profile liveness: what a backend does with memory after its call returned, and what it says to be in doubt."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Sequence

from kvstore_sdk.backend import Get, GetResult, GetStatus, Mode, Put, PutResult, PutStatus
from kvstore_sdk_conformance.check import proves
from kvstore_sdk_conformance.data import Record
from kvstore_sdk_conformance.failure import CallRaised, NotApplicable, require, show_difference
from kvstore_sdk_conformance.memory import Arena
from kvstore_sdk_conformance.pressing import LARGE_BYTES, LATE_S, Running, changed, pressing, took_s, watched_s, whatever_it_answers
from kvstore_sdk_conformance.run import Run
from kvstore_sdk_conformance.store import Store
from kvstore_sdk_conformance.view import View

SETTLED_S = 10.0
"""What was in doubt has to be over by then: what a store that answers at all needs for a record."""
DOUBT_S = 10.0
"""Longest that deadlines are tried for until calls are in doubt, where that is declared."""
LATES = 3
"""Answers of `settle` of which the best has to be in time."""
RETURN_S = 2.0
"""For a call that was closed under, before its memory is watched."""


@proves("KV-LIVE-04")
def test_a_get_that_returned_writes_no_more(store: Store, view: View, run: Run) -> None:
    size = view.fit(min(LARGE_BYTES, run.largest_bytes))
    there, missing = store.names(2)
    view.store((there, Record(size, 1)))
    alone_s = took_s(lambda: view.get(there, size))
    calls: list[tuple[str, int, float | None]] = [(there, size, None), (missing, size, None), (there, view.fit(size // 2), None)]
    calls += [(there, size, timeout_s) for timeout_s in pressing(alone_s)]
    with contextlib.ExitStack() as lent:
        watched: list[tuple[str, Arena]] = []
        for name, length, timeout_s in calls:
            arena = lent.enter_context(view.lend([length]))
            said = _get(view, arena, name, timeout_s)
            # The next request's data, as it were.
            arena.paint()
            how = "" if timeout_s is None else f", whose deadline was {timeout_s:.4f} s away"
            if said != GetStatus.IN_DOUBT.name:
                watched.append((f"a get{how}, answered {said}", arena))
        closing = store.open()
        arena = lent.enter_context(closing.lend([size]))
        running = Running(lambda: _get(closing, arena, there, None))
        closing.close()
        if running.ended(RETURN_S):
            arena.paint()
            watched.append(("a get during which the backend was closed", arena))
        time.sleep(watched_s(alone_s))
        for what, arena in watched:
            at = changed(arena)
            seen = f"a changed byte at offset {at} of the region, buffers: {arena.buffers}"
            require(at is None, "memory that nobody writes to after the call returned", seen, note=f"after {what}")


@proves("KV-LIVE-05")
def test_a_put_that_returned_reads_no_more(store: Store, view: View, run: Run) -> None:
    size = view.fit(min(LARGE_BYTES, run.largest_bytes))
    old = store.name()
    view.store((old, Record(size, 1)))
    alone_s = took_s(lambda: view.store((store.name(), Record(size, 1))))
    calls: list[tuple[str, Mode, float | None]] = [(old, Mode.CREATE, None)]
    calls += [(store.name(), mode, timeout_s) for mode in Mode for timeout_s in pressing(alone_s)]
    with contextlib.ExitStack() as lent:
        put: list[tuple[str, str, int]] = []
        for tag, (name, mode, timeout_s) in enumerate(calls, 2):
            arena = lent.enter_context(view.lend([size]))
            said = _put(view, arena, name, Record(size, tag), mode, timeout_s)
            arena.paint()
            how = "" if timeout_s is None else f", whose deadline was {timeout_s:.4f} s away"
            put += (
                [(name, f"a put, {mode}{how}, answered {said}", tag)]
                if said not in (PutStatus.STORED.name, PutStatus.IN_DOUBT.name)
                else []
            )
        closing, closed = store.open(), store.name()
        arena = lent.enter_context(closing.lend([size]))
        running = Running(lambda: _put(closing, arena, closed, Record(size, 1), Mode.CREATE, None))
        closing.close()
        if running.ended(RETURN_S):
            arena.paint()
            put.append((closed, "a put during which the backend was closed", 1))
        time.sleep(watched_s(alone_s))
        for name, what, tag in put:
            _check_unread(view, name, [Record(size, tag), Record(size, 1)], what)


@proves("KV-LIVE-06")
def test_in_doubt_is_answered_where_it_is_declared_and_with_a_ticket(store: Store, view: View, run: Run) -> None:
    count = min(2, view.capabilities.max_batch)
    size = view.fit(min(LARGE_BYTES, run.largest_bytes), 64)
    names = store.names(count)
    writable = not view.capabilities.read_only
    if writable:
        view.store(*((name, Record(size, 1)) for name in names))
    alone_s = took_s(lambda: view.exists(*names))
    if writable:
        alone_s = took_s(lambda: view.store(*((name, Record(size, 1)) for name in store.names(count))))
    until_s = time.monotonic() + DOUBT_S
    doubts: dict[str, bool] = {"get": False, "put": not writable}
    for turn in itertools.count():
        for timeout_s in pressing(alone_s):
            # What a call may answer, and with what, is judged by the view. A put is asked for also where it is refused. Later on only what
            # was not in doubt yet is asked for: memory of a call that is in doubt is lost to this process.
            if not turn or not doubts["put"]:
                with whatever_it_answers():
                    new = [(name, Record(size, 1)) for name in (names if turn else store.names(count))]
                    put = view.put_all(new, Mode.REPLACE if turn else Mode.CREATE, timeout_s=timeout_s)
                    doubts["put"] |= any(result.status is PutStatus.IN_DOUBT for result in put)
            if not turn or not doubts["get"]:
                with whatever_it_answers():
                    found = view.get_all([(name, size) for name in names], timeout_s=timeout_s)
                    doubts["get"] |= any(got.result.status is GetStatus.IN_DOUBT for got in found)
        # Where it is declared, until it was seen: a deadline that is to pass in the middle of a call may miss it.
        if not view.capabilities.in_doubt or all(doubts.values()) or time.monotonic() > until_s:
            break


@proves("KV-LIVE-07")
def test_what_is_in_doubt_is_settled_and_then_over(store: Store, view: View, run: Run) -> None:
    size = view.fit(min(LARGE_BYTES, run.largest_bytes), 64)
    count = min(3, view.capabilities.max_batch)
    there = store.names(count)
    view.store(*((name, Record(size, 1)) for name in there))
    alone_s = took_s(lambda: view.store(*((name, Record(size, 1)) for name in store.names(count))))
    deadlines_s = [timeout_s for timeout_s in pressing(alone_s) if timeout_s > 0]
    read: list[Arena] = []
    put: list[tuple[str, Sequence[Record]]] = []
    lates_s: list[float] = []
    names: Sequence[str] = store.names(count)
    records: list[Record] = []
    until_s = time.monotonic() + DOUBT_S
    for tag, timeout_s in enumerate(itertools.cycle(deadlines_s), 2):
        if tag - 2 >= len(deadlines_s) and (_are_enough(lates_s) or time.monotonic() > until_s):
            break
        # What is in doubt once is lent to nobody else.
        with contextlib.ExitStack() as lent:
            # One buffer an arena: each is free when its own ticket is settled.
            arenas = [lent.enter_context(view.lend([size])) for _ in there]
            gets = [Get(name, tuple(arena.buffers)) for name, arena in zip(there, arenas, strict=True)]
            results: list[GetResult] = view.raw("get", gets, timeout_s, settle=False)
            doubtful = [arena for arena, result in zip(arenas, results, strict=True) if result.status is GetStatus.IN_DOUBT]
            _settle(view, [result.ticket for result in results if result.status is GetStatus.IN_DOUBT], doubtful, lates_s)
            read += doubtful

            arenas = [lent.enter_context(view.lend([size])) for _ in names]
            for arena in arenas:
                arena.buffers[0].view[:] = Record(size, tag).bytes
            mode = Mode.REPLACE if records else Mode.CREATE
            records.append(Record(size, tag))
            puts = [Put(name, tuple(arena.buffers), mode) for name, arena in zip(names, arenas, strict=True)]
            answers: list[PutResult] = view.raw("put", puts, timeout_s, settle=False)
            doubtful = [arena for arena, answer in zip(arenas, answers, strict=True) if answer.status is PutStatus.IN_DOUBT]
            _settle(view, [answer.ticket for answer in answers if answer.status is PutStatus.IN_DOUBT], doubtful, lates_s)
            if doubtful:
                put += [(name, records) for name, answer in zip(names, answers, strict=True) if answer.status is PutStatus.IN_DOUBT]
                names, records = store.names(count), []
    if not read and not put:
        raise NotApplicable("no call was in doubt, although deadlines passed in the middle of calls")
    # The best of them: a busy machine makes one late, a backend all.
    expected = f"settle to return at once, as its deadline has passed, or {LATE_S:g} s later"
    is_late = _are_enough(lates_s) and min(lates_s) > LATE_S
    require(not is_late, expected, f"its return {min(lates_s):.1f} s later, at best of {len(lates_s)} calls")
    time.sleep(watched_s(alone_s))
    for arena in read:
        at = changed(arena)
        require(at is None, "memory that nobody writes to after settle said True", f"a changed byte at offset {at} of the region")
    for name, some in put:
        _check_unread(view, name, some, "a put that was in doubt, when settle had said True")


def _are_enough(lates_s: Sequence[float]) -> bool:
    """Whether they say how late `settle` is: one that was in time does, and several that were not."""
    return len(lates_s) >= LATES or min(lates_s, default=math.inf) <= LATE_S


def _settle(view: View, tickets: Sequence[object], arenas: Sequence[Arena], lates_s: list[float]) -> None:
    """Ask, first without time, until each is over; what is over is painted at once. `lates_s` takes how late the first answer was."""
    left = list(zip(tickets, arenas, strict=True))
    until_s = time.monotonic() + SETTLED_S
    timeout_s = -1.0
    while left:
        began_s = time.monotonic()
        over = view.ask_settled([ticket for ticket, _ in left], timeout_s)
        if timeout_s < 0:
            lates_s.append(time.monotonic() - began_s)
        for (_, arena), done in zip(left, over, strict=True):
            if done:
                arena.paint()
        left = [one for one, done in zip(left, over, strict=True) if not done]
        require(not left or began_s < until_s, f"True from settle for each ticket within {SETTLED_S:g} s", f"False for {len(left)}")
        timeout_s = 0.1


def _get(view: View, arena: Arena, name: str, timeout_s: float | None) -> str:
    try:
        results: list[GetResult] = view.raw("get", [Get(name, tuple(arena.buffers))], timeout_s)
    except CallRaised as raised:
        return raised.seen
    return results[0].status.name


def _put(view: View, arena: Arena, name: str, record: Record, mode: Mode, timeout_s: float | None) -> str:
    arena.buffers[0].view[:] = record.bytes
    try:
        results: list[PutResult] = view.raw("put", [Put(name, tuple(arena.buffers), mode)], timeout_s)
    except CallRaised as raised:
        return raised.seen
    return results[0].status.name


def _check_unread(view: View, name: str, records: Sequence[Record], what: str) -> None:
    """Nothing may be there but what the buffers held while the put ran."""
    got = view.get(name, records[0].size)
    if got.result.status is GetStatus.FOUND and got.bytes not in [record.bytes for record in records]:
        seen = show_difference(records[0].bytes, got.bytes)
        require(False, f"none of what the buffers held after the put returned, under {name}", seen, note=f"after {what}")
