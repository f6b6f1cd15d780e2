"""Backends that are right and unusual: in doubt about what ran out of time; strict about the memory they are given."""

from __future__ import annotations

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
    Get,
    GetResult,
    GetStatus,
    InvalidError,
    Put,
    PutResult,
    PutStatus,
    Region,
)
from kvstore_sdk.testing import BackendWrapper
from kvstore_sdk_backends.memory import open_memory

__all__ = ["InDoubt", "Regions", "open_in_doubt", "open_regions", "open_regions_in_doubt"]

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
        try:
            jobs = [self._pool.submit(self._carry_out, method, item) for item in items]
        except RuntimeError:
            # The pool ended between the look at `_closed` and here.
            return proceed(items)
        wait(jobs, deadline.remaining_s())
        return [self._answer(op, job) for job in jobs]

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

    def _carry_out(self, method: Callable[..., Any], item: Put | Get) -> Any:
        if item.size_bytes >= SLOW_FROM_BYTES:
            time.sleep(SLOW_S)
        [result] = method([item], Deadline.after(10.0))
        return result

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
