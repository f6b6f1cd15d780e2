"""What backends with one fault in the profile core have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mutant import MemoryMutant

from kvstore_sdk.backend import (
    Buffer,
    Deadline,
    Get,
    GetResult,
    Put,
    PutResult,
    Region,
)

Proceed = Callable[[Sequence[Any]], Any]


def bytes_of(put: Put) -> bytes:
    return b"".join(part.view for part in put.parts)


def with_record(put: Put, record: bytes) -> Put:
    """The same put of other bytes."""
    return replace(put, parts=(buffer_of(record),))


def buffer_of(record: bytes) -> Buffer:
    buffer = Region(len(record)).buffer(0, len(record))
    buffer.view[:] = record
    return buffer


def fill(get: Get, record: bytes) -> None:
    start = 0
    for buffer in get.into:
        buffer.view[: len(record) - start] = record[start : start + buffer.length]
        start += buffer.length


class CoreMutant(MemoryMutant):
    """Puts and gets pass through one method each, an item at a time."""

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        one = {"put": self.one_put, "get": self.one_get}.get(op)
        return proceed(items) if one is None else [one(item, lambda item: proceed([item])[0]) for item in items]

    def one_put(self, put: Put, proceed: Callable[[Put], PutResult]) -> PutResult:
        return proceed(put)

    def one_get(self, get: Get, proceed: Callable[[Get], GetResult]) -> GetResult:
        return proceed(get)

    def record(self, name: str) -> bytes | None:
        """What is stored, as this backend, and nobody else, can look it up."""
        found: bytes | None = self.inner._shelf.records.get(name)
        return found
