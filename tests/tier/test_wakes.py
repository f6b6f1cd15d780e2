"""Whatever is put is taken by a thread, whenever that goes to wait, is woken, or ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tier_bench import LIMIT_S
from work_bench import BYTES, Queue, all_items, job, probe_of

from kvstore_sdk.backend import Hint
from kvstore_sdk.tier.batch import Batch
from kvstore_sdk.tier.jobs import Item, Kind
from kvstore_sdk.tier.work import WorkQueue


def test_a_thread_that_ends_wakes_another_one_for_what_it_may_have_been_woken_for(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    woken: list[int] = []
    monkeypatch.setattr(queue, "_wake", woken.append)
    queue._alive += 1
    assert queue.next() is None
    assert woken == [1]


class _Taken(list[Any]):
    """Who waited when it was looked at, and was woken by somebody else then."""

    def __bool__(self) -> bool:
        return True


def test_a_job_that_found_nobody_to_wake_keeps_no_later_one_from_waking_somebody(queue: Queue) -> None:
    queue._idle = _Taken()
    queue.put_job(job(1, Kind.LOAD, [1]))
    waiting = threading.Lock()
    waiting.acquire()
    queue._idle = [waiting]
    queue.put_job(job(2, Kind.LOAD, [2]))
    assert waiting.acquire(blocking=False), "nobody was woken"


class Workers:
    """Threads that take batches from a queue and keep them until they are told."""

    def __init__(self, number: int, most: int = 0) -> None:
        """`most`: threads at a time, where more are wanted for calls that may wait."""
        most = max(number, most)
        self.queue = WorkQueue(slots=8, slot_bytes=4096, threads=number, max_threads=most, batch=1, max_batch=1, unfold=all_items)
        self.taken: list[Batch] = []
        self.ended = 0
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self.grow()

    def grow(self) -> None:
        while self.queue.wants_thread():
            self._threads.append(threading.Thread(target=self._run, name=f"worker-{len(self._threads)}"))
            self._threads[-1].start()

    def _run(self) -> None:
        while (batch := self.queue.next()) is not None:
            with self._lock:
                self.taken.append(batch)
            self.queue.finish(batch)
        with self._lock:
            self.ended += 1

    def wait(self, batches: int) -> None:
        end_s = time.monotonic() + LIMIT_S
        while len(self.taken) < batches:
            assert time.monotonic() < end_s, f"{len(self.taken)} of {batches} batches were taken"
            time.sleep(0.001)

    def stop(self) -> None:
        self.queue.stop()
        for thread in self._threads:
            thread.join(LIMIT_S)
        assert self.ended == len(self._threads)


@pytest.fixture
def workers() -> Iterator[Any]:
    made: list[Workers] = []

    def start(number: int) -> Workers:
        made.append(Workers(number))
        return made[-1]

    yield start
    for one in made:
        one.stop()


def test_waiting_threads_are_woken_for_all_there_is_to_do(workers: Any) -> None:
    """No wake-up is lost: neither of a job's items, nor of probes, nor of what becomes due."""
    pool = workers(3)
    for round_number in range(30):
        pool.queue.put_job(job(round_number, Kind.LOAD, [1, 2, 3, 4]))
        pool.queue.put_probe("n", probe_of(1, 2))
        pool.queue.again(Item(job(1000 + round_number, Kind.LOAD, [9]), 0, BYTES), time.monotonic() + 0.002)
        pool.wait(7 * (round_number + 1))


