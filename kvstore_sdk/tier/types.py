"""What an engine says to a Tier and hears from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, runtime_checkable

from kvstore_sdk.backend import Buffer, Region

__all__ = ["EngineMemory", "IncompleteChunkError", "JobResult", "Lookup", "RecordMemory", "TierEvent"]


class Lookup(Enum):
    """Answer of `Tier.lookup`, from memory alone."""

    HIT = "hit"
    MISS = "miss"
    PENDING = "pending"
    """Ask again in the next step. Becomes HIT or MISS within `lookup_timeout_s`."""


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a job ended; `poll` returns one for each submitted job.

    Attributes:
        job_id: As submitted.
        done: Keys that were stored (or were there already), or loaded and verified, in the order of the job.
        failed: After a failed load the engine's memory for that key holds no promise but is no longer touched.
        skipped: Keys that this tier does not store by its configuration.
        moved_bytes: Payload bytes that went to or came from the backend.
        elapsed_s: From submission.
        held: Rows of a `RecordMemory` that a call may still touch: it outlived the job, or the backend calls its item in doubt. They must
            not be used for anything else until `Tier.take_released` names them, once for each time they are in here.
        answer: What the engine's adapter made of the result: see `Tier`.
    """

    job_id: int
    done: tuple[bytes, ...]
    failed: tuple[bytes, ...]
    skipped: tuple[bytes, ...]
    moved_bytes: int
    elapsed_s: float
    held: tuple[int, ...] = ()
    answer: object = field(default=None, compare=False, repr=False)

    @property
    def success(self) -> bool:
        return not self.failed


@dataclass(frozen=True, slots=True)
class TierEvent:
    """A change of what the backend is known to hold: stored by this tier, or found missing or corrupt by it."""

    keys: tuple[bytes, ...]
    removed: bool


class IncompleteChunkError(Exception):
    """A row does not hold all of its chunk, so it must not be stored under the chunk's key. Raised by `EngineMemory.copy_out`."""


class EngineMemory(Protocol):
    """The engine's own host memory: rows that it reuses as soon as a job is reported.

    A Tier calls `copy_out` and `copy_in` from its threads, and only while the job is open. A chunk's payload is the bytes of its own
    group and nothing else.
    """

    @property
    def row_count(self) -> int:
        """How many rows there are. Stores keep three quarters of them in use at most."""
        ...

    def payload_bytes(self, group: int) -> int | None:
        """Length of a chunk of `group`; None for a group this memory does not hold."""
        ...

    def copy_out(self, row: int, group: int, payload: memoryview) -> None:
        """Copy the chunk of `group` in `row` into `payload`, which is `payload_bytes(group)` long.

        Raises:
            IncompleteChunkError: the row holds a part of the chunk only.
        """
        ...

    def copy_in(self, row: int, group: int, payload: memoryview) -> None:
        """Copy `payload` into the parts of `row` that belong to `group`, and touch no other byte."""
        ...


@runtime_checkable
class RecordMemory(Protocol):
    """Host memory whose rows are records: a Tier moves a record from or into its row, and copies nothing.

    A row is touched while its job is open, and when the job ends, if it is in `JobResult.held`, until it is released. A row that is stored
    holds a sealed record and does not change meanwhile; others may read it, and other tiers store it too. A row that is loaded into
    belongs to the job alone.

    The methods are called from a Tier's threads.
    """

    @property
    def region(self) -> Region:
        """All rows lie in it. Its owner closes it after every tier that uses it was closed, unless one of them `touches_memory`."""
        ...

    @property
    def row_count(self) -> int:
        """How many rows there are. Stores keep three quarters of them in use at most."""
        ...

    def payload_bytes(self, group: int) -> int | None:
        """Length of a chunk of `group`; None for a group this memory does not hold."""
        ...

    def record(self, row: int) -> Buffer:
        """The whole record of the chunk that `row` holds or is to hold: it begins on a page, and is `record_bytes` of its group long."""
        ...
