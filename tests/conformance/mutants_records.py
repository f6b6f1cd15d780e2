"""Backends that break the profile core: records and whether they are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from core_mutant import CoreMutant, Proceed, bytes_of, fill, with_record
from mutant import MemoryMutant

from kvstore_sdk.backend import (
    Deadline,
    Get,
    GetResult,
    GetStatus,
    InvalidError,
    Put,
    PutResult,
)

# 1: the bytes.


class FlipsABitOfLargeRecords(CoreMutant):
    breaks = "KV-CORE-01"

    def one_get(self, get: Get, proceed: Callable[[Get], GetResult]) -> GetResult:
        result = proceed(get)
        if result.status is GetStatus.FOUND and get.size_bytes > 65536:
            get.into[-1].view[-1] ^= 1
        return result


class CutsTrailingZeros(CoreMutant):
    """As a column of text does."""

    breaks = "KV-CORE-01"

    def one_put(self, put: Put, proceed: Callable[[Put], PutResult]) -> PutResult:
        record = bytes_of(put)
        kept = record.rstrip(b"\0")
        return proceed(with_record(put, kept or b"\0") if len(kept) + 16 < len(record) else put)


class TranslatesLineEnds(CoreMutant):
    """A file that was opened as text."""

    breaks = "KV-CORE-01"

    def one_put(self, put: Put, proceed: Callable[[Put], PutResult]) -> PutResult:
        record = bytes_of(put)
        return proceed(with_record(put, record.replace(b"\r\n", b"\n")) if record.startswith(b"\r\n") else put)


# 3 and 4: what is there, and what is not.


class FindsEverything(MemoryMutant):
    breaks = "KV-CORE-03"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        return [True] * len(items) if op == "exists" else proceed(items)


class RemembersMisses(MemoryMutant):
    """A name that was not there once is not looked for again."""

    breaks = "KV-CORE-03"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        results = proceed(items)
        if op == "exists":
            missed = self.__dict__.setdefault("missed", set())
            missed |= {name for name, there in zip(items, results, strict=True) if there is False}
            return [there if name not in missed else False for name, there in zip(items, results, strict=True)]
        return results


class LooksForPrefixes(MemoryMutant):
    """Asks the store for a listing of the name, and takes any entry for it."""

    breaks = "KV-CORE-03"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "exists":
            return [any(found.startswith(name) for found in self.inner._shelf.records) for name in items]
        return proceed(items)


class RaisesForAMiss(CoreMutant):
    breaks = "KV-CORE-04"

    def one_get(self, get: Get, proceed: Callable[[Get], GetResult]) -> GetResult:
        result = proceed(get)
        if result.status is GetStatus.MISSING:
            raise KeyError(get.name)
        return result


class CallsAMissAFailure(CoreMutant):
    breaks = "KV-CORE-04"

    def one_get(self, get: Get, proceed: Callable[[Get], GetResult]) -> GetResult:
        result = proceed(get)
        return GetResult.failed(InvalidError(f"get {get.name}: not found")) if result.status is GetStatus.MISSING else result


class FindsNothingForAMiss(CoreMutant):
    """What is not there is a record of no bytes."""

    breaks = "KV-CORE-04"

    def one_get(self, get: Get, proceed: Callable[[Get], GetResult]) -> GetResult:
        result = proceed(get)
        return GetResult.wrong_size(0, get.size_bytes) if result.status is GetStatus.MISSING else result


# 5: another size.


class FillsWhatFits(CoreMutant):
    breaks = "KV-CORE-05"

    def one_get(self, get: Get, proceed: Callable[[Get], GetResult]) -> GetResult:
        result = proceed(get)
        if result.status is GetStatus.WRONG_SIZE:
            fill(get, self.record(get.name) or b"")
            return GetResult(GetStatus.FOUND)
        return result


class LeavesLargerBuffersHalfFull(CoreMutant):
    breaks = "KV-CORE-05"

    def one_get(self, get: Get, proceed: Callable[[Get], GetResult]) -> GetResult:
        result = proceed(get)
        if result.status is GetStatus.WRONG_SIZE and (result.size_bytes or 0) < get.size_bytes:
            return GetResult(GetStatus.FOUND)
        return result


class SwapsTheSizes(CoreMutant):
    breaks = "KV-CORE-05"

    def one_get(self, get: Get, proceed: Callable[[Get], GetResult]) -> GetResult:
        result = proceed(get)
        return replace(result, size_bytes=result.asked_bytes, asked_bytes=result.size_bytes)


class MissesAnotherSize(CoreMutant):
    breaks = "KV-CORE-05"

    def one_get(self, get: Get, proceed: Callable[[Get], GetResult]) -> GetResult:
        result = proceed(get)
        return GetResult(GetStatus.MISSING) if result.status is GetStatus.WRONG_SIZE else result


class RaisesForAnotherSize(CoreMutant):
    """Also for readers that race with a replacement, and for a record that was cut."""

    breaks = "KV-CORE-05"
    profiles = ("atomicity", "concurrency", "deletion", "tier")

    def one_get(self, get: Get, proceed: Callable[[Get], GetResult]) -> GetResult:
        result = proceed(get)
        if result.status is GetStatus.WRONG_SIZE:
            raise ValueError(f"cannot copy {result.size_bytes} bytes into {get.size_bytes}")
        return result


class MeasuresTheFirstBuffer(CoreMutant):
    breaks = "KV-CORE-05"

    def one_get(self, get: Get, proceed: Callable[[Get], GetResult]) -> GetResult:
        record = self.record(get.name)
        if record is not None and len(record) == get.into[0].length:
            fill(get, record)
            return GetResult(GetStatus.FOUND)
        return proceed(get)


MUTANTS = (
    FlipsABitOfLargeRecords,
    CutsTrailingZeros,
    TranslatesLineEnds,
    FindsEverything,
    RemembersMisses,
    LooksForPrefixes,
    RaisesForAMiss,
    CallsAMissAFailure,
    FindsNothingForAMiss,
    FillsWhatFits,
    LeavesLargerBuffersHalfFull,
    SwapsTheSizes,
    MissesAnotherSize,
    RaisesForAnotherSize,
    MeasuresTheFirstBuffer,
)
