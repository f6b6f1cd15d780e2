"""What the chunks of a group are made of, and how an engine's ranks cut them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore_sdk.errors import KVStoreError

__all__ = [
    "LAYOUT_VERSION",
    "OPAQUE",
    "AttentionShape",
    "CanonicalShape",
    "LatentShape",
    "LayoutError",
    "OpaqueShape",
    "Section",
    "Shape",
    "StatePart",
    "StateShape",
    "Topology",
    "layout_id",
    "payload_bytes",
    "shape_from_plain",
    "shape_to_plain",
    "whole_page_bytes",
]

LAYOUT_VERSION = 1
"""Of the order of layers, blocks and heads. Interiors have names of their own."""

OPAQUE = "opaque-ranks"
"""Layout id of chunks that only an engine like the writer's can read."""


class LayoutError(KVStoreError, ValueError):
    """A shape cannot be cut this way, or is of no kind that is known. Nothing was written."""


@dataclass(frozen=True, slots=True)
class Topology:
    """How the ranks of an engine cut one group. The rank of a worker is `stage * tp + tp_rank`.

    Attributes:
        tp: Ranks that share the heads.
        stage_layers: Layers of the group in each pipeline stage, in order. Stages may be uneven, and may have none.
    """

    tp: int
    stage_layers: tuple[int, ...]

    def __post_init__(self) -> None:
        _positive("Topology", tp=self.tp)
        if not self.stage_layers or min(self.stage_layers) < 0 or sum(self.stage_layers) < 1:
            raise LayoutError(f"Topology: stage_layers: {self.stage_layers} must be layers of each stage, at least one in all")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * len(self.stage_layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Keys and values, cut by heads. Payload: layer, block, kernel block, head, then the interior.

    Attributes:
        layers: Layers of the group over all stages.
        blocks: Blocks of a chunk.
        block_tokens: Tokens of a block.
        heads: KV heads over all ranks.
        token_head_bytes: Bytes of K and V of one head of one token.
        kernel_blocks: In how many blocks the attention kernel divides one of the engine's; each of them has all heads of the rank.
    """

    layers: int
    blocks: int
    block_tokens: int
    heads: int
    token_head_bytes: int
    kernel_blocks: int = 1

    def __post_init__(self) -> None:
        _all_positive(self)
        if self.block_tokens % self.kernel_blocks:
            raise LayoutError(f"AttentionShape: kernel_blocks: {self.kernel_blocks} does not divide {self.block_tokens} tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """Latents (MLA), which every rank of a stage holds whole. Payload: layer, block, token.

    Attributes:
        layers: Layers of the group over all stages.
        blocks: Blocks of a chunk.
        block_tokens: Tokens of a block.
        token_bytes: Bytes of one token.
    """

    layers: int
    blocks: int
    block_tokens: int
    token_bytes: int

    def __post_init__(self) -> None:
        _all_positive(self)


@dataclass(frozen=True, slots=True)
class Section:
    """A stretch of a row of a state that is cut by heads.

    Attributes:
        heads: Over all ranks, in the model's order.
        head_bytes: Bytes of one head in one row.
    """

    heads: int
    head_bytes: int

    def __post_init__(self) -> None:
        _all_positive(self)


@dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor of a state: rows of sections. Each rank has its heads of each section, section by section.

    The convolution state of a gated delta net, for example, has one row a token and the sections q, k and v.
    """

    rows: int
    sections: tuple[Section, ...]

    def __post_init__(self) -> None:
        _positive("StatePart", rows=self.rows, sections=len(self.sections))


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShape:
    """States (Mamba, gated delta nets), cut by heads. Payload: layer, block, part, row, section, head.

    Attributes:
        layers: Layers of the group over all stages.
        parts: In the order of the page.
        blocks: States of a chunk.
    """

    layers: int
    parts: tuple[StatePart, ...]
    blocks: int = 1

    def __post_init__(self) -> None:
        _positive("StateShape", layers=self.layers, parts=len(self.parts), blocks=self.blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpaqueShape:
    """Bytes that nobody else can read. Payload: rank, layer of that rank, block.

    Attributes:
        blocks: Blocks of a chunk.
        pages: Of each rank, the length of a page of each of its layers.
    """

    blocks: int
    pages: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        _positive("OpaqueShape", blocks=self.blocks, pages=len(self.pages))
        if any(page < 1 for rank in self.pages for page in rank) or not any(self.pages):
            raise LayoutError("OpaqueShape: pages: must be lengths of at least 1, and at least one in all")


CanonicalShape = AttentionShape | LatentShape | StateShape
"""Shapes of chunks that are the same under every topology."""

Shape = CanonicalShape | OpaqueShape


def layout_id(interiors: Sequence[str]) -> str:
    """The id of canonical chunks whose groups have these interiors: `kv1:` and each name once, in the order of the groups."""
    return f"kv{LAYOUT_VERSION}:" + "+".join(dict.fromkeys(interiors))


def payload_bytes(shape: Shape) -> int:
    """Length of a chunk."""
    if isinstance(shape, OpaqueShape):
        return shape.blocks * sum(map(sum, shape.pages))
    return shape.layers * shape.blocks * whole_page_bytes(shape)


def whole_page_bytes(shape: CanonicalShape) -> int:
    """Length of a page that has all heads."""
    if isinstance(shape, AttentionShape):
        return shape.block_tokens * shape.heads * shape.token_head_bytes
    if isinstance(shape, LatentShape):
        return shape.block_tokens * shape.token_bytes
    return sum(part.rows * section.heads * section.head_bytes for part in shape.parts for section in part.sections)


def shape_to_plain(shape: Shape) -> dict[str, Any]:
    """The shape as JSON can hold it."""
    return {"kind": _KINDS_OF[type(shape)]} | dataclasses.asdict(shape)


def shape_from_plain(plain: Mapping[str, Any]) -> Shape:
    """The shape that `shape_to_plain` wrote, also after a way through JSON.

    Raises:
        LayoutError: a kind that is not known, or fields that are not those of the kind: this version cannot place what is in it.
    """
    fields = dict(plain)
    kind = fields.pop("kind", None)
    if kind not in _KINDS:
        raise LayoutError(f"layout: a group of kind {kind!r} is not known, only {', '.join(_KINDS)}; nothing can be stored for it")
    try:
        if kind == "state":
            fields["parts"] = tuple(
                StatePart(**part | {"sections": tuple(Section(**section) for section in part["sections"])}) for part in fields["parts"]
            )
        elif kind == "opaque":
            fields["pages"] = tuple(map(tuple, fields["pages"]))
        return _KINDS[kind](**fields)
    except (TypeError, KeyError) as error:
        raise LayoutError(f"layout: a group of kind {kind!r} has other fields than this version knows: {error}") from None


_KINDS: dict[str, type[Shape]] = {"attention": AttentionShape, "latent": LatentShape, "state": StateShape, "opaque": OpaqueShape}
_KINDS_OF = {shape: kind for kind, shape in _KINDS.items()}


def _all_positive(shape: Any) -> None:
    _positive(type(shape).__name__, **{field.name: getattr(shape, field.name) for field in dataclasses.fields(shape)})


def _positive(where: str, **values: int) -> None:
    for name, value in values.items():
        # True and 2.0 would be taken for numbers, and give names of their own to equal bytes.
        if type(value) is not int or value < 1:
            raise LayoutError(f"{where}: {name}: {value!r} must be a whole number of at least 1")
