"""Every difference between vLLM 0.24 and 0.33 that the adapter meets, found by looking at what is there, never at the version.

The one use of the version number is `check_version`, which refuses what was not tested.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import vllm
import vllm.v1.core.kv_cache_utils as hashing
from vllm.platforms import current_platform
from vllm.v1.kv_offload import base as offload
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering import base as tiering

from kvstore_sdk.errors import ConfigError

__all__ = [
    "BASE_KEYWORDS",
    "HAS_KEY_POSITIONS",
    "HIT",
    "LOSES_FINISHED_REQUESTS",
    "MAX_VERSION",
    "MIN_VERSION",
    "MISS",
    "PARTIAL_TAILS_UNMARKED",
    "RETRY",
    "SHARES_REGION_BETWEEN_REPLICAS",
    "ParallelFacts",
    "RowFacts",
    "SpecFacts",
    "borrow_logging",
    "cache_layout",
    "check_version",
    "current_config",
    "detach_region",
    "expected_none_hash",
    "hash_seed",
    "host_is_the_device",
    "is_none_hash",
    "job_result",
    "job_rows",
    "key_position",
    "locality",
    "manager_of",
    "medium",
    "metric_classes",
    "new_stats",
    "offloading_event",
    "open_region",
    "platform_variant",
    "region_of_scheduler",
    "region_of_worker",
    "region_path",
    "region_tensor",
    "request_context",
    "row_bytes",
    "row_facts",
    "row_numbers",
    "runtime_lora_updating",
    "spec_facts",
    "transfer_ends",
    "transfer_result_class",
]

MIN_VERSION = (0, 24)
MAX_VERSION = (0, 33)

_WHERE = "kvstore tier"


def _version(text: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def check_version() -> None:
    """Refuse a vLLM that this adapter was not tested with.

    A build from source that calls itself 0.0 or `dev` is told by its features alone.

    Raises:
        ConfigError: the version is out of range, or the tier interface is older than 0.24's.
    """
    wanted = f"needs vLLM {MIN_VERSION[0]}.{MIN_VERSION[1]} to {MAX_VERSION[0]}.{MAX_VERSION[1]}"
    version = _version(vllm.__version__)
    if version is not None and version > (0, 0) and not MIN_VERSION <= version <= MAX_VERSION:
        raise ConfigError(_WHERE, "vllm", f"version {vllm.__version__} is outside the tested range: {wanted}")
    # Before 0.24 a reset of the cache never reached a tier: what was computed with old weights would be served.
    if "drain_jobs" not in tiering.SecondaryTierManager.__abstractmethods__:
        raise ConfigError(_WHERE, "vllm", f"version {vllm.__version__} cannot reset a tier: {wanted}")


# --- answers and results -----------------------------------------------------------------------------------------------------------

_LOOKUP = getattr(offload, "LookupResult", None)
# vLLM compares with `is`: exactly these objects, or the answer counts as a miss.
HIT: Any = _LOOKUP.HIT if _LOOKUP else True
MISS: Any = _LOOKUP.MISS if _LOOKUP else False
RETRY: Any = _LOOKUP.RETRY if _LOOKUP else None

_JOB_RESULT_FIELDS = {field.name for field in dataclasses.fields(tiering.JobResult)}
_EVENT_FIELDS = {field.name for field in dataclasses.fields(offload.OffloadingEvent)}

BASE_KEYWORDS = frozenset(inspect.signature(tiering.SecondaryTierManager.__init__).parameters) - {
    "self",
    "offloading_spec",
    "primary_kv_view",
    "tier_type",
}
"""Keywords that the factory passes for the base class, not for us: `backpressure_detector` where there is one."""


def job_result(job_id: int, *, success: bool, loaded: Sequence[bytes] | None, seconds: float, moved_bytes: int) -> Any:
    """The engine's `JobResult`.

    Args:
        job_id: As submitted.
        success: Every key of the job.
        loaded: Keys of a load that failed in part which did arrive. Before 0.28 such a load has failed as a whole.
        seconds: From submission, not negative.
        moved_bytes: Payload bytes.
    """
    result: dict[str, Any] = {"job_id": job_id, "success": success}
    if "successful_keys" in _JOB_RESULT_FIELDS and not success and loaded:
        result["successful_keys"] = tuple(loaded)
    if "transfer_time" in _JOB_RESULT_FIELDS:
        result["transfer_time"] = max(0.0, float(seconds))
    if "transfer_bytes" in _JOB_RESULT_FIELDS:
        result["transfer_bytes"] = max(0, int(moved_bytes))
    return tiering.JobResult(**result)


def job_rows(job: Any) -> tuple[list[bytes], list[int]]:
    """The keys of a job, and the row of each. The key set is shared between all tiers: it is copied once and never touched."""
    ids = getattr(job, "chunk_ids", None)
    if ids is None:
        ids = job.block_ids
    keys = list(job.keys)
    rows = ids.tolist()
    if len(keys) != len(rows):
        raise ValueError(f"job {job.job_id} has {len(keys)} keys and {len(rows)} rows")
    return keys, rows


def request_context() -> Any:
    """The answer to `on_new_request`: the default policy, whose name changed in 0.30."""
    return offload.RequestOffloadingContext()


HAS_KEY_POSITIONS = hasattr(offload.ReqContext, "get_offload_key_position")
"""A request says at which token a key ends (0.31)."""

PARTIAL_TAILS_UNMARKED = hasattr(tiering, "TransferJob") and not HAS_KEY_POSITIONS
"""Look-ups of parts of a chunk (Mamba `align`, one block a chunk) cannot be told from others (0.28 to 0.30)."""

_HAS_MEDIUM = hasattr(offload, "Medium")

LOSES_FINISHED_REQUESTS = "config" in inspect.signature(offload.OffloadingSpec.__init__).parameters and not _HAS_MEDIUM
"""A request's last chunk is stored after its state is gone: `KeyError` in the engine's loop (0.26 alone)."""

SHARES_REGION_BETWEEN_REPLICAS = "instance_id" in inspect.signature(SharedOffloadRegion.__init__).parameters
"""The region is named after the instance, which data parallel replicas share (0.24, 0.25)."""


def key_position(request: Any, key: bytes) -> int | None:
    """The token at which `key` ends in this request, where the engine says it."""
    return request.get_offload_key_position(key) if HAS_KEY_POSITIONS else None


def borrow_logging() -> None:
    """Let the SDK log as vLLM does, in a process where nobody said how it should: vLLM sets up its own loggers only."""
    ours, theirs = logging.getLogger("kvstore_sdk"), logging.getLogger("vllm")
    if not ours.hasHandlers() and theirs.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)


def medium() -> Any:
    """What class attribute `medium` a tier has: `Medium.STORAGE`, or None before 0.27."""
    return offload.Medium.STORAGE if _HAS_MEDIUM else None


def locality(name: str) -> Any:
    """`LOCAL` or `REMOTE` as the engine's enumeration, or None where there is none (before 0.26)."""
    return offload.Locality[name] if hasattr(offload, "Locality") else None


