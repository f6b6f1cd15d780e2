"""Drives our own manager through the calls of whatever vLLM comes first on the path. Run as a process; prints JSON.

python offloading_driver.py <folder> <version expected>
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

import vllm
from vllm_hinting import check_hints
from vllm_records import is_good, record_paths
from vllm_scheduler import Scheduler
from vllm_stand import Stand, offload

from kvstore_sdk.vllm import KVStoreOffloadingSpec, compat
from kvstore_sdk.vllm.metrics import PREFIX, STORE_PREFIX
from kvstore_sdk.vllm.offloading.manager import KVStoreOffloadingManager

FOLDER = Path(sys.argv[1])
BLOCKS = [[0, 1, 2, 3], [4, 5, 6, 7]]
OTHERS = [[9, 10, 11, 12], [13, 14, 15, 16]]
# vLLM's first block stands for none.
BLOCKS_USED = [[1, 2, 3, 4], [5, 6, 7, 8]]
INTO = [[20, 21, 22, 23], [24, 25, 26, 27]]
# The plan, a page of marks, and ten records of the larger group.
HOST_BYTES = (256 << 10) + 4096 + 10 * 12288


def build(folder: str = "", blocks: int = 32, **extra: Any) -> Stand:
    tiers = [{"type": "kvstore", "backend": "fs", "location": str(FOLDER / folder)}] if folder else []
    return Stand(tiers, spec_class=KVStoreOffloadingSpec, blocks=blocks, extra={"cpu_bytes_to_use": HOST_BYTES, **extra})


def signatures_cover_the_base_class() -> None:
    """API-02, API-03."""
    assert not KVStoreOffloadingManager.__abstractmethods__
    assert not KVStoreOffloadingSpec.__abstractmethods__
    for name, method in inspect.getmembers(offload.OffloadingManager, inspect.isfunction):
        if name.startswith("_"):
            continue
        ours = inspect.signature(getattr(KVStoreOffloadingManager, name)).parameters.values()
        takes_any = any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in ours)
        wanted = [parameter.name for parameter in inspect.signature(method).parameters.values()]
        names = [parameter.name for parameter in ours]
        assert takes_any or set(wanted) <= set(names), f"{name}: {names} lacks some of {wanted}"


def stored(made: Stand, seed: str, blocks: list[list[int]] = BLOCKS) -> list[bytes]:
    keys = made.keys(seed, 2)
    request = made.request(seed, keys)
    assert made.lookup(request, keys) == [False] * 4
    made.store(request, keys, blocks)
    made.finish(request)
    made.settle()
    return keys


def store_evict_promote() -> None:
    """Chunks that were pushed out of host memory come back from the store, byte for byte, on both ranks and in both groups."""
    made = build("kv", test_events=True)
    written = made.fill(1, BLOCKS)
    keys = stored(made, "a")
    for name in "bcdef":
        stored(made, name, OTHERS)
    records = record_paths(FOLDER / "kv")
    assert set(keys) <= {key.to_engine() for key in records}
    assert all(is_good(key, path) for key, path in records.items())
    request = made.request("again", keys)
    assert made.manager.lookup(keys[0], request) in (compat.RETRY, compat.PENDING)
    assert made.lookup(request, keys) == [True] * 4
    made.load(request, keys, INTO)
    assert made.content(INTO) == written
    made.finish(request)
    # 0.25 and 0.26 store after a request's end.
    late = made.keys("late", 2)
    made.store(request, late, BLOCKS)
    made.settle()
    report["promoted"] = made.manager._store.metrics.total("promotions", "1:kvstore", "loaded")
    events = Counter((str(event.medium), event.removed) for event in made.manager.take_events())
    report["events"] = {f"{medium} removed={removed}": count for (medium, removed), count in events.items()}
    check_metrics(made)
    made.close()


def check_metrics(made: Stand) -> None:
    """Everything that is reported is declared, and vLLM's own Prometheus code takes it (T18 to T24)."""
    declared = KVStoreOffloadingSpec.build_metric_definitions(made.extra)
    report["declared"] = sorted(declared)
    stats = made.manager.get_stats()
    import prometheus_client
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadPromMetrics

    kinds = {kind: kind for kind in (prometheus_client.Counter, prometheus_client.Gauge, prometheus_client.Histogram)}
    made.extra.update(spec_name="KVStoreOffloadingSpec", spec_module_path="kvstore_sdk.vllm")
    shown = OffloadPromMetrics(made.configs[0], kinds, ["model_name", "engine"], {0: ["tiny", "0"]})
    shown.observe(stats.data, 0)
    read, labels = prometheus_client.REGISTRY.get_sample_value, {"model_name": "tiny", "engine": "0"}
    report["loads"] = read(PREFIX + "loads_total", {**labels, "tier": "1:kvstore", "result": "loaded"})
    report["misses"] = read(STORE_PREFIX + "misses_total", labels)


