"""Backends that break the profile liveness."""

from __future__ import annotations

import atexit
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mutant import FsMutant, MemoryMutant
from references import open_in_doubt

from kvstore_sdk.backend import (
    Backend,
    Buffer,
    Capabilities,
    ClosedError,
    Deadline,
    Fork,
    GetResult,
    GetStatus,
    ListPage,
    PutResult,
    PutStatus,
    TimedOutError,
    UnavailableError,
)

Proceed = Callable[[Sequence[Any]], Any]

LATE_S = 1.0
SHORT_S = 0.05


def is_over(deadline: Deadline | None) -> bool:
    return deadline is not None and deadline.expired


def is_short(deadline: Deadline | None) -> bool:
    return deadline is not None and deadline.remaining_s() < SHORT_S


class WaitsForASlotBeforeItLooksAtTheClock(MemoryMutant):
    breaks = "KV-LIVE-01"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "delete" and is_over(deadline):
            time.sleep(LATE_S)
        return proceed(items)


class FailsWhenLate(MemoryMutant):
    breaks = "KV-LIVE-01"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "put" and is_over(deadline):
            return [PutResult.failed(UnavailableError(f"put {put.name}: no time left")) for put in items]
        return proceed(items)


class RaisesWhenLate(MemoryMutant):
    breaks = "KV-LIVE-01"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "get" and is_over(deadline):
            raise TimedOutError("get: no time left")
        return proceed(items)


class MissesWhenLate(MemoryMutant):
    breaks = "KV-LIVE-01"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "get" and is_over(deadline):
            return [GetResult(GetStatus.MISSING) for _ in items]
        return proceed(items)


class SaysStoredWhenLate(MemoryMutant):
    """Hands the record to a queue, from which it is dropped as too old."""

    breaks = "KV-LIVE-01"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "put" and is_over(deadline):
            return [PutResult(PutStatus.STORED) for _ in items]
        return proceed(items)


class SaysFalseWhenLate(MemoryMutant):
    breaks = "KV-LIVE-02"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        return [False] * len(items) if op == "exists" and is_over(deadline) else proceed(items)


class TriesAgainByItsOwnClock(MemoryMutant):
    breaks = "KV-LIVE-03"
    slow_op = "put"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == self.slow_op and is_short(deadline) and not is_over(deadline):
            time.sleep(LATE_S)
        return proceed(items)


class ListsToTheEndWhateverTheClockSays(TriesAgainByItsOwnClock):
    slow_op = "list"


class WritesAfterItTimedOut(MemoryMutant):
    """Gives up waiting, but not the transfer."""

    breaks = "KV-LIVE-04"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op != "get" or not is_short(deadline):
            return proceed(items)
        buffers = [part for get in items for part in get.into]
        later(lambda: [fill(buffer) for buffer in buffers])
        return [GetResult(GetStatus.TIMED_OUT) for _ in items]


class ReadsAfterItLostTheAnswer(MemoryMutant):
    """Answers UNKNOWN, truly; but what arrives in the end is what the buffers hold by then."""

    breaks = "KV-LIVE-05"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op != "put" or not is_short(deadline):
            return proceed(items)
        inner = self.inner
        later(lambda: inner.put(items, Deadline.after(5.0)))
        return [PutResult(PutStatus.UNKNOWN) for _ in items]


class IsInDoubtUndeclared(MemoryMutant):
    breaks = "KV-LIVE-06"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "get" and is_short(deadline):
            return [GetResult(GetStatus.IN_DOUBT, ticket=number) for number, _ in enumerate(items)]
        return proceed(items)


class InDoubtMutant(MemoryMutant):
    """Over the backend that is rightly in doubt."""

    @staticmethod
    def good(location: str) -> Backend:
        return open_in_doubt(location)


class GivesListsAsTickets(InDoubtMutant):
    breaks = "KV-LIVE-06"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op not in ("put", "get"):
            return proceed(items)
        return [replace(result, ticket=[result.ticket]) if result.ticket is not None else result for result in proceed(items)]


class GivesNoTicket(InDoubtMutant):
    breaks = "KV-LIVE-06"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        results = proceed(items)
        return [replace(result, ticket=None) for result in results] if op == "get" else results


class SettlesTooEarly(InDoubtMutant):
    """Releases the handle of a transfer, and takes that for its end."""

    breaks = "KV-LIVE-07"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        return [True] * len(items) if op == "settle" else proceed(items)


class SettlesAllAtOnce(InDoubtMutant):
    breaks = "KV-LIVE-07"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        results = proceed(items)
        return all(results) if op == "settle" else results


class SettlesByItsOwnClock(InDoubtMutant):
    breaks = "KV-LIVE-07"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "settle" and is_over(deadline):
            time.sleep(LATE_S)
        return proceed(items)


class ForgetsATicketThatItWasAskedFor(InDoubtMutant):
    """Takes the ticket out of its table to look at it; what is not there is said not to be over."""

    breaks = "KV-LIVE-07"

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.forgotten: set[object] = set()

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op != "settle":
            return proceed(items)
        over = [done and ticket not in self.forgotten for ticket, done in zip(items, proceed(items), strict=True)]
        self.forgotten |= set(items)
        return over


class RaisesWhenClosedAgain(MemoryMutant):
    breaks = "KV-LIVE-08"

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.closed = False

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "close":
            if self.closed:
                raise ValueError("already closed")
            self.closed = True
        return proceed(items)


class HangsWhenClosedAgain(RaisesWhenClosedAgain):
    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "close":
            if self.closed:
                time.sleep(5.5)
            self.closed = True
        return proceed(items)


