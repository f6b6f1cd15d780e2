"""Several threads that work through one sequence, in bounded memory."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager
from typing import Generic, TypeVar

__all__ = ["spread"]

_T = TypeVar("_T")
_R = TypeVar("_R")
_AHEAD = 4
"""Items for each thread that are read from the sequence before they are asked for."""
_LINGER_S = 5.0
"""For calls that run when the work is broken off. One that takes longer ends when the backend is closed, or with the process."""


class _End:
    """No more items; or no more answers of this thread."""


class _Failed(Generic[_R]):
    def __init__(self, error: BaseException) -> None:
        self.error = error


def spread(
    items: Iterable[_T], worker: Callable[[], AbstractContextManager[Callable[[_T], _R]]], threads: int, name: str = "kvstore-tool"
) -> Generator[_R, None, None]:
    """What the workers make of the items, in any order.

    The items are read in this thread, as far ahead as keeps the others busy and no further. An exception, of the sequence, of a worker
    or of the caller who stops to ask, ends all of it: threads end when their call does.

    Args:
        items: Read once.
        worker: Called in each thread; what it gives when entered is called with one item after another, in that thread alone.
        threads: At least 1.
        name: Of the threads.

    Raises:
        BaseException: the first that anything here raised.
    """
    todo: queue.SimpleQueue[_T | type[_End]] = queue.SimpleQueue()
    done: queue.SimpleQueue[_R | _Failed[_R] | type[_End]] = queue.SimpleQueue()
    stop = threading.Event()

    def work() -> None:
        try:
            with worker() as make:
                while True:
                    item = todo.get()
                    if isinstance(item, type) or stop.is_set():
                        break
                    done.put(make(item))
        except BaseException as error:  # noqa: BLE001  # raised again where the answers are taken
            done.put(_Failed(error))
        finally:
            done.put(_End)

    crew = [threading.Thread(target=work, name=f"{name}-{number}", daemon=True) for number in range(threads)]
    try:
        for thread in crew:
            thread.start()
        source = iter(items)
        ahead, working, more = 0, threads, True
        while working:
            while more and ahead < _AHEAD * threads:
                try:
                    todo.put(next(source))
                    ahead += 1
                except StopIteration:
                    more = False
                    for _ in crew:
                        todo.put(_End)
            answer = done.get()
            if isinstance(answer, type):
                working -= 1
            elif isinstance(answer, _Failed):
                raise answer.error
            else:
                ahead -= 1
                yield answer
    finally:
        stop.set()
        for _ in crew:
            todo.put(_End)
        end_s = time.monotonic() + _LINGER_S
        for thread in crew:
            if thread.ident is not None:
                thread.join(max(0.0, end_s - time.monotonic()))
