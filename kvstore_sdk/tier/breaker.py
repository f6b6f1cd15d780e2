"""Circuit breaker: a store that does not work costs microseconds, and is tried again now and then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["Breaker"]


class Breaker:
    """Counts failed calls in a row; thread-safe.

    Closed, everything passes. After `failures` failed calls in a row it is open: nothing passes, except one trial each `probe_s`. A call
    that succeeds closes it. `hold` keeps it open for a reason that a successful call does not remove.
    """

    def __init__(self, failures: int, probe_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = failures
        self._probe_s = probe_s
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._next_trial_s = 0.0
        self._held_until_s = 0.0
        self.is_open = False
        """Plain attribute, so that the way of a request pays one look at it."""
        self.opened = 0
        """How often it opened."""

    def allows(self) -> bool:
        """Whether a call may be made now. While open, True once each `probe_s`: that call is the trial."""
        if not self.is_open:
            return True
        with self._lock:
            now = self._clock()
            if not self.is_open:
                return True
            if now < self._held_until_s or now < self._next_trial_s:
                return False
            self._next_trial_s = now + self._probe_s
            return True

    def succeeded(self) -> None:
        if not self._failures and not self.is_open:
            return
        with self._lock:
            self._failures = 0
            if self._clock() >= self._held_until_s:
                self.is_open = False

    def failed(self) -> bool:
        """Returns whether this failure opened the breaker."""
        with self._lock:
            self._failures += 1
            if self._failures < self._limit:
                return False
            self._next_trial_s = self._clock() + self._probe_s
            return self._open()

    def hold(self, seconds: float) -> bool:
        """Open for at least `seconds` from now. Returns whether that opened it."""
        with self._lock:
            self._held_until_s = max(self._held_until_s, self._clock() + seconds)
            return self._open()

    def _open(self) -> bool:
        if self.is_open:
            return False
        self.is_open = True
        self.opened += 1
        return True
