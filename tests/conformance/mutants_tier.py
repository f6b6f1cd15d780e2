"""Backends that break the profile tier, and pass the profile core."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from meeting import Meeting
from mutant import MemoryMutant

from kvstore_sdk.backend import (
    Backend,
    Buffer,
    Capabilities,
    Deadline,
    GetStatus,
    Mode,
    PutResult,
    PutStatus,
    TimedOutError,
    UnavailableError,
)
from kvstore_sdk_backends.memory import open_memory

Proceed = Callable[[Sequence[Any]], Any]
HEAD_BYTES = 4096
LARGE_BYTES = 100_000


def record_of(parts: Sequence[Buffer]) -> bytes:
    return b"".join(part.view for part in parts)


class DeclaresShortNames(MemoryMutant):
    """Takes longer ones as well, but its vendor has counted one digest of 32 bytes in hex."""

    breaks = "KV-TIER-01"

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities, max_name_bytes=64)


class TakesRecordsOfOnePage(MemoryMutant):
    """A header and nothing after it."""

    breaks = "KV-TIER-01"

    @staticmethod
    def good(location: str) -> Backend:
        return open_memory(location.strip("/"), max_record_bytes=4096)


class BelongsToTheThreadThatUsedItFirst(MemoryMutant):
    """As a database client does that refuses every other thread."""

    breaks = "KV-TIER-02"

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self._owner: int | None = None

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if deadline is not None:
            self._owner = self._owner or threading.get_ident()
            if threading.get_ident() != self._owner:
                raise UnavailableError("this client was made in another thread")
        return proceed(items)


class ReadsThroughOneBuffer(Meeting, MemoryMutant):
    """Declares eight calls at a time, and has one buffer for all of them."""

    breaks = "KV-TIER-02"

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self._buffer = b""

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        results = proceed(items)
        if op == "get":
            for get, result in zip(items, results, strict=True):
                if result.status is GetStatus.FOUND:
                    self._buffer = mine = record_of(get.into)
                    # The network.
                    self.place.wait("get", "get", functools.partial(self._is_lost, mine), 0.002)
                    self._copy(self._buffer, get.into)
        return results

    def _is_lost(self, record: bytes) -> bool:
        return self._buffer is not record

    @staticmethod
    def _copy(record: bytes, into: Sequence[Buffer]) -> None:
        start = 0
        for part in into:
            piece = record[start : start + part.length]
            part.view[: len(piece)] = piece
            start += part.length


class LosesAConnectionWithEveryCallThatIsLate(MemoryMutant):
    """Has two of them, and gives back only those of calls that were in time."""

    breaks = "KV-TIER-03"

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self._connections = 2

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if deadline is None:
            return proceed(items)
        if self._connections == 0:
            raise UnavailableError(f"{op}: every connection is in use")
        if deadline.expired:
            self._connections -= 1
            raise TimedOutError(f"{op}: out of time")
        return proceed(items)


class SkipsARecordThatBeginsAlike(MemoryMutant):
    """Saves the work of a large REPLACE by comparing length and first page, which a bad payload does not change.

    Larger than what other checks use: a bad payload that their faults leave behind would not be repaired either.
    """

    breaks = "KV-TIER-04"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op != "put":
            return proceed(items)
        results: list[PutResult] = []
        for put in items:
            old = self.inner._shelf.records.get(put.name, b"")
            alike = len(old) == put.size_bytes > LARGE_BYTES and old[:HEAD_BYTES] == record_of(put.parts)[:HEAD_BYTES]
            if put.mode is Mode.REPLACE and alike:
                results.append(PutResult(PutStatus.STORED))
            else:
                results += proceed([put])
        return results


class WaitsForRoomThroughClose(MemoryMutant):
    """After 30 large uploads the next ones wait in a queue, as long as their deadline allows; close does not wake them."""

    breaks = "KV-TIER-05"

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self._uploads = 0

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "put" and deadline is not None and any(put.size_bytes > 300_000 for put in items):
            self._uploads += 1
            if self._uploads > 30:
                time.sleep(min(20.0, max(0.0, deadline.remaining_s())))
        return proceed(items)


MUTANTS = (
    DeclaresShortNames,
    TakesRecordsOfOnePage,
    BelongsToTheThreadThatUsedItFirst,
    ReadsThroughOneBuffer,
    LosesAConnectionWithEveryCallThatIsLate,
    SkipsARecordThatBeginsAlike,
    WaitsForRoomThroughClose,
)
