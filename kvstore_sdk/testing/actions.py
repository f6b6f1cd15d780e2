"""What can go wrong in a store."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from kvstore_sdk.backend import (
    Deadline,
    Get,
    GetResult,
    GetStatus,
    Mode,
    Put,
    PutResult,
    PutStatus,
    Region,
    SupportsRegions,
    UnavailableError,
)
from kvstore_sdk.testing.faults import PER_ITEM, TIMED, Action, Call, Proceed
from kvstore_sdk.testing.wrapper import item_name

__all__ = [
    "Hang",
    "InDoubt",
    "LateTicket",
    "Raise",
    "ReadLate",
    "Return",
    "ReturnLate",
    "Say",
    "SwapRecords",
    "WriteLate",
    "WrongBytes",
    "WrongSize",
]

LATE_CALL_TIMEOUT_S = 30.0
"""Time for the operation that an action carries out after the call, with a deadline of its own."""


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
class WrongBytes(Action):
    """Bytes of each chosen record are changed: after a get in the buffers it was read into, on a put in what is stored.

    Attributes:
        offset: Of the first changed byte; negative counts from the end. None: drawn anew for each record.
        length: How many bytes.
        flip: Bits that are inverted in each of them, 1 to 255.
    """

    ops: ClassVar[frozenset[str]] = frozenset({"put", "get"})
    offset: int | None = None
    length: int = 1
    flip: int = 0x01

    def __post_init__(self) -> None:
        if self.length < 1 or not 1 <= self.flip <= 255:
            raise ValueError(f"WrongBytes: length {self.length} must be at least 1, flip {self.flip} from 1 to 255")

    def run(self, call: Call, proceed: Proceed) -> Any:
        if call.op == "put":
            return _store_copies(call, proceed, self._change)
        results = proceed(call.items)
        for index in call.chosen:
            get = call.items[index]
            if _found(results, index):
                record = b"".join(part.view for part in get.into)
                _fill(get, self._change(record, call.random))
        return results

    def _change(self, record: bytes, draw: random.Random) -> bytes:
        changed = bytearray(record)
        start = draw.randrange(len(changed)) if self.offset is None else self.offset % len(changed)
        for index in range(start, min(start + self.length, len(changed))):
            changed[index] ^= self.flip
        return bytes(changed)


@dataclass(frozen=True, slots=True)
class WrongSize(Action):
    """Each chosen record is `delta` bytes longer, or shorter: a get answers WRONG_SIZE so, a put stores it so (bytes added are zeros)."""

    ops: ClassVar[frozenset[str]] = frozenset({"put", "get"})
    delta: int = -1

    def __post_init__(self) -> None:
        if not self.delta:
            raise ValueError("WrongSize: delta must not be 0")

    def run(self, call: Call, proceed: Proceed) -> Any:
        if call.op == "put":
            return _store_copies(call, proceed, lambda record, _: record[: self._size(len(record))].ljust(self._size(len(record)), b"\0"))
        return call.split(proceed, lambda get: GetResult.wrong_size(self._size(get.size_bytes), get.size_bytes))

    def _size(self, size_bytes: int) -> int:
        return max(1, size_bytes + self.delta)


@dataclass(frozen=True, slots=True)
class SwapRecords(Action):
    """Each chosen get is filled with the whole record of another name, of equal length.

    Attributes:
        other: Says which; None takes one that went through this backend before, and does nothing where there was none.
    """

    ops: ClassVar[frozenset[str]] = frozenset({"get"})
    other: Callable[[str], str] | None = None

    def run(self, call: Call, proceed: Proceed) -> Any:
        swapped = list(call.items)
        for index in call.chosen:
            get = swapped[index]
            name = self.other(get.name) if self.other is not None else call.other_name(get.name, get.size_bytes)
            if name is not None:
                swapped[index] = replace(get, name=name)
        return proceed(swapped)


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
        call.late.later(self.seconds, lambda: _fill(get, bytes([self.fill]) * get.size_bytes), get.into)


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


def _found(results: object, index: int) -> bool:
    """Whether this item was read; another rule may have bent the answer."""
    result = results[index] if isinstance(results, list) and index < len(results) else None
    return isinstance(result, GetResult) and result.status is GetStatus.FOUND


def _fill(get: Get, record: bytes) -> None:
    start = 0
    for part in get.into:
        part.view[:] = record[start : start + part.length]
        start += part.length


def _store_copies(call: Call, proceed: Proceed, change: Callable[[bytes, random.Random], bytes]) -> Any:
    """Proceed with changed copies of the chosen puts: their buffers are the caller's, who may read them meanwhile."""
    puts, copies = list(call.items), []
    for index in call.chosen:
        put = puts[index]
        record = change(b"".join(part.view for part in put.parts), call.random)
        region = Region(len(record), "kvstore-testing")
        region.view[: len(record)] = record
        if isinstance(call.inner, SupportsRegions):
            call.inner.register_region(region)
        copies.append(region)
        puts[index] = replace(put, parts=(region.buffer(0, len(record)),))
    results = None
    try:
        results = proceed(puts)
        return results
    finally:
        in_doubt = isinstance(results, list) and any(getattr(result, "ticket", None) is not None for result in results)
        for region in copies:
            # A store in doubt still reads its copy; the region then lives until the process ends.
            if not in_doubt:
                if isinstance(call.inner, SupportsRegions):
                    call.inner.unregister_region(region)
                region.close()
