"""Backends that break the profile deletion."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from core_mutant import Proceed
from meeting import Meeting
from mutant import FsMutant, MemoryMutant

from kvstore_sdk.backend import (
    Backend,
    Deadline,
    DeleteStatus,
    Failure,
    GetResult,
    GetStatus,
    InvalidError,
    Mode,
    PutResult,
    PutStatus,
    UnavailableError,
)

_tombs: defaultdict[int, set[str]] = defaultdict(set)


class DeletionMutant(Meeting, MemoryMutant):
    @property
    def records(self) -> dict[str, bytes]:
        found: dict[str, bytes] = self.inner._shelf.records
        return found

    @property
    def tombs(self) -> set[str]:
        """Names that were deleted from this location, by any view of it."""
        return _tombs[id(self.inner._shelf)]


class KeepsWhatItDeletes(DeletionMutant):
    breaks = "KV-DELETE-01"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op != "delete":
            return proceed(items)
        return [DeleteStatus.DELETED if name in self.records else DeleteStatus.ABSENT for name in items]


class RemembersInEachViewWhatIsThere(DeletionMutant):
    breaks = "KV-DELETE-01"

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self._seen: set[str] = set()

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        results = proceed(items)
        if op == "delete":
            self._seen -= set(items)
        elif op == "get":
            self._seen |= {get.name for get, result in zip(items, results, strict=True) if result.status is GetStatus.FOUND}
        elif op == "exists":
            return [name in self._seen or answer for name, answer in zip(items, results, strict=True)]
        return results


class AnswersAbsentForWhatItDeletes(DeletionMutant):
    breaks = "KV-DELETE-01"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        results = proceed(items)
        return [DeleteStatus.ABSENT for _ in results] if op == "delete" else results


class FailsToDeleteWhatIsNotThere(DeletionMutant):
    breaks = "KV-DELETE-02"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        results = proceed(items)
        if op == "delete":
            absent = InvalidError("delete: no such record")
            return [Failure(absent) if result is DeleteStatus.ABSENT else result for result in results]
        return results


class RaisesForWhatIsNotThere(DeletionMutant):
    breaks = "KV-DELETE-02"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "delete":
            for name in items:
                if name not in self.records and not self.inner._closed:
                    raise FileNotFoundError(name)
        return proceed(items)


class AnswersDeletedWhateverWasThere(DeletionMutant):
    breaks = "KV-DELETE-02"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        results = proceed(items)
        if op == "delete":
            return [DeleteStatus.DELETED if result is DeleteStatus.ABSENT else result for result in results]
        return results


class DeletesByPrefix(DeletionMutant):
    breaks = "KV-DELETE-03"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "delete":
            for name in items:
                more = [other for other in list(self.records) if other != name and self._goes_along(other, name)]
                if name in self.records and more:
                    proceed(more)
        return proceed(items)

    def _goes_along(self, other: str, name: str) -> bool:
        return other.startswith(name)


class DeletesAllGroupsOfAChunk(DeletesByPrefix):
    def _goes_along(self, other: str, name: str) -> bool:
        return "-g" in other and other.rsplit("-g", 1)[0] == name.rsplit("-g", 1)[0]


class DeletesTheFolderOfThatName(DeletionMutant):
    """As a recursive removal of a path does."""

    breaks = "KV-DELETE-03"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        results = proceed(items)
        if op == "delete":
            for name in items:
                if below := [other for other in list(self.records) if other.startswith(f"{name}/")]:
                    proceed(below)
        return results


class KeepsATombstone(DeletionMutant):
    breaks = "KV-DELETE-04"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        results = proceed(items)
        if op == "delete":
            self.tombs.update(name for name, result in zip(items, results, strict=True) if result is DeleteStatus.DELETED)
        elif op == "put":
            for number, (put, result) in enumerate(zip(items, results, strict=True)):
                if put.mode is Mode.CREATE and put.name in self.tombs and result.status is PutStatus.STORED:
                    self.inner.delete([put.name], Deadline.after(10.0))
                    results[number] = PutResult(PutStatus.EXISTS)
        return results


class FailsAGetThatLosesItsRecord(DeletionMutant):
    """It looks first, and counts on what it saw."""

    breaks = "KV-DELETE-05"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op != "get":
            return proceed(items)
        there = [get.name in self.records for get in items]
        self.place.wait("get", "delete", lambda: any(get.name not in self.records for get in items), 0.001)
        lost = GetResult.failed(UnavailableError("get: the record went away while it was read"))
        return [lost if was and result.status is GetStatus.MISSING else result for was, result in zip(there, proceed(items), strict=True)]


class OverwritesBeforeItRemoves(Meeting, FsMutant):
    """As somebody does who wants nothing to be left on the disk."""

    breaks = "KV-DELETE-05"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "delete":
            for name in items:
                path = f"{self.inner._root}/{name}"
                if os.path.isfile(path):
                    with open(path, "r+b") as target:
                        target.write(bytes(os.path.getsize(path)))
                    self.place.wait_for("delete", "get", name, 0.002)
        return proceed(items)


MUTANTS = (
    KeepsWhatItDeletes,
    RemembersInEachViewWhatIsThere,
    AnswersAbsentForWhatItDeletes,
    FailsToDeleteWhatIsNotThere,
    RaisesForWhatIsNotThere,
    AnswersDeletedWhateverWasThere,
    DeletesByPrefix,
    DeletesAllGroupsOfAChunk,
    DeletesTheFolderOfThatName,
    KeepsATombstone,
    FailsAGetThatLosesItsRecord,
    OverwritesBeforeItRemoves,
)
