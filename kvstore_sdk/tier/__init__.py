"""Tier: one Backend made non-blocking and safe for an engine."""

from kvstore_sdk.tier.metrics import COUNTERS, GAUGES, HISTOGRAMS, MetricsDelta, MetricSpec, TierMetrics
from kvstore_sdk.tier.settings import TierSettings
from kvstore_sdk.tier.tier import Tier
from kvstore_sdk.tier.types import EngineMemory, IncompleteChunkError, JobResult, Lookup, RecordMemory, TierEvent

__all__ = [
    "COUNTERS",
    "GAUGES",
    "HISTOGRAMS",
    "EngineMemory",
    "IncompleteChunkError",
    "JobResult",
    "Lookup",
    "MetricSpec",
    "MetricsDelta",
    "RecordMemory",
    "Tier",
    "TierEvent",
    "TierMetrics",
    "TierSettings",
]
