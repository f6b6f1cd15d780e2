"""Tier: the engine's side. Nothing here waits for a backend, except `drain`, `reset` and `close`, which are bounded."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from kvstore_sdk.backend import Backend, ConfigError, Hint, RecordSource
from kvstore_sdk.format import padded_bytes
from kvstore_sdk.identity import KVIdentity, fresh_epoch
from kvstore_sdk.tier.admission import Admission
from kvstore_sdk.tier.backend_counts import count_backend
from kvstore_sdk.tier.batch import Batch
from kvstore_sdk.tier.breaker import Breaker, Breakers
from kvstore_sdk.tier.calls import Calls
from kvstore_sdk.tier.closing import close_and_join
from kvstore_sdk.tier.crew import PolledCrew, crew_of, polled_by
from kvstore_sdk.tier.desk import Desk, Sizes
from kvstore_sdk.tier.direct import DirectRecords
from kvstore_sdk.tier.fit import fit
from kvstore_sdk.tier.floor import Floor
from kvstore_sdk.tier.gate import Gate
from kvstore_sdk.tier.gauges import count_lookups, declare_gauges
from kvstore_sdk.tier.health import Health
from kvstore_sdk.tier.hints import Waits
from kvstore_sdk.tier.jobs import Item, Job, Kind, Outcome
from kvstore_sdk.tier.lookups import LookupTable
from kvstore_sdk.tier.manifest import Manifests
from kvstore_sdk.tier.metrics import TierMetrics
from kvstore_sdk.tier.news import Answered, Inbox, Lost, News
from kvstore_sdk.tier.pipeline import Pipeline
from kvstore_sdk.tier.probe import Probe
from kvstore_sdk.tier.records import Records, announce, take_back
from kvstore_sdk.tier.settings import TierSettings
from kvstore_sdk.tier.staged import StagedRecords
from kvstore_sdk.tier.surfaces import serve, tell_identity
from kvstore_sdk.tier.types import EngineMemory, JobResult, Lookup, RecordMemory, TierEvent
from kvstore_sdk.tier.watch import Watch
from kvstore_sdk.tier.work import WorkQueue

__all__ = ["Tier"]

logger = logging.getLogger(__name__)


class Tier:
    """One Backend made non-blocking and safe for an engine that keeps its chunks in rows of its own host memory.

    Every method is for one engine thread at a time, whichever it is, and none raises for what a backend or a key does. Keys are the
    engine's: chain hash, then the group as 4 bytes, big-endian.

    - Each submitted job is returned by `poll` exactly once, not later than its deadline.
    - What is loaded was verified; what is not verified is a failed load.
    - Rows of an `EngineMemory` are touched only while their job is open, and never by the backend: records pass through staging memory of
      the Tier, are verified there, and then copied.
    - Rows of a `RecordMemory` are records. The backend itself reads and writes them, nothing is copied, and verification is in place. So it
      is the backend's word that after a call it touches no row; a row that a call may touch longer than its job is open is in
      `JobResult.held`, and then, once, in what `take_released` returns.
    """

    def __init__(
        self,
        backend: Backend,
        memory: EngineMemory | RecordMemory,
        *,
        identity: KVIdentity,
        settings: TierSettings | None = None,
        name: str = "kvstore",
        may_store: bool = True,
        events: bool = False,
        answer: Callable[[JobResult, bool], object] | None = None,
    ) -> None:
        """Take over `backend`: `close` closes it.

        Args:
            backend: Open, and used by nobody else.
            memory: The engine's rows; which of the two it is decides whether records are staged or moved in place.
            identity: What their bytes mean; its namespace names every record.
            settings: How the backend is driven.
            name: For metrics, logs and threads.
            may_store: False: look up and load only; stores are skipped.
            events: Keep events for `take_events`.
            answer: Makes the `JobResult.answer` of a result, and is told whether it is a load's. Called on whichever thread ends the job,
                so that `poll` finds it ready. If it raises, the answer stays None.

        Raises:
            ConfigError: the backend and the settings do not fit the identity's chunks. Nothing was called or written.
        """
        settings = settings or TierSettings()
        capabilities = backend.capabilities
        where = f"tier {name}"
        slot_bytes, slots, max_key_bytes = fit(where, backend, identity, settings)
        self.name = name
        self.identity = identity
        self.stores = may_store and not capabilities.read_only
        """Whether it stores anything; otherwise every store is skipped."""
        self.metrics = TierMetrics()
        count_backend(self.metrics, backend, name)
        self._settings = settings
        self._backend = backend
        self._namespace = identity.namespace
        sizes = Sizes(memory, slot_bytes, max_key_bytes)
        self._table = LookupTable(
            timeout_s=settings.lookup_timeout_s,
            ttl_s=settings.hit_ttl_s,
            max_keys=settings.max_known_keys,
            max_hits=settings.max_hits_per_request,
            is_key=sizes.payload_bytes,
        )
        be_wary = self._table.be_wary
        self._exists, self._get = (Breaker(settings.breaker_failures, settings.breaker_probe_s, opened=be_wary) for _ in range(2))
        self._put = Breaker(settings.breaker_failures, settings.breaker_probe_s)
        self._breakers = Breakers(self._exists, self._get, self._put)
        self._floor = Floor(settings.min_load_mb_per_s, settings.breaker_probe_s, slowed=be_wary)
        self._admission = Admission(settings.admission, settings.max_known_keys)
        self._gate = Gate(self._breakers, self._floor, self._table)
        self._waits = Waits(identity)
        # Where no thread can be spared for it a question waits for nothing.
        self._may_wait = capabilities.max_concurrency > 2 * settings.io_threads
        polled = polled_by(backend, memory)
        self._work = WorkQueue(
            slots=slots,
            slot_bytes=slot_bytes,
            threads=min(settings.io_threads, capabilities.max_concurrency),
            max_threads=capabilities.max_concurrency,
            depth=1 if polled is None else PolledCrew.DEPTH,
            batch=min(settings.batch_records, capabilities.max_batch),
            max_batch=capabilities.max_batch,
            batch_bytes=capabilities.batch_bytes,
            unfold=lambda job, queued_store_bytes: self._desk.unfold(job, queued_store_bytes),
        )
        self._calls = Calls(backend, self.metrics, name, into_rows=isinstance(memory, RecordMemory))
        self._inbox = Inbox(self._table, events=events)
        self._table.listen(self._inbox.waiting, self._hear)
        self._answer = answer
        self.ready: deque[Job | None] = deque()
        """What the next `poll` has to look at: jobs that ended, and None for the clock and the news. While it is empty `poll` returns
        nothing, and need not be called."""
        self._desk = Desk(
            name=name,
            sizes=sizes,
            largest_payload=max(group.payload_bytes for group in identity.groups),
            row_count=memory.row_count,
            table=self._table,
            gate=self._gate,
            admission=self._admission,
            work=self._work,
            settings=settings,
            metrics=self.metrics,
            may_store=self.stores,
            ended=self._ended,
        )
        self._closed = self._left_touched = False
        self._records: Records
        if isinstance(memory, RecordMemory):
            # As `fit` reckons: a reset makes the manifest some bytes longer.
            spare_bytes = padded_bytes(len(identity.manifest())) + 4096
            self._records = DirectRecords(name, memory, identity.layout, spare_bytes=spare_bytes, released=self._desk.released.append)
        else:
            self._records = StagedRecords(name, memory, identity.layout, slots=slots, slot_bytes=slot_bytes, verifies=settings.verify)
        self._pipeline = Pipeline(
            name=name,
            calls=self._calls,
            work=self._work,
            records=self._records,
            settings=settings,
            metrics=self.metrics,
            breakers=self._breakers,
            floor=self._floor,
            tell=self._tell,
            settle=self._desk.settle,
            first_store=Manifests(self._calls, self._records, self.metrics, lambda: self.identity).after_store,
        )
        self._health = Health(
            name,
            self._breakers,
            probe_s=settings.health_probe_s,
            timeout_s=settings.lookup_timeout_s,
            send=lambda probe: self._work.put_probe(self._namespace, probe),
            pump=lambda: self._crew.pump(),
        )
        count_lookups(self.metrics, self._table, self._gate)
        declare_gauges(self.metrics, self._breakers, self._health, self._floor, self._work, self._table, self._desk)
        tell_identity(name, backend, identity)
        try:
            announce(backend, self._records.regions)
        except BaseException:
            self._records.close(untouched=True)
            raise
        self._crew = crew_of(name, self._work, polled, self._pipeline.run, self._failed)
        if not self._crew.grow():
            take_back(backend, self._records.regions)
            self._records.close(untouched=True)
            raise ConfigError(where, "io_threads", "the system starts no thread for this process; raise its limit of processes")
        self._watch = Watch(
            name=name,
            table=self._table,
            desk=self._desk,
            work=self._work,
            crew=self._crew,
            pipeline=self._pipeline,
            breakers=self._breakers,
            metrics=self.metrics,
            hold_s=settings.breaker_probe_s,
            least_s=min(settings.lookup_timeout_s, settings.load_timeout_s, settings.store_timeout_s),
            ring=self.wake,
        )
        # Where polls are what moves calls, there is always something to look at, the clock included.
        self._pumps = polled is not None
        if self._pumps or not self._watch.start():
            self._pumps = True
            self.wake()
        self._health.start()

    def serve(self, source: RecordSource) -> bool:
        """Have the backend serve these records to others, until `close`. Returns whether it does."""
        return serve(self.name, self._backend, source)

    # Look-ups.

    def begin_request(self, request_id: str, hint: Hint | None = None) -> None:
        """A request began. Without this its first look-up begins it.

        Args:
            request_id: The engine's.
            hint: Whom it names, for a backend that wants to know. With a `wait_s` its look-ups may stay PENDING for a second longer than
                that, all of them together, or for `lookup_timeout_s` if that is more.
        """
        if hint is not None and self._calls.takes_hints:
            self._table.begin(request_id, hint if self._may_wait else Hint(hint.peer))

    def lookup(self, request_id: str, key: bytes) -> Lookup:
        """Say whether the backend has a chunk, from memory. MISS for a key that no chunk can have.

        PENDING becomes HIT or MISS within `lookup_timeout_s`, or what `begin_request` says: `flush` sends the question, and who looks up
        again hears the answer, if it is there by the first look-up after a `flush`, or after a `poll` that had something to report. What
        comes later waits for the next one: of the keys of one step none is told more than another.
        """
        table = self._table
        return self._gate.lookup(request_id, key) if table.wary else table.lookup(request_id, key)

    @property
    def table(self) -> LookupTable:
        """What `lookup` answers from, for an engine that looks up so often that a call costs too much."""
        return self._table

    def flush(self) -> None:
        """Ask the backend what the look-ups since the last `flush` left open, one batch a request. To be called at the end of a step."""
        if self._inbox.waiting:
            self._hear()
        now = time.monotonic()
        self._table.now_s = now
        self._table.expire()
        if self._table.wary:
            self._gate.look()
        for probe in self._table.take_unsent():
            hint = self._waits.hint(self._namespace, probe, now)
            self._work.put_probe(self._namespace, probe, hint)
            self._watch.by(now + self._settings.lookup_timeout_s)
            if hint is not None and hint.wait_s:
                self._crew.grow()
        self._crew.pump()
        self._watch.look(now)

    def end_request(self, request_id: str) -> None:
        """The request is over: forget what it was told."""
        self._table.end_request(request_id)

    # Jobs.

    def admit(self, keys: Sequence[bytes]) -> list[bytes]:
        """Chunks in the engine's memory are new, or were used. Returns those of them that are to be stored now; the others, which are
        counted, may be at their next use. For a caller who wants to know before `submit_store`, which asks again: the answer is the same.
        """
        kept_out = self._admission.touch_all(keys)
        if not kept_out:
            return list(keys)
        self.metrics.count("stores", "not_admitted", by=len(kept_out))
        new = frozenset(kept_out)
        return [key for key in keys if key not in new]

    def submit_store(self, job_id: int, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        """Store the chunks `keys`, which lie in `rows`. What is over the bounds is shed, as failed."""
        if self._inbox.urgent:
            # What was found bad is to be replaced.
            self._hear()
        self._desk.store(Job(job_id, Kind.STORE, self._namespace, keys, rows))
        self._watch.by(self._desk.next_deadline_s())

    def submit_load(self, job_id: int, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        """Load the chunks `keys` into `rows`. A row that an open job uses is refused, as failed."""
        self._desk.load(Job(job_id, Kind.LOAD, self._namespace, keys, rows))
        self._watch.by(self._desk.next_deadline_s())

    def poll(self) -> list[JobResult]:
        """The jobs that ended since the last call; each job once. Jobs whose deadline has passed end here."""
        ready = self.ready
        if not ready:
            return []
        self._table.fresh = True
        if None in ready.copy():
            # Before any job is taken out: what is taken out is reported.
            self._look_around()
        jobs = [ready.popleft() for _ in range(len(ready))]
        if self._pumps:
            self.wake()
        give_out = self._desk.give_out
        return [give_out(job) for job in jobs if job is not None]

    def wake(self) -> None:
        """Have something in `ready`. From any thread."""
        self.ready.append(None)

    def take_released(self) -> list[int]:
        """Rows that were in `JobResult.held` and that no call touches any more, once for each time they were in it. Also after `close`."""
        return self._desk.take_released() if self._desk.released else []

    @property
    def touches_memory(self) -> bool:
        """Whether a call that did not return, or a transfer in doubt, may touch the memory that records lie in.

        When `close` left it so it stays so: a `RecordMemory` must then stay mapped until the process ends.
        """
        return self._left_touched or not self._work.is_untouched

    @property
    def busy(self) -> bool:
        """Whether a job was submitted that `poll` has not returned yet. Each has a deadline, so this ends."""
        return len(self._desk) > 0

    def take_events(self) -> list[TierEvent]:
        """What changed in the backend through this tier, or was found changed by it, since the last call; if the tier keeps events."""
        if self._inbox.waiting:
            self._hear()
        return self._inbox.take_events()

    # The end of things.

    def drain(self) -> None:
        """Wait, at most `drain_timeout_s`, until all jobs have ended; those that have not are ended. `poll` then has every result.

        Afterwards nothing touches the engine's rows, but those that are held.
        """
        until_s = time.monotonic() + self._settings.drain_timeout_s
        while self._desk.has_open and (now := time.monotonic()) < until_s:
            self._crew.wait(min(until_s, now + 0.01))
            self._watch.look(now)
        self._end_jobs()

    def reset(self, weights_version: str = "", epoch: str = "") -> None:
        """The engine's cache was reset: nothing that was stored before is served again. Bounded as `drain` is.

        Args:
            weights_version: Names the weights that the engine uses from now on, so that engines with the same ones share again. Without
                it only this engine knows the new namespace.
            epoch: From `fresh_epoch`: tiers that are given the same one share the new namespace, and nobody else knows it.

        Raises:
            ConfigError: one of them cannot be part of an identity. Nothing was changed.
        """
        weights = weights_version or self.identity.weights
        identity = dataclasses.replace(self.identity, weights=weights, epoch=epoch or ("" if weights_version else fresh_epoch()))
        self._health.forget()
        self._give_up(*self._work.cancel(), failed=False)
        self.drain()
        self._table.clear()
        self._admission.clear()
        tell_identity(self.name, self._backend, identity)
        self.identity = identity
        self._namespace = identity.namespace

    def close(self) -> None:
        """End all jobs, stop the threads and close the backend, in `close_timeout_s` at most. Idempotent.

        Memory that a running call may still touch is not given back: staging memory stays mapped until the process ends. A region of
        records is its owner's, who must not unmap it while `touches_memory`; rows that are held may then stay so for ever. `poll` and
        `take_released` go on working.
        """
        if self._closed:
            return
        self._closed = True
        self._health.stop()
        self._watch.stop()
        self._desk.close()
        patience_s = self._settings.close_timeout_s
        until_s = time.monotonic() + patience_s
        self._give_up(*self._work.cancel(), failed=False)
        self._crew.wait_quiet(until_s - patience_s * 0.5)
        self._end_jobs()
        self._table.close()
        while self._work.in_doubt and time.monotonic() < until_s - patience_s * 0.25:
            self._crew.wait(time.monotonic() + 0.05)
        self._crew.stop()
        threads = close_and_join(
            self.name, self._close_backend, [*self._health.threads, *self._watch.threads, *self._crew.threads], until_s
        )
        self._crew.settle(until_s)
        stuck = [thread.name for thread in threads if thread.is_alive()]
        self._left_touched = bool(stuck) or not self._work.is_untouched
        self._records.close(untouched=not self._left_touched)
        if not self._left_touched:
            return
        what = f"these threads did not return: {', '.join(stuck)}" if stuck else "transfers are in doubt"
        logger.warning("%s: closed, while %s; the memory of records stays mapped", self.name, what)

    # Inside.

    def _ended(self, job: Job) -> None:
        if self._answer is not None:
            try:
                answer = self._answer(job.result, job.kind is Kind.LOAD)
                job.result = dataclasses.replace(job.result, answer=answer)
            except Exception:
                logger.exception("%s: the result of job %d cannot be answered", self.name, job.job_id)
        self.ready.append(job)

    def _look_around(self) -> None:
        self._table.now_s = now = time.monotonic()
        self._crew.pump()
        self._watch.look(now)
        if self._inbox.urgent:
            self._hear()

    def _tell(self, news: News) -> None:
        self._inbox.tell(news)
        if isinstance(news, Lost):
            # A request that was told HIT must not be told so again, and asks nothing that would bring the news.
            self.wake()

    def _hear(self) -> None:
        self._inbox.hear(self._namespace)

    def _end_jobs(self) -> None:
        self._desk.expire_all()
        self._work.forget_ended()
        self._hear()

    # By the crew.

    def _failed(self, batch: Batch) -> None:
        logger.exception("%s: a %s batch failed in the SDK", self.name, batch.operation)
        for item in batch.items:
            if item.job.kind is Kind.LOAD:
                self._tell(Lost(batch.namespace, item.key, bad=False, gone=False))
        self._give_up(() if batch.probe is None else ((batch.probe, batch.keys),), batch.items)

    def _give_up(self, asked: Iterable[tuple[Probe, Sequence[bytes]]], items: Iterable[Item], *, failed: bool = True) -> None:
        """These will not be done: they failed, or were not begun."""
        for probe, keys in asked:
            probe.answered = False
            self._inbox.tell(Answered(probe, unknown=keys))
        not_begun = {Kind.LOAD: "refused", Kind.STORE: "shed"}
        self._desk.settle([item.ended(Outcome.FAILED, "failed" if failed else not_begun[item.job.kind]) for item in items])

    def _close_backend(self) -> None:
        if self._work.is_untouched:
            take_back(self._backend, self._records.regions)
        self._backend.close()
