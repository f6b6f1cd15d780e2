"""Whether loading is worth it: the measured rate of loads against a fixed one."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

__all__ = ["Floor"]

_CALLS = 32
"""The rate is that of so many last calls."""
_IN_A_ROW = 8
"""So many calls have to leave the rate below the floor. The first one that ends of several at a time has the time of all and the bytes of
one, so it takes the last of them to know; and the very first calls open connections."""


class Floor:
    """Measures loads, and says when the store is slower than `min_mb_per_s`; thread-safe. 0: it only measures.

    The rate is bytes by the time in which at least one load was under way, so loads at the same time count together. While it is below the
    floor the look-ups of one request each `probe_s` pass: its loads are measured by themselves, and if they are fast enough the store is
    used again.
    """

    def __init__(self, min_mb_per_s: float, probe_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._floor_bytes_per_s = min_mb_per_s * 1e6
        self._probe_s = probe_s
        self._clock = clock
        self._lock = threading.Lock()
        # Of the last calls, bytes and the time that no call before them accounts for.
        self._calls: deque[tuple[int, float]] = deque(maxlen=_CALLS)
        self._accounted_s = 0.0
        # Calls in a row that left the rate below the floor.
        self._below = 0
        self._next_trial_s = 0.0
        self._trial = ""
        self.is_slow = False
        """Plain attribute, so that the way of a request pays one look at it."""

    @property
    def mb_per_s(self) -> float:
        """Of the last calls; 0 while nothing was loaded."""
        with self._lock:
            return self._bytes_per_s() / 1e6

    def passes(self, request_id: str) -> bool:
        """Whether a look-up may be answered from the store while it is slow: that of the request which tries it."""
        if not self.is_slow or request_id == self._trial:
            return True
        now = self._clock()
        with self._lock:
            if now < self._next_trial_s:
                return False
            self._next_trial_s = now + self._probe_s
            self._trial = request_id
            self._calls.clear()
            return True

    def loaded(self, moved_bytes: int, began_s: float) -> bool:
        """A call that began then has just brought so many bytes. Returns whether that makes the store too slow, which it was not before."""
        with self._lock:
            now = self._clock()
            self._calls.append((moved_bytes, max(0.0, now - max(began_s, self._accounted_s))))
            self._accounted_s = now
            if not self._floor_bytes_per_s:
                return False
            fast = self._bytes_per_s() >= self._floor_bytes_per_s
            if self.is_slow:
                if fast:
                    self.is_slow, self._trial = False, ""
                return False
            self._below = 0 if fast else self._below + 1
            if self._below < _IN_A_ROW:
                return False
            self._below = 0
            self.is_slow = True
            self._next_trial_s = now + self._probe_s
            return True

    def _bytes_per_s(self) -> float:
        # A clock that stands still for a whole call is a fast store, not a division by nothing.
        return sum(moved for moved, _ in self._calls) / max(1e-9, sum(seconds for _, seconds in self._calls)) if self._calls else 0.0
