"""The calls of the parent, carried out on threads of the child."""

from __future__ import annotations

import contextlib
import itertools
import logging
import mmap
import os
import sys
from collections import deque
from typing import Any

from kvstore_sdk.backend import Backend, BreachError, Buffer, Deadline, Get, InvalidError, Mode, Put, Region, SupportsRegions, TimedOutError
from kvstore_sdk.isolation.crossing import pack_error, pack_results
from kvstore_sdk.isolation.jobs import Job, Jobs
from kvstore_sdk.isolation.line import Line
from kvstore_sdk.isolation.wire import WireError

__all__ = ["Service"]

logger = logging.getLogger("kvstore_sdk.isolation")

_END_S = 1.5
"""How long calls that run may take to end after the backend was closed; the parent waits a little longer."""


class Service:
    """Reads what the parent asks on the main thread, and calls the backend on up to `max_concurrency` others."""

    def __init__(self, backend: Backend, line: Line, label: str) -> None:
        self._backend: Any = backend
        self._line = line
        self._label = label
        self._in_doubt = backend.capabilities.in_doubt
        self._announces = isinstance(backend, SupportsRegions)
        self._regions: dict[int, Region] = {}
        self._tickets: dict[int, Any] = {}
        self._numbers = itertools.count(1)
        self._files: set[tuple[int, int]] = set()
        # What vendor code forks would go on holding the memory when this process and the engine are gone.
        os.register_at_fork(after_in_child=self._let_go_of_regions)
        self._jobs = Jobs(backend.capabilities.max_concurrency, self._answer)

    def run(self) -> None:
        """Serve until the parent says that it is over, or is gone. Never returns."""
        while True:
            (number, op, deadline_s, payload), fds = self._line.receive()
            if op == "close":
                self._close()
            elif op == "register" and not self._map(number, payload, fds):
                continue
            else:
                if op == "unregister":
                    # In the order in which it was asked, whoever carries it out when.
                    payload = self._regions.pop(payload, None)
                self._jobs.add((number, op, deadline_s, payload))

    def _answer(self, job: Job) -> None:
        self._reply(job[0], *self._carry_out(*job))

    def _reply(self, number: int, is_answer: bool, body: Any) -> None:
        try:
            self._line.send([number, is_answer, body])
        except WireError as cause:
            self._line.send([number, False, pack_error(BreachError(f"{self._label}: the answer {cause}"), self._label)])

    def _carry_out(self, number: int, op: str, deadline_s: float, payload: Any) -> tuple[bool, Any]:
        """Call the backend. Returns whether it answered, and the answer, or the error."""
        doing = f"{self._label} {op}"
        try:
            if op == "register":
                self._register(payload[0])
                return True, [True]
            if op == "unregister":
                self._unmap(payload)
                return True, [True]
            deadline = Deadline(deadline_s)
            if deadline.expired and op in ("exists", "put", "get", "delete"):
                # It waited for a worker. Nothing was begun, which is the most that can be promised.
                late = pack_error(TimedOutError(f"{doing}: the deadline passed before it was begun"), doing)
                return True, ["timed_out" if op in ("put", "get") else late] * len(payload)
            count, results = self._call(op, payload, deadline)
            if op == "settle":
                for ticket, is_over in zip(payload, results, strict=False):
                    if is_over is True:
                        self._tickets.pop(ticket, None)
            return True, self._packed(op, count, results, doing)
        except BaseException as error:  # noqa: BLE001  # vendor code may raise anything; the caller is told
            return False, pack_error(error, doing)

    def _packed(self, op: str, count: int, results: Any, doing: str) -> Any:
        """The answer, as it crosses. What cannot be looked at breaks the contract: nobody knows whether its buffers are free."""
        try:
            return pack_results(op, count, results, doing, self._keep if self._in_doubt else None)
        except BreachError:
            raise
        except BaseException as error:  # noqa: BLE001  # objects of vendor code may do anything when they are looked at
            raise BreachError(f"{doing}: the answer cannot be looked at ({type(error).__name__})") from None

    def _call(self, op: str, payload: Any, deadline: Deadline) -> tuple[int, Any]:
        if op == "put":
            puts = [Put(name, self._parts(parts), Mode(mode)) for name, mode, parts in payload]
            return len(puts), self._backend.put(puts, deadline)
        if op == "get":
            gets = [Get(name, self._parts(parts)) for name, parts in payload]
            return len(gets), self._backend.get(gets, deadline)
        if op == "settle":
            known = [ticket for ticket in payload if ticket in self._tickets]
            if not known:
                return len(payload), [True for _ in payload]
            over = dict(zip(known, self._backend.settle([self._tickets[ticket] for ticket in known], deadline), strict=True))
            return len(payload), [over.get(ticket, True) for ticket in payload]
        if op == "list":
            prefix, cursor, limit = payload
            return 1, self._backend.list(prefix, deadline, cursor, limit)
        if op == "usage":
            return 1, self._backend.usage(deadline)
        return len(payload), getattr(self._backend, op)(payload, deadline)

    def _parts(self, parts: Any) -> tuple[Buffer, ...]:
        try:
            return tuple(self._regions[region_id].buffer(offset, length) for region_id, offset, length in parts)
        except (KeyError, ValueError) as cause:
            raise InvalidError(f"{self._label}: a buffer is outside the memory that is mapped ({cause})") from None

    def _keep(self, ticket: Any) -> int:
        number = next(self._numbers)
        self._tickets[number] = ticket
        return number

    def _map(self, number: int, payload: Any, fds: deque[int]) -> bool:
        """Map a region. Whether the backend wants to be told of it; if not, the parent has its answer."""
        region_id, size_bytes, *file = payload
        if not fds or file != [(found := os.fstat(fds[0])).st_dev, found.st_ino]:
            # What is mapped under a wrong number would be written to as another region.
            logger.error("a region came with the descriptor of another file; the child ends")
            os._exit(1)
        fd = fds.popleft()
        if region_id in self._regions:
            # The next child was told already. The backend may know the address of its memory: it stays where it is.
            os.close(fd)
            self._reply(number, True, [True])
            return False
        try:
            region = Region.from_fd(fd, size_bytes, "the region")
            # A process that vendor code forks would go on having it when this one is dead.
            region.view.obj.madvise(mmap.MADV_DONTFORK)  # type: ignore[attr-defined]
        except (OSError, ValueError) as cause:
            self._reply(number, False, pack_error(cause, f"{self._label}: map a region"))
            return False
        self._regions[region_id] = region
        self._files.add((file[0], file[1]))
        if not self._announces:
            self._reply(number, True, [True])
        return self._announces

    def _let_go_of_regions(self) -> None:
        """In a forked process, which does not map them: close all descriptors of their memory. A mapping has one of its own."""
        for fd in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                found = os.fstat(fd)
                if (found.st_dev, found.st_ino) in self._files:
                    os.close(fd)

    def _register(self, region_id: int) -> None:
        """Tell the backend of a region; one that it refuses is not mapped."""
        region = self._regions.get(region_id)
        if region is None:
            raise InvalidError(f"{self._label}: the region was given up before the backend was told of it")
        try:
            self._backend.register_region(region)
        except BaseException:
            if self._regions.get(region_id) is region:
                del self._regions[region_id]
                region.close()
            raise

    def _unmap(self, region: Region | None) -> None:
        if region is None:
            return
        try:
            if self._announces:
                self._backend.unregister_region(region)
        finally:
            region.close()

    def _close(self) -> None:
        """Close the backend, let calls that run answer, and end this process."""
        with contextlib.suppress(BaseException):
            self._backend.close()
        self._jobs.wait_idle(_END_S)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(0)
