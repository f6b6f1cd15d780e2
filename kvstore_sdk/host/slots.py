"""Where slots lie: page-aligned parts of one stretch of memory, of one size or of several.

The stretch is cut into slabs of equal length. A slab serves one size at a time and is divided into slots of it; when its last slot is given
back, it may serve any size. With a single size there is a single slab that never changes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

__all__ = ["SizeClass", "Slab", "SlotPool"]

PAGE_BYTES = 4096

_MAX_SLABS = 1024
"""Looking for the slab that was unused for the longest time goes through all of them."""
_MIN_SLABS = 8
"""Where this leaves room for the largest size. Emptying a slab forgets everything in it."""


class Slab:
    """A part of the stretch.

    Attributes:
        start: Offset of its first byte.
        first: Number of the first slot of any size in it.
        size_class: What it is divided into, None for nothing.
        taken: Slots of it that are in use.
        idle: How many of those could be evicted now; kept by whoever takes slots.
        used_at: Time of the newest use of any of its slots; kept by whoever takes slots.
    """

    __slots__ = ("first", "free", "idle", "size_class", "start", "taken", "unused", "used_at")

    def __init__(self, start: int, first: int) -> None:
        self.start = start
        self.first = first
        self.size_class: SizeClass | None = None
        self.taken = 0
        self.idle = 0
        self.used_at = 0
        # Slots from `unused` on were never taken; `free` lists those that were given back. Dividing a slab thus costs nothing.
        self.unused = 0
        self.free: list[int] = []


class SizeClass:
    """All slots of one size.

    Attributes:
        size_bytes: Length of a slot.
        per_slab: Slots in a slab.
        charge_bytes: What a slot takes of the stretch: its length, and its share of what a slab is too long.
        first: Of the slots of this size in a slab, the number of the first, counted from the slab's own `first`.
        free: Slots that can be taken without another slab.
    """

    __slots__ = ("_open", "_pool", "charge_bytes", "first", "free", "per_slab", "size_bytes")

    def __init__(self, pool: SlotPool, size_bytes: int, per_slab: int, charge_bytes: int, first: int) -> None:
        self._pool = pool
        self.size_bytes = size_bytes
        self.per_slab = per_slab
        self.charge_bytes = charge_bytes
        self.first = first
        self.free = 0
        # Slabs that have a free slot. The last one is taken from.
        self._open: list[Slab] = []

    @property
    def most(self) -> int:
        """Slots of this size that there are when no other size has any."""
        return self.per_slab * self._pool.slab_count

    def take(self) -> tuple[Slab, int] | None:
        """A free slot, as its slab and its place in it; from a spare slab when this size has none left. None: no slab is spare."""
        if not self._open and not self.grow():
            return None
        slab = self._open[-1]
        if slab.free:
            index = slab.free.pop()
        else:
            index = slab.unused
            slab.unused += 1
        slab.taken += 1
        if slab.taken == self.per_slab:
            self._open.pop()
        self.free -= 1
        return slab, index

    def give(self, slab: Slab, index: int) -> None:
        """Take a slot back. Each slot that was taken is given once."""
        if slab.taken == self.per_slab:
            self._open.append(slab)
        slab.taken -= 1
        slab.free.append(index)
        self.free += 1
        if not slab.taken and self._pool.several:
            self._open.remove(slab)
            self.free -= self.per_slab
            slab.free.clear()
            slab.size_class = None
            self._pool.spare.append(slab)

    def grow(self) -> bool:
        """Let a spare slab serve this size. False: none is spare."""
        if not self._pool.spare:
            return False
        slab = self._pool.spare.pop()
        slab.size_class = self
        slab.unused = 0
        self._open.append(slab)
        self.free += self.per_slab
        return True

    def __repr__(self) -> str:
        return f"SizeClass(size_bytes={self.size_bytes}, per_slab={self.per_slab}, free={self.free})"


class SlotPool:
    """Divides `[start, start + size_bytes)` into slots.

    A slot has a number, which belongs to one offset and one size for good. There is one size class for each size.

    Attributes:
        size_classes: By size, the largest first.
        slabs: All of them, in order.
        spare: Those that serve no size.
        slab_count: How many there are; 0 when the largest size does not fit.
        slab_bytes: Length of each.
        capacity_bytes: Of all slabs.
        slot_numbers: All numbers are below it.
        several: Whether there is more than one size.
    """

    def __init__(self, start: int, size_bytes: int, sizes: Collection[int]) -> None:
        """Divide the stretch.

        Args:
            start: Offset of the first byte, a multiple of 4,096.
            size_bytes: Length of the stretch; what no slab fits in stays unused.
            sizes: Lengths of slots, each a multiple of 4,096.

        Raises:
            ValueError: there is no size, or a number is not a positive multiple of 4,096 (`start` may be 0, `size_bytes` anything).
        """
        ordered = sorted(set(sizes), reverse=True)
        if not ordered or start < 0 or start % PAGE_BYTES or any(size <= 0 or size % PAGE_BYTES for size in ordered):
            raise ValueError(f"SlotPool: start {start} and sizes {ordered} must be multiples of {PAGE_BYTES}")
        self.several = len(ordered) > 1
        if self.several:
            self.slab_bytes = _slab_bytes(size_bytes, ordered)
        else:
            self.slab_bytes = max(size_bytes // ordered[0], 1) * ordered[0]
        self.slab_count = max(size_bytes, 0) // self.slab_bytes
        self.capacity_bytes = self.slab_count * self.slab_bytes
        self.size_classes: dict[int, SizeClass] = {}
        slots = 0
        for size in ordered:
            per_slab = self.slab_bytes // size
            self.size_classes[size] = SizeClass(self, size, per_slab, self.slab_bytes // per_slab, slots)
            slots += per_slab
        self._start = start
        self._numbers_per_slab = slots
        self.slot_numbers = slots * self.slab_count
        self.slabs = [Slab(start + index * self.slab_bytes, index * slots) for index in range(self.slab_count)]
        self.spare = self.slabs[::-1]

    def place(self, number: int) -> tuple[int, int]:
        """Offset and length of a slot. They never change.

        Raises:
            ValueError: there is no such slot.
        """
        if not 0 <= number < self.slot_numbers:
            raise ValueError(f"SlotPool: slot {number} is not one of {self.slot_numbers}")
        slab, place = divmod(number, self._numbers_per_slab)
        size_class = next(size_class for size_class in self.size_classes.values() if place < size_class.first + size_class.per_slab)
        return self._start + slab * self.slab_bytes + (place - size_class.first) * size_class.size_bytes, size_class.size_bytes

    def fits(self, size_classes: Iterable[SizeClass]) -> int:
        """For how many slots, given by their size classes, there is room when nothing is taken: up to the first that does not fit."""
        counts = dict.fromkeys(self.size_classes.values(), 0)
        slabs = fitting = 0
        for size_class in size_classes:
            if counts[size_class] % size_class.per_slab == 0:
                slabs += 1
                if slabs > self.slab_count:
                    break
            counts[size_class] += 1
            fitting += 1
        return fitting


def _slab_bytes(size_bytes: int, sizes: list[int]) -> int:
    """The length of a slab that loses the least: to what its end is too short for, and to slabs that are half full, one of each size."""
    least = max(sizes[0], -(-size_bytes // (_MAX_SLABS * PAGE_BYTES)) * PAGE_BYTES)
    most = max(least, size_bytes // _MIN_SLABS)

    def share(candidate: int) -> float:
        usable = min(size_bytes // candidate * (candidate // size) * size for size in sizes)
        return (usable - len(sizes) * candidate / 2) / max(size_bytes, 1)

    candidates = {least, *(many * size for size in sizes for many in range(-(-least // size), most // size + 1)[:64])}
    return max(candidates, key=lambda candidate: (share(candidate), -candidate))
