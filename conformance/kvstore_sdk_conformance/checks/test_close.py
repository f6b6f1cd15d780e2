"""Profile liveness: the end of a backend."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore_sdk.backend import (
    ClosedError,
    DeleteStatus,
    Failure,
    Get,
    GetStatus,
    Mode,
    NoSpaceError,
    Put,
    PutStatus,
    SupportsDelete,
)
from kvstore_sdk_conformance.check import proves
from kvstore_sdk_conformance.data import Record, which
from kvstore_sdk_conformance.failure import CallRaised, require
from kvstore_sdk_conformance.memory import Arena
from kvstore_sdk_conformance.pressing import Running, listing
from kvstore_sdk_conformance.run import Run
from kvstore_sdk_conformance.store import Store
from kvstore_sdk_conformance.view import View
from kvstore_sdk_conformance.watched import STALL_S

CLOSE_S = 5.0
CALL_S = 30.0
"""Longer than a call that is closed under may take: whoever waits for it is late."""
ROUNDS, MOST_ROUNDS, ROUNDS_S = 3, 30, 8.0
"""Views that are closed in use: so many, and then until calls of each kind were met `MEETINGS` times, or the time is over."""
MEETINGS = 2
THREADS, CLOSERS, MAX_DELAY_S = 4, 4, 0.05
WARM_S, UNDER_WAY_S = 5.0, 0.5
"""Longest that is waited for every kind of call to have been made, and then for one of a kind to be under way."""
KEPT_ANSWERS = 1000
KINDS = ("put", "get", "exists", "exists of a missing record")
"""Of calls of every backend; some have more."""
WARM_UPS, CHURNS, RELEASE_S = 4, 12, 6.0


@proves("KV-LIVE-08")
def test_close_returns_and_may_be_called_again(store: Store, view: View) -> None:
    size = view.fit(4096)
    view.get(store.name(), size)
    if not view.capabilities.read_only:
        view.store((store.name(), Record(size, 1)))
    # How long it takes, and that it raises nothing, is judged by the view. Each time it is called by another thread.
    for _ in range(3):
        view.close(CLOSE_S)
    store.open().close(CLOSE_S)
    other = store.open()
    other.exists(store.name())
    closers = [Running(lambda: other.close(CLOSE_S)) for _ in range(CLOSERS)]
    until_s = time.monotonic() + CLOSE_S + STALL_S
    ended = [closer.ended(until_s - time.monotonic()) for closer in closers]
    require(all(ended), f"{CLOSERS} calls of close at the same time to return", f"{ended.count(False)} that did not within {CLOSE_S:g} s")


@proves("KV-LIVE-09")
def test_calls_that_run_during_close_end_and_tell_the_truth(store: Store, view: View, run: Run) -> None:
    size = view.fit(min(1 << 20, run.largest_bytes), 64)
    there, missing = store.names(2)
    view.store((there, Record(size, 1)))
    kinds = [*KINDS, *["delete"] * isinstance(view.backend, SupportsDelete), *(kind for kind, _ in listing(view, CALL_S))]
    users = [User(there, missing, store.name(), size) for _ in range(min(THREADS, view.capabilities.max_concurrency))]
    met: Counter[str] = Counter()
    until_s = time.monotonic() + ROUNDS_S
    for number in range(MOST_ROUNDS):
        rarest = min(kinds, key=lambda kind: met[kind])
        closing_s = _close_in_use(store.open(), users, rarest, store.random.uniform(0.0, MAX_DELAY_S))
        for user in users:
            user.check(view, closing_s)
            met.update(user.met_by(closing_s))
        if number + 1 >= ROUNDS and (time.monotonic() > until_s or all(met[kind] >= MEETINGS for kind in kinds)):
            break
    store.figures["calls_under_way_at_close"] = float(met.total())


@proves("KV-LIVE-10")
def test_calls_after_close_answer_closed(store: Store, view: View) -> None:
    size, name, new = view.fit(4096), store.name(), store.name()
    writable = not view.capabilities.read_only
    if writable:
        view.store((name, Record(size, 1)))
    # Lent before: whoever announces memory does so while the backend is open.
    with view.lend([size]) as arena:
        arena.paint()
        view.close()
        answers = view.raw("exists", (name, new)[: view.capabilities.max_batch])
        require(all(map(_refuses_as_closed, answers)), "a Failure with ClosedError from exists", answers)
        [got] = view.raw("get", [Get(name, tuple(arena.buffers))])
        require(got.status is GetStatus.CLOSED, "CLOSED from get", got)
        if writable:
            for mode in Mode:
                [put] = view.raw("put", [Put(new, tuple(arena.buffers), mode)])
                require(put.status is PutStatus.CLOSED, f"CLOSED from put, {mode}", put)
        if isinstance(view.backend, SupportsDelete):
            [deleted] = view.raw("delete", [name])
            require(_refuses_as_closed(deleted), "a Failure with ClosedError from delete", deleted)
        for op, call in listing(view, CALL_S):
            try:
                answer = call()
            except CallRaised as raised:
                require(isinstance(raised.error, ClosedError), f"ClosedError from {op}", raised.seen)
            else:
                require(False, f"{op} to raise ClosedError", answer)


@proves("KV-LIVE-13")
def test_close_releases_threads_and_descriptors(store: Store, view: View) -> None:
    # In a process of its own: this one has threads and descriptors that come and go. And alone, as an engine's process would be.
    view.close()
    child = store.child()
    child.ask("churn", times=WARM_UPS)
    before = child.ask("held")
    child.ask("churn", times=CHURNS)
    after = child.ask("held")
    until_s = time.monotonic() + RELEASE_S
    while _has_grown(before, after) and time.monotonic() < until_s:
        time.sleep(0.1)
        after = child.ask("held")
    for what, count in after.items():
        # A pool that fills up is no leak: what grows with every opening is.
        seen = f"{count - before[what]} more {what} after {CHURNS} times open and close"
        require(count - before[what] < CHURNS // 2, f"as many {what} as before", seen)


def _close_in_use(view: View, users: Sequence[User], kind: str, delay_s: float) -> float:
    """Close a view that they all use, if possible while a call of this kind is under way. Returns when that began.

    Raises:
        ConformanceFailure: `close`, or a call that was under way, did not end in time.
    """
    closed = threading.Event()
    with contextlib.ExitStack() as lent:
        calls = []
        for turn, user in enumerate(users):
            arena = lent.enter_context(view.lend([user.size]))
            user.begin(view)
            calls.append(Running(functools.partial(user.work, arena, turn, closed)))
        # A store that is slow is closed in its first calls.
        warm_s = time.monotonic() + WARM_S
        for user in users:
            user.is_warm.wait(max(0.0, warm_s - time.monotonic()))
        time.sleep(delay_s)
        until_s = time.monotonic() + UNDER_WAY_S
        while not any(user.under_way == kind for user in users) and time.monotonic() < until_s:
            time.sleep(0.0001)
        closing_s = time.monotonic()
        try:
            view.close(CLOSE_S)
        finally:
            closed.set()
        for call, user in zip(calls, users, strict=True):
            ended = call.ended(closing_s + CLOSE_S + STALL_S - time.monotonic())
            require(ended, f"every call to end within {CLOSE_S:g} s of close", f"{user.under_way} that goes on")
    return closing_s


@dataclass
class User:
    """One thread's use of views that will be closed, one after another: it does one call after the other, and keeps the answers.

    Attributes:
        own: The name of the record that it alone puts.
        under_way: The kind of the call that it is in; "" between two of them.
        is_warm: Set once it has made a call of each kind.
        answers: When a call of this view began and ended, its kind, and what it answered or raised.
        puts: Tag and answer of every put of its own record.
    """

    there: str
    missing: str
    own: str
    size: int
    under_way: str = ""
    is_warm: threading.Event = field(default_factory=threading.Event)
    answers: deque[tuple[float, float, str, Any]] = field(default_factory=lambda: deque(maxlen=KEPT_ANSWERS))
    puts: list[tuple[int, PutStatus]] = field(default_factory=list)

    def begin(self, view: View) -> None:
        """Go on with another view."""
        self.view = view
        self.is_warm.clear()
        self.answers.clear()

    def work(self, arena: Arena, turn: int, closed: threading.Event) -> None:
        """Call until the view is closed."""
        calls = self._calls(arena)
        until_s = time.monotonic() + CALL_S
        for number in itertools.count(turn):
            if closed.is_set() or time.monotonic() > until_s:
                return
            if number == turn + len(calls):
                self.is_warm.set()
            kind, call = calls[number % len(calls)]
            began_s, self.under_way = time.monotonic(), kind
            try:
                answer = call()
            except CallRaised as raised:
                answer = raised.error
            self.answers.append((began_s, time.monotonic(), kind, answer))
            self.under_way = ""

    def met_by(self, closing_s: float) -> list[str]:
        """The kinds of calls that were under way when `close` was called."""
        return [kind for began_s, ended_s, kind, _ in self.answers if began_s < closing_s < ended_s]

    def check(self, view: View, closing_s: float) -> None:
        """Hold the answers of calls that had begun by then against what is true, as another view sees it."""
        for began_s, _, kind, answer in self.answers:
            right = began_s > closing_s or _is_closed(answer) or _GOOD[kind](answer)
            require(right, f"a true answer from {kind} while close was called, or CLOSED", answer)
        tags = [tag for tag, _ in self.puts]
        got = view.get(self.own, self.size)
        tag = which(got.bytes, reversed(tags)) if got.result.status is GetStatus.FOUND else None
        said = dict(self.puts).get(tag or 0)
        stored = max((tag for tag, status in self.puts if status is PutStatus.STORED), default=None)
        note = f"put one after another: {', '.join(f'{tag} {status.name}' for tag, status in self.puts[-4:])}; {tag} is there"
        refused = said in (PutStatus.CLOSED, PutStatus.TIMED_OUT)
        require(not refused, f"nothing of a put that answered {said}", "its record", note=note, breaks="KV-ATOM-03")
        # One that was answered UNKNOWN, or is in doubt, may have come after it.
        right = stored is None or (tag is not None and (tag >= stored or said in (PutStatus.UNKNOWN, PutStatus.IN_DOUBT)))
        require(right, f"{self.own} as it was STORED last, while close was called", got.result, note=note)

    def _calls(self, arena: Arena) -> Sequence[tuple[str, Callable[[], Any]]]:
        [buffer] = arena.buffers

        def put() -> Any:
            tag = 2 + len(self.puts)
            buffer.view[:] = Record(self.size, tag).bytes
            [result] = self.view.raw("put", [Put(self.own, (buffer,), Mode.REPLACE)], CALL_S, settle=False)
            self.puts.append((tag, result.status))
            return result

        def get() -> Any:
            buffer.view[:16] = bytes(16)
            [result] = self.view.raw("get", [Get(self.there, (buffer,))], CALL_S, settle=False)
            right = result.status is not GetStatus.FOUND or bytes(buffer.view) == Record(self.size, 1).bytes
            return result if right else "FOUND with other bytes"

        calls = [
            ("put", put),
            ("get", get),
            ("exists", lambda: self.view.raw("exists", [self.there], CALL_S)[0]),
            ("exists of a missing record", lambda: self.view.raw("exists", [self.missing], CALL_S)[0]),
        ]
        if isinstance(self.view.backend, SupportsDelete):
            calls.append(("delete", lambda: self.view.raw("delete", [self.missing], CALL_S)[0]))
        return [*calls, *listing(self.view, CALL_S)]


def _is_closed(answer: Any) -> bool:
    """Whether it says that the backend is closed, in whatever form."""
    closed = (PutStatus.CLOSED, GetStatus.CLOSED)
    return getattr(answer, "status", None) in closed or isinstance(getattr(answer, "error", answer), ClosedError)


def _refuses_as_closed(answer: object) -> bool:
    return isinstance(answer, Failure) and isinstance(answer.error, ClosedError)


def _is_good_put(answer: Any) -> bool:
    status = getattr(answer, "status", None)
    full = status is PutStatus.FAILED and isinstance(answer.error, NoSpaceError)
    return full or status in (PutStatus.STORED, PutStatus.UNKNOWN, PutStatus.IN_DOUBT)


_GOOD: dict[str, Callable[[Any], bool]] = {
    "put": _is_good_put,
    "get": lambda answer: getattr(answer, "status", None) in (GetStatus.FOUND, GetStatus.IN_DOUBT),
    "exists": lambda answer: answer is True,
    "exists of a missing record": lambda answer: answer is False,
    "delete": lambda answer: answer is DeleteStatus.ABSENT,
    "list": lambda answer: not isinstance(answer, BaseException),
    "usage": lambda answer: not isinstance(answer, BaseException),
}


def _has_grown(before: dict[str, int], after: dict[str, int]) -> bool:
    return any(after[what] > before[what] for what in before)
