"""Making a store smaller: by age, by namespace, to a size."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvstore_sdk.backend import Backend, DeleteStatus, ListEntry
from kvstore_sdk.errors import BackendError
from kvstore_sdk.tools.facts import Kind, Named, named
from kvstore_sdk.tools.removal import check_removes, remove
from kvstore_sdk.tools.retry import Retry
from kvstore_sdk.tools.walk import walk

__all__ = ["Ages", "Oldest", "Prune", "Pruned", "Rule"]

_PAGE = 256
"""Records of one listing: what is stored again after it was listed and before it is removed is removed with it."""
_MOST_NAMESPACES = 20_000
"""Told apart at one time. Most stores list one namespace after another, so that all that is there of the first is known long before."""
_MOST_BUCKETS = 1 << 16
_FIRST_WIDTH_S = 2.0**-10


@dataclass(frozen=True, slots=True)
class Rule:
    """What has to go.

    Attributes:
        namespaces: Whose records; none given: those of all. Without one of the limits below all that the namespaces hold.
        older_than_s: All that were stored longer ago than this, or used, where the store counts that.
        to_bytes: Then those of the longest ago, until the rest, manifests among it, has no more bytes than this.

    Raises:
        ValueError: nothing is said, which would be everything.
    """

    namespaces: frozenset[str] = frozenset()
    older_than_s: float | None = None
    to_bytes: int | None = None

    def __post_init__(self) -> None:
        if not self.namespaces and self.older_than_s is None and self.to_bytes is None:
            raise ValueError("Rule: give namespaces, older_than_s or to_bytes")


@dataclass(frozen=True, slots=True)
class Pruned:
    """One record or manifest that is gone now, or would be; or one that could not be removed, and why."""

    name: str
    namespace: str
    kind: Kind
    size_bytes: int
    modified_s: float | None
    error: BackendError | None = None


@dataclass(slots=True)
class _Namespace:
    """What was seen of one so far. `lives`: a record of it is kept."""

    manifest: ListEntry | None = None
    lives: bool = False


class Prune:
    """One run over a store, as an iterable of what it removes.

    A record that somebody stores again between its listing and its removal, a page of 256 names at most, is removed with the page: one more
    miss, and never a wrong byte. What was stored after the run began to look at sizes is not part of `to_bytes`. The manifest of
    a namespace that holds no record any more goes as well, if it is as old as the records had to be.

    Attributes:
        listed: Names seen so far, in `passes` passes over the store, 1 or 2.
        kept_records: What the last pass met and left, and so for the following, known when the iteration is over.
        unknown_age: Records kept because the store does not say when they were stored.
        gone: What somebody else removed first.
        foreign: What is no record and no manifest; it is never pruned.
        namespaces: Remembered at present, because their manifests may have to go.
    """

    def __init__(
        self,
        backend: Backend,
        rule: Rule,
        retry: Retry,
        *,
        dry_run: bool,
        now_s: float | None = None,
        seen: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            backend: Open; for writing, unless `dry_run`.
            rule: What has to go.
            retry: How patient to be with each call.
            dry_run: Remove nothing, and say what would be.
            now_s: The Unix time that ages are counted from; None: this machine's.
            seen: Called after each name that was listed.

        Raises:
            UnsupportedError: the backend does not remove records, or does not list them. Nothing was asked yet.
        """
        self._deletes = check_removes(backend, "prune")
        self._backend = backend
        self._most = min(_PAGE, backend.capabilities.max_batch)
        self._rule = rule
        self._seen = seen
        self._retry = retry
        self._walk("")
        self._dry_run = dry_run
        self._now_s = time.time() if now_s is None else now_s
        self._seen_of: dict[str, _Namespace] = {}
        self.passes = 1 if rule.to_bytes is None else 2
        self.listed = 0
        self.kept_records = self.kept_bytes = self.unknown_age = self.gone = self.foreign = 0

    def __iter__(self) -> Iterator[Pruned]:
        rule = self._rule
        oldest = None if rule.to_bytes is None else self._oldest(rule.to_bytes)
        batch: list[Pruned] = []
        first_at = 0
        for entry, what in self._entries():
            if what.namespace not in self._seen_of:
                if len(self._seen_of) >= _MOST_NAMESPACES:
                    # First what may be the last records of the one that is settled.
                    yield from self._remove(batch)
                    batch = []
                    yield from self._settle(next(iter(self._seen_of)), oldest)
                self._seen_of[what.namespace] = _Namespace()
            if what.kind is Kind.MANIFEST:
                self._seen_of[what.namespace].manifest = entry
                continue
            if self._is_old(entry) or (oldest is not None and oldest.takes(_time(entry), entry.size_bytes)):
                first_at = first_at if batch else self.listed
                batch.append(_pruned(entry, what))
            else:
                self.unknown_age += math.isnan(_time(entry))
                self._keep(what, entry.size_bytes)
            if batch and (len(batch) == self._most or self.listed - first_at >= _PAGE):
                yield from self._remove(batch)
                batch = []
        yield from self._remove(batch)
        for namespace in list(self._seen_of):
            yield from self._settle(namespace, oldest)

    @property
    def namespaces(self) -> int:
        return len(self._seen_of)

    def _settle(self, namespace: str, oldest: Oldest | None) -> Iterator[Pruned]:
        """Remove the manifest if it has to go, and forget the namespace."""
        entry, lives = self._seen_of[namespace].manifest, self._seen_of[namespace].lives
        if entry is not None:
            may_go = self._rule.older_than_s is None or self._is_old(entry)
            if may_go and not lives and not (oldest is not None and oldest.empty) and not self._is_alive(namespace):
                yield from self._remove([_pruned(entry, named(entry.name))])
            else:
                self.kept_bytes += entry.size_bytes
        del self._seen_of[namespace]

    def _entries(self) -> Iterator[tuple[ListEntry, Named]]:
        """Records and manifests of the rule's namespaces."""
        prefixes = [f"v1/{namespace}/" for namespace in sorted(self._rule.namespaces)] or [""]
        for prefix in prefixes:
            for entry in self._walk(prefix):
                self.listed += 1
                self._seen()
                what = named(entry.name)
                if what.kind is Kind.FOREIGN:
                    self.foreign += 1
                else:
                    yield entry, what

    def _walk(self, prefix: str) -> Iterator[ListEntry]:
        return walk(self._backend, prefix, self._retry, _PAGE)

    def _oldest(self, to_bytes: int) -> Oldest:
        ages = Ages()
        excess_bytes = -to_bytes
        for entry, what in self._entries():
            if what.kind is Kind.RECORD and self._rule.older_than_s is not None and self._is_old(entry):
                continue
            excess_bytes += entry.size_bytes
            if what.kind is Kind.RECORD and not math.isnan(_time(entry)):
                ages.add(_time(entry), entry.size_bytes)
        self.foreign = 0
        return ages.oldest(excess_bytes)

    def _is_old(self, entry: ListEntry) -> bool:
        """Whether it goes by its age alone; without any limit everything does."""
        rule = self._rule
        if rule.older_than_s is None:
            return rule.to_bytes is None
        return self._now_s - _time(entry) > rule.older_than_s

    def _is_alive(self, namespace: str) -> bool:
        """Whether there is a record by now: an engine stores one first, and then its manifest."""
        return not self._dry_run and any(named(entry.name).kind is Kind.RECORD for entry in self._walk(f"v1/{namespace}/"))

    def _keep(self, what: Named | Pruned, size_bytes: int) -> None:
        if what.kind is Kind.RECORD:
            self._seen_of[what.namespace].lives = True
            self.kept_records += 1
        self.kept_bytes += size_bytes

    def _remove(self, batch: list[Pruned]) -> Iterator[Pruned]:
        if not batch:
            return
        if self._dry_run:
            yield from batch
            return
        for item, answer in zip(batch, remove(self._deletes, [item.name for item in batch], self._retry), strict=True):
            if isinstance(answer, BackendError):
                self._keep(item, item.size_bytes)
                yield dataclasses.replace(item, error=answer)
            elif answer is DeleteStatus.ABSENT:
                self.gone += 1
            else:
                yield item


