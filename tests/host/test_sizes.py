"""Chunks of several sizes in one host memory: how they share it."""

from __future__ import annotations

import random

import pytest
from host_checks import PAGE, check_no_overlap, host_of, key, keys, pinned, region_of, store

from kvstore_sdk.host import HostTier, Pin, Purpose, Slot, SlotState

STORE, PROMOTION = Purpose.STORE, Purpose.PROMOTION

SIZES = {0: PAGE, 1: 3 * PAGE, 2: 11 * PAGE - 1}


def test_a_size_that_has_nothing_gets_the_slab_that_was_unused_the_longest() -> None:
    host = HostTier(region_of(8, pages=12), SIZES)
    small = store(host, range(48))
    assert host.stats().free_bytes == 0
    host.used(keys(range(12, 48)))
    store(host, [100], group=2)
    evicted = host.take_evicted()
    assert sorted(evicted) == keys(range(6)) or sorted(evicted) == keys(range(6, 12)), "one slab, and of the chunks that nobody used"
    assert len(small) - len(evicted) == 42


def test_slabs_with_pinned_chunks_stay() -> None:
    host = HostTier(region_of(2, pages=12), SIZES)
    slots = store(host, range(12))
    pins = [pinned(host, slots[place : place + 1]) for place in (0, 6)]
    assert host.admit([key(100, 2)], STORE) is None
    assert host.take_evicted() == []
    host.unpin(pins[1])
    assert host.admit([key(100, 2)], STORE) is not None
    assert host.get(key(0)) is slots[0]
    assert host.get(key(6)) is None


def test_a_slab_that_lost_some_of_its_chunks_can_still_go() -> None:
    host = HostTier(region_of(2, pages=12), SIZES)
    store(host, range(12))
    for number in (0, 1, 6, 7):
        assert host.remove(key(number))
    assert host.admit([key(100, 2), key(101, 2)], STORE) is not None
    assert len(host) == 2


def test_protected_chunks_keep_their_slab() -> None:
    host = HostTier(region_of(2, pages=12), SIZES)
    store(host, range(12))
    assert host.admit([key(100, 2)], STORE, protect=keys([3, 9])) is None
    assert host.admit([key(100, 2)], STORE, protect=keys([9])) is not None
    assert host.get(key(9)) is not None


def test_chunks_of_all_groups_are_admitted_together_or_not_at_all() -> None:
    host = HostTier(region_of(3, pages=12), SIZES)
    store(host, range(18))
    together = [key(1, 2), key(2, 1), key(3, 1), key(100)]
    taken = host.admit(together, STORE)
    assert taken is not None
    assert [slot.group for slot in taken] == [2, 1, 1, 0]
    check_no_overlap(taken)
    assert host.admit([key(5, 2), key(6, 2), key(7, 2)], STORE) is None


def test_a_spare_slab_goes_to_the_size_of_the_call_that_has_nothing_else() -> None:
    host = HostTier(region_of(3, pages=12), SIZES)
    store(host, range(12))
    assert len(host.admit([key(100), key(0, 2)], STORE) or []) == 2
    assert len(host.take_evicted()) == 1


def test_what_one_size_gives_to_another_is_not_counted_twice() -> None:
    """Of three slabs two would go to the large ones, and leave too few for the small ones of the same call."""
    host = HostTier(region_of(3, pages=12), SIZES)
    store(host, range(18))
    assert host.admit([key(0, 2), key(1, 2), *keys(range(100, 112))], STORE) is None
    assert host.take_evicted() == []
    assert len(host.admit([key(0, 2), *keys(range(100, 112))], STORE) or []) == 13


