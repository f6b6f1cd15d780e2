"""The queues between the engine's thread and the Tier's own, and the slots that bound what is in calls."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from kvstore_sdk.backend import Hint
from kvstore_sdk.tier.batch import Batch, Doubt
from kvstore_sdk.tier.jobs import Item, Job, Kind
from kvstore_sdk.tier.probe import Probe
from kvstore_sdk.tier.questions import Questions

__all__ = ["WorkQueue"]

_SETTLE_EVERY_S = 0.1
_GRACE_S = 0.1
"""A call that stops at its deadline returns a little after it; only later is it late."""


class WorkQueue:
    """Probes before loads before stores, bounded; hands out batches together with the slots they need.

    A slot is the right to have one record in a call; in the staged way it is the memory for it too. Stores never take all: a share of
    threads and of slots is left to probes and loads, so that writing cannot hold up a request. A slot belongs to one item until `finish`;
    when the call of a batch is late its slots stay with it (quarantine) until it returns, and slots in doubt until the backend has
    settled them.

    It also counts the threads: `threads` of them, and one more for each call that is late or may wait, as long as the backend allows more
    calls. A call that may wait is begun only where that leaves `threads` to all others. Where calls need no threads, what is counted is
    calls at a time, in units of `depth`.
    """

    def __init__(
        self,
        *,
        slots: int,
        slot_bytes: int,
        threads: int,
        max_threads: int,
        depth: int = 1,
        batch: int,
        max_batch: int,
        batch_bytes: int = 0,
        unfold: Callable[[Job, int], list[Item]],
    ) -> None:
        """
        Args:
            slots: How many slots.
            slot_bytes: What a slot counts in `quarantined_bytes`: the largest record.
            threads: How many threads are to call `next`.
            max_threads: Most threads, late ones included.
            depth: Calls in the place of one, of those that need no thread: what whoever comes by only now and then has to have under way.
            batch: Most items in a batch.
            max_batch: Most keys of a probe in a batch; and most items, in the place of `batch`, where there are `batch_bytes`.
            batch_bytes: A batch has items of so many bytes, or one that is larger, and as many keys of a probe as fit; 0: both are spread
                over the threads.
            unfold: Makes the items of a job; called by a thread that takes work, with the payload bytes of the stores that wait.
        """
        self.slot_bytes = slot_bytes
        self._batch = batch
        self._max_batch = max_batch
        self._batch_bytes = batch_bytes
        self._questions = Questions(max_batch, whole=batch_bytes > 0)
        self._threads = threads
        self._max_threads = max_threads
        # What is left when as many calls are late as threads are needed otherwise.
        self._most_waits = max(0, max_threads - 2 * threads)
        self._depth = depth
        # A quarter of the threads, and at least one where there are two, is never busy with stores; likewise a quarter of the slots.
        self._kept_threads = max(1, threads // 4) if threads > 1 else 0
        self._slots = slots
        self._store_slots = slots - max(1, slots // 4)
        self._free = list(range(slots - 1, -1, -1))
        # Reentrant only because conditions are faster on it.
        self._lock = threading.RLock()
        self._ended = threading.Condition(self._lock)
        # What each thread waits for that has found nothing to do, held until somebody wakes it.
        self._idle: list[threading.Lock] = []
        # A thread was woken for a job, and has not looked yet: it finds those that are put meanwhile too, without another system call.
        self._called = False
        self._unfold = unfold
        self._folded: deque[Job] = deque()
        self._queues: dict[Kind, deque[Item]] = {Kind.LOAD: deque(), Kind.STORE: deque()}
        self._later: list[tuple[float, int, Item]] = []
        self._order = itertools.count()
        self._doubts: list[Doubt] = []
        self._settle_at_s = 0.0
        self._batches: set[Batch] = set()
        # Of those, the ones that may wait for others than the store, and are not late.
        self._waiting = 0
        # How long a call takes, a moving mean of the last few.
        self._typical_s = {Kind.LOAD: 0.0, Kind.STORE: 0.0}
        # Slots of stores, in a call or in doubt.
        self._in_stores: set[int] = set()
        self._alive = 0
        self._stopped = False
        self.queued_store_bytes = 0
        # Chunks of stores that were put, and that were unfolded or dropped. Each is counted by one side alone.
        self._put_chunks = self._unfolded_chunks = 0

    # The engine's side.

    def put_probe(self, namespace: str, probe: Probe, hint: Hint | None = None) -> None:
        """Queue a request's probe, for one call or several."""
        with self._lock:
            self._questions.put(namespace, probe, hint, self._threads)
            # Whoever takes a part of it wakes the next one.
            self._wake(1)

    def put_job(self, job: Job) -> None:
        """Queue a job as a whole: what it takes to unfold it is not paid by the caller.

        Takes no lock: the caller would wait for a thread that holds it and was put to sleep.
        """
        if job.kind is Kind.STORE:
            self._put_chunks += len(job.keys)
        self._folded.append(job)
        if self._idle and not self._called:
            self._called = True
            if not self._wake(1):
                self._called = False

    def put_items(self, kind: Kind, items: Sequence[Item]) -> None:
        """Queue items of jobs that were unfolded."""
        with self._lock:
            self._put(kind, items)
            self._wake(self._takers(items))

    def cancel(self) -> tuple[list[tuple[Probe, Sequence[bytes]]], list[Item]]:
        """Drop what has not begun. Returns it: the caller has to answer the keys of probes and to settle the items."""
        with self._lock:
            self._unfold_all()
            asked = self._questions.clear()
            items = [item for queue in self._queues.values() for item in queue] + [item for _, _, item in self._later]
            for queue in self._queues.values():
                queue.clear()
            self._later.clear()
            self.queued_store_bytes = 0
            return asked, items

    def forget_ended(self) -> None:
        """Drop the items of jobs that were closed, and questions that nobody waits for, so that queues which nobody serves do not grow."""
        with self._lock:
            self._questions.forget_unwanted()
            self._folded = deque(job for job in self._folded if job.open)
            left_chunks = sum(len(job.keys) for job in self._folded if job.kind is Kind.STORE)
            self._unfolded_chunks = self._put_chunks - left_chunks
            for kind, queue in self._queues.items():
                self._queues[kind] = deque(item for item in queue if item.job.open)
            self._later = [entry for entry in self._later if entry[2].job.open]
            heapq.heapify(self._later)
            waiting = (*self._queues[Kind.STORE], *(entry[2] for entry in self._later if entry[2].job.kind is Kind.STORE))
            self.queued_store_bytes = sum(item.payload_bytes for item in waiting)

    def stop(self) -> None:
        """`next` returns None from now on."""
        with self._lock:
            self._stopped = True
            self._wake(len(self._idle))
            self._ended.notify_all()

    def wait_quiet(self, until_s: float) -> bool:
        """Wait until no call is running but those that may wait, not later than `until_s`. Returns whether that is so."""
        with self._lock:
            return self._ended.wait_for(lambda: self._waiting == len(self._batches), max(0.0, until_s - time.monotonic()))

    def wait_changed(self, until_s: float) -> None:
        """Wait until a batch ends, not later than `until_s`."""
        with self._lock:
            self._ended.wait(max(0.0, until_s - time.monotonic()))

    def late(self, now: float) -> list[Batch]:
        """Running calls that have just been found to be late; each is returned once."""
        with self._lock:
            late = [batch for batch in self._batches if self._may_be_late(batch) and now > batch.deadline_s + _GRACE_S]
            for batch in late:
                batch.abandoned = True
                self._waiting -= batch.may_wait
            return late

    def next_deadline_s(self) -> float:
        """When the next running call becomes late; infinity when none runs."""
        with self._lock:
            running = (batch.deadline_s for batch in self._batches if self._may_be_late(batch))
            return min(running, default=float("inf")) + _GRACE_S

    def wants_thread(self) -> bool:
        """Whether one more thread should call `next`. True counts it as started."""
        with self._lock:
            if self._stopped or self._alive >= min(self._max_threads, self._wanted_threads()):
                return False
            self._alive += 1
            return True

    def thread_failed(self) -> None:
        """The thread that was wanted could not be started."""
        with self._lock:
            self._alive -= 1

    @property
    def is_stuck(self) -> bool:
        """Whether every thread sits in a call that is late, or as many calls as there may be are late where none is needed."""
        with self._lock:
            return 0 < (self._alive - self._waiting) * self._depth <= self._late_calls()

    def oldest_store_s(self) -> float:
        """When the store that waits longest was submitted; infinity when none waits. Takes no lock."""
        try:
            return self._queues[Kind.STORE][0].job.submitted_s
        except IndexError:
            # A copy, as threads take jobs away meanwhile.
            return next((job.submitted_s for job in self._folded.copy() if job.kind is Kind.STORE), float("inf"))

    @property
    def folded_store_chunks(self) -> int:
        """Chunks of store jobs that no thread has looked at yet."""
        return self._put_chunks - self._unfolded_chunks

    @property
    def quarantined_bytes(self) -> int:
        """Slots of late calls, and slots in doubt."""
        with self._lock:
            late = sum(len(batch.slots) for batch in self._batches if batch.abandoned)
            return (late + self._doubtful()) * self.slot_bytes

    @property
    def waits(self) -> bool:
        """Whether there is something to be done, now or later, that is in no call."""
        return bool(self._folded or self._questions or self._later or self._doubts) or any(self._queues.values())

    @property
    def in_doubt(self) -> bool:
        with self._lock:
            return self._doubtful() > 0

    @property
    def is_untouched(self) -> bool:
        """Whether no call that is given memory is running, and none is in doubt: nobody reads or writes a record."""
        with self._lock:
            return self._waiting == len(self._batches) and not self._doubts

    # The threads' side.

    def next(self) -> Batch | None:
        """Wait for work. None when the queue is stopped, or one thread less is needed: the caller ends."""
        while True:
            with self._lock:
                # Before it looks: who puts a job from here on wakes somebody.
                self._called = False
                if self._stopped or self._alive > self._wanted_threads():
                    self._alive -= 1
                    # It may have been woken for something: whoever stays looks for it.
                    self._wake(1)
                    return None
                now = time.monotonic()
                if (batch := self._begin(now)) is not None:
                    if self._questions or self._later or self._doubts or any(self._queues.values()):
                        # Each wakes the next one, so that a finished call does not wake them all for nothing; and of those that wait
                        # this one may have been the only one that knew when something is due.
                        self._wake(1)
                    return batch
                bell = threading.Lock()
                bell.acquire()
                self._idle.append(bell)
                # Looked at once more: a job is put without the lock, by somebody who may have found nobody to wake.
                sleep_s = 0.0 if self._folded else self._sleep_s(now)
            self._wait(bell, sleep_s)

    def try_next(self) -> Batch | None:
        """The same for whoever makes calls without threads: does not wait. None when nothing is to be done now."""
        if not self.waits:
            return None
        with self._lock:
            self._alive = min(self._alive, self._wanted_threads())
            if self._stopped or len(self._batches) >= self._alive * self._depth:
                return None
            return self._begin(time.monotonic())

    def again(self, item: Item, not_before_s: float) -> None:
        """Queue an item once more, not before an instant."""
        with self._lock:
            heapq.heappush(self._later, (not_before_s, next(self._order), item))
            if item.job.kind is Kind.STORE:
                self.queued_store_bytes += item.payload_bytes
            self._wake(1)

    def finish(self, batch: Batch, doubts: Sequence[Doubt] = (), settled: Sequence[Doubt] = ()) -> None:
        """The call of a batch is over: free its slots, except those in doubt; and those whose doubt is settled."""
        with self._lock:
            self._batches.discard(batch)
            self._waiting -= batch.may_wait and not batch.abandoned
            held = {doubt.slot for doubt in doubts}
            self._release(slot for slot in batch.slots if slot not in held)
            self._doubts.extend(doubts)
            if batch.doubts:
                over = {doubt.slot for doubt in settled}
                self._release(over)
                self._doubts.extend(doubt for doubt in batch.doubts if doubt.slot not in over)
                self._settle_at_s = time.monotonic() + _SETTLE_EVERY_S
            if batch.kind is not None:
                took_s = time.monotonic() - batch.started_s
                self._typical_s[batch.kind] += 0.2 * (took_s - self._typical_s[batch.kind])
            # Whoever ends a batch asks for the next one, and wakes others for what is left.
            self._ended.notify_all()

    def _wait(self, bell: threading.Lock, sleep_s: float) -> None:
        """Until somebody wakes whoever waits for `bell`, or for so long."""
        if not bell.acquire(timeout=sleep_s):
            # Woken at the same moment it is no longer in there; it looks again in any case.
            with contextlib.suppress(ValueError):
                self._idle.remove(bell)

    def _wake(self, number: int) -> int:
        """Have so many threads, of those that wait, look again. Takes no lock; what they are to find has to be there before.
        Returns how many were woken.

        A thread that was woken looks before it waits again or ends, and one that ends wakes another: so nothing is put in vain.
        """
        idle = self._idle
        woken = 0
        while woken < number and idle:
            try:
                idle.pop().release()
            except IndexError:
                # Somebody else has just taken the last one.
                break
            woken += 1
        return woken

    # Inside, with the lock held.

    def _begin(self, now: float) -> Batch | None:
        self._unfold_all()
        self._due(now)
        batch = self._pick(now)
        if batch is not None:
            self._batches.add(batch)
            self._waiting += batch.may_wait
            batch.started_s = now
        return batch

    def _release(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._in_stores.discard(slot)
            self._free.append(slot)

    def _late_calls(self) -> int:
        return sum(batch.abandoned for batch in self._batches)

    def _wanted_threads(self) -> int:
        return self._threads + self._late_calls() + min(self._most_waits, self._waiting + self._questions.patient)

    def _doubtful(self) -> int:
        return len(self._doubts) + sum(len(batch.doubts) for batch in self._batches)

    @staticmethod
    def _may_be_late(batch: Batch) -> bool:
        return not (batch.abandoned or batch.returned) and batch.deadline_s > 0.0

    def _put(self, kind: Kind, items: Sequence[Item]) -> None:
        self._queues[kind].extend(items)
        if kind is Kind.STORE:
            self.queued_store_bytes += sum(item.payload_bytes for item in items)

    def _goes_with(self, item: Item, first: Item, room_bytes: int, now: float) -> bool:
        """Whether an item may be in the batch of another one, which has room for so many bytes."""
        if self._batch_bytes and item.payload_bytes > room_bytes:
            return False
        if item.job is first.job:
            return True
        # A batch has the time of the item that has least.
        left_s, firsts_s = item.job.deadline_s - now, first.job.deadline_s - now
        return left_s <= 2 * firsts_s and firsts_s <= 2 * left_s

    def _takers(self, items: Sequence[Item]) -> int:
        """How many threads find a part of these, if they are woken now. Each that takes one wakes the next."""
        if not self._batch_bytes:
            return min(self._threads, len(items))
        return min(self._threads, -(-sum(item.payload_bytes for item in items) // self._batch_bytes))

    def _unfold_all(self) -> None:
        while self._folded:
            job = self._folded.popleft()
            if job.kind is Kind.STORE:
                self._unfolded_chunks += len(job.keys)
            items = self._unfold(job, self.queued_store_bytes)
            self._put(job.kind, items)
            if len(items) > 1:
                # Whoever unfolds takes one part; the others are woken for the rest.
                self._wake(self._takers(items) - 1)

    def _due(self, now: float) -> None:
        while self._later and self._later[0][0] <= now:
            item = heapq.heappop(self._later)[2]
            self._queues[item.job.kind].append(item)

    def _pick(self, now: float) -> Batch | None:
        # The threads that are in no call which waits for others than the store.
        free = self._alive - self._waiting
        if (batch := self._questions.take(free - self._late_calls() > self._threads)) is not None:
            return batch
        if self._doubts and now >= self._settle_at_s and not any(batch.doubts for batch in self._batches):
            doubts, self._doubts = self._doubts[: self._max_batch], self._doubts[self._max_batch :]
            return Batch(doubts=doubts, operation="settle")
        stores = sum(batch.kind is Kind.STORE for batch in self._batches)
        # Threads in stores come for their part later, if they do: half of them count.
        if batch := self._take(Kind.LOAD, len(self._free), max(1, self._threads - stores // (2 * self._depth)), now):
            return batch
        threads = max(1, free - self._kept_threads)
        if stores < threads * self._depth:
            return self._take(Kind.STORE, min(len(self._free), self._store_slots - len(self._in_stores)), threads, now)
        return None

    def _take(self, kind: Kind, slots: int, threads: int, now: float) -> Batch | None:
        queue = self._queues[kind]
        if slots < 1 or not queue:
            return None
        if self._batch_bytes:
            # Not most of the slots either, however small the records: what is late holds its slots.
            limit = min(slots, self._max_batch, max(self._batch, self._slots // 4))
        else:
            # Enough for every thread to have a part, so that a job of a few records is not done by one thread alone.
            limit = min(slots, self._batch, -(-len(queue) // threads))
        room_bytes = self._batch_bytes
        items: list[Item] = []
        keys: set[bytes] = set()
        aside: list[Item] = []
        namespace = ""
        is_store, typical_s = kind is Kind.STORE, self._typical_s[kind]
        while queue and len(items) < limit:
            if items and not self._goes_with(queue[0], items[0], room_bytes, now):
                break
            item = queue.popleft()
            job = item.job
            if is_store:
                self.queued_store_bytes -= item.payload_bytes
            # Closed, or about to be: there is no time left for a call, and that it fails would be no news of the store.
            if not job.open or job.deadline_s <= now + min(typical_s, job.timeout_s / 4):
                continue
            # No two items of one name in a call, and no two namespaces.
            if item.key in keys or (namespace and job.namespace != namespace):
                aside.append(item)
                continue
            namespace = job.namespace
            keys.add(item.key)
            room_bytes -= item.payload_bytes
            items.append(item)
        for item in reversed(aside):
            queue.appendleft(item)
            if is_store:
                self.queued_store_bytes += item.payload_bytes
        if not items:
            return None
        taken = [self._free.pop() for _ in items]
        if is_store:
            self._in_stores.update(taken)
        return Batch(items=items, slots=taken, kind=kind, operation="get" if kind is Kind.LOAD else "put", namespace=namespace)

    def _sleep_s(self, now: float) -> float:
        wakes = [self._later[0][0]] if self._later else []
        if self._doubts and not any(batch.doubts for batch in self._batches):
            wakes.append(self._settle_at_s)
        return min(threading.TIMEOUT_MAX, max(0.0, min(wakes) - now)) if wakes else -1
