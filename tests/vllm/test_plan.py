"""The control area of the shared region: the plan, and the marks that ranks set."""

from __future__ import annotations

import itertools
import mmap
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from offload_world import is_unmapped

from kvstore_sdk.backend import Region
from kvstore_sdk.errors import ConfigError
from kvstore_sdk.layout import AttentionShape, LatentShape, OpaqueShape, Section, StatePart, StateShape, Topology
from kvstore_sdk.vllm.offloading.marks import MAX_SEQUENCE, Marks
from kvstore_sdk.vllm.offloading.plan import PLAN_BYTES, PLAN_VERSION, GroupPlan, Plan, claim_region, control_bytes, read_plan, write_plan

SLOTS, RANKS = 5, 4
START = control_bytes(SLOTS, RANKS)
GROUPS = (
    GroupPlan(AttentionShape(layers=3, blocks=2, block_tokens=16, heads=8, token_head_bytes=64, kernel_blocks=2), Topology(2, (2, 1))),
    GroupPlan(LatentShape(layers=2, blocks=2, block_tokens=16, token_bytes=100), Topology(2, (1, 1))),
    GroupPlan(StateShape(layers=1, blocks=2, parts=(StatePart(3, (Section(4, 8), Section(2, 8))),)), Topology(2, (0, 1))),
    GroupPlan(OpaqueShape(blocks=2, pages=((7,), (7,), (9, 9), (9, 9))), Topology(2, (1, 2))),
)
PLAN = Plan(world_size=RANKS, blocks_per_chunk=2, slot_count=SLOTS, slots_start=START, groups=GROUPS)


@pytest.fixture
def region() -> Iterator[Region]:
    made = Region(START + (1 << 20))
    yield made
    made.close()


@pytest.mark.parametrize(("slots", "ranks", "size"), [(1, 1, 4096), (1024, 1, 4096), (1025, 1, 8192), (5, 4, 4096), (1000, 8, 32768)])
def test_the_slots_start_at_the_first_page_behind_the_marks(slots: int, ranks: int, size: int) -> None:
    assert control_bytes(slots, ranks) == PLAN_BYTES + size


def test_a_worker_reads_the_plan_that_was_written(region: Region) -> None:
    write_plan(region, PLAN)
    assert read_plan(region) == PLAN
    assert [group.payload_bytes for group in PLAN.groups] == [3 * 2 * 16 * 8 * 64, 2 * 2 * 1600, 2 * 3 * 48, 2 * (7 + 7 + 18 + 18)]
    assert not any(region.view[PLAN_BYTES:]), "nothing behind it is touched"


def test_a_region_has_one_plan(region: Region) -> None:
    """Two engines of one id would write into each other's slots."""
    write_plan(region, PLAN)
    with pytest.raises(ConfigError, match="engine_id: the region has a plan already"):
        write_plan(region, replace(PLAN, groups=GROUPS[:1]))
    assert read_plan(region) == PLAN


@pytest.mark.parametrize("size", [4096, START + 4096], ids=["too small", "empty"])
def test_a_region_without_a_plan_is_refused(size: int) -> None:
    made = Region(size)
    with pytest.raises(ConfigError, match=r"plan: .*(no room|no plan)"):
        read_plan(made)
    made.close()


@given(st.data())
def test_a_plan_with_a_changed_bit_is_refused(data: st.DataObject) -> None:
    """Whatever changed it: a worker that believed it would copy to wrong places."""
    made = Region(START + 4096)
    try:
        write_plan(made, PLAN)
        length = struct.unpack_from("<8sII", made.view)[2]
        at, bit = data.draw(st.integers(0, 32 + length - 1)), data.draw(st.integers(0, 7))
        made.view[at] ^= 1 << bit
        with pytest.raises(ConfigError, match="plan"):
            read_plan(made)
    finally:
        made.close()