def offloading_event(keys: Sequence[bytes], *, removed: bool, where: Any, owner: str) -> Any:
    """The engine's event for chunks that this tier stored, or found to be gone."""
    event: dict[str, Any] = {"keys": list(keys), "medium": medium() if _HAS_MEDIUM else "STORAGE", "removed": removed}
    if "locality" in _EVENT_FIELDS:
        event["locality"] = where
    if "ownership" in _EVENT_FIELDS:
        event["ownership"] = owner
    return offload.OffloadingEvent(**event)


# --- metrics -----------------------------------------------------------------------------------------------------------------------


def metric_classes() -> tuple[type[Any], type[Any], type[Any]]:
    """Counter, gauge and histogram metadata, in this order."""
    return offload.OffloadingCounterMetadata, offload.OffloadingGaugeMetadata, offload.OffloadingHistogramMetadata


def new_stats() -> Any:
    """An empty `OffloadingConnectorStats`."""
    module = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics")
    return module.OffloadingConnectorStats()


# --- what a spec knows -------------------------------------------------------------------------------------------------------------


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


def platform_variant() -> str:
    """What else of the machine decides how a kernel lays out the cache: on CPU its instruction set, on a GPU its generation."""
    if host_is_the_device():
        import torch

        amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
        return f"{os.uname().machine}/{torch.backends.cpu.get_cpu_capability()}{'+AMX' if amx else ''}"
    capability = getattr(current_platform, "get_device_capability", lambda: None)()
    return f"{current_platform.device_type}/{'.'.join(map(str, capability)) if capability else 'any'}"


# --- region and workers ------------------------------------------------------------------------------------------------------------


