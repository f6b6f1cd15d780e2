"""Keys from the coldest to the warmest, of which some are pinned: what every policy is built of."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Collection

__all__ = ["Recency"]


class Recency:
    """Keys in the order of their last touch. A pinned key keeps its place, and is never the coldest.

    Every call is O(1) amortised, however many keys are pinned: `coldest` lifts a pinned key out of the order when it meets it, so that no
    later call meets it again. Only a key that was lifted out costs O(log of such keys) when it is unpinned.
    """

    __slots__ = ("_clock", "_cold", "_heap", "_order", "_parked", "_pinned", "_unplaced")

    def __init__(self) -> None:
        self._clock = 0
        self._pinned: set[bytes] = set()
        # Inserted, and neither touched nor unpinned yet: they have no place.
        self._unplaced: set[bytes] = set()
        # The three below hold each key that has a place once, with the time it got it. Whatever is parked or cold is colder than all of
        # the order: it was taken from its cold end, and only the warm end grows.
        self._order: OrderedDict[bytes, int] = OrderedDict()
        self._parked: dict[bytes, int] = {}
        self._cold: dict[bytes, int] = {}
        # (time, key) of all that is cold, and of keys that were. It is empty whenever a key is lifted out of the order, so that a key which
        # is cold again has the time of its entry.
        self._heap: list[tuple[int, bytes]] = []

    def __len__(self) -> int:
        return len(self._order) + len(self._parked) + len(self._cold) + len(self._unplaced)

    def __contains__(self, key: object) -> bool:
        return key in self._order or key in self._unplaced or key in self._parked or key in self._cold

    def is_pinned(self, key: bytes) -> bool:
        return key in self._pinned

    def insert(self, key: bytes) -> None:
        """Add a key, pinned. It has no place before its first touch or unpin, which makes it the warmest."""
        self._pinned.add(key)
        self._unplaced.add(key)

    def touch(self, key: bytes) -> None:
        """Make a key the warmest, pinned or not. A key that is not there is added, not pinned."""
        order = self._order
        self._clock += 1
        if key in order:
            order[key] = self._clock
            order.move_to_end(key)
            return
        self._unplaced.discard(key)
        if self._parked.pop(key, None) is None:
            self._cold.pop(key, None)
        order[key] = self._clock

    def pin(self, key: bytes) -> None:
        """Pin a key that is there. Pins do not add up."""
        self._pinned.add(key)
        if (time := self._cold.pop(key, None)) is not None:
            self._parked[key] = time

    def unpin(self, key: bytes) -> None:
        """Take the pin away. The key is where its last touch put it."""
        self._pinned.discard(key)
        if key in self._unplaced:
            self.touch(key)
        elif (time := self._parked.pop(key, None)) is not None:
            self._cold[key] = time
            if len(self._heap) > 2 * len(self._cold) + 16:
                self._heap = [(time, key) for key, time in self._cold.items()]
                heapq.heapify(self._heap)
            else:
                heapq.heappush(self._heap, (time, key))

    def coldest(self, protected: Collection[bytes] = ()) -> bytes | None:
        """The coldest key that is neither pinned nor protected, or None.

        A protected key that is met is touched, so that many calls in a row do not meet it each time.
        """
        start = self._clock
        while self._cold:
            key = self._heap[0][1]
            if key not in self._cold:
                heapq.heappop(self._heap)
            elif key in protected:
                self.touch(key)
            else:
                return key
        self._heap.clear()
        while self._order:
            key = next(iter(self._order))
            if key in self._pinned:
                self._parked[key] = self._order.pop(key)
            elif key not in protected:
                return key
            elif self._order[key] > start:
                # Met before: all that is left is protected.
                return None
            else:
                self.touch(key)
        return None

    def drop(self, key: bytes) -> bool:
        """Take a key out. True if it was pinned.

        Raises:
            KeyError: it is not there.
        """
        for part in (self._order, self._cold, self._parked):
            if key in part:
                del part[key]
                break
        else:
            self._unplaced.remove(key)
        if pinned := key in self._pinned:
            self._pinned.remove(key)
        return pinned

    def clear(self) -> None:
        for part in (self._pinned, self._unplaced, self._order, self._parked, self._cold, self._heap):
            part.clear()
