"""What a Tier's threads find out about keys, on its way to the engine's thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore_sdk.tier.lookups import LookupTable
from kvstore_sdk.tier.probe import Probe
from kvstore_sdk.tier.types import TierEvent

__all__ = ["Answered", "Inbox", "Lost", "News", "Stored"]

_MAX_EVENTS = 65_536
"""Events that nobody takes are dropped beyond this, oldest first."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The backend's answers to keys of a probe: those that are there, those that are not, and those that it said nothing of."""

    probe: Probe
    present: Sequence[bytes] = ()
    absent: Sequence[bytes] = ()
    unknown: Sequence[bytes] = ()


@dataclass(frozen=True, slots=True)
class Stored:
    """Records are visible under these keys: those that this tier wrote, and those that a store found."""

    namespace: str
    fresh: tuple[bytes, ...]
    there: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Lost:
    """A load failed. `bad`: the record is there, and no good. `gone`: it is certain that nobody can load it."""

    namespace: str
    key: bytes
    bad: bool
    gone: bool


News = Answered | Stored | Lost


class Inbox:
    """Any thread tells; the engine's hears, which takes the news into the table of look-ups and makes events of them.

    Attributes:
        waiting: News that were not heard yet, oldest first. Looked at by the engine's thread before it pays for `hear`.
        urgent: Whether there is one among them that a request may wait for: an answer, or a loss.
    """

    def __init__(self, table: LookupTable, *, events: bool) -> None:
        self._table = table
        self._wants_events = events
        self._events: deque[TierEvent] = deque(maxlen=_MAX_EVENTS)
        self.waiting: deque[News] = deque()
        self.urgent = False

    def tell(self, news: News) -> None:
        self.waiting.append(news)
        if not isinstance(news, Stored):
            self.urgent = True

    def hear(self, namespace: str) -> None:
        """Take in what the threads found out, in order; what was stored by one batch after another is taken in together.

        Args:
            namespace: The present one: what concerns another is no news any more.
        """
        table, waiting = self._table, self.waiting
        self.urgent = False
        fresh: tuple[bytes, ...] = ()
        there: tuple[bytes, ...] = ()
        while waiting:
            said = waiting.popleft()
            if isinstance(said, Stored):
                if said.namespace == namespace:
                    fresh += said.fresh
                    there += said.there
                if waiting:
                    continue
            if fresh or there:
                if fresh:
                    table.stored(fresh)
                    self._note(fresh, removed=False)
                if there:
                    table.seen(there)
                fresh = there = ()
            if isinstance(said, Answered):
                for keys, present in ((said.present, True), (said.absent, False), (said.unknown, None)):
                    if keys:
                        for key in table.answer(said.probe, keys, present):
                            self._note((key,), removed=True)
            elif isinstance(said, Lost) and said.namespace == namespace and table.lost(said.key, bad=said.bad, gone=said.gone):
                self._note((said.key,), removed=True)

    def take_events(self) -> list[TierEvent]:
        events = list(self._events)
        self._events.clear()
        return events

    def _note(self, keys: tuple[bytes, ...], *, removed: bool) -> None:
        if self._wants_events:
            self._events.append(TierEvent(keys, removed))
