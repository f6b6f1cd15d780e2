"""A backend that writes down what it is asked, and where its caller breaks the contract."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

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
    Region,
    SupportsRegions,
    is_valid_name,
)
from kvstore_sdk.testing.faults import Proceed
from kvstore_sdk.testing.wrapper import BackendWrapper, item_name

__all__ = ["RecordedCall", "RecordingBackend"]

MAX_CALLS = 100_000
"""Calls that are kept, and tickets that may still be asked about; older ones are dropped."""

MAX_BREACHES = 10_000
"""Breaches that are kept: the first ones, of which later ones are often the consequence."""

_BATCHED = {"exists", "put", "get", "delete"}


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call that has ended.

    Attributes:
        op: Name of the method.
        names: Of its items; tickets, prefixes and regions by their text.
        sizes: Bytes of each put or get.
        thread: Name of the thread that called.
        started_s: By `time.monotonic()`.
        ended_s: Likewise.
        results: What was returned, or the exception that was raised.
    """

    op: str
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    thread: str
    started_s: float
    ended_s: float
    results: Any


@dataclass(frozen=True, slots=True, eq=False)
class _Use:
    """Memory that a call may touch: `written` by a get."""

    op: str
    name: str
    buffer: Buffer
    written: bool

    def meets(self, other: _Use) -> bool:
        mine, theirs = self.buffer, other.buffer
        return (
            (self.written or other.written)
            and mine.region is theirs.region
            and mine.offset < theirs.offset + theirs.length
            and theirs.offset < mine.offset + mine.length
        )


