"""What a backend counts of itself, among the metrics of its tier."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Mapping

from kvstore_sdk.backend import Backend, SupportsCounters
from kvstore_sdk.tier.isolated import count_isolation
from kvstore_sdk.tier.metrics import TierMetrics

__all__ = ["count_backend"]

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_MAX_NAMES = 64
"""Each is a series of its own in whatever takes the metrics."""
_FRESH_S = 0.2
"""So long one look at the backend serves all that are read."""
_NOW = "_now"


def count_backend(metrics: TierMetrics, backend: Backend, name: str) -> None:
    """Have `metrics` tell it, and what there is to tell of a child process that the backend runs in."""
    count_isolation(metrics, backend)
    if not isinstance(backend, SupportsCounters):
        return
    counts = _Counts(backend.counters, name)
    for what in counts.names:
        if what.endswith(_NOW):
            metrics.gauge("backend_now", counts.reader(what), what.removesuffix(_NOW))
        else:
            metrics.counter("backend_counts", counts.reader(what), what)


class _Counts:
    """Asks a backend, which may raise or say anything."""

    def __init__(self, ask: Callable[[], Mapping[str, int]], name: str) -> None:
        self._ask = ask
        self._name = name
        self._told = False
        self._known: dict[str, float] = {}
        self._asked_s = -math.inf
        self._look()
        self.names = tuple(self._known)

    def reader(self, what: str) -> Callable[[], float]:
        """Reads one of them: as it is, or as it was when it was last known."""

        def read() -> float:
            if time.monotonic() - self._asked_s > _FRESH_S:
                self._look()
            return self._known[what]

        return read

    def _look(self) -> None:
        self._asked_s = time.monotonic()
        try:
            said = {what: float(count) for what, count in self._ask().items() if _NAME.fullmatch(what) and math.isfinite(count)}
        except (Exception, SystemExit):
            if not self._told:
                self._told = True
                logger.exception("%s: the backend's counters cannot be read; from now on that is not said again", self._name)
            return
        # The first look decides what there is.
        names = self._known or list(said)[:_MAX_NAMES]
        self._known.update({what: said[what] for what in names if what in said})
