"""The filesystem backend: names become paths, results become answers."""

from __future__ import annotations

import errno
import itertools
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Annotated, Literal

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
    ListPage,
    Mode,
    NoSpaceError,
    Put,
    PutResult,
    PutStatus,
    ReadOnlyError,
    TimedOutError,
    Usage,
    error_from_os,
    is_valid_name,
)
from kvstore_sdk_backends.fs.bounded import within
from kvstore_sdk_backends.fs.folder import MAX_NAME_BYTES, TEMP, WHERE, check_direct_io, check_location, inspect, is_cached_mount
from kvstore_sdk_backends.fs.io import IOV_MAX, DirectIO, StoppedError, WrongSizeError, read_file
from kvstore_sdk_backends.fs.native import WRITTEN, NativeRecords, load
from kvstore_sdk_backends.fs.space import Space
from kvstore_sdk_backends.fs.tempfiles import LONGEST_PUT_S
from kvstore_sdk_backends.fs.walk import walk
from kvstore_sdk_backends.fs.writing import RecordWriter

__all__ = ["FsBackend", "open_fs"]

OPEN_WAIT_S = 30.0
"""A file server that restarts is back by then; an engine that starts should say what it waits for rather than wait longer."""
CLOSE_WAIT_S = 2.0
"""For puts that still run, and again for removing the writer's folder: together less than the 5 s a Tier gives."""

SWEEP_EVERY_S = 3600.0
"""A fleet that stays up for weeks opens nothing, and members of it die now and then."""
SWEEP_S = 0.05
"""What such a sweep may add to the call that makes it; some hundred files. What it leaves is for the next one, after `SWEEP_AGAIN_S`."""
SWEEP_AGAIN_S = 60.0

_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE})
"""No such record. ESTALE: another host removed it between two steps of ours."""
_USAGE_PAGE = 8192

_STORED = PutResult(PutStatus.STORED)
_EXISTS = PutResult(PutStatus.EXISTS)
_FOUND = GetResult(GetStatus.FOUND)
_MISSING = GetResult(GetStatus.MISSING)
# By the answers of `native`; None: Python has the last word.
_GOT = (None, _FOUND, _MISSING, None, None)
_PUT = (None, _STORED, None, _EXISTS, None)


def open_fs(
    location: str,
    *,
    read_only: Annotated[bool, "create, change and remove nothing; also for a mount that is read-only"] = False,
    direct_io: Annotated[Literal["auto", "always", "never"], "bypass the page cache; always: or do not open"] = "auto",
    max_record_bytes: Annotated[int, Bounds(ge=1, le=1 << 40), "refuse to store larger records"] = 1 << 30,
    max_bytes: Annotated[
        int | None, Bounds(ge=1, le=1 << 60), "keep all records together below this: evict those that were used longest ago"
    ] = None,
) -> FsBackend:
    """Open the folder `location`, an absolute path, as a store. Any number of processes and hosts may have it open.

    A missing folder is created, its parents are not. A folder that holds other things is refused.

    Raises:
        ConfigError: the folder cannot be used as it is; the message says why. Nothing was created or changed.
        BackendError: the filesystem failed, or did not answer within 30 s.
    """
    root = check_location(location)
    if read_only and max_bytes is not None:
        raise ConfigError(WHERE, "max_bytes", "evicts records, and read_only removes nothing; leave one of them out")

    def step() -> FsBackend:
        marked = inspect(root, read_only)
        direct = DirectIO(root, direct_io != "never")
        backend = FsBackend(root, direct, read_only=read_only, max_record_bytes=max_record_bytes, max_bytes=max_bytes)
        if not read_only:
            if direct_io == "always":
                check_direct_io(root, marked)
            backend._records.prepare(marked)
        return backend

    return within(OPEN_WAIT_S, f"fs open {root}", step, FsBackend.close)


