"""Host memory with a name: several processes map it by its path, and what dead ones left behind is found and removed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import re
import signal
import stat
import time
from collections.abc import Collection
from typing import NamedTuple

from kvstore_sdk.backend import ConfigError, Region

__all__ = ["create_region", "is_abandoned", "join_region", "open_region", "sweep_regions"]

logger = logging.getLogger(__name__)

_WHERE = "host region"
_POLL_S = 0.01

_RESERVE_BYTES_PER_S = 200e6
"""How fast memory is reserved at least. Kernels zero it at some GB/s."""

# Python names neither of them on every platform.
_F_SETSIG = 10
_F_SETLEASE = 1024


def create_region(path: str, size_bytes: int) -> Region:
    """Create a file with all its memory, readable and writable by this user only, and map it.

    The memory is allocated here and now: no later write can find the machine out of it, which would end the process with SIGBUS.

    Args:
        path: Of a file that does not exist, as a rule in `/dev/shm`.
        size_bytes: Whole pages.

    Raises:
        FileExistsError: there is something at `path`.
        ConfigError: there is not enough room, or the file cannot be created there. Nothing is left behind.
    """
    _check_size(path, size_bytes)
    try:
        # Open for writing from its first moment on, so that nobody takes it for abandoned.
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        raise
    except OSError as cause:
        raise ConfigError(_WHERE, "path", f"{path} cannot be created: {cause.strerror}") from cause
    try:
        volume = os.statvfs(os.path.dirname(path) or ".")
        free_bytes = volume.f_bavail * volume.f_frsize
        if free_bytes < size_bytes:
            raise ConfigError(_WHERE, "size_bytes", _no_room(path, size_bytes, free_bytes))
        try:
            os.posix_fallocate(fd, 0, size_bytes)
        except OSError as cause:
            if cause.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG):
                raise ConfigError(_WHERE, "path", f"{path}: {size_bytes} bytes cannot be allocated: {cause.strerror}") from cause
            raise ConfigError(_WHERE, "size_bytes", _no_room(path, size_bytes, free_bytes)) from cause
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        os.close(fd)
        raise
    return _map(fd, path, size_bytes)


def join_region(path: str, size_bytes: int, timeout_s: float) -> Region:
    """Map a region that another process creates, or has created and still uses, waiting until it is there and has its size.

    To reserve a large region takes minutes. While its maker holds it and memory is added to it, the wait goes on beyond `timeout_s`, for
    what the whole of it takes at 200 MB/s.

    Args:
        path: Of the region.
        size_bytes: Of all of it.
        timeout_s: How long it may not be there, or not grow.

    Raises:
        ConfigError: it did not come in time, or its maker ended or stopped; or what is there is larger, a link, no file, or another user's.
    """
    _check_size(path, size_bytes)
    began = grew = time.monotonic()
    most_s = timeout_s + size_bytes / _RESERVE_BYTES_PER_S
    reserved = -1
    seen: _Found | None = None
    while True:
        found = _look(path, size_bytes, remove=False)
        now = time.monotonic()
        if found is not None:
            seen = found
            if found.fd is not None:
                return _map(found.fd, path, size_bytes)
            if found.used and found.size_bytes > size_bytes:
                raise ConfigError(_WHERE, "size_bytes", _why_not(path, found, size_bytes, now - began))
            if found.used and found.reserved_bytes > reserved:
                reserved, grew = found.reserved_bytes, now
        if now - grew >= timeout_s or now - began >= most_s:
            raise ConfigError(_WHERE, "path", _why_not(path, seen, size_bytes, now - began))
        time.sleep(_POLL_S)


def open_region(path: str, size_bytes: int, timeout_s: float) -> Region:
    """Create the region, or join it if another process came first. One that dead processes left behind is replaced.

    Raises:
        ConfigError: as `create_region` and `join_region` do.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return create_region(path, size_bytes)
        except FileExistsError:
            pass
        found = _look(path, size_bytes, remove=True)
        if found is not None and found.fd is not None:
            return _map(found.fd, path, size_bytes)
        if found is not None and found.used:
            return join_region(path, size_bytes, timeout_s)
        if time.monotonic() >= deadline:
            raise ConfigError(_WHERE, "path", f"{path} comes and goes: it was not there for long enough in {timeout_s:g} s")
        time.sleep(_POLL_S)


def sweep_regions(folder: str, pattern: str, keep: Collection[str] = ()) -> list[str]:
    """Remove this user's files that no process has mapped or open for writing: what dead engines left behind, whatever ended them.

    Args:
        folder: Where they lie, `/dev/shm` as a rule.
        pattern: Regular expression of a whole file name.
        keep: Names that begin with one of these are left alone.

    Returns:
        The paths that were removed.
    """
    removed = []
    for name in sorted(os.listdir(folder)):
        if name.startswith(tuple(keep)) or not re.fullmatch(pattern, name):
            continue
        path = os.path.join(folder, name)
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            continue
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and _remove_abandoned(path):
            removed.append(path)
    if removed:
        logger.info("kvstore: removed what dead engines left behind: %s", ", ".join(removed))
    return removed


def is_abandoned(path: str, fd: int | None = None) -> bool:
    """Whether no process on this machine has `path` open for writing, or mapped: asked of the kernel, so across containers too.

    With `fd` of the file that is open for reading as `fd`, whatever has the name by now.
    A read lease is granted on exactly such files. There is no moment at which a region that is just being created would pass: whoever
    creates one holds it open for writing from before it has a size. False when it cannot be told.
    """
    if fd is not None:
        return _grants_lease(fd, path)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return _grants_lease(fd, path)
    finally:
        os.close(fd)


