"""Which peer was found to have a record."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass

from kvstore_sdk_backends.p2p.link import Link
from kvstore_sdk_backends.p2p.peer import Peer

__all__ = ["Place", "Places"]

MAX_PLACES = 65_536
"""About 20 MiB. The oldest are forgotten first, and looked up again."""
KEPT_S = 60.0
"""A load follows its look-up within seconds. What is asked for later may have moved."""


@dataclass(frozen=True, slots=True)
class Place:
    """The session in which a peer said that it has the record, and how long that was."""

    peer: Peer
    link: Link
    size_bytes: int
    until_s: float


class Places:
    """By name. All of it belongs to the loop."""

    def __init__(self, max_places: int = MAX_PLACES) -> None:
        self._max_places = max_places
        self._places: OrderedDict[str, Place] = OrderedDict()

    def note(self, name: str, peer: Peer, link: Link, size_bytes: int) -> None:
        self._places[name] = Place(peer, link, size_bytes, time.monotonic() + KEPT_S)
        self._places.move_to_end(name)
        while len(self._places) > self._max_places:
            self._places.popitem(last=False)

    def of(self, name: str) -> Place | None:
        """Where it is; None where that is not known, or the session in which it was known is over."""
        place = self._places.get(name)
        if place is not None and (place.link.ended or place.until_s < time.monotonic()):
            del self._places[name]
            return None
        return place

    def forget(self, name: str) -> Peer | None:
        """Returns who had it, also where the session in which that was known is over."""
        place = self._places.pop(name, None)
        return place.peer if place is not None else None

    def clear(self) -> None:
        self._places.clear()

    def __len__(self) -> int:
        return len(self._places)
