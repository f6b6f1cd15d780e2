"""Which records go first: those that were used longest ago, as their times of last change say.

Nothing is remembered of a single record, so memory does not grow with their number. A *pass* goes through all folders and takes what is
older than a limit, which is the age that a tenth of the records exceeded in the pass before: a sample of their times was drawn
on the way. So each pass removes the oldest tenth, in whatever order the folders come, and looks at some ten records for each that it
removes. A record whose time lies in the future was there before the clock was set back: it counts as older than all others.

Folders are held open and names are looked up in them, never through a path: a link that somebody puts into a folder's place leads
nowhere.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import random
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvstore_sdk.backend import is_valid_name
from kvstore_sdk_backends.fs.folder import MAX_NAME_BYTES, TEMP

__all__ = ["FUTURE_S", "Victim", "Victims"]

FUTURE_S = 3600.0
"""Hosts and file servers differ by less; a clock that was set differs by more."""
EMPTY_S = 3600.0
"""A folder without records is removed when nothing happened in it for so long: a put that has just made it is about to use it."""

_SHARE = 0.1
_CHUNK = 4096
_SAMPLE = 4096
"""Gives the age of the oldest tenth to half a per cent of all records."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PASSED_OVER = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE, errno.EACCES, errno.EPERM})
"""Gone meanwhile, replaced by something else, or another user's."""


@dataclass(frozen=True, slots=True)
class Victim:
    """A record that may be removed now, while its folder is open."""

    folder: int
    name: str
    limit_ns: float


class Victims:
    """Counts the records of `root` and removes the oldest; `now_s` gives the filesystem's time. For one thread.

    Attributes:
        records: How many of them were removed.
        bytes: How many bytes they had.
        refused: Why the last one that could not be removed was not; None when the last one was.
    """

    def __init__(self, root: str, now_s: Callable[[], float]) -> None:
        self.records = 0
        self.bytes = 0
        self.refused: OSError | None = None
        self._root = root
        self._now_s = now_s
        self._random = random.Random(root)
        self._future_ns = 0
        self._sample: list[int] = []
        self._seen = 0

    def count(self) -> Iterator[int]:
        """The bytes of all records, a few thousand at a time.

        Raises:
            OSError: a folder cannot be read, so the count would be wrong.
        """
        self._sample, self._seen = [], 0
        for _, entries in self._folders():
            total = 0
            for _, facts in self._look(entries):
                total += facts.st_size
                self._draw(self._order_ns(facts))
            yield total

    def temporary(self) -> dict[str, int]:
        """The bytes of each writer's temporary files."""
        found: dict[str, int] = {}
        above = f"{self._root}/{TEMP}"
        for folder, _, files in os.walk(above):
            writer = os.path.relpath(folder, above).split("/", 1)[0]
            found[writer] = found.get(writer, 0) + sum(_size_bytes(f"{folder}/{name}") for name in files)
        return found

    def oldest(self) -> Iterator[Victim | None]:
        """What to remove next, the oldest first, as often as it is asked. None: time went by and nothing was found yet.

        Ends when nothing is left that can be removed.

        Raises:
            OSError: a folder cannot be read.
        """
        share = _SHARE
        while True:
            limit_ns, before = self._limit_ns(share), self.records
            self._sample, self._seen = [], 0
            for folder, entries in self._folders():
                aged = []
                for name, facts in self._look(entries):
                    at_ns = self._order_ns(facts)
                    if at_ns <= limit_ns:
                        aged.append((at_ns, name))
                    if at_ns > limit_ns or limit_ns == math.inf:
                        # What goes now is not there for the next pass to choose from.
                        self._draw(at_ns)
                for _, name in sorted(aged):
                    yield Victim(folder, name, limit_ns)
                yield None
            if self.records > before:
                share = _SHARE
            elif share >= 1.0:
                return
            else:
                # All of them were used since the last pass. The sample is fresh now; should even so nothing be old enough, be less choosy.
                share = min(1.0, share * 4)

    def size_bytes(self, victim: Victim) -> int:
        """Of the record; 0 if it is gone."""
        try:
            return os.stat(victim.name, dir_fd=victim.folder, follow_symlinks=False).st_size
        except OSError:
            return 0

    def remove(self, victim: Victim) -> int | None:
        """Remove a record, and return its size; None if it was used meanwhile, is gone, or may not be removed."""
        self._look_at_the_clock()
        try:
            facts = os.stat(victim.name, dir_fd=victim.folder, follow_symlinks=False)
            if not stat.S_ISREG(facts.st_mode) or self._order_ns(facts) > victim.limit_ns:
                return None
            os.unlink(victim.name, dir_fd=victim.folder)
        except FileNotFoundError:
            return None
        except OSError as cause:
            self.refused = cause
            return None
        self.refused = None
        self.records += 1
        self.bytes += facts.st_size
        return facts.st_size

    def _look(self, entries: list[os.DirEntry[str]]) -> Iterator[tuple[str, os.stat_result]]:
        self._look_at_the_clock()
        for entry in entries:
            try:
                facts = entry.stat(follow_symlinks=False)
            except OSError as cause:
                if cause.errno in _PASSED_OVER:
                    continue
                raise
            yield entry.name, facts

    def _draw(self, at_ns: int) -> None:
        """Each record is in the sample with the same chance, however many will come."""
        self._seen += 1
        if len(self._sample) < _SAMPLE:
            self._sample.append(at_ns)
        elif (place := int(self._random.random() * self._seen)) < _SAMPLE:
            self._sample[place] = at_ns

    def _look_at_the_clock(self) -> None:
        self._future_ns = int((self._now_s() + FUTURE_S) * 1e9)

    def _order_ns(self, facts: os.stat_result) -> int:
        at_ns = facts.st_mtime_ns
        return at_ns - (1 << 63) if at_ns > self._future_ns else at_ns

    def _limit_ns(self, share: float) -> float:
        if share >= 1.0 or not self._sample:
            return math.inf
        return sorted(self._sample)[max(0, math.ceil(len(self._sample) * share) - 1)]

    def _folders(self) -> Iterator[tuple[int, list[os.DirEntry[str]]]]:
        fd = os.open(self._root, _FOLDER & ~os.O_NOFOLLOW)
        try:
            yield from _files(fd, MAX_NAME_BYTES, self._now_s() - EMPTY_S)
        finally:
            os.close(fd)


def _files(folder: int, room: int, empty_before_s: float) -> Iterator[tuple[int, list[os.DirEntry[str]]]]:
    """The records in and below an open folder: at most `_CHUNK` at a time, and the open folder that they are in."""
    files = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if not is_valid_name(entry.name, room):
                continue
            if entry.is_file(follow_symlinks=False):
                files.append(entry)
                if len(files) == _CHUNK:
                    yield folder, files
                    files = []
            elif entry.is_dir(follow_symlinks=False):
                try:
                    below = os.open(entry.name, _FOLDER, dir_fd=folder)
                except OSError as cause:
                    if cause.errno in _PASSED_OVER:
                        continue
                    raise
                try:
                    yield from _files(below, room - len(entry.name) - 1, empty_before_s)
                    # Left by eviction, or by a model that is served no more. One that holds something refuses.
                    facts = os.fstat(below)
                    if facts.st_mtime < empty_before_s and facts.st_nlink <= 2:
                        with contextlib.suppress(OSError):
                            os.rmdir(entry.name, dir_fd=folder)
                finally:
                    os.close(below)
    if files:
        yield folder, files


def _size_bytes(path: str) -> int:
    try:
        return os.stat(path, follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0
