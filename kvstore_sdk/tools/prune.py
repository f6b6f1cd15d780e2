"""Making a store smaller: by age, by namespace, to a size."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvstore_sdk.backend import Backend, DeleteStatus, ListEntry, SupportsDelete, UnsupportedError
from kvstore_sdk.errors import BackendError
from kvstore_sdk.tools.facts import Kind, named
from kvstore_sdk.tools.removal import check_removes, remove
from kvstore_sdk.tools.retry import Retry
from kvstore_sdk.tools.walk import walk

__all__ = ["Ages", "Pruned", "Rule", "prune"]

_PAGE = 256
"""Records of one listing: what is stored again after it was listed and before it is removed is removed with it."""
_MOST_BUCKETS = 1 << 16
_FIRST_WIDTH_S = 2.0**-10


@dataclass(frozen=True, slots=True)
class Rule:
    """What has to go. Without a limit all of the namespaces go.

    Attributes:
        namespaces: Whose records; none given: those of all.
        older_than_s: All that were stored, or as the store counts it used, longer ago than this.
        to_bytes: Then those of the longest ago, until the rest, manifests among it, has no more bytes than this.
    """

    namespaces: frozenset[str] = frozenset()
    older_than_s: float | None = None
    to_bytes: int | None = None

    def takes(self, namespace: str) -> bool:
        return not self.namespaces or namespace in self.namespaces


@dataclass(frozen=True, slots=True)
class Pruned:
    """One record or manifest that is gone now, or would be; or one that could not be removed, and why."""

    name: str
    namespace: str
    kind: Kind
    size_bytes: int
    modified_s: float | None
    error: BackendError | None = None


@dataclass
class Remains:
    """What was met and not removed, known when the iteration is over. `unknown_age`: kept because the store does not say how old."""

    records: int = 0
    used_bytes: int = 0
    manifests: int = 0
    unknown_age: int = 0
    foreign: int = 0
    gone: int = 0
    namespaces: set[str] = field(default_factory=set)


class Ages:
    """Bytes by the time they were stored, in memory that does not grow with their number.

    Times fall into at most 65,536 buckets, a thousandth of a second wide at first and twice as wide whenever there are more.
    """

    def __init__(self) -> None:
        self._width_s = _FIRST_WIDTH_S
        self._bytes: dict[int, int] = {}

    def add(self, modified_s: float, size_bytes: int) -> None:
        bucket = self._bucket(modified_s)
        self._bytes[bucket] = self._bytes.get(bucket, 0) + size_bytes
        while len(self._bytes) > _MOST_BUCKETS:
            self._width_s *= 2
            halved: dict[int, int] = {}
            for old, size in self._bytes.items():
                halved[old // 2] = halved.get(old // 2, 0) + size
            self._bytes = halved

    def oldest(self, excess_bytes: int) -> Oldest:
        """Those that were stored longest ago and have so many bytes together, or more by one record."""
        for bucket in sorted(self._bytes):
            if self._bytes[bucket] >= excess_bytes:
                return Oldest(bucket, excess_bytes, self._width_s)
            excess_bytes -= self._bytes[bucket]
        return Oldest(max(self._bytes, default=0) + 1, 0, self._width_s)

    def _bucket(self, modified_s: float) -> int:
        return math.floor(modified_s / self._width_s)


class Oldest:
    """Takes what `Ages.oldest` found, one after another as a listing gives them: all before one bucket, and of that one so many bytes."""

    def __init__(self, bucket: int, left_bytes: int, width_s: float) -> None:
        self._bucket = bucket
        self._left_bytes = left_bytes
        self._width_s = width_s

    def takes(self, modified_s: float, size_bytes: int) -> bool:
        bucket = math.floor(modified_s / self._width_s)
        if bucket != self._bucket or self._left_bytes <= 0:
            return bucket < self._bucket
        self._left_bytes -= size_bytes
        return True
