"""Tier: the engine's side. Nothing here waits for a backend, except `drain`, `reset` and `close`, which are bounded."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence

from kvstore_sdk.backend import Backend, Capabilities, ConfigError, Deadline, SupportsRegions, SupportsSettle
from kvstore_sdk.format import padded_bytes, record_bytes
from kvstore_sdk.identity import KVIdentity, fresh_epoch
from kvstore_sdk.keys import GROUP_BYTES, MAX_HASH_BYTES
from kvstore_sdk.tier.breaker import Breaker
from kvstore_sdk.tier.calls import Calls
from kvstore_sdk.tier.jobs import Item, Job, Kind, Outcome
from kvstore_sdk.tier.lookups import LookupTable, Probe
from kvstore_sdk.tier.manifest import ensure_manifest
from kvstore_sdk.tier.metrics import TierMetrics
from kvstore_sdk.tier.pipeline import Answered, Lost, News, Pipeline
from kvstore_sdk.tier.settings import TierSettings
from kvstore_sdk.tier.types import EngineMemory, JobResult, Lookup, TierEvent
from kvstore_sdk.tier.work import Batch, WorkQueue

__all__ = ["Tier"]

logger = logging.getLogger(__name__)

_MANIFEST_TIMEOUT_S = 5.0
_MAX_GROUPS = 65_536
"""Far more than any model has; bounds what keys with made-up groups can make us remember."""
_MAX_EVENTS = 65_536
"""Events that nobody takes are dropped beyond this, oldest first."""


class Tier:
    """One Backend made non-blocking and safe for an engine that keeps its chunks in rows of its own host memory.

    Every method is for one engine thread at a time, whichever it is, and none raises for what a backend or a key does. Keys are the
    engine's: chain hash, then the group as 4 bytes, big-endian.

    - Each submitted job is returned by `poll` exactly once, not later than its deadline.
    - The engine's rows are touched only while their job is open, and never by the backend: records pass through staging memory of
      the Tier, are verified there, and then copied.
    - What is loaded was verified; what is not verified is a failed load.
    """

    def __init__(
        self,
        backend: Backend,
        memory: EngineMemory,
        *,
        identity: KVIdentity,
        settings: TierSettings | None = None,
        name: str = "kvstore",
        may_store: bool = True,
        events: bool = False,
    ) -> None:
        """Take over `backend`: `close` closes it.

        Args:
            backend: Open, and used by nobody else.
            memory: The engine's rows.
            identity: What their bytes mean; its namespace names every record.
            settings: How the backend is driven.
            name: For metrics, logs and threads.
            may_store: False: look up and load only; stores are skipped.
            events: Keep events for `take_events`.

        Raises:
            ConfigError: the backend and the settings do not fit the identity's chunks. Nothing was called or written.
        """
        settings = settings or TierSettings()
        capabilities = backend.capabilities
        where = f"tier {name}"
        slot_bytes = _slot_bytes(where, identity, capabilities)
        slots = settings.staging_bytes // slot_bytes
        if slots < 2:
            raise ConfigError(where, "staging_bytes", f"{settings.staging_bytes} does not hold two slots of {slot_bytes} bytes")
        if capabilities.in_doubt and not isinstance(backend, SupportsSettle):
            raise ConfigError(where, "backend", "declares in_doubt but has no settle method")
        self.name = name
        self.identity = identity
        self.metrics = TierMetrics()
        self._settings = settings
        self._backend = backend
        self._memory = memory
        self._wants_events = events
        self._may_store = may_store and not capabilities.read_only
        self._namespace = identity.namespace
        self._reads = Breaker(settings.breaker_failures, settings.breaker_probe_s)
        self._writes = Breaker(settings.breaker_failures, settings.breaker_probe_s)
        self._table = LookupTable(
            timeout_s=settings.lookup_timeout_s,
            ttl_s=settings.hit_ttl_s,
            max_keys=settings.max_known_keys,
            max_hits=settings.max_hits_per_request,
            breaker=self._reads,
        )
        self._threads_wanted = min(settings.io_threads, capabilities.max_concurrency)
        self._work = WorkQueue(
            slots=slots,
            slot_bytes=slot_bytes,
            threads=self._threads_wanted,
            batch=min(settings.batch_records, capabilities.max_batch),
            probe_batch=capabilities.max_batch,
            unfold=self._unfold,
        )
        self._calls = Calls(backend, self.metrics, name)
        self._news: deque[News] = deque()
        self._finished: deque[JobResult] = deque()
        self._events: deque[TierEvent] = deque(maxlen=_MAX_EVENTS)
        self._jobs: dict[int, Job] = {}
        self._deadlines: list[tuple[float, int, Job]] = []
        self._order = itertools.count()
        # The last job of each row. The row is in use while that job is among the open ones.
        self._row_user: dict[int, int] = {}
        self._largest_payload = max(group.payload_bytes for group in identity.groups)
        self._sizes: dict[bytes, int] = {}
        self._watch_at_s = 0.0
        self._manifest_lock = threading.Lock()
        self._manifests_seen: set[str] = set()
        self._closed = False
        self._pipeline = Pipeline(
            calls=self._calls,
            work=self._work,
            memory=memory,
            layout=identity.layout,
            settings=settings,
            metrics=self.metrics,
            reads=self._reads,
            writes=self._writes,
            tell=self._news.append,
            finish=self._finished.append,
            first_store=self._on_store,
        )
        self._declare_gauges()
        if isinstance(backend, SupportsRegions):
            try:
                backend.register_region(self._work.region)
            except BaseException:
                self._work.region.close()
                raise
        self._threads: list[threading.Thread] = []
        for _ in range(self._threads_wanted):
            self._add_thread()

    # Look-ups.

    def lookup(self, request_id: str, key: bytes) -> Lookup:
        """Say whether the backend has a chunk, from memory.

        PENDING becomes HIT or MISS within `lookup_timeout_s`: `flush` sends the question, `poll` or `flush` brings the answer.
        """
        return self._table.lookup(request_id, key)

    def flush(self) -> None:
        """Ask the backend what the look-ups since the last `flush` left open, one batch a request. To be called at the end of a step."""
        if self._news:
            self._hear()
        for probes in self._table.take_unsent():
            if self._closed:
                self._table.fail_waiting(probes)
            else:
                self._work.put_probes(self._namespace, probes)
        self._table.tick()
        self._count_lookups()
        self._watch(time.monotonic())

    def end_request(self, request_id: str) -> None:
        """The request is over: forget what it was told."""
        self._table.end_request(request_id)

    # Jobs.

    def submit_store(self, job_id: int, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        """Store the chunks `keys`, which lie in `rows`. What is over the bounds is shed, as failed."""
        job = Job(job_id, Kind.STORE, self._namespace, keys, rows)
        # A store may read a row that another one reads, but not one that a load writes.
        if not self._jobs.keys().isdisjoint(map(self._row_user.get, rows)):
            loading = {number for number, open_job in self._jobs.items() if open_job.kind is Kind.LOAD}
            job.refused = {place for place, row in enumerate(rows) if self._row_user.get(row) in loading}
        refuse = None
        if not self._may_store:
            refuse = Outcome.SKIPPED
        elif self._closed or not self._writes.allows() or self._is_full(len(keys)):
            refuse = Outcome.FAILED
        if refuse is not None:
            self.metrics.count("stores", "skipped" if refuse is Outcome.SKIPPED else "shed", by=len(keys))
        self._start(job, refuse, self._settings.store_timeout_s)

    def submit_load(self, job_id: int, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        """Load the chunks `keys` into `rows`. A row that an open job uses is refused, as failed."""
        job = Job(job_id, Kind.LOAD, self._namespace, keys, rows)
        if not self._jobs.keys().isdisjoint(map(self._row_user.get, rows)) or len(set(rows)) < len(rows):
            job.refused = {place for place, row in enumerate(rows) if self._row_user.get(row) in self._jobs or row in rows[:place]}
        refuse = None
        if self._closed or not self._reads.allows():
            refuse = Outcome.FAILED
            self.metrics.count("loads", "refused", by=len(keys))
            for key in keys:
                self._table.lost(key, bad=False)
        self._start(job, refuse, self._settings.load_timeout_s)

    def poll(self) -> list[JobResult]:
        """The jobs that ended since the last call; each job once. Jobs whose deadline has passed end here."""
        if not self._jobs and not self._news:
            return []
        now = time.monotonic()
        if now >= self._watch_at_s:
            self._watch(now)
        results = []
        while self._finished:
            result = self._finished.popleft()
            job = self._jobs.pop(result.job_id)
            if job.kind is Kind.LOAD:
                self.metrics.observe("load_seconds", result.elapsed_s)
            else:
                self.metrics.observe("store_seconds", result.elapsed_s)
                if job.namespace == self._namespace:
                    self._table.stored(result.done)
                    if self._wants_events and job.fresh:
                        self._events.append(TierEvent(tuple(job.fresh), removed=False))
            results.append(result)
        # After the results: whatever was told of their keys, it was told before they ended.
        if self._news:
            self._hear()
        return results

    @property
    def busy(self) -> bool:
        """Whether a job was submitted that `poll` has not returned yet. Each has a deadline, so this ends."""
        return bool(self._jobs)

    def take_events(self) -> list[TierEvent]:
        """What changed in the backend through this tier, or was found changed by it, since the last call."""
        if self._news:
            self._hear()
        events = list(self._events)
        self._events.clear()
        return events

    # The end of things.

    def drain(self) -> None:
        """Wait, at most `drain_timeout_s`, until all jobs have ended; those that have not are ended. `poll` then has every result.

        Afterwards nothing touches the engine's rows.
        """
        until_s = time.monotonic() + self._settings.drain_timeout_s
        while self._open_jobs() and time.monotonic() < until_s:
            self._watch(time.monotonic())
            if self._open_jobs():
                self._work.wait_changed(min(until_s, time.monotonic() + 0.01))
        self._end_jobs()

    def reset(self, weights_version: str = "") -> None:
        """The engine's cache was reset: nothing that was stored before is served again. Bounded as `drain` is.

        Args:
            weights_version: Names the weights that the engine uses from now on, so that engines with the same ones share again. Without
                it only this engine knows the new namespace.
        """
        self._give_up((), self._work.cancel())
        self.drain()
        self._table.clear()
        identity = self.identity
        if weights_version:
            self.identity = dataclasses.replace(identity, weights=weights_version, epoch="")
        else:
            self.identity = dataclasses.replace(identity, epoch=fresh_epoch())
        self._namespace = self.identity.namespace

    def close(self) -> None:
        """End all jobs, stop the threads and close the backend, in `close_timeout_s` at most. Idempotent.

        Memory that a running call may still touch is not given back: it stays mapped until the process ends.
        """
        if self._closed:
            return
        self._closed = True
        until_s = time.monotonic() + self._settings.close_timeout_s
        self._give_up((), self._work.cancel())
        quiet = self._work.wait_quiet(time.monotonic() + (until_s - time.monotonic()) * 0.5)
        self._end_jobs()
        while self._work.in_doubt and time.monotonic() < until_s - self._settings.close_timeout_s * 0.25:
            self._work.wait_changed(min(until_s, time.monotonic() + 0.05))
        self._work.stop()
        closer = threading.Thread(target=self._close_backend, name=f"{self.name}-close", daemon=True)
        closer.start()
        for thread in (closer, *self._threads):
            thread.join(max(0.01, until_s - time.monotonic()))
        stuck = [thread.name for thread in (closer, *self._threads) if thread.is_alive()]
        if stuck or not quiet or self._work.in_doubt:
            names = ", ".join(stuck) or "transfers in doubt"
            logger.warning("%s: closed while %s did not return; their memory stays mapped", self.name, names)
        else:
            self._work.region.close()

    # Inside.

    def _start(self, job: Job, refuse: Outcome | None, timeout_s: float) -> None:
        """Queue a job, or end it at once."""
        if len(job.keys) != len(job.rows):
            raise ValueError(f"{self.name}: job {job.job_id} has {len(job.keys)} keys and {len(job.rows)} rows")
        if job.job_id in self._jobs:
            logger.error("%s: job %d was submitted twice; the second one is ignored", self.name, job.job_id)
            return
        self._jobs[job.job_id] = job
        if refuse is not None or not job.keys:
            self._end(job, refuse or Outcome.DONE)
            return
        self._row_user.update(dict.fromkeys(job.rows, job.job_id))
        job.deadline_s = job.submitted_s + timeout_s + len(job.keys) * self._largest_payload / self._settings.min_bytes_per_s
        heapq.heappush(self._deadlines, (job.deadline_s, next(self._order), job))
        self._watch_at_s = min(self._watch_at_s, job.deadline_s)
        self._work.put_job(job)

    def _is_full(self, chunks: int) -> bool:
        """Whether the stores that wait leave no room. A chunk that no thread has looked at yet counts as one of the largest group."""
        unknown = self._work.folded_store_chunks + chunks
        return self._work.queued_store_bytes + unknown * self._largest_payload > self._settings.max_queued_store_bytes

    def _unfold(self, job: Job, queued_store_bytes: int) -> list[Item]:
        """On one of our threads: the items of a job that a backend is needed for; the others end here."""
        try:
            return self._items(job, queued_store_bytes) if job.open else []
        except Exception:
            # The engine's memory does not know its own groups. Not a reason to lose a thread, or the job.
            logger.exception("%s: job %d cannot be taken apart", self.name, job.job_id)
            self._end(job, Outcome.FAILED)
            return []

    def _items(self, job: Job, queued_store_bytes: int) -> list[Item]:
        items: list[Item] = []
        ended: Counter[str] = Counter()
        table, stores = self._table, job.kind is Kind.STORE
        room = self._settings.max_queued_store_bytes - queued_store_bytes
        for place, key in enumerate(job.keys):
            size = self._payload_bytes(key)
            if not size or place in job.refused:
                ended["refused"] += 1
                if not stores:
                    self._news.append(Lost(job.namespace, key, bad=False, gone=False))
                outcome = Outcome.FAILED
            elif not stores:
                items.append(Item(job, place, size))
                continue
            elif table.is_present(key):
                ended["exists"] += 1
                outcome = Outcome.DONE
            elif size > room:
                ended["shed"] += 1
                outcome = Outcome.FAILED
            else:
                room -= size
                items.append(Item(job, place, size, replace=table.is_bad(key)))
                continue
            if (result := job.settle(place, outcome)) is not None:
                self._finished.append(result)
        for result_name, number in ended.items():
            self.metrics.count("stores" if stores else "loads", result_name, by=number)
        return items

    def _payload_bytes(self, key: bytes) -> int:
        """Length of the chunk of this key; 0 when there can be none."""
        if not GROUP_BYTES < len(key) <= GROUP_BYTES + MAX_HASH_BYTES:
            return 0
        size = self._sizes.get(key[-GROUP_BYTES:])
        return self._learn_size(key[-GROUP_BYTES:]) if size is None else size

    def _learn_size(self, group: bytes) -> int:
        if len(self._sizes) >= _MAX_GROUPS:
            return 0
        size = self._memory.payload_bytes(int.from_bytes(group, "big"))
        self._sizes[group] = 0 if size is None or record_bytes(size) > self._work.slot_bytes else size
        return self._sizes[group]

    def _hear(self) -> None:
        """Take in what the threads found out, in order."""
        while self._news:
            said = self._news.popleft()
            if isinstance(said, Answered):
                self._table.answer(said.probe, said.present)
            elif said.namespace == self._namespace:
                self._table.lost(said.key, bad=said.bad)
                if self._wants_events and said.gone:
                    self._events.append(TierEvent((said.key,), removed=True))

    def _count_lookups(self) -> None:
        table = self._table
        if table.hits:
            self.metrics.count("lookups", "hit", by=table.hits)
        if table.misses:
            self.metrics.count("lookups", "miss", by=table.misses)
        if table.timeouts:
            self.metrics.count("lookup_timeouts", by=table.timeouts)
        table.hits = table.misses = table.timeouts = 0

    def _watch(self, now: float) -> None:
        """End jobs whose deadline has passed, and find calls that are late."""
        if now < self._watch_at_s:
            return
        while self._deadlines and (self._deadlines[0][0] <= now or not self._deadlines[0][2].open):
            self._expire(heapq.heappop(self._deadlines)[2])
        for batch in self._work.late(now):
            self._found_late(batch)
        held = self._work.quarantined_bytes
        if held > self._settings.max_quarantined_bytes:
            for side, breaker in (("read", self._reads), ("write", self._writes)):
                if breaker.hold(self._settings.breaker_probe_s):
                    self.metrics.count("breaker_opened", side)
                    logger.warning("%s: %s breaker opened: calls that outlived their deadline hold %d bytes", self.name, side, held)
        next_s = min(self._deadlines[0][0] if self._deadlines else now + 1.0, self._work.next_deadline_s(), now + 1.0)
        # Not sooner than a millisecond: a call that has no deadline yet gets one while we look away.
        self._watch_at_s = max(next_s, now + 0.001)

    def _found_late(self, batch: Batch) -> None:
        self.metrics.count("abandoned_calls", batch.operation)
        breaker, side = (self._writes, "write") if batch.operation == "put" else (self._reads, "read")
        if batch.operation != "settle" and breaker.failed():
            self.metrics.count("breaker_opened", side)
            logger.warning("%s: %s breaker opened: calls outlive their deadlines", self.name, side)
        for probe in batch.probes:
            self._table.answer(probe, None)
        # Its thread may never come back. Another takes its place as long as the backend allows one more call.
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        limit = self._calls.capabilities.max_concurrency
        if len(self._threads) < min(limit, self._threads_wanted + self._work.abandoned):
            self._add_thread()

    def _expire(self, job: Job) -> None:
        """The job's time is over: what has not ended has failed."""
        rest = self._end(job, Outcome.FAILED)
        if not rest:
            return
        self.metrics.count("loads" if job.kind is Kind.LOAD else "stores", "timeout", by=len(rest))
        if job.kind is Kind.LOAD and job.namespace == self._namespace:
            for key in rest:
                self._table.lost(key, bad=False)
        self._work.forget(job)

    def _end(self, job: Job, outcome: Outcome) -> list[bytes]:
        """Close a job as it is. Returns the keys that had not ended."""
        ended = job.settle_rest(outcome)
        if ended is None:
            return []
        self._finished.append(ended[0])
        return ended[1]

    def _end_jobs(self) -> None:
        for job in list(self._jobs.values()):
            self._expire(job)

    def _open_jobs(self) -> bool:
        return any(job.open for job in self._jobs.values())

    def _on_store(self, namespace: str, slot: int) -> None:
        """On one of our threads: the first record of a namespace brings its manifest."""
        with self._manifest_lock:
            if namespace in self._manifests_seen:
                return
            self._manifests_seen.add(namespace)
        identity = self.identity
        if identity.namespace != namespace:
            return
        manifest = identity.manifest()
        result = "failed"
        if len(manifest) <= self._work.slot_bytes:
            buffer = self._work.buffer(slot, len(manifest))
            result = ensure_manifest(self._calls, namespace, manifest, buffer, Deadline.after(_MANIFEST_TIMEOUT_S))
        self.metrics.count("manifests", result)

    def _declare_gauges(self) -> None:
        gauge = self.metrics.gauge
        gauge("breaker_open", lambda: self._reads.is_open, "read")
        gauge("breaker_open", lambda: self._writes.is_open, "write")
        gauge("queued_store_bytes", lambda: self._work.queued_store_bytes)
        gauge("quarantined_bytes", lambda: self._work.quarantined_bytes)
        gauge("known_keys", lambda: len(self._table))
        gauge("open_jobs", lambda: len(self._jobs))

    # Threads.

    def _add_thread(self) -> None:
        thread = threading.Thread(target=self._run, name=f"{self.name}-io-{next(self._order)}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self) -> None:
        while (batch := self._work.next()) is not None:
            try:
                self._pipeline.run(batch)
            except Exception:
                # Not the backend's doing, that is caught below us: the engine's memory, or a fault of ours. The items must still end.
                logger.exception("%s: a %s batch failed in the SDK", self.name, batch.operation)
                self._give_up(batch.probes, batch.items)

    def _give_up(self, probes: Iterable[Probe], items: Iterable[Item]) -> None:
        for probe in probes:
            self._news.append(Answered(probe, None))
        for item in items:
            self._pipeline.settle(item, Outcome.FAILED)

    def _close_backend(self) -> None:
        try:
            if isinstance(self._backend, SupportsRegions) and not self._work.quarantined_bytes:
                self._backend.unregister_region(self._work.region)
            self._backend.close()
        except Exception:
            logger.exception("%s: closing the backend failed", self.name)


def _slot_bytes(where: str, identity: KVIdentity, capabilities: Capabilities) -> int:
    """Length of a staging slot: the largest record of any group, and the manifest goes through it too."""
    largest = max(record_bytes(group.payload_bytes) for group in identity.groups)
    if largest > capabilities.max_record_bytes:
        problem = f"the backend takes records of {capabilities.max_record_bytes} bytes, this model's chunks need {largest}"
        raise ConfigError(where, "max_record_bytes", problem)
    # A page to spare: a reset makes the identity, and so the manifest, some bytes longer.
    return max(largest, padded_bytes(len(identity.manifest())) + 4096)
