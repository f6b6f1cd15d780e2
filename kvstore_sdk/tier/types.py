"""What an engine says to a Tier and hears from it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

__all__ = ["EngineMemory", "IncompleteChunkError", "JobResult", "Lookup", "TierEvent"]


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
    """

    job_id: int
    done: tuple[bytes, ...]
    failed: tuple[bytes, ...]
    skipped: tuple[bytes, ...]
    moved_bytes: int
    elapsed_s: float

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
