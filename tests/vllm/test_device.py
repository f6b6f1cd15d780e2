"""Transfers between the KV tensors of ranks and the records of one shared region."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from offload_world import STALE, UNUSED, SharedRegion, World, device, is_unmapped, kv_caches, random_pages

from kvstore_sdk.backend import Region
from kvstore_sdk.errors import ConfigError
from kvstore_sdk.layout import AttentionShape, LatentShape, OpaqueShape, Section, Shape, StatePart, StateShape, Topology, payload_bytes
from kvstore_sdk.vllm.offloading.copies import group_pages
from kvstore_sdk.vllm.offloading.device import DeviceCopies
from kvstore_sdk.vllm.offloading.transfers import SlotSpec

FOUR = AttentionShape(layers=2, blocks=4, block_tokens=4, heads=2, token_head_bytes=6)
ONE_RANK = Topology(1, (2,))


@pytest.fixture
def world() -> Iterator[Callable[..., World]]:
    built: list[World] = []

    def build(*arguments: Any, **options: Any) -> World:
        built.append(World(*arguments, **options))
        return built[-1]

    yield build
    for made in built:
        made.close()


@st.composite
def cuts(draw: Callable[..., Any]) -> tuple[Shape, Topology, Topology]:
    """A shape, and two ways to cut it."""
    layers, blocks = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    kind = draw(st.sampled_from(["attention", "latent", "state"]))
    heads = draw(st.sampled_from([1, 2, 4]))
    shape: Shape
    if kind == "attention":
        kernel_blocks = draw(st.sampled_from([1, 2]))
        tokens = kernel_blocks * draw(st.integers(1, 3))
        size = draw(st.integers(1, 9))
        shape = AttentionShape(
            layers=layers, blocks=blocks, block_tokens=tokens, heads=heads, token_head_bytes=size, kernel_blocks=kernel_blocks
        )
    elif kind == "latent":
        shape = LatentShape(layers=layers, blocks=blocks, block_tokens=draw(st.integers(1, 4)), token_bytes=draw(st.integers(1, 9)))
    else:
        section = st.builds(Section, st.sampled_from([4, 8]), st.integers(1, 5))
        part = st.builds(StatePart, st.integers(1, 3), st.lists(section, min_size=1, max_size=3).map(tuple))
        shape = StateShape(layers=layers, blocks=blocks, parts=draw(st.lists(part, min_size=1, max_size=2).map(tuple)))
    topologies = []
    for _ in range(2):
        split = draw(st.integers(0, layers))
        topologies.append(Topology(draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([(layers,), (split, layers - split)]))))
    return shape, topologies[0], topologies[1]


@settings(max_examples=60, deadline=None)
@given(cuts(), st.integers(0, 3), st.integers(0, 2**32 - 1))
def test_what_some_ranks_wrote_is_what_one_rank_writes_and_any_ranks_read(
    cut: tuple[Shape, Topology, Topology], skip: int, seed: int
) -> None:
    """The promise of the layout, with real tensors: chunks are the same bytes whoever wrote them, and mean the same to whoever reads."""
    shape, writers, readers = cut
    rng = np.random.default_rng(seed)
    assert not isinstance(shape, OpaqueShape)
    skip %= shape.blocks
    chunks = 2
    count = chunks * shape.blocks
    content = [random_pages(shape, rng) for _ in range(count)]
    numbers = rng.permutation(8)[:chunks].tolist()
    worlds = [World([shape], [topology]) for topology in (writers, Topology(1, (shape.layers,)), readers)]
    try:
        wrote, alone, read = worlds
        for writer in (wrote, alone):
            blocks = rng.permutation(24)[:count].tolist()
            for block, pages in zip(blocks, content, strict=True):
                writer.compute(0, block, pages)
            moved = writer.store(device([blocks], [0]), numbers, 3)
            assert moved == chunks * payload_bytes(shape), "no byte is moved twice, though several ranks hold it"
            assert writer.marks.read(numbers, 3) == (set(), set())
            assert all((writer.around(number) == STALE).all() for number in numbers), "the header and the padding are the sealer's"
        assert [wrote.payload(number) for number in numbers] == [alone.payload(number) for number in numbers]
        for number in numbers:
            at = wrote.start + number * wrote.record
            read.bytes[at : at + read.record] = wrote.bytes[at : at + read.record]
        targets = rng.permutation(24)[: count - skip].tolist()
        read.load(numbers, device([targets], [skip]))
        for block, pages in zip(targets, content[skip:], strict=True):
            assert read.holds(0, block, pages)
        for rank in range(read.ranks):
            others = sorted(set(range(24)) - set(targets))
            assert all((read.cache(rank, layer)[others] == UNUSED).all() for layer in range(len(read.tensors[rank])))
    finally:
        for made in worlds:
            made.close()


def test_groups_that_share_tensors_keep_to_their_own_part_of_a_page(world: Callable[..., World]) -> None:
    """Hybrid models: a page is as long as the longest group needs; what a group does not use belongs to nobody, or to the other one."""
    short = AttentionShape(layers=1, blocks=4, block_tokens=4, heads=2, token_head_bytes=3)
    made = world([FOUR, short], [Topology(2, (2,)), Topology(2, (1,))])
    rng = np.random.default_rng(1)
    long_pages, short_pages = [random_pages(FOUR, rng) for _ in range(4)], [random_pages(short, rng) for _ in range(4)]
    for block in range(4):
        made.compute(0, block, long_pages[block])
        made.compute(1, 4 + block, short_pages[block])
    made.store(device([range(4), range(4, 8)], [0, 4]), [5, 2], 1)
    made.load([5, 2], device([range(10, 14), range(14, 18)], [8, 0]))
    assert all(made.holds(0, 10 + block, long_pages[block]) for block in range(4))
    assert all(made.holds(1, 14 + block, short_pages[block]) for block in range(4)), "and nothing behind them"


def test_layers_that_share_a_cache_count_once() -> None:
    tensors = [torch.zeros((4, 16), dtype=torch.int8) for _ in range(2)]
    assert group_pages(kv_caches(tensors, [[(0, 16), (1, 8), (0, 16)], [(1, 16)]])) == [{0: 16, 1: 8}, {1: 16}]


def test_opaque_chunks_come_back_to_ranks_like_those_that_wrote_them(world: Callable[..., World]) -> None:
    """Pages of unequal lengths, and a stage without layers of the group."""
    shape = OpaqueShape(blocks=2, pages=((5, 9), (5, 9), (), ()))
    made = world([shape], [Topology(2, (2, 0))], pad=3)
    rng = np.random.default_rng(2)
    for rank in range(2):
        for layer in range(2):
            made.cache(rank, layer)[:4, : shape.pages[rank][layer]] = rng.integers(128, 256, (4, shape.pages[rank][layer]), np.uint8)
    made.store(device([[3, 1, 0, 2]], [0]), [1, 0], 1)
    assert made.marks.read([0, 1], 1) == (set(), set()), "a rank without a share says so too"
    made.load([1, 0], device([[10, 11, 12, 13]], [0]))
    for rank in range(2):
        for layer in range(2):
            assert (made.cache(rank, layer)[10:14] == made.cache(rank, layer)[[3, 1, 0, 2]]).all()


def test_blocks_of_a_tensor_may_lie_apart() -> None:
    """Packed layouts: the rest of each stride belongs to others."""
    shape, topology = AttentionShape(layers=1, blocks=2, block_tokens=4, heads=1, token_head_bytes=4), Topology(1, (1,))
    made = World([shape], [topology])
    whole = torch.arange(24 * 40, dtype=torch.int32).to(torch.int8).view(24, 40)
    region = SharedRegion(made.region)
    worker = DeviceCopies(kv_caches([whole[:, 8:24]], [[(0, 16)]]), 2, region, 0, 1)
    try:
        before = whole.clone()
        worker.submit_store(1, device([[3, 9]], [0]), made.slots([0], 1))
        worker.submit_load(2, made.slots([0]), device([[20, 5]], [0]))
        assert torch.equal(whole[[20, 5], 8:24], before[[3, 9], 8:24])
        whole[[20, 5], 8:24] = before[[20, 5], 8:24]
        assert torch.equal(whole, before)
    finally:
        worker.shutdown()
        made.close()


# --- missing blocks ----------------------------------------------------------------------------------------------------------------


def stored_pages(made: World, number: int) -> list[bool]:
    """Of each block of a chunk of `FOUR`, whether it is there in every layer; False: zeros in every layer."""
    chunk = np.frombuffer(made.payload(number), np.uint8).reshape(FOUR.layers, FOUR.blocks, -1)
    there, zero = (chunk >= 128).all(axis=(0, 2)), (chunk == 0).all(axis=(0, 2))
    assert (there | zero).all(), "stale bytes, or a part of a page"
    found: list[bool] = there.tolist()
    return found


@pytest.mark.parametrize("topology", [ONE_RANK, Topology(2, (1, 1)), Topology(4, (2,))], ids=["one rank", "stages", "replicas"])
@pytest.mark.parametrize(("spare", "lacking"), [((), {5}), ((1,), {5}), ((2,), set())], ids=["none spare", "too few spare", "spare"])
def test_blocks_that_a_window_dropped_are_zero_and_the_first_chunk_says_so(
    world: Callable[..., World], topology: Topology, spare: tuple[int, ...], lacking: set[int]
) -> None:
    """What a slot held there belongs to somebody else. Where no reader can need them, the chunk is whole."""
    made = world([FOUR], [topology], spare=spare)
    rng = np.random.default_rng(3)
    for block in range(6):
        made.compute(0, block, random_pages(FOUR, rng))
    made.store(device([range(6)], [2]), [5, 1], 4)
    assert stored_pages(made, 5) == [False, False, True, True]
    assert stored_pages(made, 1) == [True] * 4
    assert made.marks.read([5, 1], 4) == (set(), lacking)


def test_a_store_that_ends_inside_a_chunk_spoils_all_chunks_of_its_group(world: Callable[..., World]) -> None:
    """vLLM pairs the blocks that are left with the pages one after another: any of them may be its neighbour's."""
    made = world([FOUR, FOUR], [ONE_RANK, ONE_RANK], spare=(4, 4))
    rng = np.random.default_rng(4)
    for block in range(11):
        made.compute(0, block, random_pages(FOUR, rng))
    made.store(device([range(7), range(7, 11)], [0, 4]), [6, 0, 3], 9)
    assert stored_pages(made, 0) == [True, True, True, False]
    assert made.marks.read([6, 0, 3], 9) == (set(), {6, 0})