class RecordingBackend(BackendWrapper):
    """Passes every call on, and keeps what was called, when, by whom, and what came back.

    It also checks its caller, which for the SDK's own tests is the Tier. `breaches` has a line for each call with: more items than
    `max_batch`, more parts than `max_parts`, more bytes than `max_record_bytes`, an invalid or overlong name, one name twice, a
    buffer that is not aligned, lies outside its region, or lies in a region that was not registered; more calls at a time than
    `max_concurrency`; a get into memory that another call, or an operation in doubt, may still use; a ticket that was not given out.
    """

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._calls: deque[RecordedCall] = deque(maxlen=MAX_CALLS)
        self._breaches: list[str] = []
        self._running = 0
        self._most = 0
        self._regions: set[int] = set()
        self._wants_regions = isinstance(inner, SupportsRegions)
        self._uses: set[_Use] = set()
        self._in_doubt: dict[object, list[_Use]] = {}
        # Every one that was given out, in that order.
        self._tickets: dict[object, None] = {}

    @property
    def calls(self) -> list[RecordedCall]:
        """The calls that have ended, in that order, the last 100,000 of them."""
        with self._lock:
            return list(self._calls)

    @property
    def breaches(self) -> list[str]:
        """What the caller did that the contract forbids, a line each, the first 10,000 of them."""
        with self._lock:
            return list(self._breaches)

    @property
    def max_concurrency_seen(self) -> int:
        """Most calls of `exists`, `put`, `get` and `delete` that ran at the same time."""
        with self._lock:
            return self._most

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        names = tuple(map(item_name, items))
        sizes = tuple(item.size_bytes for item in items if isinstance(item, (Put, Get)))
        started_s = time.monotonic()
        results: Any = None
        uses = [_Use(op, item.name, part, True) for item in items if isinstance(item, Get) for part in item.into]
        uses += [_Use(op, item.name, part, False) for item in items if isinstance(item, Put) for part in item.parts]
        with self._running_call(op, items, uses):
            try:
                results = proceed(items)
            except BaseException as error:
                results = error
                raise
            finally:
                self._learn(op, items, uses, results)
                with self._lock:
                    self._calls.append(
                        RecordedCall(op, names, sizes, threading.current_thread().name, started_s, time.monotonic(), results)
                    )
        return results

    @contextmanager
    def _running_call(self, op: str, items: Sequence[Any], uses: list[_Use]) -> Iterator[None]:
        batched = op in _BATCHED
        with self._lock:
            self._running += batched
            self._most = max(self._most, self._running)
            self._breaches += self._faults_of(op, items, uses)
            del self._breaches[MAX_BREACHES:]
            self._uses.update(uses)
        try:
            yield
        finally:
            with self._lock:
                self._running -= batched
                self._uses.difference_update(uses)

    def _faults_of(self, op: str, items: Sequence[Any], uses: list[_Use]) -> Iterator[str]:
        offered = self.inner.capabilities
        if op == "settle":
            for ticket in items:
                if ticket not in self._tickets and ticket not in self._in_doubt:
                    yield f"settle: {ticket!r} was never given out"
        if op == "register_region":
            if items[0].id in self._regions:
                yield f"register_region: {items[0]!r} is registered already"
            self._regions.add(items[0].id)
        if op == "unregister_region":
            region: Region = items[0]
            self._regions.discard(region.id)
            for use in self._in_use():
                if use.buffer.region is region:
                    yield f"unregister_region: {region!r} is in use by {use.op} {use.name}"
        if op not in _BATCHED:
            return
        if self._running > offered.max_concurrency:
            yield f"{op}: {self._running} calls at a time, max_concurrency is {offered.max_concurrency}"
        if len(items) > offered.max_batch:
            yield f"{op}: {len(items)} items, max_batch is {offered.max_batch}"
        names = [item_name(item) for item in items]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield f"{op} {name}: twice in one call"
        for name in names:
            if not is_valid_name(name, offered.max_name_bytes):
                yield f"{op} {name}: not a valid name of at most {offered.max_name_bytes} bytes"
        for item in items:
            if isinstance(item, (Put, Get)):
                parts = item.parts if isinstance(item, Put) else item.into
                if len(parts) > offered.max_parts:
                    yield f"{op} {item.name}: {len(parts)} parts, max_parts is {offered.max_parts}"
                if item.size_bytes > offered.max_record_bytes:
                    yield f"{op} {item.name}: {item.size_bytes} bytes, max_record_bytes is {offered.max_record_bytes}"
        for index, use in enumerate(uses):
            yield from self._faults_of_buffer(use, offered.align_bytes)
            for other in [*self._in_use(), *uses[:index]]:
                if use.meets(other):
                    yield f"{op} {use.name}: its memory is in use by {other.op} {other.name}"

    def _in_use(self) -> list[_Use]:
        return [*self._uses, *(use for uses in self._in_doubt.values() for use in uses)]

    def _faults_of_buffer(self, use: _Use, align_bytes: int) -> Iterator[str]:
        part = use.buffer
        where = f"{use.op} {use.name}: buffer [{part.offset}, {part.offset + part.length}) of region {part.region.id}"
        if part.address % align_bytes or part.length % align_bytes:
            yield f"{where} is not aligned to {align_bytes} bytes"
        if part.offset < 0 or part.length < 0 or part.offset + part.length > part.region.size_bytes:
            yield f"{where} lies outside it"
        if self._wants_regions and part.region.id not in self._regions:
            yield f"{where}, which is not registered"

    def _learn(self, op: str, items: Sequence[Any], uses: list[_Use], results: Any) -> None:
        """Keep what is in doubt as in use, until a `settle` says otherwise."""
        if not isinstance(results, list) or len(results) != len(items):
            return
        with self._lock:
            for item, result in zip(items, results, strict=True):
                if op == "settle" and result is True:
                    self._in_doubt.pop(item, None)
                if isinstance(result, (PutResult, GetResult)) and result.status in (PutStatus.IN_DOUBT, GetStatus.IN_DOUBT):
                    self._tickets[result.ticket] = None
                    if len(self._tickets) > MAX_CALLS:
                        del self._tickets[next(iter(self._tickets))]
                    self._in_doubt[result.ticket] = [use for use in uses if use.name == item.name]
