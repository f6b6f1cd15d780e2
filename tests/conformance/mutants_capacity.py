"""Backends that break the profile capacity."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from core_mutant import Proceed
from meeting import Meeting
from mutant import MemoryMutant

from kvstore_sdk.backend import (
    Backend,
    Deadline,
    DeleteStatus,
    NoSpaceError,
    Put,
    PutResult,
    PutStatus,
    UnavailableError,
    Usage,
)
from kvstore_sdk_backends.memory import open_memory

CAPACITY = 16 << 20
"""Room for all that the profile core stores."""

_extra_bytes: defaultdict[int, int] = defaultdict(int)
_extra_records: defaultdict[int, int] = defaultdict(int)


class CapacityMutant(Meeting, MemoryMutant):
    """One method to override: usage."""

    def _usage(self, deadline: Deadline) -> Usage:
        with self.place.call("usage", [""]):
            return self.counted(self.inner.usage(deadline))

    def counted(self, usage: Usage) -> Usage:
        return usage

    @property
    def shelf(self) -> int:
        """Of all views of this location the same."""
        return id(self.inner._shelf)

    @property
    def records(self) -> dict[str, bytes]:
        found: dict[str, bytes] = self.inner._shelf.records
        return found


class BoundedMutant(CapacityMutant):
    """Over a store that evicts what was stored first."""

    @staticmethod
    def good(location: str) -> Backend:
        return open_memory(location.strip("/"))

    def counted(self, usage: Usage) -> Usage:
        return replace(usage, capacity_bytes=CAPACITY)

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        return [self.one_put(put, proceed) for put in items] if op == "put" else proceed(items)

    def one_put(self, put: Put, proceed: Proceed) -> PutResult:
        if put.size_bytes > CAPACITY:
            return PutResult.failed(NoSpaceError(f"put {put.name}: {put.size_bytes} bytes never fit"))
        self.make_room(put)
        return self.passed_on(put, proceed)

    def make_room(self, put: Put) -> None:
        for name in list(self.records):
            if self.used_bytes + put.size_bytes <= CAPACITY:
                break
            self.evict(name)

    def evict(self, name: str) -> None:
        self.inner.delete([name], Deadline.after(10.0))

    def passed_on(self, put: Put, proceed: Proceed) -> PutResult:
        result: PutResult = proceed([put])[0]
        return result

    @property
    def used_bytes(self) -> int:
        found: int = self.inner._shelf.used_bytes
        return found


# 1: what is counted.


class CountsAgainWhatIsReplaced(CapacityMutant):
    breaks = "KV-CAP-01"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "put":
            _extra_bytes[self.shelf] += sum(put.size_bytes for put in items if put.name in self.records)
        return proceed(items)

    def counted(self, usage: Usage) -> Usage:
        return replace(usage, used_bytes=usage.used_bytes + _extra_bytes[self.shelf])


class CountsPutsInsteadOfRecords(CountsAgainWhatIsReplaced):
    def counted(self, usage: Usage) -> Usage:
        return replace(usage, records=usage.records + (1 if _extra_bytes[self.shelf] else 0))


class CountsFromZeroWhenItIsOpened(CapacityMutant):
    breaks = "KV-CAP-01"

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self._before = inner.usage(Deadline.after(10.0))

    def counted(self, usage: Usage) -> Usage:
        before = self._before
        return replace(usage, records=max(0, usage.records - before.records), used_bytes=max(0, usage.used_bytes - before.used_bytes))


class CountsHalfOfEveryRecord(CapacityMutant):
    """As compressed, which is not what it holds for others."""

    breaks = "KV-CAP-01"

    def counted(self, usage: Usage) -> Usage:
        return replace(usage, used_bytes=usage.used_bytes // 2)


class CountsEveryCopy(CapacityMutant):
    breaks = "KV-CAP-01"

    def counted(self, usage: Usage) -> Usage:
        return replace(usage, used_bytes=usage.used_bytes * 3)


class CountsPutsThatFailed(CapacityMutant):
    breaks = "KV-CAP-01"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "put" and deadline is not None and deadline.expired:
            _extra_records[self.shelf] += len(items)
            return [PutResult(PutStatus.TIMED_OUT) for _ in items]
        return proceed(items)

    def counted(self, usage: Usage) -> Usage:
        return replace(usage, records=usage.records + _extra_records[self.shelf])


class CountsAllLocationsTogether(CapacityMutant):
    breaks = "KV-CAP-01"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        results = proceed(items)
        if op == "put":
            _extra_records[self.shelf] += sum(result.status is PutStatus.STORED for result in results)
        return results

    def counted(self, usage: Usage) -> Usage:
        return replace(usage, records=sum(_extra_records.values()))


# 2: what is not there any more.


class CountsWhatWasDeleted(CapacityMutant):
    breaks = "KV-CAP-02"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "delete":
            _extra_bytes[self.shelf] += sum(len(self.records.get(name, b"")) for name in items)
        return proceed(items)

    def counted(self, usage: Usage) -> Usage:
        return replace(usage, used_bytes=usage.used_bytes + _extra_bytes[self.shelf])


class SubtractsWhatWasAbsent(CapacityMutant):
    breaks = "KV-CAP-02"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        results = proceed(items)
        if op == "delete":
            _extra_records[self.shelf] -= sum(result is DeleteStatus.ABSENT for result in results)
        return results

    def counted(self, usage: Usage) -> Usage:
        return replace(usage, records=max(0, usage.records + _extra_records[self.shelf]))


# 3: how much there may be.


class DoesNotMindItsLimit(BoundedMutant):
    breaks = "KV-CAP-03"

    def make_room(self, put: Put) -> None:
        pass


class GivesEveryViewTheWholeCapacity(BoundedMutant):
    breaks = "KV-CAP-03"

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self._own: dict[str, int] = {}
        self._mutex = threading.Lock()

    def make_room(self, put: Put) -> None:
        with self._mutex:
            while self._own and sum(self._own.values()) + put.size_bytes > CAPACITY:
                name = next(iter(self._own))
                del self._own[name]
                self.evict(name)
            self._own[put.name] = put.size_bytes


class EvictsInLargeSteps(BoundedMutant):
    """It looks once for every hundred puts."""

    breaks = "KV-CAP-03"
    step_bytes = CAPACITY // 4

    def make_room(self, put: Put) -> None:
        if self.used_bytes > CAPACITY + self.step_bytes:
            super().make_room(put)

    def passed_on(self, put: Put, proceed: Proceed) -> PutResult:
        result = super().passed_on(put, proceed)
        if self.used_bytes > CAPACITY + self.step_bytes // 2:
            # Where somebody looks, until somebody has.
            self.place.wait_for("put", "usage", "", 0.0)
        return result


class HidesWhatIsTooMuch(DoesNotMindItsLimit):
    def counted(self, usage: Usage) -> Usage:
        return replace(super().counted(usage), used_bytes=min(usage.used_bytes, CAPACITY))


# 4: a store that is full.


class SaysThatItIsUnavailable(BoundedMutant):
    breaks = "KV-CAP-04"

    def one_put(self, put: Put, proceed: Proceed) -> PutResult:
        if self.used_bytes + put.size_bytes > CAPACITY >= put.size_bytes:
            return PutResult.failed(UnavailableError(f"put {put.name}: try again later"))
        return super().one_put(put, proceed)


class RaisesWhatItsAllocatorRaises(BoundedMutant):
    breaks = "KV-CAP-04"

    def make_room(self, put: Put) -> None:
        if self.used_bytes + put.size_bytes > CAPACITY:
            raise MemoryError


class DropsWhatDoesNotFit(BoundedMutant):
    breaks = "KV-CAP-04"

    def one_put(self, put: Put, proceed: Proceed) -> PutResult:
        if self.used_bytes + put.size_bytes > CAPACITY >= put.size_bytes:
            return PutResult(PutStatus.STORED)
        return super().one_put(put, proceed)


# 5: what never fits.


class EvictsForWhatCanNeverFit(BoundedMutant):
    breaks = "KV-CAP-05"

    def one_put(self, put: Put, proceed: Proceed) -> PutResult:
        if put.size_bytes > CAPACITY:
            self.make_room(put)
        return super().one_put(put, proceed)


class RemovesTheOldRecordBeforeItRefuses(BoundedMutant):
    breaks = "KV-CAP-05"

    def one_put(self, put: Put, proceed: Proceed) -> PutResult:
        if put.size_bytes > CAPACITY:
            self.evict(put.name)
        return super().one_put(put, proceed)


class TakesWhatNeverFits(BoundedMutant):
    breaks = "KV-CAP-05"

    def one_put(self, put: Put, proceed: Proceed) -> PutResult:
        return self.passed_on(put, proceed) if put.size_bytes > CAPACITY else super().one_put(put, proceed)


MUTANTS = (
    CountsAgainWhatIsReplaced,
    CountsPutsInsteadOfRecords,
    CountsFromZeroWhenItIsOpened,
    CountsHalfOfEveryRecord,
    CountsEveryCopy,
    CountsPutsThatFailed,
    CountsAllLocationsTogether,
    CountsWhatWasDeleted,
    SubtractsWhatWasAbsent,
    DoesNotMindItsLimit,
    GivesEveryViewTheWholeCapacity,
    EvictsInLargeSteps,
    HidesWhatIsTooMuch,
    SaysThatItIsUnavailable,
    RaisesWhatItsAllocatorRaises,
    DropsWhatDoesNotFit,
    EvictsForWhatCanNeverFit,
    RemovesTheOldRecordBeforeItRefuses,
    TakesWhatNeverFits,
)
