"""What the Tier's threads do with a batch: the blocking half."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable
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
    PutStatus,
    ThrottledError,
    Ticket,
    TimedOutError,
    UnsupportedError,
)
from kvstore_sdk.format import HEADER_BYTES, Flaw, record_bytes, seal, verify
from kvstore_sdk.keys import ChunkKey
from kvstore_sdk.tier.breaker import Breaker, Breakers
from kvstore_sdk.tier.calls import Calls, text_of
from kvstore_sdk.tier.jobs import Ending, Item, Kind, Outcome
from kvstore_sdk.tier.lookups import Probe
from kvstore_sdk.tier.metrics import TierMetrics
from kvstore_sdk.tier.settings import TierSettings
from kvstore_sdk.tier.trust import Trust
from kvstore_sdk.tier.types import EngineMemory, IncompleteChunkError
from kvstore_sdk.tier.work import Batch, Doubt, WorkQueue

__all__ = ["Answered", "Lost", "News", "Pipeline", "Stored"]

logger = logging.getLogger(__name__)

_SUSPECT_MEMORY_S = 60.0
"""How long a process that fails to verify most of what it reads leaves the store alone: long enough to be seen, then it tries again."""
_SETTLE_FOR_S = 0.05
"""Longest that a thread waits for transfers in doubt before it looks for other work: it may be the only thread."""
_REMOVE_FOR_S = 1.0


@dataclass(frozen=True, slots=True)
class Answered:
    """The backend's answer to a probe; None when it gave none."""

    probe: Probe
    present: bool | None


@dataclass(frozen=True, slots=True)
class Stored:
    """Records are visible under these keys: those that this tier wrote, and those that a store found."""

    namespace: str
    fresh: tuple[bytes, ...]
    there: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Lost:
    """A load failed. `bad`: the record is there, and no good. `gone`: it is certain that nobody can load it."""

    namespace: str
    key: bytes
    bad: bool
    gone: bool


News = Answered | Stored | Lost


@dataclass(frozen=True, slots=True)
class _Bad:
    """A record that failed verification, or that cannot be read at all."""

    flaw: Flaw | None


