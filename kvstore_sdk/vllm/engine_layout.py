"""How an engine keeps its chunks, from what each of its ranks says of its caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvstore_sdk.layout import (
    LAYOUT_VERSION,
    OPAQUE,
    CanonicalShape,
    LayoutError,
    OpaqueShape,
    Shape,
    Topology,
    layout_id,
    prove,
    shape_from_plain,
    shape_to_plain,
)

__all__ = ["EngineLayout", "RankLayout", "engine_layout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """What one rank says of one group; goes into its geometry record.

    Attributes:
        interior: Name of the interior; empty if it is opaque.
        shape: With the layers of this rank and the heads of all ranks; None if it is opaque or the rank has no layer of the group.
        pages: Length of a page of each of its layers, without padding.
        state_shapes: Of a state over all heads, as in `GroupIdentity`.
        names: By what names its caches go, as `CacheFacts` writes them.
        why: Why it is opaque.
        tested: As in `Entry`.
    """

    interior: str = ""
    shape: CanonicalShape | None = None
    pages: tuple[int, ...] = ()
    state_shapes: tuple[str, ...] = ()
    names: str = ""
    why: str = ""
    tested: bool = True

    def to_plain(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {
            "interior": self.interior,
            "shape": shape_to_plain(self.shape) if self.shape else None,
            "pages": list(self.pages),
            "state_shapes": list(self.state_shapes),
            "names": self.names,
            "why": self.why,
            "tested": self.tested,
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> RankLayout:
        """What `to_plain` wrote.

        Raises:
            LayoutError: it is of a kind that this version does not know.
        """
        shape = shape_from_plain(plain["shape"]) if plain["shape"] else None
        if isinstance(shape, OpaqueShape):
            raise LayoutError("layout: the shape of one rank cannot be that of an opaque chunk")
        return cls(
            interior=str(plain["interior"]),
            shape=shape,
            pages=tuple(plain["pages"]),
            state_shapes=tuple(plain["state_shapes"]),
            names=str(plain["names"]),
            why=str(plain["why"]),
            tested=bool(plain["tested"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLayout:
    """How an engine keeps its chunks.

    Attributes:
        layout: Id of the layout.
        version: Of it.
        groups: Shape and topology of each group.
        state_shapes: Of each group.
        names: By what names the caches go, of each group. Where the layout is opaque they belong to the writer's identity.
        why: Why it is opaque, each reason once; empty when it is not.
        untested: Interiors that were read off the sources and never seen on a device.
    """

    layout: str
    version: int
    groups: tuple[tuple[Shape, Topology], ...]
    state_shapes: tuple[tuple[str, ...], ...] = ()
    names: tuple[str, ...] = ()
    why: tuple[str, ...] = ()
    untested: tuple[str, ...] = ()

    @property
    def opaque(self) -> bool:
        """Whether only an engine like this one can read its chunks."""
        return bool(self.why)


def engine_layout(groups: Sequence[Sequence[RankLayout]], *, stages: int, blocks: int) -> EngineLayout:
    """How the engine keeps its chunks: canonical if every group of every rank is certified, opaque otherwise.

    Args:
        groups: Of each group, what each rank says, by rank.
        stages: Pipeline stages.
        blocks: Blocks of a chunk.

    Raises:
        LayoutError: no rank has a layer of some group, or the ranks of one stage have different ones.
    """
    for number, group in enumerate(groups):
        tp = _topology(group, stages).tp
        for at, rank in enumerate(group):
            if len(rank.pages) != len(group[at // tp * tp].pages):
                first = f"rank {at // tp * tp} of its stage {len(group[at // tp * tp].pages)}"
                raise LayoutError(f"rank {at} has {len(rank.pages)} layers of KV cache group {number}, {first}")
    why = dict.fromkeys(rank.why for group in groups for rank in group if rank.why)
    if not why:
        try:
            return _canonical(groups, stages)
        except LayoutError as error:
            why[str(error)] = None
    opaque: list[tuple[Shape, Topology]] = []
    for group in groups:
        shape = OpaqueShape(blocks=blocks, pages=tuple(rank.pages for rank in group))
        topology = _topology(group, stages)
        prove(shape, topology)
        opaque.append((shape, topology))
    return EngineLayout(layout=OPAQUE, version=LAYOUT_VERSION, groups=tuple(opaque), names=_names(groups), why=tuple(why))


def _canonical(groups: Sequence[Sequence[RankLayout]], stages: int) -> EngineLayout:
    """Raises LayoutError where the ranks do not make a whole."""
    whole: list[tuple[Shape, Topology]] = []
    members = []
    for number, group in enumerate(groups):
        topology = _topology(group, stages)
        members_of = [rank for rank in group if rank.pages]
        shapes = [replace(rank.shape, layers=sum(topology.stage_layers)) for rank in members_of if rank.shape]
        first = members_of[0]
        if any((rank.interior, rank.state_shapes) != (first.interior, first.state_shapes) for rank in members_of):
            raise LayoutError(f"the ranks keep KV cache group {number} in different ways")
        if len(shapes) != len(members_of) or any(shape != shapes[0] for shape in shapes):
            raise LayoutError(f"the ranks keep KV cache group {number} in different shapes")
        prove(shapes[0], topology)
        whole.append((shapes[0], topology))
        members.append(first)
    return EngineLayout(
        layout=layout_id([member.interior for member in members]),
        version=LAYOUT_VERSION,
        groups=tuple(whole),
        state_shapes=tuple(member.state_shapes for member in members),
        names=_names(groups),
        untested=tuple(dict.fromkeys(member.interior for member in members if not member.tested)),
    )


def _names(groups: Sequence[Sequence[RankLayout]]) -> tuple[str, ...]:
    return tuple("; ".join(sorted({rank.names for rank in group if rank.names})) for group in groups)


def _topology(group: Sequence[RankLayout], stages: int) -> Topology:
    if not group or len(group) % stages:
        raise LayoutError(f"{len(group)} ranks do not make {stages} equal stages")
    tp = len(group) // stages
    return Topology(tp, tuple(len(rank.pages) for rank in group[::tp]))
