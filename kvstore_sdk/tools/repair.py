"""Removing what is corrupt, so that it costs no more look-ups, loads and space; engines store it again."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import IO

from kvstore_sdk.backend import Backend, DeleteStatus, ListEntry
from kvstore_sdk.errors import BackendError, text_of
from kvstore_sdk.format import Flaw
from kvstore_sdk.tools.check import Checker, Finding, Verdict
from kvstore_sdk.tools.crew import spread
from kvstore_sdk.tools.facts import MAX_MANIFEST_BYTES, Kind, Manifest, named
from kvstore_sdk.tools.reading import PAGE_BYTES, Reader
from kvstore_sdk.tools.removal import check_removes, remove
from kvstore_sdk.tools.retry import Retry
from kvstore_sdk.tools.verify import Verification
from kvstore_sdk.tools.versions import is_manifest_of_other, is_of_other, is_record_of_other
from kvstore_sdk.tools.walk import walk

__all__ = ["Mended", "Outcome", "Repair"]

_FEW = 8
"""So many corrupt records are believed in any case."""


class Outcome(Enum):
    """What became of what was not fine when it was looked at first.

    Attributes:
        REMOVED: It was as bad when it was looked at again, and is gone now; or would be.
        RECOVERED: It was good by then: somebody stored it again.
        GONE: Somebody else removed it.
        OTHER_VERSION: Another version of the format wrote it, so only that can say whether it is good.
        TOO_LARGE: No record that large can be read as the store was opened; nothing else is known to be wrong with it.
        CHANGED: It was bad both times, in two ways. Memory or the way to the store may be at fault; or it is being written.
        UNREADABLE: It could not be read, so nothing is known of it.
        FAILED: It could not be removed.
    """

    REMOVED = "removed"
    RECOVERED = "recovered"
    GONE = "gone"
    OTHER_VERSION = "other_version"
    TOO_LARGE = "too_large"
    CHANGED = "changed"
    UNREADABLE = "unreadable"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Mended:
    """What became of what is called `name`. `flaw` comes with records; `problem` is one clause, which may repeat bytes of the store."""

    name: str
    kind: Kind
    size_bytes: int
    outcome: Outcome
    flaw: Flaw | None = None
    problem: str = ""


class Repair:
    """One run over a store, as an iterable of what was not fine.

    Everything is verified first, and nothing is removed until that is done. What was found bad is then looked at again, and removed at once
    if it is still bad. A race of some milliseconds is left: a record that is replaced by a good one between its second look and its
    removal is removed, which costs one more miss.

    Attributes:
        verification: The first look, with its counts.
        suspects: How many names are to be looked at again.
        is_refused: Whether nothing was removed, because most of the records looked corrupt.
    """

    def __init__(
        self,
        backend: Backend,
        retry: Retry,
        *,
        prefix: str = "",
        foreign: bool = False,
        even_most: bool = False,
        threads: int = 1,
        dry_run: bool = False,
        seen: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            backend: Open, for writing unless `dry_run`. It may be in use.
            retry: How patient to be with each call.
            prefix: Of the names that are looked at.
            foreign: Remove what is no record and no manifest as well.
            even_most: Go on although most records look corrupt. Then it is as likely that this machine reads them wrong, or that another
                build wrote them.
            threads: Records that are read at one time.
            dry_run: Look twice, and remove nothing.
            seen: Called after each name that was looked at first.

        Raises:
            UnsupportedError: the backend does not remove records, or does not list them. Nothing was asked yet.
        """
        self._deletes = check_removes(backend, "repair")
        self._backend = backend
        self._retry = retry
        self._foreign = foreign
        self._even_most = even_most
        self._threads = threads
        self._dry_run = dry_run
        self._seen = seen
        self.verification = Verification(backend, retry, prefix=prefix, threads=threads)
        self.suspects = 0
        self.is_refused = False

    def __iter__(self) -> Iterator[Mended]:
        """
        Raises:
            BackendError: the store failed, and did so again.
        """
        # On the disk: of a large store that was written by another build every name may be in it.
        with tempfile.TemporaryFile("w+", encoding="utf-8", prefix="kvstore-repair-") as spool:
            yield from self._verify(spool)
            counts = self.verification.counts
            good, corrupt = counts[Verdict.FINE] + counts[Verdict.UNPROVEN], counts[Verdict.CORRUPT]
            self.is_refused = corrupt > max(good, _FEW) and not self._even_most
            if self.is_refused:
                return
            spool.seek(0)
            threads = max(1, min(self._threads, self._backend.capabilities.max_concurrency))
            yield from spread(map(_suspect, spool), self._worker, threads, "kvstore-repair")

    def _verify(self, spool: IO[str]) -> Iterator[Mended]:
        checker = Checker(self._backend, self._retry)
        try:
            for finding in self.verification.findings():
                self._seen()
                outcome = self._first_look(checker, finding)
                if outcome is not None:
                    yield Mended(finding.name, finding.kind, finding.size_bytes, outcome, finding.flaw, finding.problem)
                elif finding.verdict in (Verdict.CORRUPT, Verdict.BAD_MANIFEST) or (self._foreign and finding.verdict is Verdict.FOREIGN):
                    self.suspects += 1
                    spool.write(_line(finding))
        finally:
            checker.close()

    def _first_look(self, checker: Checker, finding: Finding) -> Outcome | None:
        """What can be said without a second look. None: nothing, or that it is fine."""
        if finding.verdict is Verdict.UNREADABLE:
            return self.unread(finding)
        if finding.flaw is Flaw.HEADER:
            manifest = checker.manifest(named(finding.name).namespace)
            if isinstance(manifest, Manifest) and is_of_other(manifest.identity):
                self.verification.counts[Verdict.CORRUPT] -= 1
                return Outcome.OTHER_VERSION
        return None

    def _worker(self) -> AbstractContextManager[Callable[[Finding], Mended]]:
        return _worker(self)

    def unread(self, finding: Finding) -> Outcome:
        """What becomes of what is UNREADABLE."""
        return Outcome.TOO_LARGE if finding.size_bytes > self._backend.capabilities.max_record_bytes else Outcome.UNREADABLE

    def remove(self, name: str) -> tuple[Outcome, str]:
        """Remove one name, unless this is a dry run."""
        if self._dry_run:
            return Outcome.REMOVED, ""
        [answer] = remove(self._deletes, [name], self._retry)
        if isinstance(answer, BackendError):
            return Outcome.FAILED, text_of(answer)
        return (Outcome.REMOVED if answer is DeleteStatus.DELETED else Outcome.GONE), ""


