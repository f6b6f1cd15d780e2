"""When a child that died is started again."""

from __future__ import annotations

from collections import deque

__all__ = ["Restarts"]

FIRST_WAIT_S = 0.1
"""About what a start takes."""
LONGEST_WAIT_S = 10.0
CALM_S = 60.0
"""A death this long ago says nothing about the next one."""
WINDOW_S = 600.0


class Restarts:
    """Back-off and limit: the wait doubles with each death within the last minute, and after too many in ten minutes there is a pause."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._deaths_s: deque[float] = deque()

    def died(self, now_s: float) -> tuple[float, bool]:
        """A child died, or did not start. Returns the time of the next start, and whether the limit was reached, which starts over then."""
        self._deaths_s.append(now_s)
        while self._deaths_s and self._deaths_s[0] < now_s - WINDOW_S:
            self._deaths_s.popleft()
        if len(self._deaths_s) > self._limit:
            self._deaths_s.clear()
            return now_s + WINDOW_S, True
        recent = sum(at_s > now_s - CALM_S for at_s in self._deaths_s)
        return now_s + min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(recent - 1, 30)), False
