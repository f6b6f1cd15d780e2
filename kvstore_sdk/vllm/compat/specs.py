"""What an offloading spec and its surroundings know of the engine."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from vllm.platforms import current_platform

__all__ = [
    "ParallelFacts",
    "RowFacts",
    "SpecFacts",
    "cache_layout",
    "current_config",
    "host_is_the_device",
    "platform_variant",
    "row_facts",
    "runtime_lora_updating",
    "spec_facts",
]


class ParallelFacts(NamedTuple):
    """Sizes of the engine's parallel axes, and which replica and rank this is."""

    rank: int
    world_size: int
    tp: int
    pp: int
    pcp: int
    dcp: int
    dp: int
    replica: int


class SpecFacts(NamedTuple):
    """What the spec says on both sides, the scheduler's and the workers'.

    Attributes:
        model: Name of the model.
        kv_dtype: May be `auto` in 0.26 and before.
        groups: (number as in the keys, tokens of a block, names of the layers) of each offloaded group.
        hash_tokens: Tokens of a hash.
        blocks_per_chunk: Blocks of a chunk.
        parallel: Sizes.
        replicated: All ranks share one slot.
        canonical: The operator asked vLLM for its canonical layout.
        kv_cache_layout: Name of vLLM's layout, where it has one.
        extra: `kv_connector_extra_config`.
        events: KV events are switched on.
        prompt_only: Only prompts are offloaded.
    """

    model: str
    kv_dtype: str
    groups: tuple[tuple[int, int, tuple[str, ...]], ...]
    hash_tokens: int
    blocks_per_chunk: int
    parallel: ParallelFacts
    replicated: bool
    canonical: bool
    kv_cache_layout: str
    extra: Mapping[str, Any]
    events: bool
    prompt_only: bool


def _first(owner: object, *names: str) -> Any:
    """The first of the attributes that `owner` has; they were renamed over time."""
    for name in names:
        if hasattr(owner, name):
            return getattr(owner, name)
    raise AttributeError(f"{type(owner).__name__} has none of {', '.join(names)}")


def spec_facts(spec: Any) -> SpecFacts:
    """Read an offloading spec of any version."""
    config = getattr(spec, "config", None)
    if config is not None:
        name, kv_dtype = config.model.name, config.model.dtype
        groups = tuple(
            (int(getattr(group, "group_id", index)), int(group.tokens_per_block), tuple(group.layer_names))
            for index, group in enumerate(config.groups)
        )
        hash_tokens, blocks_per_chunk = spec.tokens_per_hash, spec.blocks_per_chunk
        p = config.parallel
        parallel = ParallelFacts(
            p.rank,
            p.world_size,
            p.tp_size,
            p.pp_size,
            p.pcp_size,
            p.dcp_size,
            getattr(p, "data_parallel_size", 1),
            p.data_parallel_index,
        )
    else:
        engine = spec.vllm_config
        name, kv_dtype = engine.model_config.model, str(engine.cache_config.cache_dtype)
        groups = tuple(
            (index, tokens, tuple(group.layer_names))
            for index, (tokens, group) in enumerate(zip(spec.gpu_block_size, spec.kv_cache_config.kv_cache_groups, strict=True))
        )
        hash_tokens, blocks_per_chunk = spec.hash_block_size, spec.block_size_factor
        p = engine.parallel_config
        parallel = ParallelFacts(
            p.rank,
            p.world_size,
            p.tensor_parallel_size,
            p.pipeline_parallel_size,
            p.prefill_context_parallel_size,
            p.decode_context_parallel_size,
            p.data_parallel_size,
            p.data_parallel_index,
        )
    return SpecFacts(
        model=str(name),
        kv_dtype=str(kv_dtype).removeprefix("torch."),
        groups=groups,
        hash_tokens=int(hash_tokens),
        blocks_per_chunk=int(blocks_per_chunk),
        parallel=parallel,
        replicated=bool(getattr(spec, "replicated_layout", False)),
        canonical=bool(spec.extra_config.get("canonical_layout", False)),
        kv_cache_layout=str(getattr(config, "kv_cache_layout", None) or ""),
        extra=spec.extra_config,
        events=bool(spec.kv_events_config.enable_kv_cache_events),
        prompt_only=bool(spec.offload_prompt_only),
    )


class RowFacts(NamedTuple):
    """How a tiering spec divides its region.

    Attributes:
        rows: Rows of the region.
        row_bytes: Length of a row, whole pages.
        slot_bytes: Of it, what one rank's slot takes.
    """

    rows: int
    row_bytes: int
    slot_bytes: int


def row_facts(spec: Any) -> RowFacts:
    """Read a tiering spec of any version."""
    return RowFacts(
        rows=int(_first(spec, "num_chunks", "num_blocks")),
        row_bytes=int(_first(spec, "kv_bytes_per_chunk", "kv_bytes_per_offloaded_block")),
        slot_bytes=int(spec.cpu_page_size_per_worker),
    )


def current_config(spec: Any) -> Any:
    """The whole `VllmConfig`, or None: the spec has it up to 0.25, the workers' own context has it in every version."""
    config = getattr(spec, "vllm_config", None)
    if config is not None:
        return config
    from vllm.config import get_current_vllm_config_or_none

    return get_current_vllm_config_or_none()


def cache_layout(facts: SpecFacts) -> str:
    """Name of the order inside a block: the spec has it from 0.29 on, before that the workers' attention code does."""
    if facts.kv_cache_layout:
        return facts.kv_cache_layout
    utils = importlib.import_module("vllm.v1.attention.backends.utils")
    return str(utils.get_kv_cache_layout()) if hasattr(utils, "get_kv_cache_layout") else ""


def host_is_the_device() -> bool:
    """Whether vLLM computes on the CPU, where its own offloading refuses to start."""
    return bool(current_platform.is_cpu())


def platform_variant() -> str:
    """What else of the machine decides how a kernel lays out the cache: on CPU its instruction set, on a GPU its generation."""
    if host_is_the_device():
        import torch

        amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
        return f"{os.uname().machine}/{torch.backends.cpu.get_cpu_capability()}{'+AMX' if amx else ''}"
    capability = getattr(current_platform, "get_device_capability", lambda: None)()
    return f"{current_platform.device_type}/{'.'.join(map(str, capability)) if capability else 'any'}"


def runtime_lora_updating() -> bool:
    """Whether adapters may be loaded or replaced while the engine runs."""
    from vllm import envs

    return bool(getattr(envs, "VLLM_ALLOW_RUNTIME_LORA_UPDATING", False))