def _grants_lease(fd: int, path: str) -> bool:
    try:
        # Whoever opens the file for writing while the lease lasts makes the kernel signal us. SIGURG is ignored unless asked for; the
        # default, SIGIO, would end the process.
        fcntl.fcntl(fd, _F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, _F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(fd, _F_SETLEASE, fcntl.F_UNLCK)
        return True
    except OSError as cause:
        if cause.errno not in (errno.EAGAIN, errno.EINVAL, errno.EACCES):
            logger.debug("kvstore: cannot tell whether %s is in use: %s", path, cause)
        return False


def _check_size(path: str, size_bytes: int) -> None:
    if size_bytes <= 0 or size_bytes % mmap.PAGESIZE:
        raise ConfigError(_WHERE, "size_bytes", f"{path}: {size_bytes} is not a positive multiple of {mmap.PAGESIZE}")


def _no_room(path: str, size_bytes: int, free_bytes: int) -> str:
    return (
        f"{path} needs {size_bytes} bytes and {free_bytes} are free there; ask for less, or make the volume larger "
        "(of a container: --shm-size, or an emptyDir of medium Memory)"
    )


def _map(fd: int, path: str, size_bytes: int) -> Region:
    try:
        return Region.from_fd(fd, size_bytes, path)
    except OSError as cause:
        raise ConfigError(_WHERE, "size_bytes", f"{path}: {size_bytes} bytes cannot be mapped: {cause.strerror}") from cause


def _why_not(path: str, found: _Found | None, size_bytes: int, waited_s: float) -> str:
    """What is so of a region that did not come."""
    if found is None:
        return f"{path} was locked by another process for {waited_s:.3g} s; end that process, or choose another path"
    if not found.there:
        return f"{path} does not exist, and no process made it within {waited_s:.3g} s"
    if not found.used:
        return f"{path} has {found.size_bytes} bytes and no process uses it: whoever made it ended; see the log of that process"
    if not found.size_bytes:
        return (
            f"{path} is held by another process, which has reserved {found.reserved_bytes} of {size_bytes} bytes in {waited_s:.3g} s and "
            "goes on too slowly, or not at all; see the log of that process"
        )
    return f"{path} has {found.size_bytes} bytes, and not {size_bytes}; processes of one engine must give it one size"


class _Found(NamedTuple):
    """What a look at a path found.

    Attributes:
        there: Whether there is a file.
        used: Whether a process has it open for writing, or mapped.
        size_bytes: Its length.
        reserved_bytes: The memory that it has; more than its length while it is being made.
        fd: Open for reading and writing, if it is used and has the right length.
    """

    there: bool
    used: bool = False
    size_bytes: int = 0
    reserved_bytes: int = 0
    fd: int | None = None


def _look(path: str, size_bytes: int, remove: bool) -> _Found | None:
    """Open a region that some process uses and that is complete. One that is abandoned is removed, if asked.

    Returns:
        None where another process is looking at it: nothing can be said now.

    Raises:
        ConfigError: what is there is no region of this user.
    """
    with _Guard(path) as guard:
        status = guard.status
        if status is None:
            return _Found(there=False)
        if not guard.held:
            return None
        found = _Found(True, not guard.is_abandoned(), status.st_size, status.st_blocks * 512)
        if not found.used:
            return _Found(there=False) if remove and guard.remove() else found
        if found.size_bytes != size_bytes:
            return found
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            # Its owner unlinked it: all that it waited for have mapped it.
            return _Found(there=False)
        # The name may have gone to another user's file since the guard looked.
        opened = os.fstat(fd)
        if (opened.st_dev, opened.st_ino) != (status.st_dev, status.st_ino):
            os.close(fd)
            return _Found(there=False)
        return found._replace(fd=fd)


def _remove_abandoned(path: str) -> bool:
    try:
        with _Guard(path) as guard:
            return guard.held and guard.is_abandoned() and guard.remove()
    except ConfigError:
        return False


class _Guard:
    """A lock on the file at a path: who holds it may remove the file, and nobody who asks for it opens the file for writing meanwhile.

    Without it one process would find a file abandoned, a second one remove and create it anew, and the first remove the new one; or two
    would join a dead engine's region, each taking the other for its owner.

    Attributes:
        status: Of the file; None when there is none.
        held: False when there is none, or somebody else holds the lock: ask again later.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1
        self.status: os.stat_result | None = None
        self.held = False

    def __enter__(self) -> _Guard:
        try:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return self
        except OSError as cause:
            what = "is a link" if cause.errno == errno.ELOOP else f"cannot be opened: {cause.strerror}"
            raise ConfigError(_WHERE, "path", f"{self._path} {what}; remove it, or choose another path") from cause
        try:
            status = os.fstat(self._fd)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                what = f"belongs to user {status.st_uid}" if stat.S_ISREG(status.st_mode) else "is no file"
                raise ConfigError(_WHERE, "path", f"{self._path} {what}; remove it, or choose another path")
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                there = os.stat(self._path, follow_symlinks=False)
                self.held = (there.st_dev, there.st_ino) == (status.st_dev, status.st_ino)
            except (BlockingIOError, FileNotFoundError):
                pass
            self.status = status
        except BaseException:
            os.close(self._fd)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def is_abandoned(self) -> bool:
        """As the function of this name; of the file that is locked, whatever has its name by now."""
        return _grants_lease(self._fd, self._path)

    def remove(self) -> bool:
        """Unlink the name. False: it is gone, or another user's by now."""
        try:
            os.unlink(self._path)
        except OSError:
            return False
        return True
