"""The host's end of a transfer, as the scheduler's side sends it to the workers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from vllm.v1.kv_offload.base import LoadStoreSpec

__all__ = ["SlotSpec"]


class SlotSpec(LoadStoreSpec):
    """Slots of the shared region, chunk by chunk, group by group in the engine's order. It is pickled with every step's metadata.

    Attributes:
        offsets: Where each slot starts in the region, int64.
        numbers: Its number, int32: the place of its marks.
        sequence: Of a store, the number that its marks carry, 1 to `MAX_SEQUENCE`; of a load, 0.
    """

    __slots__ = ("numbers", "offsets", "sequence")

    def __init__(self, offsets: Sequence[int], numbers: Sequence[int], sequence: int = 0) -> None:
        """Raises ValueError when the lists are not of one length."""
        self.offsets = np.asarray(offsets, dtype=np.int64)
        self.numbers = np.asarray(numbers, dtype=np.int32)
        self.sequence = sequence
        if self.offsets.shape != self.numbers.shape or self.offsets.ndim != 1:
            raise ValueError(f"SlotSpec: {self.offsets.size} offsets and {self.numbers.size} numbers")

    @staticmethod
    def medium() -> str:
        """Name of the medium, by which vLLM up to 0.24 finds the handler of a transfer. Abstract up to 0.25, unused after."""
        return "KVSTORE"

    def __repr__(self) -> str:
        return f"SlotSpec(numbers={self.numbers.tolist()}, sequence={self.sequence})"
