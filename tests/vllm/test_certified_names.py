"""Names decide which caches others can read; what is not on the list, or does not look as its names say, is opaque."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode, MambaSpec, MLAAttentionSpec, SlidingWindowSpec
from vllm_engines import Engine

from kvstore_sdk.identity import GroupIdentity, KVIdentity, WriterIdentity
from kvstore_sdk.layout import OPAQUE, AttentionShape, LatentShape, LayoutError, OpaqueShape, Topology, payload_bytes
from kvstore_sdk.vllm.certified import CERTIFIED, CacheFacts, Entry, certify, interior_of
from kvstore_sdk.vllm.engine_layout import EngineLayout, RankLayout, engine_layout

BLOCKS = 2
LAYOUT_PAGE = Path(__file__).parents[2] / "docs" / "layout.md"
VEC = CacheFacts(
    vllm="0.32.0",
    device="cpu/x86_64",
    backend="CPU_ATTN",
    variant="vec",
    cache_layout="LBHNC",
    quantization="NONE",
    spec="FullAttentionSpec",
)

pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="the names of this machine are not on the list")


class Attention:
    """An attention layer as the worker has it, with a cache of a few blocks."""

    backend: Any = CPUAttentionBackend

    def __init__(self, spec: Any, *, isa: str | None = "vec", kernel_tokens: int = 0, cache: torch.Tensor | None = None) -> None:
        self.spec = spec
        tokens = kernel_tokens or spec.block_size
        blocks = 4 * spec.block_size // tokens
        if isa is not None:
            self.isa = isa
        if cache is None:
            cache = torch.zeros(blocks, spec.num_kv_heads, tokens, spec.head_size + spec.head_size_v, dtype=spec.dtype)
        self.kv_cache = cache

    def get_kv_cache_spec(self, config: Any) -> Any:
        return self.spec

    def get_attn_backend(self) -> Any:
        return self.backend


class MLA(Attention):
    backend = CPUMLABackend


def full(**changes: Any) -> FullAttentionSpec:
    return FullAttentionSpec(**{"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16} | changes)


def config_of(layers: dict[str, Any], *, tp: int = 1, heads: int = 2, layout: str | None = "LBHNC", **parallel: Any) -> Any:
    """As much of a worker's `VllmConfig` as is looked at."""
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        cache_config=SimpleNamespace(kv_cache_layout=layout),
        parallel_config=SimpleNamespace(tensor_parallel_size=tp, **parallel),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: heads),
        speculative_config=None,
    )


def look(*layers: Any, pages: list[int] | None = None, block_tokens: int = 32, **config: Any) -> RankLayout:
    named = {f"layer.{number}": layer for number, layer in enumerate(layers)}
    sizes = [layer.spec.page_size_bytes for layer in layers] if pages is None else pages
    return interior_of(config_of(named, **config), list(named), block_tokens, BLOCKS, sizes)


def whole(*ranks: RankLayout, stages: int = 1) -> EngineLayout:
    return engine_layout([ranks], stages=stages, blocks=BLOCKS)


def test_a_cache_on_the_list_is_known() -> None:
    found = look(Attention(full()), Attention(full()))
    assert found == RankLayout(
        interior="lbh-ktv",
        shape=AttentionShape(layers=2, blocks=BLOCKS, block_tokens=32, heads=2, token_head_bytes=128),
        pages=(8192, 8192),
        names=f"vLLM {vllm.__version__} on cpu/x86_64: CPU_ATTN vec LBHNC NONE FullAttentionSpec",
    )
    assert look(Attention(SlidingWindowSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.bfloat16, sliding_window=64))).shape


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vllm", "0.31.9"),
        ("vllm", "0.33.0"),
        ("vllm", "1.32.0"),
        ("vllm", "dev"),
        ("device", "cpu/aarch64"),
        ("device", "cpu/s390x"),
        ("device", "cuda"),
        ("backend", "ACME_ATTN"),
        ("backend", "CPU_MLA"),
        ("variant", "neon"),
        ("variant", ""),
        ("cache_layout", "LBNHC"),
        ("cache_layout", ""),
        ("quantization", "FP8_PER_TOKEN_HEAD"),
        ("quantization", "INT8_PER_TOKEN_HEAD"),
        ("quantization", "NVFP4"),
        ("spec", "SinkFullAttentionSpec"),
        ("spec", "CrossAttentionSpec"),
        ("spec", "IndexerSpec"),
    ],
)
def test_one_other_name_is_enough_to_be_opaque(name: str, value: str) -> None:
    assert certify(VEC) is not None
    assert certify(dataclasses.replace(VEC, **{name: value})) is None


