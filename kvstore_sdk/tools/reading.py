"""Reading whole records through memory of the tool's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore_sdk.backend import (
    Backend,
    Deadline,
    Get,
    GetResult,
    GetStatus,
    TimedOutError,
)
from kvstore_sdk.errors import BreachError, ClosedError, InvalidError, UnavailableError
from kvstore_sdk.tools.facts import MAX_MANIFEST_BYTES, Manifest, parse_manifest
from kvstore_sdk.tools.memory import ToolMemory
from kvstore_sdk.tools.retry import Retry

__all__ = ["PAGE_BYTES", "Reader", "Sized", "read_manifest"]

PAGE_BYTES = 4096
"""Records, and manifests, are whole pages; what is not is none, and no backend must be able to read it."""


@dataclass(frozen=True, slots=True)
class Sized:
    """The record is not as long as it was taken for; `size_bytes` is its length now, None where the store does not say."""

    size_bytes: int | None


class Reader:
    """Reads one record at a time into a region of its own, which grows to the largest. For one thread."""

    def __init__(self, backend: Backend, retry: Retry) -> None:
        self._backend = backend
        self._retry = retry
        self._memory = ToolMemory(backend)

    def read(self, name: str, size_bytes: int) -> memoryview | Sized | None:
        """The record, in memory that is overwritten by the next read; None: there is none.

        Args:
            name: Of the record.
            size_bytes: Its length, whole pages of 4,096 bytes; no more than `capabilities.max_record_bytes`.

        Raises:
            BackendError: it could not be read; `InvalidError`: the store, as it was opened, holds no records of this length.
            ValueError: the length is no whole pages.
        """
        if size_bytes < 1 or size_bytes % PAGE_BYTES:
            raise ValueError(f"Reader: read {name}: {size_bytes} bytes are not the whole pages of a record")
        if size_bytes > (most := self._backend.capabilities.max_record_bytes):
            raise InvalidError(f"get {name}: {size_bytes} bytes are more than the {most} that this store was opened for (max_record_bytes)")
        return self._retry.call(f"get {name}", lambda deadline: self._read(name, size_bytes, deadline))

    def close(self) -> None:
        """Give the memory back. What a store may still write into is kept until the process ends."""
        self._memory.close()

    def _read(self, name: str, size_bytes: int, deadline: Deadline) -> memoryview | Sized | None:
        buffer = self._memory.fit(size_bytes)
        results = self._backend.get([Get(name, (buffer,))], deadline)
        if not isinstance(results, Sequence) or len(results) != 1 or not isinstance(results[0], GetResult):
            raise BreachError(f"get {name}: the backend answered what is no list of one GetResult; that is for its vendor to fix")
        result = results[0]
        match result.status:
            case GetStatus.FOUND:
                return buffer.view
            case GetStatus.MISSING:
                return None
            case GetStatus.WRONG_SIZE:
                return Sized(result.size_bytes)
            case GetStatus.IN_DOUBT:
                if result.ticket is None:
                    raise BreachError(f"get {name}: the backend answered IN_DOUBT without a ticket; its vendor can fix that")
                self._memory.doubt(result.ticket)
                raise TimedOutError(f"get {name}: no answer within {self._retry.timeout_s:g} s")
            case GetStatus.TIMED_OUT:
                raise TimedOutError(f"get {name}: no answer within {self._retry.timeout_s:g} s")
            case GetStatus.CLOSED:
                raise result.error or ClosedError(f"get {name}: the backend was closed")
            case GetStatus.FAILED:
                raise result.error or UnavailableError(f"get {name}: failed, and the backend does not say why")


def read_manifest(reader: Reader, name: str, namespace: str, size_bytes: int) -> Manifest | str | None:
    """The manifest called `name`, of the size that a listing says; or in one clause why it is none; None: it is gone.

    Raises:
        BackendError: it could not be read.
    """
    # Once more with the size that it has by now: an engine may just have written it again.
    for _ in range(2):
        if size_bytes < 1 or size_bytes % PAGE_BYTES:
            return f"has {size_bytes} bytes, which are no whole pages: torn, or something else"
        if size_bytes > MAX_MANIFEST_BYTES:
            return f"is longer than {MAX_MANIFEST_BYTES} bytes"
        found = reader.read(name, size_bytes)
        if found is None:
            return None
        if isinstance(found, memoryview):
            return parse_manifest(bytes(found), namespace)
        size_bytes = found.size_bytes or 0
    return "changes its size while it is read"
