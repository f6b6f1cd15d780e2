"""Copying the records of one store into another: verified on the way, and resumable at any point."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import Enum

from kvstore_sdk.backend import Backend, ListEntry, Mode, NoSpaceError, ReadOnlyError
from kvstore_sdk.errors import Advice, BackendError, text_of
from kvstore_sdk.tools.check import Checker, Verdict
from kvstore_sdk.tools.crew import spread
from kvstore_sdk.tools.facts import MAX_MANIFEST_BYTES, Kind, Manifest, Named, flaw_of, named, parse_manifest, size_flaw
from kvstore_sdk.tools.held import UNKNOWN, beside
from kvstore_sdk.tools.reading import PAGE_BYTES, Reader
from kvstore_sdk.tools.retry import Retry
from kvstore_sdk.tools.walk import walk
from kvstore_sdk.tools.writing import Writer

__all__ = ["Copied", "Copy", "Outcome"]

_FAILURES_IN_A_ROW = 16
"""That many records which cannot be read, one after another, are not the records' fault."""


class Outcome(Enum):
    """What became of one record or manifest.

    Attributes:
        COPIED: It is in the destination now, as it was verified; or would be.
        THERE: It was there already, and as long; with `check`, and good.
        CORRUPT: It is not what its name says, so it was not copied.
        REFUSED: The destination takes no record that large, or no name that long.
        FOREIGN: It is no record and no manifest, so it was not copied.
        GONE: It was removed since it was listed.
        FAILED: It could not be read, or not be stored.
    """

    COPIED = "copied"
    THERE = "there"
    CORRUPT = "corrupt"
    REFUSED = "refused"
    FOREIGN = "foreign"
    GONE = "gone"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Copied:
    """What became of what is called `name`. `problem` says, in one clause, why it was not copied; it may repeat bytes of the store."""

    name: str
    kind: Kind
    size_bytes: int
    outcome: Outcome
    problem: str = ""


class Copy:
    """One run from a store to another, as an iterable of what became of each name.

    Nothing is remembered between runs: what the destination holds is what was done. A run that was killed left whole records only, as
    every backend makes them visible, so the next one goes on where it stopped.
    """

    def __init__(
        self,
        source: Backend,
        destination: Backend,
        retry: Retry,
        *,
        namespaces: frozenset[str] = frozenset(),
        threads: int = 4,
        check: bool = False,
        dry_run: bool = False,
    ) -> None:
        """
        Args:
            source: Open. It may be in use.
            destination: Open, for writing unless `dry_run`. It may be in use.
            retry: How patient to be with each call.
            namespaces: Whose records and manifests; none given: all.
            threads: How many records are on the way at one time.
            check: Verify what is in the destination already, and replace it if it is not good; else its length has to do.
            dry_run: Read and verify, and store nothing.

        Raises:
            UnsupportedError: the source does not list what it holds. Nothing was asked yet.
            ReadOnlyError: the destination takes no records.
        """
        if destination.capabilities.read_only and not dry_run:
            raise ReadOnlyError("copy: the destination is read-only; open it for writing")
        self._source = source
        self._destination = destination
        self._retry = retry
        self._prefixes = [f"v1/{namespace}/" for namespace in sorted(namespaces)] or [""]
        self._threads = min(threads, source.capabilities.max_concurrency, destination.capabilities.max_concurrency)
        self._check = check
        self._dry_run = dry_run
        self._lock = threading.Lock()
        self._unread = 0
        walk(source)

    def __iter__(self) -> Iterator[Copied]:
        """
        Raises:
            NoSpaceError: the destination is full.
            BackendError: a store failed, and did so again. What was copied until then is whole.
        """
        yield from spread(self._entries(), self._worker, self._threads, "kvstore-copy")

    def _entries(self) -> Iterator[tuple[ListEntry, int | None]]:
        for prefix in self._prefixes:
            yield from beside(walk(self._source, prefix, self._retry), self._destination, prefix, self._retry)

    def _worker(self) -> AbstractContextManager[Callable[[tuple[ListEntry, int | None]], Copied]]:
        return _worker(self)

    def copy(self, hands: _Hands, entry: ListEntry, there_bytes: int | None) -> Copied:
        """See to one entry of the source. `there_bytes`: as the destination's listing says, which may be old by now."""
        what = named(entry.name)
        if what.kind is Kind.FOREIGN:
            return Copied(entry.name, what.kind, entry.size_bytes, Outcome.FOREIGN)
        if problem := self._refusal(entry):
            return Copied(entry.name, what.kind, entry.size_bytes, Outcome.REFUSED, problem)
        if there_bytes == UNKNOWN:
            there_bytes = hands.size_there(entry.name)
        if self._is_there(hands, entry, what, there_bytes):
            return Copied(entry.name, what.kind, entry.size_bytes, Outcome.THERE)
        return self._move(hands, entry, what, Mode.CREATE if there_bytes is None else Mode.REPLACE)

    def _is_there(self, hands: _Hands, entry: ListEntry, what: Named, there_bytes: int | None) -> bool:
        if there_bytes is None or (what.kind is Kind.RECORD and there_bytes != entry.size_bytes):
            return False
        # One manifest may be spelled in several ways, of several lengths.
        if what.kind is Kind.RECORD and not self._check:
            return True
        return not hands.is_bad_there(entry.name, what, there_bytes)

    def _refusal(self, entry: ListEntry) -> str:
        takes = self._destination.capabilities
        if entry.size_bytes > takes.max_record_bytes:
            return f"the destination takes records of {takes.max_record_bytes} bytes at most (max_record_bytes)"
        if len(entry.name) > takes.max_name_bytes:
            return f"the destination takes names of {takes.max_name_bytes} bytes at most"
        return ""

    def _move(self, hands: _Hands, entry: ListEntry, what: Named, mode: Mode) -> Copied:
        found = hands.load(entry, what)
        if isinstance(found, Copied):
            if found.size_bytes <= self._source.capabilities.max_record_bytes:
                self._note_reading(found.outcome is not Outcome.FAILED, found.problem)
            return found
        self._note_reading(True)
        size_bytes = len(found)
        if size_bytes != entry.size_bytes and (problem := self._refusal(ListEntry(entry.name, size_bytes))):
            return Copied(entry.name, what.kind, size_bytes, Outcome.REFUSED, problem)
        try:
            stored = self._dry_run or hands.writer.write(entry.name, found, mode)
            if not stored and not self._is_there(hands, entry, what, hands.size_there(entry.name)):
                # Somebody else's, since the listing, or one that was not listed in its place; and it is none.
                stored = hands.writer.write(entry.name, found, Mode.REPLACE)
        except NoSpaceError:
            raise
        except BackendError as error:
            if error.advice in (Advice.RETRY, Advice.FIX_CONFIG):
                # It is the store that fails, not this record.
                raise
            return Copied(entry.name, what.kind, size_bytes, Outcome.FAILED, text_of(error))
        return Copied(entry.name, what.kind, size_bytes, Outcome.COPIED if stored else Outcome.THERE)

    def _note_reading(self, could: bool, problem: str = "") -> None:
        with self._lock:
            self._unread = 0 if could else self._unread + 1
            if self._unread >= _FAILURES_IN_A_ROW:
                raise BackendError(f"copy: the source fails: {problem}")


