"""What the Tier counts, as vLLM's own metrics: `vllm:kvstore_...`, with vLLM's label `tier`."""

from __future__ import annotations

from typing import Any

from kvstore_sdk.tier import COUNTERS, GAUGES, HISTOGRAMS, MetricsDelta
from kvstore_sdk.vllm import compat

__all__ = ["PREFIX", "TIER_LABEL", "definitions", "stats"]

PREFIX = "vllm:kvstore_"
TIER_LABEL = "tier"
"""Its value is vLLM's own for the tier, `2:kvstore` for the second in the list of tiers with vLLM's counting from 1."""


def definitions() -> dict[str, Any]:
    """Every metric there can be, for the frontend. What is not declared here would stop it."""
    counter, gauge, histogram = compat.metric_classes()
    declared: dict[str, Any] = {}
    for kind, table in ((counter, COUNTERS), (gauge, GAUGES)):
        for name, spec in table.items():
            declared[PREFIX + name] = kind(documentation=spec.doc, labelnames=(TIER_LABEL, *spec.labels))
    for name, spec in HISTOGRAMS.items():
        declared[PREFIX + name] = histogram(documentation=spec.doc, labelnames=(TIER_LABEL, *spec.labels), buckets=tuple(spec.buckets))
    return declared


def stats(delta: MetricsDelta, tier: str) -> Any:
    """What is new, as vLLM's stats; None when nothing is. Names, numbers of labels and types are those of `definitions`, always.

    Args:
        delta: From `TierMetrics.take`.
        tier: Value of the label.
    """
    result = compat.new_stats()
    for (name, labels), value in delta.counters.items():
        if name in COUNTERS and len(labels) == len(COUNTERS[name].labels) and value > 0:
            result.increase_counter(PREFIX + name, float(value), (tier, *map(str, labels)))
    for (name, labels), value in delta.gauges.items():
        if name in GAUGES and len(labels) == len(GAUGES[name].labels):
            result.set_gauge(PREFIX + name, float(value), (tier, *map(str, labels)))
    for (name, labels), values in delta.observations.items():
        if name in HISTOGRAMS and len(labels) == len(HISTOGRAMS[name].labels):
            for value in values:
                result.observe_histogram(PREFIX + name, max(0.0, float(value)), (tier, *map(str, labels)))
    return None if result.is_empty() else result
