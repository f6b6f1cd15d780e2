"""The end of a backend, and of the threads that may be in it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

__all__ = ["close_and_join"]

logger = logging.getLogger(__name__)


def close_and_join(name: str, close: Callable[[], None], threads: Sequence[threading.Thread], until_s: float) -> list[threading.Thread]:
    """Close on a thread of its own, which may hang, and wait for all of them. Returns them: who is alive then did not
    end in time."""

    def run() -> None:
        try:
            close()
        except BaseException:
            logger.exception("%s: closing the backend failed", name)

    closer = threading.Thread(target=run, name=f"{name}-close", daemon=True)
    ending = [*threads, closer]
    try:
        closer.start()
    except RuntimeError:
        logger.exception("%s: the backend could not be closed", name)
        ending.pop()
    for thread in ending:
        thread.join(max(0.0, until_s - time.monotonic()))
    return ending
