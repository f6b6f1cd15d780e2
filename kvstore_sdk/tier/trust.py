"""Whether a store is bad, or this process's own memory: kept apart by how many verifications fail."""

from __future__ import annotations

import threading
from collections import deque
from itertools import repeat

__all__ = ["Trust"]

_WINDOW = 32
_ENOUGH = 8
_GOOD_PER_REMOVAL = 8
_BAD_AT_ONCE = 4


class Trust:
    """Watches the outcome of verifications; thread-safe.

    One bad record among good ones is the store's: it is repaired. When more than half of the last verifications failed, it is as likely
    this host's memory, and a host that cannot read right must not remove what others can: it stops, and says so.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recent: deque[bool] = deque(maxlen=_WINDOW)
        self._good = 0
        self._removed = 0

    def verified(self, good: bool, times: int = 1) -> bool:
        """Record an outcome, or one of several in a row. Returns whether this process should not trust itself now."""
        with self._lock:
            self._recent.extend(repeat(good, times))
            self._good += good * times
            return not good and len(self._recent) >= _ENOUGH and self._recent.count(False) * 2 > len(self._recent)

    def may_remove(self) -> bool:
        """Whether one more bad record may be removed.

        Eight good ones earn one removal, so a host that reads nothing right removes nothing; and a host that has just begun to read wrong
        removes a few at most, whatever it has earned before.
        """
        with self._lock:
            if self._recent.count(False) > _BAD_AT_ONCE or self._removed >= self._good // _GOOD_PER_REMOVAL:
                return False
            self._removed += 1
            return True
