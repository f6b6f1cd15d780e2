"""Which caches of vLLM have a known order of bytes, decided by names; shapes and strides are only checked afterwards.

Equal shapes, strides and `kv_cache_layout` hold different bytes: on CPU the `vec` kernels transpose the keys of a block, `amx` packs tiles.
What is not on the list is opaque: its chunks can be read by an engine like the writer's only.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import vllm
from vllm.platforms import current_platform

from kvstore_sdk.layout import AttentionShape, LatentShape, LayoutError, Section, StatePart, StateShape, Topology, page_bytes
from kvstore_sdk.vllm.engine_layout import RankLayout

__all__ = ["CERTIFIED", "CacheFacts", "Entry", "certify", "interior_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFacts:
    """By what names one layer's cache goes.

    Attributes:
        vllm: Version.
        device: `cpu/x86_64`, `cuda`, `rocm`, ...
        backend: Name of the attention backend.
        variant: What else chooses its kernels: on CPU the instruction set that the layer passes to them (`vec`, `amx`, `neon`, ...), for
            states the class of the layer and the layout of its convolution state.
        cache_layout: vLLM's `kv_cache_layout`.
        quantization: Name of the cache's `KVQuantMode`.
        spec: Class of the layer's `KVCacheSpec`.
    """

    vllm: str
    device: str
    backend: str
    variant: str
    cache_layout: str
    quantization: str
    spec: str

    def __str__(self) -> str:
        names = [self.backend, self.variant, self.cache_layout, self.quantization, self.spec]
        return f"vLLM {self.vllm} on {self.device}: {' '.join(name for name in names if name)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Caches whose interior is known.

    Attributes:
        interior: Its name, which becomes part of the layout id. Equal names, equal order of bytes.
        since: First vLLM release it holds for, as (major, minor).
        before: First one it was not looked at.
        device: As in `CacheFacts`, and so on.
        tested: A test writes through the backend's own operation and finds every element. Otherwise the order was read off the sources.
    """

    interior: str
    since: tuple[int, int]
    before: tuple[int, int]
    device: str
    backends: tuple[str, ...]
    variants: tuple[str, ...]
    cache_layouts: tuple[str, ...]
    quantizations: tuple[str, ...]
    specs: tuple[str, ...]
    tested: bool

    def covers(self, facts: CacheFacts) -> bool:
        """Whether every name is on the entry."""
        return (
            self.since <= _release(facts.vllm) < self.before
            and facts.device == self.device
            and facts.backend in self.backends
            and facts.variant in self.variants
            and facts.cache_layout in self.cache_layouts
            and facts.quantization in self.quantizations
            and facts.spec in self.specs
        )


_ATTENTION = ("FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec")
_ANY_LAYOUT = ("LBHNC", "LBNHC", "LHBNC")
"""There is one head, and each layer lies on its own: these are the same."""

CERTIFIED = (
    # In (block, head): K as [dim][token], then V as [token][dim].
    Entry(
        interior="lbh-ktv",
        since=(0, 32),
        before=(0, 33),
        device="cpu/x86_64",
        backends=("CPU_ATTN",),
        variants=("vec", "vec16"),
        cache_layouts=("LBHNC",),
        quantizations=("NONE", "FP8_PER_TENSOR"),
        specs=_ATTENTION,
        tested=True,
    ),
    # In (block, head): tiles of 16 columns and of pairs. FP8 is left out: which kernels pack it depends on the build and on the CPU.
    Entry(
        interior="lbh-amx",
        since=(0, 32),
        before=(0, 33),
        device="cpu/x86_64",
        backends=("CPU_ATTN",),
        variants=("amx",),
        cache_layouts=("LBHNC",),
        quantizations=("NONE",),
        specs=_ATTENTION,
        tested=True,
    ),
    # In a block: [token][latent | rope].
    Entry(
        interior="latent",
        since=(0, 32),
        before=(0, 33),
        device="cpu/x86_64",
        backends=("CPU_MLA", "AMX_MLA"),
        variants=("",),
        cache_layouts=_ANY_LAYOUT,
        quantizations=("NONE",),
        specs=("MLAAttentionSpec",),
        tested=True,
    ),
    # Convolution state [token][q heads | k heads | v heads], then the recurrent state [v head][k dim][v dim]: on CPU that way round,
    # although its shape says [v dim][k dim].
    Entry(
        interior="gdn-kv",
        since=(0, 32),
        before=(0, 33),
        device="cpu/x86_64",
        backends=("GDN_ATTN",),
        variants=("QwenGatedDeltaNetAttention SD",),
        cache_layouts=_ANY_LAYOUT,
        quantizations=("",),
        specs=("MambaSpec",),
        tested=True,
    ),
    # In (block, head): [token][K | V].
    Entry(
        interior="lbhnc",
        since=(0, 29),
        before=(0, 34),
        device="cuda",
        backends=("FLASH_ATTN",),
        variants=("",),
        cache_layouts=("LBHNC",),
        quantizations=("NONE", "FP8_PER_TENSOR"),
        specs=_ATTENTION,
        tested=False,
    ),
)
"""Every cache whose chunks fit other topologies. `docs/layout.md` shows them."""


