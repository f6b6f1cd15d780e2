"""Where records are while they are written, and how what a dead writer left there goes away.

Every backend that is open for writing is a *writer*. Its temporary files have a folder of their own, and beside the folder lies
a file that the writer keeps locked::

    .kvstore/tmp/<kernel>-<mount>-<random>.lock
    .kvstore/tmp/<kernel>-<mount>-<random>/<0 to 7>/<number>

The eight subfolders are for filesystems that place a file near its folder (ext4, XFS): one folder for all would put every
record into one corner of the volume, and every thread of this process behind one lock.

A sweep removes what is provably of no use to a living writer, by one of two proofs:

- **The lock is free**, and the names of kernel and mount are the sweeper's own. A lock (`flock`) belongs to the open file, not to
  a process id: it ends with its owner, however that ended, and it is seen through containers. It is taken before the folder
  exists, so a folder without a holder is a dead writer's. (A child that was forked and does not close the backend keeps the lock
  until it ends: then the sweep after that one finds it free.)
- **The file is too old.** Across hosts a lock proves nothing, for a mount may keep locks to itself. But no put lasts longer
  than `LONGEST_PUT_S`: a writer that is still there after that gives up before it publishes. So a file that was not changed for
  twice as long is of no use to anybody. Ages are differences between two times of the filesystem's own clock.

Should all of this fail (a clock set forward by hours, locks lost by a file server), a put that lost its temporary file fails
with a clear answer; a record is never torn, because only a whole file is ever given a record's name.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import re
import secrets
import threading
from enum import Enum

from kvstore_sdk.backend import Deadline
from kvstore_sdk_backends.fs.folder import create_folder, mode_of

__all__ = ["LONGEST_PUT_S", "STALE_S", "Writer", "is_gone", "sweep"]

LONGEST_PUT_S = 3600.0
"""No single put goes on for longer, whatever its deadline: the age rule rests on it. An hour moves a record of 1 GiB at 0.3 MB/s."""
STALE_S = 2 * LONGEST_PUT_S

_NO_LOCK = "nolock"
_WRITER = re.compile(r"([0-9a-f]{32}|nolock)-[0-9a-f]+-[0-9a-f]{16}")
_SPREAD = 8
_MAX_HELD = 8


class Writer:
    """The right to write temporary files below `temp_root`, and names for them. Thread-safe.

    Attributes:
        name: Of the folder and the lock; "" before `begin`.
    """

    def __init__(self, temp_root: str) -> None:
        self.name = ""
        self._root = temp_root
        self._folder = ""
        # Every name that was taken, with its lock; the last is `name`.
        self._held: list[tuple[str, int]] = []
        self._numbers = itertools.count()
        self._mutex = threading.Lock()

    def begin(self, instead_of: str = "") -> None:
        """Take a new name, unless another thread already took one instead of `instead_of`.

        Raises:
            OSError: lock or folders could not be created; there is no new name then.
        """
        with self._mutex:
            if self.name != instead_of:
                return
            name, fd = _take_name(self._root)
            folder = f"{self._root}/{name}"
            try:
                mode = mode_of(self._root)
                for path in (folder, *(f"{folder}/{number}" for number in range(_SPREAD))):
                    create_folder(path, mode)
            except BaseException:
                _remove(self._root, name, None, Deadline.after(1.0))
                os.close(fd)
                raise
            # Other threads may be writing under the old name, so its lock is kept. Somebody who removes the folder every minute
            # must not use up our file descriptors.
            self._held.append((name, fd))
            if len(self._held) > _MAX_HELD:
                os.close(self._held.pop(0)[1])
            self.name, self._folder = name, folder

    def new_path(self) -> str:
        """A name for one temporary file, never given twice.

        Raises:
            FileNotFoundError: `begin` did not succeed yet, or `end` was called.
        """
        if not self._folder:
            raise FileNotFoundError(errno.ENOENT, "there is no folder of temporary files")
        number = next(self._numbers)
        return f"{self._folder}/{number % _SPREAD}/{number}"

    def end(self) -> None:
        """Remove folder and lock, with what is left in them. Idempotent, never raises: a sweep does what this could not."""
        with self._mutex:
            held, self._held, self.name, self._folder = self._held, [], "", ""
            for name, fd in held:
                with contextlib.suppress(OSError):
                    _remove(self._root, name, None, Deadline.after(1.0))
                os.close(fd)

    def forget(self) -> None:
        """Give up locks that were inherited by a fork, and leave the parent's files alone."""
        # Closing these copies leaves the parent's locks in force; LOCK_UN would end them. No mutex: it may have been held at the fork.
        held, self._held, self.name, self._folder = self._held, [], "", ""
        for _, fd in held:
            os.close(fd)


def sweep(temp_root: str, deadline: Deadline) -> int:
    """Remove what dead writers left, within `deadline`. Returns how many temporary files it removed.

    What it may not remove, or has no time for, it leaves for the next one. Any number of sweeps may run at once.

    Raises:
        OSError: the folder of temporary files cannot be read.
    """
    try:
        # The filesystem's clock, not this host's: touch something and look.
        os.utime(temp_root)
    except FileNotFoundError:
        return 0
    facts = os.stat(temp_root)
    kernel = _kernel()
    here = f"{kernel}-{facts.st_dev:x}-"
    removed = 0
    for name in _writers(temp_root):
        if deadline.expired:
            break
        # Another sweep may be at it, or the files may belong to another user: somebody else's business.
        with contextlib.suppress(OSError):
            removed += _sweep_writer(temp_root, name, kernel != _NO_LOCK and name.startswith(here), facts.st_mtime - STALE_S, deadline)
    return removed


