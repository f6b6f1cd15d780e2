"""What a Tier counts. Every name and label is listed here once, so that an engine can declare them before the first value."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import repeat

__all__ = ["COUNTERS", "GAUGES", "HISTOGRAMS", "MetricSpec", "MetricsDelta", "TierMetrics"]

Labels = tuple[str, ...]
Series = tuple[str, Labels]


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric: what it says, and the names of its labels. `buckets` are upper bounds, for histograms."""

    doc: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)

COUNTERS: Mapping[str, MetricSpec] = {
    "lookups": MetricSpec("Look-ups of chunks answered, by result (hit, miss); one for each request and chunk.", ("result",)),
    "lookup_timeouts": MetricSpec("Look-ups that became a miss because the backend gave no answer in time."),
    "lookups_too_slow": MetricSpec(
        "Look-ups, of those that were a miss, that were not answered from the store because it is slower than min_load_mb_per_s."
    ),
    "loads": MetricSpec("Chunks asked to be loaded, by result (loaded, missing, corrupt, failed, timeout, refused).", ("result",)),
    "load_bytes": MetricSpec("Payload bytes loaded and verified."),
    "stores": MetricSpec(
        "Chunks asked to be stored, by result (stored, replaced, exists, not_admitted, skipped, shed, failed, timeout, refused, "
        "incomplete).",
        ("result",),
    ),
    "store_bytes": MetricSpec("Payload bytes stored."),
    "corrupt": MetricSpec(
        "Records that failed verification twice, or were gone the second time, by flaw (header, key, namespace, layout, length, payload).",
        ("flaw",),
    ),
    "unstable_reads": MetricSpec("Records that failed verification once and passed when they were read again."),
    "repairs": MetricSpec("Bad records replaced by good ones."),
    "removals": MetricSpec("Bad records removed from the backend."),
    "call_failures": MetricSpec("Failed items of backend calls, by operation and kind of error.", ("operation", "error")),
    "retries": MetricSpec("Items tried again, by operation.", ("operation",)),
    "breaches": MetricSpec("Calls in which the backend broke its contract, by operation.", ("operation",)),
    "abandoned_calls": MetricSpec("Backend calls that outlived their deadline, by operation.", ("operation",)),
    "breaker_opened": MetricSpec("How often a circuit breaker opened, by side (read, write).", ("side",)),
    "manifests": MetricSpec("Manifests found or written, by result (same, written, rewritten, failed).", ("result",)),
    "backend_counts": MetricSpec("What the backend counts of itself, by what it calls it.", ("what",)),
    "isolation_deaths": MetricSpec("How often the child process of an isolated backend died or was killed."),
    "isolation_restarts": MetricSpec("How often it was started again."),
}

GAUGES: Mapping[str, MetricSpec] = {
    "healthy": MetricSpec(
        "1 while the store can be read, as far as look-ups, loads and, where there are none, probes have tried. Probes look a name up and "
        "load nothing: of a store that answers them and fails loads it is 1 while nobody loads. Whether it can be written says "
        "breaker_open."
    ),
    "load_mb_per_s": MetricSpec(
        "Rate of the last loads, in 10^6 bytes per second that a load was under way, until the engine took its answer; 0 before the first."
    ),
    "breaker_open": MetricSpec("1 while a circuit breaker is open, by side (read, write).", ("side",)),
    "queued_store_bytes": MetricSpec("Payload bytes of stores that wait."),
    "quarantined_bytes": MetricSpec("Memory that calls which outlived their deadline may still touch."),
    "known_keys": MetricSpec("Chunks in the table of known ones."),
    "open_jobs": MetricSpec("Jobs that were submitted and not reported yet."),
    "backend_now": MetricSpec("What the backend says of its present state, by what it calls it.", ("what",)),
    "isolation_up": MetricSpec("Of an isolated backend: 1 while its child process runs."),
}

HISTOGRAMS: Mapping[str, MetricSpec] = {
    "lookup_seconds": MetricSpec("Time from the first question for a chunk to the backend's answer.", (), _SECONDS),
    "load_seconds": MetricSpec("Time from submission to the end of a load job.", (), _SECONDS),
    "store_seconds": MetricSpec("Time from submission to the end of a store job.", (), _SECONDS),
    "call_seconds": MetricSpec("Time of a backend call, by operation.", ("operation",), _SECONDS),
}

