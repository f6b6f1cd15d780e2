"""Host memory as a cache of records."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal, overload

from kvstore_sdk.backend import Buffer, Region
from kvstore_sdk.errors import ConfigError
from kvstore_sdk.format import record_bytes
from kvstore_sdk.host.chunks import Chunks
from kvstore_sdk.host.slots import Slab, SlotPool
from kvstore_sdk.host.types import HostStats, Pin, Purpose, SizeBooks, Slot, SlotState
from kvstore_sdk.keys import GROUP_BYTES

__all__ = ["HostTier"]

_WHERE = "host tier"
_FILLING, _READY, _QUARANTINED, _FREE = SlotState.FILLING, SlotState.READY, SlotState.QUARANTINED, SlotState.FREE


class HostTier:
    """Chunks in the slots of a region. A slot is a record, and this the `RecordMemory` of tiers below.

    It keeps the books and touches no byte of the region. It has neither thread nor lock: its owner calls it from one thread at a time, but
    `record`, `payload_bytes` and `row_count` from any. All calls cost the same however many chunks are resident or pinned.

    A chunk is found by `get` from `admit` until it is evicted, removed, discarded or quarantined, or all is `reset`. Its slot is free
    once it is not found, not being filled, not in quarantine and not pinned.

    Attributes:
        region: Where the slots lie.
        get: The slot of a chunk, READY or FILLING; None if it is not there. It is read for every chunk of every look-up, and costs no more
            than a dict.
    """

    get: Callable[[bytes], Slot | None]

    def __init__(
        self,
        region: Region,
        payload_bytes: Mapping[int, int],
        *,
        start: int = 0,
        policy: str = "lru",
        reserve_bytes: int | None = None,
    ) -> None:
        """Divide a region into slots; `stats` says into how many.

        Args:
            region: Where the slots lie. Stays the caller's.
            payload_bytes: By KV cache group, the length of its chunks.
            start: Offset of the first slot, a multiple of 4,096.
            policy: Which chunk leaves first: "lru", "arc", or "module:factory".
            reserve_bytes: What promotions and background pins may not take from running stores; a quarter by default, and room for one
                record at least.

        Raises:
            ConfigError: there is room for fewer than two records of the largest group, the reserve leaves no room for one, or the policy
                cannot be opened.
        """
        if not payload_bytes or any(length < 1 or not 0 <= group < 2**32 for group, length in payload_bytes.items()):
            raise ConfigError(_WHERE, "payload_bytes", f"{dict(payload_bytes)} must map groups to lengths of 1 or more")
        self.region = region
        largest = max(record_bytes(length) for length in payload_bytes.values())
        pool = SlotPool(start, region.size_bytes - start, {record_bytes(length) for length in payload_bytes.values()})
        if pool.capacity_bytes < 2 * largest:
            raise ConfigError(
                _WHERE,
                "size_bytes",
                f"{region.size_bytes - start} bytes hold fewer than two records of {largest} bytes, the largest of a chunk; "
                f"give it {2 * largest} bytes at least, or make chunks smaller",
            )
        charge = pool.size_classes[largest].charge_bytes
        reserve = max(charge, pool.capacity_bytes // 4) if reserve_bytes is None else reserve_bytes
        if not 0 <= reserve <= pool.capacity_bytes - charge:
            problem = f"{reserve} must be from 0 to {pool.capacity_bytes - charge}, so that one record of {largest} bytes can be promoted"
            raise ConfigError(_WHERE, "reserve_bytes", problem)
        self._pool = pool
        self._chunks = Chunks(pool, payload_bytes, policy)
        self._sizes, self._slots = self._chunks.sizes, self._chunks.slots
        self.get = self._slots.get
        self._lengths = dict(payload_bytes)
        self._several = pool.several
        self._background_bytes = 0
        self._background_most = pool.capacity_bytes - reserve
        self._no_room = dict.fromkeys(Purpose, 0)
        self._refused_pins = 0
        self._double_releases = 0

    # --- what a Tier needs of memory whose rows are records ---

    @property
    def row_count(self) -> int:
        """All slot numbers are below it. Where groups differ in size, many of them are never in use at the same time."""
        return self._pool.slot_numbers

    def payload_bytes(self, group: int) -> int | None:
        """Length of a chunk of `group`; None for a group that has no slots here."""
        return self._lengths.get(group)

    def record(self, row: int) -> Buffer:
        """The whole record in the slot with this number.

        Raises:
            ValueError: there is no such slot.
        """
        offset, length = self._pool.place(row)
        return Buffer(self.region, offset, length)

    # --- chunks ---

    @property
    def background_room_bytes(self) -> int:
        """How many bytes of records promotions and background pins may take before one is refused; with several sizes a lower bound."""
        room = self._background_most - self._background_bytes
        return min(room * size_class.size_bytes // size_class.charge_bytes for size_class in self._pool.size_classes.values())

    @property
    def capacity_bytes(self) -> int:
        """Of all slots."""
        return self._pool.capacity_bytes

    @property
    def several_sizes(self) -> bool:
        """Whether slots differ in size: then one that is pinned keeps a whole slab from the other sizes."""
        return self._several

    @property
    def used_bytes(self) -> int:
        """Of the slots in use, header and padding included."""
        return sum(books.used * books.record_bytes for books in self._chunks.groups.values())

    def __len__(self) -> int:
        """How many chunks `get` finds."""
        return len(self._slots)

    def exceeds_reserve(self, keys: Sequence[bytes]) -> bool:
        """Whether slots for all of them are more than what is kept for running stores.

        Raises:
            KeyError: a key is of a group that has no slots here.
        """
        return sum(self._chunks.books_of(key).charge_bytes for key in keys) > self._pool.capacity_bytes - self._background_most

    def admit(self, keys: Sequence[bytes], purpose: Purpose, protect: Collection[bytes] = ()) -> list[Slot] | None:
        """Take slots for the chunks that are not resident, all or none.

        Chunks that are neither pinned nor protected make room. They are evicted only once it is known that there will be enough.

        Args:
            keys: Engine's keys. Those that are resident, or that come a second time, are passed over; resident ones are not evicted for
                the others.
            purpose: A promotion leaves the reserve alone.
            protect: Keys that must not be evicted for this.

        Returns:
            FILLING slots in the order of `keys`, or None: no room now.

        Raises:
            KeyError: a key is of a group that has no slots here.
        """
        chunks, slots, groups = self._chunks, self._slots, self._chunks.groups
        fresh = [(key, groups.get(key[-GROUP_BYTES:]) or chunks.books_of(key)) for key in dict.fromkeys(keys) if key not in slots]
        needs: dict[SizeBooks, int] = {}
        for _, books in fresh:
            needs[books.size] = needs.get(books.size, 0) + 1
        store = purpose is Purpose.STORE
        charge = 0 if store else sum(size.size_class.charge_bytes * count for size, count in needs.items())
        if charge and self._background_bytes + charge > self._background_most:
            self._no_room[purpose] += 1
            return None
        protected: Collection[bytes] = ()
        if any(size.size_class.free < count for size, count in needs.items()):
            protected = {*protect, *(key for key in keys if key in slots)}
            if not chunks.make_room(needs, store, protected):
                self._no_room[purpose] += 1
                return None
        chunks.clock = clock = chunks.clock + 1
        taken: list[Slot] = []
        for key, books in fresh:
            size = books.size
            size.policy.miss(key)
            engine_only = store and bool(size.engine_only)
            if engine_only:
                place: tuple[Slab, int] | None = size.engine_only.pop()
            else:
                place = size.size_class.take() if size.size_class.free or self._pool.spare else chunks.evict_one(size, protected)
            if place is None:
                # Only a policy that hides what it may evict gets here.
                for slot in taken:
                    self.discard(slot)
                self._no_room[purpose] += 1
                return None
            slot = Slot(key, books, place[0], place[1], not store, engine_only, clock)
            place[0].used_at = clock
            chunks.add(slot)
            taken.append(slot)
            if not store:
                self._background_bytes += size.size_class.charge_bytes
        if self._several:
            chunks.compare_sizes(needs, protected)
        return taken

    def could_admit(self, keys: Sequence[bytes]) -> int:
        """How many of them, from the front, an empty host tier would have slots for.

        Raises:
            KeyError: a key is of a group that has no slots here.
        """
        if not self._several:
            (size,) = self._sizes.values()
            return min(len(keys), size.size_class.most)
        return self._pool.fits(self._chunks.books_of(key).size.size_class for key in keys)

    def ready(self, slots: Sequence[Slot]) -> None:
        """What was being filled holds its chunk now, and may be evicted. Without effect on slots that are not FILLING."""
        for slot in slots:
            if slot.state is not _FILLING:
                continue
            books = slot.books
            slot.state = _READY
            slot.engine_only = False
            books.filling -= 1
            if slot.promoting:
                self._end_promotion(slot)
            if not slot.pins:
                self._chunks.let_go(slot)
        self._chunks.unpin_batches()

    def discard(self, slot: Slot) -> None:
        """What was being filled will never hold its chunk, and nobody writes it any more. Without effect on a slot that is not FILLING."""
        if slot.state is not _FILLING:
            return
        self._chunks.stop_filling(slot)
        self._end_promotion(slot)
        self._chunks.free_unless_pinned(slot)

    def quarantine(self, slot: Slot) -> None:
        """What was being filled will never hold its chunk, but a late call may still write it: out of use until `release`.

        Raises:
            ValueError: it is READY, or its memory is no longer its own.
        """
        if slot.state is _QUARANTINED:
            return
        if slot.state is not _FILLING:
            raise ValueError(f"HostTier: quarantine: {slot} is not being filled")
        self._chunks.stop_filling(slot)
        slot.held = True

    def release(self, slot: Slot) -> None:
        """Nothing touches a slot in quarantine any more. Without effect on any other."""
        if not slot.held:
            return
        slot.held = False
        self._end_promotion(slot)
        self._chunks.free_unless_pinned(slot)

    def remove(self, key: bytes) -> bool:
        """Drop a chunk. False, and without effect, when it is not there, being filled, or pinned."""
        slot = self._slots.get(key)
        if slot is None or slot.state is not _READY or slot.pins:
            return False
        self._chunks.remove(slot)
        self._chunks.free(slot)
        return True

    # --- use ---

    @overload
    def pin(self, slots: Sequence[Slot], background: Literal[False]) -> Pin: ...

    @overload
    def pin(self, slots: Sequence[Slot], background: bool) -> Pin | None: ...

    def pin(self, slots: Sequence[Slot], background: bool) -> Pin | None:
        """Keep slots where they are until `unpin`. FILLING ones may be pinned too, so that nothing evicts them once they are READY.

        Args:
            background: For what no running request waits for: copies to lower tiers, hits that are not loaded yet. Counts against the
                reserve; others are a transfer to the engine, counted as hits, and never refused.

        Returns:
            None, and without effect, when a background pin would take the reserve.

        Raises:
            ValueError: a slot is in quarantine, or its memory is no longer its own.
        """
        for slot in slots:
            if slot.state is not _READY and slot.state is not _FILLING:
                raise ValueError(f"HostTier: pin: {slot} holds no chunk")
        if background:
            charge = sum(slot.books.charge_bytes for slot in slots if not slot.background)
            if charge and self._background_bytes + charge > self._background_most:
                self._refused_pins += 1
                return None
        for slot in slots:
            books = slot.books
            if not slot.pins and slot.resident and slot.state is _READY:
                books.idle -= 1
                slot.slab.idle -= 1
                books.size.policy.pin(slot.key)
            slot.pins += 1
            if not background:
                books.hits += 1
                continue
            if not slot.background:
                self._background_bytes += books.charge_bytes
            slot.background += 1
        return Pin(tuple(slots), background)

    def unpin(self, pin: Pin) -> bool:
        """Release a pin. False the second time: that is counted and changes nothing."""
        if pin.released:
            self._double_releases += 1
            return False
        pin.released = True
        background = pin.background
        for slot in pin.slots:
            slot.pins -= 1
            books = slot.books
            if background:
                slot.background -= 1
                if not slot.background:
                    self._background_bytes -= books.charge_bytes
            if not slot.pins and slot.state is not _FILLING:
                self._chunks.let_go(slot)
        self._chunks.unpin_batches()
        return True

    def used(self, keys: Sequence[bytes]) -> None:
        """A request that ends used these chunks, the head of its prefix first. Those that are not resident are passed over."""
        self._chunks.used(keys)

    # --- everything at once ---

    def reset(self) -> None:
        """Forget every chunk. Their memory is free at once, but for pinned slots, which are free once their last pin goes, and FILLING
        ones, which are free once they are ready, discarded, released or forgotten."""
        self._chunks.clear()

    def forget(self, slots: Sequence[Slot]) -> None:
        """Transfers of the engine from or to these slots will never be reported, but may still run.

        FILLING slots of stores are free at once, READY ones are found no more and free once their last pin goes; but for stores of the
        engine alone, which the engine runs after whatever it forgot, until one such store was made ready. Without effect on slots that are
        free or in quarantine.

        Raises:
            ValueError: a slot is being filled by a promotion. It was not touched, nor were those after it.
        """
        for slot in slots:
            if slot.state is _FILLING:
                if slot.promoting:
                    raise ValueError(f"HostTier: forget: {slot} is being filled by a promotion")
                slot.engine_only = True
                self._chunks.stop_filling(slot)
                self._chunks.free_unless_pinned(slot)
            elif slot.state is _READY:
                slot.engine_only = True
                if slot.resident:
                    self._chunks.remove(slot)
                self._chunks.free_unless_pinned(slot)

    def take_evicted(self) -> list[bytes]:
        """Keys of complete chunks that went since the last call, evicted or removed, in that order. A reset lists none.

        Many more than there are slots are not kept: the newest are.
        """
        evicted = list(self._chunks.evicted)
        self._chunks.evicted.clear()
        return evicted

    def stats(self) -> HostStats:
        """Numbers of this moment. Cheap: nothing is counted for it."""
        groups = self._chunks.groups.values()
        return HostStats(
            groups={books.group: books.stats() for books in groups},
            capacity_bytes=self.capacity_bytes,
            used_bytes=self.used_bytes,
            reserve_bytes=self._pool.capacity_bytes - self._background_most,
            background_bytes=self._background_bytes,
            engine_only_slots=sum(len(size.engine_only) for size in self._sizes.values()),
            no_room=dict(self._no_room),
            refused_pins=self._refused_pins,
            double_releases=self._double_releases,
        )

    # --- inside ---

    def _end_promotion(self, slot: Slot) -> None:
        """What a promotion holds in the background is given up, once."""
        if not slot.promoting:
            return
        slot.promoting = False
        slot.background -= 1
        if not slot.background:
            self._background_bytes -= slot.books.charge_bytes
