"""What the gauges of a TieredStore read."""

from __future__ import annotations

from kvstore_sdk.host import HostTier
from kvstore_sdk.store.cascades import Cascades
from kvstore_sdk.store.promotions import Promotions
from kvstore_sdk.store.requests import Holds
from kvstore_sdk.store.serving import Serving
from kvstore_sdk.tier.metrics import TierMetrics

__all__ = ["declare_gauges"]


def declare_gauges(
    metrics: TierMetrics, host: HostTier, holds: Holds, promotions: Promotions, cascades: Cascades, serving: Serving
) -> None:
    """Have `metrics` read them from the parts of one store."""
    gauge = metrics.gauge
    gauge("host_capacity_bytes", lambda: host.capacity_bytes)
    gauge("host_used_bytes", lambda: host.used_bytes)
    gauge("holding_requests", lambda: len(holds))
    gauge("open_promotions", lambda: len(promotions))
    gauge("cascade_bytes", lambda: cascades.bytes)
    gauge("lent_chunks", lambda: serving.lent)
    gauge("held_slots", lambda: promotions.quarantined + cascades.held)