def _pruned(entry: ListEntry, what: Named) -> Pruned:
    return Pruned(entry.name, what.namespace, what.kind, entry.size_bytes, entry.modified_s)


def _time(entry: ListEntry) -> float:
    """When it was stored; not a number where the store does not say."""
    return math.nan if entry.modified_s is None or not math.isfinite(entry.modified_s) else entry.modified_s


class Ages:
    """Bytes by the time they were stored, in memory that does not grow with their number.

    Times fall into at most 65,536 buckets, a thousandth of a second wide at first and twice as wide whenever there are more.
    """

    def __init__(self) -> None:
        self._width_s = _FIRST_WIDTH_S
        self._bytes: dict[int, int] = {}

    def add(self, modified_s: float, size_bytes: int) -> None:
        bucket = math.floor(modified_s / self._width_s)
        self._bytes[bucket] = self._bytes.get(bucket, 0) + size_bytes
        while len(self._bytes) > _MOST_BUCKETS:
            self._width_s *= 2
            halved: dict[int, int] = {}
            for old, size in self._bytes.items():
                halved[old // 2] = halved.get(old // 2, 0) + size
            self._bytes = halved

    def oldest(self, excess_bytes: int) -> Oldest:
        """Those that were stored longest ago and have so many bytes together, or more by one record."""
        if excess_bytes <= 0:
            return Oldest(-math.inf, 0, self._width_s)
        for bucket in sorted(self._bytes):
            if self._bytes[bucket] >= excess_bytes:
                return Oldest(bucket, excess_bytes, self._width_s)
            excess_bytes -= self._bytes[bucket]
        return Oldest(math.inf, 0, self._width_s)


class Oldest:
    """Takes what `Ages.oldest` found, one after another as a listing gives them: all before one bucket, and of that one so many bytes."""

    def __init__(self, bucket: float, left_bytes: int, width_s: float) -> None:
        self.empty = bucket == -math.inf
        self._bucket = bucket
        self._left_bytes = left_bytes
        self._width_s = width_s

    def takes(self, modified_s: float, size_bytes: int) -> bool:
        if math.isnan(modified_s):
            return False
        bucket = math.floor(modified_s / self._width_s)
        if bucket != self._bucket or self._left_bytes <= 0:
            return bucket < self._bucket
        self._left_bytes -= size_bytes
        return True
