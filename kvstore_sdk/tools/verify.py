"""Every record of a store, or a sample of them, held against its name."""

from __future__ import annotations

import contextlib
import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import xxhash

from kvstore_sdk.backend import Backend, ListEntry
from kvstore_sdk.errors import UnavailableError
from kvstore_sdk.format import Flaw
from kvstore_sdk.tools.check import Checker, Finding, Verdict
from kvstore_sdk.tools.crew import spread
from kvstore_sdk.tools.facts import Kind, named
from kvstore_sdk.tools.retry import Retry
from kvstore_sdk.tools.walk import walk

__all__ = ["MAX_SAMPLE", "Sample", "Verification"]

MAX_SAMPLE = 1_000_000
"""Records of a sample of a given number; about 300 bytes of memory each."""
_IN_SUCCESSION = 20
"""Records that cannot be read, one after another, before it is the store that is taken for broken and not the records."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Which records: so many, or of each hundred so many. Drawn by their names, so that the order of a listing does not matter.

    Attributes:
        records: How many, up to `MAX_SAMPLE`; None: `percent` says it.
        percent: Of all records, 0 to 100.
        seed: The same draws the same records.
    """

    records: int | None = None
    percent: float = 100.0
    seed: int = 0

    def draw(self, entries: Iterator[ListEntry]) -> Iterator[ListEntry]:
        """The sample. What is no record always belongs to it; a number of records is known only after the last entry."""
        heap: list[tuple[int, str, ListEntry]] = []
        for entry in entries:
            if named(entry.name).kind is not Kind.RECORD:
                yield entry
                continue
            drawn = xxhash.xxh3_64_intdigest(entry.name.encode("utf-8", "surrogatepass"), self.seed)
            if self.records is None:
                if drawn < self.percent / 100 * 2**64:
                    yield entry
            elif len(heap) < self.records:
                heapq.heappush(heap, (-drawn, entry.name, entry))
            elif heap and -drawn > heap[0][0]:
                heapq.heapreplace(heap, (-drawn, entry.name, entry))
        # Where they lie together they are read faster.
        heap.sort(key=lambda one: one[1])
        for _, _, entry in heap:
            yield entry


class Verification:
    """One run over a store, as an iterable of what is not fine, in any order.

    Attributes:
        listed: Names seen so far.
        counts: Names by what came of them, but for manifests that are fine.
        manifests: Those.
        flaws: Corrupt records by their flaw.
        records: Records that were read whole.
        read_bytes: Bytes that were read of records and manifests.
        elapsed_s: Since the iteration began; it stands still once it is over.
    """

    def __init__(self, backend: Backend, retry: Retry, *, prefix: str = "", sample: Sample | None = None, threads: int = 1) -> None:
        """
        Args:
            backend: Open.
            retry: How patient to be with each call.
            prefix: Of the names that are looked at.
            sample: Of the records; None: all. Manifests and foreign names are always looked at.
            threads: Records that are read at one time; no more than the backend's `max_concurrency` are.

        Raises:
            UnsupportedError: the backend does not list.
        """
        self._entries = walk(backend, prefix, retry)
        self._worker = lambda: _checker(backend, retry)
        self._most_bytes = backend.capabilities.max_record_bytes
        self._sample = sample
        self._threads = max(1, min(threads, backend.capabilities.max_concurrency))
        self._began_s: float | None = None
        self._ended_s: float | None = None
        self.listed = 0
        self.counts: Counter[Verdict] = Counter()
        self.flaws: Counter[Flaw] = Counter()
        self.records = 0
        self.manifests = 0
        self.read_bytes = 0

    @property
    def elapsed_s(self) -> float:
        return 0.0 if self._began_s is None else (self._ended_s or time.monotonic()) - self._began_s

    @property
    def is_clean(self) -> bool:
        """Whether nothing so far is wrong: foreign names, and records of namespaces without a manifest, are not."""
        return not any(self.counts[verdict] for verdict in (Verdict.CORRUPT, Verdict.BAD_MANIFEST, Verdict.UNREADABLE))

    def __iter__(self) -> Iterator[Finding]:
        """
        Raises:
            BackendError: it could not be listed, or one record after another could not be read.
        """
        for finding in self.findings():
            if finding.verdict not in (Verdict.FINE, Verdict.UNPROVEN, Verdict.GONE):
                yield finding

    def findings(self) -> Iterator[Finding]:
        """As an iteration, with what is fine among them. A run is made once."""
        self._began_s = time.monotonic()
        unreadable = 0
        entries = self._counted()
        if self._sample is not None:
            entries = self._sample.draw(entries)
        try:
            with contextlib.closing(spread(entries, self._worker, self._threads, "kvstore-verify")) as findings:
                for finding in findings:
                    self._count(finding)
                    yield finding
                    if finding.verdict is Verdict.UNREADABLE and finding.size_bytes <= self._most_bytes:
                        unreadable += 1
                    elif finding.read_bytes:
                        unreadable = 0
                    if unreadable >= _IN_SUCCESSION:
                        problem = f"verify: {unreadable} records in succession could not be read; the last: {finding.problem}"
                        raise UnavailableError(problem) from finding.error
        finally:
            self._ended_s = time.monotonic()

    def _counted(self) -> Iterator[ListEntry]:
        for entry in self._entries:
            self.listed += 1
            yield entry

    def _count(self, finding: Finding) -> None:
        if finding.kind is Kind.MANIFEST and finding.verdict is Verdict.FINE:
            self.manifests += 1
        else:
            self.counts[finding.verdict] += 1
        self.read_bytes += finding.read_bytes
        self.records += finding.kind is Kind.RECORD and finding.read_bytes > 0
        if finding.flaw is not None:
            self.flaws[finding.flaw] += 1


@contextlib.contextmanager
def _checker(backend: Backend, retry: Retry) -> Iterator[Callable[[ListEntry], Finding]]:
    checker = Checker(backend, retry)
    try:
        yield checker.check
    finally:
        checker.close()