class _Hands:
    """What one thread reads and writes with."""

    def __init__(self, source: Backend, destination: Backend, retry: Retry) -> None:
        self.writer = Writer(destination, retry)
        self._checker = Checker(source, retry)
        self._reader = Reader(source, retry)
        self._there = Reader(destination, retry)
        self._most_there = destination.capabilities.max_record_bytes

    def close(self) -> None:
        for part in (self.writer, self._checker, self._reader, self._there):
            part.close()

    def load(self, entry: ListEntry, what: Named) -> memoryview | bytes | Copied:
        """The verified bytes of a record or manifest of the source."""
        finding = self._checker.check(entry)
        if finding.verdict in (Verdict.CORRUPT, Verdict.BAD_MANIFEST):
            # It may have been written just now, or the way here may have changed it.
            finding = self._checker.check(entry)
        outcome = _OUTCOMES.get(finding.verdict)
        if outcome is not None:
            return Copied(entry.name, what.kind, finding.size_bytes, outcome, finding.problem)
        if what.kind is Kind.RECORD:
            assert self._checker.record is not None
            return self._checker.record
        try:
            data = self._reader.read(entry.name, finding.size_bytes)
        except BackendError as error:
            return Copied(entry.name, what.kind, entry.size_bytes, Outcome.FAILED, text_of(error))
        # Between the two readings it may have been written again.
        if isinstance(data, memoryview) and isinstance(parse_manifest(data, what.namespace), Manifest):
            return data
        return Copied(entry.name, what.kind, entry.size_bytes, Outcome.FAILED, "changed while it was read")

    def size_there(self, name: str) -> int | None:
        """The length of what the destination has under this name."""
        # Records are longer, so this moves no payload.
        found = self._there.read(name, min(PAGE_BYTES, self._most_there))
        if found is None:
            return None
        return PAGE_BYTES if isinstance(found, memoryview) else found.size_bytes

    def is_bad_there(self, name: str, what: Named, size_bytes: int) -> bool:
        """Whether what the destination has, of this length, is not what its name and the source's manifest say."""
        manifest = self._checker.manifest(what.namespace)
        manifest = manifest if isinstance(manifest, Manifest) else None
        if what.key is not None and size_flaw(size_bytes, what.key, manifest) is not None:
            return True
        most = self._most_there if what.key is not None else min(self._most_there, MAX_MANIFEST_BYTES)
        if not 1 <= size_bytes <= most or size_bytes % PAGE_BYTES:
            return True
        found = self._there.read(name, size_bytes)
        if not isinstance(found, memoryview):
            return True
        if what.key is not None:
            return flaw_of(found, what.key, manifest) is not None
        return not isinstance(parse_manifest(found, what.namespace), Manifest)


@contextmanager
def _worker(copy: Copy) -> Iterator[Callable[[tuple[ListEntry, int | None]], Copied]]:
    hands = _Hands(copy._source, copy._destination, copy._retry)
    try:
        yield lambda item: copy.copy(hands, *item)
    finally:
        hands.close()


_OUTCOMES = {
    Verdict.CORRUPT: Outcome.CORRUPT,
    Verdict.BAD_MANIFEST: Outcome.CORRUPT,
    Verdict.FOREIGN: Outcome.FOREIGN,
    Verdict.GONE: Outcome.GONE,
    Verdict.UNREADABLE: Outcome.FAILED,
}