class Pipeline:
    """Runs batches. What the engine's side has to know goes out through `tell`, in the order it became true, and through `settle`.

    A key's news are told before its item is settled, so that whoever hears of the end of a job can hear of its keys.
    """

    def __init__(
        self,
        *,
        name: str,
        calls: Calls,
        work: WorkQueue,
        memory: EngineMemory,
        layout: str,
        settings: TierSettings,
        metrics: TierMetrics,
        breakers: Breakers,
        tell: Callable[[News], None],
        settle: Callable[[Iterable[Ending]], None],
        first_store: Callable[[Batch, int], Ticket | None],
    ) -> None:
        self._name = name
        self._calls = calls
        self._work = work
        self._memory = memory
        self._layout = layout
        self._settings = settings
        self._metrics = metrics
        self._breakers = breakers
        self._tell = tell
        self._settle = settle
        self._first_store = first_store
        self._trust = Trust()
        self._private = threading.local()
        # Only for the jitter of retries; seeded from the system.
        self._random = random.Random()

    def run(self, batch: Batch) -> None:
        """Do a batch to its end. Never raises for what a backend or the engine's memory does."""
        doubts: list[Doubt] = []
        over: list[Doubt] = []
        try:
            if batch.probes:
                self._probe(batch)
            elif batch.doubts:
                over = self._ask_about(batch)
            elif batch.kind is Kind.LOAD:
                self._load(batch, doubts)
            else:
                self._store(batch, doubts)
        finally:
            self._work.finish(batch, doubts, over)
        if doubts:
            self.check_quarantine()

    def check_quarantine(self) -> None:
        """Leave the store alone while calls that outlived their deadlines hold too much memory."""
        held = self._work.quarantined_bytes
        if held and held >= self._settings.max_quarantined_bytes and self._breakers.hold(self._metrics, self._settings.breaker_probe_s):
            logger.warning("%s: breakers opened: calls that outlived their deadlines hold %d bytes", self._name, held)

    def _ask_about(self, batch: Batch) -> list[Doubt]:
        batch.deadline_s = time.monotonic() + _SETTLE_FOR_S
        done = self._calls.settle([doubt.ticket for doubt in batch.doubts], Deadline(batch.deadline_s))
        return [doubt for doubt, settled in zip(batch.doubts, done, strict=True) if settled]

    # Probes.

    def _probe(self, batch: Batch) -> None:
        breaker = self._breakers.exists
        if breaker.is_open and not any(probe.trial for probe in batch.probes):
            # Asked before the breaker opened: nobody should wait for the same failure once more.
            for probe in batch.probes:
                self._tell(Answered(probe, None))
            return
        # From when the first of them was asked for; a little time even if that was long ago. Before the table gives them up, so that what
        # was found by then is not lost with what was not.
        batch.timeout_s = self._settings.lookup_timeout_s
        batch.deadline_s = max(batch.probes[0].asked_s + 0.9 * self._settings.lookup_timeout_s, time.monotonic() + 0.01)
        names = [ChunkKey.from_engine(batch.namespace, probe.key).name for probe in batch.probes]
        answers = self._calls.exists(names, Deadline(batch.deadline_s))
        now = time.monotonic()
        failed: BackendError | None = None
        answered = False
        for probe, answer in zip(batch.probes, answers, strict=True):
            if isinstance(answer, Failure):
                failed = answer.error
                self._tell(Answered(probe, None))
            else:
                answered = True
                self._tell(Answered(probe, answer))
            self._metrics.observe("lookup_seconds", now - probe.asked_s)
        self._judge(batch, breaker, "read", None if answered else failed)

    # Loads.

    def _load(self, batch: Batch, doubts: list[Doubt]) -> None:
        breaker = self._breakers.get
        items: list[tuple[Item, int]] = []
        for item, slot in zip(batch.items, batch.slots, strict=True):
            if breaker.is_open and not item.trial:
                self._fail_load(batch, item, "refused")
            elif item.job.open:
                items.append((item, slot))
        if not items:
            return
        batch.timeout_s = min(item.job.timeout_s for item, _ in items)
        batch.deadline_s = min(item.job.deadline_s for item, _ in items)
        keys = [ChunkKey.from_engine(batch.namespace, item.key) for item, _ in items]
        gets = [
            Get(key.name, (self._work.buffer(slot, record_bytes(item.payload_bytes)),))
            for key, (item, slot) in zip(keys, items, strict=True)
        ]
        deadline = Deadline(batch.deadline_s)
        answers = self._calls.get(gets, deadline)
        # All of them first: whatever happens later, these slots stay out of use.
        for (_, slot), answer in zip(items, answers, strict=True):
            if answer.status is GetStatus.IN_DOUBT:
                doubts.append(Doubt(answer.ticket, slot))
        failed: BackendError | None = None
        answered = False
        for (item, slot), key, get, answer in zip(items, keys, gets, answers, strict=True):
            if answer.status in (GetStatus.FOUND, GetStatus.WRONG_SIZE) or _is_unreadable(answer):
                answered = True
                self._check(batch, item, key, get, answer, deadline, slot, doubts)
            elif answer.status is GetStatus.MISSING:
                answered = True
                self._fail_load(batch, item, "missing", gone=True)
            else:
                failed = answer.error or failed or BackendError(answer.status.value)
                may_help = answer.status not in (GetStatus.IN_DOUBT, GetStatus.CLOSED)
                if not (may_help and self._retry(item, answer.error)):
                    self._fail_load(batch, item, "timeout" if answer.status in (GetStatus.TIMED_OUT, GetStatus.IN_DOUBT) else "failed")
        self._judge(batch, breaker, "read", None if answered else failed)

    def _check(
        self, batch: Batch, item: Item, key: ChunkKey, get: Get, answer: GetResult, deadline: Deadline, slot: int, doubts: list[Doubt]
    ) -> None:
        """Verify what came, and hand it to the engine, or find it bad after a second look."""
        if self._flaw(item, key, get, answer) is None:
            self._deliver(batch, item, key, get)
            return
        again = self._calls.get([get], deadline)[0]
        if again.status is GetStatus.IN_DOUBT:
            doubts.append(Doubt(again.ticket, slot))
        if again.status is GetStatus.MISSING:
            self._fail_load(batch, item, "missing", gone=True)
        elif not (again.status in (GetStatus.FOUND, GetStatus.WRONG_SIZE) or _is_unreadable(again)):
            self._fail_load(batch, item, "failed")
        elif (second := self._flaw(item, key, get, again)) is None:
            self._metrics.count("unstable_reads")
            self._deliver(batch, item, key, get)
        else:
            self._condemn(batch, item, key, second.flaw, deadline)

    def _flaw(self, item: Item, key: ChunkKey, get: Get, answer: GetResult) -> _Bad | None:
        if answer.status is GetStatus.WRONG_SIZE:
            return _Bad(Flaw.LENGTH)
        if answer.status is not GetStatus.FOUND:
            return _Bad(None)
        if not self._settings.verify:
            return None
        record = self._private_record(item)
        record[:] = get.into[0].view
        flaw = verify(record, key, self._layout, item.payload_bytes)
        return None if flaw is None else _Bad(flaw)

    def _deliver(self, batch: Batch, item: Item, key: ChunkKey, get: Get) -> None:
        # What was verified, byte for byte, and not what the slot holds by now.
        record = get.into[0].view
        if self._settings.verify:
            record = self._private_record(item)
            self._trust.verified(True)
        payload = record[HEADER_BYTES : HEADER_BYTES + item.payload_bytes]
        try:
            # Under the job's lock: once the job is closed the engine may use the row for something else.
            with item.job.lock:
                if not item.job.open:
                    return
                self._memory.copy_in(item.row, key.group, payload)
        except Exception:
            logger.exception("%s: copying a chunk into row %d of the engine's memory failed", self._name, item.row)
            self._fail_load(batch, item, "failed")
            return
        self._settle((item.ended(Outcome.DONE, "loaded", item.payload_bytes),))

    def _condemn(self, batch: Batch, item: Item, key: ChunkKey, flaw: Flaw | None, deadline: Deadline) -> None:
        if flaw is None:
            # Not a record at all, and said so by the store: nothing to suspect, and not ours to remove.
            self._fail_load(batch, item, "failed", bad=True, gone=True)
            return
        self._metrics.count("corrupt", flaw.value)
        logger.warning("%s: record %s is corrupt (%s): it is a miss until it is stored again", self._name, key.name, flaw.value)
        removed = False
        # A length is the store's own word, so a wrong one says nothing about this host's memory.
        if flaw is not Flaw.LENGTH and self._trust.verified(False):
            if self._breakers.hold(self._metrics, _SUSPECT_MEMORY_S):
                logger.error(
                    "%s: most records read here fail verification, by this host's memory or by the store: leaving it alone for %.0f s",
                    self._name,
                    _SUSPECT_MEMORY_S,
                )
        elif self._trust.may_remove():
            answer = self._calls.delete([key.name], Deadline(min(deadline.at_s, time.monotonic() + _REMOVE_FOR_S)))[0]
            removed = not isinstance(answer, Failure)
            if removed:
                self._metrics.count("removals")
        # Removed, the next store may create it. Not removed, it has to replace it.
        self._fail_load(batch, item, "corrupt", bad=not removed, gone=True)

    def _fail_load(self, batch: Batch, item: Item, result: str, *, bad: bool = False, gone: bool = False) -> None:
        self._tell(Lost(batch.namespace, item.key, bad, gone))
        self._settle((item.ended(Outcome.FAILED, result),))

    # Stores.

    def _store(self, batch: Batch, doubts: list[Doubt]) -> None:
        breaker = self._breakers.put
        items: list[tuple[Item, int]] = []
        puts: list[Put] = []
        for item, slot in zip(batch.items, batch.slots, strict=True):
            if breaker.is_open and not item.trial:
                self._settle((item.ended(Outcome.FAILED, "shed"),))
            elif (put := self._put_of(batch, item, slot)) is not None:
                items.append((item, slot))
                puts.append(put)
        if not puts:
            return
        batch.timeout_s = min(item.job.timeout_s for item, _ in items)
        batch.deadline_s = min(item.job.deadline_s for item, _ in items)
        answers = self._calls.put(puts, Deadline(batch.deadline_s))
        for (_, slot), answer in zip(items, answers, strict=True):
            if answer.status is PutStatus.IN_DOUBT:
                doubts.append(Doubt(answer.ticket, slot))
        failed: BackendError | None = None
        answered = False
        written: list[tuple[Item, int]] = []
        there: list[Item] = []
        endings: list[Ending] = []
        for (item, slot), answer in zip(items, answers, strict=True):
            if answer.status is PutStatus.STORED:
                written.append((item, slot))
                endings.append(item.ended(Outcome.DONE, "replaced" if item.replace else "stored", item.payload_bytes))
            elif answer.status is PutStatus.EXISTS and not item.replace:
                there.append(item)
                endings.append(item.ended(Outcome.DONE, "exists"))
            else:
                if isinstance(answer.error, (InvalidError, UnsupportedError)):
                    # Speaks against this record, not against the store.
                    answered = True
                else:
                    failed = answer.error or failed or BackendError(answer.status.value)
                may_help = answer.status not in (PutStatus.IN_DOUBT, PutStatus.CLOSED)
                if not (may_help and self._retry(item, answer.error)):
                    timeout = answer.status in (PutStatus.TIMED_OUT, PutStatus.IN_DOUBT)
                    endings.append(item.ended(Outcome.FAILED, "timeout" if timeout else "failed"))
        if written or there:
            answered = True
            self._tell(Stored(batch.namespace, tuple(item.key for item, _ in written), tuple(item.key for item in there)))
            if repairs := sum(item.replace for item, _ in written):
                self._metrics.count("repairs", by=repairs)
        self._settle(endings)
        self._judge(batch, breaker, "write", None if answered else failed)
        if written and not batch.abandoned:
            # The batch is done, and this slot is still ours: the manifest goes through it.
            slot = written[0][1]
            ticket = self._first_store(batch, slot)
            if ticket is not None:
                doubts.append(Doubt(ticket, slot))

    def _put_of(self, batch: Batch, item: Item, slot: int) -> Put | None:
        """The record of an item, in its slot. None when there is nothing to be stored any more."""
        key = ChunkKey.from_engine(batch.namespace, item.key)
        buffer = self._work.buffer(slot, record_bytes(item.payload_bytes))
        record = self._private_record(item)
        try:
            # Under the job's lock: once the job is closed the row may hold something else, and that must never be stored under this key.
            with item.job.lock:
                if not item.job.open:
                    return None
                self._memory.copy_out(item.row, key.group, record[HEADER_BYTES : HEADER_BYTES + item.payload_bytes])
        except IncompleteChunkError:
            self._settle((item.ended(Outcome.FAILED, "refused"),))
            return None
        except Exception:
            logger.exception("%s: copying a chunk out of row %d of the engine's memory failed", self._name, item.row)
            self._settle((item.ended(Outcome.FAILED, "failed"),))
            return None
        seal(record, key, self._layout, item.payload_bytes)
        buffer.view[:] = record
        return Put(key.name, (buffer,), Mode.REPLACE if item.replace else Mode.CREATE)

    # Both.

    def _private_record(self, item: Item) -> memoryview:
        """Memory of this thread for one record, known to no backend.

        Checksums are taken here, and only here: a backend that touches a slot after its call has returned can spoil a record, which is
        found, but it can neither slip in between a check and a copy nor have its bytes sealed.
        """
        memory = getattr(self._private, "memory", None)
        if memory is None:
            memory = self._private.memory = memoryview(bytearray(self._work.slot_bytes))
        return memory[: record_bytes(item.payload_bytes)]

    def _retry(self, item: Item, error: BackendError | None) -> bool:
        """Queue the item again if that may help and there is time. Returns whether it did."""
        if error is not None and error.advice is not Advice.RETRY:
            return False
        load = item.job.kind is Kind.LOAD
        breaker = self._breakers.get if load else self._breakers.put
        if item.attempts >= self._settings.retries or not item.job.open or breaker.is_open:
            return False
        # Full jitter around a doubling mean: repeats of many clients spread out.
        wait_s = self._random.uniform(0, 2) * self._settings.retry_base_s * 2**item.attempts
        if isinstance(error, ThrottledError) and isinstance(error.retry_after_s, (int, float)):
            wait_s = max(wait_s, error.retry_after_s)
        due_s = time.monotonic() + wait_s
        if not due_s < item.job.deadline_s:
            return False
        item.attempts += 1
        self._metrics.count("retries", "get" if load else "put")
        self._work.again(item, due_s)
        return True

    def _judge(self, batch: Batch, breaker: Breaker, side: str, failed: BackendError | None) -> None:
        """Tell the breaker how the call went: one answer that is no failure shows that the store works."""
        if batch.abandoned:
            # The call was late, and was counted as a failure when that was found.
            return
        if failed is None:
            breaker.succeeded()
        elif isinstance(failed, TimedOutError) and batch.deadline_s - batch.started_s < batch.timeout_s / 4:
            # It was begun with next to no time left. That it failed says that there is much to do, not that the store does not work.
            return
        elif breaker.failed():
            self._metrics.count("breaker_opened", side)
            logger.warning("%s: %s breaker opened after failures in a row, the last: %s", self._name, side, text_of(failed))


def _is_unreadable(answer: GetResult) -> bool:
    """Whether the record's place holds something that is no record at all, a directory for example. A store repairs that."""
    return answer.status is GetStatus.FAILED and isinstance(answer.error, InvalidError)
