"""Whether a store is bad, or this process's own memory: kept apart by how many verifications fail."""

from __future__ import annotations

import threading
from collections import deque

__all__ = ["Trust"]

_WINDOW = 32
_ENOUGH = 8
_GOOD_PER_REMOVAL = 8


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

    def verified(self, good: bool) -> bool:
        """Record an outcome. Returns whether this process should stop trusting itself now; then the window starts again."""
        with self._lock:
            self._recent.append(good)
            self._good += good
            bad = self._recent.count(False)
            if len(self._recent) >= _ENOUGH and bad * 2 > len(self._recent):
                self._recent.clear()
                return True
            return False

    def may_remove(self) -> bool:
        """Whether one more bad record may be removed. Eight good ones earn one removal: a host that reads nothing right removes nothing."""
        with self._lock:
            if self._removed >= self._good // _GOOD_PER_REMOVAL:
                return False
            self._removed += 1
            return True
