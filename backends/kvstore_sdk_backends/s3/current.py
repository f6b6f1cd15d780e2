"""What requests are made with now, a session or a file system, and the next one when its credentials were refused."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from kvstore_sdk.backend import BackendError, DeniedError
from kvstore_sdk_backends.s3.client import AttemptError

__all__ = ["CREDENTIALS_S", "RENEW_EVERY_S", "Current", "Shared"]

T = TypeVar("T")

CREDENTIALS_S = 20.0
"""For finding credentials: a chain may ask several services that do not answer, or run a program."""
RENEW_EVERY_S = 5.0
"""A store that refuses for good must not have every request make a new session, which takes some 50 ms of the loop."""


class Shared:
    """One task at a time that many wait for. It goes on when those who wait are cancelled, as long as `CREDENTIALS_S`.

    So a source that is slower than the deadline of every call is asked once, and not once a call.
    """

    def __init__(self, says: Callable[[Exception], str]) -> None:
        """`says`: what to tell of an exception. It holds no secret."""
        self._says = says
        self._task: asyncio.Task[AttemptError | None] | None = None

    def begin(self, doing: str, make: Callable[[], Awaitable[object]]) -> Shared:
        """Have a task do what `make` makes, unless one is under way. `doing` begins the message of its failure."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(doing, make))
        return self

    async def wait(self) -> None:
        """Until the task that was begun last is done.

        Raises:
            AttemptError: it failed.
        """
        assert self._task is not None
        task = self._task
        # Unlike `await task`, this leaves it alone when it is cancelled itself.
        await asyncio.wait({task})
        if task.cancelled():
            raise AttemptError(BackendError("credentials: the client is closed"), code="closed")
        if failed := task.result():
            raise failed

    async def close(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self, doing: str, make: Callable[[], Awaitable[object]]) -> AttemptError | None:
        # Failures are not raised here: nobody may be there to see it.
        try:
            async with asyncio.timeout(CREDENTIALS_S):
                await make()
        except AttemptError as failed:
            return failed
        except Exception as cause:  # noqa: BLE001  # whatever a source of credentials raises, there are none
            problem = f"not within {CREDENTIALS_S:g} s" if isinstance(cause, TimeoutError) else self._says(cause)
            return AttemptError(DeniedError(f"{doing}: credentials cannot be had: {problem}"), retryable=True, code="credentials")
        return None


class Current(Generic[T]):
    """The one that new requests use. One that was replaced is ended as soon as nobody uses it."""

    def __init__(self, make: Callable[[], Awaitable[T]], end: Callable[[T], Awaitable[None]], says: Callable[[Exception], str]) -> None:
        """
        Args:
            make: Makes one, with credentials of now.
            end: Closes its connections, also those in use.
            says: What to tell of an exception of `make`. It holds no secret.
        """
        self._make = make
        self._end = end
        self._renewal = Shared(says)
        self._renewed_s = -float("inf")
        self._now: _Used[T] | None = None

    @property
    def now(self) -> T | None:
        """None before `open` and after `close`."""
        return self._now.one if self._now else None

    async def open(self) -> None:
        """Idempotent. Raises what `make` raises."""
        if self._now is None:
            self._now = _Used(await self._make())

    @asynccontextmanager
    async def use(self, doing: str) -> AsyncIterator[T]:
        """The current one, which stays open until the end of the block.

        Raises:
            AttemptError: there is none. `doing` begins the message.
        """
        used = self._now
        if used is None:
            raise AttemptError(BackendError(f"{doing}: the client is closed"), code="closed")
        used.users += 1
        try:
            yield used.one
        finally:
            used.users -= 1
            if used.retired and not used.users:
                await self._end(used.one)

    def is_new(self, one: T) -> bool:
        """Whether `one` was made a moment ago, so that another would be no better."""
        return one is self.now and time.monotonic() - self._renewed_s < RENEW_EVERY_S

    async def renew(self, doing: str) -> None:
        """Replace it, at most every `RENEW_EVERY_S`. What uses the old one goes on.

        Raises:
            AttemptError: no other could be made; the old one stays. `doing` begins the message.
        """
        if self._now is not None and not self.is_new(self._now.one):
            await self._renewal.begin(doing, self._replace).wait()

    async def close(self) -> None:
        """Idempotent."""
        await self._renewal.close()
        old, self._now = self._now, None
        if old is not None:
            await self._end(old.one)

    async def _replace(self) -> None:
        try:
            made = _Used(await self._make())
        finally:
            self._renewed_s = time.monotonic()
        old, self._now = self._now, made
        if old is not None:
            old.retired = True
            if not old.users:
                await self._end(old.one)


class _Used(Generic[T]):
    """One of them, how many requests use it, and whether whoever is the last of these ends it."""

    __slots__ = ("one", "retired", "users")

    def __init__(self, one: T) -> None:
        self.one = one
        self.retired = False
        self.users = 0
