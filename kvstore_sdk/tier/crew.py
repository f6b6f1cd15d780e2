"""The threads of a Tier."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvstore_sdk.tier.work import Batch, WorkQueue

__all__ = ["Crew"]

logger = logging.getLogger(__name__)


class Crew:
    """As many threads as the queue wants, each taking one batch after another. Used by one thread at a time."""

    def __init__(self, name: str, work: WorkQueue, run: Callable[[Batch], None]) -> None:
        """`run` does a batch and raises nothing."""
        self._name = name
        self._work = work
        self._run = run
        self._started = 0
        self.threads: list[threading.Thread] = []

    def grow(self) -> None:
        """Start the threads that the queue wants. One that the system does not start is logged, and wanted again."""
        self.threads = [thread for thread in self.threads if thread.is_alive()]
        while self._work.wants_thread():
            self._started += 1
            thread = threading.Thread(target=self._take, name=f"{self._name}-io-{self._started}", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                self._work.thread_failed()
                logger.exception("%s: a thread could not be started", self._name)
                return
            self.threads.append(thread)

    def _take(self) -> None:
        while (batch := self._work.next()) is not None:
            self._run(batch)