@pytest.mark.parametrize("topology", [ONE_RANK, Topology(2, (1, 1))], ids=["one rank", "stages"])
def test_a_store_that_lost_a_whole_chunk_of_blocks_writes_nothing_and_goes_on(
    world: Callable[..., World], topology: Topology, caplog: pytest.LogCaptureFixture
) -> None:
    """A window dropped blocks in its midst while the store waited for room: nobody can tell which chunk a block belongs to."""
    made = world([FOUR, FOUR], [topology, topology], spare=(4, 4))
    rng = np.random.default_rng(6)
    for block in range(10):
        made.compute(0, block, random_pages(FOUR, rng))
    before = made.bytes[made.start :].tobytes()
    with caplog.at_level(logging.WARNING, "kvstore_sdk"):
        for sequence in (1, 2):
            assert made.store(device([range(6), range(6, 10)], [2, 4]), [6, 0, 4, 3], sequence) == 0
    assert made.bytes[made.start :].tobytes() == before
    assert made.marks.read([6, 0, 4, 3], 2) == (set(), {6, 0, 4, 3}), "of the other group too: its blocks are paired after these"
    assert len([record for record in caplog.records if "given away" in record.getMessage()]) == topology.world_size
    made.store(device([range(4), []], [0, 0]), [6], 3)
    assert made.marks.read([6], 3) == (set(), set())


