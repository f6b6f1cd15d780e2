"""What only a worker knows of the model, and decides what the bytes of its KV cache mean."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
from collections.abc import Mapping
from typing import Any

import vllm

from kvstore_sdk.errors import ConfigError
from kvstore_sdk.vllm import compat
from kvstore_sdk.vllm.geometry import RankGeometry, group_extents, host_id
from kvstore_sdk.vllm.weights import model_fingerprint
from kvstore_sdk.vllm.worker import SlotLayout

__all__ = ["UNSUPPORTED", "collect", "spare_pages"]

logger = logging.getLogger(__name__)

_WHERE = "kvstore tier"

_KINDS = {
    "FullAttentionSpec": "full",
    "SinkFullAttentionSpec": "full_with_sink",
    "SlidingWindowSpec": "sliding_window",
    "ChunkedLocalAttentionSpec": "chunked_local",
    "MLAAttentionSpec": "mla",
    "SlidingWindowMLASpec": "mla_sliding_window",
    "MambaSpec": "mamba",
}
UNSUPPORTED = "unsupported:"
"""Before the name of a kind of cache of which nobody has looked at what its bytes mean and which of them a reader needs."""
# They change from one installation to the next and say nothing about the model.
_NOISE = ("transformers_version", "_name_or_path", "_commit_hash")


def collect(spec: Any, layout: SlotLayout, *, rows: int, row_bytes: int, region: str) -> RankGeometry:
    """Everything this rank knows, as its geometry record.

    Args:
        spec: The worker's offloading spec.
        layout: Of the rank's KV tensors.
        rows: Rows of the region.
        row_bytes: Length of a row.
        region: The region itself, as `region_id` names it.

    Raises:
        ConfigError: the engine spans machines, or the KV tensors are not divided as this adapter reads them.
    """
    known = compat.spec_facts(spec)
    config = compat.current_config(spec)
    if config is None:
        raise ConfigError(_WHERE, "vllm", f"this worker of vLLM {vllm.__version__} does not say what model it runs")
    nodes = int(getattr(config.parallel_config, "nnodes", 1))
    if nodes > 1:
        raise ConfigError(_WHERE, "nnodes", f"{nodes} machines share no host tier; run one engine on each, or set it to 1")
    if known.parallel.rank == 0:
        _tell_of_lost_hits(known, config)
    groups, extents = {}, {}
    writes = not known.replicated or known.parallel.rank == 0
    for place, (group, tokens, layers) in enumerate(known.groups):
        refs = layout.refs[place]
        if len(known.groups) > 1 and len(refs) != len(layers):
            problem = f"group {group} has {len(layers)} layers in {len(refs)} parts: with this packed cache layout its bytes cannot be told"
            raise ConfigError(_WHERE, "model", problem)
        extents[group] = group_extents(refs, layout.pages, layout.blocks_per_chunk, layout.offset) if writes else []
        groups[group] = _group(config, layers) | {"shape": ""}
        groups[group]["shape"] = _digest([groups[group], tokens, layout.pages, refs])
    return RankGeometry(
        rank=known.parallel.rank,
        world_size=known.parallel.world_size,
        host=host_id(),
        rows=rows,
        row_bytes=row_bytes,
        extents=extents,
        groups=groups,
        facts=_common(known, config),
        region=region,
    )


def spare_pages(spec: Any) -> tuple[int, ...]:
    """Of each group, how many pages at the start of a chunk no reader can need: their tokens lie outside the window of every reader.

    A reader resumes at a multiple of some group's chunk, or one token before it, since the last token of a prompt is computed always. What
    it sees begins a window before. Nothing is spare in groups without a window; nor in any if the engine has caches that it does not
    offload, because those may end a hit anywhere.
    """
    known, config = compat.spec_facts(spec), compat.current_config(spec)
    none = (0,) * len(known.groups)
    if config is None or known.blocks_per_chunk == 1:
        return none
    modules: Mapping[str, Any] = config.compilation_config.static_forward_context
    offloaded = {name for _, _, layers in known.groups for name in layers}
    for name, module in modules.items():
        # A layer that shares the cache of another one has none of its own.
        shares = getattr(module, "kv_sharing_target_layer_name", None) is not None
        if name not in offloaded and not shares and getattr(module, "get_kv_cache_spec", lambda _: None)(config) is not None:
            return none
    step = math.gcd(*(tokens * known.blocks_per_chunk for _, tokens, _ in known.groups))
    speculative = int(getattr(config.speculative_config, "num_speculative_tokens", 0) or 0)
    found = []
    for _, tokens, layers in known.groups:
        specs = [modules[name].get_kv_cache_spec(config) if name in modules else None for name in layers]
        windows = [_window(found_spec, speculative) for found_spec in specs]
        # A state that is kept at chunk boundaries alone is looked for nowhere else.
        aligned = all(getattr(found_spec, "mamba_cache_mode", "") == "align" for found_spec in specs)
        reach = tokens * known.blocks_per_chunk if aligned else step
        found.append(max(0, (reach - max(windows)) // tokens) if windows and all(windows) else 0)
    return tuple(found)


def _tell_of_lost_hits(known: compat.SpecFacts, config: Any) -> None:
    """Say that vLLM itself will find nothing again of a prompt that is repeated, where that is so (0.30 to 0.33).

    Of layers with a window, and of states, it offloads what a reader at the end of the prompt needs; but in front of a group that holds
    draft layers a reader resumes a chunk before that.
    """
    speculative, interval = config.speculative_config, getattr(config.cache_config, "prefix_cache_retention_interval", None)
    drops = getattr(speculative, "use_eagle_block_drop", None)
    # vLLM flags groups of these methods' draft layers alone.
    if interval != 0 or drops is None or not drops() or speculative.method not in ("mtp", "dspark"):
        return
    modules: Mapping[str, Any] = config.compilation_config.static_forward_context
    specs = [modules[name].get_kv_cache_spec(config) for _, _, names in known.groups for name in names if name in modules]
    if any(_window(spec, 0) for spec in specs):
        logger.warning(
            "%s: with method %s and prefix_cache_retention_interval 0, which is vLLM's default, a repeated prompt is not found again: "
            "vLLM offloads too little of layers with a window or a state. Start it with --prefix-cache-retention-interval None, "
            "or set disable_eagle_block_drop in speculative_config",
            _WHERE,
            speculative.method,
        )


def _window(spec: Any, speculative: int) -> int:
    """How many tokens before the next one a layer can see, those kept for speculation included; 0 where there is no limit.

    Engines that share chunks may speculate over different numbers of tokens. What that adds is kept by the engine, but attended to by none:
    a chunk that one of them stored without it is whole for the others too.
    """
    if type(spec).__name__ == "MambaSpec":
        # One state says everything. It is that of the last token.
        return 1 + speculative
    window = int(getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None) or 0)
    return window + max(speculative, int(getattr(spec, "extra_retained_tokens", 0))) if window else 0


def _common(known: compat.SpecFacts, config: Any) -> dict[str, Any]:
    """What is the same on every rank."""
    model, cache = config.model_config, config.cache_config
    kv_dtype = str(cache.cache_dtype)
    if kv_dtype == "auto":
        kv_dtype = str(model.dtype).removeprefix("torch.")
    return {
        "engine": f"vllm {vllm.__version__}",
        "platform": compat.platform_variant(),
        "cache_layout": compat.cache_layout(known),
        "model": str(model.model),
        "weights": model_fingerprint(model, config.load_config),
        "model_config": _model_digest(model),
        "kv_dtype": kv_dtype,
        "quantization": str(model.quantization or ""),
        "hash_algorithm": str(cache.prefix_caching_hash_algo),
        "draft_model": _draft(config),
        "lora": config.lora_config is not None,
        "mamba_align": str(getattr(cache, "mamba_cache_mode", "none")) == "align",
        # Scales taken from the first batch are others in every process: equal tokens, other bytes.
        "own_scales": bool(getattr(cache, "calculate_kv_scales", False)) and kv_dtype != str(model.dtype).removeprefix("torch."),
    }


def _model_digest(model: Any) -> str:
    """Digest of everything that decides what a token's KV is, besides the weights: the resolved configuration, rope and maximum length."""
    described = {key: value for key, value in model.hf_config.to_dict().items() if key not in _NOISE}
    others = {
        name: str(getattr(model, name, ""))
        for name in ("dtype", "max_model_len", "disable_sliding_window", "mm_processor_kwargs", "runner_type", "convert_type")
    }
    return _digest([described, others])


