"""A point in time by which a call has to return."""

from __future__ import annotations

import time
from dataclasses import dataclass

__all__ = ["Deadline"]


@dataclass(frozen=True, slots=True)
class Deadline:
    """An instant of `time.monotonic()`. Passed down unchanged, so that nested waits share one budget."""

    at_s: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """The instant `seconds` from now."""
        return cls(time.monotonic() + seconds)

    def remaining_s(self) -> float:
        """Seconds left, never negative: fit for any time-out argument."""
        return max(0.0, self.at_s - time.monotonic())

    @property
    def expired(self) -> bool:
        return time.monotonic() >= self.at_s
