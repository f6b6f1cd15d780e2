"""One blocking call: its items run on the loop, its caller waits, and whoever ends it has the last word."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, cast

from kvstore_sdk.backend import BackendError, Deadline, UnavailableError
from kvstore_sdk_backends.loop import EventLoop
from kvstore_sdk_backends.s3.memory import ItemMemory, ReturnedError

__all__ = ["Call", "Item"]

T = TypeVar("T")

_NONE_YET = object()


class Item(ABC, Generic[T]):
    """What a call is asked, and how it is answered.

    Attributes:
        memory: Given back when the item is answered, or its call ends.
        may_have_happened: A request went out that changes the store, and what became of it is not known.
    """

    memory: ItemMemory | None = None
    may_have_happened: bool = False

    @property
    @abstractmethod
    def doing(self) -> str:
        """How its errors begin: operation and object."""

    @abstractmethod
    async def answer(self, call: Call[T]) -> T:
        """On the loop: the answer. It is cancelled when the call ends first; another exception makes the answer `failed`."""

    @abstractmethod
    def failed(self, error: BackendError) -> T:
        """The answer where `error` came in the way."""

    @abstractmethod
    def unfinished(self, closed: bool) -> T:
        """The answer now that the call ends, by `close` or at its deadline. From any thread; `answer` goes nowhere any more."""


class Call(Generic[T]):
    """Items that start at once and end together.

    The loop answers items; the caller at its deadline, or `close`, ends the call. One lock decides between them, so that an answer is
    final, and when the caller returns all memory was given back, whatever the loop is doing then, or not doing.
    """

    def __init__(self, loop: EventLoop, items: Sequence[Item[T]], deadline: Deadline, ended: Callable[[Call[T]], object]) -> None:
        """`ended` is told once, when nobody waits any more; `items` are one at least."""
        self.deadline = deadline
        self._loop = loop
        self._items = items
        self._ended = ended
        self._answers: list[object] = [_NONE_YET] * len(items)
        self._left = len(items)
        self._over = False
        self._tasks: list[asyncio.Task[None]] = []
        # Of the kind that a signal handler which calls `close` may take again.
        self._lock = threading.RLock()
        self._latch = threading.Lock()
        self._latch.acquire()

    def begin(self) -> None:
        self._loop.call_soon(self._start)

    def wait(self) -> list[T]:
        """The answers, in the order of the items, by the deadline."""
        try:
            self._latch.acquire(timeout=min(self.deadline.remaining_s(), threading.TIMEOUT_MAX))
        finally:
            # Also when the wait was broken off.
            self.end()
            self._ended(self)
        return cast("list[T]", self._answers)

    def end(self, closed: bool = False) -> None:
        """Answer what is not answered, and take all memory back. From any thread, idempotent; afterwards nothing changes."""
        with self._lock:
            if self._over:
                return
            self._over = True
            for index, item in enumerate(self._items):
                if self._answers[index] is _NONE_YET:
                    self._answers[index] = item.unfinished(closed)
                if item.memory is not None:
                    item.memory.give_back()
        self._latch.release()
        self._loop.call_soon(self._cancel)

    def go(self, item: Item[T]) -> None:
        """Note that from here on a request of `item` may be on its way.

        Raises:
            ReturnedError: the call is over, and has said what is on its way.
        """
        with self._lock:
            if self._over:
                raise ReturnedError("the call is over")
            item.may_have_happened = True

    def _start(self) -> None:
        if not self._over:
            self._tasks = [asyncio.ensure_future(self._answer(index, item)) for index, item in enumerate(self._items)]

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _answer(self, index: int, item: Item[T]) -> None:
        try:
            answer = await item.answer(self)
        except asyncio.CancelledError:
            # The call or the loop ends; or else a library broke off on its own.
            answer = item.failed(UnavailableError(f"{item.doing}: the request was broken off"))
        except Exception as cause:  # noqa: BLE001  # a fault of some layer below; without its text, which may hold anything
            answer = item.failed(BackendError(f"{item.doing}: raised {type(cause).__name__}; that is for this backend to fix"))
        if item.memory is not None:
            item.memory.give_back()
        with self._lock:
            if self._over:
                return
            self._answers[index] = answer
            self._left -= 1
            self._over = self._left == 0
            if not self._over:
                return
        self._latch.release()
