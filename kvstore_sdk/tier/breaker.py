"""Circuit breaker: an operation that does not work costs microseconds, and is tried again now and then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvstore_sdk.tier.metrics import TierMetrics

__all__ = ["Breaker", "Breakers"]


class Breaker:
    """Counts failed calls of one operation in a row; thread-safe.

    Closed, everything passes. After `failures` failed calls in a row it is open: nothing passes, except one trial each `probe_s`. A call
    that succeeds closes it. `hold` keeps it open for a reason that a successful call does not remove.

    One operation, because a store may answer some and fail others: what `exists` says is no news of `get`.
    """

    def __init__(
        self, failures: int, probe_s: float, clock: Callable[[], float] = time.monotonic, opened: Callable[[], None] = lambda: None
    ) -> None:
        """`opened` is called whenever it opens, or is kept open, by whichever thread that is."""
        self._limit = failures
        self._opened = opened
        self._probe_s = probe_s
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._next_trial_s = 0.0
        self._held_until_s = 0.0
        self.is_open = False
        """Plain attribute, so that the way of a request pays one look at it."""
        self.heard_s = float("-inf")
        """When a call was last answered."""

    def is_due(self) -> bool:
        """Whether a call may be made now. Takes nothing."""
        if not self.is_open:
            return True
        with self._lock:
            return not self.is_open or self._clock() >= max(self._held_until_s, self._next_trial_s)

    def allows(self) -> bool:
        """Whether a call may be made now. While open, True once each `probe_s`: that call is the trial."""
        if not self.is_open:
            return True
        with self._lock:
            now = self._clock()
            if not self.is_open:
                return True
            if now < max(self._held_until_s, self._next_trial_s):
                return False
            self._next_trial_s = now + self._probe_s
            return True

    def succeeded(self) -> None:
        """A call was answered."""
        self.heard_s = self._clock()
        if not self._failures and not self.is_open:
            return
        with self._lock:
            self._failures = 0
            if self.heard_s >= self._held_until_s:
                self.is_open = False

    def failed(self) -> bool:
        """A call failed. Returns whether this failure opened the breaker."""
        with self._lock:
            self._failures += 1
            if self._failures < self._limit:
                return False
            self._next_trial_s = self._clock() + self._probe_s
            return self._open()

    def ease(self) -> None:
        """Something else says that the store works. Close on trust, so that the next failure opens it again; but not while trials are made:
        only when one has been due for `probe_s`, and nobody came."""
        if not self.is_open:
            return
        with self._lock:
            if self._clock() >= max(self._held_until_s, self._next_trial_s) + self._probe_s:
                self._failures = self._limit - 1
                self.is_open = False

    def hold(self, seconds: float) -> bool:
        """Open for at least `seconds` from now. Returns whether that opened it."""
        with self._lock:
            self._held_until_s = max(self._held_until_s, self._clock() + seconds)
            return self._open()

    def _open(self) -> bool:
        opened, self.is_open = not self.is_open, True
        self._opened()
        return opened


@dataclass(frozen=True, slots=True)
class Breakers:
    """One for each operation: a store may answer some and fail others."""

    exists: Breaker
    get: Breaker
    put: Breaker

    def hold(self, metrics: TierMetrics, seconds: float) -> bool:
        """Leave the store alone for so long. Returns whether it was not left alone before."""
        opened = [breaker.hold(seconds) for breaker in (self.exists, self.get, self.put)]
        if opened[0] or opened[1]:
            metrics.count("breaker_opened", "read")
        if opened[2]:
            metrics.count("breaker_opened", "write")
        return any(opened)
