"""What is free of a region is what was not taken, in as few parts as can be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore_sdk_backends.p2p.holes import Holes

SIZE = 64


def test_the_smallest_hole_that_is_large_enough_is_used() -> None:
    holes = Holes(SIZE)
    offsets = [holes.take(8) for _ in range(8)]
    assert sorted(offsets, key=str) == sorted(range(0, 64, 8), key=str)
    assert holes.take(1) is None
    for offset in (0, 16, 24, 48, 56):
        holes.add(offset, 8)
    assert holes.parts() == {0: 8, 16: 16, 48: 16}
    assert holes.take(7) == 0
    assert holes.take(9) == 16
    assert holes.take(17) is None


@given(st.data())
def test_against_a_row_of_cells(data: st.DataObject) -> None:
    """Every part that is taken is whole and free before; free parts are as long as the runs of free cells."""
    holes = Holes(SIZE)
    cells = [False] * SIZE
    taken: list[tuple[int, int]] = []
    for _ in range(data.draw(st.integers(1, 40))):
        if taken and data.draw(st.booleans()):
            offset, size = taken.pop(data.draw(st.integers(0, len(taken) - 1)))
            holes.add(offset, size)
            cells[offset : offset + size] = [False] * size
        else:
            size = data.draw(st.integers(1, 12))
            runs = runs_of(cells)
            offset_or_none = holes.take(size)
            fitting = [length for length in runs.values() if length >= size]
            assert (offset_or_none is None) is (not fitting)
            if offset_or_none is not None:
                assert runs[offset_or_none] == min(fitting)
                cells[offset_or_none : offset_or_none + size] = [True] * size
                taken.append((offset_or_none, size))
        assert holes.parts() == runs_of(cells)
        assert len(holes) == len(runs_of(cells))


def runs_of(cells: list[bool]) -> dict[int, int]:
    """Length of each run of free cells by where it starts."""
    runs: dict[int, int] = {}
    start = None
    for at, used in enumerate([*cells, True]):
        if not used and start is None:
            start = at
        elif used and start is not None:
            runs[start] = at - start
            start = None
    return runs
