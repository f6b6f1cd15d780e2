"""Warnings that others can cause: said once, then counted for a while."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

__all__ = ["Notices"]

_MOST = 256


class Notices:
    """Which of the warnings with one key is due: the first, and one in `every_s` afterwards. Keys are bounded, the oldest is forgotten."""

    def __init__(self, every_s: float = 60.0) -> None:
        self._every_s = every_s
        self._said: dict[Hashable, tuple[float, int]] = {}

    def due(self, key: Hashable) -> int | None:
        """How many with this key were left unsaid before this one; None: leave this one unsaid, too."""
        now = time.monotonic()
        at, unsaid = self._said.get(key, (-float("inf"), 0))
        if now - at < self._every_s:
            self._said[key] = at, unsaid + 1
            return None
        self._said.pop(key, None)
        if len(self._said) >= _MOST:
            del self._said[next(iter(self._said))]
        self._said[key] = now, 0
        return unsaid

    def say(self, log: Callable[..., None], key: Hashable, text: str, *arguments: object) -> None:
        """Have it logged if it is due, together with how many were not."""
        if (unsaid := self.due(key)) is not None:
            log(f"{text}%s", *arguments, self.more(unsaid))

    @staticmethod
    def more(unsaid: int) -> str:
        """The end of a line that stands for those left unsaid as well."""
        return f" ({unsaid} more since the last line)" if unsaid else ""
