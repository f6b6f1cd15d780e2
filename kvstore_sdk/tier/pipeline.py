"""What the Tier's threads do with a batch: the blocking half."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvstore_sdk.backend import (
    Advice,
    BackendError,
    Deadline,
    Failure,
    Get,
    GetResult,
    GetStatus,
    InvalidError,
    Mode,
    Put,
    PutResult,
    PutStatus,
    Ticket,
    UnsupportedError,
)
from kvstore_sdk.format import HEADER_BYTES, Flaw, record_bytes, seal, verify
from kvstore_sdk.keys import ChunkKey
from kvstore_sdk.tier.breaker import Breaker
from kvstore_sdk.tier.calls import Calls
from kvstore_sdk.tier.jobs import Item, Kind, Outcome
from kvstore_sdk.tier.lookups import Probe
from kvstore_sdk.tier.metrics import TierMetrics
from kvstore_sdk.tier.settings import TierSettings
from kvstore_sdk.tier.trust import Trust
from kvstore_sdk.tier.types import EngineMemory, JobResult
from kvstore_sdk.tier.work import Batch, Doubt, WorkQueue

__all__ = ["Answered", "Bad", "Lost", "News", "Pipeline"]

logger = logging.getLogger(__name__)

_SUSPECT_MEMORY_S = 60.0
"""How long a process that fails to verify most of what it reads leaves the store alone: long enough to be seen, then it tries again."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The backend's answer to a probe; None when it gave none."""

    probe: Probe
    present: bool | None


@dataclass(frozen=True, slots=True)
class Lost:
    """A load failed. `bad`: the record is there, and no good. `gone`: it is certain that nobody can load it."""

    namespace: str
    key: bytes
    bad: bool
    gone: bool


@dataclass(frozen=True, slots=True)
class Bad:
    """A record that failed verification twice, or that cannot be read at all."""

    flaw: Flaw | None


News = Answered | Lost


