"""Backends that break the profile core: modes, and sequences of operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from core_mutant import CoreMutant, Proceed, buffer_of, bytes_of, fill, with_record

from kvstore_sdk.backend import (
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

# 10 to 13: modes.


class KeepsTheOldAndSaysStored(CoreMutant):
    breaks = "KV-CORE-10"

    def one_put(self, put: Put, proceed: Callable[[Put], PutResult]) -> PutResult:
        result = proceed(put)
        return PutResult(PutStatus.STORED) if result.status is PutStatus.EXISTS else result


class TakesThePlaceAndSaysExists(CoreMutant):
    breaks = "KV-CORE-10"

    def one_put(self, put: Put, proceed: Callable[[Put], PutResult]) -> PutResult:
        result = proceed(put)
        if result.status is PutStatus.EXISTS:
            proceed(replace(put, mode=Mode.REPLACE))
        return result


class FailsACreateOfWhatIsThere(CoreMutant):
    breaks = "KV-CORE-10"

    def one_put(self, put: Put, proceed: Callable[[Put], PutResult]) -> PutResult:
        result = proceed(put)
        return PutResult.failed(InvalidError(f"put {put.name}: File exists")) if result.status is PutStatus.EXISTS else result


class AnswersExistsToReplace(CoreMutant):
    breaks = "KV-CORE-11"

    def one_put(self, put: Put, proceed: Callable[[Put], PutResult]) -> PutResult:
        there = self.record(put.name) is not None
        result = proceed(put)
        return PutResult(PutStatus.EXISTS) if there and put.mode is Mode.REPLACE else result


class KnowsWhatItLookedFor(CoreMutant):
    """A get leaves an entry in the index, which the next CREATE takes for a record."""

    breaks = "KV-CORE-11"

    def one_get(self, get: Get, proceed: Callable[[Get], GetResult]) -> GetResult:
        result = proceed(get)
        if result.status is GetStatus.MISSING:
            self.__dict__.setdefault("index", set()).add(get.name)
        return result

    def one_put(self, put: Put, proceed: Callable[[Put], PutResult]) -> PutResult:
        known = put.name in self.__dict__.get("index", ())
        return PutResult(PutStatus.EXISTS) if known and put.mode is Mode.CREATE else proceed(put)


class KeepsTheOldTail(CoreMutant):
    """A shorter record leaves the end of the longer one behind it."""

    breaks = "KV-CORE-12"

    def one_put(self, put: Put, proceed: Callable[[Put], PutResult]) -> PutResult:
        record, old = bytes_of(put), self.record(put.name) or b""
        longer = put.mode is Mode.REPLACE and len(old) > len(record)
        return proceed(with_record(put, record + old[len(record) :]) if longer else put)


class ReplacesOtherSizesOnly(CoreMutant):
    """Takes a record of the same size for the same record."""

    breaks = "KV-CORE-12"

    def one_put(self, put: Put, proceed: Callable[[Put], PutResult]) -> PutResult:
        old = self.record(put.name)
        if old is not None and put.mode is Mode.REPLACE and len(old) == put.size_bytes:
            return PutResult(PutStatus.STORED)
        return proceed(put)


class RefusesWhatDoesNotChange(CoreMutant):
    breaks = "KV-CORE-13"

    def one_put(self, put: Put, proceed: Callable[[Put], PutResult]) -> PutResult:
        if put.mode is Mode.REPLACE and self.record(put.name) == bytes_of(put):
            return PutResult.failed(UnavailableError(f"put {put.name}: 0 rows changed"))
        return proceed(put)


class AppendsWhatIsRepeated(CoreMutant):
    """Resumes an upload that was complete."""

    breaks = "KV-CORE-13"

    def one_put(self, put: Put, proceed: Callable[[Put], PutResult]) -> PutResult:
        record = bytes_of(put)
        return proceed(with_record(put, record * 2) if put.mode is Mode.REPLACE and self.record(put.name) == record else put)


# 24: sequences.


class CachesWhatItRead(CoreMutant):
    """A view goes on showing what it has read, though another one has replaced it."""

    breaks = "KV-CORE-24"

    def one_get(self, get: Get, proceed: Callable[[Get], GetResult]) -> GetResult:
        cache: dict[str, bytes] = self.__dict__.setdefault("cache", {})
        cached = cache.get(get.name)
        if cached is not None and len(cached) == get.size_bytes:
            fill(get, cached)
            return GetResult(GetStatus.FOUND)
        result = proceed(get)
        if result.status is GetStatus.FOUND:
            cache[get.name] = b"".join(part.view for part in get.into)
        return result

    def one_put(self, put: Put, proceed: Callable[[Put], PutResult]) -> PutResult:
        self.__dict__.setdefault("cache", {}).pop(put.name, None)
        return proceed(put)

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "delete":
            for name in items:
                self.__dict__.setdefault("cache", {}).pop(name, None)
        return super().around(op, items, deadline, proceed)


class KeepsTheFirstOfTwoCuts(CoreMutant):
    """A record that is replaced in parts twice running keeps its second version."""

    breaks = "KV-CORE-24"

    def one_put(self, put: Put, proceed: Callable[[Put], PutResult]) -> PutResult:
        cut = self.__dict__.setdefault("cut", {})
        twice = put.mode is Mode.REPLACE and len(put.parts) > 1 and cut.get(put.name, False)
        cut[put.name] = len(put.parts) > 1
        return PutResult(PutStatus.STORED) if twice else proceed(put)


class GoesBackOnReopen(CoreMutant):
    """Closing writes the first version of what was replaced back."""

    breaks = "KV-CORE-24"

    def one_put(self, put: Put, proceed: Callable[[Put], PutResult]) -> PutResult:
        first = self.__dict__.setdefault("first", {})
        old = self.record(put.name)
        if old is not None and put.mode is Mode.REPLACE:
            first.setdefault(put.name, old)
        return proceed(put)

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "close":
            for name, record in self.__dict__.get("first", {}).items():
                self.inner.put([Put(name, (buffer_of(record),), Mode.REPLACE)], Deadline.after(1.0))
            self.__dict__["first"] = {}
        return super().around(op, items, deadline, proceed)


MUTANTS = (
    KeepsTheOldAndSaysStored,
    TakesThePlaceAndSaysExists,
    FailsACreateOfWhatIsThere,
    AnswersExistsToReplace,
    KnowsWhatItLookedFor,
    KeepsTheOldTail,
    ReplacesOtherSizesOnly,
    RefusesWhatDoesNotChange,
    AppendsWhatIsRepeated,
    CachesWhatItRead,
    KeepsTheFirstOfTwoCuts,
    GoesBackOnReopen,
)