class FsBackend:
    """One file a record, at `<root>/<name>`, holding the record's bytes and nothing else. Made by `open_fs`.

    A record is written to a temporary file and renamed when it is whole. The rename is atomic on every POSIX filesystem and needs
    no coordination between processes or hosts. CREATE looks first and answers EXISTS; of two that create one record at the same
    instant both may answer STORED, which is as true of either, since records of one name are equal.
    """

    def __init__(self, root: str, direct: DirectIO, *, read_only: bool, max_record_bytes: int, max_bytes: int | None) -> None:
        self.capabilities = Capabilities(
            max_record_bytes=min(max_record_bytes, max_bytes or max_record_bytes),
            max_batch=1024,
            max_parts=IOV_MAX,
            max_concurrency=64,
            max_name_bytes=MAX_NAME_BYTES,
            shared=True,
            read_after_write=not is_cached_mount(root),
            read_only=read_only,
            durability=Durability.PROCESS_CRASH,
            fork=Fork.REFUSES,
        )
        self._root = root
        self._read_only = read_only
        self._direct = direct
        self._max_bytes = max_bytes
        library = load()
        self._native = NativeRecords(library, root) if library else None
        self._records = RecordWriter(root, direct)
        self._space = None if max_bytes is None else Space(root, f"{root}/{TEMP}", max_bytes, self._records.identity)
        self._records.space = self._space
        self._used = self._space.used if self._space else None
        self._pid = os.getpid()
        self._closed = False
        self._puts = 0
        self._sweep_at_s = time.monotonic() + SWEEP_EVERY_S
        self._idle = threading.Condition()

    def exists(self, names: Sequence[str], deadline: Deadline) -> list[bool | Failure]:
        if refused := self._refused("exists"):
            return [Failure(refused) for _ in names]
        return [self._exists(name, deadline) for name in names]

    def put(self, puts: Sequence[Put], deadline: Deadline) -> list[PutResult]:
        if refused := self._refused("put"):
            return [PutResult(PutStatus.CLOSED, refused) for _ in puts]
        if self._read_only:
            return [PutResult.failed(self._read_only_error(f"put {put.name}")) for put in puts]
        with self._idle:
            self._puts += 1
        try:
            results = [*self._put_all(puts, deadline)]
            self._sweep_if_due(deadline)
            return results
        finally:
            with self._idle:
                self._puts -= 1
                last = self._closed and not self._puts
                if last:
                    self._idle.notify_all()
            if last:
                # `close` may have given up waiting for this call.
                self._records.end()

    def get(self, gets: Sequence[Get], deadline: Deadline) -> list[GetResult]:
        if refused := self._refused("get"):
            return [GetResult(GetStatus.CLOSED, refused) for _ in gets]
        if self._native and self._used is None:
            answers = self._native.get(gets, self._direct.enabled, deadline.at_s)
            return [_GOT[answer] or self._get(get, deadline) for get, answer in zip(gets, answers, strict=True)]
        return [self._get(get, deadline) for get in gets]

    def delete(self, names: Sequence[str], deadline: Deadline) -> list[DeleteStatus | Failure]:
        if refused := self._refused("delete"):
            return [Failure(refused) for _ in names]
        return [self._delete(name, deadline) for name in names]

    def usage(self, deadline: Deadline) -> Usage:
        """Counts every record there is: some seconds for a million. `used_bytes` are the records' own.

        `capacity_bytes` is `max_bytes`, or what the store could grow to: the bytes it has and those that the filesystem has free.
        """
        if refused := self._refused("usage"):
            raise refused
        records = used = 0
        try:
            for entry in walk(self._root, "", "", _USAGE_PAGE, MAX_NAME_BYTES, deadline):
                records += 1
                used += entry.size_bytes
            if self._max_bytes is not None:
                return Usage(records, used, self._max_bytes)
            volume = os.statvfs(self._root)
        except TimedOutError:
            raise
        except OSError as cause:
            raise error_from_os(f"fs usage {self._root}", cause) from cause
        return Usage(records, used, used + volume.f_bavail * volume.f_frsize)

    @property
    def evicted_records(self) -> int:
        """How many records this process evicted. Of those that share a folder one does, at a time."""
        return self._space.evicted_records if self._space else 0

    @property
    def evicted_bytes(self) -> int:
        """How many bytes they had."""
        return self._space.evicted_bytes if self._space else 0

    def sweep(self, deadline: Deadline | None = None) -> int:
        """Remove the temporary files of writers that are gone; those of living ones, on any host, are left alone.

        Every opening does this, and once an hour a `put`.

        Returns:
            How many files were removed by `deadline`, or in a minute.

        Raises:
            BackendError: the backend is closed or read-only, or the filesystem failed.
        """
        if refused := self._refused("sweep"):
            raise refused
        if self._read_only:
            raise self._read_only_error("sweep")
        try:
            return self._records.sweep(deadline or Deadline.after(60.0))
        except OSError as cause:
            raise error_from_os(f"fs sweep {self._root}", cause) from cause

    def close(self) -> None:
        self._closed = True
        if self._native:
            self._native.stop()
        if os.getpid() != self._pid:
            self._records.forget()
            return
        with self._idle:
            idle = self._idle.wait_for(lambda: not self._puts, CLOSE_WAIT_S)
        if idle:
            # A filesystem that stopped answering must not hold up a shutdown; a sweep will remove what stays.
            with suppress(TimedOutError):
                within(CLOSE_WAIT_S, f"fs close {self._root}", self._records.end, lambda _: None)

    def list(self, prefix: str, deadline: Deadline, cursor: str | None = None, limit: int = 1000) -> ListPage:
        if refused := self._refused("list"):
            raise refused
        if limit < 1:
            raise InvalidError(f"fs list {self._root}: limit {limit} must be positive")
        found = walk(self._root, prefix, cursor or "", limit + 1, MAX_NAME_BYTES, deadline)
        try:
            page = [*itertools.islice(found, limit + 1)]
        except TimedOutError:
            raise
        except OSError as cause:
            raise error_from_os(f"fs list {self._root}", cause) from cause
        return ListPage(page[:limit], page[limit - 1].name if len(page) > limit else None)

    def __repr__(self) -> str:
        return f"FsBackend({self._root!r})"

    def _refused(self, doing: str) -> ClosedError | None:
        if self._closed:
            return ClosedError(f"fs {doing}: the backend is closed")
        if os.getpid() != self._pid:
            return ClosedError(f"fs {doing}: opened by process {self._pid}; a forked child must open its own")
        return None

    def _read_only_error(self, doing: str) -> ReadOnlyError:
        return ReadOnlyError(f"fs {doing}: {self._root} was opened with read_only")

    def _bad_name(self, doing: str, name: str) -> InvalidError | None:
        if is_valid_name(name, MAX_NAME_BYTES):
            return None
        return InvalidError(f"fs {doing}: {name!r} is not a valid name of at most {MAX_NAME_BYTES} bytes")

    def _exists(self, name: str, deadline: Deadline) -> bool | Failure:
        if bad := self._bad_name("exists", name):
            return Failure(bad)
        if deadline.expired:
            return Failure(TimedOutError(f"fs exists {name}: the deadline passed"))
        try:
            return self._is_record(f"{self._root}/{name}")
        except OSError as cause:
            return Failure(error_from_os(f"fs exists {self._root}/{name}", cause))

    def _get(self, get: Get, deadline: Deadline) -> GetResult:
        if bad := self._bad_name("get", get.name):
            return GetResult.failed(bad)
        stopped = self._stop(deadline.at_s)
        path = f"{self._root}/{get.name}"
        size_bytes = get.size_bytes
        try:
            if stopped():
                raise StoppedError
            read_file(path, get.into, size_bytes, self._direct, stopped, self._used)
        except WrongSizeError as wrong:
            return GetResult.wrong_size(wrong.size_bytes, size_bytes)
        except StoppedError:
            return GetResult(GetStatus.CLOSED if self._closed else GetStatus.TIMED_OUT)
        except OSError as cause:
            if cause.errno in _GONE:
                return _MISSING
            return GetResult.failed(error_from_os(f"fs get {path}", cause))
        return _FOUND

    def _delete(self, name: str, deadline: Deadline) -> DeleteStatus | Failure:
        if bad := self._bad_name("delete", name):
            return Failure(bad)
        if self._read_only:
            return Failure(self._read_only_error(f"delete {name}"))
        if deadline.expired:
            return Failure(TimedOutError(f"fs delete {name}: the deadline passed"))
        path = f"{self._root}/{name}"
        try:
            if self._space:
                size_bytes = os.stat(path, follow_symlinks=False).st_size
                os.unlink(path)
                self._space.freed(size_bytes)
            else:
                os.unlink(path)
        except IsADirectoryError:
            return DeleteStatus.ABSENT
        except OSError as cause:
            if cause.errno in _GONE:
                return DeleteStatus.ABSENT
            return Failure(error_from_os(f"fs delete {path}", cause))
        return DeleteStatus.DELETED

    def _put_all(self, puts: Sequence[Put], deadline: Deadline) -> Iterator[PutResult]:
        temps: Sequence[str] = ()
        if self._native and self._space is None:
            # Without a folder of temporary files: Python makes one, or knows what to answer.
            with suppress(FileNotFoundError):
                temps = self._records.new_paths(len(puts))
        if not (self._native and temps):
            for put in puts:
                yield self._put(put, deadline)
            return
        # The age rule of the temporary files rests on this limit.
        at_s = min(deadline.at_s, time.monotonic() + LONGEST_PUT_S)
        answers = self._native.put(puts, temps, self.capabilities.max_record_bytes, self._direct.enabled, at_s)
        done = 0
        try:
            for put, temp, answer in zip(puts, temps, answers, strict=True):
                yield _PUT[answer] or self._put(put, deadline, temp if answer == WRITTEN else "")
                done += 1
        finally:
            # After an exception: whatever was written and is nobody's now.
            for temp, answer in zip(temps[done:], answers[done:], strict=True):
                if answer == WRITTEN:
                    self._records.discard(temp)

    def _put(self, put: Put, deadline: Deadline, written: str = "") -> PutResult:
        """Store a record. `written`: the temporary file that holds it already."""
        if bad := self._bad_name("put", put.name):
            return PutResult.failed(bad)
        size_bytes, most = put.size_bytes, self.capabilities.max_record_bytes
        if size_bytes > most:
            return PutResult.failed(InvalidError(f"fs put {put.name}: {size_bytes} bytes are more than max_record_bytes {most}"))
        # The age rule of the temporary files rests on this limit.
        at_s = min(deadline.at_s, time.monotonic() + LONGEST_PUT_S)
        stopped = self._stop(at_s)
        path = f"{self._root}/{put.name}"
        try:
            if not written:
                if stopped():
                    raise StoppedError
                # `access` costs a fraction of `stat` where nothing is, which is the rule. What it cannot tell, the writing will.
                if put.mode is Mode.CREATE and os.access(path, os.F_OK) and self._is_record(path):
                    return _EXISTS
            return self._records.store(put, size_bytes, stopped, at_s, written)
        except StoppedError:
            return PutResult(PutStatus.CLOSED if self._closed else PutStatus.TIMED_OUT)
        except (InvalidError, NoSpaceError) as error:
            return PutResult.failed(error)
        except OSError as cause:
            return PutResult.failed(error_from_os(f"fs put {path}", cause))

    def _sweep_if_due(self, deadline: Deadline) -> None:
        now_s = time.monotonic()
        with self._idle:
            if now_s < self._sweep_at_s or deadline.expired:
                return
            # Nobody else meanwhile.
            self._sweep_at_s = now_s + SWEEP_EVERY_S
        limit = Deadline(min(deadline.at_s, now_s + SWEEP_S))
        with suppress(OSError):
            self._records.sweep(limit)
        if limit.expired:
            self._sweep_at_s = now_s + SWEEP_AGAIN_S

    def _is_record(self, path: str) -> bool:
        """Whether a plain file is at `path`. A folder or a link is no record."""
        try:
            return stat.S_ISREG(os.stat(path, follow_symlinks=False).st_mode)
        except OSError as cause:
            if cause.errno in _GONE:
                return False
            raise

    def _stop(self, at_s: float) -> Callable[[], bool]:
        return lambda: self._closed or time.monotonic() >= at_s