def certify(facts: CacheFacts) -> Entry | None:
    """The entry for a cache of these names, or None: it is opaque."""
    return next((entry for entry in CERTIFIED if entry.covers(facts)), None)


def interior_of(config: Any, layers: Sequence[str], block_tokens: int, blocks: int, pages: Sequence[int]) -> RankLayout:
    """What this rank knows of one group. To be called in a worker when its caches are registered; what it does not know is opaque.

    Args:
        config: The worker's `VllmConfig`. It holds the layers, and those their caches and what they pass to their kernels.
        layers: Names of this rank's layers of the group, in the engine's order.
        block_tokens: Tokens of one of the engine's blocks of the group.
        blocks: Blocks of a chunk.
        pages: Bytes of a page that are used, of each `CanonicalKVCacheRef` of the group.
    """
    if not layers:
        return RankLayout()
    found = tuple(map(int, pages))
    names = ""
    try:
        facts = [_facts(config, name) for name in layers]
        names = "; ".join(sorted(set(map(str, facts))))
        if len(found) != len(layers):
            raise _Opaque(f"{len(layers)} layers are packed in {len(found)} parts")
        members = [_layer(config, facts_of, name, block_tokens, blocks) for facts_of, name in zip(facts, layers, strict=True)]
        for member, name in zip(members, layers, strict=True):
            if member != members[0]:
                raise _Opaque(f"layer {name} has another cache than the first of its group")
        assert members[0].shape is not None
        shape = replace(members[0].shape, layers=len(layers))
        expected = page_bytes(shape, Topology(int(config.parallel_config.tensor_parallel_size), (len(layers),)), 0)
        if expected != found:
            raise _Opaque(f"its pages have {found[0]} bytes, and not {expected[0]}")
    except (_Opaque, LayoutError) as error:
        return RankLayout(pages=found, names=names, why=str(error))
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        # What a name stands for may change in a release: then it is not known.
        return RankLayout(pages=found, names=names, why=f"a layer is not what its names say: {type(error).__name__}: {error}")
    return replace(members[0], shape=shape, pages=found, names=names)


class _Opaque(Exception):
    """Why a cache cannot be read by others."""


_RELEASED = re.compile(r"(\d+)\.(\d+)\.\d+(\.post\d+)?(\+(cpu|cu\d+))?")
"""Versions that vLLM released, and the builds of them that it publishes. Others, whatever they are near to, may have other kernels."""
_NO_RELEASE = (0, 0)


def _release(version: str) -> tuple[int, int]:
    numbers = _RELEASED.fullmatch(version)
    return (int(numbers[1]), int(numbers[2])) if numbers else _NO_RELEASE


