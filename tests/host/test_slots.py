"""Slots of several sizes in one stretch of memory."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_sdk.host.slots import Shelf, Slab, SlotPool

PAGE = 4096
sizes_of_slots = st.lists(st.integers(1, 40).map(lambda pages: pages * PAGE), min_size=1, max_size=4, unique=True)


def number_of(shelf: Shelf, place: tuple[Slab, int]) -> int:
    return place[0].first + shelf.first + place[1]


def fill(pool: SlotPool, shelf: Shelf) -> list[tuple[Slab, int]]:
    taken = []
    while (place := shelf.take()) is not None:
        taken.append(place)
    return taken


def test_one_size_leaves_no_byte_of_whole_slots_unused() -> None:
    pool = SlotPool(PAGE, 10 * 3 * PAGE + PAGE, [3 * PAGE])
    shelf = pool.shelves[3 * PAGE]
    taken = fill(pool, shelf)
    assert sorted(pool.place(number_of(shelf, place))[0] for place in taken) == [PAGE + 3 * PAGE * n for n in range(10)]
    assert pool.free_bytes == 0
    assert (pool.slot_numbers, pool.capacity_bytes) == (10, 30 * PAGE)


@given(sizes=sizes_of_slots, room=st.integers(2, 500), seed=st.integers(0, 1000))
def test_slots_never_overlap_and_all_bytes_come_back(sizes: list[int], room: int, seed: int) -> None:
    start = 7 * PAGE
    pool = SlotPool(start, room * PAGE, sizes)
    assert pool.capacity_bytes <= room * PAGE
    order = random.Random(seed)
    live: dict[int, tuple[Shelf, tuple[Slab, int]]] = {}
    for _ in range(200):
        if live and order.random() < 0.4:
            shelf, place = live.pop(order.choice(list(live)))
            shelf.give(*place)
        else:
            shelf = pool.shelves[order.choice(sizes)]
            if (taken := shelf.take()) is not None:
                number = number_of(shelf, taken)
                assert number not in live
                live[number] = (shelf, taken)
    spans = sorted(pool.place(number) for number in live)
    assert all(before + length <= after for (before, length), (after, _) in pairwise(spans))
    assert all(start <= offset and offset + length <= start + room * PAGE for offset, length in spans)
    assert pool.free_bytes == pool.capacity_bytes - sum(length for _, length in spans)
    for shelf, place in live.values():
        shelf.give(*place)
    assert pool.free_bytes == pool.capacity_bytes
    for shelf in pool.shelves.values():
        taken_now = fill(pool, shelf)
        assert len(taken_now) == shelf.most, "an empty pool serves any size alone"
        for place in taken_now:
            shelf.give(*place)


@given(sizes=sizes_of_slots, room=st.integers(2, 500))
def test_a_number_has_one_offset_and_one_length_for_good(sizes: list[int], room: int) -> None:
    """A mark that a worker left under a number must not be taken for another slot's."""
    pool = SlotPool(0, room * PAGE, sizes)
    seen: dict[int, tuple[int, int]] = {}
    for shelf in [*pool.shelves.values(), *reversed(pool.shelves.values())]:
        taken = fill(pool, shelf)
        for slab, index in taken:
            number = number_of(shelf, (slab, index))
            where = (slab.start + index * shelf.size_bytes, shelf.size_bytes)
            assert seen.setdefault(number, where) == where == pool.place(number)
        for place in taken:
            shelf.give(*place)
    assert sorted(seen) == list(range(pool.slot_numbers))
    for number in (-1, pool.slot_numbers):
        with pytest.raises(ValueError, match="is not one of"):
            pool.place(number)


def test_an_empty_slab_serves_any_size() -> None:
    pool = SlotPool(0, 8 * 6 * PAGE, [2 * PAGE, 6 * PAGE])
    small, large = pool.shelves[2 * PAGE], pool.shelves[6 * PAGE]
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
    assert pool.shelves[9 * PAGE].most == 2


@given(sizes=sizes_of_slots, room=st.integers(100, 100_000))
def test_slabs_are_few_enough_to_look_through_and_lose_little(sizes: list[int], room: int) -> None:
    pool = SlotPool(0, room * PAGE, sizes)
    assert len(pool.slabs) <= 1024
    if len(sizes) > 1 and room * PAGE >= 32 * sum(sizes):
        for size, shelf in pool.shelves.items():
            assert shelf.most * size >= 0.6 * room * PAGE, "less than two fifths go to ends that are too short"


def test_room_for_many_sizes_together_is_counted_in_slabs() -> None:
    pool = SlotPool(0, 3 * 6 * PAGE, [2 * PAGE, 6 * PAGE])
    small, large = pool.shelves[2 * PAGE], pool.shelves[6 * PAGE]
    assert pool.fits([small] * 100) == 9
    assert pool.fits([large, small, large, small, small, large, small]) == 5
    assert pool.fits([]) == 0


@pytest.mark.parametrize(("start", "sizes"), [(1, [PAGE]), (-PAGE, [PAGE]), (0, []), (0, [0]), (0, [PAGE + 1]), (0, [PAGE, -PAGE])])
def test_what_is_not_whole_pages_is_refused(start: int, sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="multiples of 4096"):
        SlotPool(start, 100 * PAGE, sizes)
