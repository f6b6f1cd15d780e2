"""vLLM's rows as a Tier sees them."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore_sdk.errors import ClosedError
from kvstore_sdk.vllm.geometry import RankGeometry
from kvstore_sdk.vllm.memory import RowMemory, merge_ranks

EXTENTS = {0: [(0, 8), (16, 4)], 3: [(20, 12)]}


def rows() -> memoryview:
    """As vLLM gives it: signed bytes, two dimensions."""
    return memoryview(np.arange(4 * 32, dtype=np.int16).astype(np.int8).reshape(4, 32))


def test_a_payload_is_the_groups_own_bytes_and_comes_back_to_the_same_places() -> None:
    view = rows()
    memory = RowMemory(view, EXTENTS)
    assert (memory.payload_bytes(0), memory.payload_bytes(3), memory.payload_bytes(1)) == (12, 12, None)
    payload = bytearray(12)
    memory.copy_out(2, 0, memoryview(payload))
    assert list(payload) == [*range(64, 72), *range(80, 84)]
    before = bytes(view)
    memory.copy_in(1, 0, memoryview(bytes(range(200, 212))))
    after = np.frombuffer(view, np.uint8)
    changed = [place for place in range(4 * 32) if before[place] != after[place]]
    assert changed == [*range(32, 40), *range(48, 52)]
    assert list(after[changed]) == list(range(200, 212))


def test_after_close_no_copy_finds_the_memory() -> None:
    """T14: and vLLM can unmap it."""
    view = rows()
    memory = RowMemory(view, EXTENTS)
    memory.close()
    for copy in (memory.copy_out, memory.copy_in):
        with pytest.raises(ClosedError):
            copy(0, 0, memoryview(bytearray(12)))
    view.release()


@pytest.mark.parametrize("row", [-1, 4])
def test_a_row_outside_is_refused(row: int) -> None:
    memory = RowMemory(rows(), EXTENTS)
    with pytest.raises(ValueError, match="outside the 4 rows"):
        memory.copy_out(row, 0, memoryview(bytearray(12)))


@pytest.mark.parametrize("extents", [[(30, 4)], [(0, 8), (4, 8)], [(0, 0)], [(-1, 4)]])
def test_extents_that_cannot_be_are_refused(extents: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="overlaps or leaves"):
        RowMemory(rows(), {0: extents})


def test_ranks_follow_each_other_in_a_payload_wherever_their_slots_are() -> None:
    """KEY-09: vLLM before 0.31 gives slots by device, not by rank."""

    def rank(number: int, extents: dict[int, list[tuple[int, int]]]) -> RankGeometry:
        return RankGeometry(rank=number, world_size=2, host="", rows=1, row_bytes=64, extents=extents, groups={}, facts={}, region="")

    assert merge_ranks([rank(0, {0: [(32, 8)]}), rank(1, {0: [(0, 8)]})]) == {0: [(32, 8), (0, 8)]}
    assert merge_ranks([rank(0, {0: [(0, 8)]}), rank(1, {0: [(8, 8)]})]) == {0: [(0, 16)]}
    assert merge_ranks([rank(0, {0: [(0, 8)]}), rank(1, {0: []})]) == {0: [(0, 8)]}
