"""What has to be copied for a transfer, as arrays of offsets and lengths: nothing here touches the bytes, or knows a device."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvstore_sdk.errors import ConfigError
from kvstore_sdk.format import HEADER_BYTES, record_bytes
from kvstore_sdk.layout import Run, page_bytes, runs, write_runs
from kvstore_sdk.vllm.offloading.plan import Plan
from kvstore_sdk.vllm.offloading.transfers import SlotSpec
from kvstore_sdk.vllm.pairing import GroupCopy, Integers, MissingBlocks, plan_copies, used_pages

__all__ = ["Copies", "DevicePages", "RankMap", "StoreCopies", "cut", "group_pages", "merge"]

logger = logging.getLogger(__name__)

_WHERE = "kvstore offloading"
_UNLIMITED = 2**63 - 1


class Copies(NamedTuple):
    """Number i goes with `bytes[i]` bytes at `device[i]` of tensor `tensor[i]` and at `host[i]` of the region. No two overlap."""

    tensor: Integers
    device: Integers
    host: Integers
    bytes: Integers

    @property
    def total_bytes(self) -> int:
        return int(self.bytes.sum())


class StoreCopies(NamedTuple):
    """A store: what to copy, what to zero instead, and which slots lack blocks that a reader may need.

    Attributes:
        copies: From the device into slots.
        zeros: (offset in the region, length) of what this rank writes in pages that no block goes with.
        lacks: Of each slot of the transfer.
    """

    copies: Copies
    zeros: tuple[Integers, Integers]
    lacks: npt.NDArray[np.bool_]


class DevicePages(NamedTuple):
    """A KV tensor of the device: block i starts at byte `i * stride`.

    Attributes:
        tensor: All its bytes, blocks by bytes of a page.
        blocks: Number of blocks.
        stride: Bytes from one block to the next.
    """

    tensor: Any
    blocks: int
    stride: int

    @classmethod
    def of(cls, found: Any) -> DevicePages:
        """From vLLM's `CanonicalKVCacheTensor`.

        Raises:
            ConfigError: the bytes of a block do not follow each other.
        """
        page, tensor = int(found.page_size_bytes), found.tensor.view(torch.int8)
        if tensor.dim() != 2 or tensor.shape[1] != page:
            tensor = tensor.view(-1, page)
        if tensor.shape[1] > 1 and tensor.stride(1) != 1:
            raise ConfigError(_WHERE, "model", f"blocks of a KV tensor with strides {tuple(tensor.stride())} are not contiguous")
        return cls(tensor, int(tensor.shape[0]), int(tensor.stride(0)))

    def flat(self) -> Any:
        """All bytes from the first block's first to the last block's last, as a tensor of one dimension."""
        length = (self.blocks - 1) * self.stride + int(self.tensor.shape[1])
        return self.tensor.as_strided((length,), (1,))


def group_pages(kv_caches: Any) -> list[dict[int, int]]:
    """Of each group, in the engine's order: tensor -> bytes of its page that the group uses. Layer i of a group is its entry number i.

    Layers that share a cache have one tensor, and count as one layer.
    """
    return [used_pages([(int(ref.tensor_idx), int(ref.page_size_bytes)) for ref in refs]) for refs in kv_caches.group_data_refs]


class _Fragments(NamedTuple):
    """Stretches of one block of a chunk: of which tensor, where in its page and in the record, and how long."""

    tensor: Integers
    local: Integers
    record: Integers
    bytes: Integers


class RankMap:
    """Where the pages of one rank lie in the slots of a region, made once from the plan.

    Everything that a transfer names is checked against it before a byte moves: a wrong offset would be another's memory.
    """

    def __init__(self, kv_caches: Any, plan: Plan, rank: int, region_bytes: int, spare: Sequence[int] = ()) -> None:
        """Args:
            kv_caches: vLLM's `CanonicalKVCaches` of this rank.
            plan: Of the region.
            rank: Of this worker.
            region_bytes: Length of the region.
            spare: Of each group, how many pages at the start of a chunk no reader can need. None, unless given.

        Raises:
            ConfigError: the plan is of other groups or other pages than this rank has.
        """
        self.pages = [DevicePages.of(found) for found in kv_caches.tensors]
        groups = group_pages(kv_caches)
        if len(groups) != len(plan.groups) or not 0 <= rank < plan.world_size:
            problem = f"rank {rank} has {len(groups)} groups, the plan {plan.world_size} ranks and {len(plan.groups)} groups"
            raise ConfigError(_WHERE, "plan", problem)
        self._plan, self._region_bytes = plan, region_bytes
        self._spare = tuple(spare) or (0,) * len(groups)
        self._strides = np.array([pages.stride for pages in self.pages], np.int64)
        self._records = [record_bytes(group.payload_bytes) for group in plan.groups]
        self._blocks = [min((self.pages[tensor].blocks for tensor in group), default=_UNLIMITED) for group in groups]
        self._told_of_missing_blocks = False
        self._reads: list[list[_Fragments]] = []
        self._writes: list[list[_Fragments]] = []
        for place, (pages, group) in enumerate(zip(groups, plan.groups, strict=True)):
            expected = page_bytes(group.shape, group.topology, rank)
            if tuple(pages.values()) != expected:
                problem = f"group {place} of rank {rank} has pages of {list(pages.values())} bytes, the plan says {list(expected)}"
                raise ConfigError(_WHERE, "plan", problem)
            for found, table in ((runs, self._reads), (write_runs, self._writes)):
                table.append(_fragments(found(group.shape, group.topology, rank), list(pages), plan.blocks_per_chunk))

    def store(self, device: Any, slots: SlotSpec) -> StoreCopies:
        """What this rank writes of a store, see `StoreCopies`.

        Where so many blocks are left out that nobody can tell which chunks the others belong to, nothing is written, and every chunk lacks
        blocks: a store that was refused for some steps may have lost those of a sliding window in the meantime.

        Raises:
            ValueError: the transfer does not add up in another way, or names what is not there.
        """
        try:
            parts = self._parts(device, slots)
        except MissingBlocks as error:
            log = logger.debug if self._told_of_missing_blocks else logger.warning
            self._told_of_missing_blocks = True
            log(
                "%s: blocks of %d chunks were given away before they could be stored; they are dropped: %s",
                _WHERE,
                len(slots.offsets),
                error,
            )
            return StoreCopies(_nothing(), _joined(()), np.ones(len(slots.offsets), np.bool_))
        if len(np.unique(slots.offsets)) != len(slots.offsets):
            raise ValueError("store: two chunks are to go into one slot")
        lacks: npt.NDArray[np.bool_] = np.zeros(len(slots.offsets), np.bool_)
        zeros: list[tuple[Integers, Integers]] = []
        per_chunk = self._plan.blocks_per_chunk
        for part in parts:
            for chunk, page in part.untouched(per_chunk):
                missing = self._writes[part.group][page]
                zeros.append((slots.offsets[chunk] + missing.record, missing.bytes))
            lacks[part.lacking(self._spare[part.group])] = True
        return StoreCopies(self._copies(parts, slots, self._writes), _joined(zeros), lacks)

    def load(self, device: Any, slots: SlotSpec) -> Copies:
        """What this rank reads of a load. Bytes of a page that its group does not use stay as they are.

        Raises:
            ValueError: the transfer does not add up, or names what is not there.
        """
        return self._copies(self._parts(device, slots), slots, self._reads)

    def _parts(self, device: Any, slots: SlotSpec) -> list[GroupCopy]:
        """The groups of a transfer, with the place of each chunk in `slots` for its row."""
        groups, count = len(self._plan.groups), len(slots.offsets)
        if len(device.group_sizes) != groups:
            raise ValueError(f"transfer: {len(device.group_sizes)} groups, the plan has {groups}")
        if count and not 0 <= int(slots.numbers.min()) <= int(slots.numbers.max()) < self._plan.slot_count:
            raise ValueError(f"transfer: slots {slots.numbers.tolist()} are not all below {self._plan.slot_count}")
        parts = list(plan_copies(device, np.arange(count), self._plan.blocks_per_chunk))
        for part in parts:
            offsets, end = slots.offsets[part.chunks], self._region_bytes - self._records[part.group]
            wrong = (offsets < self._plan.slots_start) | (offsets > end) | (offsets % HEADER_BYTES != 0)
            if wrong.any():
                raise ValueError(
                    f"transfer: group {part.group}: no slot starts at {offsets[wrong].tolist()}; region of {self._region_bytes}"
                )
            if part.blocks.min() < 0 or part.blocks.max() >= self._blocks[part.group]:
                problem = f"blocks {part.blocks.min()} to {part.blocks.max()}, the device has {self._blocks[part.group]}"
                raise ValueError(f"transfer: group {part.group}: {problem}")
        return parts

    def _copies(self, parts: Sequence[GroupCopy], slots: SlotSpec, tables: Sequence[Sequence[_Fragments]]) -> Copies:
        found: list[tuple[Integers, ...]] = []
        for part in parts:
            for page in np.unique(part.pages).tolist():
                fragments = tables[part.group][page]
                here = part.pages == page
                blocks, offsets = part.blocks[here, None], slots.offsets[part.rows[here], None]
                device = blocks * self._strides[fragments.tensor] + fragments.local
                found.append(
                    (
                        np.broadcast_to(fragments.tensor, device.shape).ravel(),
                        device.ravel(),
                        (offsets + fragments.record).ravel(),
                        np.broadcast_to(fragments.bytes, device.shape).ravel(),
                    )
                )
        if not found:
            return _nothing()
        return merge(Copies(*map(np.concatenate, zip(*found, strict=True))))


def merge(copies: Copies) -> Copies:
    """The same bytes in as few copies as may be, by ascending place in the region.

    Blocks that follow each other on the device and in the chunk are one copy. Tensors are never joined, though they may touch: each is an
    allocation of its own to a driver.
    """
    order = np.argsort(copies.host, kind="stable")
    tensor, device, host, size = (array[order] for array in copies)
    if not len(host):
        return copies
    joins = (tensor[1:] == tensor[:-1]) & (device[1:] == device[:-1] + size[:-1]) & (host[1:] == host[:-1] + size[:-1])
    first = np.flatnonzero(np.concatenate(([True], ~joins)))
    return Copies(tensor[first], device[first], host[first], np.add.reduceat(size, first))


def cut(copies: Copies, piece_bytes: int) -> Copies:
    """The same bytes, with no copy that crosses a multiple of `piece_bytes` in the region. A copy is at most one piece long."""
    over = copies.host // piece_bytes != (copies.host + copies.bytes - 1) // piece_bytes
    if not over.any():
        return copies
    before = piece_bytes - copies.host[over] % piece_bytes
    tail = Copies(copies.tensor[over], copies.device[over] + before, copies.host[over] + before, copies.bytes[over] - before)
    size = copies.bytes.copy()
    size[over] = before
    return Copies(*map(np.concatenate, zip(copies._replace(bytes=size), tail, strict=True)))


def _fragments(found: Sequence[Run], tensors: Sequence[int], blocks_per_chunk: int) -> list[_Fragments]:
    """Of each block of a chunk, every stretch of the runs, at its place in the record."""
    table: list[list[tuple[int, int, int, int]]] = [[] for _ in range(blocks_per_chunk)]
    for run in found:
        for number in range(run.count):
            local, payload = run.local_offset + number * run.local_stride, run.offset + number * run.stride
            table[run.block].append((tensors[run.layer], local, HEADER_BYTES + payload, run.length))
    return [_Fragments(*np.array(stretches, np.int64).reshape(-1, 4).T) for stretches in table]


def _nothing() -> Copies:
    return Copies(*(np.empty(0, np.int64) for _ in Copies._fields))


def _joined(stretches: Sequence[tuple[Integers, Integers]]) -> tuple[Integers, Integers]:
    if not stretches:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    offsets, sizes = zip(*stretches, strict=True)
    return np.concatenate(offsets), np.concatenate(sizes)