def test_a_load_with_more_slots_than_blocks_is_refused(world: Callable[..., World]) -> None:
    """The engine could not be told that it got nothing."""
    made = world([FOUR], [ONE_RANK])
    with pytest.raises(ValueError, match="the groups use"):
        made.workers[0].submit_load(1, made.slots([0, 1]), device([range(4)], [0]))


@pytest.mark.parametrize("wrong", [[0, 1, 2, 8], [0, 1, 2, -1]])
def test_slots_that_are_not_there_are_refused_whatever_blocks_are_missing(world: Callable[..., World], wrong: list[int]) -> None:
    """Their marks would be another's memory."""
    made = world([FOUR], [ONE_RANK])
    with pytest.raises(ValueError, match="not all below 8"):
        made.workers[0].submit_store(1, device([range(4)], [0]), made.slots(wrong, 1))


def test_a_later_store_of_a_slot_is_judged_by_itself(world: Callable[..., World]) -> None:
    made = world([FOUR], [ONE_RANK])
    rng = np.random.default_rng(5)
    for block in range(4):
        made.compute(0, block, random_pages(FOUR, rng))
    made.store(device([range(3)], [1]), [2], 1)
    assert made.marks.read([2], 1) == (set(), {2})
    made.store(device([range(4)], [0]), [2], 2)
    assert made.marks.read([2], 2) == (set(), set())
    assert made.marks.read([2], 1) == ({2}, set())


