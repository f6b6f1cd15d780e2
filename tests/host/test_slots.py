"""Slots of several sizes in one stretch of memory."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_sdk.host.slots import SizeClass, Slab, SlotPool

PAGE = 4096
sizes_of_slots = st.lists(st.integers(1, 40).map(lambda pages: pages * PAGE), min_size=1, max_size=4, unique=True)


def number_of(size_class: SizeClass, place: tuple[Slab, int]) -> int:
    return place[0].first + size_class.first + place[1]


def free_bytes(pool: SlotPool) -> int:
    """Bytes that no slot in use covers."""
    return pool.capacity_bytes - sum(slab.taken * slab.size_class.size_bytes for slab in pool.slabs if slab.size_class is not None)


def fill(pool: SlotPool, size_class: SizeClass) -> list[tuple[Slab, int]]:
    taken = []
    while (place := size_class.take()) is not None:
        taken.append(place)
    return taken


def test_one_size_leaves_no_byte_of_whole_slots_unused() -> None:
    pool = SlotPool(PAGE, 10 * 3 * PAGE + PAGE, [3 * PAGE])
    size_class = pool.size_classes[3 * PAGE]
    taken = fill(pool, size_class)
    assert sorted(pool.place(number_of(size_class, place))[0] for place in taken) == [PAGE + 3 * PAGE * n for n in range(10)]
    assert free_bytes(pool) == 0
    assert (pool.slot_numbers, pool.capacity_bytes) == (10, 30 * PAGE)


@given(sizes=sizes_of_slots, room=st.integers(2, 500), seed=st.integers(0, 1000))
def test_slots_never_overlap_and_all_bytes_come_back(sizes: list[int], room: int, seed: int) -> None:
    start = 7 * PAGE
    pool = SlotPool(start, room * PAGE, sizes)
    assert pool.capacity_bytes <= room * PAGE
    order = random.Random(seed)
    live: dict[int, tuple[SizeClass, tuple[Slab, int]]] = {}
    for _ in range(200):
        if live and order.random() < 0.4:
            size_class, place = live.pop(order.choice(list(live)))
            size_class.give(*place)
        else:
            size_class = pool.size_classes[order.choice(sizes)]
            if (taken := size_class.take()) is not None:
                number = number_of(size_class, taken)
                assert number not in live
                live[number] = (size_class, taken)
    spans = sorted(pool.place(number) for number in live)
    assert all(before + length <= after for (before, length), (after, _) in pairwise(spans))
    assert all(start <= offset and offset + length <= start + room * PAGE for offset, length in spans)
    assert free_bytes(pool) == pool.capacity_bytes - sum(length for _, length in spans)
    for size_class, place in live.values():
        size_class.give(*place)
    assert free_bytes(pool) == pool.capacity_bytes
    for size_class in pool.size_classes.values():
        taken_now = fill(pool, size_class)
        assert len(taken_now) == size_class.most, "an empty pool serves any size alone"
        for place in taken_now:
            size_class.give(*place)


@given(sizes=sizes_of_slots, room=st.integers(2, 500))
def test_a_number_has_one_offset_and_one_length_for_good(sizes: list[int], room: int) -> None:
    """A mark that a worker left under a number must not be taken for another slot's."""
    pool = SlotPool(0, room * PAGE, sizes)
    seen: dict[int, tuple[int, int]] = {}
    for size_class in [*pool.size_classes.values(), *reversed(pool.size_classes.values())]:
        taken = fill(pool, size_class)
        for slab, index in taken:
            number = number_of(size_class, (slab, index))
            where = (slab.start + index * size_class.size_bytes, size_class.size_bytes)
            assert seen.setdefault(number, where) == where == pool.place(number)
        for place in taken:
            size_class.give(*place)
    assert sorted(seen) == list(range(pool.slot_numbers))
    for number in (-1, pool.slot_numbers):
        with pytest.raises(ValueError, match="is not one of"):
            pool.place(number)


def test_an_empty_slab_serves_any_size() -> None:
    pool = SlotPool(0, 8 * 6 * PAGE, [2 * PAGE, 6 * PAGE])
    small, large = pool.size_classes[2 * PAGE], pool.size_classes[6 * PAGE]
    taken = fill(pool, small)
    assert large.take() is None
    slab = taken[5][0]
    mine = [place for place in taken if place[0] is slab]
    for place in mine[1:]:
        small.give(*place)
    assert large.take() is None, "one slot of it is still in use"
    small.give(*mine[0])
    place = large.take()
    assert place is not None
    assert place[0] is slab


def test_two_records_of_the_largest_size_are_enough_for_a_pool() -> None:
    pool = SlotPool(0, 2 * 9 * PAGE, [9 * PAGE, PAGE, 4 * PAGE])
    assert pool.size_classes[9 * PAGE].most == 2


@given(sizes=sizes_of_slots, room=st.integers(100, 100_000))
def test_slabs_are_few_enough_to_look_through_and_lose_little(sizes: list[int], room: int) -> None:
    pool = SlotPool(0, room * PAGE, sizes)
    assert len(pool.slabs) <= 1024
    if len(sizes) > 1 and room * PAGE >= 32 * sum(sizes):
        for size, size_class in pool.size_classes.items():
            assert size_class.most * size >= 0.6 * room * PAGE, "less than two fifths go to ends that are too short"


def test_room_for_many_sizes_together_is_counted_in_slabs() -> None:
    pool = SlotPool(0, 3 * 6 * PAGE, [2 * PAGE, 6 * PAGE])
    small, large = pool.size_classes[2 * PAGE], pool.size_classes[6 * PAGE]
    assert pool.fits([small] * 100) == 9
    assert pool.fits([large, small, large, small, small, large, small]) == 5
    assert pool.fits([]) == 0


@pytest.mark.parametrize(("start", "sizes"), [(1, [PAGE]), (-PAGE, [PAGE]), (0, []), (0, [0]), (0, [PAGE + 1]), (0, [PAGE, -PAGE])])
def test_what_is_not_whole_pages_is_refused(start: int, sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="multiples of 4096"):
        SlotPool(start, 100 * PAGE, sizes)
