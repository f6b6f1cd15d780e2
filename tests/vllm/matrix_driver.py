"""Drives the tier through the real `TieringOffloadingManager` of whatever vLLM comes first on the path. Run as a process; prints JSON.

python matrix_driver.py <folder> <version expected>
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import vllm
from vllm_hinting import check_hints
from vllm_records import is_good, record_paths
from vllm_stand import Stand, offload

from kvstore_sdk.vllm import compat, kvstore
from kvstore_sdk.vllm.metrics import PREFIX

FOLDER = Path(sys.argv[1])
CHUNKS = 2


def entry(folder: str = "kv") -> dict[str, Any]:
    return {"type": "kvstore", "module_path": "kvstore_sdk.vllm", "backend": "fs", "location": str(FOLDER / folder)}


def signatures_cover_the_base_class() -> None:
    """API-02, API-03."""
    base = kvstore.__mro__[1]
    assert not kvstore.__abstractmethods__
    for name, method in inspect.getmembers(base, inspect.isfunction):
        if name.startswith("_"):
            continue
        ours = inspect.signature(getattr(kvstore, name)).parameters.values()
        takes_any = any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in ours)
        wanted = [parameter.name for parameter in inspect.signature(method).parameters.values()]
        names = [parameter.name for parameter in ours]
        assert takes_any or set(wanted) <= set(names), f"{name}: {names} lacks some of {wanted}"


def store_evict_promote() -> None:
    """Chunks that were pushed out of host memory come back from the store, byte for byte, on both ranks and in both groups."""
    stand = Stand([entry()], extra={"test_events": True})
    blocks = [[0, 1, 2, 3], [4, 5, 6, 7]]
    written = stand.fill(1, blocks)
    keys = stand.keys("a", CHUNKS)
    first = stand.request("first", keys)
    assert stand.lookup(first, keys) == [False] * 4
    stand.store(first, keys, blocks)
    stand.finish(first)
    stand.settle()
    records = record_paths(FOLDER / "kv")
    assert sorted(key.to_engine() for key in records) == sorted(keys)
    assert all(is_good(key, path) for key, path in records.items())

    others = stand.keys("b", 3)
    second = stand.request("second", others)
    stand.store(second, others, [[8, 9, 10, 11, 12, 13], [14, 15, 16, 17, 18, 19]])
    stand.finish(second)
    stand.settle()

    third = stand.request("third", keys)
    assert stand.lookup(third, keys) == [True] * 4
    into = [[20, 21, 22, 23], [24, 25, 26, 27]]
    stand.load(third, keys, into)
    assert stand.content(into) == written
    stand.finish(third)
    stand.settle()
    events = Counter((str(event.medium), event.removed) for event in stand.manager.take_events())
    report["events"] = {f"{medium} removed={removed}": count for (medium, removed), count in events.items()}
    check_metrics(stand)
    stand.close()


def check_metrics(stand: Stand) -> None:
    """Everything the tier reports is declared, and vLLM's own Prometheus code takes it (T18 to T24)."""
    definitions = type(stand.scheduler_spec).build_metric_definitions(stand.extra)
    report["declared"] = sorted(name for name in definitions if name.startswith(PREFIX))
    stats = stand.manager.get_stats() if hasattr(stand.manager, "get_stats") else None
    if stats is None or not report["declared"]:
        return
    import prometheus_client
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadPromMetrics

    registry = prometheus_client.REGISTRY
    kinds = {kind: kind for kind in (prometheus_client.Counter, prometheus_client.Gauge, prometheus_client.Histogram)}
    stand.extra.update(spec_name="KVStoreTieringSpec", spec_module_path="kvstore_sdk.vllm")
    shown = OffloadPromMetrics(stand.configs[0], kinds, ["model_name", "engine"], {0: ["tiny", "0"]})
    shown.observe(stats.data, 0)
    labels = {"model_name": "tiny", "engine": "0", "tier": "1:kvstore", "result": "loaded"}
    report["loads"] = registry.get_sample_value(PREFIX + "loads_total", labels)


