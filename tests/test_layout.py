"""Every topology writes the same chunk, and reads from it what is its own."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from itertools import accumulate

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvstore_sdk import layout
from kvstore_sdk.errors import KVStoreError
from kvstore_sdk.keys import is_layout_id
from kvstore_sdk.layout import (
    AttentionShape,
    CanonicalShape,
    LatentShape,
    LayoutError,
    OpaqueShape,
    Run,
    Section,
    Shape,
    StatePart,
    StateShape,
    Topology,
    layout_id,
    page_bytes,
    payload_bytes,
    prove,
    runs,
    shape_from_plain,
    shape_to_plain,
    write_runs,
)

seeded = settings(derandomize=True, deadline=None, max_examples=150)

TP = (1, 2, 4, 8)
ELEMENT_BYTES = st.sampled_from([1, 2])
"""fp8 and bf16."""

attention_shapes = st.builds(
    lambda layers, blocks, tokens, pieces, heads, size, element: AttentionShape(
        layers=layers,
        blocks=blocks,
        block_tokens=tokens,
        heads=heads,
        token_head_bytes=2 * size * element,
        kernel_blocks=pieces,
    ),
    st.integers(1, 5),
    st.integers(1, 8),
    st.sampled_from([16, 32, 48, 64, 128]),
    st.sampled_from([1, 1, 1, 2, 4]),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.integers(1, 3),
    ELEMENT_BYTES,
)
latent_shapes = st.builds(
    lambda layers, blocks, tokens, size, element: LatentShape(
        layers=layers, blocks=blocks, block_tokens=tokens, token_bytes=size * element
    ),
    st.integers(1, 5),
    st.integers(1, 8),
    st.sampled_from([16, 64, 128]),
    st.integers(1, 7),
    ELEMENT_BYTES,
)
state_shapes = st.builds(
    lambda layers, blocks, rows, keys, ratio, size, other: StateShape(
        layers=layers,
        blocks=blocks,
        parts=(
            StatePart(rows, (Section(keys, size), Section(keys, size), Section(keys * ratio, other))),
            StatePart(1, (Section(keys * ratio, 5 * other),)),
        ),
    ),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from([8, 16]),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 9),
)
canonical_shapes: st.SearchStrategy[CanonicalShape] = st.one_of(attention_shapes, latent_shapes, state_shapes)


@st.composite
def topologies(draw: st.DrawFn, layers: int) -> Topology:
    """TP 1 to 8, and 1 to 3 stages that may be uneven or have nothing."""
    stages = draw(st.integers(1, 3))
    cuts = sorted(draw(st.lists(st.integers(0, layers), min_size=stages - 1, max_size=stages - 1)))
    return Topology(draw(st.sampled_from(TP)), tuple(end - start for start, end in zip([0, *cuts], [*cuts, layers], strict=True)))


class Model:
    """An engine's KV as bytes, written down from the meaning of each kind and without the code under test.

    A unit is what no topology cuts: what one head has of one kernel block, or of one row of a state; a whole latent.
    """

    def __init__(self, shape: CanonicalShape) -> None:
        self.shape = shape

    def unit(self, length: int, *place: object) -> bytes:
        return random.Random(repr(place)).randbytes(length)

    def page(self, layer: int, block: int, tp: int, tp_rank: int) -> bytes:
        """The page of one rank, as vLLM's kernels of that rank lay it out."""
        shape = self.shape
        if isinstance(shape, LatentShape):
            return self.unit(shape.block_tokens * shape.token_bytes, layer, block)
        if isinstance(shape, AttentionShape):
            length = shape.block_tokens // shape.kernel_blocks * shape.token_head_bytes
            heads = self.heads(shape.heads, tp, tp_rank)
            return b"".join(self.unit(length, layer, block, piece, head) for piece in range(shape.kernel_blocks) for head in heads)
        return b"".join(
            self.unit(section.head_bytes, layer, block, number, row, kind, head)
            for number, part in enumerate(shape.parts)
            for row in range(part.rows)
            for kind, section in enumerate(part.sections)
            for head in self.heads(section.heads, tp, tp_rank)
        )

    @staticmethod
    def heads(heads: int, tp: int, tp_rank: int) -> range:
        """As vLLM deals them out: neighbours have the same head where there are more ranks than heads."""
        if heads >= tp:
            return range(tp_rank * heads // tp, (tp_rank + 1) * heads // tp)
        head = tp_rank * heads // tp
        return range(head, head + 1)

    def payload(self) -> bytes:
        """The chunk, which is what a single rank has."""
        return b"".join(self.page(layer, block, 1, 0) for layer in range(self.shape.layers) for block in range(self.shape.blocks))


def divides(shape: CanonicalShape, tp: int) -> bool:
    if isinstance(shape, AttentionShape):
        return shape.heads % tp == 0 or tp % shape.heads == 0
    return isinstance(shape, LatentShape) or all(section.heads % tp == 0 for part in shape.parts for section in part.sections)


def local_pages(shape: CanonicalShape, topology: Topology, rank: int) -> dict[tuple[int, int], bytes]:
    stage, tp_rank = divmod(rank, topology.tp)
    first = [0, *accumulate(topology.stage_layers)][stage]
    model = Model(shape)
    return {
        (layer, block): model.page(first + layer, block, topology.tp, tp_rank)
        for layer in range(topology.stage_layers[stage])
        for block in range(shape.blocks)
    }


def pairs(run: Run) -> list[tuple[int, int]]:
    return [(run.local_offset + number * run.local_stride, run.offset + number * run.stride) for number in range(run.count)]


def written(shape: CanonicalShape, topology: Topology) -> bytes:
    """What all ranks together leave in a chunk; a byte that nobody writes, or that two write, is found."""
    payload, writers = bytearray(payload_bytes(shape)), bytearray(payload_bytes(shape))
    for rank in range(topology.world_size):
        pages = local_pages(shape, topology, rank)
        for run in write_runs(shape, topology, rank):
            for local, at in pairs(run):
                payload[at : at + run.length] = pages[run.layer, run.block][local : local + run.length]
                writers[at : at + run.length] = bytes(count + 1 for count in writers[at : at + run.length])
    assert set(writers) == {1}
    return bytes(payload)


def read(shape: CanonicalShape, topology: Topology, rank: int, payload: bytes) -> dict[tuple[int, int], bytes]:
    lengths = page_bytes(shape, topology, rank)
    pages = {(layer, block): bytearray(length) for layer, length in enumerate(lengths) for block in range(shape.blocks)}
    for run in runs(shape, topology, rank):
        for local, at in pairs(run):
            pages[run.layer, run.block][local : local + run.length] = payload[at : at + run.length]
    return {place: bytes(page) for place, page in pages.items()}


@seeded
@given(canonical_shapes, st.data())
def test_every_topology_writes_what_a_single_rank_writes(shape: CanonicalShape, data: st.DataObject) -> None:
    topology = data.draw(topologies(shape.layers))
    assume(divides(shape, topology.tp))
    assert written(shape, topology) == Model(shape).payload() == written(shape, Topology(1, (shape.layers,)))


@seeded
@given(canonical_shapes, st.data())
def test_every_topology_reads_its_part_of_what_another_one_wrote(shape: CanonicalShape, data: st.DataObject) -> None:
    writer, reader = data.draw(topologies(shape.layers)), data.draw(topologies(shape.layers))
    assume(divides(shape, writer.tp) and divides(shape, reader.tp))
    payload = written(shape, writer)
    for rank in range(reader.world_size):
        assert read(shape, reader, rank, payload) == local_pages(shape, reader, rank)


@seeded
@given(canonical_shapes, st.data())
def test_what_divides_is_proven_and_what_does_not_is_refused(shape: CanonicalShape, data: st.DataObject) -> None:
    topology = data.draw(topologies(shape.layers))
    if divides(shape, topology.tp):
        prove(shape, topology)
    else:
        with pytest.raises(LayoutError, match="cannot"):
            prove(shape, topology)


def test_a_fragment_is_one_stretch_for_each_layer_and_block() -> None:
    """Few and large copies: a rank's heads lie side by side in its page and in the chunk."""
    shape = AttentionShape(layers=3, blocks=2, block_tokens=16, heads=8, token_head_bytes=64)
    found = runs(shape, Topology(4, (3,)), 1)
    head = 16 * 64
    assert found == tuple(Run(layer, block, 0, ((layer * 2 + block) * 8 + 2) * head, 2 * head) for layer in range(3) for block in range(2))


@pytest.mark.parametrize(
    "shape",
    [
        AttentionShape(layers=4, blocks=2, block_tokens=16, heads=2, token_head_bytes=4),
        AttentionShape(layers=8, blocks=1, block_tokens=16, heads=2, token_head_bytes=4),
        LatentShape(layers=8, blocks=1, block_tokens=16, token_bytes=4),
    ],
)
def test_ranks_with_the_same_bytes_share_the_work(shape: CanonicalShape) -> None:
    topology = Topology(8, (shape.layers,))
    shares = {sum(run.length * run.count for run in write_runs(shape, topology, rank)) for rank in range(8)}
    assert shares == {payload_bytes(shape) // 8}


@pytest.mark.parametrize("heads", [3, 6, 12])
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_heads_that_ranks_cannot_share_equally_are_refused(heads: int, tp: int) -> None:
    shape = AttentionShape(layers=1, blocks=1, block_tokens=16, heads=heads, token_head_bytes=4)
    if heads % tp == 0:
        return prove(shape, Topology(tp, (1,)))
    with pytest.raises(LayoutError, match=f"{heads} heads"):
        write_runs(shape, Topology(tp, (1,)), 0)
    return None


def test_states_with_fewer_heads_than_ranks_are_refused() -> None:
    """vLLM has no state that several ranks hold: whoever keeps one so is not cut by heads."""
    shape = StateShape(layers=1, parts=(StatePart(3, (Section(2, 8), Section(4, 8))),))
    prove(shape, Topology(2, (1,)))
    with pytest.raises(LayoutError, match="2 state heads"):
        prove(shape, Topology(4, (1,)))


@pytest.mark.parametrize(
    ("topology", "rank"), [(Topology(2, (3,)), 0), (Topology(1, (1, 1, 1)), 0), (Topology(2, (1, 1)), 4), (Topology(2, (1, 1)), -1)]
)
def test_a_topology_of_other_layers_or_another_rank_is_refused(topology: Topology, rank: int) -> None:
    with pytest.raises(LayoutError):
        runs(LatentShape(layers=2, blocks=1, block_tokens=16, token_bytes=4), topology, rank)


opaque_shapes = st.integers(1, 3).flatmap(
    lambda stages: st.builds(
        lambda tp, blocks, layers, pages: (
            OpaqueShape(blocks=blocks, pages=tuple(tuple(pages[: layers[stage]]) for stage in range(stages) for _ in range(tp))),
            Topology(tp, tuple(layers)),
        ),
        st.sampled_from(TP),
        st.integers(1, 4),
        st.lists(st.integers(0, 3), min_size=stages, max_size=stages).filter(any),
        st.lists(st.integers(1, 40), min_size=3, max_size=3),
    )
)


@seeded
@given(opaque_shapes)
def test_opaque_parts_of_the_ranks_lie_one_after_another(pair: tuple[OpaqueShape, Topology]) -> None:
    shape, topology = pair
    prove(shape, topology)
    at = 0
    for rank in range(topology.world_size):
        found = runs(shape, topology, rank)
        assert found == write_runs(shape, topology, rank)
        assert page_bytes(shape, topology, rank) == shape.pages[rank]
        for run in found:
            assert (run.offset, run.local_offset, run.length) == (at, 0, shape.pages[rank][run.layer])
            at += run.length
    assert at == payload_bytes(shape)


def test_an_opaque_chunk_fits_no_other_topology() -> None:
    shape = OpaqueShape(blocks=1, pages=((8, 8), (8, 8)))
    prove(shape, Topology(2, (2,)))
    for other in (Topology(1, (2,)), Topology(4, (2,)), Topology(2, (1, 1))):
        with pytest.raises(LayoutError, match="other layers"):
            prove(shape, other)


Lie = Callable[[Run], Run]


@pytest.mark.parametrize(
    "lie",
    [
        pytest.param(lambda run: dataclasses.replace(run, offset=0), id="elsewhere"),
        pytest.param(lambda run: dataclasses.replace(run, length=run.length - 1), id="shorter"),
        pytest.param(lambda run: dataclasses.replace(run, length=run.length + 1), id="longer"),
        pytest.param(lambda run: dataclasses.replace(run, stride=run.stride + 1, count=2), id="twice"),
        pytest.param(lambda run: dataclasses.replace(run, local_offset=run.local_offset + 1), id="of-other-bytes"),
        pytest.param(lambda run: dataclasses.replace(run, block=0), id="of-another-block"),
    ],
)
def test_the_proof_finds_a_byte_that_is_lost_or_written_twice(lie: Lie, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof does not believe the runs: it counts what they say."""
    shape, topology = AttentionShape(layers=2, blocks=2, block_tokens=16, heads=4, token_head_bytes=4), Topology(2, (2,))
    prove(shape, topology)
    module = __import__("kvstore_sdk.layout.runs", fromlist=["runs"])
    honest = module._runs

    def lying(*arguments: object, **options: object) -> list[Run]:
        found = list(honest(*arguments, **options))
        return [*found[:-1], lie(found[-1])]

    monkeypatch.setattr(module, "_runs", lying)
    with pytest.raises(LayoutError):
        layout.prove(shape, topology)


@seeded
@given(st.one_of(canonical_shapes, opaque_shapes.map(lambda pair: pair[0])))
def test_a_shape_survives_json(shape: Shape) -> None:
    assert shape_from_plain(json.loads(json.dumps(shape_to_plain(shape)))) == shape


@pytest.mark.parametrize(
    "plain",
    [
        {"kind": "indexer", "layers": 2},
        {"layers": 2},
        {"kind": "latent", "layers": 2, "blocks": 1, "block_tokens": 16},
        {"kind": "latent", "layers": 2, "blocks": 1, "block_tokens": 16, "token_bytes": 4, "scales": 4},
        {"kind": "state", "layers": 2, "parts": [{"rows": 1, "sections": [{"heads": 2, "head_bytes": 4}], "ring": 3}]},
        {"kind": "state", "layers": 2},
    ],
)
def test_parts_of_a_kind_that_is_not_known_are_refused(plain: dict[str, object]) -> None:
    """HMA-07: at the start, before anything is stored, and not in the middle of serving."""
    with pytest.raises(LayoutError, match=r"known|knows") as refused:
        shape_from_plain(plain)
    assert isinstance(refused.value, KVStoreError)


@pytest.mark.parametrize("value", [0, -1, 2.0, "2", True, None])
def test_sizes_that_are_no_numbers_of_things_are_refused(value: object) -> None:
    good = {"layers": 1, "blocks": 1, "block_tokens": 16, "token_bytes": 4}
    for name in good:
        with pytest.raises(LayoutError, match=name):
            LatentShape(**good | {name: value})  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="tp"):
        Topology(value, (1,))  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="head_bytes"):
        Section(1, value)  # type: ignore[arg-type]


@pytest.mark.parametrize("stage_layers", [(), (0,), (2, -1)])
def test_a_topology_has_layers(stage_layers: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match="stage_layers"):
        Topology(1, stage_layers)


def test_a_block_is_a_whole_number_of_kernel_blocks() -> None:
    with pytest.raises(LayoutError, match="kernel_blocks"):
        AttentionShape(layers=1, blocks=1, block_tokens=16, heads=1, token_head_bytes=4, kernel_blocks=3)


def test_the_layout_id_names_every_interior_once() -> None:
    assert layout_id(["lbh-ktv", "gdn-kv", "lbh-ktv"]) == "kv1:lbh-ktv+gdn-kv"
    assert is_layout_id(layout_id(["lbh-ktv", "gdn-kv"]))
    assert is_layout_id(layout.OPAQUE)
    # An identity takes a layout for opaque by its name.
    assert layout.OPAQUE.startswith("opaque")
    assert not layout_id(["lbhnc"]).startswith("opaque")
