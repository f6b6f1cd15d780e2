"""Backends for tests of tools: one whose names are made up while they are listed, and ones that misbehave."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from kvstore_sdk.backend import Capabilities, Deadline, Failure, Get, GetResult, GetStatus, ListEntry, ListPage, Put, PutResult, PutStatus
from kvstore_sdk.keys import ChunkKey

__all__ = ["Listing", "MadeUp"]


class Listing:
    """Lists by a function of the test; holds nothing."""

    capabilities = Capabilities(max_record_bytes=1 << 20, max_concurrency=4)

    def __init__(self, list_: Callable[[str, str | None, int], Any]) -> None:
        self._list = list_

    def exists(self, names: Sequence[str], deadline: Deadline) -> list[bool | Failure]:
        return [False for _ in names]

    def put(self, puts: Sequence[Put], deadline: Deadline) -> list[PutResult]:
        return [PutResult(PutStatus.TIMED_OUT) for _ in puts]

    def get(self, gets: Sequence[Get], deadline: Deadline) -> list[GetResult]:
        return [GetResult(GetStatus.MISSING) for _ in gets]

    def close(self) -> None:
        pass

    def list(self, prefix: str, deadline: Deadline, cursor: str | None = None, limit: int = 1000) -> ListPage:
        page: ListPage = self._list(prefix, cursor, limit)
        return page


class MadeUp(Listing):
    """Lists `count` records of one namespace, of which none is there when it is read. It keeps none of the names."""

    NAMESPACE = "0123456789abcdef" * 2

    def __init__(self, count: int) -> None:
        super().__init__(self._page)
        self._count = count

    def _page(self, prefix: str, cursor: str | None, limit: int) -> ListPage:
        if not f"v1/{self.NAMESPACE}/00".startswith(prefix):
            return ListPage([], None)
        start = int(cursor or 0)
        end = min(start + limit, self._count)
        return ListPage([self.entry(number) for number in range(start, end)], str(end) if end < self._count else None)

    def entry(self, number: int) -> ListEntry:
        key = ChunkKey(self.NAMESPACE, hashlib.blake2b(number.to_bytes(8, "big"), digest_size=32).digest(), 0)
        return ListEntry(key.name, 8192, 1.7e9 + number)


def open_made_up(location: str) -> MadeUp:
    """A factory: the location says how many."""
    return MadeUp(int(location))
