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


class _Rate:
    """Of the last calls: bytes by the time in which at least one of them was under way, so calls at the same time count together."""

    def __init__(self) -> None:
        # Bytes, and the time that no call before accounts for.
        self._calls: deque[tuple[int, float]] = deque(maxlen=_CALLS)
        self._accounted_s = float("-inf")

    def add(self, moved_bytes: int, began_s: float, ended_s: float) -> None:
        self._calls.append((moved_bytes, max(0.0, ended_s - max(began_s, self._accounted_s))))
        self._accounted_s = max(self._accounted_s, ended_s)

    def clear(self) -> None:
        """Measure anew; time stays accounted for."""
        self._calls.clear()

    @property
    def bytes_per_s(self) -> float:
        """0 before the first call. A clock that stands still for all of them is a fast store, not a division by nothing."""
        return sum(moved for moved, _ in self._calls) / max(1e-9, sum(seconds for _, seconds in self._calls)) if self._calls else 0.0


class Floor:
    """Measures loads, and says when the store is slower than `min_mb_per_s`; thread-safe. 0: it only measures.

    While it is slower the look-ups of one request each `probe_s` pass: its loads are measured by themselves, and if they are fast enough
    the store is used again.

    Only time in which the store certainly had not answered counts against it. Who polls finds answers when a step of the engine ends,
    however long ago they came: such a load was there as soon as the engine could use it, and a floor that took the engine's steps for the
    store's time would never let go again.
    """

    def __init__(
        self, min_mb_per_s: float, probe_s: float, clock: Callable[[], float] = time.monotonic, slowed: Callable[[], None] = lambda: None
    ) -> None:
        """`slowed` is called when it finds the store too slow, by the thread that finds it."""
        self._floor_bytes_per_s = min_mb_per_s * 1e6
        self._probe_s = probe_s
        self._clock = clock
        self._slowed = slowed
        self._lock = threading.Lock()
        # Until the answers were seen, and until they had certainly not come.
        self._seen, self._certain = _Rate(), _Rate()
        # Calls in a row that left the rate below the floor.
        self._below = 0
        self._next_trial_s = 0.0
        self._trial = ""
        self.is_slow = False
        """Plain attribute, so that the way of a request pays one look at it."""

    @property
    def mb_per_s(self) -> float:
        """Of the last calls, as the engine saw them; 0 while nothing was loaded."""
        with self._lock:
            return self._seen.bytes_per_s / 1e6

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
            self._seen.clear()
            self._certain.clear()
            return True

    def loaded(self, moved_bytes: int, began_s: float, ended_s: float) -> bool:
        """A call was seen to have brought so many bytes.

        Args:
            moved_bytes: Payload.
            began_s: When it began.
            ended_s: Until when it certainly ran, now at the latest; before `began_s` if its answer was there at the first look.

        Returns:
            Whether that makes the store too slow, which it was not before.
        """
        with self._lock:
            now = self._clock()
            self._seen.add(moved_bytes, began_s, now)
            self._certain.add(moved_bytes, began_s, ended_s)
            if not self._floor_bytes_per_s:
                return False
            fast = self._certain.bytes_per_s >= self._floor_bytes_per_s
            if self.is_slow:
                if fast:
                    self.is_slow, self._trial = False, ""
                return False
            self._below = 0 if fast else self._below + 1
            if self._below < _IN_A_ROW:
                return False
            self._below = 0
            self.is_slow = True
            self._slowed()
            self._next_trial_s = now + self._probe_s
            return True