def test_a_slot_that_one_rank_has_not_written_is_missing(world: Callable[..., World]) -> None:
    made = world([FOUR], [Topology(2, (2,))])
    made.workers[1].submit_store(1, device([range(4)], [0]), made.slots([2], 1))
    assert made.marks.read([2], 1) == ({2}, set()), "before it is reported nobody may believe it"
    made.workers[1].get_finished()
    assert made.marks.read([2], 1) == ({2}, set())
    made.workers[0].submit_store(1, device([range(4)], [0]), made.slots([2], 1))
    made.workers[0].get_finished()
    assert made.marks.read([2], 1) == (set(), set())


def test_a_load_touches_neither_slots_nor_marks(world: Callable[..., World]) -> None:
    made = world([FOUR], [ONE_RANK])
    before = made.bytes.tobytes()
    made.load([2], device([[1, 2]], [1]))
    assert made.bytes.tobytes() == before


# --- what the connector asks of a worker -------------------------------------------------------------------------------------------


def test_each_job_is_reported_once_with_its_bytes(world: Callable[..., World]) -> None:
    made = world([FOUR], [ONE_RANK])
    (worker,) = made.workers
    block_bytes = 2 * 4 * 2 * 6
    worker.submit_store(1, device([range(4)], [0]), made.slots([2], 1))
    worker.submit_load(2, made.slots([2]), device([[5]], [3]), expedited=True)
    worker.submit_load(3, SlotSpec([], []), device([[]], [0]))
    worker.wait({1, 3, 99})
    found = worker.get_finished()
    assert [(result.job_id, result.success, result.transfer_size) for result in found] == [
        (1, True, 4 * block_bytes),
        (2, True, block_bytes),
        (3, True, 0),
    ]
    assert all(result.transfer_time >= 0 for result in found)
    assert worker.get_finished() == []
    worker.wait({1, 2, 3})


def test_a_job_number_that_is_under_way_is_refused(world: Callable[..., World]) -> None:
    made = world([FOUR], [ONE_RANK])
    made.workers[0].submit_load(1, made.slots([2]), device([[5]], [0]))
    with pytest.raises(ValueError, match="transfer 1: a job of this number is under way"):
        made.workers[0].submit_load(1, made.slots([2]), device([[5]], [0]))


def test_shutdown_lets_go_of_everything_once(world: Callable[..., World]) -> None:
    made = world([FOUR], [ONE_RANK])
    (worker,) = made.workers
    worker.submit_load(1, made.slots([2]), device([[5]], [0]))
    region = worker._region
    worker.shutdown()
    worker.shutdown()
    assert region.closed == 1
    assert worker.get_finished() == []
    with pytest.raises(ValueError, match="shut down"):
        worker.submit_load(2, made.slots([2]), device([[5]], [0]))


def test_a_closed_worker_leaves_no_view_that_would_keep_the_region_mapped() -> None:
    made = World([FOUR], [ONE_RANK])
    (worker,) = made.workers
    worker.submit_store(1, device([range(4)], [0]), made.slots([2], 1))
    made.close()
    assert is_unmapped(made.region)