def write_body(region: Region, body: bytes, version: int = PLAN_VERSION) -> None:
    region.view[32 : 32 + len(body)] = body
    region.view[:32] = struct.pack("<8sII16s", b"KVSPLAN\x1a", version, len(body), xxhash.xxh3_128_digest(body))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"world_size": 1, "blocks_per_chunk": 1, "slot_count": 1, "slots_start": 1, "groups": [{"shape": {"kind": "x"}}]}',
        b'{"world_size": 1, "blocks_per_chunk": 1, "slot_count": Infinity, "slots_start": 1, "groups": []}',
        b"[" * 100_000,
    ],
    ids=itertools.count(),
)
def test_a_whole_plan_of_other_things_is_refused(region: Region, body: bytes) -> None:
    write_body(region, body)
    with pytest.raises(ConfigError, match="plan: cannot be decoded"):
        read_plan(region)


def test_a_region_is_claimed_by_one_until_it_is_closed(region: Region) -> None:
    """Two engines of one id that start together see no plan of each other."""
    other = Region.from_fd(os.open(f"/proc/self/fd/{region.fd}", os.O_RDWR), region.size_bytes)
    claim_region(region)
    with pytest.raises(ConfigError, match="engine_id: another engine of this id serves the region"):
        claim_region(other)
    region.close()
    claim_region(other)
    other.close()


def test_a_plan_of_another_version_is_refused(region: Region) -> None:
    write_body(region, b"{}", PLAN_VERSION + 1)
    with pytest.raises(ConfigError, match=f"version {PLAN_VERSION + 1}, this is {PLAN_VERSION}"):
        read_plan(region)


def test_a_length_that_leaves_the_area_is_refused(region: Region) -> None:
    write_plan(region, PLAN)
    struct.pack_into("<I", region.view, 12, 2**32 - 1)
    with pytest.raises(ConfigError, match="changed since they were written"):
        read_plan(region)


