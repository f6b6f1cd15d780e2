"""What crosses from the scheduler's side to the workers, and what a transfer comes down to before a byte moves."""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import LoadStoreSpec

from kvstore_sdk.vllm.offloading.copies import Copies, cut, merge
from kvstore_sdk.vllm.offloading.transfers import SlotSpec


def test_a_spec_comes_out_of_a_pickle_as_it_went_in() -> None:
    """It crosses to every worker in each step's metadata."""
    spec = SlotSpec([4096, 2**40], [0, 2**31 - 1], 2**31 - 1)
    there = ForkingPickler.loads(ForkingPickler.dumps(spec))
    assert isinstance(there, LoadStoreSpec)
    assert (there.offsets.tolist(), there.numbers.tolist(), there.sequence) == ([4096, 2**40], [0, 2**31 - 1], 2**31 - 1)
    assert (there.offsets.dtype, there.numbers.dtype) == (np.int64, np.int32)


def test_a_spec_costs_little_a_slot() -> None:
    one, many = (len(ForkingPickler.dumps(SlotSpec(range(count), range(count)))) for count in (1, 1001))
    assert many - one <= 1000 * 12 + 16


def test_an_empty_spec_is_one() -> None:
    spec = SlotSpec([], [])
    assert (spec.offsets.dtype, spec.numbers.dtype, len(spec.offsets), spec.sequence) == (np.int64, np.int32, 0, 0)


@pytest.mark.parametrize(("offsets", "numbers"), [([1], []), ([], [1]), ([1, 2], [1])])
def test_lists_of_unequal_length_are_refused(offsets: list[int], numbers: list[int]) -> None:
    with pytest.raises(ValueError, match="SlotSpec"):
        SlotSpec(offsets, numbers)


def test_the_name_of_the_medium_needs_no_instance() -> None:
    """Abstract and static up to vLLM 0.25, which looks handlers up by it."""
    assert SlotSpec.medium() == SlotSpec([], []).medium() != "CPU"


# --- descriptors -------------------------------------------------------------------------------------------------------------------


def made(*rows: tuple[int, int, int, int]) -> Copies:
    return Copies(*np.array(rows, np.int64).reshape(-1, 4).T)


def rows(copies: Copies) -> list[tuple[int, ...]]:
    return list(zip(*(array.tolist() for array in copies), strict=True))


def single_bytes(copies: Copies) -> set[tuple[int, int, int]]:
    """(tensor, byte of it, byte of the region) of every byte."""
    return {(tensor, device + i, host + i) for tensor, device, host, size in rows(copies) for i in range(size)}


def test_neighbours_on_both_sides_are_one_copy() -> None:
    assert rows(merge(made((0, 8, 108, 4), (0, 0, 100, 8), (0, 12, 112, 1)))) == [(0, 0, 100, 13)]


@pytest.mark.parametrize(
    "second",
    [(1, 8, 108, 4), (0, 9, 108, 4), (0, 8, 109, 4), (0, 0, 108, 4)],
    ids=["another tensor", "a gap on the device", "a gap in the region", "the same block again"],
)
def test_what_is_no_neighbour_on_both_sides_stays_apart(second: tuple[int, int, int, int]) -> None:
    assert rows(merge(made((0, 0, 100, 8), second))) == [(0, 0, 100, 8), second]


def test_nothing_is_merged_into_nothing() -> None:
    assert rows(merge(made())) == []


@st.composite
def copies(draw: st.DrawFn) -> Copies:
    """Copies as a transfer has them: every byte of the region at most once, in any order."""
    host, found = 0, []
    for _ in range(draw(st.integers(0, 12))):
        size = draw(st.integers(1, 6))
        host += draw(st.sampled_from([0, 0, 3]))
        follows = bool(found) and draw(st.booleans())
        tensor, device = (found[-1][0], found[-1][1] + found[-1][3]) if follows else (draw(st.integers(0, 1)), draw(st.integers(0, 40)))
        found.append((tensor, device, host, size))
        host += size
    return made(*draw(st.permutations(found)))


@given(copies())
def test_merged_copies_are_the_same_bytes_in_ascending_order(found: Copies) -> None:
    merged = merge(found)
    assert single_bytes(merged) == single_bytes(found)
    assert merged.total_bytes == found.total_bytes
    assert merged.host.tolist() == sorted(merged.host.tolist())
    ends = list(zip(merged.tensor, merged.device + merged.bytes, merged.host + merged.bytes, strict=True))
    starts = list(zip(merged.tensor, merged.device, merged.host, strict=True))
    assert not any(end == start for end, start in zip(ends, starts[1:], strict=False)), "nothing is left to merge"


@given(copies(), st.integers(0, 40))
def test_cut_copies_are_the_same_bytes_and_cross_no_boundary(found: Copies, more: int) -> None:
    """Memory is pinned piece by piece, and a driver refuses a copy that crosses from one into the next."""
    merged = merge(found)
    piece = max([*merged.bytes.tolist(), 1]) + more
    after = cut(merged, piece)
    assert single_bytes(after) == single_bytes(found)
    assert all(host // piece == (host + size - 1) // piece for _, _, host, size in rows(after))
    assert (after.bytes > 0).all()