def _draft(config: Any) -> str:
    """The speculative model, whose KV lies in the chunks too; empty for none. It ends in `unknown` when its weights cannot be told."""
    speculative = getattr(config, "speculative_config", None)
    if speculative is None:
        return ""
    draft = getattr(speculative, "draft_model_config", None)
    if draft is None:
        return str(speculative.method)
    loader = getattr(speculative, "draft_load_config", None) or config.load_config
    return f"{speculative.method}:{draft.model}:{_model_digest(draft)}:{model_fingerprint(draft, loader) or 'unknown'}"


def _group(config: Any, layers: tuple[str, ...]) -> dict[str, Any]:
    """What the layers of one group say of themselves on this rank. Kind `unknown` makes the namespace private; `UNSUPPORTED` is refused."""
    modules: Mapping[str, Any] = config.compilation_config.static_forward_context
    found = [modules.get(name) for name in layers]
    specs = [module.get_kv_cache_spec(config) for module in found if module is not None]
    backends = sorted({module.get_attn_backend().get_name() for module in found if module is not None})
    whole = len(specs) == len(layers) and all(spec is not None for spec in specs)
    first = specs[0] if whole and specs else None
    kinds = {_KINDS.get(type(spec).__name__, UNSUPPORTED + type(spec).__name__) for spec in specs if spec is not None}
    strange = sorted(kind for kind in kinds if kind.startswith(UNSUPPORTED))
    kind = strange[0] if strange else _KINDS[type(first).__name__] if first is not None else "unknown"
    heads = int(getattr(first, "num_kv_heads", 0) or 0)
    return {
        "layers": list(layers),
        "kind": kind,
        # Ranks beyond the number of heads hold copies.
        "heads": min(heads * config.parallel_config.tensor_parallel_size, max(heads, config.model_config.get_total_num_kv_heads()))
        if not kind.startswith("mla")
        else 0,
        "head_size": int(getattr(first, "head_size", 0) or 0),
        "window": int(getattr(first, "sliding_window", None) or getattr(first, "attention_chunk_size", None) or 0),
        "state_shapes": _state_shapes(first),
        "backends": backends,
        "specs": _digest([_plain(spec) for spec in specs]),
    }


def _state_shapes(spec: Any) -> list[str]:
    shapes, dtypes = getattr(spec, "shapes", ()), getattr(spec, "dtypes", ())
    return [f"{str(dtype).removeprefix('torch.')}[{','.join(map(str, shape))}]" for shape, dtype in zip(shapes, dtypes, strict=False)]


def _plain(spec: Any) -> list[Any]:
    return [type(spec).__name__, {field.name: str(getattr(spec, field.name)) for field in dataclasses.fields(spec)}]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]