class UnderClose(MemoryMutant):
    """Takes a moment for each call, and goes wrong in those that `close` comes into."""

    breaks = "KV-LIVE-09"
    wrong_op = "get"

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.closed = False

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "close":
            self.closed = True
            return proceed(items)
        if op == self.wrong_op and not self.closed:
            time.sleep(0.002)
            if self.closed:
                return self.go_wrong(items)
        return proceed(items)

    def go_wrong(self, items: Sequence[Any]) -> Any:
        raise NotImplementedError


class RaisesUnderClose(UnderClose):
    def go_wrong(self, items: Sequence[Any]) -> Any:
        raise ConnectionResetError("connection reset by close")


class MissesUnderClose(UnderClose):
    def go_wrong(self, items: Sequence[Any]) -> Any:
        return [GetResult(GetStatus.MISSING) for _ in items]


class LosesWhatItStoresUnderClose(UnderClose):
    wrong_op = "put"

    def go_wrong(self, items: Sequence[Any]) -> Any:
        return [PutResult(PutStatus.STORED) for _ in items]


class HangsUnderClose(UnderClose):
    def go_wrong(self, items: Sequence[Any]) -> Any:
        time.sleep(6.5)
        return [GetResult(GetStatus.CLOSED) for _ in items]


class WorksAfterClose(MemoryMutant):
    breaks = "KV-LIVE-10"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        return None if op == "close" else proceed(items)


class RaisesAfterClose(MemoryMutant):
    breaks = "KV-LIVE-10"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "exists" and self.inner._closed:
            raise ClosedError("exists: the backend is closed")
        return proceed(items)


class FailsAfterClose(MemoryMutant):
    breaks = "KV-LIVE-10"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "put" and self.inner._closed:
            return [PutResult.failed(ClosedError(f"put {put.name}: the backend is closed")) for put in items]
        return proceed(items)


class FallsOverItsClosedConnection(MemoryMutant):
    breaks = "KV-LIVE-10"

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.connected = True

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "close":
            result = proceed(items)
            # Calls that run meanwhile still find it, and that it is closed.
            time.sleep(0.1)
            self.connected = False
            return result
        if not self.connected:
            raise AttributeError("'NoneType' object has no attribute 'execute'")
        return proceed(items)


class ListsNothingAfterClose(MemoryMutant):
    breaks = "KV-LIVE-10"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "list" and self.inner._closed:
            return ListPage((), None)
        return proceed(items)


class WorksInAForkedChildThoughItRefuses(MemoryMutant):
    breaks = "KV-LIVE-11"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        self.inner._pid = os.getpid()
        return proceed(items)


class RefusesInAForkedChildThoughItWorks(MemoryMutant):
    breaks = "KV-LIVE-11"

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities, fork=Fork.WORKS)


class HoldsALockOverAFork(MemoryMutant):
    """Has one lock for all, which whoever forks may leave held for ever."""

    breaks = "KV-LIVE-11"

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.lock = threading.Lock()

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        with self.lock:
            if op == "exists":
                time.sleep(0.002)
            return proceed(items)


class CleansUpInAForkedChildThatCloses(FsMutant):
    breaks = "KV-LIVE-12"

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.pid = os.getpid()

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "close" and os.getpid() != self.pid:
            shutil.rmtree(self.inner._root)
        return proceed(items)


class CleansUpInAForkedChildThatEnds(FsMutant):
    breaks = "KV-LIVE-12"

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        atexit.register(shutil.rmtree, f"{inner._root}", ignore_errors=True)

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        return proceed(items)


class LeaksAThread(MemoryMutant):
    breaks = "KV-LIVE-13"

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        # It ends, but not with the backend.
        threading.Thread(target=time.sleep, args=(20.0,), daemon=True).start()


class LeaksADescriptor(MemoryMutant):
    breaks = "KV-LIVE-13"

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.lock_file = os.open(os.devnull, os.O_RDONLY)


def later(work: Callable[[], object], seconds: float = 0.1) -> None:
    """Do it when the call has returned; memory that is gone by then is left alone."""

    def run() -> None:
        time.sleep(seconds)
        try:
            work()
        except ValueError:
            return

    threading.Thread(target=run, daemon=True).start()


def fill(buffer: Buffer) -> None:
    buffer.view[:] = b"\x77" * buffer.length


MUTANTS = (
    WaitsForASlotBeforeItLooksAtTheClock,
    FailsWhenLate,
    RaisesWhenLate,
    MissesWhenLate,
    SaysStoredWhenLate,
    SaysFalseWhenLate,
    TriesAgainByItsOwnClock,
    ListsToTheEndWhateverTheClockSays,
    WritesAfterItTimedOut,
    ReadsAfterItLostTheAnswer,
    IsInDoubtUndeclared,
    GivesListsAsTickets,
    GivesNoTicket,
    SettlesTooEarly,
    SettlesAllAtOnce,
    SettlesByItsOwnClock,
    ForgetsATicketThatItWasAskedFor,
    RaisesWhenClosedAgain,
    HangsWhenClosedAgain,
    RaisesUnderClose,
    MissesUnderClose,
    LosesWhatItStoresUnderClose,
    HangsUnderClose,
    WorksAfterClose,
    RaisesAfterClose,
    FailsAfterClose,
    FallsOverItsClosedConnection,
    ListsNothingAfterClose,
    WorksInAForkedChildThoughItRefuses,
    RefusesInAForkedChildThoughItWorks,
    HoldsALockOverAFork,
    CleansUpInAForkedChildThatCloses,
    CleansUpInAForkedChildThatEnds,
    LeaksAThread,
    LeaksADescriptor,
)
