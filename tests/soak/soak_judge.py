"""What follows from a soak: what has to be nothing is nothing, what has to be flat is flat, and it was a soak at all."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from soak_plan import Plan

__all__ = ["FLAT", "Finding", "Run", "Sample", "Slope", "judge", "slope_of"]

RESAMPLES = 500
BLOCKS = 16
"""The time that is judged is cut into so many blocks, each with its median: samples of one second depend on each other, blocks hardly."""

FLAT: Mapping[str, float] = {"memory_bytes": 8 << 20, "child_memory_bytes": 16 << 20, "descriptors": 8.0, "threads": 4.0}
"""How much each may surely grow over the time that is judged. Less is noise of an allocator, of connections and of calls that hang."""

REST_DESCRIPTORS = 16 + 8 + 24
"""Connections that a store keeps, those of a child, and those with a peer, both ways, by which it is asked and asks."""
REST_THREADS = 4


@dataclass(slots=True)
class Sample:
    """One second of the worker that lives as long as the soak."""

    t_s: float
    memory_bytes: int = 0
    anonymous_bytes: int = 0
    shared_bytes: int = 0
    descriptors: int = 0
    threads: int = 0
    children: int = 0
    child_memory_bytes: int = 0
    child_descriptors: int = 0
    open_jobs: int = 0
    oldest_job_s: float = 0.0
    oldest_wait_s: float = 0.0
    held_slots: float = 0.0
    stuck: int = 0
    wrong: int = 0
    verified_bytes: int = 0
    hits: dict[str, int] = field(default_factory=dict)
    corrupt: float = 0.0
    abandoned: float = 0.0
    kills: int = 0


@dataclass(slots=True)
class Run:
    """What was seen. `ends` has the last line of each worker that came to its end, `reports` the last report of every life of one."""

    plan: Plan
    samples: list[Sample] = field(default_factory=list)
    ready: dict[str, Any] = field(default_factory=dict)
    ends: list[dict[str, Any]] = field(default_factory=list)
    reports: list[dict[str, Any]] = field(default_factory=list)
    kills: int = 0
    child_kills: int = 0
    network_episodes: int = 0
    crashes: list[str] = field(default_factory=list)
    left_behind: list[str] = field(default_factory=list)
    scheduled: Counter[str] = field(default_factory=Counter)

    def total(self, count: str) -> int:
        return sum(report.get("counts", {}).get(count, 0) for report in self.reports)

    def judged(self) -> list[Sample]:
        """The samples after the warm-up."""
        return [sample for sample in self.samples if sample.t_s >= self.plan.seconds * self.plan.warm_up]


@dataclass(frozen=True, slots=True)
class Slope:
    """Growth over the time that is judged, and its 95 % interval."""

    growth: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was judged."""

    what: str
    good: bool
    text: str


