"""Tier: the engine's side. Nothing here waits for a backend, except `drain`, `reset` and `close`, which are bounded."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import logging
import threading
import time
from collections import deque
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
from kvstore_sdk.tier.pipeline import Answered, Lost, News, Pipeline, Settled, Stored
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
    ) -> None:
        """Take over `backend`: `close` closes it.

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
        self._may_store = may_store and not capabilities.read_only
        self._namespace = identity.namespace
        self._table = LookupTable(
            timeout_s=settings.lookup_timeout_s,
            ttl_s=settings.hit_ttl_s,
            max_keys=settings.max_known_keys,
            max_hits=settings.max_hits_per_request,
        )
        self._reads = Breaker(settings.breaker_failures, settings.breaker_probe_s)
        self._writes = Breaker(settings.breaker_failures, settings.breaker_probe_s)
        self._threads_wanted = min(settings.io_threads, capabilities.max_concurrency)
        self._work = WorkQueue(
            slots=slots,
            slot_bytes=slot_bytes,
            threads=self._threads_wanted,
            batch=min(settings.batch_records, capabilities.max_batch),
            probe_batch=capabilities.max_batch,
        )
        self._calls = Calls(backend, self.metrics, name)
        self._news: deque[News] = deque()
        self._finished: deque[JobResult] = deque()
        self._events: deque[TierEvent] = deque(maxlen=_MAX_EVENTS)
        self._jobs: dict[int, Job] = {}
        self._deadlines: list[tuple[float, int, Job]] = []
        self._order = itertools.count()
        self._rows_in_use: dict[int, int] = {}
        self._sizes: dict[bytes, int | None] = {}
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
        """Say whether the backend has a chunk, from memory. PENDING becomes HIT or MISS within `lookup_timeout_s`, if `flush` is called."""
        if self._news:
            self._hear()
        if self._reads.is_open:
            if not self._reads.allows():
                return Lookup.MISS
            # This look-up is the trial: it has to reach the backend, whatever is remembered.
            self._table.distrust(key)
        return self._table.lookup(request_id, key)

    def flush(self) -> None:
        """Ask the backend what the look-ups since the last `flush` left open, one batch a request. To be called at the end of a step."""
        for probes in self._table.take_unsent():
            if self._closed:
                self._table.fail_waiting(probes)
            else:
                self._work.put_probes(self._namespace, probes)
        self._count_lookups()
        self._watch(time.monotonic())

    def end_request(self, request_id: str) -> None:
        """The request is over: forget what it was told."""
        self._table.end_request(request_id)

    # Jobs.

    def submit_store(self, job_id: int, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        """Store the chunks `keys`, which lie in `rows`. What is over the bounds is shed at once, as failed."""
        job = self._open_job(job_id, Kind.STORE, keys, rows)
        refuse = self._refuse_store()
        queued = self._work.queued_store_bytes
        counts = {"skipped": 0, "shed": 0, "exists": 0, "refused": 0}
        for item in job.items:
            if item.outcome is not None:
                counts["refused"] += 1
            elif refuse is Outcome.SKIPPED:
                item.outcome = Outcome.SKIPPED
                counts["skipped"] += 1
            elif self._table.is_present(item.key):
                item.outcome = Outcome.DONE
                counts["exists"] += 1
            elif refuse is Outcome.FAILED or queued + item.payload_bytes > self._settings.max_queued_store_bytes:
                item.outcome = Outcome.FAILED
                counts["shed"] += 1
            else:
                queued += item.payload_bytes
                item.replace = self._table.is_bad(item.key)
        for result, number in counts.items():
            if number:
                self.metrics.count("stores", result, by=number)
        self._start(job)

    def submit_load(self, job_id: int, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        """Load the chunks `keys` into `rows`."""
        job = self._open_job(job_id, Kind.LOAD, keys, rows)
        refuse = self._closed or (self._reads.is_open and not self._reads.allows())
        refused = 0
        for item in job.items:
            if refuse and item.outcome is None:
                item.outcome = Outcome.FAILED
                self._table.lost(item.key, bad=False)
            refused += item.outcome is not None
        if refused:
            self.metrics.count("loads", "refused", by=refused)
        self._start(job)

    def poll(self) -> list[JobResult]:
        """The jobs that ended since the last call; each job once. Jobs whose deadline has passed end here."""
        now = time.monotonic()
        if now >= self._watch_at_s:
            self._watch(now)
        if self._news:
            self._hear()
        if not self._finished:
            return []
        results = []
        while self._finished:
            result = self._finished.popleft()
            job = self._jobs.pop(result.job_id)
            self._release_rows(job)
            self.metrics.observe("load_seconds" if job.kind is Kind.LOAD else "store_seconds", result.elapsed_s)
            results.append(result)
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
            self._hear()
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

    def _open_job(self, job_id: int, kind: Kind, keys: Sequence[bytes], rows: Sequence[int]) -> Job:
        job = Job(job_id, kind, self._namespace, 0.0)
        settings = self._settings
        total = 0
        for key, row in zip(keys, rows, strict=True):
            size = self._payload_bytes(key)
            item = Item(job, key, row, size or 0)
            if size is None or not self._take_row(kind, row):
                item.row = -1
                item.outcome = Outcome.FAILED
            total += item.payload_bytes
            job.items.append(item)
        timeout_s = settings.load_timeout_s if kind is Kind.LOAD else settings.store_timeout_s
        job.deadline_s = job.submitted_s + timeout_s + total / settings.min_bytes_per_s
        return job

    def _start(self, job: Job) -> None:
        job.seal()
        if job.job_id in self._jobs:
            logger.error("%s: job %d was submitted twice; the second one is ignored", self.name, job.job_id)
            self._release_rows(job)
            return
        self._jobs[job.job_id] = job
        waiting = [item for item in job.items if item.outcome is None]
        if not waiting:
            self._finish(job.expire())
            return
        heapq.heappush(self._deadlines, (job.deadline_s, next(self._order), job))
        self._watch_at_s = min(self._watch_at_s, job.deadline_s)
        self._work.put_items(job.kind, waiting)

    def _payload_bytes(self, key: bytes) -> int | None:
        """Length of the chunk of this key; None when there can be none."""
        group = key[-GROUP_BYTES:]
        if group in self._sizes and GROUP_BYTES < len(key) <= GROUP_BYTES + MAX_HASH_BYTES:
            return self._sizes[group]
        if len(key) <= GROUP_BYTES or len(key) > GROUP_BYTES + MAX_HASH_BYTES or len(self._sizes) > _MAX_GROUPS:
            return None
        size = self._memory.payload_bytes(int.from_bytes(group, "big"))
        self._sizes[group] = None if size is None or record_bytes(size) > self._work.slot_bytes else size
        return self._sizes[group]

    def _take_row(self, kind: Kind, row: int) -> bool:
        """A row is loaded into by one open job alone; several may store from it. -1 stands for a load."""
        users = self._rows_in_use.get(row, 0)
        if users and (users < 0 or kind is Kind.LOAD):
            return False
        self._rows_in_use[row] = -1 if kind is Kind.LOAD else users + 1
        return True

    def _release_rows(self, job: Job) -> None:
        for item in job.items:
            if item.row < 0:
                continue
            users = self._rows_in_use.get(item.row, 0)
            if users > 1:
                self._rows_in_use[item.row] = users - 1
            else:
                self._rows_in_use.pop(item.row, None)

    def _refuse_store(self) -> Outcome | None:
        if not self._may_store:
            return Outcome.SKIPPED
        if self._closed or (self._writes.is_open and not self._writes.allows()):
            return Outcome.FAILED
        return None

    def _finish(self, result: JobResult | None) -> None:
        if result is not None:
            self._finished.append(result)

    def _hear(self) -> None:
        """Take in what the threads found out."""
        table = self._table
        while self._news:
            news = self._news.popleft()
            if isinstance(news, Settled):
                self._finish(news.item.job.settle(news.item, news.outcome, news.moved_bytes))
            elif isinstance(news, Answered):
                table.answer(news.probe, news.present)
            elif news.namespace != self._namespace:
                continue
            elif isinstance(news, Stored):
                table.stored(news.key)
                if news.fresh:
                    self._events.append(TierEvent((news.key,), removed=False))
            else:
                self._lose(news)

    def _count_lookups(self) -> None:
        table = self._table
        if table.hits:
            self.metrics.count("lookups", "hit", by=table.hits)
        if table.misses:
            self.metrics.count("lookups", "miss", by=table.misses)
        if table.timeouts:
            self.metrics.count("lookup_timeouts", by=table.timeouts)
        table.hits = table.misses = table.timeouts = 0

    def _lose(self, news: Lost) -> None:
        self._table.lost(news.key, bad=news.bad)
        if news.gone:
            self._events.append(TierEvent((news.key,), removed=True))

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
        if not job.open:
            return
        self._hear()
        unfinished = [item for item in job.items if item.outcome is None]
        result = job.expire()
        if result is None:
            return
        for item in unfinished:
            self.metrics.count("loads" if job.kind is Kind.LOAD else "stores", "timeout")
            if job.kind is Kind.LOAD:
                self._table.lost(item.key, bad=False)
        self._work.forget(job)
        self._finish(result)

    def _end_jobs(self) -> None:
        self._hear()
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
            self._news.append(Settled(item, Outcome.FAILED))

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
