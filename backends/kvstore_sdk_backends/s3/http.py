"""HTTP to the one host that was named, with answers of a bounded length."""

from __future__ import annotations

from typing import Any

import aiohttp
from aiobotocore.httpsession import AIOHTTPSession

__all__ = ["MAX_ANSWER_BYTES", "PlainSession"]

MAX_ANSWER_BYTES = 4 << 20
"""Of an answer that is no object. A page of 1,000 keys, each as long as can be, is half of it."""


class PlainSession(AIOHTTPSession):  # type: ignore[misc]  # its package has no types
    """What aiobotocore sends requests with.

    A redirect is an answer like any other: followed, it would take session tokens, and records, to a host that nobody named, and bring
    back that host's bytes as the store's.
    """

    async def _get_session(self, proxy_url: str | None) -> Any:
        return _PlainClient(await super()._get_session(proxy_url))


class _PlainClient:
    def __init__(self, client: aiohttp.ClientSession) -> None:
        self._client = client

    async def request(self, *given: Any, **options: Any) -> Any:
        return _Answer(await self._client.request(*given, allow_redirects=False, **options))


class _Answer:
    """A response whose whole body is only read if it is short. That of an object is read piece by piece, past this."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    async def read(self) -> bytes:
        pieces: list[bytes] = []
        length = 0
        async for piece in self._response.content.iter_any():
            length += len(piece)
            if length > MAX_ANSWER_BYTES:
                self._response.close()
                raise aiohttp.ClientPayloadError(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
            pieces.append(piece)
        return b"".join(pieces)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._response, name)
