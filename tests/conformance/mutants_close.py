"""Backends that break the profile liveness: what becomes of them, and of calls, when they are closed, and when their process forks."""

from __future__ import annotations

import atexit
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mutant import FsMutant, MemoryMutant

from kvstore_sdk.backend import Backend, Capabilities, ClosedError, Deadline, Fork, GetResult, GetStatus, ListPage, PutResult, PutStatus
from kvstore_sdk.testing.wrapper import item_name

Proceed = Callable[[Sequence[Any]], Any]

HANG_S = 12.0
"""Well beyond the 5 s that `close` and the calls under it have, and what a check adds for a busy machine."""


class RaisesWhenClosedAgain(MemoryMutant):
    breaks = "KV-LIVE-08"

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.closed = False

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "close":
            if self.closed:
                raise ValueError("already closed")
            self.closed = True
        return proceed(items)


class HangsWhenClosedAgain(RaisesWhenClosedAgain):
    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "close":
            if self.closed:
                time.sleep(HANG_S)
            self.closed = True
        return proceed(items)


class UnderClose(MemoryMutant):
    """Takes its time for calls once several threads make them, and goes wrong in those that `close` comes into."""

    breaks = "KV-LIVE-09"
    wrong_op, call_s = "get", 0.3

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.closing = threading.Event()
        self.callers: set[int] = set()

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "close":
            self.closing.set()
            return proceed(items)
        self.callers.add(threading.get_ident())
        if op == self.wrong_op and len(self.callers) > 1 and not self.closing.is_set() and self.closing.wait(self.call_s):
            return self.go_wrong(items)
        return proceed(items)

    def go_wrong(self, items: Sequence[Any]) -> Any:
        raise NotImplementedError


class RaisesUnderClose(UnderClose):
    def go_wrong(self, items: Sequence[Any]) -> Any:
        raise ConnectionResetError("connection reset by close")


class MissesUnderClose(UnderClose):
    def go_wrong(self, items: Sequence[Any]) -> Any:
        return [GetResult(GetStatus.MISSING) for _ in items]


class LosesWhatItStoresUnderClose(UnderClose):
    wrong_op = "put"

    def go_wrong(self, items: Sequence[Any]) -> Any:
        return [PutResult(PutStatus.STORED) for _ in items]


class HangsUnderClose(UnderClose):
    def go_wrong(self, items: Sequence[Any]) -> Any:
        time.sleep(HANG_S)
        return [GetResult(GetStatus.CLOSED) for _ in items]


class WorksAfterClose(MemoryMutant):
    breaks = "KV-LIVE-10"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        return None if op == "close" else proceed(items)


class RaisesAfterClose(MemoryMutant):
    breaks = "KV-LIVE-10"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "exists" and self.inner._closed:
            raise ClosedError("exists: the backend is closed")
        return proceed(items)


class FailsAfterClose(MemoryMutant):
    breaks = "KV-LIVE-10"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "put" and self.inner._closed:
            return [PutResult.failed(ClosedError(f"put {put.name}: the backend is closed")) for put in items]
        return proceed(items)


class FallsOverItsClosedConnection(MemoryMutant):
    """It needs none for names that it knows: those are what calls that run while it closes are about."""

    breaks = "KV-LIVE-10"

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.connected = True
        self.known: set[str] = set()

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "close":
            self.connected = False
            return proceed(items)
        names = {*map(item_name, items)}
        if not self.connected and not names <= self.known:
            raise AttributeError("'NoneType' object has no attribute 'execute'")
        self.known |= names
        return proceed(items)


class ListsNothingAfterClose(MemoryMutant):
    breaks = "KV-LIVE-10"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "list" and self.inner._closed:
            return ListPage((), None)
        return proceed(items)


class WorksInAForkedChildThoughItRefuses(MemoryMutant):
    breaks = "KV-LIVE-11"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        self.inner._pid = os.getpid()
        return proceed(items)


class RefusesInAForkedChildThoughItWorks(MemoryMutant):
    breaks = "KV-LIVE-11"

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities, fork=Fork.WORKS)


class HoldsALockOverAFork(MemoryMutant):
    """Has one lock for all, which whoever forks may leave held for ever; who asks for the same again and again holds it long."""

    breaks = "KV-LIVE-11"

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.lock = threading.Lock()
        self.asked: Counter[str] = Counter()

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        with self.lock:
            if op == "exists":
                self.asked.update(items)
                time.sleep(0.05 if self.asked[items[0]] > 2 else 0.0)
            return proceed(items)


class CleansUpInAForkedChildThatCloses(FsMutant):
    breaks = "KV-LIVE-12"

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.pid = os.getpid()

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "close" and os.getpid() != self.pid:
            shutil.rmtree(self.inner._root)
        return proceed(items)


class CleansUpInAForkedChildThatEnds(FsMutant):
    breaks = "KV-LIVE-12"

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        atexit.register(shutil.rmtree, f"{inner._root}", ignore_errors=True)

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        return proceed(items)


class LeaksAThread(MemoryMutant):
    breaks = "KV-LIVE-13"

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        # It ends, but not with the backend.
        threading.Thread(target=time.sleep, args=(60.0,), daemon=True).start()


class LeaksADescriptor(MemoryMutant):
    breaks = "KV-LIVE-13"

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.lock_file = os.open(os.devnull, os.O_RDONLY)


MUTANTS = (
    RaisesWhenClosedAgain,
    HangsWhenClosedAgain,
    RaisesUnderClose,
    MissesUnderClose,
    LosesWhatItStoresUnderClose,
    HangsUnderClose,
    WorksAfterClose,
    RaisesAfterClose,
    FailsAfterClose,
    FallsOverItsClosedConnection,
    ListsNothingAfterClose,
    WorksInAForkedChildThoughItRefuses,
    RefusesInAForkedChildThoughItWorks,
    HoldsALockOverAFork,
    CleansUpInAForkedChildThatCloses,
    CleansUpInAForkedChildThatEnds,
    LeaksAThread,
    LeaksADescriptor,
)