def _layer(config: Any, facts: CacheFacts, name: str, block_tokens: int, blocks: int) -> RankLayout:
    """One layer's cache, by its names first and then by looking at it."""
    module, spec = _module(config, name)
    entry = certify(facts)
    if _release(facts.vllm) == _NO_RELEASE:
        raise _Opaque(f"vLLM {facts.vllm} is not a release: nobody knows its kernels")
    if entry is None:
        raise _Opaque(f"{facts} is not on the list of certified caches")
    parallel, speculative = config.parallel_config, config.speculative_config
    if max(int(getattr(parallel, f"{kind}_context_parallel_size", 1)) for kind in ("prefill", "decode")) > 1:
        raise _Opaque("context parallelism deals the tokens of a block out to several ranks")
    draft = getattr(speculative, "draft_parallel_config", None)
    if draft is not None and draft.tensor_parallel_size != parallel.tensor_parallel_size:
        raise _Opaque("the draft model is cut in another number of parts than the model")
    read = _READERS.get(facts.spec, _attention)(config, module, spec, block_tokens, blocks)
    return replace(read, interior=entry.interior + read.interior, tested=entry.tested)


def _module(config: Any, name: str) -> tuple[Any, Any]:
    """The layer, and what it says that it keeps in its cache."""
    module = config.compilation_config.static_forward_context.get(name)
    spec = module.get_kv_cache_spec(config) if hasattr(module, "get_kv_cache_spec") else None
    if spec is None:
        raise _Opaque(f"layer {name} does not say what it keeps in its cache")
    return module, spec


def _facts(config: Any, name: str) -> CacheFacts:
    module, spec = _module(config, name)
    kind = type(spec).__name__
    if current_platform.is_cpu():
        device = f"cpu/{os.uname().machine}"
    else:
        # ROCm says `cuda` of itself where torch asks.
        device = "rocm" if current_platform.is_rocm() else str(current_platform.device_type)
    variant = str(getattr(module, "isa", "") or "")
    if kind == "MambaSpec":
        utils = importlib.import_module("vllm.model_executor.layers.mamba.mamba_utils")
        variant = f"{type(module).__name__} {utils.get_conv_state_layout()}"
    return CacheFacts(
        vllm=vllm.__version__,
        device=device,
        backend=str(module.get_attn_backend().get_name()),
        variant=variant,
        cache_layout=_cache_layout(config),
        quantization=str(getattr(getattr(spec, "kv_quant_mode", None), "name", "")),
        spec=kind,
    )


def _cache_layout(config: Any) -> str:
    """vLLM's name of the order of layers, blocks, heads and tokens; it is in the configuration since 0.29."""
    return str(getattr(config.cache_config, "kv_cache_layout", None) or "")


