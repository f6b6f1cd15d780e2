"""What the SDK counts, as vLLM's own metrics: each Tier with vLLM's label `tier`, host memory by KV cache group, and a TieredStore."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstore_sdk.host import HostStats
from kvstore_sdk.store import HOST
from kvstore_sdk.store import metrics as store_metrics
from kvstore_sdk.tier import COUNTERS, GAUGES, HISTOGRAMS, MetricsDelta, MetricSpec
from kvstore_sdk.vllm import compat

__all__ = [
    "HOST_COUNTERS",
    "HOST_GAUGES",
    "HOST_PREFIX",
    "PREFIX",
    "STORE_PREFIX",
    "TIER_LABEL",
    "HostGroups",
    "definitions",
    "stats",
    "store_definitions",
    "store_stats",
]

PREFIX = "vllm:kvstore_"
STORE_PREFIX = "vllm:kvstore_tiered_"
"""Of a TieredStore. `store` is what a Tier does, and begins names of its own."""
HOST_PREFIX = "vllm:kvstore_host_"
"""Of host memory, by KV cache group; with the label `tier` too, whose value is `host`."""
TIER_LABEL = "tier"
"""Its value is vLLM's own for the tier, `2:kvstore` for the second in the list of tiers with vLLM's counting from 1."""

HOST_COUNTERS: Mapping[str, MetricSpec] = {
    "evictions": MetricSpec("Chunks evicted from host memory.", ("group",)),
    "hits": MetricSpec("Chunks in host memory that transfers to the engine were served from.", ("group",)),
}

HOST_GAUGES: Mapping[str, MetricSpec] = {
    "slots": MetricSpec("How many chunks of the group there could be if there were no others.", ("group",)),
    "used_slots": MetricSpec("Slots in use, by whatever state.", ("group",)),
    "used_bytes": MetricSpec("Bytes of the slots in use, header and padding included.", ("group",)),
    "pinned_slots": MetricSpec("Slots in use whose chunk cannot be evicted now.", ("group",)),
    "quarantined_slots": MetricSpec("Slots that hold no chunk, but that a late call may still touch.", ("group",)),
}


def definitions() -> dict[str, Any]:
    """Every metric there can be, for the frontend. What is not declared here would stop it."""
    return _TIER.definitions()


def stats(delta: MetricsDelta, tier: str) -> Any:
    """What is new, as vLLM's stats; None when nothing is. Names, numbers of labels and types are those of `definitions`, always.

    Args:
        delta: From `TierMetrics.take`.
        tier: Value of the label.
    """
    result = compat.new_stats()
    _TIER.add(result, delta, (tier,))
    return None if result.is_empty() else result


def store_definitions() -> dict[str, Any]:
    """Every metric of a TieredStore, its host memory and its tiers."""
    return _STORE.definitions() | _HOST.definitions() | _TIER.definitions()


class HostGroups:
    """Counts from a HostTier's totals. For one thread."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, tuple[str, ...]], int] = {}

    def take(self, stats: HostStats) -> MetricsDelta:
        """What is new since the last call, and what is so now."""
        totals: dict[tuple[str, tuple[str, ...]], int] = {}
        gauges: dict[tuple[str, tuple[str, ...]], float] = {}
        for number, group in stats.groups.items():
            label = (str(number),)
            totals["evictions", label], totals["hits", label] = group.evictions, group.hits
            gauges["slots", label] = group.slots
            gauges["used_slots", label], gauges["used_bytes", label] = group.used, group.used_bytes
            gauges["pinned_slots", label], gauges["quarantined_slots", label] = group.pinned, group.quarantined
        counters = {series: total - self._told.get(series, 0) for series, total in totals.items()}
        self._told = totals
        return MetricsDelta(counters, {}, gauges)


def store_stats(store: MetricsDelta, host: MetricsDelta, tiers: Mapping[str, MetricsDelta]) -> Any:
    """What is new in a TieredStore, in its host memory and, by name, in its tiers; None when nothing is.

    Args:
        store: From the store's metrics.
        host: From `HostGroups`.
        tiers: By name, from the metrics of each tier.
    """
    result = compat.new_stats()
    _STORE.add(result, store, ())
    _HOST.add(result, host, (HOST,))
    for name, delta in tiers.items():
        _TIER.add(result, delta, (name,))
    return None if result.is_empty() else result


class _Family:
    """Metrics that are declared together: a prefix, and labels before those that each has for itself."""

    def __init__(
        self,
        prefix: str,
        labels: tuple[str, ...],
        counters: Mapping[str, MetricSpec],
        gauges: Mapping[str, MetricSpec],
        histograms: Mapping[str, MetricSpec],
    ) -> None:
        self._prefix, self._labels = prefix, labels
        self._counters, self._gauges, self._histograms = counters, gauges, histograms

    def definitions(self) -> dict[str, Any]:
        counter, gauge, histogram = compat.metric_classes()
        declared: dict[str, Any] = {}
        for kind, table in ((counter, self._counters), (gauge, self._gauges)):
            for name, spec in table.items():
                declared[self._prefix + name] = kind(documentation=spec.doc, labelnames=(*self._labels, *spec.labels))
        for name, spec in self._histograms.items():
            labels = (*self._labels, *spec.labels)
            declared[self._prefix + name] = histogram(documentation=spec.doc, labelnames=labels, buckets=tuple(spec.buckets))
        return declared

    def add(self, result: Any, delta: MetricsDelta, values: tuple[str, ...]) -> None:
        """Add what is declared to vLLM's stats, with `values` for the labels that all have."""
        for (name, labels), value in delta.counters.items():
            if name in self._counters and len(labels) == len(self._counters[name].labels) and value > 0:
                result.increase_counter(self._prefix + name, float(value), (*values, *map(str, labels)))
        for (name, labels), value in delta.gauges.items():
            if name in self._gauges and len(labels) == len(self._gauges[name].labels):
                result.set_gauge(self._prefix + name, float(value), (*values, *map(str, labels)))
        for (name, labels), observed in delta.observations.items():
            if name in self._histograms and len(labels) == len(self._histograms[name].labels):
                for value in observed:
                    result.observe_histogram(self._prefix + name, max(0.0, float(value)), (*values, *map(str, labels)))


_TIER = _Family(PREFIX, (TIER_LABEL,), COUNTERS, GAUGES, HISTOGRAMS)
_HOST = _Family(HOST_PREFIX, (TIER_LABEL,), HOST_COUNTERS, HOST_GAUGES, {})
_STORE = _Family(STORE_PREFIX, (), store_metrics.COUNTERS, store_metrics.GAUGES, store_metrics.HISTOGRAMS)
