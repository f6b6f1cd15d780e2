"""Our counters in vLLM's terms."""

from __future__ import annotations

import numpy as np
from vllm.v1.kv_offload import base as offload

from kvstore_sdk.tier import COUNTERS, GAUGES, HISTOGRAMS, MetricsDelta
from kvstore_sdk.vllm.metrics import PREFIX, definitions, stats


def test_everything_a_tier_counts_is_declared_with_its_labels() -> None:
    """T18, T19, T23, T24."""
    declared = definitions()
    assert len(declared) == len(COUNTERS) + len(GAUGES) + len(HISTOGRAMS)
    for table, kind in (
        (COUNTERS, offload.OffloadingCounterMetadata),
        (GAUGES, offload.OffloadingGaugeMetadata),
        (HISTOGRAMS, offload.OffloadingHistogramMetadata),
    ):
        for name, spec in table.items():
            found = declared[PREFIX + name]
            assert type(found) is kind
            assert found.labelnames == ("tier", *spec.labels)
            assert not name.endswith("_total"), "Prometheus would merge it with the name without the ending"


def test_values_are_plain_numbers_and_labels_tuples_of_text() -> None:
    """T20 to T23: anything else ends the engine, or every request in the frontend."""
    delta = MetricsDelta(
        counters={("loads", ("loaded",)): np.int64(3), ("load_bytes", ()): -5, ("made_up", ()): 1, ("loads", ()): 1},
        observations={("load_seconds", ()): [np.float32(0.5), -1.0], ("made_up", ()): [1.0]},
        gauges={("known_keys", ()): np.int64(7), ("breaker_open", ()): 1, ("made_up", ()): 1},
    )
    found = stats(delta, "1:kvstore")
    values = dict(found.data["data"])
    assert values == {
        PREFIX + "loads": {("1:kvstore", "loaded"): 3.0},
        PREFIX + "load_seconds": {("1:kvstore",): [0.5, 0.0]},
        PREFIX + "known_keys": {("1:kvstore",): 7.0},
    }
    for series in values.values():
        for labels, value in series.items():
            assert isinstance(labels, tuple)
            assert all(type(number) is float for number in (value if isinstance(value, list) else [value]))


def test_nothing_new_is_none() -> None:
    assert stats(MetricsDelta({}, {}, {}), "1:kvstore") is None