WRONG: dict[str, tuple[Callable[[World], Any], Callable[[World], Any], str]] = {
    "a slot before the first": (lambda w: device([range(4)], [0]), lambda w: SlotSpec([0], [0], 1), "no slot starts at"),
    "a slot over the end": (lambda w: device([range(4)], [0]), lambda w: SlotSpec([w.region.size_bytes - 4096], [0], 1), "no slot starts"),
    "a negative slot": (lambda w: device([range(4)], [0]), lambda w: SlotSpec([-4096], [0], 1), "no slot starts at"),
    "a slot between pages": (lambda w: device([range(4)], [0]), lambda w: SlotSpec([w.start + 8], [0], 1), "no slot starts at"),
    "a number too large": (lambda w: device([range(4)], [0]), lambda w: SlotSpec([w.start], [8], 1), "not all below 8"),
    "a negative number": (lambda w: device([range(4)], [0]), lambda w: SlotSpec([w.start], [-1], 1), "not all below 8"),
    "a block too many": (lambda w: device([[0, 1, 2, 24]], [0]), lambda w: w.slots([0], 1), "the device has 24"),
    "a negative block": (lambda w: device([[0, 1, 2, -1]], [0]), lambda w: w.slots([0], 1), "the device has 24"),
    "too few slots": (lambda w: device([range(5)], [0]), lambda w: w.slots([0], 1), "needs 2 rows"),
    "a block without a group": (
        lambda w: SimpleNamespace(block_ids=np.arange(5), group_sizes=[4], block_indices=[0]),
        lambda w: w.slots([0], 1),
        "the groups use",
    ),
    "too many groups": (lambda w: device([range(4), []], [0, 0]), lambda w: w.slots([0], 1), "2 groups, the plan has 1"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_transfer_raises_before_a_byte_moves(world: Callable[..., World], wrong: str) -> None:
    """The engine cannot be told that blocks hold nothing, and a wrong address is another's memory."""
    made = world([FOUR], [ONE_RANK])
    source, slots, problem = WRONG[wrong]
    before, cache = made.bytes.tobytes(), made.cache(0, 0).tobytes()
    (worker,) = made.workers
    with pytest.raises(ValueError, match=problem):
        worker.submit_store(1, source(made), slots(made))
    with pytest.raises(ValueError, match=problem):
        worker.submit_load(1, slots(made), source(made))
    assert made.bytes.tobytes() == before
    assert made.cache(0, 0).tobytes() == cache
    assert worker.get_finished() == []


@pytest.mark.parametrize("sequence", [0, -1, 2**31])
def test_a_store_without_a_sequence_number_is_refused(world: Callable[..., World], sequence: int) -> None:
    made = world([FOUR], [ONE_RANK])
    before = made.bytes.tobytes()
    with pytest.raises(ValueError, match="sequence"):
        made.workers[0].submit_store(1, device([range(4)], [0]), made.slots([0], sequence))
    assert made.bytes.tobytes() == before


def test_two_chunks_of_a_store_never_go_into_one_slot(world: Callable[..., World]) -> None:
    made = world([FOUR], [ONE_RANK])
    with pytest.raises(ValueError, match="one slot"):
        made.workers[0].submit_store(1, device([range(8)], [0]), made.slots([3, 3], 1))


# --- what does not belong together -------------------------------------------------------------------------------------------------


def worker_of(made: World, region: Region, *, ranks: int = 1, blocks: int = 4, page: int = 48, groups: int = 1) -> DeviceCopies:
    tensors = [torch.zeros((24, 64), dtype=torch.int8) for _ in range(2)]
    return DeviceCopies(kv_caches(tensors, [[(0, page), (1, page)]] * groups), blocks, region, 0, ranks)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"ranks": 2}, "2 ranks and 4 blocks"),
        ({"blocks": 2}, "1 ranks and 2 blocks"),
        ({"page": 40}, r"pages of \[40, 40\] bytes, the plan says \[48, 48\]"),
        ({"groups": 2}, "has 2 groups"),
    ],
)
def test_a_plan_of_another_engine_is_refused(world: Callable[..., World], options: dict[str, int], problem: str) -> None:
    made = world([FOUR], [ONE_RANK])
    before = made.bytes.tobytes()
    worker = worker_of(made, SharedRegion(made.region), **options)
    with pytest.raises(ConfigError, match=problem):
        worker.submit_store(1, device([range(4)], [0]), made.slots([0], 1))
    assert made.bytes.tobytes() == before
    worker.shutdown()


def test_a_transfer_before_there_is_a_plan_is_refused(world: Callable[..., World]) -> None:
    made = world([FOUR], [ONE_RANK])
    worker = worker_of(made, Region(made.region.size_bytes))
    with pytest.raises(ConfigError, match="no plan"):
        worker.submit_load(1, made.slots([0]), device([range(4)], [0]))
    worker.shutdown()


def test_tensors_of_another_kind_of_device_are_refused(world: Callable[..., World]) -> None:
    made = world([FOUR], [ONE_RANK])
    tensor = SimpleNamespace(tensor=torch.zeros((4, 8), dtype=torch.int8, device="meta"), page_size_bytes=8)
    caches = SimpleNamespace(tensors=[tensor], group_data_refs=[[SimpleNamespace(tensor_idx=0, page_size_bytes=8)]])
    with pytest.raises(ConfigError, match="meta: only cpu, cuda and xpu"):
        DeviceCopies(caches, 4, SharedRegion(made.region), 0, 1)


def test_blocks_whose_bytes_do_not_follow_each_other_are_refused(world: Callable[..., World]) -> None:
    made = world([FOUR], [ONE_RANK])
    tensor = SimpleNamespace(tensor=torch.zeros((8, 24), dtype=torch.int8).t(), page_size_bytes=8)
    with pytest.raises(ConfigError, match="not contiguous"):
        DeviceCopies(SimpleNamespace(tensors=[tensor], group_data_refs=[[]]), 4, SharedRegion(made.region), 0, 1)