def _attention(config: Any, module: Any, spec: Any, block_tokens: int, blocks: int) -> RankLayout:
    heads, size = int(spec.num_kv_heads), int(spec.head_size)
    content = 2 * size * spec.dtype.itemsize
    if int(getattr(spec, "head_size_v", size) or size) != size:
        raise _Opaque("its keys and values have different sizes")
    if (getattr(spec, "state_content_bytes", None) or content) != content or (getattr(spec, "num_head_slots", None) or heads) != heads:
        raise _Opaque("its pages hold more than keys and values")
    if getattr(spec, "tokens_per_state", 1) != 1:
        raise _Opaque("one of its states stands for several tokens")
    total, tp = int(config.model_config.get_total_num_kv_heads()), int(config.parallel_config.tensor_parallel_size)
    if heads != max(1, total // tp):
        raise _Opaque(f"a rank has {heads} heads of {total}, which {tp} ranks do not make")
    draft = getattr(config.speculative_config, "draft_model_config", None)
    if draft is not None and int(draft.get_total_num_kv_heads()) not in (0, total):
        # Its layers are among those of the model: where each rank has one head of either, nothing else tells whose are copies.
        raise _Opaque(f"the draft model has {draft.get_total_num_kv_heads()} heads, the model {total}")
    cache = _one(module.kv_cache)
    shape, strides = tuple(cache.shape), tuple(cache.stride())
    tokens, elements = int(shape[-2]), content // cache.element_size()
    dense = (heads * tokens * elements, tokens * elements, elements, 1)
    if shape[1:] != (heads, tokens, elements) or strides[1:] != dense[1:] or (tokens != block_tokens and strides[0] != dense[0]):
        raise _Opaque(f"its tensor of shape {shape} and strides {strides} is not what its names say")
    return RankLayout(
        # Blocks of the kernel are what an interior is about.
        interior=f"/{tokens}" if tokens != block_tokens else "",
        shape=AttentionShape(
            layers=1,
            blocks=blocks,
            block_tokens=block_tokens,
            heads=total,
            token_head_bytes=content,
            kernel_blocks=_parts(block_tokens, tokens),
        ),
    )


def _latent(config: Any, module: Any, spec: Any, block_tokens: int, blocks: int) -> RankLayout:
    content = int(spec.head_size) * spec.dtype.itemsize
    if (getattr(spec, "state_content_bytes", None) or content) != content or getattr(spec, "tokens_per_state", 1) != 1:
        raise _Opaque("its pages hold other things than one latent for each token")
    cache = _one(module.kv_cache)
    shape, strides = tuple(cache.shape), tuple(cache.stride())
    tokens, elements = int(shape[-2]), content // cache.element_size()
    several = _parts(block_tokens, tokens) > 1
    if shape[1:] not in ((tokens, elements), (1, tokens, elements)) or strides[-2:] != (elements, 1):
        raise _Opaque(f"its tensor of shape {shape} and strides {strides} is not what its names say")
    if several and strides[0] != tokens * elements:
        raise _Opaque(f"its tensor of shape {shape} and strides {strides} has gaps between blocks")
    return RankLayout(shape=LatentShape(layers=1, blocks=blocks, block_tokens=block_tokens, token_bytes=content))


def _state(config: Any, module: Any, spec: Any, block_tokens: int, blocks: int) -> RankLayout:
    tp = int(config.parallel_config.tensor_parallel_size)
    if config.speculative_config is not None or getattr(spec, "tp_replicated", False):
        raise _Opaque("a state that holds drafted tokens, or that every rank has whole, is not cut by heads")
    keys, key_size, values, value_size = (int(getattr(module, name)) for name in ("num_k_heads", "head_k_dim", "num_v_heads", "head_v_dim"))
    rows, width = int(module.conv_kernel_size) - 1, 2 * keys * key_size + values * value_size
    whole = ((rows, width), (values, value_size, key_size))
    local = ((rows, width // tp), (values // tp, value_size, key_size))
    states = tuple(module.kv_cache)
    if keys % tp or values % tp or tuple(map(tuple, spec.shapes)) != local or len(states) != len(local):
        raise _Opaque(f"its state of shapes {spec.shapes} is not one of {keys} and {values} heads cut in {tp}")
    sizes = [dtype.itemsize for dtype in spec.dtypes]
    at = states[0].data_ptr()
    for state, shape, size in zip(states, local, sizes, strict=True):
        if tuple(state.shape[1:]) != shape or not state[0].is_contiguous() or state.element_size() != size or state.data_ptr() != at:
            raise _Opaque(f"its state of shape {tuple(state.shape)} does not lie where its page has it")
        at += state[0].numel() * size
    convolution = tuple(Section(heads, length * sizes[0]) for heads, length in ((keys, key_size), (keys, key_size), (values, value_size)))
    recurrent = (Section(values, value_size * key_size * sizes[1]),)
    return RankLayout(
        shape=StateShape(layers=1, blocks=blocks, parts=(StatePart(rows, convolution), StatePart(1, recurrent))),
        state_shapes=tuple(
            f"{str(dtype).removeprefix('torch.')}[{','.join(map(str, shape))}]" for dtype, shape in zip(spec.dtypes, whole, strict=True)
        ),
    )


_READERS: dict[str, Callable[[Any, Any, Any, int, int], RankLayout]] = {"MLAAttentionSpec": _latent, "MambaSpec": _state}


def _one(cache: Any) -> Any:
    """The cache of a layer, which some versions keep in a list of one."""
    return cache[0] if isinstance(cache, (list, tuple)) else cache


def _parts(block_tokens: int, tokens: int) -> int:
    if block_tokens % tokens:
        raise _Opaque(f"its kernel's blocks of {tokens} tokens do not make up one of {block_tokens}")
    return block_tokens // tokens
