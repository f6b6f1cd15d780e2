"""What each rank says of its part of a slot: the number of the store that wrote it, and whether all of it was there.

vLLM counts a store as done when every rank reported it, and has no way to report that part of it was missing. The marks say what really
was written: a slot may be read only once the mark of every rank is that of the store in question.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from kvstore_sdk.backend import Region
from kvstore_sdk.vllm.offloading.plan import PLAN_BYTES, Plan

__all__ = ["MAX_SEQUENCE", "Marks"]

MAX_SEQUENCE = 2**31 - 1
"""Sequence numbers are from 1 to this; then from 1 again. By then no mark of the first ones is read any more."""

_LACKS = np.uint32(1 << 31)


class Marks:
    """A `uint32` for each slot and rank, in the region behind the plan.

    A mark is one aligned word, set after the bytes it speaks of, and before the rank reports the store. The report comes through a
    socket or shared memory of the engine's, which orders it after the mark on every processor; so whoever heard of it sees both.
    """

    def __init__(self, region: Region, plan: Plan) -> None:
        # Held as long as this is: a region whose marks are in use stays mapped. `close` lets go of it.
        table: npt.NDArray[np.uint32] = np.frombuffer(region.view, np.uint32, plan.slot_count * plan.world_size, PLAN_BYTES)
        self._table: npt.NDArray[np.uint32] | None = table.reshape(plan.slot_count, plan.world_size)

    def mark(self, rank: int, numbers: npt.NDArray[np.integer], sequence: int, lacks: npt.NDArray[np.bool_]) -> None:
        """The part of `rank` of these slots was written by store `sequence`; where `lacks`, blocks were missing that a reader may need.

        Raises:
            ValueError: no such sequence number.
        """
        if not 1 <= sequence <= MAX_SEQUENCE:
            raise ValueError(f"store: sequence {sequence} is not from 1 to {MAX_SEQUENCE}")
        if self._table is not None:
            self._table[numbers, rank] = np.uint32(sequence) | np.where(lacks, _LACKS, np.uint32(0))

    def read(self, numbers: Sequence[int] | Collection[int], sequence: int) -> tuple[set[int], set[int]]:
        """What the ranks say of slots that store `sequence` was to fill.

        Returns:
            The slots that some rank has not written, and the others that lack blocks a reader may need.
        """
        asked = np.fromiter(numbers, np.int64)
        if self._table is None:
            return set(asked.tolist()), set()
        found = self._table[asked]
        missing = ((found & ~_LACKS) != sequence).any(axis=1)
        lacks = ((found & _LACKS) != 0).any(axis=1) & ~missing
        return set(asked[missing].tolist()), set(asked[lacks].tolist())

    def close(self) -> None:
        """Let go of the region."""
        self._table = None
