"""What every HostTier promises at any moment, asked from outside and added up again from the slots themselves."""

from __future__ import annotations

from collections.abc import Iterable

from kvstore_sdk.backend import Region
from kvstore_sdk.host import HostTier, Slot, SlotState

PAGE = 4096


def key(number: int, group: int = 0) -> bytes:
    """The engine's key of a chunk."""
    return number.to_bytes(32, "big") + group.to_bytes(4, "big")


def keys(numbers: Iterable[int], group: int = 0) -> list[bytes]:
    return [key(number, group) for number in numbers]


def region_of(records: int, pages: int = 2) -> Region:
    """Room for so many records of so many pages."""
    return Region(records * pages * PAGE)


def check_no_overlap(slots: Iterable[Slot]) -> None:
    """No two slots share a byte, and none a number."""
    live = sorted(slots, key=lambda slot: slot.offset)
    assert len({slot.number for slot in live}) == len(live)
    for before, after in zip(live, live[1:], strict=False):
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
