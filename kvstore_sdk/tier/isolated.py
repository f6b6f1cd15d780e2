"""What a backend that runs in a child process says of that, among the metrics of its tier."""

from __future__ import annotations

from kvstore_sdk.backend import Backend
from kvstore_sdk.isolation import IsolatedBackend
from kvstore_sdk.tier.metrics import TierMetrics

__all__ = ["count_isolation"]


def count_isolation(metrics: TierMetrics, backend: Backend) -> None:
    """Have `metrics` tell how often the child of `backend` died and was started again, and whether it is up. Of another backend nothing."""
    if isinstance(backend, IsolatedBackend):
        metrics.counter("isolation_deaths", lambda: backend.deaths)
        metrics.counter("isolation_restarts", lambda: backend.restarts)
        metrics.gauge("isolation_up", lambda: backend.state == "up")
