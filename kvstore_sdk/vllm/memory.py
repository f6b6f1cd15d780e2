"""vLLM's host rows as a Tier sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvstore_sdk.errors import ClosedError
from kvstore_sdk.vllm.geometry import Extent, RankGeometry
from kvstore_sdk.vllm.marks import RowMarks

__all__ = ["RowMemory", "merge_ranks"]


def merge_ranks(records: Sequence[RankGeometry]) -> dict[int, list[Extent]]:
    """Of each group, where the bytes of a chunk lie in a row: those of rank 0, then those of rank 1, and so on.

    Neighbours are merged. Ranks that hold the same bytes in one slot give no extents but the first of them.
    """
    merged: dict[int, list[Extent]] = {}
    for record in records:
        for group, extents in record.extents.items():
            found = merged.setdefault(group, [])
            for at, size in extents:
                if found and found[-1][0] + found[-1][1] == at:
                    found[-1] = (found[-1][0], found[-1][1] + size)
                else:
                    found.append((at, size))
    return merged


class RowMemory:
    """`EngineMemory` over vLLM's primary view: of a row, only the bytes of the chunk's own group.

    Copies are numpy's, which gives other threads the interpreter while it copies.
    """

    def __init__(self, view: memoryview, extents: Mapping[int, Sequence[Extent]], marks: Sequence[RowMarks] = ()) -> None:
        """Args:
            view: vLLM's `primary_kv_view`, two dimensions of bytes.
            extents: Of each group, where its bytes lie in a row.
            marks: Of each rank, which rows hold chunks that must not be stored.

        Raises:
            ValueError: an extent lies outside a row, or two of one group overlap.
        """
        self._rows: npt.NDArray[np.uint8] | None = np.asarray(view).view(np.uint8)
        self.row_count, self.row_bytes = self._rows.shape
        self._extents = {group: tuple(found) for group, found in extents.items()}
        for group, found in self._extents.items():
            end = 0
            for at, size in sorted(found):
                if at < end or size < 1 or at + size > self.row_bytes:
                    raise ValueError(f"RowMemory: group {group}: [{at}, {at + size}) overlaps or leaves the row of {self.row_bytes} bytes")
                end = at + size
        self._marks = tuple(marks)
        self._sizes = {group: sum(size for _, size in found) for group, found in self._extents.items()}

    def payload_bytes(self, group: int) -> int | None:
        return self._sizes.get(group)

    def incomplete(self, rows: Sequence[int]) -> list[int]:
        """Places of the rows whose chunk lacks blocks that a reader could need, on any rank."""
        if not rows:
            return []
        return [place for marks in self._marks for place in np.flatnonzero(marks.marked(rows)).tolist()]

    def copy_out(self, row: int, group: int, payload: memoryview) -> None:
        source, target = self._row(row), np.frombuffer(payload, np.uint8)
        start = 0
        for at, size in self._extents[group]:
            target[start : start + size] = source[at : at + size]
            start += size

    def copy_in(self, row: int, group: int, payload: memoryview) -> None:
        target, source = self._row(row), np.frombuffer(payload, np.uint8)
        start = 0
        for at, size in self._extents[group]:
            target[at : at + size] = source[start : start + size]
            start += size
        for marks in self._marks:
            marks.clear(row)

    def close(self) -> None:
        """Let go of the engine's memory, so that it can be unmapped. Copies that come later fail."""
        self._rows = None

    def _row(self, row: int) -> npt.NDArray[np.uint8]:
        rows = self._rows
        if rows is None:
            raise ClosedError(f"kvstore memory: row {row} is asked for after close")
        if not 0 <= row < self.row_count:
            raise ValueError(f"kvstore memory: row {row} is outside the {self.row_count} rows")
        return rows[row]
