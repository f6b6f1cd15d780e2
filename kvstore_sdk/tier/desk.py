"""The jobs that the engine has submitted and not got back yet."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable

from kvstore_sdk.format import record_bytes
from kvstore_sdk.keys import GROUP_BYTES
from kvstore_sdk.tier.admission import Admission
from kvstore_sdk.tier.gate import Gate
from kvstore_sdk.tier.jobs import Ending, Item, Job, Kind, Outcome
from kvstore_sdk.tier.lookups import LookupTable
from kvstore_sdk.tier.metrics import TierMetrics
from kvstore_sdk.tier.rows import Rows
from kvstore_sdk.tier.settings import TierSettings
from kvstore_sdk.tier.types import EngineMemory, JobResult, RecordMemory
from kvstore_sdk.tier.work import WorkQueue

__all__ = ["Desk", "Sizes"]

logger = logging.getLogger(__name__)

_MAX_GROUPS = 65_536
"""Far more than any model has; bounds what keys with made-up groups can make us remember."""
_COUNTER = {Kind.LOAD: "loads", Kind.STORE: "stores"}
_SECONDS = {Kind.LOAD: "load_seconds", Kind.STORE: "store_seconds"}
_BYTES = {Kind.LOAD: "load_bytes", Kind.STORE: "store_bytes"}


class Sizes:
    """How long the chunk of a key is; thread-safe."""

    def __init__(self, memory: EngineMemory | RecordMemory, slot_bytes: int, max_key_bytes: int) -> None:
        self._memory = memory
        self._slot_bytes = slot_bytes
        self._max_key_bytes = max_key_bytes
        self._known: dict[bytes, int] = {}

    def payload_bytes(self, key: bytes) -> int:
        """Length of the chunk of this key; 0 when there can be none."""
        if not GROUP_BYTES < len(key) <= self._max_key_bytes:
            return 0
        size = self._known.get(key[-GROUP_BYTES:])
        return self._learn(key[-GROUP_BYTES:]) if size is None else size

    def _learn(self, group: bytes) -> int:
        if len(self._known) >= _MAX_GROUPS:
            return 0
        size = self._memory.payload_bytes(int.from_bytes(group, "big"))
        found = size if size and record_bytes(size) <= self._slot_bytes else 0
        self._known[group] = found
        return found


class Desk:
    """Takes jobs in, and gives out the result of each one once.

    Used by one thread at a time, except for `unfold` and `settle`, which are thread-safe. Every chunk of every job is counted once, under
    the result it ended with. Jobs are taken apart by the threads that work on them: the engine's own thread pays for a job, not for each of
    its chunks.
    """

    def __init__(
        self,
        *,
        name: str,
        sizes: Sizes,
        largest_payload: int,
        row_count: int,
        table: LookupTable,
        gate: Gate,
        admission: Admission,
        work: WorkQueue,
        settings: TierSettings,
        metrics: TierMetrics,
        may_store: bool,
        ended: Callable[[Job], None],
    ) -> None:
        """`ended` hears of each job that has its result, once, from any thread; whoever it tells of them gives them to `take`."""
        self._name = name
        self._sizes = sizes
        self._largest_payload = largest_payload
        # The other quarter is for loads, and for what the engine stores into its own host memory meanwhile: a store that hangs keeps rows
        # in use for as long as `store_timeout_s`.
        self._max_store_rows = max(1, row_count - max(1, row_count // 4))
        self._table = table
        self._gate = gate
        self._admission = admission
        self._work = work
        self._settings = settings
        self._metrics = metrics
        self._may_store = may_store
        self._closed = False
        self._jobs: dict[int, Job] = {}
        self._deadlines: list[tuple[float, int, Job]] = []
        self._order = itertools.count()
        self._rows = Rows()
        # Jobs that were given out, and whose rows are still theirs: those are let go when the next job comes.
        self._given: list[Job] = []
        self._ended = ended
        self.released: deque[Item] = deque()
        """Items whose rows were reported as held and are not any more, and that `take_released` has not given out yet."""

    def __len__(self) -> int:
        """Jobs that were submitted and not given out yet."""
        return len(self._jobs)

    @property
    def has_open(self) -> bool:
        """Whether a job has not ended."""
        return any(job.open for job in self._jobs.values())

    @property
    def rows_in_use(self) -> int:
        """Rows that jobs use which were not given out, or that are held."""
        self._let_go()
        return len(self._rows)

    def store(self, job: Job) -> None:
        """Take in a store, and queue it."""
        if not self._start(job):
            return
        if not self._may_store:
            self._end(job, Outcome.SKIPPED, "skipped")
            return
        self._let_go()
        job.room = min(len(job.keys), self._room_for_stores())
        if self._closed or (job.room <= 0 and job.keys):
            self._end(job, Outcome.FAILED, "shed")
        else:
            self._queue(job, self._settings.store_timeout_s, wary=self._gate.stores_warily)

    def load(self, job: Job) -> None:
        """Take in a load, and queue it."""
        if not self._start(job):
            return
        self._let_go()
        if self._closed:
            self._end(job, Outcome.FAILED, "refused")
        else:
            self._queue(job, self._settings.load_timeout_s, wary=self._gate.loads_warily)

    def unfold(self, job: Job, queued_store_bytes: int, wary: bool = False) -> list[Item]:
        """The items of a job that a backend is needed for; the others end here.

        Args:
            job: Any; no items when it is closed.
            queued_store_bytes: Payload bytes of the stores that wait.
            wary: The store does not work: nothing passes but a trial. By the engine's thread only.
        """
        if not job.open:
            return []
        try:
            stores = job.kind is Kind.STORE
            room = self._settings.max_queued_store_bytes - queued_store_bytes
            items, endings = self._unfold_store(job, room, wary) if stores else self._unfold_load(job, wary)
            self.settle(endings)
            return items
        except Exception:
            # The engine's memory does not know its own groups. Not a reason to lose a thread, or the job.
            logger.exception("%s: job %d cannot be taken apart", self._name, job.job_id)
            self._end(job, Outcome.FAILED, "failed")
            return []

    def settle(self, endings: Iterable[Ending]) -> None:
        """Keys of jobs have ended, and with its last one a job has. Those that had ended before, or whose job had, are ignored."""
        of_jobs: dict[Job, list[Ending]] = {}
        for ending in endings:
            of_jobs.setdefault(ending.job, []).append(ending)
        for job, its_endings in of_jobs.items():
            counted = job.settle(its_endings)
            for result, number in Counter([ending.result for ending in counted]).items():
                self._metrics.count(_COUNTER[job.kind], result, by=number)
            if moved_bytes := sum(ending.moved_bytes for ending in counted):
                self._metrics.count(_BYTES[job.kind], by=moved_bytes)
            # Last: whoever has the result of a job can see what was counted.
            job.close(self._report)

    def next_deadline_s(self) -> float:
        """When the next job has to end; infinity when there is none."""
        return self._deadlines[0][0] if self._deadlines else float("inf")

    def expire(self, now: float) -> bool:
        """End the jobs whose deadline has passed. Returns whether there were any."""
        expired = False
        while self._deadlines and (self._deadlines[0][0] <= now or not self._deadlines[0][2].open):
            expired |= self._time_out(heapq.heappop(self._deadlines)[2])
        if len(self._deadlines) > 2 * len(self._jobs) + 64:
            # Mostly jobs that ended long before their deadlines.
            self._deadlines = [entry for entry in self._deadlines if entry[2].open]
            heapq.heapify(self._deadlines)
        return expired

    def expire_all(self) -> None:
        """End every job as it is."""
        for job in self._jobs.values():
            self._time_out(job)

    def close(self) -> None:
        """From now on every store and load fails at once."""
        self._closed = True

    def give_out(self, job: Job) -> JobResult:
        """The result of a job that has ended, to be given to the engine now. Once for each."""
        del self._jobs[job.job_id]
        self._given.append(job)
        # Only a call that began while the job was open touches a row: what is not touched now never will be.
        if job.touched and (held := job.report()):
            self._let_go()
            self._rows.hold(job.kind, held)
            return dataclasses.replace(job.result, held=held)
        return job.result

    def take_released(self) -> list[int]:
        """Rows that results of `take_finished` reported as held, and that no call touches any more."""
        self._let_go()
        rows = []
        while self.released:
            item = self.released.popleft()
            self._rows.release(item.job.kind, (item.row,))
            rows.append(item.row)
        return rows

    def _start(self, job: Job) -> bool:
        if len(job.keys) != len(job.rows):
            raise ValueError(f"{self._name}: job {job.job_id} has {len(job.keys)} keys and {len(job.rows)} rows")
        if job.job_id in self._jobs:
            logger.error("%s: job %d was submitted twice; the second one is ignored", self._name, job.job_id)
            return False
        self._jobs[job.job_id] = job
        return True

    def _queue(self, job: Job, timeout_s: float, *, wary: bool) -> None:
        if not job.keys:
            self._end(job, Outcome.DONE, "")
            return
        job.refused = self._rows.conflicts(job.kind, job.rows[: job.room])
        job.timeout_s = timeout_s + len(job.keys) * self._largest_payload / self._settings.min_bytes_per_s
        job.deadline_s = job.submitted_s + job.timeout_s
        heapq.heappush(self._deadlines, (job.deadline_s, next(self._order), job))
        job.claimed = tuple(row for place, row in enumerate(job.rows[: job.room]) if place not in job.refused)
        self._rows.hold(job.kind, job.claimed)
        if not wary:
            self._work.put_job(job)
        elif items := self.unfold(job, self._work.queued_store_bytes, wary=True):
            # By ourselves: the threads that could say no may all be in calls that do not return.
            self._work.put_items(job.kind, items)

    def _room_for_stores(self) -> int:
        """How many chunks may be stored now, as if each were of the largest group.

        Bounded by bytes in the queue, by the engine's rows, of which stores must leave enough for everything else, and by time: while the
        first in the queue has waited for long, the store does not keep up.
        """
        work, settings = self._work, self._settings
        if time.monotonic() - work.oldest_store_s() > settings.max_store_wait_s:
            return 0
        room_bytes = settings.max_queued_store_bytes - work.queued_store_bytes - work.folded_store_chunks * self._largest_payload
        return min(room_bytes // self._largest_payload, self._max_store_rows - self._rows.storing)

    def _unfold_store(self, job: Job, room: int, wary: bool) -> tuple[list[Item], list[Ending]]:
        items: list[Item] = []
        endings: list[Ending] = []
        table, admission, payload_bytes = self._table, self._admission, self._sizes.payload_bytes
        for place, key in enumerate(job.keys):
            size = payload_bytes(key)
            if not size or place in job.refused:
                endings.append(Ending(job, place, Outcome.FAILED, "refused"))
            elif table.is_present(key):
                endings.append(Ending(job, place, Outcome.DONE, "exists"))
            elif not (table.is_bad(key) or admission.touch(key)):
                endings.append(Ending(job, place, Outcome.SKIPPED, "not_admitted"))
            elif place >= job.room or size > room or (wary and not self._gate.may_store()):
                endings.append(Ending(job, place, Outcome.FAILED, "shed"))
            else:
                room -= size
                items.append(Item(job, place, size, replace=table.is_bad(key), trial=wary))
        return items, endings

    def _unfold_load(self, job: Job, wary: bool) -> tuple[list[Item], list[Ending]]:
        items: list[Item] = []
        endings: list[Ending] = []
        payload_bytes = self._sizes.payload_bytes
        for place, key in enumerate(job.keys):
            size = payload_bytes(key)
            if not size or place in job.refused:
                endings.append(Ending(job, place, Outcome.FAILED, "refused"))
            elif wary and not self._gate.may_load(key):
                self._table.lost(key)
                endings.append(Ending(job, place, Outcome.FAILED, "refused"))
            else:
                items.append(Item(job, place, size, trial=wary))
        return items, endings

    def _time_out(self, job: Job) -> bool:
        rest = self._end(job, Outcome.FAILED, "timeout")
        if job.kind is Kind.LOAD:
            for key in rest:
                self._table.lost(key)
        return bool(rest)

    def _let_go(self) -> None:
        """The rows of jobs that were given out are free for others."""
        if self._given:
            for job in self._given:
                self._rows.release(job.kind, job.claimed)
            self._given.clear()

    def _report(self, job: Job) -> None:
        self._metrics.observe(_SECONDS[job.kind], job.result.elapsed_s)
        self._ended(job)

    def _end(self, job: Job, outcome: Outcome, result: str) -> list[bytes]:
        """Close a job as it is. Returns the keys that had not ended."""
        rest = job.end(outcome, self._report)
        if rest:
            self._metrics.count(_COUNTER[job.kind], result, by=len(rest))
        return rest
