"""One opened backend, as a check drives it: in names and records, with a watch over every call and a log of all of them."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore_sdk.backend import (
    Advice,
    Backend,
    BackendError,
    Buffer,
    Capabilities,
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
    Region,
    SupportsRegions,
    SupportsSettle,
    Usage,
)
from kvstore_sdk_conformance.callers import Callers, HungError
from kvstore_sdk_conformance.data import Record
from kvstore_sdk_conformance.failure import CallRaised, ConformanceFailure, require, show, show_difference
from kvstore_sdk_conformance.memory import INSIDE, Arena

__all__ = ["CALL_S", "GRACE_S", "VISIBLE_S", "Got", "View"]

CALL_S = 10.0
"""Deadline of a call, unless its check is about deadlines: what a slow store over a network needs for a batch."""
GRACE_S = 5.0
"""After the deadline: then the call hangs. A busy machine needs some; a backend that is so late is late by any measure."""
SETTLE_S = 30.0
SLOW_BYTES_PER_S = 20e6
"""What even a slow store moves; the deadline of a call grows with its bytes."""
VISIBLE_S = 10.0
"""Without `read_after_write`: how long what was STORED or DELETED may take to be seen, as long as caches of remote mounts keep a miss."""
_LOOK_S = 0.02
_TRIES = 3
_PAGES = 10_000
_LOST_ARENAS: list[Arena] = []

_GOOD_PUTS = (PutStatus.STORED, PutStatus.EXISTS)
_LOST = (PutStatus.UNKNOWN, PutStatus.IN_DOUBT)
_AGAIN = (PutStatus.UNKNOWN, PutStatus.TIMED_OUT, PutStatus.IN_DOUBT)


@dataclass(frozen=True, slots=True)
class Got:
    """The answer to one get, and what its buffers held then."""

    result: GetResult
    bytes: bytes


class View:
    """An open backend under a letter, as the log calls it.

    Every call is made on a thread that can be left behind, and has to be answered within its deadline and a grace, in the form that
    the contract gives it; otherwise the requirement that says so is broken, whatever was being checked.

    A put or delete without `timeout_s` is *settled*, so that checks need not know of stores that lose answers or show things late: a
    put that answers UNKNOWN is repeated, and where `read_after_write` is not declared, the effect is waited for in this view.
    """

    def __init__(self, label: str, backend: Backend, log: Callable[[str], None]) -> None:
        self.backend = backend
        self.capabilities: Capabilities = backend.capabilities
        self._label = label
        self._log = log
        self._callers = Callers()
        self._lock = threading.Lock()
        self._arenas: list[Arena] = []
        self._doubtful: set[int] = set()
        self.names: set[str] = set()
        self.hung = False
        self.closed = False

    # Sizes.

    def fit(self, size: int) -> int:
        """The nearest size that the backend takes: a multiple of `align_bytes`, `max_record_bytes` at most."""
        align = self.capabilities.align_bytes
        return max(align, min(-(-size // align) * align, self.capabilities.max_record_bytes // align * align))

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
        self._log(f"{self._label}.put_all({_short(records)}{f', {mode}' if mode is not Mode.CREATE else ''})")
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

    def get_into(self, arena: Arena, name: str, *, timeout_s: float | None = None) -> GetResult:
        """Get a record into all buffers of an arena, which stays the check's."""
        self._log(f"{self._label}.get({name!r}, {', '.join(str(buffer.length) for buffer in arena.buffers)})")
        results: list[GetResult] = self.raw("get", [Get(name, tuple(arena.buffers))], timeout_s)
        return results[0]

    def get(self, name: str, *sizes: int, shift: int = 0, backwards: bool = False, timeout_s: float | None = None) -> Got:
        """Get a record into buffers of these sizes. `backwards`: the first buffer has the highest address."""
        self._log(f"{self._label}.get({name!r}, {', '.join(map(str, sizes))}{_how(shift, backwards)})")
        with self.lend(sizes, shift, backwards=backwards) as arena:
            return self._get(arena, name, timeout_s)

    def get_all(self, wanted: Sequence[tuple[str, int]], *, timeout_s: float | None = None) -> list[Got]:
        """Get several records in one call, each into one buffer of its size."""
        self._log(f"{self._label}.get_all({_short(wanted)})")
        with self.lend([size for _, size in wanted]) as arena:
            _blank(arena.buffers)
            gets = [Get(name, (buffer,)) for buffer, (name, _) in zip(arena.buffers, wanted, strict=True)]
            results = self.raw("get", gets, timeout_s)
            return [Got(result, bytes(buffer.view)) for result, buffer in zip(results, arena.buffers, strict=True)]

    def exists(self, *names: str, timeout_s: float = CALL_S) -> list[bool | Failure]:
        self._log(f"{self._label}.exists({', '.join(map(repr, names[:8]))}{', ...' if len(names) > 8 else ''})")
        answers: list[bool | Failure] = self.raw("exists", names, timeout_s)
        return answers

    def delete(self, *names: str, timeout_s: float | None = None) -> list[DeleteStatus | Failure]:
        self._log(f"{self._label}.delete({', '.join(map(repr, names[:8]))}{', ...' if len(names) > 8 else ''})")
        answers: list[DeleteStatus | Failure] = self.raw("delete", names, timeout_s)
        if timeout_s is None and not self.capabilities.read_after_write:
            self.wait_until(lambda: True not in self.raw("exists", names))
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

    def close(self, limit_s: float = 5.0) -> None:
        """Close the backend, once more if it is closed. The threads that called it end; memory that is not lent goes."""
        self._log(f"{self._label}.close()")
        with self._lock:
            arenas, self._arenas = self._arenas, []
        with contextlib.ExitStack() as steps:
            # In reverse, and each of them whatever the others do.
            steps.callback(self.drop)
            steps.callback(self._close_backend, limit_s)
            for arena in arenas:
                steps.callback(self._discard, arena)

    def drop(self) -> None:
        """End what belongs to this view, without closing the backend. Idempotent."""
        self._callers.stop()
        with self._lock:
            arenas, self._arenas = self._arenas, []
        for arena in arenas:
            arena.close()

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
            self.wait_until(lambda: True not in self.raw("exists", (name,)))
            [there] = self.exists(name)
        require(there is False, f"exists to answer False for {name}", there, breaks=breaks, note=note)
        got = self.get(name, self.fit(size))
        require(got.result.status is GetStatus.MISSING, f"MISSING for {name}", got.result, breaks=breaks, note=note)

    # The calls themselves.

    @contextlib.contextmanager
    def lend(self, lengths: Sequence[int], shift: int = 0, *, backwards: bool = False) -> Iterator[Arena]:
        """Memory with buffers of these lengths that nobody else uses; it comes back, unless a call that hangs may still touch it."""
        arena = self._take(Arena.size_for(lengths, shift))
        arena.lay_out(lengths[::-1] if backwards else lengths, shift)
        if backwards:
            arena.buffers.reverse()
        try:
            yield arena
        finally:
            self._give_back(arena)

    def raw(
        self,
        op: str,
        items: Sequence[Any],
        timeout_s: float | None = None,
        *,
        grace_s: float = GRACE_S,
        breaks: str = "KV-LIVE-03",
        settle: bool = True,
    ) -> Any:
        """One call of `exists`, `put`, `get` or `delete`: its answer, of the contract's form.

        Args:
            op: Name of the method.
            items: As the method takes them.
            timeout_s: Of its deadline, from now; below zero it has passed.
            grace_s: After the deadline: then the call hangs.
            breaks: What a call that hangs breaks.
            settle: Wait until no item is in doubt any more.
        """
        if timeout_s is None:
            timeout_s = CALL_S + sum(getattr(item, "size_bytes", 0) for item in items) / SLOW_BYTES_PER_S
        deadline = Deadline.after(timeout_s)
        method = getattr(self.backend, op)
        if op == "put":
            self.names.update(item.name for item in items)
        results = self.watched(op, lambda: method(items, deadline), timeout_s, grace_s=grace_s, breaks=breaks)
        self._check_form(op, items, results)
        in_doubt = [(item, result) for item, result in zip(items, results, strict=True) if _is_in_doubt(result)]
        # Memory that was in doubt once is used no more: a backend that settles too early shall not break what is checked later.
        self._doubtful |= {buffer.region.id for item, _ in in_doubt for buffer in (item.parts if op == "put" else item.into)}
        if in_doubt and settle:
            self.settle([result.ticket for _, result in in_doubt])
        return results

    def watched(self, op: str, call: Callable[[], Any], timeout_s: float, *, grace_s: float = GRACE_S, breaks: str = "KV-LIVE-03") -> Any:
        """The result of a call of the backend.

        Raises:
            CallRaised: it raised.
            ConformanceFailure: it did not return in time.
        """
        try:
            return self._callers.run(call, max(0.0, timeout_s) + grace_s)
        except HungError:
            late = f"{grace_s:g} s after its deadline" if grace_s else f"after {timeout_s:g} s"
            self.hung = True
            raise ConformanceFailure(f"{op} to return by its deadline", f"no return {late}", breaks=breaks) from None
        except ConformanceFailure:
            raise
        except BaseException as error:
            raise CallRaised(op, error) from error

    def wait_until(self, holds: Callable[[], bool], within_s: float = VISIBLE_S) -> None:
        """Ask again and again until it holds, or the time is over; what follows from that is the caller's."""
        until = Deadline.after(within_s)
        while not holds() and not until.expired:
            time.sleep(_LOOK_S)

    def settle(self, tickets: Sequence[Any], within_s: float = SETTLE_S) -> None:
        """Wait until these operations are over.

        Raises:
            ConformanceFailure: they are not.
        """
        require(isinstance(self.backend, SupportsSettle), "settle beside IN_DOUBT", "no such method", breaks="KV-CORE-21")
        until = Deadline.after(within_s)
        left = list(tickets)
        while left and not until.expired:
            over = self.ask_settled(left, min(1.0, until.remaining_s()))
            left = [ticket for ticket, done in zip(left, over, strict=True) if not done]
        require(
            not left, f"settle to answer True within {within_s:g} s", f"{len(left)} tickets that are still in doubt", breaks="KV-LIVE-07"
        )

    def ask_settled(self, tickets: Sequence[Any], timeout_s: float) -> list[bool]:
        """One call of `settle`."""
        backend: Any = self.backend
        deadline = Deadline.after(timeout_s)
        try:
            over = self.watched("settle", lambda: backend.settle(tickets, deadline), timeout_s, breaks="KV-LIVE-07")
        except CallRaised as raised:
            raise ConformanceFailure("an answer from settle", raised.seen, breaks="KV-LIVE-07") from raised
        good = isinstance(over, list) and len(over) == len(tickets) and all(isinstance(one, bool) for one in over)
        require(good, f"a list of {len(tickets)} bools from settle", over, breaks="KV-LIVE-07")
        found: list[bool] = over
        return found

    def _put(self, puts: Sequence[Put], timeout_s: float | None) -> list[PutResult]:
        results: list[PutResult] = list(self.raw("put", puts, timeout_s))
        if timeout_s is not None:
            return results
        for _ in range(_TRIES):
            if not (unknown := [index for index, result in enumerate(results) if result.status in _LOST]):
                break
            again = self.raw("put", [puts[index] for index in unknown])
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
        _blank(arena.buffers)
        [result] = self.raw("get", [Get(name, tuple(arena.buffers))], timeout_s)
        return Got(result, b"".join(buffer.view for buffer in arena.buffers))

    def _check_form(self, op: str, items: Sequence[Any], results: object) -> None:
        kinds: dict[str, tuple[type, ...]] = {
            "exists": (bool, Failure),
            "put": (PutResult,),
            "get": (GetResult,),
            "delete": (DeleteStatus, Failure),
        }
        kind = kinds[op]
        wanted = f"a list of {len(items)} {' or '.join(one.__name__ for one in kind)} from {op}"
        require(isinstance(results, list), wanted, f"a {type(results).__name__}", breaks="KV-CORE-02")
        assert isinstance(results, list)
        require(len(results) == len(items), wanted, f"a list of {len(results)}", breaks="KV-CORE-02")
        for result in results:
            require(isinstance(result, kind), wanted, f"one of {type(result).__name__}: {result!r}", breaks="KV-CORE-02")
            if isinstance(result, (PutResult, GetResult)):
                status = PutStatus if isinstance(result, PutResult) else GetStatus
                require(isinstance(result.status, status), f"a status of {status.__name__}", result, breaks="KV-CORE-02")
                if result.status in (PutStatus.IN_DOUBT, GetStatus.IN_DOUBT):
                    require(self.capabilities.in_doubt, "IN_DOUBT only with in_doubt declared", result, breaks="KV-LIVE-06")
                    require(
                        result.ticket is not None and _is_hashable(result.ticket),
                        "a hashable ticket with IN_DOUBT",
                        result,
                        breaks="KV-LIVE-06",
                    )
            if isinstance(result, Failure) or getattr(result, "status", None) in (PutStatus.FAILED, GetStatus.FAILED):
                require(isinstance(result.error, BackendError), f"a BackendError with the failure of {op}", result, breaks="KV-ERR-01")

    def _take(self, size_bytes: int) -> Arena:
        with self._lock:
            for index, arena in enumerate(self._arenas):
                if arena.region.size_bytes >= size_bytes:
                    return self._arenas.pop(index)
            smaller, self._arenas = self._arenas, []
        for arena in smaller:
            self._discard(arena)
        arena = Arena(max(size_bytes, 1 << 20))
        self._announce("register_region", arena.region, "KV-REG-01")
        return arena

    def _give_back(self, arena: Arena) -> None:
        if self.hung or arena.region.id in self._doubtful:
            # A call that hangs, or is in doubt, may touch it as long as this process lives.
            _LOST_ARENAS.append(arena)
            return
        with self._lock:
            self._arenas.append(arena)

    def _discard(self, arena: Arena) -> None:
        try:
            self._announce("unregister_region", arena.region, "KV-REG-02")
        finally:
            arena.close()

    def _close_backend(self, limit_s: float) -> None:
        self.closed = True
        try:
            self.watched("close", self.backend.close, limit_s, grace_s=0.0, breaks="KV-LIVE-08")
        except CallRaised as raised:
            raise ConformanceFailure("close to raise nothing", raised.seen, breaks="KV-LIVE-08") from raised

    def _announce(self, op: str, region: Region, breaks: str) -> None:
        if self.closed or not isinstance(self.backend, SupportsRegions):
            return
        method = getattr(self.backend, op)
        try:
            self.watched(op, lambda: method(region), CALL_S)
        except CallRaised as raised:
            raise ConformanceFailure(f"{op} to return", raised.seen, breaks=breaks) from raised


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


def _is_in_doubt(result: object) -> bool:
    return getattr(result, "status", None) in (PutStatus.IN_DOUBT, GetStatus.IN_DOUBT)


def _is_hashable(ticket: object) -> bool:
    try:
        hash(ticket)
    except TypeError:
        return False
    return True


def _short(items: Sequence[object]) -> str:
    return f"[{', '.join(map(str, items[:4]))}{f', ... {len(items) - 4} more' if len(items) > 4 else ''}]"