def slope_of(times_s: Sequence[float], values: Sequence[float], seed: int = 0) -> Slope:
    """How much `values` grow over the whole of `times_s`.

    The median of the slopes between all pairs of blocks (Theil and Sen), which a peak does not move, and a bootstrap over the blocks.
    """
    if len(times_s) < 4:
        return Slope(0.0, 0.0, 0.0)
    count = min(BLOCKS, len(times_s) // 2)
    edges = [len(times_s) * number // count for number in range(count + 1)]
    blocks = [(statistics.fmean(times_s[start:end]), statistics.median(values[start:end])) for start, end in pairwise(edges)]
    whole_s = times_s[-1] - times_s[0]
    draw = random.Random(seed)
    drawn = sorted(_theil_sen([draw.choice(blocks) for _ in blocks]) for _ in range(RESAMPLES))
    low, high = drawn[int(RESAMPLES * 0.025)], drawn[int(RESAMPLES * 0.975)]
    return Slope(_theil_sen(blocks) * whole_s, low * whole_s, high * whole_s)


def _theil_sen(points: Sequence[tuple[float, float]]) -> float:
    slopes = [(y2 - y1) / (x2 - x1) for index, (x1, y1) in enumerate(points) for x2, y2 in points[:index] if x1 != x2]
    return statistics.median(slopes) if slopes else 0.0


def judge(run: Run) -> list[Finding]:
    """Everything that is judged, in the order in which it matters."""
    return [*_nothing(run), *_flat(run), *_ended(run), *_was_a_soak(run)]


def _nothing(run: Run) -> list[Finding]:
    told = [line for report in run.reports for line in report.get("told", ())]
    stuck = [line for report in run.reports for line in report.get("stuck", ())]
    most_stuck = max((sample.stuck for sample in run.samples), default=0)
    strange = sum(report.get("strange", 0) for report in run.reports)
    faults = sum(report.get("faults", 0) for report in run.reports)
    return [
        Finding("wrong bytes", not run.total("wrong"), "; ".join([f"{run.total('wrong')}", *told[:3]])),
        Finding("stuck jobs and requests", not (most_stuck or stuck), "; ".join([f"{max(most_stuck, len(stuck))}", *stuck[:3]])),
        Finding("jobs reported twice, or never submitted", not strange, f"{strange}"),
        Finding("errors of the SDK itself", not faults, f"{faults:g}"),
        Finding("workers that ended by themselves", not run.crashes, "; ".join(run.crashes) or "0"),
    ]


def _flat(run: Run) -> list[Finding]:
    judged = run.judged()
    findings = []
    for name, tolerance in FLAT.items():
        if name.startswith("child") and "isolated" not in run.plan.tiers:
            continue
        # A child that is being restarted has none; one that begins has little.
        seen = [(sample.t_s, float(getattr(sample, name))) for sample in judged if sample.children or not name.startswith("child")]
        slope = slope_of([t_s for t_s, _ in seen], [value for _, value in seen], run.plan.seed)
        unit = 1 << 20 if name.endswith("bytes") else 1
        text = (
            f"{slope.growth / unit:+.2f} [{slope.low / unit:+.2f}, {slope.high / unit:+.2f}]{' MiB' if unit > 1 else ''} "
            f"over the last {run.plan.seconds * (1 - run.plan.warm_up):.0f} s, at most {tolerance / unit:g}"
        )
        findings.append(Finding(f"growth of {name.removesuffix('_bytes').replace('_', ' ')}", slope.low <= tolerance, text))
    return findings


def _ended(run: Run) -> list[Finding]:
    expected = run.plan.workers
    rested = [end for end in run.ends if end["rested"]]
    why = "; ".join(end["why"] for end in run.ends if end["why"])
    left = [
        f"{end['descriptors_left']} descriptors, {len(end['threads_left'])} threads {', '.join(end['threads_left'][:5])}"
        for end in run.ends
        if end["descriptors_left"] > 0 or end["threads_left"]
    ]
    came = f"{len(rested)} of {expected}" + (f": {why}" if why else "")
    findings = [
        Finding("workers that came to rest and closed", len(rested) == expected, came),
        Finding("memory that stays touched", all(end["free"] for end in run.ends), f"{sum(not end['free'] for end in run.ends)}"),
        Finding("descriptors and threads left after close", not left, "; ".join(left) or "0"),
        Finding("processes left behind", not run.left_behind, "; ".join(run.left_behind) or "0"),
    ]
    if run.ends and run.ready:
        last, first = run.ends[0], run.ready
        more = last["descriptors_at_rest"] - first["descriptors"], last["threads_at_rest"] - first["threads"]
        findings.append(
            Finding(
                "more than before, once it is at rest",
                more[0] <= REST_DESCRIPTORS and more[1] <= REST_THREADS,
                f"{more[0]:+d} descriptors (at most {REST_DESCRIPTORS}), {more[1]:+d} threads (at most {REST_THREADS})",
            )
        )
    return findings


def _was_a_soak(run: Run) -> list[Finding]:
    """A run in which nothing was tried proves nothing."""
    fired: Counter[str] = Counter()
    for report in run.reports:
        fired.update(report.get("fired", {}))
    hit = [kind for kind in run.scheduled if fired[kind]]
    missed = sorted(kind for kind in run.scheduled if not fired[kind])
    # Some episodes are over before anything is asked: a breaker is open, or a worker was just killed. Of a run of seconds nearly all are.
    most_missed = len(run.scheduled) // 4 if run.plan.seconds >= 100 else len(run.scheduled) - 1
    hits = {source: run.total(f"hits {source}") for source in ("host", *run.plan.tiers)}
    seen_s = max((sample.t_s for sample in run.samples), default=0.0)
    return [
        Finding("hits, looked at byte by byte", all(hits.values()), ", ".join(f"{count} from {source}" for source, count in hits.items())),
        Finding("bytes looked at", run.total("verified_bytes") > 0, f"{run.total('verified_bytes') / 1e6:.0f} MB"),
        Finding(
            "kinds of faults that hit",
            bool(hit) and len(missed) <= most_missed,
            f"{len(hit)}" + (f", but not {', '.join(missed)}" if missed else ""),
        ),
        Finding("workers that were killed", run.plan.workers == 1 or run.kills > 0, f"{run.kills}"),
        # The last samples of a run of seconds may come too late on a busy machine.
        Finding("seconds that were watched", seen_s >= run.plan.seconds * 0.9 - 5, f"{seen_s:.0f} of {run.plan.seconds:.0f}"),
    ]
