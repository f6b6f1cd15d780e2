"""The queues between the engine's thread and the Tier's own, and the staging slots that bound them."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore_sdk.backend import Buffer, Region, Ticket
from kvstore_sdk.tier.jobs import Item, Job, Kind
from kvstore_sdk.tier.lookups import Probe

__all__ = ["Batch", "Doubt", "WorkQueue"]

_SETTLE_EVERY_S = 0.1
_GRACE_S = 0.1
"""A call that stops at its deadline returns a little after it; only later is it late."""


@dataclass(slots=True)
class Doubt:
    """A slot whose last operation the backend calls in doubt."""

    ticket: Ticket
    slot: int


@dataclass(slots=True)
class Batch:
    """What one thread does next: one backend call's worth of probes, of items of one kind, or of tickets to settle.

    `slots` are the staging slots of the items, one each. `deadline_s` is when the call becomes late, set by who makes it.
    """

    probes: Sequence[Probe] = ()
    items: Sequence[Item] = ()
    doubts: Sequence[Doubt] = ()
    slots: Sequence[int] = ()
    kind: Kind | None = None
    operation: str = ""
    deadline_s: float = 0.0
    abandoned: bool = False
    namespace: str = ""
    started_s: float = field(default_factory=time.monotonic)


class WorkQueue:
    """Probes before loads before stores, bounded; hands out batches together with the staging slots they need.

    Stores never take all: a share of threads and of slots is left to probes and loads, so that writing cannot hold up a request. A slot
    belongs to one item until `finish`; when the call of a batch is late its slots stay with it (quarantine) until it returns, and slots in
    doubt until the backend has settled them.
    """

    def __init__(
        self, *, slots: int, slot_bytes: int, threads: int, batch: int, probe_batch: int, unfold: Callable[[Job, int], list[Item]]
    ) -> None:
        """Args:
        slots: Staging slots.
        slot_bytes: Length of a slot.
        threads: How many threads call `next`.
        batch: Most items in a batch.
        probe_batch: Most probes in a batch.
        unfold: Makes a job's items, called on a thread that takes work, given the job and the bytes of the stores that wait.
        """
        self.region = Region(slots * slot_bytes, "kvstore-staging")
        self.slot_bytes = slot_bytes
        self._batch = batch
        self._probe_batch = probe_batch
        self._threads = threads
        # A quarter of the threads, and at least one where there are two, is never busy with stores; likewise a quarter of the slots.
        self._store_threads = max(1, threads - max(1, threads // 4)) if threads > 1 else 1
        self._store_slots = max(1, slots - max(1, slots // 4))
        self._free = list(range(slots - 1, -1, -1))
        self._cv = threading.Condition()
        self._probes: deque[tuple[str, list[Probe]]] = deque()
        self._unfold = unfold
        self._jobs: deque[Job] = deque()
        self._queues: dict[Kind, deque[Item]] = {Kind.LOAD: deque(), Kind.STORE: deque()}
        self._later: list[tuple[float, int, Item]] = []
        self._order = itertools.count()
        self._doubts: list[Doubt] = []
        self._settling = False
        self._settle_at_s = 0.0
        self._stores_running = 0
        self._stores_slots = 0
        self._running: set[int] = set()
        self._batches: dict[int, Batch] = {}
        self._stopped = False
        self.queued_store_bytes = 0
        self.folded_store_chunks = 0
        """Chunks of store jobs that no thread has looked at yet."""

    def buffer(self, slot: int, length: int) -> Buffer:
        return self.region.buffer(slot * self.slot_bytes, length)

    # The engine's side.

    def put_probes(self, namespace: str, probes: list[Probe]) -> None:
        with self._cv:
            self._probes.append((namespace, probes))
            self._cv.notify()

    def put_job(self, job: Job) -> None:
        """Queue a job as a whole: what it takes to unfold it is not paid by the engine's thread."""
        with self._cv:
            self._jobs.append(job)
            if job.kind is Kind.STORE:
                self.folded_store_chunks += len(job.keys)
            self._cv.notify()

    def cancel(self) -> list[Item]:
        """Drop what has not begun, probes too. Returns the items, which the caller has to settle."""
        with self._cv:
            self._probes.clear()
            self._unfold_jobs()
            dropped = [item for queue in self._queues.values() for item in queue] + [item for _, _, item in self._later]
            for queue in self._queues.values():
                queue.clear()
            self._later.clear()
            self.queued_store_bytes = 0
            return dropped

    def forget(self, job: Job) -> None:
        """Drop what has not begun of a job that was closed, so that a queue which nobody serves does not grow."""
        with self._cv:
            if job in self._jobs:
                self._jobs.remove(job)
                if job.kind is Kind.STORE:
                    self.folded_store_chunks -= len(job.keys)
            queue = self._queues[job.kind]
            kept = [item for item in queue if item.job is not job]
            if job.kind is Kind.STORE:
                self.queued_store_bytes -= sum(item.payload_bytes for item in queue if item.job is job)
            queue.clear()
            queue.extend(kept)

    def stop(self) -> None:
        """`next` returns None from now on."""
        with self._cv:
            self._stopped = True
            self._cv.notify_all()

    def wait_quiet(self, until_s: float) -> bool:
        """Wait until no call is running, not later than `until_s`. Returns whether that is so."""
        with self._cv:
            return self._cv.wait_for(lambda: not self._batches, max(0.0, until_s - time.monotonic()))

    def wait_changed(self, until_s: float) -> None:
        """Wait until a batch ends, not later than `until_s`."""
        with self._cv:
            self._cv.wait(max(0.0, until_s - time.monotonic()))

    def late(self, now: float) -> list[Batch]:
        """Running calls that have just been found to be late; each is returned once."""
        with self._cv:
            running = (batch for batch in self._batches.values() if not batch.abandoned and batch.deadline_s)
            late = [batch for batch in running if now > batch.deadline_s + _GRACE_S]
            for batch in late:
                batch.abandoned = True
            return late

    def next_deadline_s(self) -> float:
        """When the next running call becomes late; infinity when none runs."""
        with self._cv:
            running = (batch.deadline_s for batch in self._batches.values() if not batch.abandoned and batch.deadline_s)
            return min(running, default=float("inf")) + _GRACE_S

    @property
    def quarantined_bytes(self) -> int:
        """Slots of late calls, and slots in doubt."""
        with self._cv:
            held = sum(len(batch.slots) for batch in self._batches.values() if batch.abandoned) + len(self._doubts)
        return held * self.slot_bytes

    @property
    def in_doubt(self) -> bool:
        with self._cv:
            return bool(self._doubts) or self._settling

    @property
    def abandoned(self) -> int:
        """Calls that are late and still running."""
        with self._cv:
            return sum(batch.abandoned for batch in self._batches.values())

    # The threads' side.

    def next(self) -> Batch | None:
        """Wait for work. None when the queue is stopped."""
        with self._cv:
            while not self._stopped:
                now = time.monotonic()
                self._unfold_jobs()
                self._due(now)
                batch = self._pick(now)
                if batch is not None:
                    self._batches[id(batch)] = batch
                    return batch
                self._cv.wait(self._sleep_s(now))
            return None

    def again(self, item: Item, not_before_s: float) -> None:
        """Queue an item once more, not before an instant."""
        with self._cv:
            heapq.heappush(self._later, (not_before_s, next(self._order), item))
            if item.job.kind is Kind.STORE:
                self.queued_store_bytes += item.payload_bytes
            self._cv.notify()

    def finish(self, batch: Batch, doubts: Sequence[Doubt] = (), settled: Sequence[Doubt] = ()) -> None:
        """The call of a batch is over: free its slots, except those in doubt."""
        with self._cv:
            self._batches.pop(id(batch), None)
            if batch.kind is Kind.STORE:
                self._stores_running -= 1
                self._stores_slots -= len(batch.slots)
            held = {doubt.slot for doubt in doubts}
            self._free.extend(slot for slot in batch.slots if slot not in held)
            self._doubts.extend(doubts)
            if batch.doubts:
                self._settling = False
                over = {doubt.slot for doubt in settled}
                self._free.extend(over)
                self._doubts.extend(doubt for doubt in batch.doubts if doubt.slot not in over)
                self._settle_at_s = time.monotonic() + _SETTLE_EVERY_S
            self._cv.notify_all()

    def _unfold_jobs(self) -> None:
        while self._jobs:
            job = self._jobs.popleft()
            if job.kind is Kind.STORE:
                self.folded_store_chunks -= len(job.keys)
            items = self._unfold(job, self.queued_store_bytes)
            self._queues[job.kind].extend(items)
            if job.kind is Kind.STORE:
                self.queued_store_bytes += sum(item.payload_bytes for item in items)
            # Whoever unfolds takes one part; the others are woken for the rest.
            self._cv.notify(min(len(items), self._threads) - 1 if items else 0)

    def _due(self, now: float) -> None:
        while self._later and self._later[0][0] <= now:
            item = heapq.heappop(self._later)[2]
            self._queues[item.job.kind].append(item)

    def _pick(self, now: float) -> Batch | None:
        if self._probes:
            namespace, probes = self._probes.popleft()
            if len(probes) > self._probe_batch:
                self._probes.appendleft((namespace, probes[self._probe_batch :]))
                self._cv.notify()
            return Batch(probes=probes[: self._probe_batch], operation="exists", namespace=namespace)
        if self._doubts and not self._settling and now >= self._settle_at_s:
            self._settling = True
            doubts, self._doubts = self._doubts, []
            return Batch(doubts=doubts, operation="settle")
        if batch := self._take(Kind.LOAD, len(self._free)):
            return batch
        if self._stores_running < self._store_threads:
            return self._take(Kind.STORE, min(len(self._free), self._store_slots - self._stores_slots))
        return None

    def _take(self, kind: Kind, slots: int) -> Batch | None:
        queue = self._queues[kind]
        if slots < 1 or not queue:
            return None
        # Enough for every thread to have a part, so that a job of a few records is not done by one thread alone.
        threads = self._store_threads if kind is Kind.STORE else self._threads
        limit = min(self._batch, slots, -(-len(queue) // threads))
        items: list[Item] = []
        keys: set[bytes] = set()
        aside: list[Item] = []
        namespace = ""
        while queue and len(items) < limit:
            item = queue.popleft()
            if kind is Kind.STORE:
                self.queued_store_bytes -= item.payload_bytes
            if not item.job.open:
                continue
            # No two items of one name in a call, and no two namespaces.
            if item.key in keys or (namespace and item.job.namespace != namespace):
                aside.append(item)
                continue
            namespace = item.job.namespace
            keys.add(item.key)
            items.append(item)
        for item in reversed(aside):
            queue.appendleft(item)
            if kind is Kind.STORE:
                self.queued_store_bytes += item.payload_bytes
        if not items:
            return None
        taken = [self._free.pop() for _ in items]
        if kind is Kind.STORE:
            self._stores_running += 1
            self._stores_slots += len(taken)
        return Batch(items=items, slots=taken, kind=kind, operation="get" if kind is Kind.LOAD else "put", namespace=namespace)

    def _sleep_s(self, now: float) -> float | None:
        wakes = [self._later[0][0]] if self._later else []
        if self._doubts and not self._settling:
            wakes.append(self._settle_at_s)
        return max(0.0, min(wakes) - now) if wakes else None
