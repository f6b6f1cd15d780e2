"""Bytes between buffers and files: vectored, uncopied, and past the page cache where the filesystem lets them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import stat
import threading
from collections.abc import Callable, Sequence

from kvstore_sdk.backend import Buffer, Region

__all__ = ["IOV_MAX", "PAGE_BYTES", "DirectIO", "StoppedError", "WrongSizeError", "probe", "read_file", "write_file"]

_log = logging.getLogger("kvstore_sdk_backends.fs")

CHUNK_BYTES = 64 << 20
"""Most bytes of one system call: what a slow disk moves in a second, so that a deadline is noticed in time."""
IOV_MAX = 1024
"""Most buffers of one system call; Linux answers EINVAL to more."""
PAGE_BYTES = 4096
"""What O_DIRECT asks of addresses, lengths and offsets, at most; many devices are content with 512."""

# A filesystem without O_DIRECT says so when the file is opened, or only when it is read or written.
_REFUSALS = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
# Opening a FIFO or a device that stands in a record's place must not wait for a peer.
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW

_SPILL = memoryview(mmap.mmap(-1, PAGE_BYTES))
"""Where the byte after a record would go. Any number of reads may share it: nobody looks at it."""

_Step = Callable[[int, Sequence[memoryview], int], int]
"""`os.pwritev` or `os.preadv`."""


class StoppedError(Exception):
    """The transfer was given up half-way, because its deadline passed or the backend was closed."""


class WrongSizeError(Exception):
    """The file is shorter or longer than what was asked for."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(size_bytes)
        self.size_bytes = size_bytes


class DirectIO:
    """Whether O_DIRECT is used. Until a filesystem refuses it, every transfer uses it that is aligned to pages."""

    def __init__(self, root: str, enabled: bool, *, warn: bool = True) -> None:
        self.enabled = enabled
        self._warn = warn
        self._root = root
        self._lock = threading.Lock()

    def suits(self, parts: Sequence[Buffer]) -> bool:
        if not self.enabled:
            return False
        bits = 0
        for part in parts:
            bits |= part.address | part.length
        return bits % PAGE_BYTES == 0

    def refused(self, cause: OSError) -> None:
        """Switch it off, with one warning."""
        with self._lock:
            if not self.enabled:
                return
            self.enabled = False
        if self._warn:
            _log.warning("fs %s: this filesystem refuses O_DIRECT (%s); the page cache is used from now on", self._root, cause.strerror)


def write_file(path: str, parts: Sequence[Buffer], size_bytes: int, direct: DirectIO, stopped: Callable[[], bool]) -> None:
    """Create `path` and write `parts` to it, `size_bytes` together: all of them, or an exception.

    Raises:
        StoppedError: `stopped` said so between two chunks.
        OSError: the file may have been created.
    """
    fd, unbuffered = _open(path, _WRITE, parts, direct)
    try:
        views = [part.view for part in parts]
        done = _transfer(os.pwritev, fd, views, size_bytes, unbuffered, stopped)
        if done < size_bytes:
            raise OSError(errno.EIO, f"the filesystem took {done} of {size_bytes} bytes and then none")
    finally:
        # Network filesystems report a full disk here at the latest.
        os.close(fd)


def probe(path: str, direct: DirectIO) -> None:
    """Write one page to a new file as a put would, and remove it. A refusal switches `direct` off.

    Raises:
        OSError: anything else that went wrong.
    """
    page = Region(PAGE_BYTES, "kvstore-probe")
    try:
        write_file(path, [page.buffer(0, PAGE_BYTES)], PAGE_BYTES, direct, lambda: False)
    finally:
        page.close()
        with contextlib.suppress(OSError):
            os.unlink(path)


def read_file(
    path: str,
    parts: Sequence[Buffer],
    size_bytes: int,
    direct: DirectIO,
    stopped: Callable[[], bool],
    used: Callable[[int], object] | None = None,
) -> None:
    """Fill `parts`, `size_bytes` together, with the file at `path`. If that succeeds, `used` gets the open file.

    Raises:
        WrongSizeError: the file is shorter or longer; `parts` may have been written to.
        StoppedError: `stopped` said so between two chunks.
        OSError: it is missing, no plain file (EISDIR, ELOOP), or cannot be read.
    """
    fd, unbuffered = _open(path, _READ, parts, direct)
    try:
        views = [part.view for part in parts]
        # One page more than asked for, so that the read itself tells a file that is too long: no question for its size is needed.
        whole = 0 < size_bytes <= CHUNK_BYTES and len(views) < IOV_MAX
        try:
            done = _transfer(os.preadv, fd, [*views, _SPILL] if whole else views, size_bytes, unbuffered, stopped)
        except OSError as cause:
            _check_kind(fd, cause)
            raise
        if done != size_bytes or not whole:
            facts = _check_kind(fd, None)
            if facts.st_size != size_bytes or done < size_bytes:
                # A file that shrank meanwhile, or was too short, has the size that was read.
                raise WrongSizeError(facts.st_size if done >= size_bytes else min(done, facts.st_size))
        if used:
            used(fd)
    finally:
        os.close(fd)


def _check_kind(fd: int, cause: OSError | None) -> os.stat_result:
    """The facts about an open file; EISDIR when it is no plain file."""
    facts = os.fstat(fd)
    if not stat.S_ISREG(facts.st_mode):
        raise OSError(errno.EISDIR, "a folder or a special file stands in the record's place") from cause
    return facts


def _open(path: str, flags: int, parts: Sequence[Buffer], direct: DirectIO) -> tuple[int, DirectIO | None]:
    """Open `path`. The second value is `direct` if the file takes whole pages only."""
    if not direct.suits(parts):
        return os.open(path, flags, 0o666), None
    try:
        return os.open(path, flags | os.O_DIRECT, 0o666), direct
    except OSError as cause:
        if cause.errno not in _REFUSALS:
            raise
        # Linux may have created the file before it refused the flag, so the second try must take it as it is.
        fd = os.open(path, flags & ~os.O_EXCL, 0o666)
        try:
            # A folder is refused everywhere, which says nothing about files.
            if stat.S_ISREG(os.fstat(fd).st_mode):
                direct.refused(cause)
        except OSError:
            os.close(fd)
            raise
        return fd, None


def _transfer(
    step: _Step, fd: int, views: list[memoryview], size_bytes: int, unbuffered: DirectIO | None, stopped: Callable[[], bool]
) -> int:
    """Move all of `views` with as many calls of `step` as it takes. Returns fewer bytes when `step` moves none."""
    done = 0
    while done < size_bytes:
        if done and stopped():
            raise StoppedError
        window = views if not done and size_bytes <= CHUNK_BYTES and len(views) <= IOV_MAX else _window(views, done)
        try:
            count = step(fd, window, done)
        except OSError as cause:
            if unbuffered is None or cause.errno not in _REFUSALS:
                raise
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
            count = step(fd, window, done)
            # After a short count the rest may begin off a page, which says nothing about the filesystem.
            if done % PAGE_BYTES == 0:
                unbuffered.refused(cause)
            unbuffered = None
        if count <= 0:
            break
        done += count
    return done


def _window(views: list[memoryview], done: int) -> list[memoryview]:
    """What comes after the first `done` bytes of `views`, no more than one system call may carry."""
    window: list[memoryview] = []
    room = CHUNK_BYTES
    for view in views:
        if done >= len(view):
            done -= len(view)
            continue
        piece = view[done : done + room]
        done = 0
        window.append(piece)
        room -= len(piece)
        if not room or len(window) == IOV_MAX:
            break
    return window
