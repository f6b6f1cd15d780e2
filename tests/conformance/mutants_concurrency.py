"""Backends that break the profile concurrency."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from core_mutant import CoreMutant, Proceed, bytes_of, fill, with_record
from meeting import Meeting

from kvstore_sdk.backend import (
    Backend,
    Deadline,
    Get,
    GetResult,
    GetStatus,
    InvalidError,
    Mode,
    Put,
    PutResult,
    PutStatus,
    UnavailableError,
)

PAUSE_S = 0.002
"""In the middle of an operation, where no other thread was seen yet."""


class ConcurrencyMutant(Meeting, CoreMutant):
    """Right as long as it is called by one thread at a time."""

    profiles: ClassVar[Sequence[str]] = ("core", "atomicity")

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.lock = threading.Lock()
        self.busy: dict[str, int] = {}


class ReadsIntoOneScratchBuffer(ConcurrencyMutant):
    """Which all calls of the view share."""

    breaks = "KV-CONC-01"
    scratch = b""

    def one_get(self, get: Get, proceed: Callable[[Get], GetResult]) -> GetResult:
        result = proceed(get)
        if result.status is GetStatus.FOUND:
            self.scratch = mine = b"".join(part.view for part in get.into)
            self.place.wait("get", "get", lambda: self.scratch is not mine, PAUSE_S)
            fill(get, self.scratch[: get.size_bytes])
        return result


class TakesOneCallAtATime(ConcurrencyMutant):
    """And refuses the others, though it declares more."""

    breaks = "KV-CONC-01"
    refused = 0

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op not in ("put", "get", "exists"):
            return super().around(op, items, deadline, proceed)
        if not self.lock.acquire(blocking=False):
            self.refused += 1
            raise UnavailableError(f"{op}: the connection is in use")
        try:
            before = self.refused
            self.place.wait(op, op, lambda: self.refused > before, PAUSE_S / 4)
            return super().around(op, items, deadline, proceed)
        finally:
            self.lock.release()


class AnswersWhoeverAsksFirst(ConcurrencyMutant):
    """Threads send on one connection, and take the first answer for theirs."""

    breaks = "KV-CONC-01"
    last: Sequence[Any] = ()

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        results = super().around(op, items, deadline, proceed)
        if op != "exists":
            return results
        self.last = results
        self.place.wait("exists", "exists", lambda: self.last is not results, PAUSE_S)
        return self.last if len(self.last) == len(results) else results


class SharesTemporaryFiles(ConcurrencyMutant):
    """Named after the record: of writers of one name the first one makes the file, and each writes its end into it."""

    mode: ClassVar[Mode] = Mode.CREATE

    def one_put(self, put: Put, proceed: Callable[[Put], PutResult]) -> PutResult:
        if put.mode is not self.mode or put.size_bytes <= 4096:
            return proceed(put)
        files: dict[str, bytearray] = self.__dict__.setdefault("files", {})
        shared: set[str] = self.__dict__.setdefault("shared", set())
        record, half = bytes_of(put), put.size_bytes // 2
        with self.lock:
            self.busy[put.name] = self.busy.get(put.name, 0) + 1
            if self.busy[put.name] > 1:
                shared.add(put.name)
            file = files.setdefault(put.name, bytearray(record))
            if len(file) == len(record):
                file[half:] = record[half:]
        self.place.wait("put", "put", lambda: self.busy[put.name] > 1, PAUSE_S)
        try:
            return proceed(with_record(put, bytes(file)) if len(file) == len(record) else put)
        finally:
            with self.lock:
                self.busy[put.name] -= 1
                if not self.busy[put.name] and put.name not in shared:
                    del files[put.name]


class MixesCreators(SharesTemporaryFiles):
    breaks = "KV-CONC-02"


class MixesReplacers(SharesTemporaryFiles):
    breaks = "KV-CONC-03"
    mode = Mode.REPLACE


class FailsWhoeverComesSecond(ConcurrencyMutant):
    """A lock of the record that is tried once."""

    mode: ClassVar[Mode] = Mode.CREATE

    def one_put(self, put: Put, proceed: Callable[[Put], PutResult]) -> PutResult:
        if put.mode is not self.mode:
            return proceed(put)
        with self.lock:
            taken = self.busy.get(put.name, 0)
            self.busy[put.name] = taken + 1
        try:
            if taken:
                return self.lost(put)
            self.place.wait("put", "put", lambda: self.busy[put.name] > 1, PAUSE_S)
            return proceed(put)
        finally:
            with self.lock:
                self.busy[put.name] -= 1

    def lost(self, put: Put) -> PutResult:
        return PutResult.failed(InvalidError(f"put {put.name}: File exists"))


class FailsTheSecondCreator(FailsWhoeverComesSecond):
    breaks = "KV-CONC-02"


class FailsTheSecondReplacer(FailsWhoeverComesSecond):
    breaks = "KV-CONC-03"
    mode = Mode.REPLACE


class TellsTheSecondReplacerThatItExists(FailsWhoeverComesSecond):
    breaks = "KV-CONC-03"
    mode = Mode.REPLACE

    def lost(self, put: Put) -> PutResult:
        return PutResult(PutStatus.EXISTS)


class MistakesOneVersionForAnother(ConcurrencyMutant):
    """Reads in two steps, and again if the version has changed; a record that was deleted and created anew has the same version."""

    breaks = "KV-CONC-04"
    versions: ClassVar[dict[int, dict[str, int]]] = {}

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.deleted: set[str] = set()

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "delete":
            for name in items:
                self.known().pop(name, None)
                self.deleted.add(name)
        return super().around(op, items, deadline, proceed)

    def known(self) -> dict[str, int]:
        return self.versions.setdefault(id(self.inner._shelf), {})

    def one_put(self, put: Put, proceed: Callable[[Put], PutResult]) -> PutResult:
        there = self.record(put.name) is not None
        result = proceed(put)
        if there and result.status is PutStatus.STORED:
            self.known()[put.name] = self.known().get(put.name, 0) + 1
        return result

    def one_get(self, get: Get, proceed: Callable[[Get], GetResult]) -> GetResult:
        for _ in range(20):
            version, first = self.known().get(get.name, 0), self.record(get.name)
            if now := self.later(get, version, first):
                half = len(now) // 2
                fill(get, (first or b"")[:half] + now[half:])
                return GetResult(GetStatus.FOUND)
            result = proceed(get)
            if version == self.known().get(get.name, 0):
                break
        return result

    def later(self, get: Get, version: int, first: bytes | None) -> bytes | None:
        """Another record of that version, if there comes to be one; both have the length that is asked for."""
        name, size = get.name, get.size_bytes
        found: list[bytes] = []

        def came() -> bool:
            now = self.record(name)
            if now is not None and len(now) == size and now != first and version == self.known().get(name, 0):
                found.append(now)
            return bool(found)

        if first is not None and len(first) == size and not version and name in self.deleted:
            self.place.wait("get", "delete", came, PAUSE_S)
        else:
            time.sleep(PAUSE_S)
        return found[0] if found else None


class ReadsASlotThatWasGivenAway(ConcurrencyMutant):
    """Looks up where the record is, and reads it there, where by then another one may be."""

    breaks = "KV-CONC-04"
    last_deleted: str = ""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.deleted: set[str] = set()

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "delete" and len(items) == 1:
            self.last_deleted = items[0]
            self.deleted.add(items[0])
        return super().around(op, items, deadline, proceed)

    def one_get(self, get: Get, proceed: Callable[[Get], GetResult]) -> GetResult:
        # Deleted meanwhile: its place is that of the record that was stored next.
        others: list[bytes] = []

        def came() -> bool:
            if self.last_deleted == get.name and self.record(get.name) is None:
                others.extend(record for record in list(self.inner._shelf.records.values()) if len(record) == get.size_bytes)
            return bool(others)

        if self.record(get.name) is not None:
            if get.name in self.deleted:
                self.place.wait("get", "delete", came, PAUSE_S)
            else:
                time.sleep(PAUSE_S)
        if others:
            fill(get, others[-1])
            return GetResult(GetStatus.FOUND)
        return proceed(get)


MUTANTS = (
    ReadsIntoOneScratchBuffer,
    TakesOneCallAtATime,
    AnswersWhoeverAsksFirst,
    MixesCreators,
    MixesReplacers,
    FailsTheSecondCreator,
    FailsTheSecondReplacer,
    TellsTheSecondReplacerThatItExists,
    MistakesOneVersionForAnother,
    ReadsASlotThatWasGivenAway,
)
