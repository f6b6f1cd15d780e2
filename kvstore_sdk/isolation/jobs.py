"""Calls that wait for a worker of the child, and who goes first."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = ["Job", "Jobs"]

Job = tuple[int, str, float, Any]
"""Number, operation, deadline, and what it is about, as it came."""


class Jobs:
    """Workers, started as they are needed, and two queues for them.

    Nobody waits for a put, and a request waits for all else. So the others overtake puts, and a quarter of the workers takes none.
    """

    def __init__(self, most_workers: int, carry_out: Callable[[Job], None]) -> None:
        self._most_workers = most_workers
        self._most_puts = max(1, most_workers - max(1, most_workers // 4))
        self._carry_out = carry_out
        self._lock = threading.Lock()
        self._there = threading.Condition(self._lock)
        self._over = threading.Condition(self._lock)
        self._urgent: deque[Job] = deque()
        self._puts: deque[Job] = deque()
        self._workers = 0
        self._running = 0
        self._puts_running = 0

    def add(self, job: Job) -> None:
        with self._lock:
            (self._puts if job[1] == "put" else self._urgent).append(job)
            waiting = len(self._urgent) + len(self._puts)
            if self._running + waiting > self._workers and self._workers < self._most_workers:
                self._start_worker()
            self._there.notify()

    def _start_worker(self) -> None:
        """With the lock held. Where there are no more threads, those that there are serve all."""
        try:
            threading.Thread(target=self._work, name=f"kvstore-call-{self._workers + 1}", daemon=True).start()
        except RuntimeError:
            if not self._workers:
                raise
            return
        self._workers += 1

    def wait_idle(self, timeout_s: float) -> None:
        """Wait until no job waits or is carried out, for so long at most."""
        with self._lock:
            self._over.wait_for(lambda: not (self._urgent or self._puts or self._running), timeout_s)

    def _work(self) -> None:
        while True:
            with self._lock:
                while (job := self._next()) is None:
                    self._there.wait()
            try:
                self._carry_out(job)
            finally:
                with self._lock:
                    self._running -= 1
                    if job[1] == "put":
                        self._puts_running -= 1
                    # A put may have waited for this one, and this worker may be the one that takes none.
                    if self._puts:
                        self._there.notify()
                    self._over.notify_all()

    def _next(self) -> Job | None:
        """The job to carry out now, if there is one that may be. With the lock held."""
        if self._urgent:
            job = self._urgent.popleft()
        elif self._puts and self._puts_running < self._most_puts:
            job = self._puts.popleft()
            self._puts_running += 1
        else:
            return None
        self._running += 1
        return job
