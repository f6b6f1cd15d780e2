"""The store of a worker: host memory over tiers that go wrong by the schedule."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from soak_plan import SIZES, STORE_SETTINGS, TIER_SETTINGS, Plan, schedule_of

from kvstore_sdk.backend import Backend, Region
from kvstore_sdk.format import HEADER_BYTES
from kvstore_sdk.host import HostTier, Slot
from kvstore_sdk.identity import GroupIdentity, KVIdentity
from kvstore_sdk.store import StoreSettings, StoreTier, TieredStore
from kvstore_sdk.testing import FaultyBackend, Schedule
from kvstore_sdk.tier import JobResult, Tier, TierSettings
from kvstore_sdk_backends.fs import open_fs

__all__ = ["SoakStore", "WatchedTier", "identity", "open_faulty_fs"]


S3_CONNECTIONS = 16


def identity(weights: str) -> KVIdentity:
    groups = tuple(
        GroupIdentity(kind="full", layers=(f"layers.{group}",), payload_bytes=size, heads=1, head_size=1)
        for group, size in enumerate(SIZES)
    )
    return KVIdentity(
        model="soak",
        weights=weights,
        model_config="c0",
        kv_dtype="float16",
        layout="soak-layout",
        layout_version=1,
        block_tokens=16,
        hash_tokens=16,
        blocks_per_chunk=1,
        groups=groups,
        hash_algorithm="sha256",
    )


def open_faulty_fs(location: str, *, plan: str, tier: str, life: int, until_s: float) -> FaultyBackend:
    """A bounded folder that goes wrong until `until_s` of the monotonic clock: the factory that an isolated tier names."""
    return _faulty_fs(location, Plan.parse(plan), tier, life, until_s)[0]


def _faulty_fs(location: str, plan: Plan, tier: str, life: int, until_s: float) -> tuple[FaultyBackend, Schedule]:
    script = schedule_of(plan, tier, life, until_s - time.monotonic())
    return FaultyBackend(open_fs(location, max_bytes=plan.fs_bytes), script, seed=plan.seed, max_events=100), script


def _open_s3(**place: Any) -> Backend:
    from kvstore_sdk_backends.s3 import open_s3

    return open_s3(engine="s3fs", addressing="path", concurrency=S3_CONNECTIONS, read_timeout_s=2.0, **place)


def _open_p2p(**place: Any) -> Backend:
    """A node that serves this worker's host memory to the others, and asks them. Leases are short, for what is lent is no rest."""
    from kvstore_sdk_backends.p2p import open_p2p

    return open_p2p(data="zmq", lease_s=2.0, answer_timeout_s=0.5, **place)


class WatchedTier(Tier):
    """Knows how long its jobs take, by what it was asked and what it returned.

    Attributes:
        strange: Results of jobs that were not open: reported twice, or never submitted.
    """

    strange = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        self._submitted: dict[int, float] = {}
        super().__init__(*args, **options)

    def submit_store(self, job_id: int, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        self._submitted[job_id] = time.monotonic()
        super().submit_store(job_id, keys, rows)

    def submit_load(self, job_id: int, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        self._submitted[job_id] = time.monotonic()
        super().submit_load(job_id, keys, rows)

    def poll(self) -> list[JobResult]:
        results = super().poll()
        for result in results:
            if self._submitted.pop(result.job_id, None) is None:
                self.strange += 1
        return results

    @property
    def job_ages_s(self) -> list[float]:
        """Of the jobs that were not reported yet."""
        now_s = time.monotonic()
        return [now_s - since_s for since_s in self._submitted.values()]


class SoakStore:
    """Opens everything, and closes it.

    Attributes:
        store: What an engine drives.
        tiers: By name.
    """

    def __init__(self, plan: Plan, life: int, until_s: float, places: dict[str, dict[str, Any]]) -> None:
        """`life` tells workers and their restarts apart; faults end at `until_s` of the monotonic clock; `places` are for `open_s3` and
        `open_p2p`."""
        self._plan = plan
        self._schedules: list[tuple[FaultyBackend, Schedule]] = []
        made = identity("w0")
        self.backends: dict[str, Backend] = {}
        try:
            for tier in plan.tiers:
                self.backends[tier] = self._open(tier, life, until_s, places)
        except BaseException:
            for backend in self.backends.values():
                backend.close()
            raise
        self.region = Region(plan.host_bytes, "kvstore-soak")
        self.host = HostTier(self.region, dict(enumerate(SIZES)))
        self.tiers = {
            name: WatchedTier(backend, self.host, identity=made, settings=TierSettings(**TIER_SETTINGS), name=name, events=True)
            for name, backend in self.backends.items()
        }
        below = [StoreTier(name, tier) for name, tier in self.tiers.items()]
        self.store = TieredStore(self.host, below, identity=made, settings=StoreSettings(**STORE_SETTINGS), name="soak", events=True)

    def _open(self, tier: str, life: int, until_s: float, places: dict[str, dict[str, Any]]) -> Backend:
        if tier == "isolated":
            return self._open_isolated(life, until_s)
        if tier == "fs":
            faulty, script = _faulty_fs(self._plan.folder(tier), self._plan, tier, life, until_s)
        else:
            script = schedule_of(self._plan, tier, life, until_s - time.monotonic())
            backend = _open_s3(**places[tier]) if tier == "s3" else _open_p2p(**places[tier])
            faulty = FaultyBackend(backend, script, seed=self._plan.seed, max_events=100)
        self._schedules.append((faulty, script))
        return faulty

    def _open_isolated(self, life: int, until_s: float) -> Backend:
        from kvstore_sdk.isolation import IsolationLimits, open_isolated

        options = {"plan": self._plan.text(), "tier": "isolated", "life": life, "until_s": until_s}
        limits = IsolationLimits(restarts=1000, hang_kill_s=3.0)
        return open_isolated("soak_store:open_faulty_fs", options, location=self._plan.folder("isolated"), limits=limits)

    def payload(self, slot: Slot) -> memoryview:
        return self.region.view[slot.offset + HEADER_BYTES : slot.offset + HEADER_BYTES + slot.payload_bytes]

    def heal(self) -> None:
        for faulty, _ in self._schedules:
            faulty.heal()

    def fired(self) -> Counter[str]:
        """How many calls each kind of fault hit, in this process."""
        counts: Counter[str] = Counter()
        for faulty, script in self._schedules:
            kinds = {episode.begins_s: episode.kind for episode in script.episodes}
            for fault in script:
                if fault.begins_s in kinds:
                    counts[kinds[fault.begins_s]] += faulty.fired(fault)
        return counts

    def is_at_rest(self) -> bool:
        """Whether nothing is pinned, filling, in quarantine, or held by a late call."""
        groups = self.host.stats().groups.values()
        used = any(group.pinned or group.filling or group.quarantined for group in groups)
        return not used and not self.store.metrics.gauge_value("held_slots")
