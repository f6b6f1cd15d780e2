"""The limits beside a backend: copying in memory, and for a folder plain files and fio; and emptying the page cache of files."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvstore_sdk.backend import Capabilities, Deadline, DeleteStatus, Failure, Get, GetResult, GetStatus, Put, PutResult, PutStatus, Region
from kvstore_sdk.bench.crew import Watch, work_through
from kvstore_sdk.errors import UnavailableError, text_of

__all__ = ["PlainFiles", "copy_rate", "drop_pages", "fio_rates"]

_DROPS = 3
_FIO_BYTES = 64 << 20
_FIO_S = 60.0


class PlainFiles:
    """A file a record, written and read by the shortest way, in a hidden folder that `close` removes: no rename, no name that is looked at,
    no deadline. It has the methods of a backend, so that it is driven like one, and is none."""

    capabilities = Capabilities(max_record_bytes=1 << 40, max_batch=1024, max_concurrency=1024, align_bytes=4096, max_name_bytes=1024)

    def __init__(self, folder: Path, *, direct: bool) -> None:
        """In a new folder below `folder`, which is then called `folder`.

        Raises:
            OSError: the folder cannot be made.
        """
        self.folder = tempfile.mkdtemp(prefix=".kvstore-bench-", dir=folder)
        self._direct = os.O_DIRECT if direct else 0

    def path(self, name: str) -> str:
        """Where a record is."""
        return f"{self.folder}/{name.rpartition('/')[2]}"

    def put(self, puts: Sequence[Put], deadline: Deadline) -> list[PutResult]:
        for put in puts:
            self._move(put.name, put.parts[0].view, os.O_WRONLY | os.O_CREAT | os.O_EXCL, os.pwrite)
        return [PutResult(PutStatus.STORED) for _ in puts]

    def get(self, gets: Sequence[Get], deadline: Deadline) -> list[GetResult]:
        for get in gets:
            self._move(get.name, get.into[0].view, os.O_RDONLY, lambda fd, view, at: os.preadv(fd, [view], at))
        return [GetResult(GetStatus.FOUND) for _ in gets]

    def exists(self, names: Sequence[str], deadline: Deadline) -> list[bool | Failure]:
        return [os.access(self.path(name), os.F_OK) for name in names]

    def delete(self, names: Sequence[str], deadline: Deadline) -> list[DeleteStatus | Failure]:
        for name in names:
            os.unlink(self.path(name))
        return [DeleteStatus.DELETED for _ in names]

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _move(self, name: str, view: memoryview, flags: int, move: object) -> None:
        fd = os.open(self.path(name), flags | self._direct | os.O_CLOEXEC, 0o600)
        try:
            at = 0
            while at < len(view):
                moved: int = move(fd, view[at:], at)  # type: ignore[operator]
                if moved <= 0:
                    raise UnavailableError(f"plain file {name}: ends at {at} of {len(view)} bytes")
                at += moved
        finally:
            os.close(fd)


def copy_rate(record_bytes: int, threads: int, limit_s: float) -> float:
    """Records a second that so many threads copy from memory to memory, each its own, for `limit_s`."""
    with contextlib.closing(Region(record_bytes * threads * 2)) as region:
        ctypes.memset(region.address, 0, region.size_bytes)

        def work(thread: int, batch: Sequence[int]) -> None:
            at = region.address + 2 * thread * record_bytes
            # Without the GIL, unlike an assignment to a view.
            for _ in batch:
                ctypes.memmove(at + record_bytes, at, record_bytes)

        batches = [range(max(1, (1 << 20) // record_bytes))] * threads
        return work_through("memcpy", batches, work, Watch(threads, 60.0), limit_s=limit_s, repeat=True).rate


def fio_rates(folder: str, payload_bytes: int, threads: int, set_bytes: int) -> dict[str, float]:
    """Blocks a second that `fio` writes (`put`) and reads (`get`) past the page cache, one file a thread.

    Raises:
        UnavailableError: it failed.
    """
    size = max(1, min(set_bytes, _FIO_BYTES) // threads // payload_bytes) * payload_bytes
    how = ["--name=kvstore", f"--directory={folder}", f"--bs={payload_bytes}", f"--size={size}", f"--numjobs={threads}", "--direct=1"]
    how += ["--ioengine=psync", "--thread", "--group_reporting", "--fallocate=none", "--output-format=json"]
    found = {}
    try:
        for operation, direction in (("put", "write"), ("get", "read")):
            done = subprocess.run(["fio", *how, f"--rw={direction}"], capture_output=True, text=True, timeout=_FIO_S)
            if done.returncode:
                raise UnavailableError(f"fio: {(done.stderr.strip().splitlines() or ['failed'])[0]}")
            found[operation] = json.loads(done.stdout)["jobs"][0][direction]["bw_bytes"] / payload_bytes
    except (OSError, subprocess.SubprocessError, ValueError, LookupError) as cause:
        raise UnavailableError(f"fio: {type(cause).__name__}: {text_of(cause)}") from cause
    finally:
        for number in range(threads):
            with contextlib.suppress(OSError):
                os.unlink(f"{folder}/kvstore.{number}.0")
    return found


def drop_pages(paths: Iterable[str]) -> bool:
    """Write these files to their device and take them out of the page cache. False: some of it is still there, as on a tmpfs.

    Raises:
        OSError: a file cannot be opened or written.
    """
    left = list(paths)
    # What a processor has just touched stays for once.
    for _ in range(_DROPS):
        left = [path for path in left if not _drop(path)]
    return not left


def _drop(path: str) -> bool:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return not _is_cached(fd)
    finally:
        os.close(fd)


def _is_cached(fd: int) -> bool:
    """Whether the first byte is in the page cache; where the filesystem cannot say, its word is taken for the advice it was given."""
    try:
        return os.preadv(fd, [bytearray(1)], 0, os.RWF_NOWAIT) > 0
    except OSError:
        return False
