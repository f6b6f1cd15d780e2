"""What a request was told, wants, and holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import islice

from kvstore_sdk.backend import Hint
from kvstore_sdk.host import HostTier, Pin, Slot
from kvstore_sdk.store.types import HOST
from kvstore_sdk.tier import Lookup

__all__ = ["Holds", "PendingLookup", "Request"]

_QUOTA = 64
"""Hits that a request may add before `Holds` is asked again: room for so many is kept from others until the next `settle`."""


class PendingLookup:
    """A chunk that a request was told PENDING for.

    Attributes:
        asked_s: When it was first looked up, or when the tier that had it failed to bring it.
        no_room_s: When host memory had no room for it for the first time; 0.0 before.
        answers: What each tier said, by its place in the list.
        place: The tier that it is to come from; -1 before one was found.
        placed_s: When that tier was found.
    """

    __slots__ = ("answers", "asked_s", "key", "no_room_s", "place", "placed_s")

    def __init__(self, key: bytes, asked_s: float) -> None:
        self.key = key
        self.asked_s = asked_s
        self.no_room_s = 0.0
        self.answers: dict[int, Lookup] = {}
        self.place = -1
        self.placed_s = 0.0


class Request:
    """One request.

    Attributes:
        places: The tiers that it may load from, in the order of the list.
        hint: Whom it names as the one that has its chunks.
        told: Keys that it was told HIT for, and the name of the tier that had them. What is fresh is not in it yet.
        missed: Keys that it was told MISS for, which it hears for good.
        held: Its hits, which stay in host memory until it loads them or lets go. Those after the first `settled` are fresh: no pin holds
            them yet.
        quota: So many hits it may add without asking `Holds`; 0 while it wants or missed something, so that one look at it is enough.
        pins: Of its other hits.
        held_since_s: When it came to hold something.
        wants: What it was told PENDING for, in the order it asked.
        promoting: How many promotions it waits for.
        chain: What it loaded and stored since it began or started over, in order.
        earlier: The same of the time before.
        asked: Whether tiers know of it.
        refused: Keys that host memory had no room for when they were to be stored; each is counted once.
        rests: What it held was let go because it took too long. It holds nothing before the next step, so that others may have the room.
    """

    __slots__ = (
        "asked",
        "chain",
        "earlier",
        "held",
        "held_since_s",
        "hint",
        "id",
        "missed",
        "pins",
        "places",
        "promoting",
        "quota",
        "refused",
        "rests",
        "settled",
        "told",
        "wants",
    )

    def __init__(self, request_id: str, places: tuple[int, ...], hint: Hint | None = None) -> None:
        self.id = request_id
        self.places = places
        self.hint = hint
        self.told: dict[bytes, str] = {}
        self.missed: set[bytes] = set()
        self.held: dict[bytes, Slot] = {}
        self.settled = 0
        self.quota = 0
        self.pins: list[Pin] = []
        self.held_since_s = 0.0
        self.wants: dict[bytes, PendingLookup] = {}
        self.promoting = 0
        self.chain: dict[bytes, None] = {}
        self.earlier: dict[bytes, None] = {}
        self.asked = False
        self.refused: set[bytes] = set()
        self.rests = False

    @property
    def waits(self) -> bool:
        """Whether a tier may wait for what is not there yet."""
        return self.hint is not None and self.hint.wait_s > 0

    @property
    def may_wait_for_room(self) -> bool:
        """Whoever holds or is being brought something must not wait for more: two such requests could wait for each other."""
        return not self.held and not self.promoting


class Holds:
    """Keeps hits in host memory until they are loaded.

    A hit is free of charge until something could evict it: whoever is about to take slots or background pins calls `settle` first, which
    pins what is fresh. A request that looks up and loads in one step is pinned once, by its load.

    Attributes:
        largest_record: Length of the largest slot.
        room: So many hits may be added before the host tier has to be asked.
        now_s: Set by the owner at least once a step.
        hits: Hits of chunks that were in host memory already, and that nobody has counted yet.
        on_hits: Is told of them, once for each request and chunk, with the request and the keys.
    """

    def __init__(self, host: HostTier, largest_record: int) -> None:
        self._host = host
        self.largest_record = largest_record
        self._fresh: deque[Request] = deque()
        self._holding: dict[str, Request] = {}
        self.room = 0
        self.now_s = 0.0
        self.hits = 0
        self.on_hits: Callable[[Request, Collection[bytes]], None] = lambda request, keys: None

    def __len__(self) -> int:
        """Requests that hold something."""
        return len(self._holding)

    def hold(self, request: Request, slot: Slot) -> bool:
        """Keep a READY slot for a request. False: there is no room for more that waits."""
        if self.room < 1:
            self.settle()
            self.room = self._host.background_room_bytes // self.largest_record
            if self.room < 1:
                # It may be held already, by somebody else: then it costs nothing more.
                return self._pin(request, (slot,)) and self._note(request, (slot.key,))
        self.room -= 1
        if request.settled == len(request.held):
            self._fresh.append(request)
            self._keep(request)
        request.held[slot.key] = slot
        if not (request.wants or request.missed):
            request.quota = min(self.room, _QUOTA)
            self.room -= request.quota
        return True

    def bring(self, request: Request, slots: Sequence[Slot]) -> bool:
        """Keep slots that a promotion filled, which are about to be READY. After `settle`. False: there was no room after all."""
        return self._pin(request, slots)

    def settle(self) -> None:
        """Pin what is fresh. Called before anything that could evict it or take its room."""
        self.room = 0
        while self._fresh:
            request = self._fresh.popleft()
            slots = self._take_fresh(request)
            if not slots:
                continue
            # Until they are pinned they are no hits. There was room for them when they were told; if there is none now, they are looked up
            # again.
            for slot in slots:
                del request.held[slot.key]
            request.settled = len(request.held)
            if not self._pin(request, slots):
                for slot in slots:
                    self._pin(request, (slot,))

    def release(self, request: Request) -> None:
        """The request holds nothing any more."""
        self._holding.pop(request.id, None)
        # It stays in `_fresh`, where it is found to have nothing.
        self._take_fresh(request)
        request.held.clear()
        request.settled = 0
        pins, request.pins = request.pins, []
        for pin in pins:
            self._host.unpin(pin)
        self.room = 0

    def take_back(self, fits: Callable[[], bool]) -> list[Request]:
        """Let go what requests hold, what was held the longest first, until something fits. When it never does, all hold what they held.
        After `settle`.

        Returns:
            The requests that hold nothing any more.
        """
        asked: list[Request] = []
        for request in list(self._holding.values()):
            for pin in request.pins:
                self._host.unpin(pin)
            asked.append(request)
            if fits():
                for each in asked:
                    each.pins = []
                    self.release(each)
                return asked
        for request in asked:
            # There is room: they had it a moment ago.
            request.pins = [again for pin in request.pins if (again := self._host.pin(pin.slots, True)) is not None]
        return []

    def overdue(self, before_s: float) -> list[Request]:
        """The requests that have held something since before this time."""
        found = []
        for request in self._holding.values():
            if request.held_since_s > before_s:
                break
            found.append(request)
        return found

    def _take_fresh(self, request: Request) -> list[Slot]:
        """What was held since the last time; counted, and from now on told."""
        request.quota = 0
        held = request.held
        if request.settled == len(held):
            return []
        fresh = dict(islice(held.items(), request.settled, None))
        request.settled = len(held)
        self._note(request, fresh)
        return list(fresh.values())

    def _note(self, request: Request, keys: Collection[bytes]) -> bool:
        told = request.told
        fresh = [key for key in keys if key not in told] if told else keys
        told.update(dict.fromkeys(fresh, HOST))
        self.hits += len(fresh)
        self.on_hits(request, fresh)
        return True

    def _pin(self, request: Request, slots: Sequence[Slot]) -> bool:
        """After `settle`: what is pinned comes before what is fresh."""
        pin = self._host.pin(slots, True)
        if pin is None:
            return False
        self._keep(request)
        request.pins.append(pin)
        request.held.update((slot.key, slot) for slot in slots)
        request.settled = len(request.held)
        return True

    def _keep(self, request: Request) -> None:
        if request.id not in self._holding:
            self._holding[request.id] = request
            request.held_since_s = self.now_s
