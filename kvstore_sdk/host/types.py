"""What a HostTier hands out: slots, pins, and numbers about itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from kvstore_sdk.format import record_bytes
from kvstore_sdk.host.policy import EvictionPolicy
from kvstore_sdk.host.slots import SizeClass, Slab

__all__ = ["GroupBooks", "GroupStats", "HostStats", "Pin", "Purpose", "SizeBooks", "Slot", "SlotState"]


class SlotState(Enum):
    """What may be done with the memory of a slot."""

    FILLING = "filling"
    """It is being written, and is nobody's to read."""
    READY = "ready"
    """It holds its chunk."""
    QUARANTINED = "quarantined"
    """It holds no chunk, but a late call or the owner of a pin may still touch it."""
    FREE = "free"
    """The memory is no longer this slot's. The object is out of date, and every call with it is without effect."""


class Purpose(Enum):
    """Why slots are taken."""

    STORE = "store"
    """A running request's chunks come from the engine."""
    PROMOTION = "promotion"
    """Chunks come from a lower tier, for a request that waits."""


class SizeBooks:
    """One slot size: its slots, and the order in which its chunks leave."""

    __slots__ = ("batch", "engine_only", "evicted", "evicted_used_at", "groups", "policy", "size_class")

    def __init__(self, size_class: SizeClass, policy: EvictionPolicy) -> None:
        self.size_class = size_class
        self.policy = policy
        self.groups: list[GroupBooks] = []
        # Free slots that only a store of the engine may take.
        self.engine_only: list[tuple[Slab, int]] = []
        # Keys of one call, in the caller's order, on their way to the policy.
        self.batch: list[bytes] = []
        # Evictions since this size was last compared with the others.
        self.evicted = 0
        # When the last chunk that was evicted had been used.
        self.evicted_used_at = 0

    @property
    def idle(self) -> int:
        """Chunks that could be evicted now."""
        return sum(books.idle for books in self.groups)


class GroupBooks:
    """One KV cache group: what its chunks have in common, and how many there are."""

    __slots__ = (
        "charge_bytes",
        "evictions",
        "filling",
        "group",
        "hits",
        "idle",
        "payload_bytes",
        "quarantined",
        "record_bytes",
        "size",
        "used",
    )

    def __init__(self, group: int, payload_bytes: int, size: SizeBooks) -> None:
        self.group = group
        self.payload_bytes = payload_bytes
        self.record_bytes = record_bytes(payload_bytes)
        # What one of them counts against the reserve.
        self.charge_bytes = size.size_class.charge_bytes
        self.size = size
        self.used = self.filling = self.idle = self.quarantined = self.evictions = self.hits = 0

    def stats(self) -> GroupStats:
        """The numbers of this moment, for whoever is outside."""
        return GroupStats(
            slots=self.size.size_class.most,
            used=self.used,
            pinned=self.used - self.filling - self.quarantined - self.idle,
            filling=self.filling,
            quarantined=self.quarantined,
            used_bytes=self.used * self.record_bytes,
            evictions=self.evictions,
            hits=self.hits,
        )


class Slot:
    """A chunk's place in host memory. Made by `HostTier.admit`; a place that is taken again is another Slot.

    Attributes:
        key: The engine's key of the chunk.
        number: Of the place, from 0 to `HostTier.row_count` - 1. A number has one offset and one length for good.
        offset: Of the record's first byte in the region. The payload begins `kvstore_sdk.format.HEADER_BYTES` after it.
        state: What may be done with the memory.
        pins: How many pins hold it.
        sealed: Whether its header page and checksum are in place. Set by whoever seals it.
        source: "engine", or the name of the tier that the chunk came from. Set by whoever fills it.
        resident: Whether `get` finds it.
        engine_only: Its memory may still be written by a transfer that the engine forgot.
    """

    __slots__ = (
        "background",
        "books",
        "engine_only",
        "held",
        "index",
        "key",
        "number",
        "offset",
        "pins",
        "promoting",
        "resident",
        "sealed",
        "slab",
        "source",
        "state",
        "used_at",
    )

    def __init__(self, key: bytes, books: GroupBooks, slab: Slab, index: int, promoting: bool, engine_only: bool, used_at: int) -> None:
        size_class = books.size.size_class
        self.key = key
        self.books = books
        self.slab = slab
        self.index = index
        self.number = slab.first + size_class.first + index
        self.offset = slab.start + index * size_class.size_bytes
        self.state = SlotState.FILLING
        self.pins = 0
        # In quarantine until `release`.
        self.held = False
        self.promoting = promoting
        # Pins that count against the reserve, and one for a promotion until it ends.
        self.background = 1 if promoting else 0
        self.used_at = used_at
        self.resident = True
        self.engine_only = engine_only
        self.sealed = False
        self.source = "engine"

    @property
    def group(self) -> int:
        """Number of the KV cache group."""
        return self.books.group

    @property
    def payload_bytes(self) -> int:
        """Length of the chunk."""
        return self.books.payload_bytes

    @property
    def record_bytes(self) -> int:
        """Length of the slot: header page, payload and padding."""
        return self.books.record_bytes

    def __repr__(self) -> str:
        return f"Slot({self.number}, {self.key.hex()}, {self.state.value}, pins={self.pins})"


class Pin:
    """Slots that stay as they are until `HostTier.unpin`.

    Attributes:
        slots: Which.
        background: Whether it counts against the reserve.
        released: Whether it was unpinned.
    """

    __slots__ = ("background", "released", "slots")

    def __init__(self, slots: tuple[Slot, ...], background: bool) -> None:
        self.slots = slots
        self.background = background
        self.released = False

    def __repr__(self) -> str:
        return f"Pin({len(self.slots)} slots, background={self.background}, released={self.released})"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStats:
    """One KV cache group in host memory.

    Attributes:
        slots: How many of its chunks there could be if there were no others.
        used: Slots in use, by whatever state.
        pinned: Of those, complete ones that cannot be evicted now.
        filling: Of those, being written.
        quarantined: Of those, nobody's, and waiting for a late call.
        used_bytes: Of the slots in use, header and padding included.
        evictions: Chunks evicted so far.
        hits: Chunks that transfers to the engine were served from so far. What look-ups were told, a TieredStore counts.
    """

    slots: int
    used: int
    pinned: int
    filling: int
    quarantined: int
    used_bytes: int
    evictions: int
    hits: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStats:
    """A HostTier in numbers.

    Attributes:
        groups: By the number of the KV cache group.
        capacity_bytes: Of all slots.
        used_bytes: Of the slots in use.
        reserve_bytes: What promotions and background pins leave to running stores.
        background_bytes: What they hold.
        engine_only_slots: Free, for stores of the engine alone.
        no_room: By purpose, how often there was none.
        refused_pins: Background pins that would have taken the reserve.
        double_releases: Pins released a second time; that changed nothing.
    """

    groups: Mapping[int, GroupStats]
    capacity_bytes: int
    used_bytes: int
    reserve_bytes: int
    background_bytes: int
    engine_only_slots: int
    no_room: Mapping[Purpose, int]
    refused_pins: int
    double_releases: int

    @property
    def free_bytes(self) -> int:
        """Of the slots that are not in use, and of what lies between them."""
        return self.capacity_bytes - self.used_bytes