WRONG: dict[str, Plan] = {
    "slots inside the marks": replace(PLAN, slots_start=START - 4096),
    "slots between pages": replace(PLAN, slots_start=START + 8),
    "slots behind the end": replace(PLAN, slots_start=START + (1 << 20)),
    "marks of more slots": replace(PLAN, slot_count=1 << 20),
    "no slots": replace(PLAN, slot_count=0),
    "no groups": replace(PLAN, groups=()),
    "other ranks": replace(PLAN, world_size=2),
    "other blocks": replace(PLAN, blocks_per_chunk=4),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_plan_that_does_not_fit_is_not_written(region: Region, wrong: str) -> None:
    with pytest.raises(ConfigError, match="plan"):
        write_plan(region, WRONG[wrong])
    assert not any(region.view[: PLAN_BYTES + 4096])


def test_groups_that_take_too_much_room_are_refused(region: Region) -> None:
    large = GroupPlan(OpaqueShape(blocks=2, pages=((10**9,) * 30_000,)), Topology(1, (30_000,)))
    with pytest.raises(ConfigError, match="bytes to describe"):
        write_plan(region, replace(PLAN, world_size=1, groups=(large,)))
    assert not any(region.view[:PLAN_BYTES])


# --- marks -------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def marks(region: Region) -> Iterator[Marks]:
    made = Marks(region, PLAN)
    yield made
    made.close()


def mark(marks: Marks, rank: int, numbers: list[int], sequence: int, lacks: bool = False) -> None:
    marks.mark(rank, np.array(numbers, np.int32), sequence, np.full(len(numbers), lacks))


def test_a_slot_is_there_once_every_rank_says_so(marks: Marks) -> None:
    for rank in range(RANKS):
        assert marks.read([1, 4], 7) == ({1, 4}, set())
        mark(marks, rank, [1, 4], 7)
    assert marks.read([1, 4], 7) == (set(), set())
    assert marks.read([1, 2, 4], 7) == ({2}, set())
    assert marks.read([], 7) == (set(), set())


@pytest.mark.parametrize("sequence", [1, 7, MAX_SEQUENCE])
def test_marks_of_another_store_do_not_count(marks: Marks, sequence: int) -> None:
    for rank in range(RANKS):
        mark(marks, rank, [0, 3], sequence)
    assert marks.read([0, 3], sequence) == (set(), set())
    assert marks.read([0, 3], sequence - 1 or MAX_SEQUENCE) == ({0, 3}, set())
    mark(marks, 2, [3], sequence % MAX_SEQUENCE + 1)
    assert marks.read([0, 3], sequence) == ({3}, set())


def test_one_rank_that_lacks_blocks_makes_the_slot_lack_them(marks: Marks) -> None:
    for rank in range(RANKS):
        mark(marks, rank, [0, 1, 2], 5, lacks=rank == 1)
    mark(marks, 3, [2], 6)
    assert marks.read([0, 1, 2], 5) == ({2}, {0, 1}), "what is missing is not said to lack anything"
    mark(marks, 1, [0], 5)
    assert marks.read([0, 1], 5) == (set(), {1}), "a later word counts"


@pytest.mark.parametrize("sequence", [0, -1, MAX_SEQUENCE + 1])
def test_a_sequence_number_out_of_range_is_refused(marks: Marks, region: Region, sequence: int) -> None:
    with pytest.raises(ValueError, match="sequence"):
        mark(marks, 0, [0], sequence)
    assert not any(region.view[PLAN_BYTES:START])


def test_marks_stay_in_their_own_place(marks: Marks, region: Region) -> None:
    """The last mark of the last rank lies before the first slot, and no other changes with it."""
    mark(marks, RANKS - 1, [SLOTS - 1], MAX_SEQUENCE, lacks=True)
    words = np.frombuffer(region.view, np.uint32)
    assert np.flatnonzero(words).tolist() == [PLAN_BYTES // 4 + SLOTS * RANKS - 1]
    assert words[PLAN_BYTES // 4 + SLOTS * RANKS - 1] == 2**32 - 1


def test_closed_marks_say_that_everything_is_missing(region: Region) -> None:
    """What can no longer be read must not be believed; and the region is free to go."""
    made = Marks(region, PLAN)
    made.close()
    mark(made, 0, [0], 1)
    assert made.read([0, 2], 1) == ({0, 2}, set())
    region.close()
    assert is_unmapped(region)


def test_two_mappings_of_a_region_see_one_table(region: Region) -> None:
    """Workers are other processes."""
    ours = Marks(region, PLAN)
    theirs_map = mmap.mmap(region.fd, region.size_bytes)
    view: Any = type("Mapped", (), {"view": memoryview(theirs_map)})()
    theirs = Marks(view, PLAN)
    for rank in range(RANKS):
        mark(theirs, rank, [2], 11, lacks=rank == 3)
    assert ours.read([2], 11) == (set(), {2})
    ours.close()
    theirs.close()


STRATEGY: Callable[..., Any] = st.lists(
    st.tuples(st.integers(0, RANKS - 1), st.integers(0, SLOTS - 1), st.integers(1, 3), st.booleans()), max_size=60
)


@given(STRATEGY)
def test_the_last_word_of_every_rank_decides(words: list[tuple[int, int, int, bool]]) -> None:
    made = Region(START + 4096)
    marks = Marks(made, PLAN)
    last: dict[tuple[int, int], tuple[int, bool]] = {}
    for rank, number, sequence, lacks in words:
        mark(marks, rank, [number], sequence, lacks)
        last[rank, number] = (sequence, lacks)
    for sequence in (1, 2, 3):
        said = {number: [last.get((rank, number), (0, False)) for rank in range(RANKS)] for number in range(SLOTS)}
        missing = {number for number, found in said.items() if any(seen != sequence for seen, _ in found)}
        lacking = {number for number, found in said.items() if any(lacks for _, lacks in found)} - missing
        assert marks.read(range(SLOTS), sequence) == (missing, lacking)
    marks.close()
    made.close()
