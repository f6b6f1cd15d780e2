"""How a record comes to be: whole under a temporary name first, then renamed at one instant."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable
from contextlib import suppress

from kvstore_sdk.backend import ConfigError, Deadline, InvalidError, Mode, NoSpaceError, Put, PutResult, PutStatus, error_from_os
from kvstore_sdk_backends.fs.folder import TEMP, create_folder, create_folders, has_marker, mode_of, open_error, write_marker
from kvstore_sdk_backends.fs.io import DirectIO, StoppedError, probe, write_file
from kvstore_sdk_backends.fs.space import Claim, Space, live_bound
from kvstore_sdk_backends.fs.tempfiles import Writer, sweep

__all__ = ["RecordWriter"]

_log = logging.getLogger("kvstore_sdk_backends.fs")

_STORED = PutResult(PutStatus.STORED)
_EXISTS = PutResult(PutStatus.EXISTS)
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})

_FOLDER_TRIES = 3

OPEN_SWEEP_S = 2.0
"""What an opening spends on the remains of dead writers; some ten thousand files. `sweep` does the rest."""


class RecordWriter:
    """Writes records below `root`. Thread-safe; needs no coordination with other writers, of this process, this host or another.

    Attributes:
        space: Where to ask for room before each put; None: nowhere, the folder is not bounded.
    """

    def __init__(self, root: str, direct: DirectIO) -> None:
        self.space: Space | None = None
        self._links = True
        self._root = root
        self._direct = direct
        self._temp_root = f"{root}/{TEMP}"
        self._writer = Writer(self._temp_root)

    def prepare(self, marked: bool) -> None:
        """Create and mark the folder, remove what dead writers left, become a writer, and try O_DIRECT.

        A folder that is marked already but on a full filesystem can be read, so it is opened, with a warning.

        Raises:
            ConfigError: permission is missing, or the filesystem is read-only.
            BackendError: the filesystem failed.
        """
        try:
            create_folders(self._root)
            # First of all: on a full filesystem this may be what makes room.
            self.sweep(Deadline.after(OPEN_SWEEP_S))
            self._writer.begin()
            if not marked:
                write_marker(self._root, self._writer.new_path())
            # A refusal switches O_DIRECT off now, with its warning, and not at the first record.
            probe(self._writer.new_path(), self._direct)
            if self.space:
                self.space.begin()
            elif bounded_by := live_bound(self._root):
                _log.warning(
                    "fs %s: others keep it below %d bytes (max_bytes), which this process was not told to do", self._root, bounded_by
                )
        except OSError as cause:
            self.end()
            error = open_error(self._root, cause)
            if not (marked and isinstance(error, NoSpaceError)):
                raise error from cause
            _log.warning("fs %s: no space (%s); storing begins when there is room, loading works", self._root, cause.strerror)

    def new_paths(self, count: int) -> list[str]:
        """Names for temporary files, never given twice.

        Raises:
            FileNotFoundError: there is no folder for them: no writer yet, or none any more.
        """
        return [self._writer.new_path() for _ in range(count)]

    def store(self, put: Put, size_bytes: int, stopped: Callable[[], bool], at_s: float, written: str = "") -> PutResult:
        """Store one record in the place of whatever is there, if there is room before `at_s`.

        `written`: a temporary file that holds the record already, in a folder without bounds; in no case it is there afterwards.

        Raises:
            StoppedError: `stopped` said so before the record became visible.
            NoSpaceError: there is none.
            InvalidError: what is there cannot be replaced, which says nothing about other records.
            OSError: it is not visible and will not become visible.
        """
        if self.space is None:
            return self._store(put, size_bytes, stopped, None, written)
        claim = self.space.claim(put.name, stopped, at_s)
        try:
            claim.fit(size_bytes - self._replaced_bytes(put.name))
            return self._store(put, size_bytes, stopped, claim, "")
        finally:
            claim.end()

    def _store(self, put: Put, size_bytes: int, stopped: Callable[[], bool], claim: Claim | None, written: str) -> PutResult:
        temp = written or self._write(put, size_bytes, stopped)
        growth = size_bytes
        try:
            if stopped():
                # Of a rename that was tried before the answer may be lost: while the temporary name is there, it was not done.
                removed, temp = _discard(temp), ""
                if written and not removed:
                    return PutResult(PutStatus.UNKNOWN)
                raise StoppedError
            if claim and put.mode is Mode.CREATE:
                claim.fit(growth)
                # Of several that create one record at once, one has made the folder grow.
                if not self._make_visible(temp, put.name, self._link):
                    return _EXISTS
            else:
                if claim:
                    # Again, for what was there at first may be gone by now, or something may be.
                    growth -= self._replaced_bytes(put.name)
                    claim.fit(growth)
                self._make_visible(temp, put.name, _replace)
            temp = ""
        except OSError as cause:
            # A file server may have renamed it and lost the answer. While the temporary name is there, it has not.
            removed, temp = _discard(temp), ""
            path = f"{self._root}/{put.name}"
            if not removed:
                if claim:
                    claim.settle(growth)
                return PutResult(PutStatus.UNKNOWN, error_from_os(f"fs put {path}", cause))
            if _is_pinned(path, cause):
                raise InvalidError(
                    f"fs put {path}: what is there may not be replaced ({cause.strerror}): is it immutable, or another user's?"
                ) from cause
            raise
        finally:
            if temp:
                _discard(temp)
        if claim:
            claim.settle(growth)
        return _STORED

    def discard(self, temp: str) -> None:
        """Remove a temporary file that nobody will make visible, if it is there."""
        _discard(temp)

    def sweep(self, deadline: Deadline) -> int:
        return sweep(self._temp_root, deadline)

    def end(self) -> None:
        """Call when no `store` runs any more. Never raises."""
        if self.space:
            self.space.end()
        self._writer.end()

    def identity(self) -> str:
        """The name of the writer; "" if there is none now."""
        return self._writer.name

    def forget(self) -> None:
        """Call in a forked child: gives up what was inherited, and changes nothing."""
        self._writer.forget()

    def _replaced_bytes(self, name: str) -> int:
        """The size of what a record of this name would replace."""
        try:
            facts = os.stat(f"{self._root}/{name}", follow_symlinks=False)
        except OSError:
            return 0
        return facts.st_size if stat.S_ISREG(facts.st_mode) else 0

    def _write(self, put: Put, size_bytes: int, stopped: Callable[[], bool]) -> str:
        """Write the record to a temporary file, and return its path. After an exception there is no such file."""
        for first in (True, False):
            writer = self._writer.name
            temp = ""
            try:
                temp = self._writer.new_path()
                write_file(temp, put.parts, size_bytes, self._direct, stopped)
                return temp
            except FileNotFoundError:
                # The folder of temporary files is gone, or there was no room for one when the store was opened.
                if not first:
                    raise
                self._begin_again(writer)
            except BaseException:
                _discard(temp)
                raise
        raise AssertionError("the second turn returns or raises")

    def _begin_again(self, writer: str) -> None:
        try:
            marked = has_marker(self._root)
        except ConfigError:
            marked = False
        if not marked:
            # Without this a volume that was unmounted would be filled up again on the system's disk.
            raise FileNotFoundError(errno.ENOENT, f"{self._root} is not this store any more; is its volume mounted?")
        create_folders(self._root)
        self._writer.begin(instead_of=writer)

    def _link(self, temp: str, path: str) -> bool:
        """Make the record visible if no other is there, and whether that was so. A filesystem without hard links replaces."""
        if not self._links:
            return _replace(temp, path)
        try:
            os.link(temp, path, follow_symlinks=False)
        except FileExistsError:
            found = os.stat(path, follow_symlinks=False)
            if not stat.S_ISREG(found.st_mode):
                return _replace(temp, path)
            # A file server may have made the link, lost the answer, and been asked again.
            if found.st_ino != os.stat(temp, follow_symlinks=False).st_ino:
                return False
        except OSError as cause:
            if cause.errno not in _NO_LINKS:
                raise
            self._links = False
            return _replace(temp, path)
        _discard(temp)
        return True

    def _make_visible(self, temp: str, name: str, step: Callable[[str, str], bool]) -> bool:
        """Make the record visible, at one instant, by `_replace` or `_link`, and return what that says."""
        path = f"{self._root}/{name}"
        made_folders = 0
        removed_folder = False
        while True:
            try:
                return step(temp, path)
            except FileNotFoundError:
                # Somebody who removes empty folders may have removed what was just made; whoever does it all the time is no evictor.
                if made_folders == _FOLDER_TRIES:
                    raise
                made_folders += 1
                # From the root down, and never the root itself: see `_begin_again`.
                mode = mode_of(self._root)
                for end in (at for at, char in enumerate(name) if char == "/"):
                    with suppress(FileExistsError):
                        create_folder(f"{self._root}/{name[:end]}", mode)
            except IsADirectoryError:
                if removed_folder:
                    raise
                removed_folder = True
                # A folder that holds something may be somebody's records, so only an empty one is removed.
                try:
                    os.rmdir(path)
                except OSError as cause:
                    problem = f"a folder stands in the record's place and cannot be removed ({cause.strerror})"
                    raise IsADirectoryError(errno.EISDIR, problem) from cause


def _replace(temp: str, path: str) -> bool:
    """Make the record visible in the place of whatever is there. True."""
    os.replace(temp, path)
    return True


def _is_pinned(path: str, cause: OSError) -> bool:
    """Whether a rename was denied because of what is at `path`, an immutable file for example: its folder takes files."""
    if cause.errno not in (errno.EACCES, errno.EPERM):
        return False
    return os.path.lexists(path) and os.access(os.path.dirname(path), os.W_OK | os.X_OK, effective_ids=True)


def _discard(temp: str) -> bool:
    """Remove a temporary file. False: it was not there, or there is no telling; a sweep will see to it."""
    try:
        os.unlink(temp)
    except OSError:
        return False
    return True
