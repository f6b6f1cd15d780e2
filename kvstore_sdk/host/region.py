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

from kvstore_sdk.backend import ConfigError, Region

__all__ = ["create_region", "is_abandoned", "join_region", "open_region", "sweep_regions"]

logger = logging.getLogger(__name__)

_WHERE = "host region"
_POLL_S = 0.01

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

    Raises:
        ConfigError: it did not come in time; or what is there is larger, a link, no file, or another user's.
    """
    _check_size(path, size_bytes)
    deadline = time.monotonic() + timeout_s
    while True:
        seen = "does not exist"
        if (fd := _open_used(path, remove=False)) is not None:
            there = os.fstat(fd).st_size
            if there == size_bytes:
                return _map(fd, path, size_bytes)
            os.close(fd)
            seen = f"has {there} bytes"
            if there > size_bytes:
                problem = f"{path} has {there} bytes, not {size_bytes}; processes of one engine must give it one size"
                raise ConfigError(_WHERE, "size_bytes", problem)
        if time.monotonic() >= deadline:
            problem = (
                f"{path} {seen}, and no process gave it {size_bytes} within {timeout_s:g} s; processes of one engine must give it one size"
            )
            raise ConfigError(_WHERE, "path", problem)
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
        if (fd := _open_used(path, remove=True)) is not None:
            os.close(fd)
            return join_region(path, size_bytes, max(0.0, deadline - time.monotonic()))
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


def is_abandoned(path: str) -> bool:
    """Whether no process on this machine has `path` open for writing, or mapped: asked of the kernel, so across containers too.

    A read lease is granted on exactly such files. There is no moment at which a region that is just being created would pass: whoever
    creates one holds it open for writing from before it has a size. False when it cannot be told.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        # Whoever opens the file for writing while the lease lasts makes the kernel signal us. SIGURG is ignored unless asked for; the
        # default, SIGIO, would end the process.
        fcntl.fcntl(fd, _F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, _F_SETLEASE, fcntl.F_RDLCK)
        return True
    except OSError as cause:
        if cause.errno not in (errno.EAGAIN, errno.EINVAL, errno.EACCES):
            logger.debug("kvstore: cannot tell whether %s is in use: %s", path, cause)
        return False
    finally:
        os.close(fd)


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


def _open_used(path: str, remove: bool) -> int | None:
    """Open a region that some process uses, for reading and writing. None: there is none, or an abandoned one, removed if asked.

    Raises:
        ConfigError: what is there is no region of this user.
    """
    with _Guard(path) as guard:
        if not guard.held:
            return None
        if is_abandoned(path):
            if remove:
                os.unlink(path)
            return None
        try:
            return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            # Its owner unlinked it: all that it waited for have mapped it.
            return None


def _remove_abandoned(path: str) -> bool:
    try:
        with _Guard(path) as guard:
            if guard.held and is_abandoned(path):
                os.unlink(path)
                return True
    except (ConfigError, FileNotFoundError):
        pass
    return False


class _Guard:
    """A lock on the file at a path: who holds it may remove the file, and nobody who asks for it opens the file for writing meanwhile.

    Without it one process would find a file abandoned, a second one remove and create it anew, and the first remove the new one; or two
    would join a dead engine's region, each taking the other for its owner.

    `held` is False when there is no file, or somebody else holds the lock: ask again later.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1
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
        except BaseException:
            os.close(self._fd)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)
