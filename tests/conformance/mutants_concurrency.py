"""Backends that break the profile concurrency."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from core_mutant import CoreMutant, Proceed, bytes_of, fill, with_record

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
"""In the middle of an operation: long enough for another thread to come."""


class ConcurrencyMutant(CoreMutant):
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
            self.scratch = b"".join(part.view for part in get.into)
            time.sleep(PAUSE_S)
            fill(get, self.scratch[: get.size_bytes])
        return result


class TakesOneCallAtATime(ConcurrencyMutant):
    """And refuses the others, though it declares more."""

    breaks = "KV-CONC-01"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op not in ("put", "get", "exists"):
            return super().around(op, items, deadline, proceed)
        if not self.lock.acquire(blocking=False):
            raise UnavailableError(f"{op}: the connection is in use")
        try:
            time.sleep(PAUSE_S / 4)
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
        time.sleep(PAUSE_S)
        return self.last if len(self.last) == len(results) else results


class SharesTemporaryFiles(ConcurrencyMutant):
    """Named after the record: writers of one name write into one file."""

    mode: ClassVar[Mode] = Mode.CREATE

    def one_put(self, put: Put, proceed: Callable[[Put], PutResult]) -> PutResult:
        if put.mode is not self.mode or put.size_bytes <= 4096:
            return proceed(put)
        files: dict[str, bytearray] = self.__dict__.setdefault("files", {})
        record, half = bytes_of(put), put.size_bytes // 2
        file = files.setdefault(put.name, bytearray(len(record)))
        if len(file) != len(record):
            file = files[put.name] = bytearray(len(record))
        file[:half] = record[:half]
        time.sleep(PAUSE_S)
        file[half:] = record[half:]
        time.sleep(PAUSE_S)
        result = proceed(with_record(put, bytes(file)))
        files.pop(put.name, None)
        return result


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
            time.sleep(PAUSE_S)
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

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "delete":
            for name in items:
                self.known().pop(name, None)
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
            time.sleep(PAUSE_S)
            result = proceed(get)
            if version == self.known().get(get.name, 0):
                break
        else:
            return result
        if result.status is GetStatus.FOUND and first is not None and len(first) == get.size_bytes:
            fill(replace(get, into=get.into[:1]), first[: get.into[0].length // 2])
        return result


class ReadsASlotThatWasGivenAway(ConcurrencyMutant):
    """Looks up where the record is, and reads it there, where by then another one may be."""

    breaks = "KV-CONC-04"
    last_deleted: str = ""

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "delete" and len(items) == 1:
            self.last_deleted = items[0]
        return super().around(op, items, deadline, proceed)

    def one_get(self, get: Get, proceed: Callable[[Get], GetResult]) -> GetResult:
        there = self.record(get.name)
        time.sleep(PAUSE_S if there is not None else 0)
        # Deleted meanwhile: its place is that of the record that was stored next.
        if there is not None and self.last_deleted == get.name and self.record(get.name) is None:
            others = [record for record in list(self.inner._shelf.records.values()) if len(record) == get.size_bytes]
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
