"""One opened backend, as a check drives it: in names and records, with a watch over every call and a log of all of them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore_sdk.backend import (
    Advice,
    Backend,
    Buffer,
    Deadline,
    DeleteStatus,
    Failure,
    Get,
    GetResult,
    GetStatus,
    ListEntry,
    ListPage,
    Mode,
    Put,
    PutResult,
    PutStatus,
    Usage,
)
from kvstore_sdk_conformance.data import Record
from kvstore_sdk_conformance.failure import ConformanceFailure, require, show, show_difference
from kvstore_sdk_conformance.memory import INSIDE, Arena
from kvstore_sdk_conformance.watched import CALL_S, WatchedBackend

__all__ = ["VISIBLE_S", "Got", "View"]

PARTS = 32
"""Of a bounded store: a record of a check is one of them at most, so that all of a check fit, and none is evicted under its hands."""

VISIBLE_S = 10.0
"""Without `read_after_write`: how long what was STORED or DELETED may take to be seen, as long as caches of remote mounts keep a miss."""
_LOOK_S = 0.02
_TRIES = 3
_PAGES = 10_000

_GOOD_PUTS = (PutStatus.STORED, PutStatus.EXISTS)
_LOST = (PutStatus.UNKNOWN, PutStatus.IN_DOUBT)
_LOST_GETS = (GetStatus.IN_DOUBT, GetStatus.TIMED_OUT)
_AGAIN = (PutStatus.UNKNOWN, PutStatus.TIMED_OUT, PutStatus.IN_DOUBT)


@dataclass(frozen=True, slots=True)
class Got:
    """The answer to one get, and what its buffers held then."""

    result: GetResult
    bytes: bytes


class View(WatchedBackend):
    """A watched backend in names and records.

    An operation without `timeout_s` is *settled*, so that checks need not know of stores that lose answers or show things late: a put that
    answers UNKNOWN and a get that ran out of time are repeated, and where `read_after_write` is not declared, the effect is waited for in
    this view.
    """

    def __init__(self, label: str, backend: Backend, log: Callable[[str], None], capacity_bytes: int | None = None) -> None:
        super().__init__(label, backend, log)
        self._capacity_bytes = capacity_bytes

    # Sizes.

    def fit(self, size: int, parts: int = PARTS) -> int:
        """The nearest size that the backend takes, and of which a bounded store holds so many records.

        A multiple of `align_bytes`, and `max_record_bytes` at most.
        """
        align, most = self.capabilities.align_bytes, self.capabilities.max_record_bytes
        if self._capacity_bytes is not None:
            most = min(most, self._capacity_bytes // parts)
        return max(align, min(-(-size // align) * align, most // align * align))

    def room_for(self, count: int, size: int) -> int:
        """So many records of this size, or as many as fill a quarter of a bounded store; at least one."""
        return count if self._capacity_bytes is None else max(1, min(count, self._capacity_bytes // 4 // size))

    def batches(self, items: Sequence[Any]) -> Iterator[Sequence[Any]]:
        """The items in as many calls as `max_batch` asks for."""
        for start in range(0, len(items), self.capabilities.max_batch):
            yield items[start : start + self.capabilities.max_batch]

    # Operations, with what is judged left to the check.

    def put(
        self,
        name: str,
        record: Record,
        mode: Mode = Mode.CREATE,
        *,
        cuts: Sequence[int] = (),
        shift: int = 0,
        backwards: bool = False,
        timeout_s: float | None = None,
    ) -> PutResult:
        """Put a record in one part, or cut at these offsets. `backwards`: the first part has the highest address."""
        ends = [*cuts, record.size]
        lengths = [end - start for start, end in itertools.pairwise([0, *ends])]
        how = "".join([f", {mode}" if mode is not Mode.CREATE else "", f", cuts={list(cuts)}" if cuts else "", _how(shift, backwards)])
        self._log(f"{self._label}.put({name!r}, {record}{how})")
        with self.lend(lengths, shift, backwards=backwards) as arena:
            _fill(arena.buffers, record.bytes)
            return self._put([Put(name, tuple(arena.buffers), mode)], timeout_s)[0]

    def put_all(
        self, records: Sequence[tuple[str, Record]], mode: Mode = Mode.CREATE, *, timeout_s: float | None = None
    ) -> list[PutResult]:
        """Put several records in one call."""
        self._log(f"{self._label}.put_all({list(records)}{f', {mode}' if mode is not Mode.CREATE else ''})")
        with self.lend([record.size for _, record in records]) as arena:
            for buffer, (_, record) in zip(arena.buffers, records, strict=True):
                buffer.view[:] = record.bytes
            puts = [Put(name, (buffer,), mode) for buffer, (name, _) in zip(arena.buffers, records, strict=True)]
            return self._put(puts, timeout_s)

    def put_from(
        self, arena: Arena, name: str, record: Record, mode: Mode = Mode.CREATE, *, timeout_s: float | None = None
    ) -> list[PutResult]:
        """Put a record from all buffers of an arena, which stays the check's."""
        self._log(f"{self._label}.put({name!r}, {record}{f', {mode}' if mode is not Mode.CREATE else ''})")
        _fill(arena.buffers, record.bytes)
        return self.put_parts(name, arena.buffers, mode, timeout_s=timeout_s)

    def put_parts(self, name: str, parts: Sequence[Buffer], mode: Mode = Mode.CREATE, *, timeout_s: float | None = None) -> list[PutResult]:
        """Put what lies in these buffers, wherever they come from. The check logs it."""
        return self._put([Put(name, tuple(parts), mode)], timeout_s)

    def put_items(self, puts: Sequence[Put]) -> list[PutResult]:
        """Put what the check has made itself, in one call. The check logs it."""
        return self._put(puts, None)

    def get_items(self, gets: Sequence[Get]) -> list[GetResult]:
        """Get what the check has made itself, in one call. The check logs it."""
        results: list[GetResult] = list(self._call("get", gets))
        for _ in range(_TRIES):
            if not (lost := [index for index, result in enumerate(results) if result.status in _LOST_GETS]):
                break
            for index, result in zip(lost, self._call("get", [gets[index] for index in lost]), strict=True):
                results[index] = result
        return results

    def get_into(self, arena: Arena, name: str, *, timeout_s: float | None = None) -> GetResult:
        """Get a record into all buffers of an arena, which stays the check's."""
        self._log(f"{self._label}.get({name!r}, {', '.join(str(buffer.length) for buffer in arena.buffers)})")
        results: list[GetResult] = self._call("get", [Get(name, tuple(arena.buffers))], timeout_s)
        return results[0]

    def get(self, name: str, *sizes: int, shift: int = 0, backwards: bool = False, timeout_s: float | None = None) -> Got:
        """Get a record into buffers of these sizes. `backwards`: the first buffer has the highest address."""
        self._log(f"{self._label}.get({name!r}, {', '.join(map(str, sizes))}{_how(shift, backwards)})")
        with self.lend(sizes, shift, backwards=backwards) as arena:
            return self._get(arena, name, timeout_s)

    def get_all(self, wanted: Sequence[tuple[str, int]], *, timeout_s: float | None = None) -> list[Got]:
        """Get several records in one call, each into one buffer of its size."""
        self._log(f"{self._label}.get_all({list(wanted)})")
        with self.lend([size for _, size in wanted]) as arena:
            _blank(arena.buffers)
            gets = [Get(name, (buffer,)) for buffer, (name, _) in zip(arena.buffers, wanted, strict=True)]
            results = self._call("get", gets, timeout_s)
            found = [Got(result, bytes(buffer.view)) for result, buffer in zip(results, arena.buffers, strict=True)]
        if timeout_s is not None:
            return found
        return [self._look(*item) if got.result.status in _LOST_GETS else got for item, got in zip(wanted, found, strict=True)]

    def exists(self, *names: str, timeout_s: float | None = None) -> list[bool | Failure]:
        self._log(f"{self._label}.exists({', '.join(map(repr, names))})")
        answers: list[bool | Failure] = self._call("exists", names, timeout_s)
        return answers

    def delete(self, *names: str, timeout_s: float | None = None) -> list[DeleteStatus | Failure]:
        self._log(f"{self._label}.delete({', '.join(map(repr, names))})")
        answers: list[DeleteStatus | Failure] = self._call("delete", names, timeout_s)
        if timeout_s is None and not self.capabilities.read_after_write:
            self.wait_until(lambda: True not in self._call("exists", names))
        return answers

    def page(self, prefix: str = "", cursor: str | None = None, limit: int = 1000, *, timeout_s: float = CALL_S) -> ListPage:
        self._log(f"{self._label}.page({prefix!r}, {cursor!r}, {limit})")
        deadline = Deadline.after(timeout_s)
        backend: Any = self.backend
        page = self.watched("list", lambda: backend.list(prefix, deadline, cursor, limit), timeout_s)
        good = (
            isinstance(page, ListPage)
            and isinstance(page.cursor, str | None)
            and all(isinstance(entry, ListEntry) for entry in page.entries)
        )
        require(good, "a ListPage of ListEntry, with a cursor of text or None", page, breaks="KV-CORE-02")
        found: ListPage = page
        return found

    def walk(self, prefix: str = "", limit: int = 1000) -> list[ListEntry]:
        """Every entry of every page."""
        found: list[ListEntry] = []
        cursor: str | None = None
        for _ in range(_PAGES):
            page = self.page(prefix, cursor, limit)
            found += page.entries
            cursor = page.cursor
            if cursor is None:
                return found
        raise ConformanceFailure("a walk that ends", f"a cursor still after {_PAGES} pages", breaks="KV-LIST-03")

    def usage(self, *, timeout_s: float = CALL_S) -> Usage:
        self._log(f"{self._label}.usage()")
        deadline = Deadline.after(timeout_s)
        backend: Any = self.backend
        usage = self.watched("usage", lambda: backend.usage(deadline), timeout_s)
        require(isinstance(usage, Usage), "a Usage", usage, breaks="KV-CORE-02")
        found: Usage = usage
        return found

    # What other checks build on: a failure here is a failure of the requirement that is built on.

    def store(self, *records: tuple[str, Record], mode: Mode = Mode.CREATE) -> None:
        """Store records that the check needs, trying again what may be tried again."""
        for batch in self.batches(records):
            left = list(batch)
            results: list[PutResult] = []
            for _ in range(_TRIES):
                results = self.put_all(left, mode)
                left = [item for item, result in zip(left, results, strict=True) if _may_try_again(result)]
                if bad := [result for result in results if result.status not in _GOOD_PUTS and not _may_try_again(result)]:
                    raise ConformanceFailure("STORED", show(bad[0]), breaks="KV-CORE-01")
                if not left:
                    break
            require(not left, f"STORED after {_TRIES} tries", results, breaks="KV-CORE-01")

    def check_found(self, name: str, record: Record, *, breaks: str | None = None, note: str = "") -> None:
        """The record has to be there, whole."""
        got = self.get(name, record.size)
        if not self.capabilities.read_after_write and not _is(got, record):
            self.wait_until(lambda: _is(self._look(name, record.size), record))
            got = self._look(name, record.size)
        require(got.result.status is GetStatus.FOUND, f"FOUND for {name}", got.result, breaks=breaks, note=note)
        if got.bytes != record.bytes:
            raise ConformanceFailure(
                f"the bytes that were stored as {name}", show_difference(record.bytes, got.bytes), breaks=breaks, note=note
            )

    def check_missing(self, name: str, size: int = 4096, *, breaks: str | None = None, note: str = "") -> None:
        """Nothing may be there, for `exists` and for `get`."""
        [there] = self.exists(name)
        if there is True and not self.capabilities.read_after_write:
            self.wait_until(lambda: True not in self._call("exists", (name,)))
            [there] = self.exists(name)
        require(there is False, f"exists to answer False for {name}", there, breaks=breaks, note=note)
        got = self.get(name, self.fit(size))
        require(got.result.status is GetStatus.MISSING, f"MISSING for {name}", got.result, breaks=breaks, note=note)

    def wait_until(self, holds: Callable[[], bool], within_s: float = VISIBLE_S) -> None:
        """Ask again and again until it holds, or the time is over; what follows from that is the caller's."""
        until = Deadline.after(within_s)
        while not holds() and not until.expired:
            time.sleep(_LOOK_S)

    def _put(self, puts: Sequence[Put], timeout_s: float | None) -> list[PutResult]:
        results: list[PutResult] = list(self._call("put", puts, timeout_s))
        if timeout_s is not None:
            return results
        for _ in range(_TRIES):
            if not (unknown := [index for index, result in enumerate(results) if result.status in _LOST]):
                break
            again = self._call("put", [puts[index] for index in unknown])
            for index, result in zip(unknown, again, strict=True):
                # EXISTS may mean the put whose answer was lost. An error says nothing about that one: it stays unknown.
                if result.status in _GOOD_PUTS:
                    results[index] = PutResult(PutStatus.STORED)
        if not self.capabilities.read_after_write:
            for put, result in zip(puts, results, strict=True):
                if result.status is PutStatus.STORED:
                    self._wait_visible(put.name, b"".join(part.view for part in put.parts))
        return results

    def _wait_visible(self, name: str, record: bytes) -> None:
        def is_visible() -> bool:
            got = self._look(name, len(record))
            return got.result.status is GetStatus.FOUND and got.bytes == record

        self.wait_until(is_visible)

    def _look(self, name: str, size: int) -> Got:
        with self.lend([size]) as arena:
            return self._get(arena, name)

    def _get(self, arena: Arena, name: str, timeout_s: float | None = None) -> Got:
        for left in reversed(range(_TRIES)):
            _blank(arena.buffers)
            [result] = self._call("get", [Get(name, tuple(arena.buffers))], timeout_s)
            if timeout_s is not None or not left or result.status not in _LOST_GETS:
                break
        return Got(result, b"".join(buffer.view for buffer in arena.buffers))


def _fill(buffers: Sequence[Buffer], record: bytes) -> None:
    start = 0
    for buffer in buffers:
        buffer.view[:] = record[start : start + buffer.length]
        start += buffer.length


def _is(got: Got, record: Record) -> bool:
    return got.result.status is GetStatus.FOUND and got.bytes == record.bytes


def _how(shift: int, backwards: bool) -> str:
    return f"{f', shift={shift}' if shift else ''}{', backwards=True' if backwards else ''}"


def _blank(buffers: Sequence[Buffer]) -> None:
    # Not with zeros: a record may have many, and a backend that leaves them out would not be noticed.
    for buffer in buffers:
        buffer.view[:] = bytes([INSIDE]) * buffer.length


def _may_try_again(result: PutResult) -> bool:
    if result.status is PutStatus.FAILED:
        return result.error is not None and result.error.advice is Advice.RETRY
    return result.status in _AGAIN
