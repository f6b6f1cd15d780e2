"""Backends that are right and unusual: in doubt, strict about memory and limits, slow, unsure, at home in forked children."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

from kvstore_sdk.backend import (
    Backend,
    Buffer,
    Capabilities,
    ClosedError,
    Deadline,
    Failure,
    Fork,
    Get,
    GetResult,
    GetStatus,
    InvalidError,
    Put,
    PutResult,
    PutStatus,
    ReadOnlyError,
    Region,
    TimedOutError,
)
from kvstore_sdk.testing import BackendWrapper
from kvstore_sdk_backends.memory import open_memory

__all__ = [
    "InDoubt",
    "Mapped",
    "MappedPart",
    "Regions",
    "open_blocks",
    "open_forking",
    "open_in_doubt",
    "open_narrow",
    "open_raising_read_only",
    "open_read_only",
    "open_regions",
    "open_regions_in_doubt",
    "open_slow",
    "open_unsure",
]

SLOW_FROM_BYTES = 512 << 10
SLOW_S = 0.03
"""What a transfer of so many bytes takes here, at least: enough for a deadline to pass in the middle of it."""

Proceed = Callable[[Sequence[Any]], Any]


def open_in_doubt(location: str) -> InDoubt:
    return InDoubt(open_memory(location.strip("/")))


def open_regions(location: str) -> Regions:
    return Regions(open_memory(location.strip("/")))


def open_regions_in_doubt(location: str) -> InDoubt:
    return InDoubt(open_regions(location))


def open_narrow(location: str) -> Narrow:
    return Narrow(open_memory(location.strip("/"), max_record_bytes=Narrow.capabilities.max_record_bytes))


def open_slow(location: str) -> Slow:
    return Slow(open_memory(location.strip("/")))


def open_unsure(location: str) -> Unsure:
    return Unsure(open_memory(location.strip("/")))


def open_blocks(location: str) -> Blocks:
    return Blocks(open_memory(location.strip("/")))


def open_read_only(location: str) -> ReadOnly:
    return ReadOnly(open_memory(location.strip("/")))


def open_raising_read_only(location: str) -> RaisingReadOnly:
    return RaisingReadOnly(open_memory(location.strip("/")))


def open_forking(location: str) -> Forking:
    return Forking(open_memory(location.strip("/")))


class InDoubt(BackendWrapper):
    """Transfers run on threads of their own. What is under way when the deadline passes is in doubt, and goes on until it is done."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self._pid = os.getpid()
        self._pool = ThreadPoolExecutor(4, "in-doubt")
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._open: dict[int, Future[Any]] = {}
        self._closed = False

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities, in_doubt=True)

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "close":
            return self._end(proceed)
        if op not in ("put", "get") or deadline is None or self._closed or os.getpid() != self._pid:
            return proceed(items)
        if deadline.expired:
            timed_out: Any = PutResult(PutStatus.TIMED_OUT) if op == "put" else GetResult(GetStatus.TIMED_OUT)
            return [timed_out for _ in items]
        method = getattr(self.inner, op)
        jobs: list[Future[Any]] = []
        # Unless the pool ended between the look at `_closed` and here. What it had taken by then is done, or in doubt.
        with contextlib.suppress(RuntimeError):
            jobs.extend(self._pool.submit(self._carry_out, method, item, deadline) for item in items)
        rest = proceed(items[len(jobs) :]) if len(jobs) < len(items) else []
        wait(jobs, deadline.remaining_s())
        return [*(self._answer(op, job) for job in jobs), *rest]

    def settle(self, tickets: Sequence[Any], deadline: Deadline) -> list[bool]:
        with self._lock:
            jobs = {ticket: self._open[ticket] for ticket in tickets if ticket in self._open}
        wait(jobs.values(), deadline.remaining_s())
        return [self._is_over(ticket) for ticket in tickets]

    def _answer(self, op: str, job: Future[Any]) -> Any:
        if job.cancel():
            return PutResult(PutStatus.TIMED_OUT) if op == "put" else GetResult(GetStatus.TIMED_OUT)
        if job.done():
            return job.result()
        with self._lock:
            ticket = next(self._numbers)
            self._open[ticket] = job
        return PutResult(PutStatus.IN_DOUBT, ticket=ticket) if op == "put" else GetResult(GetStatus.IN_DOUBT, ticket=ticket)

    def _carry_out(self, method: Callable[..., Any], item: Put | Get, deadline: Deadline) -> Any:
        if item.size_bytes >= SLOW_FROM_BYTES:
            time.sleep(SLOW_S)
            self.before_transfer(item, deadline)
        [result] = method([item], Deadline.after(10.0))
        return result

    def before_transfer(self, item: Put | Get, deadline: Deadline) -> None:
        """For subclasses: a large transfer is about to begin, for a call with this deadline."""

    def _is_over(self, ticket: int) -> bool:
        with self._lock:
            job = self._open.get(ticket)
            if job is None:
                return True
            if job.done():
                del self._open[ticket]
            return job.done()

    def _end(self, proceed: Proceed) -> Any:
        self._closed = True
        # A forked child has none of the threads that would be waited for.
        if os.getpid() == self._pid:
            self._pool.shutdown()
        return proceed(())


