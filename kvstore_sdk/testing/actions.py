"""What can go wrong with a call: errors, answers that are late, lost or nonsense, memory that is used after the call."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from kvstore_sdk.backend import (
    Deadline,
    Get,
    GetResult,
    GetStatus,
    Mode,
    NoSpaceError,
    Put,
    PutResult,
    PutStatus,
    UnavailableError,
)
from kvstore_sdk.testing.corruption import LATE_CALL_TIMEOUT_S, fill
from kvstore_sdk.testing.faults import PER_ITEM, TIMED, Action, Call, Proceed
from kvstore_sdk.testing.wrapper import item_name

__all__ = [
    "Hang",
    "InDoubt",
    "LateTicket",
    "NoSpace",
    "Raise",
    "ReadLate",
    "Return",
    "ReturnLate",
    "Say",
    "WriteLate",
]


@dataclass(frozen=True, slots=True)
class Raise(Action):
    """The call raises: `error` is an exception class or a function that makes one, `BaseException`s included.

    `after`: the operation is carried out first, so that only the answer is lost.
    """

    error: Callable[[], BaseException] = lambda: UnavailableError("injected: the store cannot be reached")
    after: bool = False

    def run(self, call: Call, proceed: Proceed) -> Any:
        if self.after:
            proceed(call.items)
        raise self.error()


@dataclass(frozen=True, slots=True)
class Hang(Action):
    """The call hangs for `seconds`, deadline or not, then goes on. None: until `release`. A short time makes a slow store.

    `after`: it hangs between the operation and its answer.
    """

    seconds: float | None = None
    after: bool = False

    def run(self, call: Call, proceed: Proceed) -> Any:
        if self.after:
            result = proceed(call.items)
            call.late.wait(self.seconds)
            return result
        call.late.wait(self.seconds)
        return proceed(call.items)


@dataclass(frozen=True, slots=True)
class ReturnLate(Action):
    """The operation is carried out in time, and its true answer returned `seconds` after the deadline."""

    ops: ClassVar[frozenset[str]] = TIMED
    seconds: float = 0.05

    def run(self, call: Call, proceed: Proceed) -> Any:
        result = proceed(call.items)
        remaining_s = call.deadline.remaining_s() if call.deadline is not None else 0.0
        call.late.wait(remaining_s + self.seconds)
        return result


@dataclass(frozen=True, slots=True)
class Say(Action):
    """Each chosen item is answered with `result`, whatever is true and whatever type that is, and nothing is done for it.

    `Say(PutResult(PutStatus.STORED))` on a put is a lie, `Say(PutResult.failed(error))` an honest failure, `Say(None)` a breach.
    `after`: the operation is carried out first; `Say(PutResult(PutStatus.UNKNOWN), after=True)` is a put whose answer was lost.
    """

    ops: ClassVar[frozenset[str]] = PER_ITEM
    result: object
    after: bool = False

    def run(self, call: Call, proceed: Proceed) -> Any:
        if not self.after:
            return call.split(proceed, lambda _: self.result)
        results = proceed(call.items)
        if not isinstance(results, list) or len(results) != len(call.items):
            return results
        return [self.result if index in call.chosen else result for index, result in enumerate(results)]


@dataclass(frozen=True, slots=True)
class Return(Action):
    """The operation is carried out, and the call returns `change(answer)` instead of its answer.

    `Return(lambda results: results[:-1])` is a list that is too short, `Return(lambda _: None)` no list at all.
    """

    change: Callable[[Any], object]

    def run(self, call: Call, proceed: Proceed) -> Any:
        return self.change(proceed(call.items))


@dataclass(frozen=True, slots=True)
class NoSpace(Action):
    """The store is full: each chosen put answers FAILED with `NoSpaceError`, and is not done.

    `raw`: as vendor code lets it through: the puts before the first chosen one are done, then the call raises `OSError(ENOSPC)`.
    """

    ops: ClassVar[frozenset[str]] = frozenset({"put"})
    raw: bool = False

    def run(self, call: Call, proceed: Proceed) -> Any:
        if not self.raw:
            return call.split(proceed, lambda put: PutResult.failed(NoSpaceError(f"injected: put {put.name}: the store is full")))
        if before := call.items[: call.chosen[0]]:
            proceed(before)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@dataclass(frozen=True, slots=True)
class WriteLate(Action):
    """A breach: the get returns, and `seconds` later (None: on `release`) a thread writes `fill` all over its buffers.

    Attributes:
        seconds: After the call.
        answer: What the call says: TIMED_OUT, without reading anything; None for the truth, after reading the record.
        fill: The byte.
    """

    ops: ClassVar[frozenset[str]] = frozenset({"get"})
    seconds: float | None = None
    answer: GetStatus | None = GetStatus.TIMED_OUT
    fill: int = 0xEE

    def run(self, call: Call, proceed: Proceed) -> Any:
        if self.answer is None:
            results = proceed(call.items)
        else:
            answer = GetResult(self.answer)
            results = call.split(proceed, lambda _: answer)
        for index in call.chosen:
            self._schedule(call, call.items[index])
        return results

    def _schedule(self, call: Call, get: Get) -> None:
        call.late.later(self.seconds, lambda: fill(get, bytes([self.fill]) * get.size_bytes), get.into)


@dataclass(frozen=True, slots=True)
class ReadLate(Action):
    """A breach: the put returns, and `seconds` later (None: on `release`) a thread reads its buffers and stores what is there by then.

    Attributes:
        seconds: After the call.
        answer: What the call says.
    """

    ops: ClassVar[frozenset[str]] = frozenset({"put"})
    seconds: float | None = None
    answer: PutStatus = PutStatus.TIMED_OUT

    def run(self, call: Call, proceed: Proceed) -> Any:
        answer = PutResult(self.answer)
        results = call.split(proceed, lambda _: answer)
        for index in call.chosen:
            self._schedule(call, call.items[index])
        return results

    def _schedule(self, call: Call, put: Put) -> None:
        late = replace(put, mode=Mode.REPLACE)
        call.late.later(self.seconds, lambda: call.inner.put([late], Deadline.after(LATE_CALL_TIMEOUT_S)), put.parts)


@dataclass(frozen=True, slots=True)
class InDoubt(Action):
    """Honours the contract: each chosen item answers IN_DOUBT, is carried out `seconds` later (None: on `release`), and is then settled."""

    ops: ClassVar[frozenset[str]] = frozenset({"put", "get"})
    seconds: float | None = None

    def run(self, call: Call, proceed: Proceed) -> Any:
        tickets = {item_name(call.items[index]): LateTicket(item_name(call.items[index])) for index in call.chosen}

        def answer(item: Any) -> object:
            ticket = tickets[item.name]
            return PutResult(PutStatus.IN_DOUBT, ticket=ticket) if call.op == "put" else GetResult(GetStatus.IN_DOUBT, ticket=ticket)

        results = call.split(proceed, answer)
        for index in call.chosen:
            self._schedule(call, call.items[index], tickets[call.items[index].name])
        return results

    def _schedule(self, call: Call, item: Any, ticket: LateTicket) -> None:
        operation: Any = call.inner.put if call.op == "put" else call.inner.get
        memory = item.parts if call.op == "put" else item.into
        call.late.later(self.seconds, lambda: operation([item], Deadline.after(LATE_CALL_TIMEOUT_S)), memory, ticket)


@dataclass(frozen=True, slots=True, eq=False)
class LateTicket:
    """The ticket of an operation that `InDoubt` put off. Every one differs from every other."""

    name: str
