"""Backends whose fault shows only beside others in a call, beyond a size, or after something was given up."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from meeting import Meeting
from mutant import MemoryMutant

from kvstore_sdk.backend import Backend, Deadline, GetStatus, ListPage, Mode, Put, PutResult, PutStatus
from kvstore_sdk_backends.memory import open_memory

Proceed = Callable[[Sequence[Any]], Any]


class TakesTheModeOfTheFirst(MemoryMutant):
    breaks = "KV-CORE-17"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        return proceed([replace(put, mode=items[0].mode) for put in items] if op == "put" else items)


class FillsTheNextItemToo(MemoryMutant):
    """A record that is larger than its buffers goes on in those of the next item."""

    breaks = "KV-CORE-17"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        results = proceed(items)
        if op == "get":
            for number, result in enumerate(results[:-1]):
                if result.status is GetStatus.WRONG_SIZE and result.size_bytes > result.asked_bytes:
                    view = items[number + 1].into[0].view
                    view[:] = b"\x77" * len(view)
        return results


class TurnsPartsAroundInABatch(MemoryMutant):
    breaks = "KV-CORE-07"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "put" and len(items) > 1:
            items = [replace(put, parts=tuple(reversed(put.parts))) for put in items]
        return proceed(items)


class HasNoRoomForItsHeader(MemoryMutant):
    """Records just below the limit lose their last byte to what the store adds."""

    breaks = "KV-CORE-01"

    @staticmethod
    def good(location: str) -> Backend:
        return open_memory(location.strip("/"), max_record_bytes=1 << 20)

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        results = proceed(items)
        if op == "get":
            for get, result in zip(items, results, strict=True):
                if result.status is GetStatus.FOUND and (1 << 20) - 4096 < get.size_bytes < 1 << 20:
                    get.into[-1].view[-1] ^= 1
        return results


class TakesAFarDeadlineForNone(MemoryMutant):
    """A time-out in a field that holds a minute."""

    breaks = "KV-CORE-01"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "put" and deadline is not None and deadline.remaining_s() > 3600:
            return [PutResult(PutStatus.TIMED_OUT) for _ in items]
        return proceed(items)


class CutsDeepNames(MemoryMutant):
    breaks = "KV-CORE-09"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op in ("put", "get"):
            items = [replace(item, name="/".join(item.name.split("/")[:16])) for item in items]
        elif op in ("exists", "delete"):
            items = ["/".join(name.split("/")[:16]) for name in items]
        return proceed(items)


class LocksWhatItGaveUp(MemoryMutant):
    """A REPLACE that timed out leaves its lock, which CREATE takes for a record."""

    breaks = "KV-CORE-11"

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self._locked: set[str] = set()

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op != "put":
            return proceed(items)
        assert deadline is not None
        if deadline.expired:
            self._locked.update(put.name for put in items if put.mode is Mode.REPLACE)
            return [PutResult(PutStatus.TIMED_OUT) for _ in items]
        return [self._put(put, proceed) for put in items]

    def _put(self, put: Put, proceed: Proceed) -> PutResult:
        if put.mode is Mode.CREATE and put.name in self._locked:
            return PutResult(PutStatus.EXISTS)
        self._locked.discard(put.name)
        [result] = proceed([put])
        assert isinstance(result, PutResult)
        return result


class TakesAPrefixForAPattern(MemoryMutant):
    breaks = "KV-LIST-02"

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.list = self._by_pattern

    def _by_pattern(self, prefix: str, deadline: Deadline, cursor: str | None = None, limit: int = 1000) -> ListPage:
        inner: Any = self.inner
        page = inner.list("", deadline, None, 1 << 20)
        pattern = re.compile(re.escape(prefix).replace("_", "."))
        found = sorted((entry for entry in page.entries if pattern.match(entry.name) and entry.name > (cursor or "")), key=lambda e: e.name)
        return ListPage(found[:limit], found[limit - 1].name if len(found) > limit else None)


class ForgetsAfterAThousand(MemoryMutant):
    """The cursor of the store's own answer is not handed on."""

    breaks = "KV-LIST-01"

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.list = self._first_page

    def _first_page(self, prefix: str, deadline: Deadline, cursor: str | None = None, limit: int = 1000) -> ListPage:
        inner: Any = self.inner
        page: ListPage = inner.list(prefix, deadline, cursor, limit)
        return ListPage(page.entries, None) if len(page.entries) == 1000 else page


class ReplacesLargeRecordsInPieces(Meeting, MemoryMutant):
    """Records of more than 2 MiB are not there while they are replaced."""

    breaks = "KV-ATOM-01"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "put" and items[0].mode is Mode.REPLACE and items[0].size_bytes > 2 << 20 and deadline is not None:
            inner: Any = self.inner
            inner.delete([put.name for put in items], deadline)
            self.place.wait_for("put", "get", items[0].name, 0.01)
        return proceed(items)


MUTANTS = (
    TakesTheModeOfTheFirst,
    FillsTheNextItemToo,
    TurnsPartsAroundInABatch,
    HasNoRoomForItsHeader,
    TakesAFarDeadlineForNone,
    CutsDeepNames,
    LocksWhatItGaveUp,
    TakesAPrefixForAPattern,
    ForgetsAfterAThousand,
    ReplacesLargeRecordsInPieces,
)
