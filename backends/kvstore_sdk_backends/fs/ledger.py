"""The files through which the processes that share a bounded folder agree about its room.

::

    .kvstore/space/ledger        who evicts, what is used, and how much each member may write
    .kvstore/space/<request>     an empty file: its name is what a member asks for

Every file has one writer: the ledger is the evictor's, replaced as a whole by a rename; a request is its member's. So there is nothing to
lock, which matters because a mount may keep locks to itself. Both are read by opening them or by listing their folder after touching
it, which is when a network filesystem looks at its server again.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore_sdk_backends.fs.folder import META, create_folder, has_marker, mode_of

__all__ = ["BYE", "FolderClock", "Ledger", "Member", "Reading", "Request", "boot_s"]

SPACE = f"{META}/space"
BYE = -1
"""What a member needs that goes away."""

_NAME = re.compile(r"(?P<member>[0-9a-z-]{1,80})\.(?P<serial>\d{1,19})\.(?P<settled>-?\d{1,19})\.(?P<need>-?\d{1,19})\.(?P<limit>\d{1,19})")
_MEMBER = re.compile(r"[0-9a-z-]{1,80}")
_MAX_BYTES = 16 << 20
"""A hundred thousand members; more is no ledger."""
_RELEASED_S = 1_000_000_000
"""The time of last change of a ledger whose owner is gone: a second of 2001, which every filesystem can keep."""
_DOUBTFUL_S = _RELEASED_S + 60
"""The same, if it may have been written over another's."""
_TRIES = 4


def boot_s() -> float:
    """A clock that nobody can set and that goes on while the machine sleeps: a lease must run out then too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(slots=True)
class Member:
    """One backend that is open for writing, as the evictor knows it. Bytes are totals since it began.

    Attributes:
        serial: Of its last request that was answered.
        allowance: What it may have written, all in all.
        settled: What it said to have written, less what it replaced or deleted.
        lost: Of its allowance, what ran out unheard of, and is taken for written until the files are counted.
        limit: Its `max_bytes`.
        denied: The answer was no.
    """

    serial: int = 0
    allowance: int = 0
    settled: int = 0
    lost: int = 0
    limit: int = 0
    denied: bool = False

    @property
    def outstanding(self) -> int:
        return max(0, self.allowance - self.settled)


@dataclass(slots=True)
class Reading:
    """What the ledger says. No ledger, or one that cannot be understood, says nothing: it has no owner.

    Attributes:
        owner: The member that evicts; "" when nobody does, or it said that it is gone.
        counting: The owner does not know yet how much is used.
        complete: Whoever may write something by what was granted is among `members`.
        max_bytes: The bound that is kept.
        version: Differs whenever the owner wrote or touched the file.
        at_s: When that was, by the filesystem's clock.
    """

    owner: str = ""
    counting: bool = False
    complete: bool = True
    max_bytes: int = 0
    members: dict[str, Member] = field(default_factory=dict)
    version: tuple[int, int] = (0, 0)
    at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """A member asks for an allowance of `settled + need`, instead of what it has.

    `need` is what it is writing now and what waits. Of several requests of one member that of the highest serial counts.
    """

    member: str
    serial: int
    settled: int
    need: int
    limit: int


class FolderClock:
    """The filesystem's clock, which all hosts on it share and which may be set at any time."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._ahead_s = time.time() - boot_s()

    def look_s(self) -> float:
        """The time now.

        Raises:
            OSError: the folder cannot be touched.
        """
        os.utime(self._folder)
        now_s = os.stat(self._folder).st_mtime
        self._ahead_s = now_s - boot_s()
        return now_s

    def now_s(self) -> float:
        """The time now, if the clock was not set since `look_s`. Costs nothing."""
        return boot_s() + self._ahead_s


