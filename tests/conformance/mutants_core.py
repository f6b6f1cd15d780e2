"""Backends that break the profile core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from mutant import MemoryMutant, flipped

from kvstore_sdk.backend import (
    Backend,
    Buffer,
    Capabilities,
    Deadline,
    Get,
    GetResult,
    GetStatus,
    InvalidError,
    Mode,
    Put,
    PutResult,
    PutStatus,
    ReadOnlyError,
    Region,
    UnavailableError,
)
from kvstore_sdk_backends.memory import open_memory

Proceed = Callable[[Sequence[Any]], Any]


def bytes_of(put: Put) -> bytes:
    return b"".join(part.view for part in put.parts)


def with_record(put: Put, record: bytes) -> Put:
    """The same put of other bytes."""
    return replace(put, parts=(buffer_of(record),))


def buffer_of(record: bytes) -> Buffer:
    buffer = Region(len(record)).buffer(0, len(record))
    buffer.view[:] = record
    return buffer


def fill(get: Get, record: bytes) -> None:
    start = 0
    for buffer in get.into:
        buffer.view[: len(record) - start] = record[start : start + buffer.length]
        start += buffer.length


class CoreMutant(MemoryMutant):
    """Puts and gets pass through one method each, an item at a time."""

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        one = {"put": self.one_put, "get": self.one_get}.get(op)
        return proceed(items) if one is None else [one(item, lambda item: proceed([item])[0]) for item in items]

    def one_put(self, put: Put, proceed: Callable[[Put], PutResult]) -> PutResult:
        return proceed(put)

    def one_get(self, get: Get, proceed: Callable[[Get], GetResult]) -> GetResult:
        return proceed(get)

    def record(self, name: str) -> bytes | None:
        """What is stored, as this backend, and nobody else, can look it up."""
        found: bytes | None = self.inner._shelf.records.get(name)
        return found


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


# 2: the form of answers.


class AnswersInReverse(MemoryMutant):
    breaks = "KV-CORE-02"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        results = proceed(items)
        return results[::-1] if op == "exists" else results


class AnswersGetsInTheirOwnOrder(MemoryMutant):
    """As they are completed: what is there first."""

    breaks = "KV-CORE-02"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        results = proceed(items)
        return sorted(results, key=lambda result: result.status is GetStatus.MISSING) if op == "get" else results


class AnswersPutsInTheirOwnOrder(MemoryMutant):
    breaks = "KV-CORE-02"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        results = proceed(items)
        return sorted(results, key=lambda result: result.status is PutStatus.STORED) if op == "put" else results


class LosesTheLastResult(MemoryMutant):
    breaks = "KV-CORE-02"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        results = proceed(items)
        return results[:-1] if op == "get" and len(items) > 1 else results


class AnswersNumbers(MemoryMutant):
    """The answer of a database: 1 and 0."""

    breaks = "KV-CORE-02"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        results = proceed(items)
        return [int(result) for result in results] if op == "exists" else results


class AnswersAGenerator(MemoryMutant):
    breaks = "KV-CORE-02"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        results = proceed(items)
        return (result for result in results) if op == "put" else results


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


# 6: batches.


class TakesAHundredItems(MemoryMutant):
    """What its server takes, and not what it declares."""

    breaks = "KV-CORE-06"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if len(items) > 100:
            raise InvalidError(f"{op}: {len(items)} items")
        return proceed(items)


class ForgetsWhatFollowsOnTheNextPage(MemoryMutant):
    """Asks a server that answers in pages, and looks at the first."""

    breaks = "KV-CORE-06"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        results = proceed(items)
        return results[:100] + [False] * (len(items) - 100) if op == "exists" and len(items) > 100 else results


# 7 and 8: buffers.


class SortsParts(CoreMutant):
    """By address, for its vectored write."""

    breaks = "KV-CORE-07"

    def one_put(self, put: Put, proceed: Callable[[Put], PutResult]) -> PutResult:
        return proceed(replace(put, parts=sorted(put.parts, key=lambda part: (part.region.id, part.offset))))


class FillsBuffersInReverse(CoreMutant):
    breaks = "KV-CORE-07"

    def one_get(self, get: Get, proceed: Callable[[Get], GetResult]) -> GetResult:
        ordered = sorted(get.into, key=lambda part: (part.region.id, part.offset))
        return proceed(replace(get, into=ordered))


class WritesTwoPartsAtMost(CoreMutant):
    breaks = "KV-CORE-07"

    def one_put(self, put: Put, proceed: Callable[[Put], PutResult]) -> PutResult:
        return proceed(put if len(put.parts) < 3 else replace(put, parts=put.parts[:2]))


class WantsSectors(CoreMutant):
    """O_DIRECT, and align_bytes forgotten."""

    breaks = "KV-CORE-08"

    def one_put(self, put: Put, proceed: Callable[[Put], PutResult]) -> PutResult:
        if any(part.offset % 512 for part in put.parts):
            return PutResult.failed(InvalidError(f"put {put.name}: Invalid argument"))
        return proceed(put)


class WantsPagesToReadInto(CoreMutant):
    breaks = "KV-CORE-08"

    def one_get(self, get: Get, proceed: Callable[[Get], GetResult]) -> GetResult:
        if any(part.offset % 4096 for part in get.into):
            return GetResult.failed(InvalidError(f"get {get.name}: Bad address"))
        return proceed(get)


class KnowsOneRegion(CoreMutant):
    """Takes the offsets of all parts in the region of the first."""

    breaks = "KV-CORE-08"

    def one_put(self, put: Put, proceed: Callable[[Put], PutResult]) -> PutResult:
        region = put.parts[0].region
        return proceed(replace(put, parts=[region.buffer(part.offset, part.length) for part in put.parts]))


# 9: names.


class NamesMutant(CoreMutant):
    """Calls records something else."""

    def named(self, name: str) -> str:
        raise NotImplementedError

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op in ("exists", "delete"):
            return proceed([self.named(name) for name in items])
        return proceed([replace(item, name=self.named(item.name)) for item in items] if op in ("put", "get") else items)


class FoldsCase(NamesMutant):
    breaks = "KV-CORE-09"

    def named(self, name: str) -> str:
        return name.lower()


class CutsNames(NamesMutant):
    breaks = "KV-CORE-09"

    def named(self, name: str) -> str:
        return name[:200]


class FlattensFolders(NamesMutant):
    breaks = "KV-CORE-09"

    def named(self, name: str) -> str:
        return name.replace("/", "_")


class ReadsNumbers(NamesMutant):
    """A column that takes what looks like a number for one."""

    breaks = "KV-CORE-09"

    def named(self, name: str) -> str:
        try:
            return f"{float(name):g}"
        except ValueError:
            return name


class DropsTheExtension(NamesMutant):
    breaks = "KV-CORE-09"

    def named(self, name: str) -> str:
        return name.removesuffix(".tmp")


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


# 14 to 16: memory.


class EncryptsInPlace(CoreMutant):
    breaks = "KV-CORE-14"

    def one_put(self, put: Put, proceed: Callable[[Put], PutResult]) -> PutResult:
        result = proceed(put)
        put.parts[-1].view[:] = flipped(bytes(put.parts[-1].view))
        return result


class PadsInPlace(CoreMutant):
    """Fills the rest of the page behind the buffers with zeros, to write whole pages."""

    breaks = "KV-CORE-14"

    def one_put(self, put: Put, proceed: Callable[[Put], PutResult]) -> PutResult:
        last = put.parts[-1]
        end = last.offset + last.length
        put.parts[-1].region.view[end : end + 16] = bytes(len(last.region.view[end : end + 16]))
        return proceed(put)


class ReadsWholePages(CoreMutant):
    breaks = "KV-CORE-15"

    def one_get(self, get: Get, proceed: Callable[[Get], GetResult]) -> GetResult:
        result = proceed(get)
        last = get.into[-1]
        end = last.offset + last.length
        if result.status is GetStatus.FOUND:
            last.region.view[end : end + 16] = bytes(len(last.region.view[end : end + 16]))
        return result


class ReadsFirstAndMeasuresAfterwards(CoreMutant):
    """A record that is longer than the buffers is written over what follows them."""

    breaks = "KV-CORE-15"

    def one_get(self, get: Get, proceed: Callable[[Get], GetResult]) -> GetResult:
        result = proceed(get)
        if result.status is GetStatus.WRONG_SIZE and (result.size_bytes or 0) > get.size_bytes:
            last = get.into[-1]
            end = last.offset + last.length
            last.region.view[end : end + 1] = b"\0"
        return result


class CopiesWhenItIsRead(CoreMutant):
    """Keeps the buffers of large records, and takes the bytes when somebody asks for them."""

    breaks = "KV-CORE-16"

    def one_put(self, put: Put, proceed: Callable[[Put], PutResult]) -> PutResult:
        result = proceed(put)
        if result.status is PutStatus.STORED:
            self.__dict__.setdefault("kept", {})[put.name] = put
        return result

    def one_get(self, get: Get, proceed: Callable[[Get], GetResult]) -> GetResult:
        put = self.__dict__.get("kept", {}).pop(get.name, None)
        if put is not None and self.record(get.name) is not None:
            self.inner.put([replace(put, mode=Mode.REPLACE)], Deadline.after(1.0))
        return proceed(get)


# 17: items of one call.


class StopsAtTheFirstMiss(MemoryMutant):
    breaks = "KV-CORE-17"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        results = proceed(items)
        if op == "get":
            missing = next((index for index, result in enumerate(results) if result.status is GetStatus.MISSING), len(items))
            return results[: missing + 1] + [GetResult(GetStatus.MISSING)] * (len(items) - missing - 1)
        return results


class RaisesForAMissAmongOthers(MemoryMutant):
    breaks = "KV-CORE-17"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        results = proceed(items)
        if op == "exists" and len(set(results)) > 1:
            raise UnavailableError(f"exists of {len(items)} names: some of them are not there")
        return results


class StoresNothingBehindWhatIsThere(MemoryMutant):
    """A pipeline that stops at the first item that was not stored."""

    breaks = "KV-CORE-17"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        results: list[PutResult] = []
        if op != "put":
            return proceed(items)
        for put in items:
            stopped = any(result.status is PutStatus.EXISTS for result in results)
            skipped = PutResult.failed(UnavailableError(f"put {put.name}: the pipeline was stopped"))
            results += [skipped] if stopped else proceed([put])
        return results


class FailsTheCallForAnotherSize(MemoryMutant):
    breaks = "KV-CORE-17"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        results = proceed(items)
        if op == "get" and len(items) > 1 and any(result.status is GetStatus.WRONG_SIZE for result in results):
            return [GetResult.failed(UnavailableError("get: short read"))] * len(items)
        return results


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
    FlipsABitOfLargeRecords,
    CutsTrailingZeros,
    TranslatesLineEnds,
    AnswersInReverse,
    AnswersGetsInTheirOwnOrder,
    AnswersPutsInTheirOwnOrder,
    LosesTheLastResult,
    AnswersNumbers,
    AnswersAGenerator,
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
    TakesAHundredItems,
    ForgetsWhatFollowsOnTheNextPage,
    SortsParts,
    FillsBuffersInReverse,
    WritesTwoPartsAtMost,
    WantsSectors,
    WantsPagesToReadInto,
    KnowsOneRegion,
    FoldsCase,
    CutsNames,
    FlattensFolders,
    ReadsNumbers,
    DropsTheExtension,
    KeepsTheOldAndSaysStored,
    TakesThePlaceAndSaysExists,
    FailsACreateOfWhatIsThere,
    AnswersExistsToReplace,
    KnowsWhatItLookedFor,
    KeepsTheOldTail,
    ReplacesOtherSizesOnly,
    RefusesWhatDoesNotChange,
    AppendsWhatIsRepeated,
    EncryptsInPlace,
    PadsInPlace,
    ReadsWholePages,
    ReadsFirstAndMeasuresAfterwards,
    CopiesWhenItIsRead,
    StopsAtTheFirstMiss,
    RaisesForAMissAmongOthers,
    StoresNothingBehindWhatIsThere,
    FailsTheCallForAnotherSize,
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
    CachesWhatItRead,
    KeepsTheFirstOfTwoCuts,
    GoesBackOnReopen,
)
