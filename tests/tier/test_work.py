"""No slot is lost or given out twice, and stores never take all, whatever happens in whatever order."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tier_bench import key
from work_bench import BYTES, FOREVER_S, NothingToDoError, Queue, job, probe_of

from kvstore_sdk.backend import Hint
from kvstore_sdk.tier import work as module
from kvstore_sdk.tier.batch import Batch, Doubt
from kvstore_sdk.tier.jobs import Item, Job, Kind, Outcome
from kvstore_sdk.tier.probe import Probe


class QueueAgainstItsPromises(RuleBasedStateMachine):
    """Drives a queue as a Tier and its threads do, in any order, and keeps book of every item and every slot."""

    @initialize(
        slots=st.integers(2, 9), threads=st.integers(1, 5), more=st.integers(0, 9), batch=st.integers(1, 5), whole=st.integers(0, 4)
    )
    def begin(self, slots: int, threads: int, more: int, batch: int, whole: int) -> None:
        self.now_s = 100.0
        # Jobs take their times from the real clock, and live for ever; the queue's own waits are turned by the machine.
        module.time = SimpleNamespace(monotonic=lambda: self.now_s)  # type: ignore[assignment]
        self.slots, self.threads = slots, threads
        self.batch = min(3, whole, max(batch, slots // 4)) if whole else batch
        self.queue = Queue(slots=slots, threads=threads, max_threads=threads + more, batch=batch, batch_bytes=whole * BYTES)
        self.numbers = itertools.count(1)
        self.jobs: list[Job] = []
        self.running: list[Batch] = []
        self.late: set[int] = set()
        self.doubts: dict[object, tuple[int, Kind]] = {}
        # Items that wait, by (job, place), and those that were in a batch once.
        self.waiting: set[tuple[int, int]] = set()
        self.asked: list[tuple[Probe, bytes]] = []
        # Those of them whose calls may wait.
        self.patient: set[Probe] = set()

    def teardown(self) -> None:
        if not hasattr(self, "queue"):
            return
        try:
            self.everything_ends()
        finally:
            module.time = time

    def everything_ends(self) -> None:
        """LEAK-03: when all has ended, every slot is free."""
        for batch in list(self.running):
            self.queue.finish(batch)
        self.running.clear()
        self.waiting.clear()
        self.queue.cancel()
        # The first to look for work may be threads that are too many by now, and end.
        for _ in range(100):
            self.now_s += 1.0
            if (batch := self.queue.take()) is not None:
                self.queue.finish(batch, settled=batch.doubts)
        assert sorted(self.queue._free) == list(range(self.slots))
        assert not self.queue._in_stores
        assert self.queue.quarantined_bytes == self.queue.queued_store_bytes == 0
        assert self.queue.is_untouched

    # What a tier does.

    @rule(kind=st.sampled_from(Kind), chunks=st.lists(st.integers(0, 6), min_size=1, max_size=8), namespace=st.sampled_from("nm"))
    def put_job(self, kind: Kind, chunks: list[int], namespace: str) -> None:
        made = job(next(self.numbers), kind, chunks, namespace)
        self.jobs.append(made)
        self.queue.put_job(made)
        self.waiting |= {(made.job_id, place) for place in range(len(chunks))}

    @rule(chunks=st.lists(st.integers(0, 6), min_size=1, max_size=8, unique=True), wait_s=st.sampled_from([None, 0.0, 5.0, 5.0]))
    def put_probe(self, chunks: list[int], wait_s: float | None) -> None:
        made = probe_of(*chunks)
        self.asked += [(made, of) for of in made.keys]
        if wait_s:
            self.patient.add(made)
        self.queue.put_probe("n", made, None if wait_s is None else Hint("peer", wait_s))
        self.queue.start_threads()

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def nobody_waits_for_an_answer(self, data: st.DataObject) -> None:
        probe, of = data.draw(st.sampled_from(self.asked))
        probe.over.add(of)

    @precondition(lambda self: any(one.open for one in self.jobs))
    @rule(data=st.data(), forget=st.booleans())
    def a_job_ends(self, data: st.DataObject, forget: bool) -> None:
        ended = data.draw(st.sampled_from([one for one in self.jobs if one.open]))
        ended.end(Outcome.FAILED, lambda result: None)
        self.waiting = {item for item in self.waiting if item[0] != ended.job_id}
        if forget:
            self.queue.forget_ended()

    @rule()
    def cancel(self) -> None:
        asked, items = self.queue.cancel()
        assert {(item.job.job_id, item.place) for item in items if item.job.open} == self.waiting
        assert len(items) == len({(item.job.job_id, item.place) for item in items})
        # All that were not given out, also those that nobody waits for any more.
        assert set(self.wanted()) <= {(probe, of) for probe, keys in asked for of in keys}
        self.waiting.clear()
        self.asked.clear()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def a_call_is_late(self, data: st.DataObject) -> None:
        batch = data.draw(st.sampled_from(self.running))
        batch.deadline_s = self.now_s - 1.0
        found = self.queue.late(self.now_s)
        assert found == ([] if id(batch) in self.late else [batch])
        self.late.add(id(batch))
        self.queue.start_threads()

    # What its threads do.

    @precondition(lambda self: len(self.running) < self.queue._alive)
    @rule()
    def take(self) -> None:
        free = len(self.queue._free)
        before = self.queue._alive
        batch = self.queue.take()
        if batch is None:
            if self.queue._alive == before and not self.is_held_up():
                loads = {item for item in self.waiting if self.kind(item) is Kind.LOAD}
                assert not (free and loads), "a load waited although a slot was free"
                waits = self.wanted()
                assert not [probe for probe, _ in waits if probe not in self.patient], "a probe waited"
                assert not (waits and self.idle() > self.threads), "a question that may wait had no thread, though there was one"
            return
        self.running.append(batch)
        assert (batch.probe is not None, bool(batch.doubts), bool(batch.items)).count(True) == 1
        if batch.probe is not None:
            assert 0 < len(batch.keys) <= 3
            assert batch.probe.over.isdisjoint(batch.keys)
            assert batch.operation == "exists"
            assert batch.may_wait == (batch.probe in self.patient)
            assert not batch.may_wait or self.idle() >= self.threads, "a call that may wait left too few threads to the others"
            self.asked = [(probe, of) for probe, of in self.asked if probe is not batch.probe or of not in batch.keys]
        elif batch.doubts:
            assert batch.operation == "settle"
        else:
            self.check_items(batch, free)

    def check_items(self, batch: Batch, free: int) -> None:
        assert 0 < len(batch.items) <= self.batch
        assert len(batch.slots) == len(batch.items) <= free
        assert len({item.key for item in batch.items}) == len(batch.items), "two items of one name in a call"
        assert {(item.job.namespace, item.job.kind) for item in batch.items} == {(batch.namespace, batch.kind)}
        for item in batch.items:
            assert item.job.open
            self.waiting.remove((item.job.job_id, item.place))
        if batch.kind is Kind.STORE:
            not_due = {(item.job.job_id, item.place) for _, _, item in self.queue._later}
            assert not [item for item in self.waiting - not_due if self.kind(item) is Kind.LOAD], "a store went before a load"
            stores = [other for other in self.running if other.kind is Kind.STORE]
            # One thread is left to loads, where there is more than one.
            others = self.queue._alive - self.waiting_calls()
            assert len(stores) < others or others == 1
            assert self.store_slots() <= self.slots - max(1, self.slots // 4), "stores took the last share of the slots"

    def wanted(self) -> list[tuple[Probe, bytes]]:
        return [(probe, of) for probe, of in self.asked if of not in probe.over]

    def store_slots(self) -> int:
        running = sum(len(batch.slots) for batch in self.running if batch.kind is Kind.STORE)
        return running + sum(kind is Kind.STORE for _, kind in self.doubts.values())

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        batch = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.late.discard(id(batch))
        if batch.doubts:
            settled = data.draw(st.lists(st.sampled_from(list(batch.doubts)), unique_by=id))
            for doubt in settled:
                del self.doubts[doubt.ticket]
            self.queue.finish(batch, settled=settled)
            self.now_s += 0.2
            return
        doubts = []
        for item, slot in zip(batch.items, batch.slots, strict=True):
            fate = data.draw(st.sampled_from(["done", "done", "doubt", "again"]))
            if fate == "doubt":
                doubts.append(Doubt(object(), slot))
                self.doubts[doubts[-1].ticket] = (slot, item.job.kind)
            if fate == "again":
                self.queue.again(item, self.now_s + data.draw(st.sampled_from([0.0, 0.5])))
                if item.job.open:
                    self.waiting.add((item.job.job_id, item.place))
        self.queue.finish(batch, doubts)

    @rule(seconds=st.sampled_from([0.05, 0.3, 1.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    def waiting_calls(self) -> int:
        return sum(batch.may_wait and not batch.abandoned for batch in self.running)

    def idle(self) -> int:
        """Threads that are in no call that may wait, or is late."""
        return self.queue._alive - self.waiting_calls() - sum(batch.abandoned for batch in self.running)

    def is_held_up(self) -> bool:
        """Whether items wait for their time."""
        return any(due > self.now_s for due, _, _ in self.queue._later)

    def kind(self, item: tuple[int, int]) -> Kind:
        return self.jobs[item[0] - 1].kind

    # What is true all the time.

    @invariant()
    def every_slot_is_in_one_place(self) -> None:
        if not hasattr(self, "queue"):
            return
        places = Counter(self.queue._free)
        places.update(slot for batch in self.running for slot in batch.slots)
        places.update(slot for slot, _ in self.doubts.values())
        assert places == Counter(range(self.slots))

    @invariant()
    def what_waits_is_counted(self) -> None:
        if not hasattr(self, "queue"):
            return
        stores = [item for queue in self.queue._queues.values() for item in queue if item.job.kind is Kind.STORE]
        stores += [item for _, _, item in self.queue._later if item.job.kind is Kind.STORE]
        assert self.queue.queued_store_bytes == BYTES * len(stores)
        assert self.queue.folded_store_chunks == sum(len(one.keys) for one in self.queue._folded if one.kind is Kind.STORE)

    @invariant()
    def what_is_out_of_use_is_counted(self) -> None:
        if not hasattr(self, "queue"):
            return
        late = sum(len(batch.slots) for batch in self.running if batch.abandoned)
        assert self.queue.quarantined_bytes == 4096 * (late + len(self.doubts))
        assert self.queue.in_doubt == bool(self.doubts)
        assert self.queue.is_untouched == (len(self.running) == self.waiting_calls() and not self.doubts)
        assert self.queue._alive <= self.queue._max_threads
        others = self.queue._alive - self.waiting_calls()
        assert others >= self.threads, "calls that may wait took threads from the others"
        assert self.queue.is_stuck == (0 < others <= sum(batch.abandoned for batch in self.running))


TestQueueAgainstItsPromises = QueueAgainstItsPromises.TestCase


TestQueueAgainstItsPromises.settings = settings(max_examples=150, stateful_step_count=40)


def test_probes_go_before_loads_before_stores(queue: Queue) -> None:
    """LIV-09"""
    queue.put_job(job(1, Kind.STORE, [1]))
    queue.put_job(job(2, Kind.LOAD, [2]))
    queue.put_probe("n", probe_of(3))
    assert [queue.take().operation for _ in range(3)] == ["exists", "get", "put"]


def test_stores_leave_a_quarter_of_threads_and_slots(queue: Queue) -> None:
    """LIV-09: writing cannot hold up a request."""
    queue.put_job(job(1, Kind.STORE, list(range(100))))
    taken = list(iter(queue.take, None))
    assert len(taken) <= 3
    assert sum(len(batch.slots) for batch in taken) == 6
    queue.put_job(job(2, Kind.LOAD, [200, 201]))
    load = queue.take()
    assert load.kind is Kind.LOAD
    assert len(load.slots) == 1, "the others of the two slots are for the next thread"


def test_calls_that_may_wait_give_no_thread_to_stores() -> None:
    queue = Queue(slots=100, threads=4, max_threads=12, batch=1)
    queue.put_probe("n", probe_of(*range(9)), Hint("peer", 5.0))
    queue.start_threads()
    assert [queue.take().may_wait for _ in range(3)] == [True] * 3
    queue.put_job(job(1, Kind.STORE, list(range(100))))
    assert len(list(iter(queue.take, None))) == 3


def test_a_call_that_may_wait_does_not_hide_that_all_others_are_late() -> None:
    queue = Queue(threads=2, max_threads=5, batch=1)
    queue.put_probe("n", probe_of(0), Hint("peer", 5.0))
    queue.start_threads()
    assert queue.take().may_wait
    queue.put_job(job(1, Kind.LOAD, list(range(4))))
    for _ in range(2):
        assert not queue.is_stuck
        for batch in [queue.take() for _ in range(2)]:
            batch.deadline_s = 1.0
        assert len(queue.late(FOREVER_S)) == 2
        queue.start_threads()
    assert queue.is_stuck


def test_the_only_thread_stores_too() -> None:
    queue = Queue(threads=1, max_threads=1)
    queue.put_job(job(1, Kind.STORE, [1]))
    assert queue.take().kind is Kind.STORE


def test_slots_of_stores_in_doubt_still_count_as_stores(queue: Queue) -> None:
    queue.put_job(job(1, Kind.STORE, list(range(100))))
    for batch in list(iter(queue.take, None)):
        queue.finish(batch, [Doubt(slot, slot) for slot in batch.slots])
    assert queue.take().operation == "settle"
    assert queue.take() is None
    assert len(queue._free) == 2


def test_an_item_that_has_no_time_left_is_not_called_for(queue: Queue) -> None:
    queue.put_job(job(1, Kind.LOAD, [1], timeout_s=-0.001))
    queue.put_job(job(2, Kind.LOAD, [2]))
    assert [item.key for item in queue.take().items] == [key(2)]
    assert queue.take() is None


def test_a_retry_comes_when_it_is_due_and_not_before(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = time.monotonic()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s))
    item = Item(job(1, Kind.STORE, [1]), 0, BYTES)
    queue.again(item, now_s + 0.5)
    assert queue.take() is None
    assert queue.queued_store_bytes == BYTES
    now_s += 0.5
    assert queue.take().items == [item]


def test_a_retry_of_a_job_that_ended_is_dropped(queue: Queue) -> None:
    ended = job(1, Kind.STORE, [1])
    queue.again(Item(ended, 0, BYTES), 0.0)
    ended.end(Outcome.FAILED, lambda result: None)
    assert queue.take() is None
    assert queue.queued_store_bytes == 0


def test_a_call_that_has_no_deadline_yet_is_not_late(queue: Queue) -> None:
    queue.put_job(job(1, Kind.LOAD, [1]))
    batch = queue.take()
    assert not queue.late(time.monotonic() + FOREVER_S)
    assert queue.next_deadline_s() == float("inf")
    batch.deadline_s = time.monotonic()
    assert queue.next_deadline_s() > time.monotonic()
    # A little grace for a call that stops at its deadline.
    assert not queue.late(batch.deadline_s + 0.05)
    assert queue.late(batch.deadline_s + 0.2) == [batch]
    assert not queue.late(batch.deadline_s + 0.2)


def test_threads_stand_in_for_late_calls_and_leave_when_they_return(queue: Queue) -> None:
    for number in range(4):
        queue.put_job(job(number, Kind.LOAD, [number]))
    hung = [queue.take() for _ in range(4)]
    for batch in hung:
        batch.deadline_s = 1.0
    assert not queue.is_stuck
    assert not queue.wants_thread()
    assert len(queue.late(time.monotonic())) == 4
    assert queue.is_stuck
    assert [queue.wants_thread() for _ in range(4)] == [True, True, False, False]
    assert not queue.is_stuck
    for batch in hung:
        queue.finish(batch)
    # Six threads, two too many: the first two that look for work end.
    assert [queue.next() for _ in range(2)] == [None, None]
    with pytest.raises(NothingToDoError):
        queue.next()
    assert not queue.wants_thread()


def test_hung_stores_do_not_keep_others_from_storing_as_long_as_there_are_threads(queue: Queue) -> None:
    queue.put_job(job(1, Kind.STORE, list(range(3))))
    hung = list(iter(queue.take, None))
    assert len(hung) == 3
    queue.put_job(job(2, Kind.STORE, [9]))
    assert queue.take() is None
    for batch in hung:
        batch.deadline_s = 1.0
    queue.late(time.monotonic())
    queue.start_threads()
    assert queue.take().kind is Kind.STORE


def test_queues_that_nobody_serves_do_not_grow(queue: Queue) -> None:
    for number in range(200):
        ended = job(number, random.Random(number).choice(list(Kind)), [number])
        queue.put_job(ended)
        probe = probe_of(number)
        queue.put_probe("n", probe)
        queue.again(Item(ended, 0, BYTES), FOREVER_S)
        ended.end(Outcome.FAILED, lambda result: None)
        probe.over.update(probe.keys)
        queue.forget_ended()
    assert not queue._questions
    assert not queue._folded
    assert not queue._later
    assert not any(queue._queues.values())
    assert queue.queued_store_bytes == queue.folded_store_chunks == 0


def test_waiting_for_quiet_is_bounded(queue: Queue) -> None:
    queue.put_job(job(1, Kind.LOAD, [1]))
    batch = queue.take()
    began_s = time.monotonic()
    assert not queue.wait_quiet(began_s + 0.05)
    assert time.monotonic() - began_s > 0.04
    queue.finish(batch)
    assert queue.wait_quiet(time.monotonic())


def test_a_stopped_queue_gives_nothing_out(queue: Queue) -> None:
    queue.put_job(job(1, Kind.LOAD, [1]))
    queue.stop()
    assert queue.next() is None
    assert not queue.wants_thread()
