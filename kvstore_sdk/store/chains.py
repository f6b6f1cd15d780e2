"""In which order chunks follow each other: what a request used, from the head of its prefix."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import chain, zip_longest

from kvstore_sdk.keys import GROUP_BYTES

__all__ = ["Chains"]


class Chains:
    """Knows of each chunk which one comes before it, as learned from requests that stored or loaded both.

    An engine that keeps the head of a prefix in its own cache stores and loads only what follows. The head is used all the same, and must
    not leave host memory before what needs it. What was learned outlives the chunk: a tail that left and comes back still knows its head.
    """

    def __init__(self, max_chunks: int) -> None:
        """`max_chunks`: so many are known at least, of those that were learned or used last; and at most twice as many, and one request."""
        self._max_chunks = max_chunks
        # Two generations: when the newer one is full it becomes the older one, which is forgotten.
        self._before: dict[bytes, bytes] = {}
        self._older: dict[bytes, bytes] = {}

    def learn(self, keys: Iterable[bytes]) -> None:
        """These chunks follow each other, those of each group in this order."""
        for group in _by_group(keys):
            self._learn(group)

    def used(self, keys: Iterable[bytes], earlier: Collection[bytes] = ()) -> list[bytes]:
        """Learn from a request that is over, and say what it used, as one chain: each group with the head that is known of it, and what
        belongs to the same tokens together.

        Args:
            keys: What it stored and loaded, those of each group in the order of the chain.
            earlier: What it used before it started over, and was learned then.
        """
        groups = []
        for group in _by_group(keys):
            self._learn(group)
            groups.append([*self._head(group), *group])
        if len(groups) == 1:
            whole = groups[0]
        else:
            # All of them end where the request ended, but some begin later: with a window, or where no more of the head is known.
            longest = max(map(len, groups), default=0)
            padded = ([None] * (longest - len(group)) + group for group in groups)
            whole = [key for key in chain.from_iterable(zip_longest(*padded)) if key is not None]
        if earlier:
            there = set(whole)
            whole += [key for key in earlier if key not in there]
        return whole

    def clear(self) -> None:
        """Forget all of it."""
        self._before.clear()
        self._older.clear()

    def _learn(self, group: list[bytes]) -> None:
        if len(self._before) >= self._max_chunks:
            self._older, self._before = self._before, {}
        self._before.update(zip(group[1:], group, strict=False))

    def _head(self, group: list[bytes]) -> list[bytes]:
        """What comes before the first of these, from the first that is known."""
        before, older, key = self._before, self._older, group[0]
        head: list[bytes] = []
        if key not in before and key not in older:
            return head
        # A key is met twice only where what was learned contradicts itself.
        met = set(group)
        while (earlier := before.get(key) or older.get(key)) is not None and earlier not in met:
            before[key] = earlier
            met.add(earlier)
            head.append(earlier)
            key = earlier
        return head[::-1]


def _by_group(keys: Iterable[bytes]) -> list[list[bytes]]:
    groups: dict[bytes, list[bytes]] = {}
    for key in keys:
        groups.setdefault(key[-GROUP_BYTES:], []).append(key)
    return list(groups.values())
