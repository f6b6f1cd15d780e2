"""What a soak does, as numbers: the same plan and seed, the same script of faults and kills."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass

from kvstore_sdk.testing import BREACHES, KINDS, Schedule

__all__ = ["SIZES", "STORE_SETTINGS", "TIER_SETTINGS", "Plan", "schedule_of"]

SIZES = (6000, 40_000)
"""Payload of each group: two sizes of slots, none a multiple of a page."""

TIER_SETTINGS = {
    "io_threads": 4,
    "batch_records": 8,
    "lookup_timeout_s": 1.0,
    "load_timeout_s": 2.0,
    "store_timeout_s": 3.0,
    "max_store_wait_s": 2.0,
    "drain_timeout_s": 2.0,
    "close_timeout_s": 5.0,
    "hit_ttl_s": 5.0,
    "retry_base_s": 0.01,
    "breaker_probe_s": 0.2,
    "staging_bytes": 8 << 20,
    "max_quarantined_bytes": 4 << 20,
}
"""Short, so that whatever takes time comes often: hundreds of late calls instead of a few."""

STORE_SETTINGS = {"lookup_timeout_s": 2.0, "hold_timeout_s": 5.0, "drain_timeout_s": 20.0, "close_timeout_s": 4.0}

HANG_S = 4.0
"""Longer than any time-out of a job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One soak.

    Attributes:
        seconds: Of traffic under faults. What comes before and after takes some seconds more.
        seed: Of everything that is drawn.
        out: Folder for what it says and what its processes need.
        tiers: Which, in the order in which they are asked: `p2p`, `isolated`, `fs`, `s3`.
        workers: Processes that share the stores. The first lives as long as the soak; the others are killed again and again.
        documents: Prefixes that requests begin with; with `chunks` of them each.
        host_bytes: Of each worker's host memory.
        fs_bytes: Bound of each folder.
        requests: That a worker has at a time.
        warm_up: Part of the time that is not judged: memory fills, pools grow.
        stuck_s: A job, a look-up, or a store that waits for room, is stuck after this. All of them have time-outs of some seconds.
        rest_s: How long a worker may take to come to rest when the faults are over.
        plant: What is put in that the judge has to find: `wrong-byte`, `leak`, `descriptors`, `threads`, `stuck-job`, `lost-request`.
    """

    seconds: float
    seed: int
    out: str
    tiers: tuple[str, ...] = ("p2p", "isolated", "fs", "s3")
    workers: int = 2
    documents: int = 60
    chunks: int = 12
    host_bytes: int = 6 << 20
    fs_bytes: int = 12 << 20
    requests: int = 8
    warm_up: float = 0.25
    stuck_s: float = 20.0
    rest_s: float = 30.0
    plant: str = ""

    def __post_init__(self) -> None:
        if unknown := set(self.tiers) - {"p2p", "isolated", "fs", "s3"}:
            raise ValueError(f"soak: tiers: {unknown.pop()!r} is none; choose from p2p, isolated, fs, s3")
        if self.seconds <= 0 or self.workers < 1:
            raise ValueError(f"soak: seconds {self.seconds} and workers {self.workers} must be positive")

    @property
    def sample_s(self) -> float:
        """Time between two samples: enough of them in a run of seconds too."""
        return min(1.0, self.seconds / 60)

    def folder(self, tier: str) -> str:
        return os.path.join(self.out, "stores", tier)

    def text(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def parse(cls, text: str) -> Plan:
        fields = json.loads(text)
        return cls(**fields | {"tiers": tuple(fields["tiers"])})


def schedule_of(plan: Plan, tier: str, life: int, seconds: float) -> Schedule:
    """The faults of a tier of a worker. `life` tells workers and their restarts apart.

    The memory of records is lent to the stores, so nothing that uses it after the call is among them; what is late there and keeps to the
    contract (hangs beyond the deadline, transfers in doubt) is. And where a store may be in doubt there is no nonsense: it could mean that
    a transfer goes on, so its memory is never used again, rightly, or its child is killed. A tier of which most records are wrong is left
    alone for a minute, so most are right.
    """
    kinds = [kind for kind in KINDS if kind not in BREACHES and kind != ("in_doubt" if tier == "s3" else "nonsense")]
    # A run of seconds has few calls to hit.
    episode_s, probabilities = ((0.5, 2.5), (0.05, 0.1, 0.3)) if plan.seconds > 30 else ((0.2, 0.6), (0.3, 0.6))
    seed = hash_of(plan.seed, tier, life)
    return Schedule(max(seconds, 0.1), seed=seed, kinds=kinds, hang_s=HANG_S, episode_s=episode_s, calm=0.4, probabilities=probabilities)


def hash_of(*parts: object) -> int:
    """A seed made of several things; the same in every process."""
    return int.from_bytes("/".join(map(str, parts)).encode(), "big") % (1 << 61)