class Regions(BackendWrapper):
    """Moves payload through mappings of its own, one for each region that was announced, and refuses all other memory."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self.known: dict[int, Mapped] = {}

    def register_region(self, region: Region) -> None:
        if os.getpid() != self._pid:
            raise ClosedError("regions register_region: opened by another process")
        mapped = Mapped(region)
        with self._lock:
            self.known[region.id] = mapped

    def unregister_region(self, region: Region) -> None:
        with self._lock:
            self.known.pop(region.id, None)

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op not in ("put", "get") or os.getpid() != self._pid:
            return proceed(items)
        answers: list[Any] = []
        for item in items:
            try:
                answers += proceed([self.own(item)])
            except InvalidError as error:
                answers.append(PutResult.failed(error) if op == "put" else GetResult.failed(error))
        return answers

    def own(self, item: Put | Get) -> Put | Get:
        """The same item, in this backend's own mappings."""
        if isinstance(item, Put):
            return replace(item, parts=tuple(self.find(item, part) for part in item.parts))
        return replace(item, into=tuple(self.find(item, part) for part in item.into))

    def find(self, item: Put | Get, part: Buffer) -> Any:
        """The part in this backend's own mapping."""
        with self._lock:
            mapped = self.known.get(part.region.id)
        if mapped is None:
            raise InvalidError(f"regions {type(item).__name__.lower()} {item.name}: region {part.region.id} was not announced")
        return MappedPart(mapped, part.offset, part.length)


class Mapped:
    """A region as another process would map it: by its descriptor, at another address."""

    def __init__(self, region: Region) -> None:
        self.map = mmap.mmap(region.fd, region.size_bytes, flags=mmap.MAP_SHARED)
        self.view = memoryview(self.map)


class MappedPart:
    """What a backend uses of a `Buffer`."""

    def __init__(self, mapped: Mapped, offset: int, length: int) -> None:
        self.view = mapped.view[offset : offset + length]
        self.length = length


class Narrow(BackendWrapper):
    """Declares as little as it may, and raises for whatever goes beyond."""

    capabilities = Capabilities(max_record_bytes=64 << 10, max_batch=1, align_bytes=4096)

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self._running = threading.Lock()

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "close":
            return proceed(items)
        if not self._running.acquire(blocking=False):
            raise AssertionError(f"narrow {op}: a second call at the same time")
        try:
            self._look(op, items)
            return proceed(items)
        finally:
            self._running.release()

    def _look(self, op: str, items: Sequence[Any]) -> None:
        if op in ("exists", "get", "put", "delete") and len(items) != 1:
            raise AssertionError(f"narrow {op}: {len(items)} items")
        for buffer in (part for item in items if op in ("get", "put") for part in (item.parts if op == "put" else item.into)):
            if buffer.address % 4096 or buffer.length % 4096:
                raise AssertionError(f"narrow {op}: {buffer} is not aligned")
        if op in ("get", "put") and len(items[0].parts if op == "put" else items[0].into) != 1:
            raise AssertionError(f"narrow {op}: several parts")


class Slow(BackendWrapper):
    """Takes its time for each call, but no more than there is."""

    call_s = 0.02

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if deadline is not None and op != "close" and items:
            time.sleep(min(self.call_s, deadline.remaining_s()))
            if deadline.expired and op in ("put", "get", "exists"):
                return [self._late(op) for _ in items]
        return proceed(items)

    def _late(self, op: str) -> Any:
        if self.inner._closed:  # type: ignore[attr-defined]
            closed: Any = {"put": PutResult(PutStatus.CLOSED), "get": GetResult(GetStatus.CLOSED)}
            return closed.get(op, Failure(ClosedError(f"slow {op}: the backend is closed")))
        late: Any = {"put": PutResult(PutStatus.TIMED_OUT), "get": GetResult(GetStatus.TIMED_OUT)}
        return late.get(op, Failure(TimedOutError(f"slow {op}: the deadline passed")))


class Unsure(BackendWrapper):
    """Loses the answer to every fifth put, of which it carries out every other one."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self._puts = itertools.count(1)

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        number = next(self._puts) if op == "put" and items else 0
        if number % 10 == 5:
            return [self._unsure(proceed([item])[0]) for item in items]
        if number and number % 10 == 0 and not self.inner._closed:  # type: ignore[attr-defined]
            return [PutResult(PutStatus.UNKNOWN) for _ in items]
        return proceed(items)

    @staticmethod
    def _unsure(result: PutResult) -> PutResult:
        return PutResult(PutStatus.UNKNOWN) if result.status is PutStatus.STORED else result


class Blocks(BackendWrapper):
    """Gives each record blocks of its own, and counts them whole."""

    block_bytes = 64 << 10

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        answer = proceed(items)
        if op != "usage":
            return answer
        records: dict[str, bytes] = self.inner._shelf.records  # type: ignore[attr-defined]
        blocks = sum(-(-len(record) // self.block_bytes) for record in records.values())
        return replace(answer, used_bytes=blocks * self.block_bytes)


class ReadOnly(BackendWrapper):
    """An archive of others: refuses every put."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities, read_only=True)

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "put" and not self.inner._closed:  # type: ignore[attr-defined]
            return self.refuse([ReadOnlyError(f"read-only put {put.name}: the store takes no writes") for put in items])
        return proceed(items)

    def refuse(self, errors: Sequence[ReadOnlyError]) -> Any:
        return [PutResult.failed(error) for error in errors]


class RaisingReadOnly(ReadOnly):
    """One error for the call as a whole."""

    def refuse(self, errors: Sequence[ReadOnlyError]) -> Any:
        raise errors[0]


class Forking(BackendWrapper):
    """Works in a forked child, where it has a copy of the records."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self._pid = os.getpid()

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities, fork=Fork.WORKS)

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if os.getpid() != self._pid:
            inner: Any = self.inner
            # Whoever held the lock in the parent is not here.
            inner._shelf.lock = threading.Lock()
            self._pid = inner._pid = os.getpid()
        return proceed(items)
