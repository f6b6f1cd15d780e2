"""What is told of the changes in host memory and in tiers."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence

from kvstore_sdk.store.types import HOST, StoreEvent, StoreTier

__all__ = ["Events"]

logger = logging.getLogger(__name__)

_MAX_EVENTS = 65_536
"""Events that nobody takes are dropped beyond this, oldest first."""


class Events:
    """Keeps events until they are taken, if they are wanted. Used under the store's lock.

    Of host memory it knows which chunks it announced, so that each one's coming and going is told once and in this order. Tiers keep
    theirs by themselves.
    """

    def __init__(self, tiers: Sequence[StoreTier], *, wanted: bool) -> None:
        self._tiers = tiers
        self._wanted = wanted
        self._announced: set[bytes] = set()
        self._events: deque[StoreEvent] = deque(maxlen=_MAX_EVENTS)

    def came(self, keys: Iterable[bytes]) -> None:
        """Chunks became readable in host memory."""
        if self._wanted and (fresh := tuple(key for key in keys if key not in self._announced)):
            self._announced.update(fresh)
            self._events.append(StoreEvent(fresh, False, HOST))

    def went(self, keys: Iterable[bytes]) -> None:
        """Chunks are in host memory no more."""
        if self._wanted and (gone := tuple(key for key in keys if key in self._announced)):
            self._announced.difference_update(gone)
            self._events.append(StoreEvent(gone, True, HOST))

    def forget(self) -> None:
        """Host memory was emptied, and no tier has a chunk that anybody here may load any more. What tiers told before, and nobody took, is
        told no more: it would come after the engine's own word that everything is cleared."""
        self.went(sorted(self._announced))
        self._take_from_tiers()

    def take(self) -> list[StoreEvent]:
        """The events since the last call, those of each place in order."""
        if not self._wanted:
            return []
        events = list(self._events)
        self._events.clear()
        return events + self._take_from_tiers()

    def _take_from_tiers(self) -> list[StoreEvent]:
        events: list[StoreEvent] = []
        for below in self._tiers:
            try:
                events += [StoreEvent(event.keys, event.removed, below.name, below.locality) for event in below.tier.take_events()]
            except Exception:
                logger.exception("%s: a tier's events are lost", below.name)
        return events