_MAX_OBSERVATIONS = 65_536
"""Between two `take` calls, the oldest are dropped beyond: an engine that never takes must not make memory grow."""


@dataclass(frozen=True, slots=True)
class MetricsDelta:
    """What was counted since the last `take`, and the gauges as they are now."""

    counters: Mapping[Series, float]
    observations: Mapping[Series, list[float]]
    gauges: Mapping[Series, float]


class TierMetrics:
    """Counts, thread-safe. Totals are kept for tools; `take` gives an engine what is new.

    The names are a Tier's, unless others are given: what is built of tiers counts in the same way.
    """

    def __init__(
        self,
        counters: Mapping[str, MetricSpec] = COUNTERS,
        gauges: Mapping[str, MetricSpec] = GAUGES,
        histograms: Mapping[str, MetricSpec] = HISTOGRAMS,
    ) -> None:
        self._counters = counters
        self._gauge_specs = gauges
        self._histograms = histograms
        self._lock = threading.Lock()
        self._totals: Counter[Series] = Counter()
        self._new: Counter[Series] = Counter()
        # Appended to without the lock: the engine's thread would wait for a thread of ours that holds it and was put to sleep.
        self._observed: deque[tuple[str, Labels, float, int]] = deque(maxlen=_MAX_OBSERVATIONS)
        self._gauges: dict[Series, Callable[[], float]] = {}
        self._kept: dict[Series, Callable[[], float]] = {}
        self._told: dict[Series, float] = {}

    def count(self, name: str, *labels: str, by: float = 1) -> None:
        """Add to one of its counters."""
        if len(labels) != len(self._counters[name].labels):
            raise ValueError(f"metric {name} takes the labels {self._counters[name].labels}, not {labels}")
        series = (name, labels)
        with self._lock:
            self._totals[series] += by  # type: ignore[assignment]  # Counter is typed for whole numbers
            self._new[series] += by  # type: ignore[assignment]

    def counter(self, name: str, total: Callable[[], float], *labels: str) -> None:
        """Say how the total of one of its counters is read that somebody else keeps."""
        if len(labels) != len(self._counters[name].labels):
            raise ValueError(f"metric {name} takes the labels {self._counters[name].labels}, not {labels}")
        self._kept[name, labels] = total

    def observe(self, name: str, value: float, *labels: str, times: int = 1) -> None:
        """Add an observation to one of its histograms, or several of one value."""
        if len(labels) != len(self._histograms[name].labels):
            raise ValueError(f"metric {name} takes the labels {self._histograms[name].labels}, not {labels}")
        self._observed.append((name, labels, value, times))

    def gauge(self, name: str, read: Callable[[], float], *labels: str) -> None:
        """Say how one of its gauges is read."""
        if len(labels) != len(self._gauge_specs[name].labels):
            raise ValueError(f"metric {name} takes the labels {self._gauge_specs[name].labels}, not {labels}")
        self._gauges[name, labels] = read

    def total(self, name: str, *labels: str) -> float:
        """A counter since the beginning. Labels in the order of their declaration; those left out at the end are summed over."""
        with self._lock:
            totals: dict[Series, float] = dict(self._totals)
        totals |= {series: read() for series, read in self._kept.items()}
        return sum(value for (found, with_labels), value in totals.items() if found == name and with_labels[: len(labels)] == labels)

    def gauge_value(self, name: str, *labels: str) -> float:
        """A gauge as it is now; every label is given, in the order of its declaration."""
        return float(self._gauges[name, labels]())

    def take(self) -> MetricsDelta:
        """What is new since the last `take`."""
        with self._lock:
            counters, self._new = self._new, Counter()
            for series, read in self._kept.items():
                total = float(read())
                if new := total - self._told.get(series, 0.0):
                    counters[series] = new  # type: ignore[assignment]
                self._told[series] = total
        observed: defaultdict[Series, deque[float]] = defaultdict(lambda: deque(maxlen=_MAX_OBSERVATIONS))
        for _ in range(len(self._observed)):
            name, labels, value, times = self._observed.popleft()
            observed[name, labels].extend(repeat(max(0.0, value), times))
        observations = {series: list(values) for series, values in observed.items()}
        return MetricsDelta(counters, observations, {series: float(read()) for series, read in self._gauges.items()})
