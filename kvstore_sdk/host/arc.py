"""Adaptive replacement: what was used once cannot drive out what is used again and again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

from kvstore_sdk.host.recency import Recency

__all__ = ["ARC"]


class ARC:
    """ARC of Megiddo and Modha (FAST 2003), for chains of keys some of which are pinned.

    Two lists of resident keys: those that one request used, and those that more did. Of each the names of what it lost last are kept, as
    ghosts, at most as many in all as there can be resident keys. A miss whose key is a ghost gives the list that lost it a larger share.

    With keys used one at a time and none pinned it is the paper's algorithm, step by step. For chains there is one rule more: a key that a
    second request uses takes every key before it along, so that the second list has the head of a chain, and the first list the rest. In
    each list the tail goes before the head. When the second list has more than its share, a head may go while its tail is in the first.

    Args:
        capacity: How many keys can be resident: `c` of the paper.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._once, self._again = Recency(), Recency()
        # The one of the two that has the key.
        self._list_of: dict[bytes, Recency] = {}
        # Keys that no request has named since they were inserted. Its first one brought it in, and is not a second use.
        self._unnamed: set[bytes] = set()
        # Ghosts, the oldest first; True if the ghost has taught what it can.
        self._once_ghosts: OrderedDict[bytes, bool] = OrderedDict()
        self._again_ghosts: OrderedDict[bytes, bool] = OrderedDict()
        # How many keys the first list should have: `p` of the paper.
        self._target = 0.0
        self._missed: bytes | None = None

    def insert(self, key: bytes) -> None:
        if key in self._list_of:
            raise ValueError(f"arc: insert {key.hex()}: it is resident already")
        is_ghost = self._once_ghosts.pop(key, None) is not None or self._again_ghosts.pop(key, None) is not None
        keys = self._list_of[key] = self._again if is_ghost else self._once
        keys.insert(key)
        if not is_ghost:
            self._unnamed.add(key)
            self._forget_ghosts()

    def miss(self, key: bytes) -> None:
        self._missed = key
        once, again = len(self._once_ghosts), len(self._again_ghosts)
        if self._once_ghosts.get(key) is False:
            self._once_ghosts[key] = True
            self._target = min(self._capacity, self._target + max(again / once, 1.0))
        elif self._again_ghosts.get(key) is False:
            self._again_ghosts[key] = True
            self._target = max(0.0, self._target - max(once / again, 1.0))

    def used(self, keys: Sequence[bytes]) -> None:
        once, again = self._once, self._again
        second_use = False
        for key in reversed(keys):
            if (found := self._list_of.get(key)) is None:
                continue
            if key in self._unnamed:
                self._unnamed.remove(key)
            else:
                second_use = True
            if found is once and second_use:
                pinned = once.drop(key)
                self._list_of[key] = again
                again.touch(key)
                if pinned:
                    again.pin(key)
            else:
                found.touch(key)

    def pin(self, key: bytes) -> None:
        self._list_of[key].pin(key)

    def unpin(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            self._list_of[key].unpin(key)

    def victim(self, protected: Collection[bytes] = ()) -> bytes | None:
        size = len(self._once)
        from_once = size > self._target or (size == self._target and size > 0 and self._missed in self._again_ghosts)
        first, second = (self._once, self._again) if from_once else (self._again, self._once)
        key = first.coldest(protected)
        return key if key is not None else second.coldest(protected)

    def evict(self, key: bytes) -> None:
        keys = self._list_of[key]
        if keys.is_pinned(key):
            raise ValueError(f"arc: evict {key.hex()}: it is pinned")
        self.remove(key)
        (self._once_ghosts if keys is self._once else self._again_ghosts)[key] = False

    def remove(self, key: bytes) -> None:
        self._list_of.pop(key).drop(key)
        self._unnamed.discard(key)

    def clear(self) -> None:
        for part in (self._once, self._again, self._list_of, self._unnamed, self._once_ghosts, self._again_ghosts):
            part.clear()
        self._target = 0.0
        self._missed = None

    def _forget_ghosts(self) -> None:
        """Keep the first list and its ghosts within the capacity, and everything within twice that. Only a new key makes them more."""
        if len(self._once) + len(self._once_ghosts) > self._capacity and self._once_ghosts:
            self._once_ghosts.popitem(last=False)
        if len(self._list_of) + len(self._once_ghosts) + len(self._again_ghosts) > 2 * self._capacity and self._again_ghosts:
            self._again_ghosts.popitem(last=False)