def is_gone(temp_root: str, name: str) -> bool:
    """Whether the writer `name` is provably dead: it ran on this kernel and this mount, and its lock is free or not there any more."""
    try:
        kernel = _kernel()
        if kernel == _NO_LOCK or not name.startswith(f"{kernel}-{os.stat(temp_root).st_dev:x}-"):
            return False
        path = f"{temp_root}/{name}.lock"
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return os.path.isdir(temp_root)
    except OSError:
        return False
    try:
        return _lock(fd, path) is _Lock.OURS
    finally:
        os.close(fd)


def _take_name(root: str) -> tuple[str, int]:
    """Create a lock file and lock it: (the writer's name, the descriptor that holds the lock)."""
    facts = os.stat(root)
    mount = f"{facts.st_dev:x}"
    while True:
        name = f"{_kernel()}-{mount}-{secrets.token_hex(8)}"
        path = f"{root}/{name}.lock"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        # Whoever may sweep must be able to try the lock, whatever the umask.
        with contextlib.suppress(OSError):
            os.fchmod(fd, facts.st_mode & 0o666)
        lock = _lock(fd, path)
        if lock is _Lock.OURS:
            return name, fd
        if lock is _Lock.UNKNOWN:
            # This mount has no locks: the name says so, and age alone will decide.
            with contextlib.suppress(OSError):
                os.unlink(path)
            return f"{_NO_LOCK}-{mount}-{secrets.token_hex(8)}", fd
        # A sweep looked at the new file in the instant before it was locked, and takes it away now.
        os.close(fd)


class _Lock(Enum):
    OURS = "ours"
    HELD = "held"
    UNKNOWN = "unknown"


def _lock(fd: int, path: str) -> _Lock:
    """Try to lock the file that is open as `fd` and was found at `path`."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _Lock.HELD
    except OSError:
        return _Lock.UNKNOWN
    # Whoever locks a file may remove it, so the lock counts only if `path` still names this file.
    try:
        found, held = os.stat(path, follow_symlinks=False), os.fstat(fd)
    except FileNotFoundError:
        return _Lock.HELD
    return _Lock.OURS if (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino) else _Lock.HELD


def _sweep_writer(root: str, name: str, same_kernel: bool, stale_before: float, deadline: Deadline) -> int:
    path = f"{root}/{name}.lock"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return _remove(root, name, stale_before, deadline)
    try:
        lock = _lock(fd, path)
        if lock is _Lock.HELD:
            return 0
        return _remove(root, name, None if same_kernel and lock is _Lock.OURS else stale_before, deadline)
    finally:
        os.close(fd)


def _remove(root: str, name: str, stale_before: float | None, deadline: Deadline) -> int:
    """Remove a writer's files, all or those not changed since `stale_before`; then its folders and lock, if nothing is left.

    Returns:
        How many files were removed. What would not go is left to the next sweep.
    """
    removed = 0
    with contextlib.suppress(FileNotFoundError):
        removed = _clear(f"{root}/{name}", None, stale_before, deadline, 1)
    if not os.path.lexists(f"{root}/{name}"):
        with contextlib.suppress(OSError):
            if _is_stale(os.stat(f"{root}/{name}.lock", follow_symlinks=False), stale_before):
                os.unlink(f"{root}/{name}.lock")
    return removed


def _clear(folder: str, above: int | None, stale_before: float | None, deadline: Deadline, depth: int) -> int:
    """Remove what is in `folder`, a path, or a name in the open folder `above`; then the folder itself, if nothing is left.

    Each folder is held open and nothing is found by a path through it: whoever may write here could put a link to somebody's files in
    a folder's place, at any moment. Of a link, the link itself is removed at most.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    removed = 0
    try:
        # Asked before anything is removed, for that changes the folder.
        folder_stale = _is_stale(os.fstat(fd), stale_before)
        with os.scandir(fd) as entries:
            for entry in entries:
                if deadline.expired:
                    return removed
                # Gone already, or the writer lives and a file came in: either is as it should be.
                with contextlib.suppress(OSError):
                    if depth and entry.is_dir(follow_symlinks=False):
                        removed += _clear(entry.name, fd, stale_before, deadline, depth - 1)
                    elif _is_stale(entry.stat(follow_symlinks=False), stale_before):
                        os.unlink(entry.name, dir_fd=fd)
                        removed += 1
    finally:
        os.close(fd)
    if folder_stale:
        with contextlib.suppress(OSError):
            os.rmdir(folder, dir_fd=above)
    return removed


def _is_stale(facts: os.stat_result, stale_before: float | None) -> bool:
    return stale_before is None or facts.st_mtime < stale_before


def _writers(temp_root: str) -> list[str]:
    """Names of all writers, dead and alive; one that has both a lock and a folder comes once.

    In random order: a sweep that has no time for all of them must not begin with the same ones each time.
    """
    with os.scandir(temp_root) as entries:
        names = {entry.name.removesuffix(".lock") for entry in entries}
    found = [*filter(_WRITER.fullmatch, names)]
    secrets.SystemRandom().shuffle(found)
    return found


def _kernel() -> str:
    """Names the running kernel: two processes with the same one share its table of locks."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as source:
            name = source.read(64).strip().replace("-", "")
    except OSError:
        return _NO_LOCK
    return name if re.fullmatch("[0-9a-f]{32}", name) else _NO_LOCK
