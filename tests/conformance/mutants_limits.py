"""Backends that break the profile core: locations, and what is declared and refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from core_mutant import CoreMutant, Proceed, bytes_of, with_record
from mutant import MemoryMutant

from kvstore_sdk.backend import (
    Backend,
    Capabilities,
    Deadline,
    GetResult,
    GetStatus,
    Mode,
    Put,
    PutResult,
    ReadOnlyError,
    Region,
    UnavailableError,
)
from kvstore_sdk_backends.memory import open_memory

# 18 and 19: locations.


class KeepsRecordsToItself(MemoryMutant):
    breaks = "KV-CORE-18"

    @staticmethod
    def good(location: str) -> Backend:
        return open_memory("")


class ReadsItsIndexWhenItIsOpened(MemoryMutant):
    breaks = "KV-CORE-18"

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.index = set(inner._shelf.records)

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "put":
            self.index |= {put.name for put in items}
        results = proceed(items)
        if op == "get":
            return [result if get.name in self.index else GetResult(GetStatus.MISSING) for get, result in zip(items, results, strict=True)]
        return results


class ClearsItselfOnClose(MemoryMutant):
    breaks = "KV-CORE-18"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "close":
            self.inner._shelf.records.clear()
        return proceed(items)


class KnowsOneLocation(MemoryMutant):
    breaks = "KV-CORE-19"

    @staticmethod
    def good(location: str) -> Backend:
        return open_memory("knows-one-location")


# 20 and 21: what is declared.


class LowersItsLimits(MemoryMutant):
    """Learns from its first put what its server takes."""

    breaks = "KV-CORE-20"
    used = False

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities, max_batch=128) if self.used else self.inner.capabilities

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        self.used = self.used or op == "put"
        return proceed(items)


class RegistersOnly(MemoryMutant):
    breaks = "KV-CORE-21"

    def register_region(self, region: Region) -> None:
        """For the sake of this mutant, half of a surface."""


class CannotSettle(MemoryMutant):
    breaks = "KV-CORE-21"

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities, in_doubt=True)


class DeclaresAMethodAsAFlag(MemoryMutant):
    breaks = "KV-CORE-21"

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.delete: Any = True


# 22 and 23: refusals.


class SmallMutant(CoreMutant):
    """Its limit is one that the suite exceeds."""

    LIMIT: ClassVar[int] = 1 << 18

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities, max_record_bytes=self.LIMIT)


class CutsWhatIsTooLarge(SmallMutant):
    breaks = "KV-CORE-22"

    def one_put(self, put: Put, proceed: Callable[[Put], PutResult]) -> PutResult:
        return proceed(put if put.size_bytes <= self.LIMIT else with_record(put, bytes_of(put)[: self.LIMIT]))


class AsksToTryTheTooLargeAgain(SmallMutant):
    """Which would be done for ever."""

    breaks = "KV-CORE-22"

    def one_put(self, put: Put, proceed: Callable[[Put], PutResult]) -> PutResult:
        if put.size_bytes > self.LIMIT:
            return PutResult.failed(UnavailableError(f"put {put.name}: connection reset"))
        return proceed(put)


class ReadOnlyMutant(CoreMutant):
    @property
    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities, read_only=True)


class WritesThoughItIsReadOnly(ReadOnlyMutant):
    breaks = "KV-CORE-23"


class RefusesWithoutSayingWhy(ReadOnlyMutant):
    breaks = "KV-CORE-23"

    def one_put(self, put: Put, proceed: Callable[[Put], PutResult]) -> PutResult:
        return PutResult.failed(UnavailableError(f"put {put.name}: cannot write"))


class ReplacesThoughItIsReadOnly(ReadOnlyMutant):
    breaks = "KV-CORE-23"

    def one_put(self, put: Put, proceed: Callable[[Put], PutResult]) -> PutResult:
        return proceed(put) if put.mode is Mode.REPLACE else PutResult.failed(ReadOnlyError(f"put {put.name}: read-only"))


MUTANTS = (
    KeepsRecordsToItself,
    ReadsItsIndexWhenItIsOpened,
    ClearsItselfOnClose,
    KnowsOneLocation,
    LowersItsLimits,
    RegistersOnly,
    CannotSettle,
    DeclaresAMethodAsAFlag,
    CutsWhatIsTooLarge,
    AsksToTryTheTooLargeAgain,
    WritesThoughItIsReadOnly,
    RefusesWithoutSayingWhy,
    ReplacesThoughItIsReadOnly,
)
