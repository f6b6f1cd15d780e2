"""Records that are on their way to an asker over ZMQ."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping

from kvstore_sdk.backend import Buffer, Deadline

__all__ = ["Arrival"]


class Arrival:
    """The records of one Fetch, on their way into the buffers that wait for them."""

    def __init__(self, forget: Callable[[], None], buffers: Mapping[int, Buffer]) -> None:
        self._forget = forget
        self.waiting = dict(buffers)
        """By index, where the records go that have not come."""
        self.total_bytes = sum(buffer.length for buffer in buffers.values())
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Future[None] | None = None
        self.over = False
        """No further record comes: all are there, the connection is lost, or `cancel` was called."""
        self._check()

    @property
    def missing(self) -> frozenset[int]:
        """Indexes of what has not arrived."""
        return frozenset(self.waiting)

    async def wait(self, until: Deadline) -> bool:
        """Whether all records are there; returns when they are, when no more come, at `until`, and when `stir` is called. One may wait."""
        if not self.over:
            # Less than `asyncio.wait` does, and a turn of the loop sooner.
            self._news = self._loop.create_future()
            timer = self._loop.call_later(until.remaining_s(), self.stir)
            try:
                await self._news
            finally:
                timer.cancel()
        return not self.waiting

    def stir(self) -> None:
        """Have whoever waits look again."""
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def take(self, index: int) -> None:
        """The record of that index is in its buffer."""
        del self.waiting[index]
        self._check()

    def skip(self, indexes: Iterable[int]) -> None:
        """Do not wait for these, which the owner said it does not send. They stay `missing` no longer."""
        for index in indexes:
            self.waiting.pop(index, None)
        self._check()

    def cancel(self) -> None:
        """Take nothing more. From now on no byte is written to the buffers, whatever still arrives. Idempotent."""
        self._forget()
        self.over = True
        self.stir()

    def _check(self) -> None:
        if not self.waiting:
            self.cancel()
