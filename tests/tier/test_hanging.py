"""Calls that hang or are late cost their jobs, in time, and nothing else: nor does a queue that is full."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from tier_bench import LIMIT_S, PAYLOAD_BYTES, SLOT_BYTES, Engine, key, keys
from tier_faults import faulty, in_rest, only

from kvstore_sdk.testing import (
    Fault,
    Hang,
    RecordingBackend,
    ReturnLate,
)
from kvstore_sdk.tier import Lookup

NewEngine = Callable[..., Engine]


@pytest.fixture(params=["staged", "direct", "polled"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_look_up_that_hangs_is_a_miss_in_time(new_engine: NewEngine) -> None:
    """LIV-02, LIV-03"""
    backend = faulty(Fault("exists", Hang()))
    engine = new_engine(backend, lookup_timeout_s=0.2)
    began_s = time.monotonic()
    assert engine.ask(keys(3)) == [Lookup.MISS] * 3
    assert time.monotonic() - began_s >= 0.2
    engine.wait(lambda: engine.total("lookup_timeouts") == 3)
    # Found late, or by a backend that is polled.
    engine.wait(lambda: engine.total("abandoned_calls", "exists") or engine.total("call_failures", "exists", "TimedOutError"))
    backend.heal()
    engine.wait(lambda: in_rest(engine))


@pytest.mark.parametrize("way", ["staged", "direct"])
def test_threads_that_hang_are_stood_in_for_where_the_backend_allows_more_calls(new_engine: NewEngine) -> None:
    """LIV-07: and the stand-ins leave when those come back."""
    backend = faulty(calls=64)
    engine = new_engine(backend, batch_records=1, breaker_failures=100)
    engine.store(keys(10))
    backend.arm(Fault("get", Hang(), names=only(*range(4)), times=4))
    hung = [engine.submit_load([key(number)], rows=[number]) for number in range(4)]
    assert backend.wait_hanging(4)
    engine.time_is_up()
    assert all(not engine.result(job).success for job in hung)
    engine.wait(lambda: engine.total("abandoned_calls", "get") == 4)
    assert engine.load(keys(6, start=4)).success
    assert len(engine.io_threads()) == 8
    assert engine.tier.metrics.gauge_value("quarantined_bytes") == 4 * SLOT_BYTES
    backend.heal()
    engine.wait(lambda: in_rest(engine) and len(engine.io_threads()) == 4)
    assert engine.load(keys(10)).success


def test_no_more_calls_than_the_backend_allows_whatever_hangs(new_engine: NewEngine) -> None:
    backend = faulty(calls=6)
    recording = RecordingBackend(backend)
    engine = new_engine(recording, batch_records=1, breaker_failures=100)
    engine.store(keys(30))
    backend.arm(Fault("get", Hang()))
    engine.set_timeouts(load_timeout_s=0.1)
    jobs = [engine.submit_load([key(number)], rows=[number]) for number in range(30)]
    assert all(not engine.result(job).success for job in jobs)
    engine.steps(0.3)
    assert recording.max_concurrency_seen <= 6
    assert len(engine.io_threads()) <= 6
    backend.heal()
    engine.wait(lambda: in_rest(engine))
    assert not recording.breaches


def test_a_put_that_hangs_fails_in_time_and_others_are_stored(new_engine: NewEngine) -> None:
    """LIV-07, for stores: also when all that may store hang."""
    backend = faulty(calls=64)
    engine = new_engine(backend, batch_records=1, breaker_failures=100)
    backend.arm(Fault("put", Hang(), names=only(0, 1, 2)))
    hung = [engine.submit_store([key(number)], rows=[number]) for number in range(3)]
    engine.step()
    assert backend.wait_hanging(3)
    engine.time_is_up()
    results = [engine.result(job) for job in hung]
    assert not any(result.success for result in results)
    engine.wait(lambda: engine.total("abandoned_calls", "put") + engine.total("call_failures", "put", "TimedOutError") >= 3)
    assert engine.store(keys(5, start=10), rows=range(10, 15)).success
    backend.heal()
    engine.wait(lambda: in_rest(engine))


def test_an_answer_that_comes_after_the_deadline_is_dropped(new_engine: NewEngine) -> None:
    backend = faulty()
    engine = new_engine(backend)
    engine.store(keys(2))
    engine.set_timeouts(load_timeout_s=0.1, store_timeout_s=0.1, lookup_timeout_s=0.1)
    backend.arm(Fault("*", ReturnLate(0.3)))
    assert engine.load(keys(2)).failed == tuple(keys(2))
    other = new_engine(backend, lookup_timeout_s=0.1)
    assert other.ask(keys(2)) == [Lookup.MISS] * 2
    assert not engine.store(keys(2, start=5), rows=[5, 6]).success
    engine.wait(lambda: engine.total("abandoned_calls", "get") >= 1)


def test_stores_beyond_the_bound_are_shed_and_counted(new_engine: NewEngine) -> None:
    """LIV-08: the queue never holds more than its bound, and every job is reported."""
    bound = 20 * PAYLOAD_BYTES[0]
    backend = faulty(Fault("put", Hang(0.01)))
    engine = new_engine(backend, batch_records=1, max_queued_store_bytes=bound, store_timeout_s=LIMIT_S)
    jobs = []
    for row in range(64):
        engine.memory.write(row, key(row))
    for number in range(2000):
        jobs.append(engine.submit_store([key(number % 64)], rows=[number % 64], generation=None))
        assert engine.tier.metrics.gauge_value("queued_store_bytes") <= bound
        if number % 50 == 0:
            engine.step()
    for job in jobs:
        engine.result(job)
    shed, stored = engine.total("stores", "shed"), engine.total("stores", "stored")
    assert shed + stored + engine.total("stores", "exists") == 2000
    assert shed > 1000
    assert stored >= 20
    assert engine.tier.metrics.gauge_value("queued_store_bytes") == 0


def test_a_load_does_not_wait_for_the_stores_before_it(new_engine: NewEngine) -> None:
    """LIV-09"""
    backend = faulty()
    engine = new_engine(backend, batch_records=1, store_timeout_s=LIMIT_S)
    engine.store(keys(1))
    backend.arm(Fault("put", Hang()))
    stores = engine.submit_store(keys(60, start=10), rows=range(1, 61))
    result = engine.load([key(0)], rows=[0])
    assert result.success
    assert stores not in engine.results
    backend.heal()
    assert engine.result(stores).success


def test_a_probe_does_not_wait_for_stores(new_engine: NewEngine) -> None:
    """LIV-09"""
    backend = faulty(Fault("put", Hang()), calls=64)
    engine = new_engine(backend, batch_records=1)
    stores = engine.submit_store(keys(60), rows=range(60))
    assert engine.ask([key(99)]) == [Lookup.MISS]
    assert not engine.total("lookup_timeouts")
    assert stores not in engine.results
    backend.heal()
    assert engine.result(stores).success
