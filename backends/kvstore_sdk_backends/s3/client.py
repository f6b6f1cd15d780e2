"""What the backend asks of an object store: one attempt of one request at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstore_sdk.backend import BackendError
from kvstore_sdk_backends.s3.memory import ItemMemory

__all__ = ["MAX_DELETE", "AttemptError", "ObjectClient", "ObjectInfo", "delete_singly"]

MAX_DELETE = 1000
"""Keys of one DeleteObjects request, and of one call of `ObjectClient.delete`."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object of a listing. `modified_s` is in seconds since 1970, by the store's clock; None where it does not say."""

    key: str
    size_bytes: int
    modified_s: float | None


class AttemptError(Exception):
    """One attempt failed.

    Attributes:
        error: What happened, to be shown to the user: verb, key, HTTP status. Holds no secret.
        retryable: Another attempt may succeed.
        may_have_happened: The request went out and its answer was lost: what it asked for may be done, now or later. A put is then whole.
        retry_after_s: How long the store asks to wait; 0.0 when it does not say.
        stale_credentials: The credentials were refused in a way that new ones may mend.
        status: HTTP status of the answer; 0 when there was none.
        code: The store's own word for it (`SlowDown`), or what failed on the way: `connect`, `dns`, `tls`, `timeout`, `closed`, `body`,
            `checksum`, `credentials`.
    """

    def __init__(
        self,
        error: BackendError,
        *,
        retryable: bool = False,
        may_have_happened: bool = False,
        retry_after_s: float = 0.0,
        stale_credentials: bool = False,
        status: int = 0,
        code: str = "",
    ) -> None:
        super().__init__(str(error))
        self.error = error
        self.retryable = retryable
        self.may_have_happened = may_have_happened
        self.retry_after_s = retry_after_s
        self.stale_credentials = stale_credentials
        self.status = status
        self.code = code


class ObjectClient(Protocol):
    """A bucket. Every method runs on the backend's event loop and is one attempt: nothing behind it repeats a request.

    Keys are whole keys, the backend's prefix included. An attempt is bounded by time-outs of the client's own. Whoever cancels one ends
    it: afterwards it touches no `ItemMemory`, and its connection is closed rather than used again half way through a body.

    All but `open` and `close` raise `AttemptError` for what went wrong.
    """

    conditional: bool
    """Whether `put(create=True)` is atomic. Otherwise it replaces what is there: look first."""

    async def open(self) -> None:
        """Make ready for requests; sends none.

        Raises:
            ConfigError: a setting cannot be used.
        """
        ...

    async def head(self, key: str) -> int | None:
        """Size of the object in bytes, None when there is none."""
        ...

    async def get(self, key: str, memory: ItemMemory) -> int | None:
        """Fill `memory` with the object.

        Returns:
            Size of the object in bytes; None when there is none. If it is `memory.size_bytes`, every byte of the memory was written. If
            it is another size, none was.
        """
        ...

    async def put(self, key: str, memory: ItemMemory, create: bool) -> bool:
        """Store all of `memory` as one object, atomically.

        Args:
            key: Of the object.
            memory: Its bytes.
            create: Leave an object that is there as it is, if the client is `conditional`.

        Returns:
            False: an object is there already, and `create` left it alone.
        """
        ...

    async def delete(self, keys: Sequence[str]) -> dict[str, BackendError | None]:
        """Remove at most `MAX_DELETE` objects. None: it is gone now; S3 does not say whether it was there."""
        ...

    async def list_page(self, prefix: str, start_after: str, limit: int) -> tuple[list[ObjectInfo], bool]:
        """Objects whose key begins with `prefix` and sorts after `start_after`, at most `limit`.

        Returns:
            The objects, sorted by the bytes of their keys, and whether there are more.
        """
        ...

    async def refresh_credentials(self) -> None:
        """Resolve credentials anew, from their source. Requests that run go on with those they have."""
        ...

    async def close(self) -> None:
        """Close every connection. Idempotent."""
        ...


async def delete_singly(keys: Sequence[str], delete: Callable[[str], Awaitable[None]], at_one_time: int) -> dict[str, BackendError | None]:
    """As `ObjectClient.delete`, with one call of `delete` for each key.

    Raises:
        AttemptError: of the first one, if all failed: whoever asked may ask again, or with other credentials.
    """
    turns = asyncio.Semaphore(at_one_time)

    async def attempt(key: str) -> AttemptError | None:
        async with turns:
            try:
                await delete(key)
            except AttemptError as failed:
                return failed
        return None

    answers = await asyncio.gather(*map(attempt, keys))
    failed = [answer for answer in answers if answer is not None]
    if failed and len(failed) == len(keys):
        raise failed[0]
    return {key: answer.error if answer else None for key, answer in zip(keys, answers, strict=True)}
