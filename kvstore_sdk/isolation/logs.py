"""Log records of a child: bounded in length and in number on both sides, and logged by the parent."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

__all__ = ["ChildLog", "SendsRecords"]

logger = logging.getLogger("kvstore_sdk.isolation")

_MAX_TEXT = 2000
_PER_S = 20.0
_BURST = 100.0


class _Budget:
    """So many records at once, and so many more each second."""

    def __init__(self) -> None:
        self._left = _BURST
        self._at_s = time.monotonic()
        self._dropped = 0

    def take(self) -> int | None:
        """How many were dropped before this one; None when this one is to be dropped."""
        now = time.monotonic()
        self._left = min(_BURST, self._left + (now - self._at_s) * _PER_S)
        self._at_s = now
        if self._left < 1.0:
            self._dropped += 1
            return None
        self._left -= 1.0
        dropped, self._dropped = self._dropped, 0
        return dropped


class SendsRecords(logging.Handler):
    """In the child: gives records to `send`, as `["log", level, logger, text]`."""

    def __init__(self, send: Callable[[list[Any]], None]) -> None:
        super().__init__()
        self._send = send
        self._budget = _Budget()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            dropped = self._budget.take()
            if dropped is None:
                return
            text = self.format(record)[:_MAX_TEXT]
            if dropped:
                text += f" ({dropped} records before it were dropped)"
            self._send(["log", record.levelno, record.name[:100], text])
        except Exception:  # noqa: BLE001  # vendor code logs what cannot be formatted
            self.handleError(record)


class ChildLog:
    """In the parent: logs what the child sent, if it is a record and there are not too many."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._budget = _Budget()
        self._lock = threading.Lock()

    def tell(self, message: list[Any]) -> bool:
        """Whether `message` is a record; then it is logged, or dropped."""
        if len(message) != 4 or message[0] != "log":
            return False
        _, level, name, text = message
        if not isinstance(level, int) or not isinstance(name, str) or not isinstance(text, str):
            return False
        with self._lock:
            if self._budget.take() is None:
                return True
        # One line, and nothing that a terminal would obey.
        shown = _line(text[: 2 * _MAX_TEXT].replace("\n", " | "))
        # A handler of the host's that raises must not end whoever came by to receive.
        with contextlib.suppress(Exception):
            logger.log(min(max(level, 0), logging.CRITICAL), "%s: child: %s: %s", self._label, _line(name[:100]), shown)
        return True


def _line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)
