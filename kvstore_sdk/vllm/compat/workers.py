"""vLLM's shared region, and what its workers are called."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import vllm
from vllm.v1.kv_offload import base as offload
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from kvstore_sdk.errors import ConfigError
from kvstore_sdk.vllm.compat.specs import row_facts

__all__ = [
    "SHARES_REGION_BETWEEN_REPLICAS",
    "detach_region",
    "engine_id",
    "manager_of",
    "open_region",
    "region_of_scheduler",
    "region_of_worker",
    "region_path",
    "region_tensor",
    "row_bytes",
    "row_numbers",
    "transfer_ends",
    "transfer_result_class",
]

_WHERE = "kvstore tier"

SHARES_REGION_BETWEEN_REPLICAS = "instance_id" in inspect.signature(SharedOffloadRegion.__init__).parameters
"""The region is named after the instance, which data parallel replicas share (0.24, 0.25)."""


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


def engine_id(spec: Any) -> str:
    """What names this engine, each data parallel replica for itself."""
    config = getattr(spec, "config", None)
    return str(config.engine_id if config is not None else spec.vllm_config.kv_transfer_config.engine_id)


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
    return region.base_tensor if hasattr(region, "base_tensor") else region._base


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
