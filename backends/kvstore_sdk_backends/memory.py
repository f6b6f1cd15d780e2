"""Records in the memory of one process: for tests and trials."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Annotated

from kvstore_sdk.backend import (
    Bounds,
    Capabilities,
    ClosedError,
    ConfigError,
    Deadline,
    DeleteStatus,
    Durability,
    Failure,
    Fork,
    Get,
    GetResult,
    GetStatus,
    InvalidError,
    ListEntry,
    ListPage,
    Mode,
    NoSpaceError,
    Put,
    PutResult,
    PutStatus,
    Usage,
    is_valid_name,
)

__all__ = ["MemoryBackend", "open_memory"]

_shelves: dict[str, dict[str, bytes]] = {}
_shelves_lock = threading.Lock()


def open_memory(
    location: str,
    *,
    max_bytes: Annotated[int | None, Bounds(ge=1), "refuse records beyond this many bytes"] = None,
    max_record_bytes: Annotated[int, Bounds(ge=4096), "largest record"] = 1 << 30,
) -> MemoryBackend:
    """Open the records called `location` in this process; an empty location is a new, private set."""
    if location and not is_valid_name(location):
        raise ConfigError("backend memory", "location", f"{location!r} must be a name of letters, digits, . _ - and /")
    with _shelves_lock:
        records = _shelves.setdefault(location, {}) if location else {}
    return MemoryBackend(records, max_bytes, max_record_bytes)


class MemoryBackend:
    """A dictionary behind the Backend protocol. Payloads are copied in and out under one lock."""

    def __init__(self, records: dict[str, bytes], max_bytes: int | None, max_record_bytes: int) -> None:
        self.capabilities = Capabilities(
            max_record_bytes=max_record_bytes,
            max_batch=256,
            max_parts=64,
            max_concurrency=8,
            durability=Durability.NONE,
            fork=Fork.REFUSES,
        )
        self._records = records
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._closed = False
        self._pid = os.getpid()

    def exists(self, names: Sequence[str], deadline: Deadline) -> list[bool | Failure]:
        if refused := self._refused("exists"):
            return [Failure(refused) for _ in names]
        return [name in self._records for name in names]

    def put(self, puts: Sequence[Put], deadline: Deadline) -> list[PutResult]:
        if refused := self._refused("put"):
            return [PutResult(PutStatus.CLOSED, refused) for _ in puts]
        return [self._put(put) for put in puts]

    def get(self, gets: Sequence[Get], deadline: Deadline) -> list[GetResult]:
        if refused := self._refused("get"):
            return [GetResult(GetStatus.CLOSED, refused) for _ in gets]
        return [self._get(get) for get in gets]

    def delete(self, names: Sequence[str], deadline: Deadline) -> list[DeleteStatus | Failure]:
        if refused := self._refused("delete"):
            return [Failure(refused) for _ in names]
        gone = [self._records.pop(name, None) for name in names]
        return [DeleteStatus.ABSENT if record is None else DeleteStatus.DELETED for record in gone]

    def list(self, prefix: str, deadline: Deadline, cursor: str | None = None, limit: int = 1000) -> ListPage:
        if refused := self._refused("list"):
            raise refused
        after = cursor or ""
        found = sorted(name for name in tuple(self._records) if name.startswith(prefix) and name > after)
        entries = [ListEntry(name, len(record)) for name in found[:limit] if (record := self._records.get(name)) is not None]
        return ListPage(entries, found[limit - 1] if len(found) > limit else None)

    def usage(self, deadline: Deadline) -> Usage:
        if refused := self._refused("usage"):
            raise refused
        sizes = [len(record) for record in tuple(self._records.values())]
        return Usage(len(sizes), sum(sizes), self._max_bytes)

    def close(self) -> None:
        self._closed = True

    def _refused(self, doing: str) -> ClosedError | None:
        if self._closed:
            return ClosedError(f"memory {doing}: the backend is closed")
        if os.getpid() != self._pid:
            return ClosedError(f"memory {doing}: opened by process {self._pid}; a forked child must open its own")
        return None

    def _put(self, put: Put) -> PutResult:
        if not is_valid_name(put.name, self.capabilities.max_name_bytes):
            return PutResult.failed(InvalidError(f"memory put: {put.name!r} is not a valid name"))
        if put.size_bytes > self.capabilities.max_record_bytes:
            return PutResult.failed(InvalidError(f"memory put {put.name}: {put.size_bytes} bytes are more than max_record_bytes"))
        record = b"".join(part.view for part in put.parts)
        with self._lock:
            old = self._records.get(put.name)
            if old is not None and put.mode is Mode.CREATE:
                return PutResult(PutStatus.EXISTS)
            if self._max_bytes is not None:
                used = sum(map(len, self._records.values())) - len(old or b"")
                if used + len(record) > self._max_bytes:
                    return PutResult.failed(NoSpaceError(f"memory put {put.name}: max_bytes {self._max_bytes} is reached"))
            self._records[put.name] = record
        return PutResult(PutStatus.STORED)

    def _get(self, get: Get) -> GetResult:
        record = self._records.get(get.name)
        if record is None:
            return GetResult(GetStatus.MISSING)
        if len(record) != get.size_bytes:
            return GetResult.wrong_size(len(record), get.size_bytes)
        start = 0
        for part in get.into:
            part.view[:] = record[start : start + part.length]
            start += part.length
        return GetResult(GetStatus.FOUND)
