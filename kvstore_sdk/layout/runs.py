"""Which stretches of its pages a rank writes into a chunk and reads from it, and the proof that they fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvstore_sdk.layout.shapes import (
    AttentionShape,
    CanonicalShape,
    LatentShape,
    LayoutError,
    OpaqueShape,
    Shape,
    Topology,
    payload_bytes,
    whole_page_bytes,
)

__all__ = ["Run", "page_bytes", "prove", "runs", "write_runs"]


@dataclass(frozen=True, slots=True)
class Run:
    """Stretches of a page of one rank, and where they lie in the payload: number i of `count` starts `i` strides further, on both sides.

    Attributes:
        layer: Of this rank's layers of the group, from 0.
        block: Of the chunk, from 0.
        local_offset: Of the first stretch, in the page.
        offset: Of the first stretch, in the payload.
        length: Of a stretch, in bytes.
        count: Number of stretches.
        local_stride: Bytes from one stretch to the next, in the page.
        stride: The same in the payload.
    """

    layer: int
    block: int
    local_offset: int
    offset: int
    length: int
    count: int = 1
    local_stride: int = 0
    stride: int = 0


def page_bytes(shape: Shape, topology: Topology, rank: int) -> tuple[int, ...]:
    """Length of a page of each layer that `rank` holds, without what the engine adds to align it.

    Raises:
        LayoutError: the shape cannot be cut this way.
    """
    layers, tp_rank = _place(shape, topology, rank)
    if isinstance(shape, OpaqueShape):
        return shape.pages[rank]
    return (sum(stretch.length * stretch.count for stretch in _page(shape, topology.tp, tp_rank)),) * len(layers)


def runs(shape: Shape, topology: Topology, rank: int) -> tuple[Run, ...]:
    """What `rank` reads of a chunk: all its pages, layer by layer and block by block.

    Raises:
        LayoutError: the shape cannot be cut this way.
    """
    return tuple(_runs(shape, topology, rank, all_turns=True))


def write_runs(shape: Shape, topology: Topology, rank: int) -> tuple[Run, ...]:
    """What `rank` writes of a chunk. All ranks together write every byte exactly once: those with the same bytes take turns, page by page.

    Raises:
        LayoutError: the shape cannot be cut this way.
    """
    return tuple(_runs(shape, topology, rank, all_turns=False))


def prove(shape: Shape, topology: Topology) -> None:
    """Check by counting bytes that a chunk is written whole and read whole.

    Raises:
        LayoutError: the shape cannot be cut this way; or what all ranks write does not tile the payload exactly once, or what a rank
            reads does not tile its pages exactly once, which would be a fault of this module.
    """
    size = payload_bytes(shape)
    written: list[tuple[int, int]] = []
    for rank in range(topology.world_size):
        written += (stretch for run in write_runs(shape, topology, rank) for stretch in _stretches(run.offset, run.stride, run))
        pages = page_bytes(shape, topology, rank)
        read: dict[tuple[int, int], list[tuple[int, int]]] = {
            (layer, block): [] for layer in range(len(pages)) for block in range(shape.blocks)
        }
        for run in runs(shape, topology, rank):
            read[run.layer, run.block] += _stretches(run.local_offset, run.local_stride, run)
            if run.offset < 0 or run.offset + (run.count - 1) * run.stride + run.length > size:
                raise LayoutError(f"layout: rank {rank} of {topology} reads outside of the {size} bytes of {shape}: {run}")
        for (layer, block), stretches in read.items():
            if not _tile(stretches, pages[layer]):
                raise LayoutError(f"layout: rank {rank} of {topology} does not read layer {layer}, block {block} of {shape} exactly once")
    if not _tile(written, size):
        raise LayoutError(f"layout: the ranks of {topology} do not write the {size} bytes of {shape} exactly once")


def _runs(shape: Shape, topology: Topology, rank: int, *, all_turns: bool) -> Iterator[Run]:
    layers, tp_rank = _place(shape, topology, rank)
    if isinstance(shape, OpaqueShape):
        offset = shape.blocks * sum(map(sum, shape.pages[:rank]))
        for layer, page in enumerate(shape.pages[rank]):
            for block in range(shape.blocks):
                yield Run(layer, block, 0, offset, page)
                offset += page
        return
    replicas, turn = _replicas(shape, topology.tp, tp_rank)
    page, stretches = whole_page_bytes(shape), _page(shape, topology.tp, tp_rank)
    for layer, whole_layer in enumerate(layers):
        for block in range(shape.blocks):
            number = whole_layer * shape.blocks + block
            if all_turns or number % replicas == turn:
                for stretch in stretches:
                    yield replace(stretch, layer=layer, block=block, offset=number * page + stretch.offset)


def _place(shape: Shape, topology: Topology, rank: int) -> tuple[range, int]:
    """The layers of `rank` among those of the group, and its place among the ranks of its stage."""
    if not 0 <= rank < topology.world_size:
        raise LayoutError(f"layout: rank {rank} is none of the {topology.world_size} of {topology}")
    stage, tp_rank = divmod(rank, topology.tp)
    before = sum(topology.stage_layers[:stage])
    layers = range(before, before + topology.stage_layers[stage])
    if isinstance(shape, OpaqueShape):
        if tuple(map(len, shape.pages)) != tuple(count for count in topology.stage_layers for _ in range(topology.tp)):
            raise LayoutError(f"layout: {topology} has other layers than the pages of an opaque chunk")
    elif shape.layers != sum(topology.stage_layers):
        raise LayoutError(f"layout: the stages of {topology} have {sum(topology.stage_layers)} layers, the group has {shape.layers}")
    return layers, tp_rank


def _replicas(shape: CanonicalShape, tp: int, tp_rank: int) -> tuple[int, int]:
    """How many ranks of a stage hold the same bytes as this one, and its number among them."""
    if isinstance(shape, LatentShape):
        return tp, tp_rank
    if isinstance(shape, AttentionShape) and shape.heads < tp:
        if tp % shape.heads:
            raise LayoutError(f"layout: {tp} ranks cannot share {shape.heads} heads equally")
        return tp // shape.heads, tp_rank % (tp // shape.heads)
    return 1, 0


def _page(shape: CanonicalShape, tp: int, tp_rank: int) -> tuple[Run, ...]:
    """Where the page of one rank lies in the page that has all heads, as the first page of the payload."""
    if isinstance(shape, LatentShape):
        return (Run(0, 0, 0, 0, whole_page_bytes(shape)),)
    if isinstance(shape, AttentionShape):
        replicas, _ = _replicas(shape, tp, tp_rank)
        heads = _share("heads", shape.heads * replicas, tp)
        head = shape.block_tokens // shape.kernel_blocks * shape.token_head_bytes
        offset = tp_rank // replicas * heads * head
        return (_stretch(0, offset, heads * head, shape.kernel_blocks, heads * head, shape.heads * head),)
    stretches: list[Run] = []
    local = whole = 0
    for part in shape.parts:
        local_row = sum(_share("state heads", section.heads, tp) * section.head_bytes for section in part.sections)
        row = sum(section.heads * section.head_bytes for section in part.sections)
        local_at, at = local, whole
        for section in part.sections:
            length = section.heads // tp * section.head_bytes
            stretches.append(_stretch(local_at, at + tp_rank * length, length, part.rows, local_row, row))
            local_at += length
            at += section.heads * section.head_bytes
        local += part.rows * local_row
        whole += part.rows * row
    return tuple(stretches)


def _share(what: str, count: int, tp: int) -> int:
    if count % tp:
        raise LayoutError(f"layout: {count} {what} cannot be cut in {tp} equal parts")
    return count // tp


def _stretch(local_offset: int, offset: int, length: int, count: int, local_stride: int, stride: int) -> Run:
    """What follows without a gap on both sides is one stretch."""
    if length == local_stride == stride:
        return Run(0, 0, local_offset, offset, length * count)
    return Run(0, 0, local_offset, offset, length, count, local_stride, stride) if count > 1 else Run(0, 0, local_offset, offset, length)


def _stretches(offset: int, stride: int, run: Run) -> Iterator[tuple[int, int]]:
    return ((offset + number * stride, offset + number * stride + run.length) for number in range(run.count))


def _tile(stretches: list[tuple[int, int]], size: int) -> bool:
    """Whether the stretches cover 0 to `size` without a gap and without an overlap."""
    at = 0
    for start, end in sorted(stretches):
        if start != at or end <= start:
            return False
        at = end
    return at == size
