"""Memory that a backend is given: its buffers, and what lies around them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kvstore_sdk.backend import Buffer, Region

__all__ = ["AROUND", "INSIDE", "Arena"]

GAP = 4096
"""Between two buffers, and before the first and after the last one. Buffers begin on a page, or `shift` bytes after."""
AROUND, INSIDE = 0xA5, 0xEE
"""What lies around the buffers, and in those of a get, before a call that is watched."""


class Arena:
    """One region with some buffers in it, for one call at a time."""

    def __init__(self, size_bytes: int) -> None:
        self.region = Region(size_bytes, "kvstore-conformance")
        self.buffers: list[Buffer] = []

    @staticmethod
    def size_for(lengths: Sequence[int], shift: int) -> int:
        """Bytes of an arena that has room for buffers of these lengths."""
        return GAP + sum(_pages(length + shift) + GAP for length in lengths)

    def lay_out(self, lengths: Sequence[int], shift: int) -> list[Buffer]:
        """Buffers of these lengths, apart from each other."""
        self.buffers, offset = [], GAP
        for length in lengths:
            self.buffers.append(self.region.buffer(offset + shift, length))
            offset += _pages(length + shift) + GAP
        return self.buffers

    def paint(self) -> None:
        """Paint everything, the buffers in another colour."""
        self.region.view[:] = bytes([AROUND]) * self.region.size_bytes
        for buffer in self.buffers:
            buffer.view[:] = bytes([INSIDE]) * buffer.length

    def changed_around(self) -> int | None:
        """Offset in the region of the first byte outside the buffers that lost its paint."""
        inside = sorted((buffer.offset, buffer.offset + buffer.length) for buffer in self.buffers)
        for start, end in itertools.pairwise([0, *itertools.chain.from_iterable(inside), self.region.size_bytes]):
            if (start, end) in inside:
                continue
            piece = bytes(self.region.view[start:end])
            if piece.count(AROUND) != len(piece):
                return start + next(index for index, byte in enumerate(piece) if byte != AROUND)
        return None

    def close(self) -> None:
        self.region.close()


def _pages(length: int) -> int:
    return -(-length // GAP) * GAP
