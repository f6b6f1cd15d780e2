"""Which chunks are resident, and which of them go to make room."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence

from kvstore_sdk.format import record_bytes
from kvstore_sdk.host.policies import open_policy
from kvstore_sdk.host.slots import Slab, SlotPool
from kvstore_sdk.host.types import GroupBooks, SizeBooks, Slot, SlotState
from kvstore_sdk.keys import GROUP_BYTES

__all__ = ["Chunks"]

_READY, _QUARANTINED, _FREE = SlotState.READY, SlotState.QUARANTINED, SlotState.FREE


class Chunks:
    """The books of a HostTier: chunks by key, slots by number, and of each slot size the order in which its chunks leave.

    Attributes:
        pool: Where slots lie.
        sizes: By length of a slot.
        groups: By the last bytes of a key, which say its group.
        slots: Resident chunks.
        evicted: Complete chunks that went, until somebody takes the list.
        clock: Time of the newest use, in uses. It orders slabs by age, and is needed only where sizes compete.
    """

    def __init__(self, pool: SlotPool, payload_bytes: Mapping[int, int], policy: str) -> None:
        self.pool = pool
        self.sizes = {
            length: SizeBooks(size_class, open_policy(policy, size_class.most)) for length, size_class in pool.size_classes.items()
        }
        self.groups: dict[bytes, GroupBooks] = {}
        for group, length in payload_bytes.items():
            size = self.sizes[record_bytes(length)]
            books = GroupBooks(group, length, size)
            size.groups.append(books)
            self.groups[group.to_bytes(GROUP_BYTES, "big")] = books
        self.slots: dict[bytes, Slot] = {}
        self.evicted: deque[bytes] = deque(maxlen=max(2 * pool.slot_numbers, 65_536))
        self.clock = 0
        # By slot number, the slot that has the place now.
        self._rows: list[Slot | None] = [None] * pool.slot_numbers

    def books_of(self, key: bytes) -> GroupBooks:
        """What a chunk with this key is.

        Raises:
            KeyError: its group has no slots here.
        """
        books = self.groups.get(key[-GROUP_BYTES:])
        if books is None:
            group = int.from_bytes(key[-GROUP_BYTES:], "big")
            there = ", ".join(str(books.group) for books in self.groups.values())
            raise KeyError(f"HostTier: {key.hex()} is of group {group}; there are slots of {there}")
        return books

    def add(self, slot: Slot) -> None:
        """A slot was taken for a chunk, which is found from now on."""
        self.slots[slot.key] = self._rows[slot.number] = slot
        books = slot.books
        books.used += 1
        books.filling += 1
        books.size.policy.insert(slot.key)

    def drop(self, slot: Slot) -> None:
        """A resident chunk is found no more. The policy is told elsewhere."""
        del self.slots[slot.key]
        slot.resident = False
        if slot.state is _READY and not slot.pins:
            slot.books.idle -= 1
            slot.slab.idle -= 1

    def remove(self, slot: Slot) -> None:
        """A resident, complete chunk goes, and not to make room."""
        slot.books.size.policy.remove(slot.key)
        self.drop(slot)
        self.evicted.append(slot.key)

    def clear(self) -> None:
        """Every chunk goes. A slot that is pinned or being filled stays taken."""
        for slot in list(self.slots.values()):
            idle = slot.state is _READY and not slot.pins
            self.drop(slot)
            if idle:
                self.free(slot)
        for size in self.sizes.values():
            size.policy.clear()

    def let_go(self, slot: Slot) -> None:
        """Nothing keeps a slot that is not being filled: its chunk may be evicted, once `unpin_batches` told the policy, or it is free."""
        if slot.resident:
            slot.books.idle += 1
            slot.slab.idle += 1
            slot.books.size.batch.append(slot.key)
        elif not slot.held:
            self.free(slot)

    def used(self, keys: Sequence[bytes]) -> None:
        """A request used these, of which some may not be resident."""
        slots = self.slots
        if not self.pool.several:
            (size,) = self.sizes.values()
            size.policy.used([key for key in keys if key in slots])
            return
        self.clock += 1
        for key in keys:
            if (slot := slots.get(key)) is not None:
                slot.used_at = slot.slab.used_at = self.clock
                slot.books.size.batch.append(key)
        for size in self.sizes.values():
            if size.batch:
                batch, size.batch = size.batch, []
                size.policy.used(batch)

    def free(self, slot: Slot) -> None:
        """The memory of a slot that is not resident is free."""
        if slot.state is _QUARANTINED:
            slot.books.quarantined -= 1
        slot.state = _FREE
        slot.books.used -= 1
        self._rows[slot.number] = None
        if slot.engine_only:
            slot.books.size.engine_only.append((slot.slab, slot.index))
        else:
            slot.books.size.size_class.give(slot.slab, slot.index)

    def free_unless_pinned(self, slot: Slot) -> None:
        """The same, at its last unpin at the latest."""
        if not slot.pins:
            self.free(slot)

    def stop_filling(self, slot: Slot) -> None:
        """From FILLING to QUARANTINED."""
        slot.books.filling -= 1
        slot.books.quarantined += 1
        if slot.resident:
            slot.books.size.policy.remove(slot.key)
            self.drop(slot)
        slot.state = _QUARANTINED

    def unpin_batches(self) -> None:
        """Tell the policies what a call collected in `SizeBooks.batch`."""
        for size in self.sizes.values():
            if size.batch:
                batch, size.batch = size.batch, []
                size.policy.unpin(batch)

    def evict_one(self, size: SizeBooks, protected: Collection[bytes]) -> tuple[Slab, int] | None:
        """The place of the chunk that goes next, still taken."""
        key = size.policy.victim(protected)
        slot = None if key is None else self.slots.get(key)
        if slot is None or slot.books.size is not size or slot.state is not _READY or slot.pins:
            return None
        self._evict(slot)
        size.evicted += 1
        size.evicted_used_at = slot.used_at
        return slot.slab, slot.index

    def _evict(self, slot: Slot) -> None:
        """An idle chunk goes. Its place stays taken."""
        key, books = slot.key, slot.books
        books.size.policy.evict(key)
        del self.slots[key]
        self.evicted.append(key)
        self._rows[slot.number] = None
        slot.resident = False
        slot.state = _FREE
        slot.slab.idle -= 1
        books.idle -= 1
        books.used -= 1
        books.evictions += 1

    def make_room(self, needs: Mapping[SizeBooks, int], store: bool, protected: Collection[bytes]) -> bool:
        """See to it that so many slots of each size can be taken, without another slab or for an eviction. False, and nothing is evicted,
        when they cannot."""
        kept = dict.fromkeys(self.sizes.values(), 0)
        guarded: set[Slab] = set()
        for key in protected:
            slot = self.slots.get(key)
            if slot is not None and slot.state is _READY and not slot.pins:
                kept[slot.books.size] += 1
                guarded.add(slot.slab)
        # How many slots a size lacks though all that may go has gone.
        lacking = {size: count - size.size_class.free - (size.idle - kept[size]) for size, count in needs.items()}
        if store:
            for size in lacking:
                lacking[size] -= len(size.engine_only)
        wanted = sum(max(0, -(-count // size.size_class.per_slab)) for size, count in lacking.items())
        emptied: list[Slab] = []
        if wanted > len(self.pool.spare):
            for slab in sorted(self.pool.slabs, key=lambda slab: slab.used_at):
                if slab.size_class is None or slab.taken != slab.idle or slab in guarded:
                    continue
                owner = self.sizes[slab.size_class.size_bytes]
                if owner in lacking:
                    if lacking[owner] + slab.size_class.per_slab > 0:
                        continue
                    lacking[owner] += slab.size_class.per_slab
                emptied.append(slab)
                if wanted <= len(self.pool.spare) + len(emptied):
                    break
            else:
                return False
        for slab in emptied:
            self._empty(slab)
        for size, count in lacking.items():
            for _ in range(-(-count // size.size_class.per_slab)):
                size.size_class.grow()
        return True

    def compare_sizes(self, needs: Collection[SizeBooks], protected: Collection[bytes]) -> None:
        """Where a size keeps evicting what is younger than a whole slab of another size, that slab goes instead."""
        for size in needs:
            if size.evicted < max(size.size_class.per_slab, len(self.pool.slabs) // 16):
                continue
            size.evicted = 0
            others = (slab for slab in self.pool.slabs if slab.size_class is not None and slab.size_class is not size.size_class)
            oldest = min((slab for slab in others if slab.taken == slab.idle), key=lambda slab: slab.used_at, default=None)
            if oldest is None or oldest.used_at >= size.evicted_used_at:
                continue
            if not any(slot.key in protected for slot in self._slots_of(oldest)):
                self._empty(oldest)

    def _slots_of(self, slab: Slab) -> list[Slot]:
        if slab.size_class is None:
            return []
        first = slab.first + slab.size_class.first
        return [slot for slot in self._rows[first : first + slab.size_class.per_slab] if slot is not None]

    def _empty(self, slab: Slab) -> None:
        """Evict everything in a slab, which is spare then."""
        for slot in self._slots_of(slab):
            self._evict(slot)
            slot.books.size.size_class.give(slot.slab, slot.index)
