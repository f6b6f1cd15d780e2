"""Copies between paged KV tensors and rows, and rows without stale bytes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstore_sdk.vllm.geometry import group_extents
from kvstore_sdk.vllm.pairing import plan_copies
from kvstore_sdk.vllm.worker import HostCopies, ScrubbedHandler, ScrubbedWorker, SlotLayout, WorkerHandler

ROWS, STRIDE = 8, 8192
PAGES, REFS = (64, 32, 48), (((0, 64), (1, 32)), ((0, 40), (2, 48)))
STALE = 0x55


class Region:
    """As much of vLLM's region as the copies use."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self._row_stride = STRIDE
        self.total_size_bytes = ROWS * STRIDE
        self._base = torch.full((ROWS * STRIDE,), STALE, dtype=torch.int8)
        self.cleaned = 0

    def cleanup(self) -> None:
        self.cleaned += 1

    @property
    def rows(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return self._base.numpy().view(np.uint8).reshape(ROWS, STRIDE)


def caches(blocks: int = 40, seed: int = 0) -> Any:
    """KV tensors of random bytes."""
    torch.manual_seed(seed)
    tensors = [torch.randint(-128, 127, (blocks, page), dtype=torch.int8) for page in PAGES]
    return SimpleNamespace(
        tensors=[SimpleNamespace(tensor=tensor, page_size_bytes=page) for tensor, page in zip(tensors, PAGES, strict=True)],
        group_data_refs=[[SimpleNamespace(tensor_idx=tensor, page_size_bytes=size) for tensor, size in refs] for refs in REFS],
    )


def device(blocks: list[list[int]], first: list[int]) -> Any:
    return SimpleNamespace(
        block_ids=np.array([block for of_group in blocks for block in of_group]),
        group_sizes=[len(of_group) for of_group in blocks],
        block_indices=first,
    )


def host(rows: list[int]) -> Any:
    return SimpleNamespace(block_ids=np.array(rows))


def make(region: Region, blocks_per_chunk: int, offset: int = 0) -> tuple[Any, SlotLayout, ScrubbedWorker]:
    kv = caches()
    layout = SlotLayout(kv, blocks_per_chunk, offset)
    return kv, layout, ScrubbedWorker(HostCopies(kv, layout, region), layout, region)


def expected_row(kv: Any, layout: SlotLayout, group: int, blocks: list[int | None]) -> bytes:
    """The row of one chunk, written down from the definition of the layout; None is a block that is not stored."""
    row = np.full(STRIDE, STALE, np.uint8)
    for tensor, size in REFS[group]:
        for place, block in enumerate(blocks):
            at = layout.offset + layout.blocks_per_chunk * sum(PAGES[:tensor]) + place * PAGES[tensor]
            row[at : at + size] = 0 if block is None else kv.tensors[tensor].tensor[block, :size].numpy().view(np.uint8)
    return row.tobytes()


@pytest.mark.parametrize("offset", [0, 1024])
@pytest.mark.parametrize("blocks_per_chunk", [1, 3])
def test_a_chunk_lies_in_its_row_as_vllm_lays_it_out(blocks_per_chunk: int, offset: int) -> None:
    """Also for the second rank, whose slot starts later. Bytes of other groups and ranks stay as they are."""
    region = Region()
    kv, layout, worker = make(region, blocks_per_chunk, offset)
    blocks = [list(range(2 * blocks_per_chunk)), list(range(20, 20 + blocks_per_chunk))]
    assert worker.submit_store(7, device(blocks, [0, 0]), host([4, 2, 6]))
    (result,) = worker.get_finished()
    assert (result.job_id, result.success) == (7, True)
    assert result.transfer_size == blocks_per_chunk * (2 * (64 + 32) + 40 + 48)
    assert worker.get_finished() == []
    n = blocks_per_chunk
    assert region.rows[4].tobytes() == expected_row(kv, layout, 0, list(blocks[0][:n]))
    assert region.rows[2].tobytes() == expected_row(kv, layout, 0, list(blocks[0][n:]))
    assert region.rows[6].tobytes() == expected_row(kv, layout, 1, list(blocks[1]))


def test_what_was_stored_is_loaded_into_other_blocks() -> None:
    region = Region()
    kv, _, worker = make(region, 4)
    worker.submit_store(1, device([[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11]], [0, 0]), host([1, 2, 3]))
    before = [tensor.tensor.clone() for tensor in kv.tensors]
    # The load starts in the middle of the first chunk, and ends in the middle of the second.
    assert worker.submit_load(2, host([1, 2, 3]), device([[20, 21, 22], [30]], [3, 2]), expedited=True)
    assert [result.job_id for result in worker.get_finished()] == [1, 2]
    for tensor, size in REFS[0]:
        assert torch.equal(kv.tensors[tensor].tensor[20:23, :size], before[tensor][3:6, :size])
    for tensor, size in REFS[1]:
        assert torch.equal(kv.tensors[tensor].tensor[30, :size], before[tensor][10, :size])
    untouched = [block for block in range(40) if block not in (20, 21, 22, 30)]
    assert all(torch.equal(kv.tensors[tensor].tensor[untouched], before[tensor][untouched]) for tensor in range(3))


def test_blocks_that_lie_apart_on_the_device_are_moved_alone() -> None:
    """A layer's pages may be every other of one allocation. What lies between them is another layer's."""
    kv = caches()
    for found in kv.tensors:
        wide = torch.randint(-128, 127, (found.tensor.shape[0], 3 * found.page_size_bytes), dtype=torch.int8)
        found.tensor = wide[:, found.page_size_bytes : 2 * found.page_size_bytes]
    region, layout = Region(), SlotLayout(kv, 2, 0)
    worker = HostCopies(kv, layout, region)
    whole = [found.tensor._base.clone() for found in kv.tensors]
    worker.submit_store(1, device([[0, 1, 2, 3], [4, 5]], [0, 0]), host([1, 2, 3]))
    worker.submit_load(2, host([1, 2, 3]), device([[10, 11, 12, 13], [14, 15]], [0, 0]))
    assert region.rows[2].tobytes() == expected_row(kv, layout, 0, [2, 3])
    for tensor, (before, page) in enumerate(zip(whole, PAGES, strict=True)):
        for group, blocks in enumerate(([0, 1, 2, 3], [4, 5])):
            size = dict(REFS[group]).get(tensor, 0)
            before[[block + 10 for block in blocks], page : page + size] = before[blocks, page : page + size]
        assert torch.equal(kv.tensors[tensor].tensor._base, before)


@pytest.mark.parametrize("blocks", [[-1], [40]], ids=["before the first", "after the last"])
@pytest.mark.parametrize("way", ["store", "load"])
def test_a_transfer_of_blocks_that_are_not_there_touches_nothing(way: str, blocks: list[int]) -> None:
    region = Region()
    kv, _, worker = make(region, 1)
    _refused(worker, kv, region, way, device([[1, *blocks], []], [0, 0]), host([0, 1]))


@pytest.mark.parametrize("rows", [[-1], [ROWS]], ids=["before the first", "after the last"])
@pytest.mark.parametrize("way", ["store", "load"])
def test_a_transfer_of_rows_that_are_not_there_touches_nothing(way: str, rows: list[int]) -> None:
    """They would be another mapping's bytes."""
    region = Region()
    kv, _, worker = make(region, 1)
    _refused(worker, kv, region, way, device([[1, 2], []], [0, 0]), host([0, *rows]))


def _refused(worker: ScrubbedWorker, kv: Any, region: Region, way: str, blocks: Any, rows: Any) -> None:
    before = [tensor.tensor.clone() for tensor in kv.tensors], region.rows.tobytes()
    with pytest.raises(ValueError, match="are not all below"):
        worker.submit_store(1, blocks, rows) if way == "store" else worker.submit_load(1, rows, blocks)
    assert all(torch.equal(tensor.tensor, old) for tensor, old in zip(kv.tensors, before[0], strict=True))
    assert region.rows.tobytes() == before[1]
    assert worker.get_finished() == []


def test_a_part_of_a_chunk_that_is_not_stored_is_zeroed() -> None:
    """A sliding window has dropped the first blocks: what the row held there belongs to somebody else."""
    region = Region()
    kv, layout, worker = make(region, 4)
    worker.submit_store(1, device([[2, 3], [11]], [2, 7]), host([0, 5]))
    assert region.rows[0].tobytes() == expected_row(kv, layout, 0, [None, None, 2, 3])
    assert region.rows[5].tobytes() == expected_row(kv, layout, 1, [None, None, None, 11])


def test_the_rows_of_a_load_are_not_scrubbed() -> None:
    region = Region()
    _, _, worker = make(region, 4)
    before = region.rows.tobytes()
    worker.submit_load(1, host([0]), device([[2, 3], []], [2, 0]))
    assert region.rows.tobytes() == before


def test_shutdown_lets_go_of_the_region_once() -> None:
    region = Region()
    _, _, worker = make(region, 1)
    worker.wait({1, 2, 3})
    worker.shutdown()
    worker.shutdown()
    assert region.cleaned == 1


def test_vllms_own_worker_is_passed_everything_and_its_rows_are_scrubbed() -> None:
    """On CUDA and XPU vLLM's kernels copy; what they leave of a row is zeroed first."""
    region = Region()
    layout = SlotLayout(caches(), 4, 0)
    asked: list[Any] = []

    def submit(*arguments: Any, **options: Any) -> bool:
        asked.append((arguments, options, region.rows[0, : 2 * 64].copy().tobytes()))
        return True

    inner = SimpleNamespace(
        submit_store=submit, submit_load=submit, get_finished=lambda: ["finished"], wait=asked.append, shutdown=lambda: asked.append("end")
    )
    worker = ScrubbedWorker(inner, layout, region)
    source, target = device([[2, 3], []], [2, 0]), host([0])
    assert worker.submit_store(1, source, target)
    assert asked.pop() == ((1, source, target), {}, bytes(128))
    assert worker.submit_load(2, target, source, expedited=True)
    assert asked.pop()[:2] == ((2, target, source), {"expedited": True})
    assert worker.get_finished() == ["finished"]
    worker.wait({5})
    worker.shutdown()
    assert asked == [{5}, "end"]


def test_handlers_of_an_older_vllm_share_one_worker() -> None:
    """vLLM 0.24 drives a handler for each direction: results come once, and the region is closed once."""
    region = Region()
    kv, _, worker = make(region, 1)
    stores, loads = WorkerHandler(worker, "store"), WorkerHandler(worker, "load")
    blocks, rows = device([[1], [2]], [0, 0]), host([3, 4])
    assert stores.transfer_async(1, (blocks, rows))
    before = kv.tensors[0].tensor[1].clone()
    kv.tensors[0].tensor[1] = 0
    assert loads.transfer_async(2, (rows, blocks))
    assert torch.equal(kv.tensors[0].tensor[1], before)
    assert loads.get_finished() == []
    assert [result.job_id for result in stores.get_finished()] == [1, 2]
    stores.wait({1})
    loads.shutdown()
    assert region.cleaned == 0
    stores.shutdown()
    assert region.cleaned == 1


def test_an_older_vllms_own_handler_is_scrubbed_for() -> None:
    region = Region()
    asked: list[Any] = []
    inner = SimpleNamespace(
        transfer_async=lambda *arguments: asked.append(arguments) or True,  # type: ignore[func-returns-value]
        get_finished=list,
        wait=asked.append,
        shutdown=lambda: asked.append("end"),
    )
    handler = ScrubbedHandler(inner, SlotLayout(caches(), 4, 0), region)
    spec = (device([[2, 3], []], [2, 0]), host([0]))
    assert handler.transfer_async(1, spec)
    assert not region.rows[0, :128].any()
    assert handler.get_finished() == []
    handler.wait({1})
    handler.shutdown()
    assert asked == [(1, spec), {1}, "end"]


@pytest.mark.parametrize(
    ("blocks", "rows"), [([[1, 2, 3]], [0]), ([[1, 2]], [0, 1]), ([[1], [2]], [0])], ids=["too few rows", "too many", "none left"]
)
def test_a_transfer_that_does_not_add_up_is_refused(blocks: list[list[int]], rows: list[int]) -> None:
    """Silence would be wrong KV: the engine cannot be told that blocks hold nothing."""
    with pytest.raises(ValueError, match="transfer"):
        list(plan_copies(device(blocks, [0] * len(blocks)), rows, 2))


@st.composite
def transfers(draw: Callable[..., Any]) -> tuple[int, list[int], list[int]]:
    per_chunk = draw(st.integers(1, 5))
    sizes = draw(st.lists(st.integers(0, 12), min_size=1, max_size=4))
    firsts = [draw(st.integers(0, 20)) for _ in sizes]
    return per_chunk, sizes, firsts


@given(transfers())
def test_every_page_of_every_row_is_paired_or_untouched(transfer: tuple[int, list[int], list[int]]) -> None:
    """For any sizes: block i of a group goes with page (first + i) of the group's rows, one after another."""
    per_chunk, sizes, firsts = transfer
    chunks = [-(-(first % per_chunk + size) // per_chunk) if size else 0 for size, first in zip(sizes, firsts, strict=True)]
    rows = list(range(100, 100 + sum(chunks)))
    blocks = [[1000 * group + number for number in range(size)] for group, size in enumerate(sizes)]
    seen: dict[int, list[tuple[int, int]]] = {}
    for part in plan_copies(device(blocks, firsts), rows, per_chunk):
        assert part.blocks.tolist() == blocks[part.group]
        flat = [(row - 100) * per_chunk + page for row, page in zip(part.rows.tolist(), part.pages.tolist(), strict=True)]
        start = sum(chunks[: part.group]) * per_chunk + firsts[part.group] % per_chunk
        assert flat == list(range(start, start + len(flat)))
        pairs = list(zip(part.rows.tolist(), part.pages.tolist(), strict=True)) + part.untouched(per_chunk)
        assert len(set(pairs)) == len(pairs)
        seen[part.group] = pairs
    everything = sorted(pair for pairs in seen.values() for pair in pairs)
    assert everything == [(row, page) for row in rows for page in range(per_chunk)]


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(0, 64)), min_size=1, max_size=6), st.integers(1, 5), st.integers(0, 3))
def test_extents_are_exactly_what_a_store_writes(tensors: list[tuple[int, int]], blocks_per_chunk: int, slot: int) -> None:
    """What goes into a record is what the copy wrote, byte for byte and no byte more."""
    pages = [used + padding for used, padding in tensors]
    refs = [(number, used) for number, (used, _) in enumerate(tensors)]
    offset = slot * blocks_per_chunk * sum(pages)
    written = set()
    for tensor, used in refs:
        for block in range(blocks_per_chunk):
            at = offset + blocks_per_chunk * sum(pages[:tensor]) + block * pages[tensor]
            written |= set(range(at, at + used))
    extents = group_extents(refs, pages, blocks_per_chunk, offset)
    covered = [byte for at, size in extents for byte in range(at, at + size)]
    assert len(covered) == len(set(covered))
    assert set(covered) == written
    assert all(one[0] + one[1] < other[0] for one, other in pairwise(extents)), "neighbours are merged"