class Ledger:
    """Reads and writes these files. Thread-safe, but for `write`, which is the evictor's."""

    def __init__(self, root: str) -> None:
        self._root = root
        self.folder = f"{root}/{SPACE}"
        self.clock = FolderClock(self.folder)
        self._path = f"{self.folder}/ledger"
        self._new_path = f"{self.folder}/{secrets.token_hex(8)}.new"

    def begin(self) -> None:
        """Create the folder, if the root is a store.

        Raises:
            OSError: that failed.
        """
        # Without this a volume that was unmounted would be filled up again on the system's disk.
        if not has_marker(self._root):
            raise FileNotFoundError(errno.ENOENT, f"{self._root} is not this store any more; is its volume mounted?")
        mode = mode_of(self._root)
        for folder in (f"{self._root}/{META}", self.folder):
            with contextlib.suppress(FileExistsError):
                create_folder(folder, mode)
        self.clock.look_s()

    def read(self) -> Reading:
        """What the ledger says now.

        Raises:
            OSError: it is there and cannot be read.
        """
        for _ in range(_TRIES):
            try:
                fd = self._open()
                if fd is None:
                    return Reading()
                try:
                    return _reading_of(fd)
                finally:
                    os.close(fd)
            except OSError as cause:
                # Replaced on another host between two steps of ours: look again.
                if cause.errno != errno.ESTALE:
                    raise
        return Reading()

    def _open(self) -> int | None:
        """None: there is none, or something else in its place."""
        try:
            return os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as cause:
            if cause.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.ENOTDIR):
                return None
            raise

    def write(self, reading: Reading) -> None:
        """Replace the ledger. `version` and `at_s` of `reading` do not matter.

        Raises:
            OSError: it is as it was.
        """
        body = {
            "owner": reading.owner,
            "counting": reading.counting,
            "complete": reading.complete,
            "max_bytes": reading.max_bytes,
            "members": {n: [m.serial, m.allowance, m.settled, m.lost, m.limit, int(m.denied)] for n, m in reading.members.items()},
        }
        try:
            fd = os.open(self._new_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            try:
                # Whoever may store must be able to read it, whatever the umask.
                with contextlib.suppress(OSError):
                    os.fchmod(fd, mode_of(self.folder) & 0o666)
                text = memoryview(json.dumps(body).encode())
                while text:
                    text = text[os.write(fd, text) :]
            finally:
                os.close(fd)
            try:
                os.replace(self._new_path, self._path)
            except IsADirectoryError:
                os.rmdir(self._path)
                os.replace(self._new_path, self._path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(self._new_path)
            raise

    def touch(self, owner: str) -> bool:
        """Say that `owner` lives. False, and nothing was done: the ledger is not his.

        Raises:
            OSError: the ledger cannot be touched.
        """
        return self._set_time(owner, None)

    def release(self, owner: str, complete: bool) -> bool:
        """Say that `owner` is gone, and that not all grants are in it if it is not `complete`. False: the ledger is not his.

        Raises:
            OSError: the ledger cannot be touched.
        """
        time_s = _RELEASED_S if complete else _DOUBTFUL_S
        return self._set_time(owner, (time_s, time_s))

    def _set_time(self, owner: str, times: tuple[int, int] | None) -> bool:
        try:
            fd = self._open()
            if fd is None:
                return False
            try:
                if _reading_of(fd).owner != owner:
                    return False
                # By the open file: under its name there may be another's by now.
                os.utime(fd, times)
            finally:
                os.close(fd)
        except OSError as cause:
            if cause.errno == errno.ESTALE:
                return False
            raise
        return True

    def send(self, request: Request) -> str:
        """Put up a request, and return its path.

        Raises:
            OSError: it is not there.
        """
        name = f"{request.member}.{request.serial}.{request.settled}.{request.need}.{request.limit}"
        path = f"{self.folder}/{name}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(path, flags, 0o666)
        except FileNotFoundError:
            self.begin()
            fd = os.open(path, flags, 0o666)
        os.close(fd)
        return path

    def take(self, sure: Callable[[], object]) -> list[Request]:
        """The last request of each member, in no order; none of those that there were is left.

        Args:
            sure: Called before any is removed, and raises if they are not the caller's to answer.

        Raises:
            OSError: the folder is gone or cannot be read.
        """
        # Not for the time: this makes a network filesystem ask its server what is new.
        os.utime(self.folder)
        found: dict[str, Request] = {}
        with os.scandir(self.folder) as entries:
            matches = [match for entry in entries if (match := _NAME.fullmatch(entry.name))]
        if matches:
            sure()
        for match in matches:
            request = Request(match["member"], *(int(match[part]) for part in ("serial", "settled", "need", "limit")))
            if request.member not in found or found[request.member].serial < request.serial:
                found[request.member] = request
            # Another user's in a folder with the sticky bit stays, and is passed over by its serial.
            with contextlib.suppress(OSError):
                os.unlink(f"{self.folder}/{match[0]}")
        return [*found.values()]


def _reading_of(fd: int) -> Reading:
    facts = os.fstat(fd)
    # A folder or a FIFO in its place, or a file that would fill the memory.
    if not stat.S_ISREG(facts.st_mode) or facts.st_size > _MAX_BYTES:
        return Reading()
    found = _parse(os.read(fd, facts.st_size + 1))
    found.version, found.at_s = (facts.st_mtime_ns, facts.st_ino), facts.st_mtime
    if int(facts.st_mtime) in (_RELEASED_S, _DOUBTFUL_S):
        found.owner = ""
        found.complete &= int(facts.st_mtime) == _RELEASED_S
    return found


def _parse(text: bytes) -> Reading:
    try:
        body = json.loads(text)
        owner, max_bytes, listed = body["owner"], body["max_bytes"], body["members"]
        if not isinstance(owner, str) or (owner and not _MEMBER.fullmatch(owner)) or type(max_bytes) is not int:
            raise ValueError(owner)
        members = {}
        for name, values in listed.items():
            if not _MEMBER.fullmatch(name) or [type(value) for value in values] != [int] * 6:
                raise ValueError(name)
            members[name] = Member(values[0], values[1], values[2], values[3], values[4], bool(values[5]))
        return Reading(owner, bool(body["counting"]), bool(body["complete"]), max_bytes, members)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return Reading()