class _Idle(list[Any]):
    """Who waits; something happens before or after a thread is entered, once."""

    def __init__(self, before: Callable[[], None] | None = None, after: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._before, self._after = before, after

    def append(self, bell: Any) -> None:
        if (before := self._before) is not None:
            self._before = None
            before()
        super().append(bell)
        if (after := self._after) is not None:
            self._after = None
            after()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_job_that_is_put_while_a_thread_goes_to_wait_is_not_missed(when: str) -> None:
    """It is put without the queue's lock: whoever puts it may find nobody to wake yet, and nobody else comes by."""
    queue = WorkQueue(slots=8, slot_bytes=4096, threads=1, max_threads=1, batch=1, max_batch=1, unfold=all_items)
    assert queue.wants_thread()
    putting = threading.Thread(target=lambda: queue.put_job(job(1, Kind.LOAD, [1])))

    def put() -> None:
        putting.start()
        putting.join(LIMIT_S)

    queue._idle = _Idle(**{when: put})
    taken: list[Batch | None] = []
    taker = threading.Thread(target=lambda: taken.append(queue.next()), daemon=True)
    taker.start()
    taker.join(LIMIT_S)
    assert [len(batch.items) for batch in taken if batch is not None] == [1]
    assert not queue._idle


def test_what_is_due_later_is_taken_although_whoever_waited_for_it_is_in_a_call() -> None:
    queue = WorkQueue(slots=8, slot_bytes=4096, threads=2, max_threads=2, batch=1, max_batch=1, unfold=all_items)
    taken: SimpleQueue[Batch] = SimpleQueue()
    over = threading.Event()

    def work() -> None:
        while (batch := queue.next()) is not None:
            taken.put(batch)
            over.wait(LIMIT_S)
            queue.finish(batch)

    threads = [threading.Thread(target=work) for _ in range(2)]
    assert all(queue.wants_thread() for _ in threads)
    for thread in threads:
        thread.start()
    try:
        # Both wait, and for nothing; then one of them for what is due.
        while len(queue._idle) < 2:
            time.sleep(0.001)
        queue.again(Item(job(1, Kind.LOAD, [1]), 0, BYTES), time.monotonic() + 0.2)
        while len(queue._idle) < 2:
            time.sleep(0.001)
        queue.put_job(job(2, Kind.LOAD, [2]))
        assert {taken.get(timeout=LIMIT_S).items[0].job.job_id for _ in range(2)} == {1, 2}
    finally:
        over.set()
        queue.stop()
        for thread in threads:
            thread.join(LIMIT_S)


def test_a_thread_that_is_woken_as_its_time_is_up_waits_for_nothing_that_is_gone() -> None:
    queue = WorkQueue(slots=8, slot_bytes=4096, threads=1, max_threads=1, batch=1, max_batch=1, unfold=all_items)
    bell = threading.Lock()
    bell.acquire()
    # Whoever wakes has taken it from the list, and not released it yet.
    queue._wait(bell, 0.0)
    queue._idle.append(bell)
    queue._wait(bell, 0.0)
    assert not queue._idle


@settings(max_examples=20)
@given(
    threads=st.integers(1, 3),
    steps=st.lists(st.tuples(st.sampled_from(["job", "probe", "again", "patient", "rest"]), st.integers(1, 4)), min_size=5, max_size=40),
)
def test_whatever_is_put_is_taken_while_threads_come_and_end(threads: int, steps: list[tuple[str, int]]) -> None:
    """A thread that ends may have been woken for something; nobody else comes by after the last of it."""
    pool = Workers(threads, most=2 * threads + 2)
    try:
        expected = 0
        for number, (step, count) in enumerate(steps):
            if step == "rest":
                time.sleep(0.0005 * count)
                continue
            expected += 1 if step in ("again", "patient") else count
            if step == "job":
                pool.queue.put_job(job(number, Kind.LOAD, list(range(count))))
            elif step == "probe":
                pool.queue.put_probe("n", probe_of(*range(count)))
            elif step == "again":
                pool.queue.again(Item(job(1000 + number, Kind.LOAD, [9]), 0, BYTES), time.monotonic() + 0.001)
            else:
                # Its call may wait, so that there is a thread more for it, which ends after it.
                pool.queue.put_probe("n", probe_of(99), Hint("peer", 5.0))
                pool.grow()
        pool.wait(expected)
    finally:
        pool.stop()


def test_who_waits_for_calls_to_end_takes_no_wake_up_from_a_thread(workers: Any) -> None:
    pool = workers(1)
    waiting = threading.Thread(target=lambda: pool.queue.wait_changed(time.monotonic() + LIMIT_S))
    waiting.start()
    pool.queue.put_probe("n", probe_of(*range(5)))
    pool.wait(5)
    waiting.join(LIMIT_S)
    assert not waiting.is_alive()
