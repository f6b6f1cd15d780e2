"""An asyncio loop on a thread of its own, for callers that block."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import selectors
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import Any, TypeVar

from kvstore_sdk.backend import ClosedError, TimedOutError

__all__ = ["EventLoop"]

T = TypeVar("T")

_loops: weakref.WeakSet[EventLoop] = weakref.WeakSet()


class _Resolvers(ThreadPoolExecutor):
    """Runs each step, a look-up of a name, on a daemon thread of its own.

    One that hangs can be ended by nobody. The threads of a pool are waited for when the process ends; these are not.
    """

    def __init__(self, name: str) -> None:
        """`name`: of the threads."""
        super().__init__(max_workers=1)
        self._name = name

    def submit(self, step: Callable[..., T], /, *args: Any, **how: Any) -> Future[T]:
        answer: Future[T] = Future()

        def run() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(step(*args, **how))
                except BaseException as cause:  # noqa: BLE001  # whoever waits for the answer gets it
                    answer.set_exception(cause)

        try:
            threading.Thread(target=run, name=self._name, daemon=True).start()
        except RuntimeError as cause:
            # As a name that does not resolve now.
            answer.set_exception(OSError(errno.EAGAIN, str(cause)))
        return answer


class EventLoop:
    """A loop, the daemon thread that runs it, and their end. Nothing else of the process runs on it, and it is nobody's current loop."""

    def __init__(self, name: str) -> None:
        """`name`: of the thread."""
        self._selector = selectors.EpollSelector()
        self._loop = asyncio.SelectorEventLoop(self._selector)
        self._loop.set_default_executor(_Resolvers(f"{name}-resolver"))
        self._ending: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        _loops.add(self)

    def call_soon(self, step: Callable[..., object], *args: object) -> bool:
        """Have the loop call `step(*args)`. Never blocks. After the end of the loop it does nothing, and returns False."""
        try:
            self._loop.call_soon_threadsafe(step, *args)
        except RuntimeError:
            return False
        return True

    def run(self, doing: str, make: Callable[[], Coroutine[Any, Any, T]], limit_s: float) -> T:
        """What the coroutine returns that `make` makes on the loop, or its exception.

        Raises:
            TimedOutError: that took longer than `limit_s`; the coroutine was cancelled. `doing` begins the message.
            ClosedError: the loop ended first.
        """
        answer: Future[T] = Future()
        task: asyncio.Task[None] | None = None

        def begin() -> None:
            nonlocal task
            if not answer.cancelled():
                task = self._loop.create_task(work())
                task.add_done_callback(give_cause)

        async def work() -> None:
            result = await make()
            # Here, a turn before anybody hears that the task is done.
            if answer.set_running_or_notify_cancel():
                answer.set_result(result)

        def give_cause(done: asyncio.Task[None]) -> None:
            cause = ClosedError(f"{doing}: the backend is closed") if done.cancelled() else done.exception()
            if cause is not None and not answer.done() and answer.set_running_or_notify_cancel():
                answer.set_exception(cause)

        def give_up() -> None:
            if task is not None:
                task.cancel()

        if not self.call_soon(begin):
            raise ClosedError(f"{doing}: the backend is closed")
        try:
            return answer.result(limit_s)
        except FutureTimeoutError:
            if not answer.done():
                raise TimedOutError(f"{doing}: not done within {limit_s:g} s") from None
            raise
        finally:
            # Waking the loop for nothing would cost the next call its time.
            if answer.cancel():
                self.call_soon(give_up)

    def close(self, last: Callable[[], Coroutine[Any, Any, None]], limit_s: float) -> bool:
        """Cancel all tasks, run what `last` makes, and end the thread. Idempotent, from any thread, this one too, which then goes on.

        Returns:
            Whether the thread ended within `limit_s`. If not, it does as soon as whatever holds it up lets go.
        """
        self.call_soon(self._begin_end, last, limit_s)
        if threading.current_thread() is not self._thread:
            self._thread.join(limit_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _begin_end(self, last: Callable[[], Coroutine[Any, Any, None]], limit_s: float) -> None:
        if self._ending is None:
            self._ending = self._loop.create_task(self._end(last, limit_s))

    async def _end(self, last: Callable[[], Coroutine[Any, Any, None]], limit_s: float) -> None:
        try:
            tasks = asyncio.all_tasks() - {self._ending}
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=limit_s / 4)
            # One that swallows its cancelling must not keep the loop alive: `wait`, and not `wait_for`.
            for step, part in ((last(), 2), (self._loop.shutdown_asyncgens(), 8)):
                closing = self._loop.create_task(step)
                await asyncio.wait({closing}, timeout=limit_s / part)
                if closing.cancel():
                    await asyncio.wait({closing}, timeout=0.1)
                elif not closing.cancelled():
                    # Whatever it was, the sockets go with the loop.
                    closing.exception()
            # Transports that are closed let go of their sockets one turn later, those of TLS after some.
            for _ in range(5):
                await asyncio.sleep(0)
        finally:
            self._loop.stop()

    def _part_from_parent(self) -> None:
        """In a forked child: an epoll set is shared with the parent, whose sockets would vanish from it with what is collected here.

        That nobody closed them here is as it should be, and is not logged.
        """
        self._loop.set_exception_handler(lambda *_: None)
        with suppress(OSError, ValueError), select.epoll() as own:
            os.dup2(own.fileno(), self._selector.fileno(), inheritable=False)


def _part_from_parent() -> None:
    for loop in list(_loops):
        loop._part_from_parent()


os.register_at_fork(after_in_child=_part_from_parent)
