"""What a store can do, tried on a scratch object while it is opened; and in one line what is wrong with it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol, TypeVar

from kvstore_sdk.backend import DeniedError, TimedOutError
from kvstore_sdk_backends.s3.client import AttemptError, ObjectClient
from kvstore_sdk_backends.s3.memory import ItemMemory
from kvstore_sdk_backends.s3.refusals import Refusals
from kvstore_sdk_backends.s3.settings import Checksums, S3Settings

__all__ = ["PROBE_NAME", "PROBE_S", "ProbedClient", "probe_store"]

T = TypeVar("T")

PROBE_NAME = ".kvstore-probe-"
"""Begins the last segment of scratch objects. A name of a record cannot begin with a dot."""
PROBE_S = 30.0
"""For all requests together; whoever opens a store may wait for a minute."""

_CLEAN_UP_S = 5.0
_GAPS_S = (0.2, 0.8)
"""Before further attempts, when the store is there and asks to come back."""
_SIZE_BYTES = 1000
_NOT_UNDERSTOOD = frozenset({400, 405, 411, 501})
"""What stores answer to a header or a request that they do not know."""


class ProbedClient(ObjectClient, Protocol):
    """A client whose habits may be changed for a request."""

    checksums: Checksums


async def probe_store(client: ProbedClient, bucket: str, prefix: str, settings: S3Settings) -> None:
    """Try out what the settings ask for: `settings.probe` says how much of it. Sets `client.conditional`.

    A scratch object is removed again, unless that is refused.

    Raises:
        ConfigError: the store cannot be used like this; the message says which option to change.
        BackendError: it answers, but not now.
    """
    if settings.probe == "off":
        return
    key = f"{prefix}/{PROBE_NAME}{secrets.token_hex(8)}".lstrip("/")
    run = _Probe(client, key, Refusals(bucket, prefix, settings), settings)
    try:
        async with asyncio.timeout(PROBE_S):
            await (run.write() if settings.probe == "write" else run.read())
    except TimeoutError:
        raise TimedOutError(f"s3 open {bucket}/{prefix}: the store did not answer the probe within {PROBE_S:g} s") from None
    finally:
        await run.clean_up()


class _Probe:
    def __init__(self, client: ProbedClient, key: str, refusals: Refusals, settings: S3Settings) -> None:
        self._client = client
        self._key = key
        self._refusals = refusals
        self._settings = settings
        self._left: set[str] = set()
        self._bytes = secrets.token_bytes(_SIZE_BYTES)

    async def write(self) -> None:
        # Two, since one is deleted in another way than many.
        keys = [self._key, f"{self._key}-2"]
        for key in keys:
            await self._put(key)
        await self._try_condition()
        size_bytes = await self._step("HEAD", lambda: self._client.head(self._key))
        if size_bytes != _SIZE_BYTES:
            raise self._refusals.inconsistent("HEAD", "no object" if size_bytes is None else f"{size_bytes} bytes")
        found = bytearray(_SIZE_BYTES)
        with memoryview(found) as view:
            memory = ItemMemory(view[:])
            try:
                size_bytes = await self._step("GET", lambda: self._client.get(self._key, memory))
            finally:
                memory.give_back()
        if size_bytes != _SIZE_BYTES or found != self._bytes:
            raise self._refusals.inconsistent("GET", "no object" if size_bytes is None else "other bytes")
        await self._delete(keys)
        if await self._step("HEAD", lambda: self._client.head(self._key), gone=True) is not None:
            raise self._refusals.inconsistent("HEAD", "an object that was deleted")

    async def read(self) -> None:
        """Only how a miss is told, and that the bucket exists: a HEAD says 404 to either."""
        memory = ItemMemory(memoryview(bytearray(1)))
        found = await self._step("HEAD", lambda: self._client.head(self._key), gone=True)
        found = found or await self._step("GET", lambda: self._client.get(self._key, memory), gone=True)
        if found is not None:
            raise self._refusals.inconsistent("HEAD", "an object that nobody stored")

    async def clean_up(self) -> None:
        if self._left:
            with suppress(AttemptError, TimeoutError):
                async with asyncio.timeout(_CLEAN_UP_S):
                    await self._singly(sorted(self._left))

    async def _put(self, key: str) -> None:
        try:
            await self._attempts(lambda: self._send(key, create=False))
        except AttemptError as failed:
            if (
                self._client.checksums == "when_supported"
                and failed.status in _NOT_UNDERSTOOD
                and await self._works_without_checksums(lambda: self._send(key, create=False))
            ):
                raise self._refusals.no_checksums("PUT", "when_required") from None
            raise self._refusals.told("PUT", failed) from None

    async def _try_condition(self) -> None:
        """Whether a second creation of the object is refused."""
        asked = self._settings.conditional_writes
        if asked == "never":
            return
        self._client.conditional = True
        try:
            heeded = not await self._attempts(lambda: self._send(self._key, create=True))
        except AttemptError as failed:
            if failed.status not in _NOT_UNDERSTOOD:
                raise self._refusals.told("PUT", failed) from None
            heeded = False
        if asked == "always" and not heeded:
            raise self._refusals.no_condition()
        self._client.conditional = heeded

    async def _delete(self, keys: list[str]) -> None:
        try:
            gone = await self._attempts(lambda: self._client.delete(keys))
        except AttemptError as failed:
            if (
                self._client.checksums != "off"
                and failed.status in _NOT_UNDERSTOOD
                and await self._works_without_checksums(lambda: self._singly(keys))
            ):
                self._left.clear()
                raise self._refusals.no_checksums("DELETE of two objects at once", "off") from None
            raise self._refusals.told("DELETE", failed) from None
        if refused := next((error for error in gone.values() if error is not None), None):
            raise self._refusals.told("DELETE", AttemptError(refused, status=403 if isinstance(refused, DeniedError) else 500))
        self._left.clear()

    async def _singly(self, keys: list[str]) -> None:
        for key in keys:
            await self._client.delete([key])

    async def _send(self, key: str, *, create: bool) -> bool:
        memory = ItemMemory(memoryview(self._bytes))
        is_new = key not in self._left
        self._left.add(key)
        try:
            return await self._client.put(key, memory, create)
        except AttemptError as failed:
            if is_new and not failed.may_have_happened:
                self._left.discard(key)
            raise
        finally:
            memory.give_back()

    async def _works_without_checksums(self, request: Callable[[], Awaitable[object]]) -> bool:
        policy, self._client.checksums = self._client.checksums, "off"
        try:
            await request()
        except AttemptError:
            return False
        finally:
            self._client.checksums = policy
        return True

    async def _step(self, verb: str, request: Callable[[], Awaitable[T]], *, gone: bool = False) -> T:
        """The answer to `request`. `gone`: it is about an object that is not there."""
        try:
            return await self._attempts(request)
        except AttemptError as failed:
            raise self._refusals.told(verb, failed, gone=gone) from None

    async def _attempts(self, request: Callable[[], Awaitable[T]]) -> T:
        """The answer to `request`, again where the store is there and asks for that."""
        gaps_s = iter(_GAPS_S)
        while True:
            try:
                return await request()
            except AttemptError as failed:
                gap_s = next(gaps_s, None) if failed.retryable and failed.status else None
                if gap_s is None:
                    raise
                await asyncio.sleep(max(gap_s, min(failed.retry_after_s, _CLEAN_UP_S)))
