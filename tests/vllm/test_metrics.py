"""Our counters in vLLM's terms."""

from __future__ import annotations

import numpy as np
from vllm.v1.kv_offload import base as offload

from kvstore_sdk.host import GroupStats, HostStats
from kvstore_sdk.tier import COUNTERS, GAUGES, HISTOGRAMS, MetricsDelta
from kvstore_sdk.vllm.metrics import HOST_PREFIX, PREFIX, HostGroups, definitions, stats, store_definitions, store_stats


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


def test_host_memory_is_counted_by_group_and_only_what_is_new() -> None:
    """HMA-03: a group that is written and never read is seen."""

    def found(evictions: int, hits: int) -> HostStats:
        groups = {
            number: GroupStats(
                slots=9, used=5, pinned=2, filling=1, quarantined=1, used_bytes=4096, evictions=evictions, hits=hits * number
            )
            for number in (0, 1)
        }
        return HostStats(
            groups=groups,
            capacity_bytes=1,
            used_bytes=1,
            reserve_bytes=1,
            background_bytes=1,
            engine_only_slots=0,
            no_room={},
            refused_pins=0,
            double_releases=0,
        )

    counting, nothing = HostGroups(), MetricsDelta({}, {}, {})
    values = []
    for stats_of in (found(2, 3), found(2, 3), found(7, 4)):
        result = store_stats(nothing, counting.take(stats_of), {})
        values.append({name.removeprefix(HOST_PREFIX): series for name, series in result.data["data"].items()})
    assert [each.get("evictions") for each in values] == [
        {("host", "0"): 2.0, ("host", "1"): 2.0},
        None,
        {("host", "0"): 5.0, ("host", "1"): 5.0},
    ]
    assert [each.get("hits") for each in values] == [{("host", "1"): 3.0}, None, {("host", "1"): 1.0}]
    gauges = {"slots": 9.0, "used_slots": 5.0, "used_bytes": 4096.0, "pinned_slots": 2.0, "quarantined_slots": 1.0}
    for each in values:
        assert {name: each[name] for name in gauges} == {
            name: {("host", "0"): value, ("host", "1"): value} for name, value in gauges.items()
        }


def test_no_two_families_of_metrics_have_names_in_common() -> None:
    """Somebody who asks for `kvstore_store...` means stores to a tier."""
    of_tiers = set(definitions())
    others = set(store_definitions()) - of_tiers
    assert len(store_definitions()) == len(of_tiers) + len(others)
    assert {name.removeprefix(PREFIX).split("_")[0] for name in others} == {"host", "tiered"}
    assert not {name.removeprefix(PREFIX).split("_")[0] for name in of_tiers} & {"host", "tiered"}


def test_nothing_new_is_none() -> None:
    assert stats(MetricsDelta({}, {}, {}), "1:kvstore") is None
