"""What vLLM asks and is told: look-ups, results, events, metrics."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from vllm.v1.kv_offload import base as offload
from vllm.v1.kv_offload.tiering import base as tiering

__all__ = [
    "BASE_KEYWORDS",
    "HAS_KEY_POSITIONS",
    "HIT",
    "LOSES_FINISHED_REQUESTS",
    "MISS",
    "PARTIAL_TAILS_UNMARKED",
    "PENDING",
    "RETRY",
    "allowed_tiers",
    "borrow_logging",
    "job_result",
    "job_rows",
    "key_position",
    "load_source",
    "locality",
    "medium",
    "metric_classes",
    "new_stats",
    "offloading_event",
    "prepared_store",
    "request_context",
    "scheduled_requests",
    "transfer_params",
]

_LOOKUP = getattr(offload, "LookupResult", None)
# vLLM compares with `is`: exactly these objects, or the answer counts as a miss.
HIT: Any = _LOOKUP.HIT if _LOOKUP else True
MISS: Any = _LOOKUP.MISS if _LOOKUP else False
RETRY: Any = _LOOKUP.RETRY if _LOOKUP else None
PENDING: Any = _LOOKUP.HIT_PENDING if _LOOKUP else None
"""There, but not to be read yet. Only a manager may answer so: from a tier it is a miss."""

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


def key_position(request: Any, key: bytes) -> int | None:
    """The token at which `key` ends in this request, where the engine says it."""
    return request.get_offload_key_position(key) if HAS_KEY_POSITIONS else None


def borrow_logging() -> None:
    """Let the SDK and its backends log as vLLM does, in a process where nobody said how they should: vLLM sets up its own loggers only."""
    theirs = logging.getLogger("vllm")
    for package in ("kvstore_sdk", "kvstore_sdk_backends"):
        ours = logging.getLogger(package)
        if theirs.handlers and ours.propagate and not ours.hasHandlers():
            ours.handlers = list(theirs.handlers)
            # As vLLM's own: whoever gives the root logger a handler later has no line twice.
            ours.propagate = theirs.propagate
            if ours.level == logging.NOTSET:
                ours.setLevel(theirs.level)


def medium() -> Any:
    """What class attribute `medium` a tier has: `Medium.STORAGE`, or None before 0.27."""
    return offload.Medium.STORAGE if _HAS_MEDIUM else None


def locality(name: str) -> Any:
    """`LOCAL` or `REMOTE` as the engine's enumeration, or None where there is none (before 0.26)."""
    return offload.Locality[name] if hasattr(offload, "Locality") else None


def offloading_event(keys: Sequence[bytes], *, removed: bool, where: Any, owner: str | None, host: bool = False) -> Any:
    """The engine's event for chunks that a tier stored, or that are gone from it. `host`: the tier is host memory, which has no owner."""
    name = "CPU" if host else "STORAGE"
    event: dict[str, Any] = {"keys": list(keys), "medium": offload.Medium[name] if _HAS_MEDIUM else name, "removed": removed}
    if "locality" in _EVENT_FIELDS:
        event["locality"] = where
    if "ownership" in _EVENT_FIELDS:
        event["ownership"] = owner
    return offload.OffloadingEvent(**event)


def prepared_store(keys: Sequence[bytes], spec: Any) -> Any:
    """A manager's answer to `prepare_store`: the keys to be stored, in the order in which they were given, and where."""
    return offload.PrepareStoreOutput(keys_to_store=list(keys), store_spec=spec, evicted_keys=[])


def scheduled_requests(schedule_end: Sequence[Any]) -> tuple[Collection[str], Collection[str]]:
    """Which requests had their first step and which were preempted, from the arguments of `on_schedule_end`. 0.24 does not say it."""
    return (schedule_end[0].new_req_ids, schedule_end[0].preempted_req_ids) if schedule_end else ((), ())


def allowed_tiers(request: Any, localities: Mapping[str, Any]) -> Collection[str] | None:
    """Of the named storage tiers, those that a request may load from; None for all. Requests may choose from 0.27 on."""
    chosen = getattr(request, "load_tier_filter", None)
    if chosen is None or chosen is offload.TierFilter.ALL:
        return None
    return [name for name, where in localities.items() if chosen.allows(medium(), where)]


def transfer_params(request: Any) -> Any:
    """What the client or a router wrote for connectors, unchecked: a table, or nothing."""
    return getattr(request, "kv_transfer_params", None)


def load_source(storage: bool, where: Any) -> Any:
    """The engine's name for where a chunk came from (0.32): host memory, a local store, or anything else."""
    sources = importlib.import_module("vllm.v1.metrics.cache_hit_source").CacheHitSource
    if not storage:
        return sources.HOST
    return sources.EXTERNAL_UNSPECIFIED if where is not None and where.name == "REMOTE" else sources.DISK


def metric_classes() -> tuple[type[Any], type[Any], type[Any]]:
    """Counter, gauge and histogram metadata, in this order."""
    return offload.OffloadingCounterMetadata, offload.OffloadingGaugeMetadata, offload.OffloadingHistogramMetadata


def new_stats() -> Any:
    """An empty `OffloadingConnectorStats`."""
    module = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics")
    return module.OffloadingConnectorStats()
