"""Requests to a store: so many at a time, and again where that helps."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import TypeVar

from kvstore_sdk.backend import Deadline
from kvstore_sdk_backends.s3.client import AttemptError, ObjectClient

__all__ = ["FIRST_GAP_S", "LONGEST_GAP_S", "Gaps", "Requests"]

T = TypeVar("T")

FIRST_GAP_S = 0.05
LONGEST_GAP_S = 5.0
"""Each gap may be twice as long as the one before, from the first to the longest."""


class Gaps:
    """How long one item waits before each further attempt: a random part of a limit that doubles, so that those that failed together
    do not come back together.
    """

    def __init__(self, retries: int, draw: Callable[[], float] = random.random) -> None:
        """`retries`: attempts after the first. `draw`: a number in [0, 1)."""
        self._left = retries
        self._draw = draw
        self._limit_s = FIRST_GAP_S

    def next_s(self, retry_after_s: float, remaining_s: float) -> float | None:
        """Seconds to wait: never less than the store's wish `retry_after_s`, and less than `remaining_s`.

        Returns:
            None: there is no further attempt, or no time for it.
        """
        if self._left == 0:
            return None
        self._left -= 1
        gap_s = self._draw() * self._limit_s
        self._limit_s = min(2 * self._limit_s, LONGEST_GAP_S)
        if 0 < retry_after_s < remaining_s:
            # A wish that fits is followed, though with less of a spread; with none where no number lies between.
            wait_s = retry_after_s + min(gap_s, (remaining_s - retry_after_s) / 2)
            return wait_s if wait_s < remaining_s else retry_after_s
        wait_s = retry_after_s + gap_s
        return wait_s if wait_s < remaining_s else None


class Requests:
    """A client and a location, shared by all items of all calls. On the loop only, but for the two methods that name things."""

    def __init__(
        self,
        client: ObjectClient,
        shown: str,
        prefix: str,
        *,
        concurrency: int,
        retries: int,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """
        Args:
            client: Of the store.
            shown: The location, for errors.
            prefix: What keys begin with, without the slash at its end.
            concurrency: Requests at one time. What waits for its turn goes in the order in which it came. What is done in the
                background has seven eighths of the turns at most, or the only one, and waits elsewhere: loads do not queue behind it.
            retries: Attempts of an item after its first.
            draw: A number in [0, 1) for each gap.
        """
        self.client = client
        self._shown = shown
        self._before_name = f"{prefix}/" if prefix else ""
        self._retries = retries
        self._draw = draw
        self._turns = asyncio.Semaphore(concurrency)
        self._background_turns = asyncio.Semaphore(max(1, concurrency - max(1, concurrency // 8)))
        self._refreshed = 0

    def key(self, name: str) -> str:
        """Of the object that holds the record called `name`. So it is for what a name begins with."""
        return self._before_name + name

    def name(self, key: str) -> str:
        """What `key` was made from."""
        return key[len(self._before_name) :]

    def url(self, name: str) -> str:
        """The object, for errors."""
        return f"{self._shown}/{name}"

    async def repeat(self, attempt: Callable[[], Awaitable[T]], deadline: Deadline, *, background: bool = False) -> T:
        """The answer of the first attempt that gets one. No turn is held between two attempts.

        Credentials that were refused are resolved anew, once for an item and once for all items that were refused together.

        Args:
            attempt: One request.
            deadline: No gap goes beyond it. Whoever cancels this ends the attempt that runs.
            background: No request of the engine waits for it.

        Raises:
            AttemptError: of the last attempt, or of resolving credentials anew.
        """
        gaps: Gaps | None = None
        may_refresh = True
        while True:
            # One that waits for a background turn is not yet in the queue for a turn, where loads would stand behind it.
            async with self._background_turns if background else nullcontext(), self._turns:
                refreshed = self._refreshed
                try:
                    return await attempt()
                except AttemptError as error:
                    failed = error
            if failed.stale_credentials and may_refresh:
                may_refresh = False
                if self._refreshed == refreshed:
                    await self.client.refresh_credentials()
                    self._refreshed = max(self._refreshed, refreshed + 1)
                continue
            if not failed.retryable:
                raise failed
            gaps = gaps or Gaps(self._retries, self._draw)
            gap_s = gaps.next_s(failed.retry_after_s, deadline.remaining_s())
            if gap_s is None:
                raise failed
            await asyncio.sleep(gap_s)
