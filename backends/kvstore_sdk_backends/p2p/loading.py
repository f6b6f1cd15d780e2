"""A call that loads, between the thread that waits for it and the loop that does it."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore_sdk.backend import Deadline, Get, GetResult
from kvstore_sdk_backends.p2p.asking import Asking
from kvstore_sdk_backends.p2p.doubts import CallDoubt, LandingDoubt

__all__ = ["Loading"]


class Loading:
    """A call of `get` on the loop, whose caller may have gone when it ends."""

    def __init__(self, asking: Asking, gets: Sequence[Get], deadline: Deadline) -> None:
        self.doubt = CallDoubt()
        self._asking = asking
        self._gets = gets
        self._deadline = deadline
        self._given_up = False

    def give_up(self) -> None:
        """Nobody waits any more. To be called before `doubt` is looked at: what has not begun by then never does."""
        self._given_up = True

    async def run(self) -> list[GetResult]:
        opened: list[LandingDoubt] = []
        # In this order, the other way round than whoever gives up: one of the two sees the other.
        self.doubt.begin()
        try:
            if self._given_up:
                return []
            return await self._asking.get(self._gets, self._deadline.at_s, opened)
        finally:
            self.doubt.end(opened)
