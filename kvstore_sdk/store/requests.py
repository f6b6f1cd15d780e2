"""What a request was told, wants, and holds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, zip_longest

from kvstore_sdk.host import HostTier, Pin, Slot
from kvstore_sdk.keys import GROUP_BYTES
from kvstore_sdk.tier import Lookup

__all__ = ["Holds", "Request", "Want", "in_chain_order"]


class Want:
    """A chunk that a request was told PENDING for.

    Attributes:
        asked_s: When it was first looked up.
        no_room_s: When host memory had no room for it for the first time; 0.0 before.
        answers: What each tier said, by its place in the list.
        place: The tier that it is to come from; -1 before one was found.
    """

    __slots__ = ("answers", "asked_s", "key", "no_room_s", "place")

    def __init__(self, key: bytes, asked_s: float) -> None:
        self.key = key
        self.asked_s = asked_s
        self.no_room_s = 0.0
        self.answers: dict[int, Lookup] = {}
        self.place = -1


class Request:
    """One request.

    Attributes:
        places: The tiers that it may load from, in the order of the list.
        told: Keys that it was told HIT for, and the name of the tier that had them.
        missed: Keys that it was told MISS for, which it hears for good.
        held: Its hits, which stay in host memory until it loads them or lets go.
        fresh: Slots of hits that are not pinned yet.
        pins: Of its other hits.
        held_since_s: When it came to hold something.
        wants: What it was told PENDING for, in the order it asked.
        promoting: How many promotions it waits for.
        chain: What it loaded and stored, in order.
        asked: Whether tiers know of it.
    """

    __slots__ = ("asked", "chain", "fresh", "held", "held_since_s", "id", "missed", "pins", "places", "promoting", "told", "wants")

    def __init__(self, request_id: str, places: tuple[int, ...]) -> None:
        self.id = request_id
        self.places = places
        self.told: dict[bytes, str] = {}
        self.missed: set[bytes] = set()
        self.held: dict[bytes, Slot] = {}
        self.fresh: list[Slot] = []
        self.pins: list[Pin] = []
        self.held_since_s = 0.0
        self.wants: dict[bytes, Want] = {}
        self.promoting = 0
        self.chain: dict[bytes, None] = {}
        self.asked = False

    @property
    def may_wait_for_room(self) -> bool:
        """Whoever holds or is being brought something must not wait for more: two such requests could wait for each other."""
        return not self.held and not self.promoting


class Holds:
    """Keeps hits in host memory until they are loaded.

    A hit is free of charge until something could evict it: whoever is about to take slots or background pins calls `settle` first, which
    pins what is fresh. A request that looks up and loads in one step is pinned once, by its load.

    Attributes:
        room: So many hits may be added before the host tier has to be asked.
        now_s: Set by the owner at least once a step.
    """

    def __init__(self, host: HostTier, largest_record: int) -> None:
        self._host = host
        self._largest_record = largest_record
        self._fresh: list[Request] = []
        self._holding: dict[str, Request] = {}
        self.room = 0
        self.now_s = 0.0

    def __len__(self) -> int:
        """Requests that hold something."""
        return len(self._holding)

    def hold(self, request: Request, slot: Slot) -> bool:
        """Keep a READY slot for a request. False: there is no room for more that waits."""
        if self.room < 1:
            self.settle()
            self.room = self._host.background_room_bytes // self._largest_record
            if self.room < 1:
                # It may be held already, by somebody else: then it costs nothing more.
                pin = self._host.pin((slot,), True)
                if pin is None:
                    return False
                self._keep(request)
                request.held[slot.key] = slot
                request.pins.append(pin)
                return True
        self.room -= 1
        if not request.fresh:
            self._fresh.append(request)
            self._keep(request)
        request.held[slot.key] = slot
        request.fresh.append(slot)
        return True

    def bring(self, request: Request, slots: Sequence[Slot]) -> bool:
        """Keep slots that a promotion filled, which are about to be READY. False: there was no room after all."""
        pin = self._host.pin(slots, True)
        if pin is None:
            return False
        self._keep(request)
        request.held.update((slot.key, slot) for slot in slots)
        request.pins.append(pin)
        return True

    def settle(self) -> None:
        """Pin what is fresh. Called before anything that could evict it or take its room."""
        self.room = 0
        if not self._fresh:
            return
        fresh, self._fresh = self._fresh, []
        for request in fresh:
            slots, request.fresh = request.fresh, []
            if not slots:
                continue
            pin = self._host.pin(slots, True)
            if pin is not None:
                request.pins.append(pin)
                continue
            # There was room for them when they were told; if there is none now, they are looked up again.
            for slot in slots:
                if (one := self._host.pin((slot,), True)) is not None:
                    request.pins.append(one)
                else:
                    request.held.pop(slot.key, None)

    def release(self, request: Request) -> None:
        """The request holds nothing any more."""
        self._holding.pop(request.id, None)
        request.held.clear()
        # A new list: the old one may be in `_fresh`, whose owner finds this one empty.
        request.fresh = []
        pins, request.pins = request.pins, []
        for pin in pins:
            self._host.unpin(pin)
        self.room = 0

    def overdue(self, before_s: float) -> list[Request]:
        """The requests that have held something since before this time."""
        found = []
        for request in self._holding.values():
            if request.held_since_s > before_s:
                break
            found.append(request)
        return found

    def _keep(self, request: Request) -> None:
        if request.id not in self._holding:
            self._holding[request.id] = request
            request.held_since_s = self.now_s


def in_chain_order(keys: Sequence[bytes]) -> list[bytes]:
    """Keys of several groups, each group's in the order of its chain, as one chain: what belongs to the same tokens stays together."""
    groups: dict[bytes, list[bytes]] = {}
    for key in keys:
        groups.setdefault(key[-GROUP_BYTES:], []).append(key)
    if len(groups) < 2:
        return list(keys)
    return [key for key in chain.from_iterable(zip_longest(*groups.values())) if key is not None]