def a_reset_is_final() -> None:
    """KEY-12, CFG-12. Nothing that was stored before a reset is served after it, and two engines that both reset never share."""
    one = build("reset")
    keys = stored(one, "a")
    other = build("reset")

    def found(made: Stand, name: str) -> list[bool]:
        request = made.request(name, keys)
        answers = made.lookup(request, keys)
        made.finish(request)
        made.settle()
        return answers

    def reset(made: Stand) -> None:
        made.manager.reset_cache()
        if hasattr(made.manager, "on_reset_flushed"):
            made.manager.on_reset_flushed()

    assert found(other, "shared") == [True] * 4
    reset(one)
    assert found(one, "after") == [False] * 4
    stored(one, "a")
    reset(other)
    assert found(other, "other") == [False] * 4
    assert found(one, "again") == [True] * 4
    one.close()
    other.close()


def host_memory_alone() -> None:
    made = build()
    written = made.fill(3, BLOCKS)
    keys = stored(made, "a")
    request = made.request("second", keys)
    assert made.lookup(request, keys) == [True] * 4
    made.load(request, keys, INTO)
    assert made.content(INTO) == written
    made.finish(request)
    made.settle()
    assert not made.manager.has_pending_work()
    made.close()


def partial_tails_are_misses() -> None:
    """T-U2. A key that ends inside a chunk is neither found nor stored, where the engine says so."""
    if not compat.HAS_KEY_POSITIONS:
        return
    made = build()
    keys = stored(made, "a")
    request = made.request("second", keys)
    request.set_offload_key_position(keys[0], made.chunk_tokens + 16)
    assert made.manager.lookup(keys[0], request) is compat.MISS
    made.close()


def through_the_real_scheduler() -> None:
    """The connector's own scheduler side stores, finds, loads and resets; nothing stays pending."""
    made = build("scheduler")
    scheduler = Scheduler(made)

    def compute(name: str, blocks: list[list[int]]) -> None:
        request = scheduler.request(name, 2, name)
        assert scheduler.find(request) == 0
        scheduler.step([(request, [[*group, 30 + place] for place, group in enumerate(blocks)], 2 * made.chunk_tokens + 1)])
        scheduler.settle()
        scheduler.finish(request)
        scheduler.settle()

    written = made.fill(4, BLOCKS_USED)
    compute("a", BLOCKS_USED)
    for name in "bcdef":
        compute(name, OTHERS)
    request = scheduler.request("again", 2, "a")
    assert scheduler.find(request) == 2 * made.chunk_tokens
    scheduler.load(request, [[*group, 30 + place] for place, group in enumerate(INTO)], 2 * made.chunk_tokens)
    scheduler.settle()
    assert made.content(INTO) == written
    scheduler.finish(request)
    scheduler.settle()
    report["promoted for the scheduler"] = made.manager._store.metrics.total("promotions", "1:kvstore", "loaded")
    scheduler.connector.reset_cache()
    assert scheduler.find(scheduler.request("after", 2, "a")) == 0
    made.close()


def a_group_of_draft_layers_is_found_again() -> None:
    """HMA-03. Ten chunks, pushed out of host memory by others, come back from the store but for what vLLM leaves to be computed."""
    chunks, blocks = 10, [list(range(1, 21)), list(range(21, 41))]
    made = build("drafts", blocks=90, cpu_bytes_to_use=(256 << 10) + 4096 + 44 * 12288)
    scheduler = Scheduler(made, drafts=(1,))
    written = made.fill(5, blocks)
    for name in "abcde":
        request = scheduler.request(name, chunks, name)
        assert scheduler.find(request) == 0
        scheduler.step([(request, [[*group, 88 + place] for place, group in enumerate(blocks)], chunks * made.chunk_tokens + 1)])
        scheduler.settle()
        scheduler.finish(request)
        scheduler.settle()
        if name == "a":
            made.fill(6, blocks)
    request = scheduler.request("again", chunks, "a")
    found = scheduler.find(request) // made.chunk_tokens
    into = [list(range(41, 41 + 2 * found)), list(range(61, 61 + 2 * found))]
    scheduler.load(request, into, found * made.chunk_tokens)
    scheduler.settle()
    lengths = [len(content) // chunks * found for content in written]
    assert made.content(into) == [content[:length] for content, length in zip(written, lengths, strict=True)]
    count = made.manager._store.metrics.total
    report["drafts"] = {"found": found, "stores": count("engine_stores"), "loads": count("engine_loads")}
    report["drafts"]["promoted"] = count("promotions", "1:kvstore", "loaded")
    made.close()


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    report: dict[str, Any] = {"version": vllm.__version__}
    assert vllm.__version__.split("+")[0] == sys.argv[2], vllm.__version__
    signatures_cover_the_base_class()
    store_evict_promote()
    a_reset_is_final()
    host_memory_alone()
    partial_tails_are_misses()
    through_the_real_scheduler()
    sizes = {"cpu_bytes_to_use": HOST_BYTES}
    check_hints(lambda entry, **changes: Stand([entry], spec_class=KVStoreOffloadingSpec, extra=sizes, **changes))
    a_group_of_draft_layers_is_found_again()
    mine = f"kvstore-test-{os.getpid()}-"
    report["left in /dev/shm"] = [name for name in os.listdir("/dev/shm") if mine in name]
    sys.stdout.write(f"REPORT {json.dumps(report)}\n")
