"""Ranks that share one region, with KV tensors whose bytes are cut by hand: nothing here asks the layout where anything lies."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvstore_sdk.backend import Region
from kvstore_sdk.format import HEADER_BYTES, record_bytes
from kvstore_sdk.layout import AttentionShape, LatentShape, OpaqueShape, Shape, StateShape, Topology, payload_bytes
from kvstore_sdk.vllm.offloading.device import DeviceCopies
from kvstore_sdk.vllm.offloading.marks import Marks
from kvstore_sdk.vllm.offloading.plan import GroupPlan, Plan, control_bytes, write_plan
from kvstore_sdk.vllm.offloading.transfers import SlotSpec

Bytes = npt.NDArray[np.uint8]
STALE, UNUSED = 0x55, 0x77


def is_unmapped(region: Region) -> bool:
    """Whether the memory is gone: a view that somebody still holds would keep it, and with it every byte of an engine's host tier."""
    return region._map.closed


def device(blocks: Sequence[Sequence[int]], first: Sequence[int]) -> Any:
    """What vLLM's `GPULoadStoreSpec` holds: blocks of each group, and the index in the request of each group's first."""
    return SimpleNamespace(
        block_ids=np.array([block for of_group in blocks for block in of_group], np.int32),
        group_sizes=[len(of_group) for of_group in blocks],
        block_indices=list(first),
    )


def kv_caches(tensors: Sequence[Any], groups: Sequence[Sequence[tuple[int, int]]]) -> Any:
    """vLLM's `CanonicalKVCaches`: tensors of blocks by bytes of a page, and (tensor, used bytes) of each layer of each group."""
    return SimpleNamespace(
        tensors=[SimpleNamespace(tensor=tensor, page_size_bytes=int(tensor.shape[1])) for tensor in tensors],
        group_data_refs=[[SimpleNamespace(tensor_idx=tensor, page_size_bytes=size) for tensor, size in refs] for refs in groups],
    )