def test_tiles_of_amx_are_known_by_a_name_of_their_own() -> None:
    vec, amx = certify(VEC), certify(dataclasses.replace(VEC, variant="amx"))
    assert vec is not None
    assert amx is not None
    assert vec.interior != amx.interior
    assert certify(dataclasses.replace(VEC, variant="amx", quantization="FP8_PER_TENSOR")) is None, (
        "kernels of one name pack it in two ways"
    )


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1.post2", "0.32.1+cpu", "0.32.0.post1+cu128"])
def test_released_builds_are_known(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    assert look(Attention(full())).interior == "lbh-ktv"


@pytest.mark.parametrize(
    "version", ["0.32.0rc1", "0.32.1.dev7+gabc1234", "0.32.0+corp.patch", "0.32.0+cu128.patched", "0.32.0-fork", "0.32", "0.32.0\n", "dev"]
)
def test_what_is_no_release_is_opaque_and_says_so(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels may be anybody's, and strides do not show what they write."""
    monkeypatch.setattr(vllm, "__version__", version)
    found = look(Attention(full()))
    assert found.shape is None
    assert found.why == f"vLLM {version} is not a release: nobody knows its kernels"


def test_the_documentation_has_every_entry() -> None:
    def releases(entry: Entry) -> str:
        last = (entry.before[0], entry.before[1] - 1)
        names = [".".join(map(str, release)) for release in (entry.since, last)]
        return names[0] if entry.since == last else " to ".join(names)

    def row(entry: Entry) -> list[str]:
        lists = (entry.variants, entry.cache_layouts, entry.quantizations, entry.specs)
        cells = [", ".join(filter(None, names)) for names in lists]
        return [
            f"`{entry.interior}`",
            releases(entry),
            entry.device,
            ", ".join(entry.backends),
            *cells,
            "yes" if entry.tested else "**no**",
        ]

    section = LAYOUT_PAGE.read_text().partition("## Certified caches")[2].partition("## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("| `")]
    assert rows == [row(entry) for entry in CERTIFIED]
    interiors = re.findall(r"^\| `([\w-]+)` \|", LAYOUT_PAGE.read_text().partition("## Interiors")[2].partition("## ")[0], re.MULTILINE)
    assert sorted(interiors) == sorted(entry.interior for entry in CERTIFIED)


def test_what_was_never_seen_on_a_device_says_so() -> None:
    cuda = dataclasses.replace(VEC, vllm="0.33.0", device="cuda", backend="FLASH_ATTN", variant="")
    entry = certify(cuda)
    assert entry is not None
    assert not entry.tested
    assert entry.interior != "lbh-ktv"
    assert certify(dataclasses.replace(cuda, vllm="0.28.1")) is None
    assert certify(dataclasses.replace(cuda, device="rocm")) is None
    assert certify(dataclasses.replace(cuda, cache_layout="LBNHC")) is None
    assert {entry.device for entry in CERTIFIED if not entry.tested} == {"cuda"}


class Unknown(Attention):
    backend = SimpleNamespace(get_name=lambda: "ACME_ATTN")


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexerSpec(FullAttentionSpec):
    """A kind of part that nobody has looked at."""


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        pytest.param(lambda: Unknown(full()), "ACME_ATTN", id="backend"),
        pytest.param(lambda: Attention(full(kv_quant_mode=KVQuantMode.FP8_PER_TENSOR), isa="amx"), "amx LBHNC FP8", id="amx-fp8"),
        pytest.param(lambda: Attention(full(), isa=None), "CPU_ATTN LBHNC", id="no-isa"),
        pytest.param(lambda: Attention(IndexerSpec(**vars(full()))), "IndexerSpec", id="kind"),
        pytest.param(lambda: Attention(full(kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD)), "INT8_PER_TOKEN_HEAD", id="scales"),
        pytest.param(lambda: Attention(full(head_size_v=16)), "different sizes", id="values"),
        pytest.param(lambda: Attention(full(state_content_bytes=192)), "more than keys and values", id="packed"),
        pytest.param(lambda: Attention(full(num_kv_heads=1)), "1 heads of 2", id="heads"),
        pytest.param(
            lambda: Attention(full(), cache=torch.zeros(4, 32, 2, 64, dtype=torch.bfloat16).transpose(1, 2)), "strides", id="strides"
        ),
        pytest.param(lambda: Attention(full(), cache=torch.zeros(4, 2, 32, 32, dtype=torch.bfloat16)), "shape", id="shape"),
        pytest.param(
            lambda: Attention(full(), kernel_tokens=20, cache=torch.zeros(4, 2, 20, 64, dtype=torch.bfloat16)), "20 tokens", id="kernel"
        ),
        pytest.param(lambda: SimpleNamespace(spec=full(), get_kv_cache_spec=lambda _: None), "does not say", id="no-spec"),
        pytest.param(lambda: SimpleNamespace(spec=full(), get_kv_cache_spec=lambda _: full()), "not what its names say", id="no-backend"),
    ],
)
def test_what_is_not_known_is_opaque_and_says_why(layer: Callable[[], Any], why: str) -> None:
    """HMA-07, at the start. One layer of a group is enough."""
    found = look(Attention(full()), layer())
    assert found.shape is None
    assert found.interior == ""
    assert why in found.why
    engine = whole(found)
    assert engine.opaque
    assert engine.layout == OPAQUE
    assert engine.groups == ((OpaqueShape(blocks=BLOCKS, pages=(found.pages,)), Topology(1, (2,))),)


def test_layers_packed_into_one_part_are_opaque() -> None:
    assert "packed" in look(Attention(full()), Attention(full()), pages=[16384]).why


def test_pages_of_another_size_are_opaque() -> None:
    assert "8200 bytes" in look(Attention(full()), pages=[8200]).why


def test_context_parallelism_is_opaque() -> None:
    assert "context parallelism" in look(Attention(full()), decode_context_parallel_size=2).why
    assert "context parallelism" in look(Attention(full()), prefill_context_parallel_size=2).why


def test_a_draft_model_cut_in_other_parts_is_opaque() -> None:
    layers = {"layer": Attention(full())}
    config = config_of(layers)
    config.speculative_config = SimpleNamespace(draft_parallel_config=SimpleNamespace(tensor_parallel_size=2))
    assert "draft model" in interior_of(config, list(layers), 32, BLOCKS, [8192]).why
    config.speculative_config.draft_parallel_config.tensor_parallel_size = 1
    assert interior_of(config, list(layers), 32, BLOCKS, [8192]).interior == "lbh-ktv"


def test_a_draft_model_of_other_heads_is_opaque() -> None:
    """Eight ranks have one head each of a model of 4, which are copies two by two, and of a draft model of 8, which are not."""
    layers = {"layer": Attention(full(num_kv_heads=1)), "draft": Attention(full(num_kv_heads=1))}
    config = config_of(layers, tp=8, heads=4)
    for heads, opaque in ((8, True), (2, True), (4, False)):
        config.speculative_config = SimpleNamespace(
            draft_parallel_config=config.parallel_config,
            draft_model_config=SimpleNamespace(get_total_num_kv_heads=lambda heads=heads: heads),
        )
        found = interior_of(config, list(layers), 32, BLOCKS, [4096, 4096])
        assert ("draft model has" in found.why) == opaque
        assert (found.shape is None) == opaque


def test_kernel_blocks_are_part_of_the_interior() -> None:
    """Keys are transposed within a block of the kernel: those of 32 tokens in a block of 64 are other bytes than one of 64."""
    found = look(Attention(full(block_size=64), kernel_tokens=32), block_tokens=64)
    assert found.interior == "lbh-ktv/32"
    assert found.shape == AttentionShape(layers=1, blocks=BLOCKS, block_tokens=64, heads=2, token_head_bytes=128, kernel_blocks=2)
    assert whole(found).layout != whole(look(Attention(full(block_size=64)), block_tokens=64)).layout


def test_ranks_that_share_heads_make_one_engine() -> None:
    one = look(Attention(full(num_kv_heads=2)))
    two = look(Attention(full(num_kv_heads=1)), tp=2)
    # More ranks than heads: vLLM gives each one head.
    four = look(Attention(full(num_kv_heads=1)), tp=4)
    engines = [whole(one), whole(two, two), whole(four, four, four, four)]
    assert {engine.layout for engine in engines} == {"kv1:lbh-ktv"}
    assert {engine.groups[0][0] for engine in engines} == {one.shape}
    assert [engine.groups[0][1].world_size for engine in engines] == [1, 2, 4]


def test_stages_with_uneven_layers_make_one_engine() -> None:
    stages = [look(*(Attention(full()) for _ in range(layers))) for layers in (1, 3, 0)]
    engine = whole(*stages, stages=3)
    assert engine.groups == (
        (AttentionShape(layers=4, blocks=BLOCKS, block_tokens=32, heads=2, token_head_bytes=128), Topology(1, (1, 3, 0))),
    )


def test_ranks_that_disagree_are_opaque() -> None:
    good = look(Attention(full(num_kv_heads=1)), tp=2)
    for change in ({"interior": "lbhnc"}, {"shape": LatentShape(layers=1, blocks=2, block_tokens=32, token_bytes=128)}):
        engine = whole(good, dataclasses.replace(good, **change))
        assert engine.layout == OPAQUE
        assert "different" in engine.why[0]


def test_one_opaque_group_makes_all_of_them_opaque() -> None:
    """There is one layout for each namespace."""
    groups = [[look(Attention(full()))], [look(Attention(full(), isa="neon"))]]
    engine = engine_layout(groups, stages=1, blocks=BLOCKS)
    assert engine.layout == OPAQUE
    assert all(isinstance(shape, OpaqueShape) for shape, _ in engine.groups)
    assert len(engine.why) == 1


def identity(engine: EngineLayout) -> KVIdentity:
    return KVIdentity(
        model="m",
        weights="w",
        model_config="c",
        kv_dtype="bfloat16",
        layout=engine.layout,
        layout_version=engine.version,
        block_tokens=32,
        hash_tokens=32,
        blocks_per_chunk=BLOCKS,
        groups=tuple(GroupIdentity(kind="full", layers=("l",), payload_bytes=payload_bytes(shape)) for shape, _ in engine.groups),
        hash_algorithm="sha256_cbor",
        writer=WriterIdentity(engine="vllm", attention_backend="CPU_ATTN", variant=" ".join(engine.names), topology="tp=1")
        if engine.opaque
        else None,
    )


def test_amx_and_vec_never_share_a_namespace() -> None:
    """KEY-04: same shape, same length, other bytes."""
    engines = [whole(look(Attention(full(), isa=isa))) for isa in ("vec", "vec16", "amx", "neon")]
    assert [engine.opaque for engine in engines] == [False, False, False, True]
    vec, vec16, amx, neon = (identity(engine).namespace for engine in engines)
    assert vec == vec16
    assert len({vec, amx, neon}) == 3


def test_what_a_rank_says_survives_its_record() -> None:
    for found in (look(Attention(full())), look(Attention(full(), isa="neon")), RankLayout()):
        assert RankLayout.from_plain(json.loads(json.dumps(found.to_plain()))) == found


@pytest.mark.parametrize("shape", [{"kind": "indexer"}, {"kind": "opaque", "blocks": 1, "pages": [[8]]}])
def test_a_record_with_a_part_of_an_unknown_kind_is_refused(shape: dict[str, Any]) -> None:
    """HMA-07: a worker of another version knows kinds that this one cannot place."""
    with pytest.raises(LayoutError):
        RankLayout.from_plain(look(Attention(full())).to_plain() | {"shape": shape})


def test_latents_are_known_whatever_the_kernels_block() -> None:
    spec = MLAAttentionSpec(block_size=32, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    found = look(MLA(spec, isa=None, cache=torch.zeros(8, 16, 576, dtype=torch.bfloat16)), tp=2)
    assert found.shape == LatentShape(layers=1, blocks=BLOCKS, block_tokens=32, token_bytes=1152)
    gaps = torch.zeros(8, 32, 576, dtype=torch.bfloat16)[:, :16]
    assert "gaps" in look(MLA(spec, isa=None, cache=gaps)).why


class QwenGatedDeltaNetAttention:
    """As much of vLLM's layer as is looked at: two key heads, four value heads, and a page with a few bytes at its end."""

    conv_kernel_size, num_k_heads, num_v_heads, head_k_dim, head_v_dim = 4, 2, 4, 8, 16
    gap = 0

    def __init__(self, tp: int = 1, **changes: Any) -> None:
        width = (2 * self.num_k_heads * self.head_k_dim + self.num_v_heads * self.head_v_dim) // tp
        shapes = ((3, width), (self.num_v_heads // tp, self.head_v_dim, self.head_k_dim))
        self.spec = MambaSpec(block_size=128, shapes=shapes, dtypes=(torch.bfloat16, torch.float32), **changes)
        self.size = 6 * width
        pages = torch.zeros(5, self.spec.page_size_bytes + 64, dtype=torch.int8)
        convolution = pages[:, : self.size].view(torch.bfloat16).view(-1, *shapes[0])
        start = self.size + self.gap
        recurrent = pages[:, start : start + self.spec.page_size_bytes - self.size].view(torch.float32).view(-1, *shapes[1])
        self.kv_cache = (convolution, recurrent)

    def get_kv_cache_spec(self, config: Any) -> Any:
        return self.spec

    def get_attn_backend(self) -> Any:
        return SimpleNamespace(get_name=lambda: "GDN_ATTN")


class OtherDeltaNet(QwenGatedDeltaNetAttention):
    """Only the class that was looked at is known."""


def with_gap(tp: int) -> QwenGatedDeltaNetAttention:
    kind = type("QwenGatedDeltaNetAttention", (QwenGatedDeltaNetAttention,), {"gap": 4})
    made: QwenGatedDeltaNetAttention = kind(tp)
    return made


def test_states_cut_by_heads_are_known_over_all_heads() -> None:
    one, two = look(QwenGatedDeltaNetAttention(), block_tokens=128), look(QwenGatedDeltaNetAttention(2), block_tokens=128, tp=2)
    assert one.state_shapes == two.state_shapes == ("bfloat16[3,96]", "float32[4,16,8]")
    assert whole(one).groups[0][0] == whole(two, two).groups[0][0]
    assert whole(one).layout == "kv1:gdn-kv"


@pytest.mark.parametrize(
    ("layer", "tp", "why"),
    [
        pytest.param(lambda: OtherDeltaNet(), 1, "OtherDeltaNet", id="class"),
        pytest.param(lambda: QwenGatedDeltaNetAttention(tp_replicated=True), 1, "every rank", id="replicated"),
        pytest.param(lambda: QwenGatedDeltaNetAttention(), 2, "cut in 2", id="shapes"),
        pytest.param(lambda: QwenGatedDeltaNetAttention(4), 4, "cut in 4", id="heads"),
        pytest.param(lambda: with_gap(1), 1, "does not lie", id="order"),
    ],
)
def test_states_that_are_not_cut_by_heads_are_opaque(layer: Callable[[], Any], tp: int, why: str) -> None:
    made = layer()
    found = look(made, block_tokens=128, tp=tp)
    assert why in found.why


def test_states_in_the_other_convolution_layout_are_opaque(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.mamba import mamba_utils

    monkeypatch.setattr(mamba_utils, "get_conv_state_layout", lambda: "DS")
    assert "DS" in look(QwenGatedDeltaNetAttention(), block_tokens=128).why


@pytest.mark.parametrize(
    ("model", "layout"),
    [("llama", "kv1:lbh-ktv"), ("gemma", "kv1:lbh-ktv"), ("deepseek", "kv1:latent"), ("qwen", "kv1:gdn-kv+lbh-ktv")],
)
def test_the_caches_of_real_engines_are_known(model: str, layout: str, models: Any, start: Callable[..., Engine]) -> None:
    engine = start(models(model), None)
    runner = engine._llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    groups = []
    for group in runner.kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        page = dataclasses.replace(spec, page_size_padded=None).page_size_bytes
        groups.append([interior_of(runner.vllm_config, group.layer_names, spec.block_size, BLOCKS, [page] * len(group.layer_names))])
    assert engine_layout(groups, stages=1, blocks=BLOCKS).why == ()
    assert engine_layout(groups, stages=1, blocks=BLOCKS).layout == layout
