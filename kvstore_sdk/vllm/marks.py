"""Which rows hold a chunk that must not be stored, as the workers tell it to the scheduler's side.

A worker finds out when it copies a chunk into its row that blocks are missing which a reader could need. The row itself cannot say so:
the copy is asynchronous on a GPU, and may fill every byte of it with something else. So there is a byte for each row in a file of its own
beside the region, one file a rank.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore_sdk.errors import ConfigError
from kvstore_sdk.vllm.geometry import record_path

__all__ = ["RowMarks", "marks_path"]

_WHERE = "kvstore tier"


def marks_path(region_path: str, rank: int) -> str:
    """Where the marks of `rank` lie: beside its geometry record, and named like it."""
    return record_path(region_path, rank).removesuffix(".json") + ".rows"


class RowMarks:
    """A byte for each row, shared by one worker and the scheduler's side; zero for a row whose chunk may be stored.

    What a worker writes before it reports a copy as done, the scheduler's side sees when it hears of that.
    """

    def __init__(self, path: str, fd: int, rows: int) -> None:
        """Map `fd`, a file of `rows` bytes that is open for reading and writing. The caller closes it."""
        self.path = path
        # The array keeps the mapping, and the mapping keeps the file from looking abandoned.
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(mmap.mmap(fd, rows), np.uint8)

    @classmethod
    def create(cls, region_path: str, rank: int, rows: int) -> RowMarks:
        """The worker's side: a new file, all zero.

        Raises:
            OSError: it cannot be made. There is room for all of it once this returns: writing a mark cannot fail.
        """
        path = marks_path(region_path, rank)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(fd, 0, rows)
            return cls(path, fd, rows)
        except BaseException:
            os.unlink(path)
            raise
        finally:
            os.close(fd)

    @classmethod
    def open(cls, region_path: str, rank: int, rows: int) -> RowMarks:
        """The scheduler's side.

        Raises:
            ConfigError: there is no such file of this user and this length.
        """
        path = marks_path(region_path, rank)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as cause:
            problem = f"{path} cannot be opened: {cause.strerror}; do all workers run this version of kvstore-sdk?"
            raise ConfigError(_WHERE, "geometry", problem) from cause
        try:
            status = os.fstat(fd)
            if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode) or status.st_size != rows:
                raise ConfigError(_WHERE, "geometry", f"{path} is not a file of {rows} bytes that this user made")
            return cls(path, fd, rows)
        finally:
            os.close(fd)

    def mark(self, rows: npt.NDArray[np.int64]) -> None:
        """The chunks in these rows must not be stored."""
        self._bytes[rows] = 1

    def clear(self, rows: npt.NDArray[np.int64] | int) -> None:
        """Another chunk comes into these rows."""
        self._bytes[rows] = 0

    def marked(self, rows: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Of each row, whether it is marked."""
        return self._bytes[rows] != 0
