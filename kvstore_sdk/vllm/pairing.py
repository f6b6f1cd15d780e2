"""Which block of the device goes with which page of which chunk: how vLLM describes a transfer, whatever the chunks lie in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["GroupCopy", "Integers", "MissingBlocks", "plan_copies", "used_pages"]

Integers: TypeAlias = npt.NDArray[np.int64]


class MissingBlocks(ValueError):
    """There are fewer blocks than the rows of a transfer take."""


def used_pages(refs: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Tensor -> bytes of its page that a group uses, from (tensor, bytes used) of each layer. Layers that share a page count once."""
    used: dict[int, int] = {}
    for tensor, size in refs:
        used[tensor] = max(size, used.get(tensor, 0))
    return used


class GroupCopy(NamedTuple):
    """The part of a transfer that concerns one group: block `blocks[i]` goes with page `pages[i]` of row `rows[i]`.

    Attributes:
        group: Its place in the engine's list.
        blocks: Blocks of the device.
        rows: The row of each block.
        pages: The page in it.
        chunks: The row of each chunk.
        head: Pages of the first chunk before the first block.
        tail: Pages of the last chunk after the last block.
    """

    group: int
    blocks: Integers
    rows: Integers
    pages: Integers
    chunks: Integers
    head: int
    tail: int

    def untouched(self, blocks_per_chunk: int) -> list[tuple[int, int]]:
        """(row, page) that no block goes with."""
        head = [(int(self.chunks[0]), page) for page in range(self.head)]
        return head + [(int(self.chunks[-1]), page) for page in range(blocks_per_chunk - self.tail, blocks_per_chunk)]

    def lacking(self, spare: int) -> Integers:
        """Of a store: rows of chunks without blocks that a reader may need.

        vLLM leaves out blocks that a sliding window has dropped and that hold something else by now. Before the first block of a
        transfer their places are known. After it they are not: vLLM pairs blocks with pages one after another, so the last page stays
        empty, and any chunk of the group may have got blocks of its neighbour. A store that ends inside a chunk therefore spoils all
        chunks of its group.

        Args:
            spare: Pages at the start of a chunk that no reader can need.
        """
        if self.tail:
            return self.chunks
        return self.chunks[: 1 if self.head > spare else 0]


def plan_copies(device: Any, rows: npt.ArrayLike, blocks_per_chunk: int) -> Iterator[GroupCopy]:
    """Pair the blocks of a transfer with pages of rows, group by group.

    The blocks of a group follow each other in the request; the first may lie in the middle of its chunk, and the last may end before its
    chunk does. In a store that happens where a sliding window has already dropped the start of a chunk.

    Args:
        device: vLLM's `GPULoadStoreSpec`: block numbers, blocks of each group, index in the request of each group's first block.
        rows: Rows, chunk by chunk, group by group.
        blocks_per_chunk: Blocks of a chunk.

    Raises:
        MissingBlocks: there are rows that no block goes with.
        ValueError: numbers of blocks and of rows do not fit together in another way.
    """
    blocks = np.asarray(device.block_ids, dtype=np.int64)
    numbers = np.asarray(rows, dtype=np.int64)
    block_at = row_at = 0
    for group, (size, index) in enumerate(zip(device.group_sizes, device.block_indices, strict=True)):
        if size == 0:
            continue
        first = index % blocks_per_chunk
        chunks = -(-(first + size) // blocks_per_chunk)
        positions = np.arange(first, first + size)
        of_group = numbers[row_at : row_at + chunks]
        if len(of_group) != chunks:
            raise ValueError(f"transfer: group {group} needs {chunks} rows, {len(of_group)} are left")
        yield GroupCopy(
            group,
            blocks[block_at : block_at + size],
            of_group[positions // blocks_per_chunk],
            positions % blocks_per_chunk,
            of_group,
            first,
            chunks * blocks_per_chunk - first - size,
        )
        block_at += size
        row_at += chunks
    if block_at != len(blocks) or row_at != len(numbers):
        problem = f"transfer: {len(blocks)} blocks and {len(numbers)} rows, but the groups use {block_at} and {row_at}"
        raise MissingBlocks(problem) if block_at == len(blocks) else ValueError(problem)