class _SecondLook:
    """Looks at suspects again, in one thread."""

    def __init__(self, repair: Repair) -> None:
        self._repair = repair
        self._backend = repair._backend
        self._retry = repair._retry
        self._checker = Checker(self._backend, self._retry)
        self._reader = Reader(self._backend, self._retry)

    def close(self) -> None:
        self._checker.close()
        self._reader.close()

    def mend(self, suspect: Finding) -> Mended:
        name, kind, flaw = suspect.name, suspect.kind, suspect.flaw
        if kind is Kind.FOREIGN:
            # Its name alone says so, whatever is in it by now.
            end, failure = self._repair.remove(name)
            return Mended(name, kind, suspect.size_bytes, end, None, failure or suspect.problem)
        try:
            # Its size and its being there may have changed: the first look may have been hours ago.
            entry = next((entry for entry in walk(self._backend, name, self._retry, page=2) if entry.name == name), None)
            if entry is None:
                return Mended(name, kind, 0, Outcome.GONE, flaw)
            finding = self._checker.check(entry)
            outcome = self._verdict(entry, finding, flaw)
        except BackendError as error:
            return Mended(name, kind, 0, Outcome.UNREADABLE, flaw, text_of(error))
        problem = finding.problem
        if outcome is None:
            outcome, failure = self._repair.remove(name)
            problem = failure or problem
        return Mended(name, kind, finding.size_bytes, outcome, finding.flaw or flaw, problem)

    def _verdict(self, entry: ListEntry, finding: Finding, flaw: Flaw | None) -> Outcome | None:
        """Why it is not removed; None: it is."""
        match finding.verdict:
            case Verdict.FINE | Verdict.UNPROVEN:
                return Outcome.RECOVERED
            case Verdict.GONE:
                return Outcome.GONE
            case Verdict.UNREADABLE:
                return self._repair.unread(finding)
            case Verdict.BAD_MANIFEST:
                return Outcome.OTHER_VERSION if is_manifest_of_other(self._bytes(entry, MAX_MANIFEST_BYTES)) else None
        if finding.flaw is not flaw:
            return Outcome.CHANGED
        what = named(entry.name)
        assert what.key is not None
        if finding.flaw is Flaw.HEADER and not isinstance(self._checker.manifest(what.namespace), Manifest):
            return Outcome.OTHER_VERSION if is_record_of_other(self._bytes(entry)) else None
        return None

    def _bytes(self, entry: ListEntry, most: float = math.inf) -> bytes:
        """What lies there, up to a length; nothing if it cannot be had."""
        if not PAGE_BYTES <= entry.size_bytes <= min(most, self._backend.capabilities.max_record_bytes) or entry.size_bytes % PAGE_BYTES:
            return b""
        found = self._reader.read(entry.name, entry.size_bytes)
        return bytes(found) if isinstance(found, memoryview) else b""


@contextmanager
def _worker(repair: Repair) -> Iterator[Callable[[Finding], Mended]]:
    look = _SecondLook(repair)
    try:
        yield look.mend
    finally:
        look.close()


def _line(finding: Finding) -> str:
    flaw = None if finding.flaw is None else finding.flaw.value
    return json.dumps([finding.name, finding.size_bytes, finding.verdict.value, flaw, finding.problem]) + "\n"


def _suspect(line: str) -> Finding:
    name, size_bytes, verdict, flaw, problem = json.loads(line)
    return Finding(name, named(name).kind, size_bytes, Verdict(verdict), None if flaw is None else Flaw(flaw), problem)