def test_sizes_share_memory_by_use() -> None:
    """A size that nobody uses any more gives its memory up to one that evicts all the time, and gets it back when that turns."""
    host = HostTier(region_of(16, pages=12), SIZES)
    for busy, idle in ((0, 2), (2, 0), (0, 2)):
        for round_ in range(400):
            store(host, [round_ % 120], group=busy)
            host.used([key(round_ % 120, busy)])
        stats = host.stats()
        assert stats.groups[busy].used_bytes > 0.9 * stats.capacity_bytes
        assert stats.groups[idle].used_bytes < 0.1 * stats.capacity_bytes


def test_what_is_in_use_keeps_its_memory_beside_a_stream_of_another_size() -> None:
    """Chunks that come once must push each other out, not those of another group that every request uses."""
    host = HostTier(region_of(8, pages=12), SIZES)
    system_prompt = [slot.key for slot in store(host, [0, 1], group=2)]
    for round_ in range(500):
        store(host, [round_])
        host.used(system_prompt)
    assert all(host.get(chunk) for chunk in system_prompt)


@pytest.mark.parametrize("protected", [True, False])
def test_protected_chunks_are_not_taken_for_being_old_either(protected: bool) -> None:
    host = HostTier(region_of(8, pages=12), SIZES)
    old = [slot.key for slot in store(host, [0, 1], group=2)]
    for round_ in range(500):
        host.ready(host.admit([key(round_)], STORE, protect=old if protected else ()) or [])
    assert [host.get(chunk) is not None for chunk in old] == [protected] * 2


def test_how_many_an_empty_host_tier_has_room_for() -> None:
    host = HostTier(region_of(3, pages=12), SIZES)
    chunks = [key(0, 2), key(0, 0), key(1, 2), key(1, 0), key(2, 2), key(2, 0)]
    assert host.could_admit(chunks) == 4
    assert host.could_admit(keys(range(100))) == 18
    assert host_of(5).could_admit(keys(range(100))) == 5
    assert len(host.admit(chunks[:4], STORE) or []) == 4


@pytest.mark.parametrize(("policy", "most"), [("lru", 200_000), ("arc", 50_000)])
def test_nothing_leaks_in_two_hundred_thousand_calls(policy: str, most: int) -> None:
    """LEAK-03: puts, gets and evictions of three sizes, pins and failures between them; then all bytes are free, and the largest fits."""
    order = random.Random(20)
    host = HostTier(region_of(12, pages=12), SIZES, policy=policy)
    pins: list[Pin] = []
    filling: list[Slot] = []
    held: list[Slot] = []
    calls = 0
    while calls < most:
        calls += 1
        chunk = key(order.randrange(100), order.randrange(3))
        what = order.random()
        slot = host.get(chunk)
        if slot is None:
            filling += host.admit([chunk], STORE if what < 0.7 else PROMOTION) or []
        elif what < 0.2 and slot.state is SlotState.READY and (pin := host.pin([slot], background=what < 0.1)):
            pins.append(pin)
        elif what < 0.3:
            host.used([chunk])
        if len(filling) > order.randrange(8):
            slot = filling.pop(order.randrange(len(filling)))
            if what < 0.8:
                host.ready([slot])
            elif what < 0.9:
                host.discard(slot)
            else:
                host.quarantine(slot)
                held.append(slot)
        if len(pins) > order.randrange(12):
            host.unpin(pins.pop(order.randrange(len(pins))))
        if len(held) > order.randrange(4):
            host.release(held.pop())
    for pin in pins:
        host.unpin(pin)
    host.ready(filling)
    for slot in held:
        host.release(slot)
    evicted = sum(group.evictions for group in host.stats().groups.values())
    assert evicted > most // 10
    (largest,) = host.admit([key(1000, 2)], STORE) or []
    host.discard(largest)
    for chunk in [key(number, group) for number in range(100) for group in range(3)]:
        host.remove(chunk)
    stats = host.stats()
    assert (stats.free_bytes, stats.background_bytes, len(host)) == (stats.capacity_bytes, 0, 0)
    assert len(host.admit(keys(range(12), group=2), STORE) or []) == 12, "of the largest as many as at the start"
