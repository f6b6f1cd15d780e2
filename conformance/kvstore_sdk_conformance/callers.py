"""Calls of a backend that may never return, made on threads that can be left behind."""

from __future__ import annotations

import concurrent.futures
import queue
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["Callers", "HungError"]

JOIN_S = 2.0


class HungError(Exception):
    """The call did not return; its thread is left behind, and with it all that it may still touch."""


class Callers:
    """Threads that stay, as the SDK's do: a backend may keep a connection for each thread that calls it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Caller] = []
        self._stops = 0

    def run(self, call: Callable[[], Any], limit_s: float) -> Any:
        """The result of `call`, or what it raises.

        Raises:
            HungError: it did not return within `limit_s`.
        """
        with self._lock:
            stops = self._stops
            caller = self._idle.pop() if self._idle else _Caller()
        answer = caller.submit(call)
        if not concurrent.futures.wait([answer], limit_s).done:
            caller.stop()
            raise HungError
        with self._lock:
            if stops == self._stops:
                self._idle.append(caller)
            else:
                caller.stop()
        return answer.result()

    def stop(self) -> None:
        """End the threads: those that are idle now, and each that is not when its call has returned."""
        with self._lock:
            callers, self._idle = self._idle, []
            self._stops += 1
        for caller in callers:
            caller.stop()
        for caller in callers:
            caller.join(JOIN_S)


class _Caller:
    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[tuple[Callable[[], Any], concurrent.futures.Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="kvstore-conformance-call", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], Any]) -> concurrent.futures.Future[Any]:
        answer: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._tasks.put((call, answer))
        return answer

    def stop(self) -> None:
        self._tasks.put(None)

    def join(self, limit_s: float) -> None:
        self._thread.join(limit_s)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            call, answer = task
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001  # the caller's, whatever it is
                answer.set_exception(error)
            else:
                answer.set_result(result)
            # A frame that waits must not keep a backend alive.
            del task, call, answer
            result = None
