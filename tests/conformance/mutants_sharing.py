"""Backends that break the profile sharing: right within one process, wrong between two."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from core_mutant import Proceed, bytes_of, fill
from mutant import FsMutant

from kvstore_sdk.backend import Deadline, DeleteStatus, GetResult, GetStatus, Mode, Put, PutResult, PutStatus, error_from_os

# What this process remembers, by folder: all of its views share it, as a careful vendor would have them do.
_indexes: dict[str, set[str]] = {}
_missed: defaultdict[str, set[str]] = defaultdict(set)
_seen: defaultdict[str, set[str]] = defaultdict(set)
_sizes: defaultdict[str, dict[str, int]] = defaultdict(dict)
_bytes: defaultdict[str, dict[str, bytes]] = defaultdict(dict)

_GOOD = (PutStatus.STORED, PutStatus.EXISTS)


class SharingMutant(FsMutant):
    @property
    def root(self) -> str:
        found: str = self.inner._root
        return found


class KeepsAFolderForEachProcess(SharingMutant):
    breaks = "KV-SHARE-01"

    @classmethod
    def open(cls, location: str) -> Self:
        return cls(cls.good(f"{location}-{os.getpid()}"))


class ReadsItsIndexWhenItIsOpened(SharingMutant):
    breaks = "KV-SHARE-01"

    @classmethod
    def open(cls, location: str) -> Self:
        opened = cls(cls.good(location))
        if location not in _indexes:
            page = opened.inner.list("", Deadline.after(10.0), None, 10_000)
            _indexes[location] = {entry.name for entry in page.entries}
        return opened

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        index = _indexes[self.root]
        results = proceed(items)
        if op == "put":
            index |= {put.name for put, result in zip(items, results, strict=True) if result.status in _GOOD}
        elif op == "delete":
            index -= set(items)
        elif op == "exists":
            results = [answer if name in index else False for name, answer in zip(items, results, strict=True)]
        elif op == "get":
            results = [result if get.name in index else GetResult(GetStatus.MISSING) for get, result in zip(items, results, strict=True)]
        return results


class RemembersMisses(SharingMutant):
    breaks = "KV-SHARE-02"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        missed = _missed[self.root]
        if op == "put":
            missed -= {put.name for put in items}
        results = proceed(items)
        if op == "exists":
            missed |= {name for name, answer in zip(items, results, strict=True) if answer is False}
            results = [False if name in missed else answer for name, answer in zip(items, results, strict=True)]
        elif op == "get":
            missed |= {get.name for get, result in zip(items, results, strict=True) if result.status is GetStatus.MISSING}
            results = [GetResult(GetStatus.MISSING) if get.name in missed else result for get, result in zip(items, results, strict=True)]
        return results


class RemembersMissesForExistsAlone(SharingMutant):
    breaks = "KV-SHARE-02"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        missed = _missed[self.root]
        if op == "put":
            missed -= {put.name for put in items}
        results = proceed(items)
        if op == "exists":
            missed |= {name for name, answer in zip(items, results, strict=True) if answer is False}
            return [name not in missed and answer for name, answer in zip(items, results, strict=True)]
        return results


class RemembersBytesThatAreStillThere(SharingMutant):
    """It asks whether the record is there, and not whether it is the same one."""

    breaks = "KV-SHARE-03"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        cached = _bytes[self.root]
        if op in ("put", "delete"):
            for item in items:
                cached.pop(item.name if op == "put" else item, None)
        results = proceed(items)
        if op == "get":
            for get, result in zip(items, results, strict=True):
                if result.status is GetStatus.FOUND:
                    fill(get, cached.setdefault(get.name, b"".join(part.view for part in get.into))[: get.size_bytes])
        return results


class RemembersSizes(SharingMutant):
    breaks = "KV-SHARE-03"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        sizes = _sizes[self.root]
        if op in ("put", "delete"):
            for item in items:
                sizes.pop(item.name if op == "put" else item, None)
        results = proceed(items)
        if op == "get":
            for number, (get, result) in enumerate(zip(items, results, strict=True)):
                if result.status is GetStatus.FOUND and sizes.setdefault(get.name, get.size_bytes) != get.size_bytes:
                    results[number] = GetResult.wrong_size(sizes[get.name], get.size_bytes)
        return results


class SharesOneTemporaryName(SharingMutant):
    """Of two that write one record, the second one to rename finds nothing to rename."""

    breaks = "KV-SHARE-04"
    wait_s = 0.3
    """For another writer of a record of some size: more than a busy machine takes to let one run."""

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        return [self._put(put, proceed) for put in items] if op == "put" else proceed(items)

    def _put(self, put: Put, proceed: Proceed) -> PutResult:
        path, temp = f"{self.root}/{put.name}", f"{self.root}.part/{put.name.replace('/', '!')}"
        if put.mode is not Mode.CREATE or os.path.exists(path):
            result: PutResult = proceed([put])[0]
            return result
        for folder in (path, temp):
            os.makedirs(os.path.dirname(folder), exist_ok=True)
        with open(temp, "wb") as target:
            target.write(bytes_of(put))
        writers = Path(f"{self.root}.writers/{put.name.replace('/', '!')}")
        writers.mkdir(parents=True, exist_ok=True)
        (writers / str(os.getpid())).touch()
        until_s = time.monotonic() + (self.wait_s if put.size_bytes >= 65536 else 0.0)
        while len(list(writers.iterdir())) < 2 and time.monotonic() < until_s:
            time.sleep(0.0005)
        try:
            os.replace(temp, path)
        except OSError as cause:
            return PutResult.failed(error_from_os(f"put {put.name}", cause))
        return PutResult(PutStatus.STORED)


class RemembersWhatIsThere(SharingMutant):
    breaks = "KV-SHARE-05"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        seen = _seen[self.root]
        results = proceed(items)
        if op == "delete":
            seen -= set(items)
        elif op == "exists":
            seen |= {name for name, answer in zip(items, results, strict=True) if answer is True}
            return [name in seen or answer for name, answer in zip(items, results, strict=True)]
        return results


class ReadsFromItsCacheWhatIsGone(SharingMutant):
    breaks = "KV-SHARE-05"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        cached = _bytes[self.root]
        results = proceed(items)
        if op == "delete":
            for name, answer in zip(items, results, strict=True):
                if isinstance(answer, DeleteStatus):
                    cached.pop(name, None)
        elif op == "get":
            for number, (get, result) in enumerate(zip(items, results, strict=True)):
                if result.status is GetStatus.FOUND:
                    cached[get.name] = b"".join(part.view for part in get.into)
                elif result.status is GetStatus.MISSING and len(cached.get(get.name, b"")) == get.size_bytes:
                    fill(get, cached[get.name])
                    results[number] = GetResult(GetStatus.FOUND)
        return results


MUTANTS = (
    KeepsAFolderForEachProcess,
    ReadsItsIndexWhenItIsOpened,
    RemembersMisses,
    RemembersMissesForExistsAlone,
    RemembersBytesThatAreStillThere,
    RemembersSizes,
    SharesOneTemporaryName,
    RemembersWhatIsThere,
    ReadsFromItsCacheWhatIsGone,
)
