"""Least recently used goes first."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvstore_sdk.host.recency import Recency

__all__ = ["LRU"]


class LRU:
    """The key whose last use is the longest ago goes first; of one chain the tail goes before the head.

    Args:
        capacity: Not needed: the order is the same for every size.
    """

    def __init__(self, capacity: int) -> None:
        self._keys = Recency()

    def insert(self, key: bytes) -> None:
        if key in self._keys:
            raise ValueError(f"lru: insert {key.hex()}: it is resident already")
        self._keys.insert(key)

    def miss(self, key: bytes) -> None:
        """What was forgotten teaches an LRU nothing."""

    def used(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            if key in self._keys:
                self._keys.touch(key)

    def pin(self, key: bytes) -> None:
        if key not in self._keys:
            raise KeyError(key)
        self._keys.pin(key)

    def unpin(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            if key not in self._keys:
                raise KeyError(key)
            self._keys.unpin(key)

    def victim(self, protected: Collection[bytes] = ()) -> bytes | None:
        return self._keys.coldest(protected)

    def may_go(self, key: bytes) -> bool:
        """Whether a key is resident and not pinned."""
        return key in self._keys and not self._keys.is_pinned(key)

    def evict(self, key: bytes) -> None:
        if self._keys.is_pinned(key):
            raise ValueError(f"lru: evict {key.hex()}: it is pinned")
        self._keys.drop(key)

    def remove(self, key: bytes) -> None:
        self._keys.drop(key)

    def clear(self) -> None:
        self._keys.clear()
