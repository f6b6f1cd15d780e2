"""What a backend is asked, one item at a time, and what it may answer."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from kvstore_sdk.backend.region import Buffer
from kvstore_sdk.errors import BackendError

__all__ = [
    "DeleteStatus",
    "Failure",
    "Get",
    "GetResult",
    "GetStatus",
    "ListEntry",
    "ListPage",
    "Mode",
    "Put",
    "PutResult",
    "PutStatus",
    "Ticket",
    "Usage",
]


class Ticket(Hashable, Protocol):
    """Names one operation that is in doubt: any hashable value, made and understood by the backend alone.

    The SDK keeps it beside the buffers of its item, and gives it back to `SupportsSettle.settle` until that says it is over.
    """


class Mode(Enum):
    """How a put treats a record that is already there.

    Attributes:
        CREATE: May answer EXISTS and then leaves what is there as it is.
        REPLACE: Puts the new record in the place of the old one, atomically.
    """

    CREATE = "create"
    REPLACE = "replace"


@dataclass(frozen=True, slots=True)
class Put:
    """Store the bytes of `parts`, one after another, as one record under `name`."""

    name: str
    parts: Sequence[Buffer]
    mode: Mode = Mode.CREATE

    @property
    def size_bytes(self) -> int:
        return sum(part.length for part in self.parts)


@dataclass(frozen=True, slots=True)
class Get:
    """Fill the buffers of `into`, one after another, with the record called `name`, which must be exactly as long."""

    name: str
    into: Sequence[Buffer]

    @property
    def size_bytes(self) -> int:
        return sum(part.length for part in self.into)


@dataclass(frozen=True, slots=True)
class Failure:
    """An answer that could not be given, and why."""

    error: BackendError


class PutStatus(Enum):
    """What became of one put.

    Attributes:
        STORED: Visible and whole, to every process that uses this store, also after `kill -9` of this one.
        EXISTS: CREATE only: a record of that name is visible; it was not changed.
        FAILED: Definite: the record of this put is not visible and will not become visible. `error` says why.
        UNKNOWN: The answer was lost: the record may be, or become, visible, and then it is whole. Repeating is safe.
        TIMED_OUT: Not done by the deadline: definite, like FAILED. When that cannot be promised, answer UNKNOWN.
        IN_DOUBT: The call is over, but the store may still read the buffers of this item until `settle` says it is over. As to
            visibility: UNKNOWN.
        CLOSED: `close` was called first: definite, like FAILED.
    """

    STORED = "stored"
    EXISTS = "exists"
    FAILED = "failed"
    UNKNOWN = "unknown"
    TIMED_OUT = "timed_out"
    IN_DOUBT = "in_doubt"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class PutResult:
    """The answer to one put. `error` comes with FAILED and may come with UNKNOWN; `ticket` comes with IN_DOUBT."""

    status: PutStatus
    error: BackendError | None = None
    ticket: Ticket | None = None

    @classmethod
    def failed(cls, error: BackendError) -> PutResult:
        return cls(PutStatus.FAILED, error)


class GetStatus(Enum):
    """What became of one get. After any status but FOUND the buffers of the item hold no promise.

    Attributes:
        FOUND: Every buffer is filled, and the record is exactly as long as the buffers.
        MISSING: No record of that name. A result, not an error.
        WRONG_SIZE: The record is shorter or longer than the buffers; `size_bytes` is its true size, `asked_bytes` theirs.
        FAILED: The record could not be read; `error` says why.
        TIMED_OUT: Not done by the deadline, and the buffers of the item will not be touched any more.
        IN_DOUBT: The call is over, but the store may still write into the buffers of this item until `settle` says it is over.
        CLOSED: `close` was called first.
    """

    FOUND = "found"
    MISSING = "missing"
    WRONG_SIZE = "wrong_size"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    IN_DOUBT = "in_doubt"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class GetResult:
    """The answer to one get. The sizes come with WRONG_SIZE, `error` with FAILED, `ticket` with IN_DOUBT."""

    status: GetStatus
    error: BackendError | None = None
    ticket: Ticket | None = None
    size_bytes: int | None = None
    asked_bytes: int | None = None

    @classmethod
    def failed(cls, error: BackendError) -> GetResult:
        return cls(GetStatus.FAILED, error)

    @classmethod
    def wrong_size(cls, size_bytes: int, asked_bytes: int) -> GetResult:
        return cls(GetStatus.WRONG_SIZE, size_bytes=size_bytes, asked_bytes=asked_bytes)


class DeleteStatus(Enum):
    """What became of one delete.

    Attributes:
        DELETED: No record of that name is visible any more.
        ABSENT: Nothing of that name was there. A result, not an error: two deleters may race.
    """

    DELETED = "deleted"
    ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class ListEntry:
    """One record of a listing.

    `modified_s` is when the record was stored last, in seconds since 1970 by the clock of the store; None where the store does not say.
    Tools show and sort by it; no request depends on it.
    """

    name: str
    size_bytes: int
    modified_s: float | None = None


@dataclass(frozen=True, slots=True)
class ListPage:
    """Some records, in an order of the store's own, and where to go on: `cursor` is None on the last page."""

    entries: Sequence[ListEntry]
    cursor: str | None


@dataclass(frozen=True, slots=True)
class Usage:
    """What a store holds.

    Attributes:
        records: How many there are. One that is put again, or lies there in several copies, is one record.
        used_bytes: Their bytes, each record once, and what the store keeps for a record beside them (a block that is not full, its name,
            an index): up to 64 KiB each.
        capacity_bytes: The most that `used_bytes` may be, but for 2 % and the records that are being put; None where the store knows no
            limit. A full store makes room, or answers FAILED with `NoSpaceError`. A record that is larger is refused, and nothing is
            evicted for it.
    """

    records: int
    used_bytes: int
    capacity_bytes: int | None = None
