"""Threads for steps that block, off the node's event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TypeVar

from kvstore_sdk.backend import UnavailableError

__all__ = ["Workers"]

T = TypeVar("T")


class Workers:
    """So many threads at most, each begun when no other is free, and ended when it has had nothing to do for a while.

    They are daemons, for which no process waits at its end; those of the standard library's pools are waited for, and a step may hang.
    """

    def __init__(self, name: str, most: int, idle_s: float = 10.0) -> None:
        """`name`: of the threads."""
        self._name = name
        self._most = most
        self._idle_s = idle_s
        self._steps: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        # Threads that wait, less steps that wait.
        self._free = 0
        self._threads = 0
        self._closed = False

    @property
    def threads(self) -> int:
        """How many there are now."""
        return self._threads

    async def run(self, step: Callable[[], T]) -> T:
        """What `step` returns. Cancelled or not, a step that has begun goes on to its end.

        Raises:
            UnavailableError: there is no thread, and none can be begun; `step` is never called.
        """
        answer: Future[T] = Future()

        def work() -> None:
            if not answer.set_running_or_notify_cancel():
                self._leave()
                return
            try:
                result = step()
            except BaseException as cause:  # noqa: BLE001  # whoever waits for the answer gets it
                self._leave()
                answer.set_exception(cause)
            else:
                self._leave()
                answer.set_result(result)

        with self._lock:
            if self._closed:
                self._start(work)
            else:
                # The thread comes first: a step that was refused for want of one must not be done later.
                if self._free < 1 and self._threads < self._most and self._start(self._work, needed=not self._threads):
                    self._threads += 1
                    self._free += 1
                self._free -= 1
                self._steps.put(work)
        return await asyncio.wrap_future(answer)

    def close(self) -> None:
        """Let the threads end once they have done what is left. A step that comes later gets a thread of its own. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in range(self._threads):
                    self._steps.put(None)

    def _start(self, target: Callable[[], None], needed: bool = True) -> bool:
        try:
            threading.Thread(target=target, name=self._name, daemon=True).start()
        except RuntimeError as cause:
            if needed:
                raise UnavailableError(f"{self._name}: {cause}; raise the limit of processes and threads (pids.max, ulimit -u)") from cause
            return False
        return True

    def _work(self) -> None:
        while True:
            try:
                step = self._steps.get(timeout=self._idle_s)
            except Empty:
                with self._lock:
                    if self._steps.empty():
                        self._free -= 1
                        self._threads -= 1
                        return
                continue
            if step is None:
                with self._lock:
                    self._threads -= 1
                return
            step()

    def _leave(self) -> None:
        # Before the answer is known: whoever has it may come with the next step at once.
        with self._lock:
            self._free += 1