def own_page(shape: Shape, tp: int, tp_rank: int, page: Bytes) -> Bytes:
    """The part of a page of all heads that one rank holds."""
    if isinstance(shape, AttentionShape):
        replicas = max(1, tp // shape.heads)
        heads = page.reshape(shape.kernel_blocks, shape.heads, -1)
        count = max(1, shape.heads // tp)
        at = tp_rank // replicas * count
        return heads[:, at : at + count].ravel()
    if isinstance(shape, StateShape):
        parts, at = [], 0
        for part in shape.parts:
            row = sum(section.heads * section.head_bytes for section in part.sections)
            rows = page[at : at + part.rows * row].reshape(part.rows, row)
            at += part.rows * row
            cut, column = [], 0
            for section in part.sections:
                own = section.heads // tp * section.head_bytes
                cut.append(rows[:, column + tp_rank * own : column + (tp_rank + 1) * own])
                column += section.heads * section.head_bytes
            parts.append(np.concatenate(cut, axis=1).ravel())
        return np.concatenate(parts)
    assert isinstance(shape, LatentShape)
    return page


class World:
    """An engine: one worker a rank, over one region whose slots hold stale bytes at first.

    Tensor i of a rank holds layer i of every group; the bytes of a page that a group does not use are `UNUSED`.
    """

    def __init__(
        self,
        shapes: Sequence[Shape],
        topologies: Sequence[Topology],
        *,
        slots: int = 8,
        blocks: int = 24,
        spare: Sequence[int] = (),
        pad: int = 8,
        mover: Any = None,
    ) -> None:
        self.shapes, self.topologies = list(shapes), list(topologies)
        self.ranks = self.topologies[0].world_size
        self.per_chunk = self.shapes[0].blocks
        self.record = max(record_bytes(payload_bytes(shape)) for shape in shapes)
        start = control_bytes(slots, self.ranks)
        self.region = Region(start + slots * self.record)
        self.bytes[start:] = STALE
        self.start = start
        self.plan = Plan(
            world_size=self.ranks,
            blocks_per_chunk=self.per_chunk,
            slot_count=slots,
            slots_start=start,
            groups=tuple(map(GroupPlan, self.shapes, self.topologies)),
        )
        write_plan(self.region, self.plan)
        self.marks = Marks(self.region, self.plan)
        self.tensors: list[list[Any]] = []
        self.workers = []
        for rank in range(self.ranks):
            pages = [self.page_bytes(group, rank) for group in range(len(shapes))]
            count = max(map(len, pages))
            lengths = [max(of_group[layer] for of_group in pages if layer < len(of_group)) + pad for layer in range(count)]
            tensors = [torch.full((blocks, length), UNUSED, dtype=torch.int8) for length in lengths]
            self.tensors.append(tensors)
            caches = kv_caches(tensors, [list(enumerate(of_group)) for of_group in pages])
            # Each rank maps the region for itself, and closes its own mapping; here they share one.
            shared = SharedRegion(self.region)
            self.workers.append(DeviceCopies(caches, self.per_chunk, shared, rank, self.ranks, spare, mover))

    @property
    def bytes(self) -> Bytes:
        return np.frombuffer(self.region.view, np.uint8)

    def layers(self, group: int, rank: int) -> range:
        """The layers of the model's group that `rank` holds."""
        stages = self.topologies[group].stage_layers
        stage = rank // self.topologies[group].tp
        return range(sum(stages[:stage]), sum(stages[: stage + 1]))

    def page_bytes(self, group: int, rank: int) -> list[int]:
        shape = self.shapes[group]
        if isinstance(shape, OpaqueShape):
            return list(shape.pages[rank])
        tp = self.topologies[group].tp
        whole = np.zeros(payload_bytes(shape) // shape.layers // shape.blocks, np.uint8)
        return [len(own_page(shape, tp, rank % tp, whole))] * len(self.layers(group, rank))

    def compute(self, group: int, block: int, pages: Sequence[Bytes]) -> None:
        """What the model does: put the pages of all layers, all heads each, into `block`, each rank its part."""
        topology = self.topologies[group]
        for rank in range(self.ranks):
            for own, layer in enumerate(self.layers(group, rank)):
                page = own_page(self.shapes[group], topology.tp, rank % topology.tp, pages[layer])
                self.cache(rank, own)[block, : len(page)] = page

    def cache(self, rank: int, layer: int) -> Bytes:
        found: Bytes = self.tensors[rank][layer].numpy().view(np.uint8)
        return found

    def holds(self, group: int, block: int, pages: Sequence[Bytes]) -> bool:
        """Whether every rank has its part of the pages in `block`, and nothing behind it."""
        topology = self.topologies[group]
        for rank in range(self.ranks):
            for own, layer in enumerate(self.layers(group, rank)):
                page = own_page(self.shapes[group], topology.tp, rank % topology.tp, pages[layer])
                found = self.cache(rank, own)[block]
                if found[: len(page)].tobytes() != page.tobytes() or not (found[len(page) :] == UNUSED).all():
                    return False
        return True

    def slots(self, numbers: Sequence[int], sequence: int = 0) -> SlotSpec:
        return SlotSpec([self.start + number * self.record for number in numbers], numbers, sequence)

    def store(self, source: Any, numbers: Sequence[int], sequence: int) -> int:
        """By every rank; bytes that all of them moved."""
        moved = 0
        for rank, worker in enumerate(self.workers):
            assert worker.submit_store(10 * sequence + rank, source, self.slots(numbers, sequence))
            (result,) = worker.get_finished()
            assert (result.job_id, result.success) == (10 * sequence + rank, True)
            moved += result.transfer_size
        return moved

    def load(self, numbers: Sequence[int], target: Any) -> None:
        for worker in self.workers:
            assert worker.submit_load(7, self.slots(numbers), target)
            assert [result.success for result in worker.get_finished()] == [True]

    def payload(self, number: int, group: int = 0) -> bytes:
        at = self.start + number * self.record + HEADER_BYTES
        return bytes(self.region.view[at : at + payload_bytes(self.shapes[group])])

    def around(self, number: int, group: int = 0) -> Bytes:
        """What lies in the slot outside of the payload."""
        at = self.start + number * self.record
        size = payload_bytes(self.shapes[group])
        return np.concatenate([self.bytes[at : at + HEADER_BYTES], self.bytes[at + HEADER_BYTES + size : at + self.record]])

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.marks.close()
        self.region.close()


class SharedRegion(Region):
    """The mapping of another region, which stays open when this one is closed."""

    def __init__(self, region: Region) -> None:
        self.id, self.size_bytes, self.fd, self.view, self.address = region.id, region.size_bytes, region.fd, region.view, region.address
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def random_pages(shape: Shape, rng: np.random.Generator) -> list[Bytes]:
    """One block of every layer of the model's group, with all heads. Never a byte of `STALE` or `UNUSED`."""
    assert not isinstance(shape, OpaqueShape)
    size = payload_bytes(shape) // shape.layers // shape.blocks
    return [rng.integers(128, 256, size, np.uint8) for _ in range(shape.layers)]
