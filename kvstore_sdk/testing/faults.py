"""What can go wrong in a store, as rules of a script: which calls (`Fault`), and what happens to them (an `Action`)."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from kvstore_sdk.backend import (
    Backend,
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
from kvstore_sdk.testing.late import LateWork
from kvstore_sdk.testing.wrapper import item_name

__all__ = [
    "OPS",
    "Action",
    "Call",
    "Fault",
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

_PER_ITEM = frozenset({"exists", "put", "get", "delete", "settle"})
_TIMED = _PER_ITEM | {"list", "usage"}
OPS = _TIMED | {"close", "register_region", "unregister_region"}
"""Every operation that a fault can hit."""

LATE_CALL_TIMEOUT_S = 30.0
"""Time for the operation that an action carries out after the call, with a deadline of its own."""

Proceed = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True, slots=True)
class Call:
    """One call as an action sees it.

    Attributes:
        op: Name of the method.
        items: Its items.
        chosen: Indices of the items that the rule is for; empty only where a call has no items.
        deadline: As given, None for methods without one.
        inner: The backend below, for what `proceed` does not do.
        late: Waits, and work after the call.
        random: Seeded by the script's seed, the rule and the item: independent of threads.
        other_name: Name of another record of so many bytes that went through, or None.
    """

    op: str
    items: Sequence[Any]
    chosen: tuple[int, ...]
    deadline: Deadline | None
    inner: Backend
    late: LateWork
    random: random.Random
    other_name: Callable[[str, int], str | None]

    def split(self, proceed: Proceed, answers: Callable[[Any], object]) -> Any:
        """Let the items that were not chosen proceed, and answer the others with `answers(item)`, in order."""
        rest = [item for index, item in enumerate(self.items) if index not in self.chosen]
        results = proceed(rest) if rest else []
        if not isinstance(results, list) or len(results) != len(rest):
            return results
        others = iter(results)
        return [answers(item) if index in self.chosen else next(others) for index, item in enumerate(self.items)]


class Action(ABC):
    """What a rule does to a call. Subclass it for faults of your own."""

    ops: ClassVar[frozenset[str]] = OPS
    """The operations it makes sense for."""

    @abstractmethod
    def run(self, call: Call, proceed: Proceed) -> Any:
        """Carry the call out, or pretend to: whatever this returns or raises, the caller gets.

        `proceed(items)` passes items on to the next rule, and in the end to the backend below.
        """


@dataclass(frozen=True, slots=True)
class Fault:
    """One rule: `action` happens to calls of `op` that the other fields select.

    A call is hit when at least one of its items is chosen; actions that work item by item leave the rest of the call alone.

    Attributes:
        op: Name of a method, or `*` for every method the action makes sense for, except `close` and the two for regions.
        action: What happens.
        names: Chooses items by name (tickets, prefixes and regions by their text); None chooses all.
        skip: Calls that would be hit but are let through first.
        times: Calls that are hit after that; None for no limit.
        probability: Of each item to be chosen, drawn from the script's seed, the rule, the name, and how often the rule saw that
            name: the same in every run, whatever the threads do. (After 100,000 other names a name is as good as new.)
    """

    op: str
    action: Action
    names: Callable[[str], bool] | None = None
    skip: int = 0
    times: int | None = None
    probability: float = 1.0

    def __post_init__(self) -> None:
        if self.op != "*" and self.op not in OPS:
            raise ValueError(f"Fault: op: {self.op!r} is no operation; choose from * {' '.join(sorted(OPS))}")
        if self.op != "*" and self.op not in self.action.ops:
            raise ValueError(
                f"Fault: {type(self.action).__name__} makes no sense for {self.op}, only for {' '.join(sorted(self.action.ops))}"
            )
        if not 0.0 <= self.probability <= 1.0 or self.skip < 0 or (self.times is not None and self.times < 0):
            raise ValueError("Fault: probability must be from 0 to 1, skip and times not negative")

    def covers(self, op: str) -> bool:
        """Whether calls of `op` can be hit."""
        return op in self.action.ops and (self.op == op or (self.op == "*" and op in _TIMED))


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

    ops: ClassVar[frozenset[str]] = _TIMED
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

    ops: ClassVar[frozenset[str]] = _PER_ITEM
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
