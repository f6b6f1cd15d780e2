"""Data parallel replicas: engines of one deployment, each with host memory of its own, that share what they store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import prometheus_client
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadPromMetrics
from vllm_engines import fs_entry
from vllm_records import record_paths
from vllm_stand import Stand

from kvstore_sdk.vllm import compat
from kvstore_sdk.vllm.metrics import PREFIX

BLOCKS = [[0, 1, 2, 3], [4, 5, 6, 7]]
INTO = [[20, 21, 22, 23], [24, 25, 26, 27]]


def replicas(stand: Callable[..., Stand], folder: Path) -> list[Stand]:
    """Two, as vLLM names them: the connector of each adds its number to the engine's id."""
    return [
        stand(
            [fs_entry(folder)],
            replica=f"_dp{number}",
            parallel_config__data_parallel_size=2,
            parallel_config__data_parallel_index=number,
        )
        for number in range(2)
    ]


def test_replicas_have_their_own_rows_and_share_their_chunks(stand: Callable[..., Stand], tmp_path: Path) -> None:
    one, two = replicas(stand, tmp_path / "kv")
    assert compat.region_path(one.scheduler_spec) != compat.region_path(two.scheduler_spec)
    assert one.adapter._tier.identity == two.adapter._tier.identity
    rows = np.asarray(two.manager.primary_tier.get_kv_memoryview())
    before = rows.copy()
    keys = one.keys("a", 2)
    written = one.fill(1, BLOCKS)
    request = one.request("store", keys)
    one.store(request, keys, BLOCKS)
    one.settle()
    assert (rows == before).all(), "the other replica's rows were written"
    del rows
    again = two.request("load", keys)
    assert two.lookup(again, keys) == [True] * 4
    two.load(again, keys, INTO)
    assert two.content(INTO) == written
    assert len(record_paths(tmp_path / "kv")) == 4


def test_the_metrics_of_replicas_differ_in_vllms_own_label(stand: Callable[..., Stand], tmp_path: Path) -> None:
    """vLLM sets `engine`; `tier` is the place in the configuration, which is the same."""
    one, two = replicas(stand, tmp_path / "kv")
    keys = one.keys("a", 1)
    request = one.request("store", keys)
    one.store(request, keys, [[0, 1], [4, 5]])
    one.settle()
    registry = prometheus_client.CollectorRegistry()
    one.extra.update(spec_name="KVStoreTieringSpec", spec_module_path="kvstore_sdk.vllm")

    def counter(*arguments: object, **options: object) -> object:
        return prometheus_client.Counter(*arguments, registry=registry, **options)  # type: ignore[arg-type]

    def gauge(*arguments: object, **options: object) -> object:
        return prometheus_client.Gauge(*arguments, registry=registry, **options)  # type: ignore[arg-type]

    def histogram(*arguments: object, **options: object) -> object:
        return prometheus_client.Histogram(*arguments, registry=registry, **options)  # type: ignore[arg-type]

    kinds = {
        prometheus_client.Counter: counter,
        prometheus_client.Gauge: gauge,
        prometheus_client.Histogram: histogram,
    }
    shown = OffloadPromMetrics(one.configs[0], kinds, ["model_name", "engine"], {0: ["tiny", "0"], 1: ["tiny", "1"]})
    for number, made in enumerate((one, two)):
        found = made.manager.get_stats()
        if found is not None:
            shown.observe(found.data, number)
    sample = registry.get_sample_value
    labels = {"model_name": "tiny", "tier": "1:kvstore", "result": "stored"}
    assert sample(PREFIX + "stores_total", labels | {"engine": "0"}) == 2.0
    assert not sample(PREFIX + "stores_total", labels | {"engine": "1"})
