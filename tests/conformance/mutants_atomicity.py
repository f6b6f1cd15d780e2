"""Backends that break the profile atomicity."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from core_mutant import CoreMutant, Proceed, bytes_of
from meeting import Meeting

from kvstore_sdk.backend import Deadline, Get, GetResult, GetStatus, InvalidError, Mode, Put, PutResult, PutStatus

PAUSE_S = 0.003
"""In the middle of a write: what a disk or a network takes, where nobody looks."""
CACHED_S = 30.0
_put_off_lock = threading.Lock()


class AtomicityMutant(Meeting, CoreMutant):
    profiles: ClassVar[Sequence[str]] = ("core",)

    def store(self, name: str, record: bytes) -> None:
        """Behind the back of the caller: the record, or a part of it, is visible from now on."""
        shelf = self.inner._shelf
        with shelf.lock:
            shelf.used_bytes += len(record) - len(shelf.records.get(name, b""))
            shelf.records[name] = record

    def drop(self, name: str) -> None:
        with self.inner._shelf.lock:
            self.inner._shelf.records.pop(name, None)

    def in_steps(self, put: Put, proceed: Callable[[Put], PutResult], first: bytes | None) -> PutResult:
        """Show `first`, or nothing, until somebody has looked, and then the record; if that fails, what was there before."""
        old = self.record(put.name)
        if first is None:
            self.drop(put.name)
        else:
            self.store(put.name, first)
        self.place.wait_for("put", "get", put.name, PAUSE_S)
        result = proceed(replace(put, mode=Mode.REPLACE))
        if result.status is not PutStatus.STORED:
            if old is None:
                self.drop(put.name)
            else:
                self.store(put.name, old)
        return result


# 1: replacing.


class ReplacesInPlace(AtomicityMutant):
    breaks = "KV-ATOM-01"

    def one_put(self, put: Put, proceed: Callable[[Put], PutResult]) -> PutResult:
        old, record = self.record(put.name), bytes_of(put)
        if old is not None and put.mode is Mode.REPLACE and len(record) > 4096:
            half = len(record) // 2
            return self.in_steps(put, proceed, record[:half] + old[half:])
        return proceed(put)


class RemovesBeforeItReplaces(AtomicityMutant):
    breaks = "KV-ATOM-01"

    def one_put(self, put: Put, proceed: Callable[[Put], PutResult]) -> PutResult:
        if put.mode is Mode.REPLACE and self.record(put.name) is not None and put.size_bytes > 4096:
            return self.in_steps(put, proceed, None)
        return proceed(put)


class TruncatesBeforeItReplaces(AtomicityMutant):
    """Opens the file with "wb", and writes it by and by."""

    breaks = "KV-ATOM-01"

    def one_put(self, put: Put, proceed: Callable[[Put], PutResult]) -> PutResult:
        if put.mode is Mode.REPLACE and self.record(put.name) is not None and put.size_bytes > 4096:
            return self.in_steps(put, proceed, bytes_of(put)[: put.size_bytes // 2])
        return proceed(put)


class ReadsInTwoSteps(AtomicityMutant):
    """Opens the record by its name for each part of it."""

    breaks = "KV-ATOM-01"

    def one_get(self, get: Get, proceed: Callable[[Get], GetResult]) -> GetResult:
        first = self.record(get.name)
        if first is None or get.size_bytes <= 4096 or len(first) != get.size_bytes or len(get.into) > 1:
            return proceed(get)
        self.place.wait("get", "put", lambda: self.record(get.name) is not first, PAUSE_S)
        result = proceed(get)
        half = len(first) // 2
        if result.status is GetStatus.FOUND:
            get.into[0].view[:half] = first[:half]
        return result


# 2: creating.


class GrowsInSight(AtomicityMutant):
    breaks = "KV-ATOM-02"

    def one_put(self, put: Put, proceed: Callable[[Put], PutResult]) -> PutResult:
        if self.record(put.name) is None and put.size_bytes > 4096:
            return self.in_steps(put, proceed, bytes_of(put)[: put.size_bytes // 2])
        return proceed(put)


class ReservesItsSize(AtomicityMutant):
    """Makes a file of the right length, and fills it."""

    breaks = "KV-ATOM-02"

    def one_put(self, put: Put, proceed: Callable[[Put], PutResult]) -> PutResult:
        if self.record(put.name) is None and put.size_bytes > 4096:
            return self.in_steps(put, proceed, bytes_of(put)[:4096] + bytes(put.size_bytes - 4096))
        return proceed(put)


class AnnouncesWhatItWillStore(AtomicityMutant):
    """Its index is written before the data."""

    breaks = "KV-ATOM-02"
    coming: ClassVar[set[str]] = set()

    def one_put(self, put: Put, proceed: Callable[[Put], PutResult]) -> PutResult:
        self.coming.add(put.name)
        if put.size_bytes > 4096:
            self.place.wait_for("put", "exists", put.name, PAUSE_S)
            self.place.wait_for("put", "get", put.name, PAUSE_S)
        result = proceed(put)
        self.coming.discard(put.name)
        return result

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        results = super().around(op, items, deadline, proceed)
        if op == "exists":
            return [True if name in self.coming else there for name, there in zip(items, results, strict=True)]
        return results


# 3 and 4: failing.


class FailingMutant(AtomicityMutant):
    """Does for puts of `mode` whose answer is not STORED what it should not."""

    mode: ClassVar[Mode] = Mode.CREATE
    status: ClassVar[PutStatus] = PutStatus.TIMED_OUT

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op != "put":
            return super().around(op, items, deadline, proceed)
        records = [bytes_of(put) for put in items]
        results = proceed(items)
        for put, record, result in zip(items, records, results, strict=True):
            if result.status is self.status and put.mode is self.mode:
                self.fail(put, record)
        return results

    def fail(self, put: Put, record: bytes) -> None:
        raise NotImplementedError


class StoresWhatTimedOut(FailingMutant):
    breaks = "KV-ATOM-03"

    def fail(self, put: Put, record: bytes) -> None:
        self.store(put.name, record)


class LeavesAPartOfWhatTimedOut(FailingMutant):
    breaks = "KV-ATOM-03"

    def fail(self, put: Put, record: bytes) -> None:
        self.store(put.name, record[: len(record) // 2])


class GoesOnAfterTheDeadline(FailingMutant):
    """As by a thread that nobody told: what it does `late_s` later is done before whatever is asked after that."""

    breaks = "KV-ATOM-03"
    late_s = 0.2
    put_off: ClassVar[dict[int, list[tuple[float, str, bytes]]]] = {}

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        mine = self.put_off.setdefault(id(self.inner._shelf), [])
        with _put_off_lock:
            while mine and mine[0][0] <= time.monotonic():
                _, name, record = mine.pop(0)
                self.store(name, record)
        return super().around(op, items, deadline, proceed)

    def fail(self, put: Put, record: bytes) -> None:
        self.put_off[id(self.inner._shelf)].append((time.monotonic() + self.late_s, put.name, record))


class StoresWhileItCloses(FailingMutant):
    breaks = "KV-ATOM-03"
    status = PutStatus.CLOSED

    def fail(self, put: Put, record: bytes) -> None:
        self.store(put.name, record)


class MendsBadNames(AtomicityMutant):
    """Stores under a name that it can take, and refuses the one that it was given."""

    breaks = "KV-ATOM-03"

    def one_put(self, put: Put, proceed: Callable[[Put], PutResult]) -> PutResult:
        mended = "/".join(part for part in put.name.split("/") if part not in ("", ".", ".."))
        if mended != put.name:
            proceed(replace(put, name=mended))
            return PutResult.failed(InvalidError(f"put {put.name}: bad name"))
        return proceed(put)


class ReplacesWhatTimedOut(StoresWhatTimedOut):
    breaks = "KV-ATOM-04"
    mode = Mode.REPLACE


class ReplacesAfterTheDeadline(GoesOnAfterTheDeadline):
    breaks = "KV-ATOM-04"
    mode = Mode.REPLACE


class RemovesWhatItCouldNotReplace(FailingMutant):
    """Cleans up by the name of the record."""

    breaks = "KV-ATOM-04"
    mode = Mode.REPLACE

    def fail(self, put: Put, record: bytes) -> None:
        self.drop(put.name)


class RemovesWhatItReplacesWhileItCloses(RemovesWhatItCouldNotReplace):
    breaks = "KV-ATOM-04"
    status = PutStatus.CLOSED


# 5: visible when the call returns.


class RemembersMissesForAWhile(AtomicityMutant):
    """Saves itself a question, and knows nothing of what other views store."""

    breaks = "KV-ATOM-05"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        missed: dict[str, float] = self.__dict__.setdefault("missed", {})
        results = super().around(op, items, deadline, proceed)
        if op == "put":
            for put in items:
                missed.pop(put.name, None)
        if op == "exists":
            now_s = time.monotonic()
            for index, name in enumerate(items):
                if results[index] is False:
                    missed[name] = now_s
                elif now_s - missed.get(name, -CACHED_S) < CACHED_S:
                    results[index] = False
        return results


class ShowsTheOldRecordForAWhile(AtomicityMutant):
    """A cache of what was read, for a short time."""

    breaks = "KV-ATOM-05"

    def one_get(self, get: Get, proceed: Callable[[Get], GetResult]) -> GetResult:
        cache: dict[str, tuple[float, bytes]] = self.__dict__.setdefault("cache", {})
        read_s, record = cache.get(get.name, (-CACHED_S, b""))
        if time.monotonic() - read_s < CACHED_S and len(record) == get.size_bytes and self.record(get.name) is not None:
            start = 0
            for part in get.into:
                part.view[:] = record[start : start + part.length]
                start += part.length
            return GetResult(GetStatus.FOUND)
        result = proceed(get)
        if result.status is GetStatus.FOUND:
            cache[get.name] = (time.monotonic(), b"".join(part.view for part in get.into))
        return result

    def one_put(self, put: Put, proceed: Callable[[Put], PutResult]) -> PutResult:
        self.__dict__.setdefault("cache", {}).pop(put.name, None)
        return proceed(put)


MUTANTS = (
    ReplacesInPlace,
    RemovesBeforeItReplaces,
    TruncatesBeforeItReplaces,
    ReadsInTwoSteps,
    GrowsInSight,
    ReservesItsSize,
    AnnouncesWhatItWillStore,
    StoresWhatTimedOut,
    LeavesAPartOfWhatTimedOut,
    GoesOnAfterTheDeadline,
    StoresWhileItCloses,
    MendsBadNames,
    ReplacesWhatTimedOut,
    ReplacesAfterTheDeadline,
    RemovesWhatItCouldNotReplace,
    RemovesWhatItReplacesWhileItCloses,
    RemembersMissesForAWhile,
    ShowsTheOldRecordForAWhile,
)
