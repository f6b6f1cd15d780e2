"""Records in the memory of one process: for tests and trials."""

from __future__ import annotations

import os
import threading
import time
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


class _Shelf:
    """The records of one location, when each was stored, and their bytes together. `lock` guards a change of all."""

    def __init__(self) -> None:
        self.records: dict[str, bytes] = {}
        self.modified_s: dict[str, float] = {}
        self.used_bytes = 0
        self.lock = threading.Lock()


_shelves: dict[str, _Shelf] = {}
_shelves_lock = threading.Lock()


def open_memory(
    location: str,
    *,
    max_bytes: Annotated[int | None, Bounds(ge=1), "refuse records beyond this many bytes"] = None,
    max_record_bytes: Annotated[int, Bounds(ge=1), "refuse to store larger records"] = 1 << 30,
) -> MemoryBackend:
    """Open the records called `location` in this process; an empty location is a new, private set.

    Named records stay until the process ends, also while no backend has them open. A path is a name like any other; nothing is there.
    """
    if location and not is_valid_name(location := location.removeprefix("/")):
        raise ConfigError("backend memory", "location", f"{location!r} must be a name of letters, digits, . _ - and /")
    with _shelves_lock:
        shelf = _shelves.setdefault(location, _Shelf()) if location else _Shelf()
    return MemoryBackend(shelf, max_bytes, max_record_bytes)


class MemoryBackend:
    """A dictionary behind the Backend protocol. Payloads are copied in and out.

    Nothing here waits, so the deadline matters only to a batch of large records: it is looked at between two of them.
    """

    def __init__(self, shelf: _Shelf, max_bytes: int | None, max_record_bytes: int) -> None:
        self.capabilities = Capabilities(
            max_record_bytes=max_record_bytes,
            max_batch=256,
            max_parts=64,
            max_concurrency=8,
            durability=Durability.NONE,
            fork=Fork.REFUSES,
        )
        self._shelf = shelf
        self._max_bytes = max_bytes
        self._closed = False
        self._pid = os.getpid()

    def exists(self, names: Sequence[str], deadline: Deadline) -> list[bool | Failure]:
        if refused := self._refused("exists"):
            return [Failure(refused) for _ in names]
        return [self._exists(name) for name in names]

    def put(self, puts: Sequence[Put], deadline: Deadline) -> list[PutResult]:
        if refused := self._refused("put"):
            return [PutResult(PutStatus.CLOSED, refused) for _ in puts]
        return [PutResult(PutStatus.TIMED_OUT) if done and deadline.expired else self._put(put) for done, put in enumerate(puts)]

    def get(self, gets: Sequence[Get], deadline: Deadline) -> list[GetResult]:
        if refused := self._refused("get"):
            return [GetResult(GetStatus.CLOSED, refused) for _ in gets]
        return [GetResult(GetStatus.TIMED_OUT) if done and deadline.expired else self._get(get) for done, get in enumerate(gets)]

    def delete(self, names: Sequence[str], deadline: Deadline) -> list[DeleteStatus | Failure]:
        if refused := self._refused("delete"):
            return [Failure(refused) for _ in names]
        return [self._delete(name) for name in names]

    def usage(self, deadline: Deadline) -> Usage:
        if refused := self._refused("usage"):
            raise refused
        with self._shelf.lock:
            return Usage(len(self._shelf.records), self._shelf.used_bytes, self._max_bytes)

    def close(self) -> None:
        """Idempotent. A private set of records is gone with its backend."""
        self._closed = True

    def list(self, prefix: str, deadline: Deadline, cursor: str | None = None, limit: int = 1000) -> ListPage:
        if refused := self._refused("list"):
            raise refused
        if limit < 1:
            raise InvalidError(f"memory list: limit {limit} must be positive")
        after = cursor or ""
        with self._shelf.lock:
            found = sorted((name, len(record)) for name, record in self._shelf.records.items() if name.startswith(prefix) and name > after)
        entries = [ListEntry(name, size_bytes, self._shelf.modified_s.get(name)) for name, size_bytes in found[:limit]]
        return ListPage(entries, entries[-1].name if len(found) > limit else None)

    def _refused(self, doing: str) -> ClosedError | None:
        if self._closed:
            return ClosedError(f"memory {doing}: the backend is closed")
        if os.getpid() != self._pid:
            # Before any lock is touched: one that another thread held at the fork stays held in the child.
            return ClosedError(f"memory {doing}: opened by process {self._pid}; a forked child must open its own")
        return None

    def _bad_name(self, doing: str, name: str) -> InvalidError | None:
        if is_valid_name(name, self.capabilities.max_name_bytes):
            return None
        return InvalidError(f"memory {doing}: {name!r} is not a valid name of at most {self.capabilities.max_name_bytes} bytes")

    def _exists(self, name: str) -> bool | Failure:
        if bad := self._bad_name("exists", name):
            return Failure(bad)
        return name in self._shelf.records

    def _put(self, put: Put) -> PutResult:
        if bad := self._bad_name("put", put.name):
            return PutResult.failed(bad)
        size_bytes, most = put.size_bytes, self.capabilities.max_record_bytes
        if size_bytes > most:
            return PutResult.failed(InvalidError(f"memory put {put.name}: {size_bytes} bytes are more than max_record_bytes {most}"))
        if put.mode is Mode.CREATE and put.name in self._shelf.records:
            return PutResult(PutStatus.EXISTS)
        record = b"".join(part.view for part in put.parts)
        shelf = self._shelf
        with shelf.lock:
            old = shelf.records.get(put.name)
            if old is not None and put.mode is Mode.CREATE:
                return PutResult(PutStatus.EXISTS)
            used_bytes = shelf.used_bytes - len(old or b"") + len(record)
            if self._max_bytes is not None and used_bytes > self._max_bytes:
                return PutResult.failed(NoSpaceError(f"memory put {put.name}: max_bytes {self._max_bytes} is reached"))
            shelf.records[put.name] = record
            shelf.modified_s[put.name] = time.time()
            shelf.used_bytes = used_bytes
        return PutResult(PutStatus.STORED)

    def _get(self, get: Get) -> GetResult:
        if bad := self._bad_name("get", get.name):
            return GetResult.failed(bad)
        record = self._shelf.records.get(get.name)
        if record is None:
            return GetResult(GetStatus.MISSING)
        size_bytes = get.size_bytes
        if len(record) != size_bytes:
            return GetResult.wrong_size(len(record), size_bytes)
        whole = memoryview(record)
        start = 0
        for part in get.into:
            part.view[:] = whole[start : start + part.length]
            start += part.length
        return GetResult(GetStatus.FOUND)

    def _delete(self, name: str) -> DeleteStatus | Failure:
        if bad := self._bad_name("delete", name):
            return Failure(bad)
        with self._shelf.lock:
            record = self._shelf.records.pop(name, None)
            self._shelf.modified_s.pop(name, None)
            self._shelf.used_bytes -= len(record or b"")
        return DeleteStatus.ABSENT if record is None else DeleteStatus.DELETED
