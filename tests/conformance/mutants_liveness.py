"""Backends that break the profile liveness: what they do when time is short, and after their calls have returned."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

from mutant import MemoryMutant
from references import InDoubt

from kvstore_sdk.backend import (
    Backend,
    Buffer,
    Deadline,
    Get,
    GetResult,
    GetStatus,
    Put,
    PutResult,
    PutStatus,
    TimedOutError,
    UnavailableError,
)

Proceed = Callable[[Sequence[Any]], Any]

LATE_S = 1.0
SHORT_S = 0.05
WAIT_S, SPOIL_S = 5.0, 1.0
HEAD_BYTES = 64


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
    """With a large batch, whether its deadline is near or over; which of them it is may depend on how busy the machine is."""

    breaks = "KV-LIVE-03"
    slow_op, slow_items = "put", 16

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == self.slow_op and len(items) >= self.slow_items and is_short(deadline):
            time.sleep(LATE_S)
        return proceed(items)


class ListsToTheEndWhateverTheClockSays(TriesAgainByItsOwnClock):
    """Also when the deadline is over."""

    slow_op, slow_items = "list", 1


class WritesAfterItTimedOut(MemoryMutant):
    """Gives up waiting, but not the transfer, which goes on for a while."""

    breaks = "KV-LIVE-04"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op != "get" or not is_short(deadline):
            return proceed(items)
        buffers = [part for get in items for part in get.into]
        later(lambda: spoil(buffers))
        return [GetResult(GetStatus.TIMED_OUT) for _ in items]


class ReadsAfterItLostTheAnswer(MemoryMutant):
    """Answers UNKNOWN, truly; but what arrives in the end is what the buffers hold by then."""

    breaks = "KV-LIVE-05"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op != "put" or not is_short(deadline):
            return proceed(items)
        inner = self.inner
        first = [head(put.parts[0]) for put in items]

        def send() -> None:
            wait_until(lambda: [head(put.parts[0]) for put in items] != first, WAIT_S)
            inner.put(items, Deadline.after(5.0))

        later(send)
        return [PutResult(PutStatus.UNKNOWN) for _ in items]


class IsInDoubtUndeclared(MemoryMutant):
    breaks = "KV-LIVE-06"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "get" and is_short(deadline):
            return [GetResult(GetStatus.IN_DOUBT, ticket=number) for number, _ in enumerate(items)]
        return proceed(items)


class Held(InDoubt):
    """Rightly in doubt. A transfer whose deadline passed is not over before somebody asked, so that it does not matter who is quicker."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.asks = 0
        self.closing = False
        self.before: dict[int, tuple[int, bytes]] = {}
        """By the item of a call that was begun: the asks until then, and what its memory began with."""

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        self.closing = self.closing or op == "close"
        if op in ("put", "get"):
            self.before |= {id(item): (self.asks, head(first_buffer(item))) for item in items}
        return super().around(op, items, deadline, proceed)

    def settle(self, tickets: Sequence[Any], deadline: Deadline) -> list[bool]:
        over = super().settle(tickets, Deadline.after(0.0))
        self.asks += 1
        return over if all(over) or deadline.expired else super().settle(tickets, deadline)

    def before_transfer(self, item: Put | Get, deadline: Deadline) -> None:
        asks, _ = self.before[id(item)]
        if deadline.expired:
            wait_until(lambda: self.closing or self.asks > asks, WAIT_S)


class HeldUntilItsMemoryIsUsed(Held):
    """Goes on when its caller has taken it to be over, and its buffers for free."""

    def before_transfer(self, item: Put | Get, deadline: Deadline) -> None:
        _, first = self.before[id(item)]
        super().before_transfer(item, deadline)
        if deadline.expired:
            wait_until(lambda: self.closing or head(first_buffer(item)) != first, WAIT_S)


class InDoubtMutant(MemoryMutant):
    """Over a backend that is rightly in doubt."""

    held: ClassVar[type[Held]] = Held

    @classmethod
    def open(cls, location: str) -> Self:
        return cls(cls.held(cls.good(location)))


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
    held = HeldUntilItsMemoryIsUsed

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op != "settle":
            return proceed(items)
        self.inner.asks += 1
        return [True] * len(items)


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


def later(work: Callable[[], object]) -> None:
    """Do it beside what else is done; memory that is gone by then is left alone."""

    def run() -> None:
        with contextlib.suppress(ValueError):
            work()

    threading.Thread(target=run, daemon=True).start()


def spoil(buffers: Sequence[Buffer]) -> None:
    """Write into them, again and again: also after whatever their owner does with them next."""
    until_s = time.monotonic() + SPOIL_S
    while time.monotonic() < until_s:
        for buffer in buffers:
            buffer.view[:HEAD_BYTES] = b"\x77" * min(HEAD_BYTES, buffer.length)
        time.sleep(SHORT_S)


def first_buffer(item: Put | Get) -> Buffer:
    return (item.parts if isinstance(item, Put) else item.into)[0]


def head(buffer: Buffer) -> bytes:
    return bytes(buffer.view[:HEAD_BYTES])


def wait_until(holds: Callable[[], bool], limit_s: float) -> None:
    until_s = time.monotonic() + limit_s
    while not holds() and time.monotonic() < until_s:
        time.sleep(0.002)


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
)
