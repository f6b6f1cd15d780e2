"""Records that are not what was stored: changed, short, torn, stale, another's."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from kvstore_sdk.backend import (
    Backend,
    Deadline,
    DeleteStatus,
    Get,
    GetResult,
    GetStatus,
    Put,
    PutResult,
    PutStatus,
    Region,
    SupportsRegions,
)
from kvstore_sdk.testing.faults import Action, Call, Proceed

__all__ = ["LATE_CALL_TIMEOUT_S", "Stale", "SwapRecords", "Torn", "WrongBytes", "WrongSize", "fill"]

LATE_CALL_TIMEOUT_S = 30.0
"""Time for the operation that an action carries out after the call, with a deadline of its own."""


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
                fill(get, self._change(_content(get), call.random))
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
class Torn(Action):
    """Of each chosen record only the beginning is right, though its size is.

    A get is FOUND and leaves the rest of its buffers as it was: a read that ended early and did not notice. A put is STORED with zeros
    for the rest: what a power cut leaves of a file that was not synced.

    Attributes:
        length: Bytes that are right. None: drawn anew for each record.
    """

    ops: ClassVar[frozenset[str]] = frozenset({"put", "get"})
    length: int | None = None

    def __post_init__(self) -> None:
        if self.length is not None and self.length < 0:
            raise ValueError(f"Torn: length {self.length} must not be negative")

    def run(self, call: Call, proceed: Proceed) -> Any:
        if call.op == "put":
            return _store_copies(call, proceed, self._tear)
        before = {index: _content(call.items[index]) for index in call.chosen}
        results = proceed(call.items)
        for index, old in before.items():
            if _found(results, index):
                get = call.items[index]
                length = self._right(get.size_bytes, call.random)
                fill(get, _content(get)[:length] + old[length:])
        return results

    def _tear(self, record: bytes, draw: random.Random) -> bytes:
        return record[: self._right(len(record), draw)].ljust(len(record), b"\0")

    def _right(self, size_bytes: int, draw: random.Random) -> int:
        return draw.randrange(size_bytes) if self.length is None else self.length


@dataclass(frozen=True, slots=True)
class Stale(Action):
    """Each chosen put answers STORED, each delete DELETED, and readers see that `seconds` later (None: on `release`), the old until then.

    The buffers are free when the call returns: what is stored is a copy.
    """

    ops: ClassVar[frozenset[str]] = frozenset({"put", "delete"})
    seconds: float | None = None

    def run(self, call: Call, proceed: Proceed) -> Any:
        said = PutResult(PutStatus.STORED) if call.op == "put" else DeleteStatus.DELETED
        results = call.split(proceed, lambda _: said)
        for index in call.chosen:
            if call.op == "put":
                self._put_later(call, call.items[index])
            else:
                self._delete_later(call, call.items[index])
        return results

    def _put_later(self, call: Call, put: Put) -> None:
        copy = _Copy(call.inner, _content(put))
        late = replace(put, parts=(copy.buffer,))

        def work() -> None:
            results = None
            try:
                results = call.inner.put([late], Deadline.after(LATE_CALL_TIMEOUT_S))
            finally:
                copy.done(results)

        call.late.later(self.seconds, work, ())

    def _delete_later(self, call: Call, name: str) -> None:
        inner: Any = call.inner
        call.late.later(self.seconds, lambda: inner.delete([name], Deadline.after(LATE_CALL_TIMEOUT_S)), ())


class _Copy:
    """A record in memory of its own, known to the backend that is to store it."""

    def __init__(self, inner: Backend, record: bytes) -> None:
        self._inner = inner
        self._region = region = Region(len(record), "kvstore-testing")
        region.view[: len(record)] = record
        if isinstance(inner, SupportsRegions):
            inner.register_region(region)
        self.buffer = region.buffer(0, len(record))

    def done(self, results: object) -> None:
        """The put returned. A store in doubt still reads the copy, which then lives until the process ends."""
        if isinstance(results, list) and any(getattr(result, "ticket", None) is not None for result in results):
            return
        if isinstance(self._inner, SupportsRegions):
            self._inner.unregister_region(self._region)
        self._region.close()


def _found(results: object, index: int) -> bool:
    """Whether this item was read; another rule may have bent the answer."""
    result = results[index] if isinstance(results, list) and index < len(results) else None
    return isinstance(result, GetResult) and result.status is GetStatus.FOUND


def fill(get: Get, record: bytes) -> None:
    """Write a record into the buffers of a get."""
    start = 0
    for part in get.into:
        part.view[:] = record[start : start + part.length]
        start += part.length


def _content(item: Put | Get) -> bytes:
    return b"".join(part.view for part in (item.parts if isinstance(item, Put) else item.into))


def _store_copies(call: Call, proceed: Proceed, change: Callable[[bytes, random.Random], bytes]) -> Any:
    """Proceed with changed copies of the chosen puts: their buffers are the caller's, who may read them meanwhile."""
    puts, copies = list(call.items), []
    for index in call.chosen:
        copies.append(_Copy(call.inner, change(_content(puts[index]), call.random)))
        puts[index] = replace(puts[index], parts=(copies[-1].buffer,))
    results = None
    try:
        results = proceed(puts)
        return results
    finally:
        for copy in copies:
            copy.done(results)
