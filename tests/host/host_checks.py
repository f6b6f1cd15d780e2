"""What every HostTier promises at any moment, asked from outside and added up again from the slots themselves."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from kvstore_sdk.backend import Region
from kvstore_sdk.host import HostTier, Pin, Purpose, Slot, SlotState

PAGE = 4096


def key(number: int, group: int = 0) -> bytes:
    """The engine's key of a chunk."""
    return number.to_bytes(32, "big") + group.to_bytes(4, "big")


def keys(numbers: Iterable[int], group: int = 0) -> list[bytes]:
    return [key(number, group) for number in numbers]


def region_of(records: int, pages: int = 2) -> Region:
    """Room for so many records of so many pages."""
    return Region(records * pages * PAGE)


def host_of(slots: int, **options: object) -> HostTier:
    """A host tier of so many equal slots."""
    return HostTier(region_of(slots), {0: PAGE}, **options)  # type: ignore[arg-type]


def store(host: HostTier, numbers: range | list[int], group: int = 0) -> list[Slot]:
    taken = host.admit(keys(numbers, group), Purpose.STORE)
    assert taken is not None
    host.ready(taken)
    return taken


def pinned(host: HostTier, slots: list[Slot], background: bool = False) -> Pin:
    pin = host.pin(slots, background)
    assert pin is not None
    return pin


def check_no_overlap(slots: Iterable[Slot]) -> None:
    """No two slots share a byte, and none a number."""
    live = sorted(slots, key=lambda slot: slot.offset)
    assert len({slot.number for slot in live}) == len(live)
    for before, after in pairwise(live):
        assert before.offset + before.record_bytes <= after.offset, f"{before} overlaps {after}"


def check_books(host: HostTier, live: list[Slot]) -> None:
    """The numbers that a host tier gives are those of the slots that are in use."""
    stats = host.stats()
    check_no_overlap(live)
    assert stats.used_bytes == sum(slot.record_bytes for slot in live)
    assert stats.free_bytes == stats.capacity_bytes - stats.used_bytes
    for group, numbers in stats.groups.items():
        mine = [slot for slot in live if slot.group == group]
        assert numbers.used == len(mine)
        assert numbers.used_bytes == sum(slot.record_bytes for slot in mine)
        assert numbers.filling == sum(slot.state is SlotState.FILLING for slot in mine)
        assert numbers.quarantined == sum(slot.state is SlotState.QUARANTINED for slot in mine)
        assert numbers.pinned == sum(slot.state is SlotState.READY and slot.pins > 0 for slot in mine)
    for slot in live:
        buffer = host.record(slot.number)
        assert (buffer.region, buffer.offset, buffer.length) == (host.region, slot.offset, slot.record_bytes)
        assert slot.number < host.row_count
        assert slot.offset % PAGE == 0
