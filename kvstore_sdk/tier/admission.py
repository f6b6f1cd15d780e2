"""Which chunks are worth writing below."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal

__all__ = ["Admission"]


class Admission:
    """Says of each store whether it is to be written; thread-safe.

    `all`: whatever is stored. `second_touch`: what was touched before, so that prompts which come once do not wear out a disk. A touch is a
    store, or a use of the chunk where it already lies in memory. A look-up that finds nothing is none: whoever asked computes the chunk,
    and the store that follows is the touch.

    The touches are this process's own, and the oldest are forgotten beyond `max_keys`.
    """

    def __init__(self, policy: Literal["all", "second_touch"], max_keys: int) -> None:
        self.admits_all = policy == "all"
        self._max_keys = max_keys
        self._lock = threading.Lock()
        # Keys that were touched: those touched last at the end. To find the first of a dict costs what was taken from its front before.
        self._touched: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._touched)

    def touch(self, key: bytes) -> bool:
        """A chunk is stored, or used. Returns whether it is to be written now; once that is so it stays so."""
        return self.admits_all or not self.touch_all((key,))

    def touch_all(self, keys: Sequence[bytes]) -> list[bytes]:
        """As `touch`, of many. Returns those that are not to be written now."""
        if self.admits_all:
            return []
        new: list[bytes] = []
        touched = self._touched
        with self._lock:
            for key in keys:
                if key in touched:
                    touched.move_to_end(key)
                else:
                    new.append(key)
                    touched[key] = None
            while len(touched) > self._max_keys:
                touched.popitem(last=False)
        return new

    def clear(self) -> None:
        """Forget all touches: what the chunks mean has changed."""
        with self._lock:
            self._touched.clear()
