"""The contract between the SDK and a storage vendor. Nothing but this package is needed to implement it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, runtime_checkable

from kvstore_sdk.backend.deadline import Deadline
from kvstore_sdk.backend.region import Region
from kvstore_sdk.backend.results import (
    DeleteStatus,
    Failure,
    Get,
    GetResult,
    ListPage,
    Put,
    PutResult,
    Ticket,
    Usage,
)
from kvstore_sdk.errors import ConfigError

__all__ = [
    "Backend",
    "Capabilities",
    "Durability",
    "Fork",
    "SupportsCounters",
    "SupportsDelete",
    "SupportsList",
    "SupportsRegions",
    "SupportsSettle",
    "SupportsUsage",
    "is_valid_name",
]

_SEGMENT = r"[A-Za-z0-9_-][A-Za-z0-9._-]*+"
_NAME = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT})*+")


def is_valid_name(name: str, max_name_bytes: int = 1024) -> bool:
    """Whether `name` is one the SDK may use: `/`-separated segments of `A-Z a-z 0-9 . _ -`, none empty, none starting with a dot.

    Such a name cannot leave the root of a store. A backend should check the names it is given with this and answer the rest
    with `InvalidError`: they did not come from the SDK.
    """
    return len(name) <= max_name_bytes and _NAME.fullmatch(name) is not None


class Durability(Enum):
    """What a STORED record survives.

    Attributes:
        NONE: It lives in the process that wrote it.
        PROCESS_CRASH: It survives `kill -9` of every process that used it, and within 10 seconds of that others can open the location
            and store the same names. A power cut may take it, but never tear it unnoticed: the SDK verifies.
    """

    NONE = "none"
    PROCESS_CRASH = "process_crash"


class Fork(Enum):
    """What a forked child may do with a backend that its parent opened. The parent's stays as it was, also when the child ends.

    Attributes:
        WORKS: All that its parent may.
        REFUSES: Nothing: every call in the child answers an error. Never a hang.
    """

    WORKS = "works"
    REFUSES = "refuses"


_KINDS: dict[str, type[bool] | type[Enum]] = {
    "shared": bool,
    "read_after_write": bool,
    "read_only": bool,
    "durability": Durability,
    "in_doubt": bool,
    "fork": Fork,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend can do, in numbers. The SDK never asks for more; the conformance suite sizes its data from them.

    Attributes:
        max_record_bytes: Largest record. The SDK sends no larger one; a backend should refuse it with `InvalidError`.
        max_batch: Most items in one call.
        max_parts: Most buffers in one item.
        align_bytes: Address and length of every buffer are multiples of this power of two, 4,096 at most.
        max_concurrency: Most calls at the same time, from different threads.
        batch_bytes: Payload bytes of one call, where the backend moves a call's records side by side, and a call costs more than a few of
            them do. Fewer where there are no more, or `max_batch` or a quarter of the staging slots is reached; a larger record goes
            alone. 0: a job is spread over threads, in calls of `batch_records`.
        max_name_bytes: Longest name. The SDK's own are at most 179 bytes.
        shared: Other processes, or hosts, that open the same location see the same records.
        read_after_write: What a put STORED, the next `exists` and `get` of any process find. False: they do so within 10 seconds.
        read_only: Every put is refused.
        durability: What a STORED record survives.
        in_doubt: Items may answer IN_DOUBT; then `SupportsSettle` is implemented too.
        fork: What a forked child may do.

    Raises:
        ConfigError: a value is of the wrong type or out of bounds.
    """

    max_record_bytes: int
    max_batch: int = 64
    max_parts: int = 1
    align_bytes: int = 1
    max_concurrency: int = 1
    batch_bytes: int = 0
    max_name_bytes: int = 255
    shared: bool = False
    read_after_write: bool = True
    read_only: bool = False
    durability: Durability = Durability.NONE
    in_doubt: bool = False
    fork: Fork = Fork.REFUSES

    def __post_init__(self) -> None:
        for field in ("max_record_bytes", "max_batch", "max_parts", "align_bytes", "max_concurrency", "max_name_bytes"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError("Capabilities", field, f"{value!r} must be a positive integer")
        if not isinstance(self.batch_bytes, int) or isinstance(self.batch_bytes, bool) or self.batch_bytes < 0:
            raise ConfigError("Capabilities", "batch_bytes", f"{self.batch_bytes!r} must be an integer, 0 or more")
        if self.align_bytes > 4096 or self.align_bytes & (self.align_bytes - 1):
            raise ConfigError("Capabilities", "align_bytes", f"{self.align_bytes} must be a power of two up to 4096")
        for field, kind in _KINDS.items():
            value = getattr(self, field)
            if not isinstance(value, kind):
                choices = "True or False" if kind is bool else " or ".join(map(str, kind))
                raise ConfigError("Capabilities", field, f"{value!r} must be {choices}")


class Backend(Protocol):
    """A blob store: whole, immutable-looking records under names. Four blocking methods and a table of capabilities.

    The SDK calls the methods from up to `capabilities.max_concurrency` threads of its own, never with more items, parts or
    bytes than declared, never with two items of one name in a call. What holds for every method:

    - **Results are per item and in order**; the list is as long as the list of items. Missing is a result. A list of another
      length is a breach of contract: every item of the call then counts as failed.
    - **An exception fails every item of the call.** Raise for what concerns the call as a whole; answer per item otherwise.
      Any exception is survived; one of `kvstore_sdk.errors` tells the caller what to do about it.
    - **Return by the deadline**, or within half a second of it. Items that are not done answer TIMED_OUT (`exists`: a `Failure` with
      `TimedOutError`). A late call is abandoned: its answer is dropped, its buffers stay out of use until it returns, and enough of them
      open the circuit breaker.
    - **After a call returned, touch none of its buffers**, unless an item answers IN_DOUBT: then the store may still read (put) or
      write (get) that item's buffers, and only those, until `settle` says it is over. A byte outside the buffers is never touched.
    - **Whole records or none.** A reader in any process sees a record as one put wrote it, or none: never a part, never a mix.
    - **Secrets** appear in no `repr`, log line or error.
    """

    @property
    def capabilities(self) -> Capabilities:
        """What this backend offers. Does not change while it is open."""
        ...

    def exists(self, names: Sequence[str], deadline: Deadline) -> list[bool | Failure]:
        """Say for each name whether a record is visible now. Moves no payload.

        It may be wrong when another process writes or deletes at the same moment: the SDK takes True for a hint and verifies what it gets.
        """
        ...

    def put(self, puts: Sequence[Put], deadline: Deadline) -> list[PutResult]:
        """Store each record, atomically and independently of the others. Its buffers are read, and not changed.

        STORED and EXISTS promise that the record is visible now. FAILED, TIMED_OUT and CLOSED promise that this put made nothing visible.
        Whoever cannot promise either answers UNKNOWN. A failed item leaves no part behind that a reader, a listing or a count could see.
        """
        ...

    def get(self, gets: Sequence[Get], deadline: Deadline) -> list[GetResult]:
        """Read each record into its buffers.

        The record must be exactly as long as the buffers together; one that is shorter or longer answers WRONG_SIZE with both sizes.
        FOUND promises that every byte was written in this call. A record that another process deletes during the call is
        FOUND whole or MISSING, never an exception.
        """
        ...

    def close(self) -> None:
        """Release everything, threads and descriptors too. Returns within 5 seconds, raises nothing, idempotent, callable from any thread.

        Calls that run meanwhile end within the same 5 seconds, done or CLOSED. Later calls answer CLOSED (`exists` and `delete`: a
        `Failure` with `ClosedError`; `list` and `usage` raise it).
        """
        ...


@runtime_checkable
class SupportsRegions(Protocol):
    """For backends that must know memory before they use it: RDMA, other processes, pinned pools."""

    def register_region(self, region: Region) -> None:
        """Called once for each region, before any call uses a buffer of it."""
        ...

    def unregister_region(self, region: Region) -> None:
        """Called after the last call that used it; no buffer of it is used again. Idempotent."""
        ...


@runtime_checkable
class SupportsSettle(Protocol):
    """For backends that answer IN_DOUBT (`capabilities.in_doubt`)."""

    def settle(self, tickets: Sequence[Ticket], deadline: Deadline) -> list[bool]:
        """Say for each ticket whether its operation is over, so that its buffers are free. False: ask again later.

        Waits until all are over or the deadline has passed. True is final: no byte of the item's buffers is read or written afterwards.
        """
        ...


@runtime_checkable
class SupportsDelete(Protocol):
    """For stores that records can be removed from."""

    def delete(self, names: Sequence[str], deadline: Deadline) -> list[DeleteStatus | Failure]:
        """Remove each record. ABSENT for what was not there. A reader that races finds the whole record or none."""
        ...


@runtime_checkable
class SupportsList(Protocol):
    """For stores that can be enumerated. Used by tools, never on the way of a request."""

    def list(self, prefix: str, deadline: Deadline, cursor: str | None = None, limit: int = 1000) -> ListPage:
        """Records whose name starts with `prefix`, at most `limit` of them, going on at `cursor`.

        A record that is there during the whole walk appears exactly once. Parts of failed or running puts never appear.

        Raises:
            BackendError: it could not be listed; `TimedOutError` when the deadline passed, `ClosedError` after `close`.
        """
        ...


@runtime_checkable
class SupportsUsage(Protocol):
    """For stores that can say how full they are."""

    def usage(self, deadline: Deadline) -> Usage:
        """What is stored under the location this backend was opened with.

        Raises:
            BackendError: it could not be counted; `TimedOutError` when the deadline passed, `ClosedError` after `close`.
        """
        ...


@runtime_checkable
class SupportsCounters(Protocol):
    """For backends that count what operators want to see beside what the SDK counts."""

    def counters(self) -> Mapping[str, int]:
        """Totals since it was opened; and, under names that end in `_now`, what is so at the moment.

        From memory, from any thread, also after `close`. The names, of `a-z 0-9 _`, are the same each time and few, as each becomes a
        series of metrics; more than 64 are not shown.
        """
        ...
