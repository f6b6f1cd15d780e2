"""Optional surfaces of backends that give records to others while the engine is busy, and ask whom a request names.

The methods of `SupportsServe`, `SupportsIdentity`, `SupportsHints` and `SupportsReports` are called from any thread of the SDK's, and must
not wait. Whatever one raises is logged and survived.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvstore_sdk.backend.region import Buffer
from kvstore_sdk.errors import ConfigError

__all__ = ["Hint", "Loan", "RecordSource", "SupportsHints", "SupportsIdentity", "SupportsReports", "SupportsServe"]

_LONGEST_WAIT_S = 86_400.0
_LONGEST_PEER = 1024


class Loan(Protocol):
    """A record that stays where it is until it is given back to its source."""

    @property
    def name(self) -> str:
        """Of the record."""
        ...

    @property
    def buffer(self) -> Buffer:
        """The whole record. To be read only, and not before `seal` said True."""
        ...

    def seal(self) -> bool:
        """Put header page and checksum in place, if they are not yet: up to some ms of work on this thread. To be called before any byte
        is sent; thread-safe, and harmless when it is done twice.

        Returns:
            False: the record is no good any more, and must not be sent.
        """
        ...


class RecordSource(Protocol):
    """Records in the engine's host memory that may be given to others. Thread-safe; raises nothing; answers in microseconds, or some ms
    while the engine's own thread is at the same books, and has nothing while the engine is being reset or closed.

    Whatever is lent is given back, each loan once and to the source that lent it; before `Backend.close` returns, all of it: memory that is
    still lent then cannot be let go for as long as the process lives.
    """

    @property
    def namespace(self) -> str:
        """Of all names that it has. Changes when the engine's cache is reset; then `SupportsIdentity` hears it first."""
        ...

    @property
    def layout(self) -> str:
        """Of all its records."""
        ...

    def sizes(self, names: Sequence[str]) -> list[int]:
        """For each name the length of the record that is whole and ready now, or 0. A hint: it may be gone a moment later."""
        ...

    def lend(self, names: Sequence[str]) -> list[Loan | None]:
        """For each name its record, kept until it is given back. None: it is not there, or no more may be kept now."""
        ...

    def give_back(self, loans: Sequence[Loan]) -> None:
        """Nothing reads these any more. One that was given back before is passed over, and counted."""
        ...


@runtime_checkable
class SupportsServe(Protocol):
    """For backends through which other processes read what is in host memory."""

    def serve(self, source: RecordSource) -> None:
        """Serve these records until `close`, from threads of the backend. Called at most once, after `use_identity` and `register_region`
        of the memory that the records lie in, before the first request."""
        ...


@runtime_checkable
class SupportsIdentity(Protocol):
    """For backends that must know whose records they hold, to refuse what could not use them."""

    def use_identity(self, namespace: str, layout: str) -> None:
        """What names and records are of from now on. Called before anything else, and again after the engine's cache was reset, before
        anything of the new namespace is stored, looked up or served."""
        ...


@dataclass(frozen=True, slots=True)
class Hint:
    """Whom a request names as the one that has its records, or is about to.

    Attributes:
        peer: An address, in whatever form the backend knows. Whoever made the request wrote it.
        wait_s: How long `exists` may wait for records that are not there yet; 0 for not at all.
        until: Set by a Tier where `wait_s` is not 0: names of the records to wait for, and of these the last one comes last, or nearly so.
            Empty: wait for all.

    Raises:
        ConfigError: the address is empty or longer than 1,024 characters, the time is negative or longer than a day, or `until` is no
            tuple of names.
    """

    peer: str
    wait_s: float = 0.0
    until: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.peer, str) or not 0 < len(self.peer) <= _LONGEST_PEER:
            raise ConfigError("hint", "peer", f"must be an address of 1 to {_LONGEST_PEER} characters")
        number = isinstance(self.wait_s, (int, float)) and not isinstance(self.wait_s, bool)
        if not number or not math.isfinite(self.wait_s) or not 0 <= self.wait_s <= _LONGEST_WAIT_S:
            raise ConfigError("hint", "wait_s", f"must be a number of seconds from 0 to {_LONGEST_WAIT_S:.0f}")
        if not isinstance(self.until, tuple) or not all(isinstance(name, str) for name in self.until):
            raise ConfigError("hint", "until", "must be a tuple of names of records")


@runtime_checkable
class SupportsHints(Protocol):
    """For backends that can ask whom a request names."""

    def hint(self, names: Sequence[str], hint: Hint) -> None:
        """Whom to ask, and how long to wait, in the `exists` of these names that follows on this thread. That one has a deadline of half a
        second more than `wait_s` at least, but for what it had to wait for a thread; not there by then is False, and no failure."""
        ...


@runtime_checkable
class SupportsReports(Protocol):
    """For backends that have a record from one of several places, and can go elsewhere when it is no good."""

    def report_corrupt(self, names: Sequence[str]) -> None:
        """What the last `get` of each of these names gave as FOUND failed its verification. A second `get` may follow at once, and is as
        good as a place that has it whole."""
        ...