class Pipeline:
    """Runs batches. What the engine's side has to know goes out through `tell`, and the results of jobs through `finish`.

    A key's news are told before its item is settled, so that whoever hears of the end of a job can hear of its keys first.
    """

    def __init__(
        self,
        *,
        calls: Calls,
        work: WorkQueue,
        memory: EngineMemory,
        layout: str,
        settings: TierSettings,
        metrics: TierMetrics,
        reads: Breaker,
        writes: Breaker,
        tell: Callable[[News], None],
        finish: Callable[[JobResult], None],
        first_store: Callable[[str, int], None],
    ) -> None:
        self._calls = calls
        self._work = work
        self._memory = memory
        self._layout = layout
        self._settings = settings
        self._metrics = metrics
        self._reads = reads
        self._writes = writes
        self._tell = tell
        self._finish = finish
        self._first_store = first_store
        self._trust = Trust()
        # Only for the jitter of retries; seeded from the system.
        self._random = random.Random()

    def run(self, batch: Batch) -> None:
        """Do a batch to its end. Never raises for what a backend does."""
        doubts: list[Doubt] = []
        over: list[Doubt] = []
        try:
            if batch.probes:
                self._probe(batch)
            elif batch.doubts:
                batch.deadline_s = time.monotonic() + 1.0
                done = self._calls.settle([doubt.ticket for doubt in batch.doubts], Deadline(batch.deadline_s))
                over = [doubt for doubt, settled in zip(batch.doubts, done, strict=True) if settled]
            elif batch.kind is Kind.LOAD:
                doubts = self._load(batch)
            else:
                doubts = self._store(batch)
        finally:
            self._work.finish(batch, doubts, over)

    # Probes.

    def settle(self, item: Item, outcome: Outcome, moved_bytes: int = 0) -> None:
        """An item has ended; with the last one its job has."""
        if (result := item.job.settle(item.place, outcome, moved_bytes)) is not None:
            self._finish(result)

    def _probe(self, batch: Batch) -> None:
        # From when the first of them was asked for; a little time even if that was long ago.
        batch.deadline_s = max(batch.probes[0].asked_s + self._settings.lookup_timeout_s, time.monotonic() + 0.01)
        names = [ChunkKey.from_engine(batch.namespace, probe.key).name for probe in batch.probes]
        answers = self._calls.exists(names, Deadline(batch.deadline_s))
        now = time.monotonic()
        failed: BackendError | None = None
        for probe, answer in zip(batch.probes, answers, strict=True):
            if isinstance(answer, Failure):
                failed = answer.error
                self._tell(Answered(probe, None))
            else:
                self._tell(Answered(probe, answer))
            self._metrics.observe("lookup_seconds", now - probe.asked_s)
        self._judge(batch, self._reads, "read", failed)

    # Loads.

    def _load(self, batch: Batch) -> list[Doubt]:
        now = time.monotonic()
        batch.deadline_s = max(now, min(item.job.deadline_s for item in batch.items))
        keys = [ChunkKey.from_engine(batch.namespace, item.key) for item in batch.items]
        sizes = [record_bytes(item.payload_bytes) for item in batch.items]
        buffers = [self._work.buffer(slot, size) for slot, size in zip(batch.slots, sizes, strict=True)]
        gets = [Get(key.name, (buffer,)) for key, buffer in zip(keys, buffers, strict=True)]
        deadline = Deadline(batch.deadline_s)
        answers = self._calls.get(gets, deadline)
        doubts: list[Doubt] = []
        failed: BackendError | None = None
        for item, key, slot, get, answer in zip(batch.items, keys, batch.slots, gets, answers, strict=True):
            if answer.status is GetStatus.IN_DOUBT and answer.ticket is not None:
                doubts.append(Doubt(answer.ticket, slot))
            elif answer.status in (GetStatus.FOUND, GetStatus.WRONG_SIZE) or _unreadable(answer):
                if doubt := self._check(batch, item, key, get, answer, deadline):
                    doubts.append(Doubt(doubt, slot))
                continue
            elif answer.status is GetStatus.MISSING:
                self._metrics.count("loads", "missing")
                self._fail_load(batch, item, bad=False, gone=True)
                continue
            failed = answer.error or failed or BackendError(answer.status.value)
            if not self._retry(batch, item, answer.error, slot_is_free=answer.status is not GetStatus.IN_DOUBT):
                self._metrics.count("loads", "timeout" if answer.status in (GetStatus.TIMED_OUT, GetStatus.IN_DOUBT) else "failed")
                self._fail_load(batch, item, bad=False, gone=False)
        self._judge(batch, self._reads, "read", failed)
        return doubts

    def _check(self, batch: Batch, item: Item, key: ChunkKey, get: Get, answer: GetResult, deadline: Deadline) -> Ticket | None:
        """Verify what came, and hand it to the engine, or find it bad after a second look. Returns a ticket when that look is in doubt."""
        if self._flaw(item, key, get, answer) is None:
            self._deliver(item, get)
            return None
        again = self._calls.get([get], deadline)[0]
        if again.status is GetStatus.MISSING:
            self._metrics.count("loads", "missing")
            self._fail_load(batch, item, bad=False, gone=True)
        elif not (again.status in (GetStatus.FOUND, GetStatus.WRONG_SIZE) or _unreadable(again)):
            self._metrics.count("loads", "failed")
            self._fail_load(batch, item, bad=False, gone=False)
        elif (second := self._flaw(item, key, get, again)) is None:
            self._metrics.count("unstable_reads")
            self._deliver(item, get)
        else:
            self._condemn(batch, item, key, second.flaw)
        return again.ticket if again.status is GetStatus.IN_DOUBT else None

    def _flaw(self, item: Item, key: ChunkKey, get: Get, answer: GetResult) -> Bad | None:
        if answer.status is GetStatus.WRONG_SIZE:
            return Bad(Flaw.LENGTH)
        if answer.status is not GetStatus.FOUND:
            return Bad(None)
        if not self._settings.verify:
            return None
        flaw = verify(get.into[0].view, key, self._layout, item.payload_bytes)
        return None if flaw is None else Bad(flaw)

    def _deliver(self, item: Item, get: Get) -> None:
        if self._settings.verify:
            self._trust.verified(True)
        payload = get.into[0].view[HEADER_BYTES : HEADER_BYTES + item.payload_bytes]
        # Under the job's lock: once the job is closed the engine may use the row for something else.
        with item.job.lock:
            if not item.job.open:
                return
            self._memory.copy_in(item.row, ChunkKey.from_engine(item.job.namespace, item.key).group, payload)
        self._metrics.count("loads", "loaded")
        self._metrics.count("load_bytes", by=item.payload_bytes)
        self.settle(item, Outcome.DONE, item.payload_bytes)

    def _condemn(self, batch: Batch, item: Item, key: ChunkKey, flaw: Flaw | None) -> None:
        self._metrics.count("loads", "corrupt" if flaw else "failed")
        if flaw is not None:
            self._metrics.count("corrupt", flaw.value)
            logger.warning("record %s is corrupt (%s): it is a miss until it is stored again", key.name, flaw.value)
        removed = False
        if flaw is not None and self._trust.verified(False):
            logger.error(
                "most records read here fail verification, as likely by this host's memory as by the store: leaving it alone for %.0f s",
                _SUSPECT_MEMORY_S,
            )
            for side, breaker in (("read", self._reads), ("write", self._writes)):
                if breaker.hold(_SUSPECT_MEMORY_S):
                    self._metrics.count("breaker_opened", side)
        elif flaw is not None and self._trust.may_remove():
            answer = self._calls.delete([key.name], Deadline.after(1.0))[0]
            removed = not isinstance(answer, Failure)
            if removed:
                self._metrics.count("removals")
        # Removed, the next store may create it. Not removed, it has to replace it.
        self._fail_load(batch, item, bad=not removed, gone=True)

    def _fail_load(self, batch: Batch, item: Item, *, bad: bool, gone: bool) -> None:
        self._tell(Lost(batch.namespace, item.key, bad, gone))
        self.settle(item, Outcome.FAILED)

    # Stores.

    def _store(self, batch: Batch) -> list[Doubt]:
        now = time.monotonic()
        batch.deadline_s = max(now, min(item.job.deadline_s for item in batch.items))
        items: list[Item] = []
        puts: list[Put] = []
        slots: list[int] = []
        for item, slot in zip(batch.items, batch.slots, strict=True):
            key = ChunkKey.from_engine(batch.namespace, item.key)
            buffer = self._work.buffer(slot, record_bytes(item.payload_bytes))
            record = buffer.view
            # Under the job's lock: once the job is closed the row may hold something else, and that must never be stored under this key.
            with item.job.lock:
                if not item.job.open:
                    continue
                self._memory.copy_out(item.row, key.group, record[HEADER_BYTES : HEADER_BYTES + item.payload_bytes])
            seal(record, key, self._layout, item.payload_bytes)
            items.append(item)
            slots.append(slot)
            puts.append(Put(key.name, (buffer,), Mode.REPLACE if item.replace else Mode.CREATE))
        if not puts:
            return []
        answers = self._calls.put(puts, Deadline(batch.deadline_s))
        doubts: list[Doubt] = []
        failed: BackendError | None = None
        stored = [(item, slot) for item, slot, answer in zip(items, slots, answers, strict=True) if answer.status is PutStatus.STORED]
        there = [item for item, answer in zip(items, answers, strict=True) if answer.status is PutStatus.EXISTS and not item.replace]
        self._stored([item for item, _ in stored], there)
        for item, slot, answer in zip(items, slots, answers, strict=True):
            if answer.status is PutStatus.STORED or (answer.status is PutStatus.EXISTS and not item.replace):
                continue
            if answer.status is PutStatus.IN_DOUBT and answer.ticket is not None:
                doubts.append(Doubt(answer.ticket, slot))
            if _stops_writes(answer):
                failed = answer.error or BackendError(answer.status.value)
            if not self._retry(batch, item, answer.error, slot_is_free=answer.status is not PutStatus.IN_DOUBT):
                self._metrics.count("stores", "timeout" if answer.status in (PutStatus.TIMED_OUT, PutStatus.IN_DOUBT) else "failed")
                self.settle(item, Outcome.FAILED)
        self._judge(batch, self._writes, "write", failed)
        if stored:
            # The batch is done, and this slot is still ours: the manifest goes through it.
            self._first_store(batch.namespace, stored[0][1])
        return doubts

    def _stored(self, fresh: list[Item], there: list[Item]) -> None:
        """Records are visible: those we wrote, and those that were there."""
        replaced = sum(item.replace for item in fresh)
        for name, labels, number in (
            ("stores", ("stored",), len(fresh) - replaced),
            ("stores", ("replaced",), replaced),
            ("stores", ("exists",), len(there)),
            ("repairs", (), replaced),
            ("store_bytes", (), sum(item.payload_bytes for item in fresh)),
        ):
            if number:
                self._metrics.count(name, *labels, by=number)
        for item in fresh:
            self.settle(item, Outcome.DONE, item.payload_bytes)
        for item in there:
            self.settle(item, Outcome.DONE)

    # Both.

    def _retry(self, batch: Batch, item: Item, error: BackendError | None, *, slot_is_free: bool) -> bool:
        """Queue the item again if that may help and there is time. Returns whether it did."""
        if error is not None and error.advice is not Advice.RETRY:
            return False
        if not slot_is_free or item.attempts >= self._settings.retries or not item.job.open or self._breaker(item).is_open:
            return False
        # Full jitter around a doubling mean: repeats of many clients spread out.
        wait_s = self._random.uniform(0, 2) * self._settings.retry_base_s * 2**item.attempts
        wait_s = max(wait_s, getattr(error, "retry_after_s", 0.0))
        due_s = time.monotonic() + wait_s
        if due_s >= item.job.deadline_s:
            return False
        item.attempts += 1
        self._metrics.count("retries", batch.operation)
        self._work.again(item, due_s)
        return True

    def _breaker(self, item: Item) -> Breaker:
        return self._reads if item.job.kind is Kind.LOAD else self._writes

    def _judge(self, batch: Batch, breaker: Breaker, side: str, failed: BackendError | None) -> None:
        if batch.abandoned:
            # The call was late, and was counted as a failure when that was found.
            return
        if failed is None:
            breaker.succeeded()
        elif breaker.failed():
            self._metrics.count("breaker_opened", side)
            logger.warning("%s breaker opened after failures in a row, the last: %s", side, failed)


def _unreadable(answer: GetResult) -> bool:
    """Whether the record's place holds something that is no record at all, a directory for example. A store repairs that."""
    return answer.status is GetStatus.FAILED and isinstance(answer.error, InvalidError)


def _stops_writes(answer: PutResult) -> bool:
    """Whether this answer speaks against the store as a whole, not against one record."""
    return not isinstance(answer.error, (InvalidError, UnsupportedError))