def host_is_the_device() -> bool:
    """Whether vLLM computes on the CPU, where its own offloading refuses to start."""
    return bool(current_platform.is_cpu())


def open_region(spec: Any, rank: int) -> Any:
    """Map the engine's shared region for the slot of `rank`, as vLLM's own `create_worker` does."""
    facts = row_facts(spec)
    parameters = inspect.signature(SharedOffloadRegion.__init__).parameters
    arguments: dict[str, Any] = {"rank": rank, "cpu_page_size": facts.slot_bytes}
    if SHARES_REGION_BETWEEN_REPLICAS:
        arguments["instance_id"] = spec.vllm_config.instance_id
    else:
        arguments["engine_id"] = spec.config.engine_id
    arguments["num_chunks" if "num_chunks" in parameters else "num_blocks"] = facts.rows
    arguments["kv_bytes_per_chunk" if "kv_bytes_per_chunk" in parameters else "kv_bytes_per_block"] = facts.row_bytes
    return SharedOffloadRegion(**arguments)


def region_path(spec: Any) -> str:
    """Where the region has its name, as `SharedOffloadRegion` builds it."""
    engine = spec.vllm_config.instance_id if SHARES_REGION_BETWEEN_REPLICAS else spec.config.engine_id
    return f"/dev/shm/vllm_offload_{engine}.mmap"


def region_of_worker(worker: Any) -> Any:
    """The region that one of vLLM's own workers (0.25) or handlers (0.24) maps."""
    region = getattr(worker, "_mmap_region", None)
    if region is None:
        raise ConfigError(_WHERE, "vllm", f"{type(worker).__name__} of vLLM {vllm.__version__} maps no shared region")
    return region


def manager_of(spec: Any) -> Any:
    """The manager that a tiering spec has built, or None."""
    return spec._manager


def region_of_scheduler(spec: Any) -> Any:
    """The region that a tiering spec mapped for its manager."""
    return spec._scheduler_mmap


def detach_region(region: Any) -> None:
    """Make `region` leave its file alone when it is closed: whoever calls this unlinks the file."""
    region._creator = False


def region_tensor(region: Any) -> Any:
    """All bytes of a region, as one tensor."""
    return _first(region, "base_tensor", "_base")


def row_bytes(region: Any) -> int:
    """Length of a row of a region."""
    return int(region._row_stride)


def transfer_ends() -> tuple[type[Any], type[Any]]:
    """The types that name a device's blocks and the region's rows in a transfer."""
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

    return offload.GPULoadStoreSpec, CPULoadStoreSpec


def transfer_result_class() -> type[Any]:
    """`TransferResult`, which moved in 0.25."""
    found = getattr(offload, "TransferResult", None)
    if found is None:
        found = importlib.import_module("vllm.v1.kv_offload.worker.worker").TransferResult
    return found


def row_numbers(host_spec: Any) -> Any:
    """Rows of the region that a transfer names, as a numpy array."""
    return host_spec.block_ids


# --- hashing -----------------------------------------------------------------------------------------------------------------------


def _hash_function(algorithm: str) -> Callable[[Any], bytes]:
    from vllm.utils.hashing import get_hash_fn_by_name

    return get_hash_fn_by_name(algorithm)


def hash_seed(algorithm: str) -> str | None:
    """The seed that all hashes of this process will hang on, or None when it is random for each process.

    Known before the engine has drawn it: this is how the engine decides.
    """
    if (given := os.environ.get("PYTHONHASHSEED")) is not None:
        return given
    if hasattr(hashing, "resolve_none_hash_seed") and algorithm in ("sha256", "sha256_cbor"):
        return str(hashing.DEFAULT_NONE_HASH_SEED)
    return None


def expected_none_hash(algorithm: str, seed: str) -> bytes:
    """The hash before the first block that `seed` leads to."""
    return bytes(_hash_function(algorithm)(seed))


def is_none_hash(expected: bytes) -> bool:
    """Whether the engine hashes from `expected`. Only true once the engine has initialised its hashing, after the tiers are built."""
    return bytes(getattr(hashing, "NONE_HASH", b"")) == expected


def runtime_lora_updating() -> bool:
    """Whether adapters may be loaded or replaced while the engine runs."""
    from vllm import envs

    return bool(getattr(envs, "VLLM_ALLOW_RUNTIME_LORA_UPDATING", False))
