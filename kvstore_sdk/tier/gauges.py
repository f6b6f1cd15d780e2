"""What a Tier's gauges read, and the counters that its parts keep."""

from __future__ import annotations

from kvstore_sdk.tier.breaker import Breakers
from kvstore_sdk.tier.desk import Desk
from kvstore_sdk.tier.floor import Floor
from kvstore_sdk.tier.gate import Gate
from kvstore_sdk.tier.health import Health
from kvstore_sdk.tier.lookups import LookupTable
from kvstore_sdk.tier.metrics import TierMetrics
from kvstore_sdk.tier.work import WorkQueue

__all__ = ["count_lookups", "declare_gauges"]


def count_lookups(metrics: TierMetrics, table: LookupTable, gate: Gate) -> None:
    """Have `metrics` read what look-ups were told, so that no step of the engine pays for it."""
    metrics.counter("lookups", lambda: table.hits, "hit")
    metrics.counter("lookups", lambda: table.misses, "miss")
    metrics.counter("lookup_timeouts", lambda: table.timeouts)
    metrics.counter("lookups_too_slow", lambda: gate.too_slow)


def declare_gauges(
    metrics: TierMetrics, breakers: Breakers, health: Health, floor: Floor, work: WorkQueue, table: LookupTable, desk: Desk
) -> None:
    """Have `metrics` read them from the parts of one Tier."""
    gauge = metrics.gauge
    gauge("breaker_open", lambda: breakers.exists.is_open or breakers.get.is_open, "read")
    gauge("breaker_open", lambda: breakers.put.is_open, "write")
    gauge("healthy", lambda: health.healthy)
    gauge("load_mb_per_s", lambda: floor.mb_per_s)
    gauge("queued_store_bytes", lambda: work.queued_store_bytes)
    gauge("quarantined_bytes", lambda: work.quarantined_bytes)
    gauge("known_keys", lambda: len(table))
    gauge("open_jobs", lambda: len(desk))