def a_reset_is_final() -> None:
    """KEY-12, CFG-12. Nothing that was stored before a reset is served after it, and two engines that both reset never share."""
    one = Stand([entry("reset")])
    keys = one.keys("a", CHUNKS)
    blocks = [[0, 1, 2, 3], [4, 5, 6, 7]]

    def store(stand: Stand, name: str) -> None:
        request = stand.request(name, keys)
        stand.store(request, keys, blocks)
        stand.finish(request)
        stand.settle()

    def found(stand: Stand, name: str) -> list[bool]:
        request = stand.request(name, keys)
        answers = stand.lookup(request, keys)
        stand.finish(request)
        stand.settle()
        return answers

    def reset(stand: Stand) -> None:
        stand.manager.reset_cache()
        if hasattr(stand.manager, "on_reset_flushed"):
            stand.manager.on_reset_flushed()

    store(one, "first")
    other = Stand([entry("reset")])
    assert found(other, "shared") == [True] * 4
    reset(one)
    assert found(one, "after") == [False] * 4
    store(one, "again")
    reset(other)
    assert found(other, "other") == [False] * 4
    other.close()
    # A reset with a job in flight: it ends, and does not come back.
    request = one.request("flying", keys)
    late = one.keys("late", CHUNKS)
    one.store(request, late, blocks)
    reset(one)
    assert not one.manager._jobs if hasattr(one.manager, "_jobs") else True
    assert found(one, "last") == [False] * 4
    one.close()


def partial_tails_are_misses() -> None:
    """T-U2. A key that ends inside a chunk is neither found nor stored, where the engine says so."""
    if not compat.HAS_KEY_POSITIONS:
        return
    stand = Stand([entry("tails")])
    keys = stand.keys("a", CHUNKS)
    request = stand.request("first", keys)
    stand.store(request, keys, [[0, 1, 2, 3], [4, 5, 6, 7]])
    stand.settle()
    request.set_offload_key_position(keys[0], stand.chunk_tokens + 16)
    tier = stand.manager.secondary_tiers[0]
    assert tier.lookup(keys[0], request) is compat.MISS
    stand.close()


def plain_spec() -> None:
    """vLLM's own spec: one worker, one group and chunks of a block are served, privately; all else is refused with the spec's name."""
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    plain: dict[str, Any] = {"spec_class": TieringOffloadingSpec, "workers": False, "cache_config__cache_dtype": "bfloat16"}
    stand = Stand([entry("plain")], ranks=1, groups=1, blocks_per_chunk=1, **plain)
    assert stand.manager.secondary_tiers[0]._tier.identity.private
    stand.manager.shutdown()
    for shape in (
        {"ranks": 2, "groups": 1, "blocks_per_chunk": 1},
        {"ranks": 1, "groups": 2, "blocks_per_chunk": 1},
        {"ranks": 1, "groups": 1, "blocks_per_chunk": 2},
    ):
        with pytest.raises(ValueError, match="KVStoreTieringSpec"):
            Stand([entry("plain")], **plain, **shape)
        # Before 0.28 vLLM leaves its region to itself when a tier refuses.
        for path in Path("/dev/shm").glob(f"vllm_offload_kvstore-test-{os.getpid()}-*"):
            path.unlink()


def refused(message: str, **options: Any) -> None:
    with pytest.raises(ValueError, match=message):
        Stand([entry("refused")], **options)
    assert not (FOLDER / "refused").exists()


def upstream_faults_are_refused() -> None:
    """What goes wrong in vLLM itself in some versions is refused in exactly those."""
    report["refuses offload_prompt_only"] = compat.LOSES_FINISHED_REQUESTS
    report["refuses replicas"] = compat.SHARES_REGION_BETWEEN_REPLICAS
    report["refuses mamba align"] = compat.PARTIAL_TAILS_UNMARKED
    if compat.LOSES_FINISHED_REQUESTS:
        refused("offload_prompt_only", extra={"offload_prompt_only": False})
    if compat.SHARES_REGION_BETWEEN_REPLICAS:
        refused("data_parallel_size", parallel_config__data_parallel_size=2)
    if compat.PARTIAL_TAILS_UNMARKED:
        refused("blocks_per_chunk", cache_config__mamba_cache_mode="align", blocks_per_chunk=1)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    report: dict[str, Any] = {"version": vllm.__version__}
    assert vllm.__version__.split("+")[0] == sys.argv[2], vllm.__version__
    signatures_cover_the_base_class()
    store_evict_promote()
    a_reset_is_final()
    partial_tails_are_misses()
    check_hints(lambda entry, **changes: Stand([entry], **changes))
    plain_spec()
    upstream_faults_are_refused()
    mine = f"kvstore-test-{os.getpid()}-"
    report["left in /dev/shm"] = [name for name in os.listdir("/dev/shm") if mine in name]
    report["has Medium"] = hasattr(offload, "Medium")
    sys.stdout.write(f"REPORT {json.dumps(report)}\n")
