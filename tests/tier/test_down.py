"""A store that is down costs microseconds, and is used again soon after it is back."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from tier_bench import LIMIT_S, PATIENT, Engine, Shop, key, keys

from kvstore_sdk.backend import (
    Capabilities,
    Failure,
    GetResult,
    GetStatus,
    InvalidError,
    NoSpaceError,
    PutResult,
    PutStatus,
    UnavailableError,
)
from kvstore_sdk.testing import Action, Fault, FaultyBackend, Hang, Raise, Return, Say
from kvstore_sdk.tier import Lookup
from kvstore_sdk_backends.memory import open_memory

NewEngine = Callable[..., Engine]


@pytest.fixture(params=["staged", "direct", "polled"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


PROBE_S = 0.2
SLACK_S = 10.0
"""What a loaded machine may add to two periods."""
SHORT = {"lookup_timeout_s": 0.1, "load_timeout_s": 0.1, "store_timeout_s": 0.1}
"""While the store is down. Until then, and when it is back, nothing that works ends by its time."""

DOWN: dict[str, list[tuple[str, Action]]] = {
    "exists raises": [("exists", Raise())],
    "exists fails": [("exists", Say(Failure(UnavailableError("refused"))))],
    "exists breaks the contract": [("exists", Return(lambda _: None))],
    "exists hangs": [("exists", Hang())],
    "get raises": [("get", Raise())],
    "get fails": [("get", Say(GetResult.failed(UnavailableError("refused"))))],
    "get times out": [("get", Say(GetResult(GetStatus.TIMED_OUT)))],
    "get hangs": [("get", Hang())],
    "everything raises": [("*", Raise())],
    "everything hangs": [("*", Hang())],
}


def engine_over(new_engine: NewEngine, backend: FaultyBackend, **options: object) -> Engine:
    return new_engine(backend, **({"breaker_probe_s": PROBE_S, "batch_records": 1, "retries": 0, "hit_ttl_s": 0.0} | options))


def heal(backend: FaultyBackend, engine: Engine) -> None:
    backend.heal()
    engine.set_timeouts(**PATIENT)


def try_to_use(engine: Engine, number: int) -> bool:
    """What a request does: look up, and load what was found. Returns whether it got its chunk."""
    if engine.ask([key(number)]) != [Lookup.HIT]:
        return False
    return engine.load([key(number)]).success


def read_breaker_is_open(engine: Engine) -> bool:
    return engine.tier.metrics.gauge_value("breaker_open", "read") == 1


@pytest.mark.parametrize("how", DOWN)
def test_a_store_that_cannot_be_read_costs_nothing_and_comes_back(how: str, new_engine: NewEngine) -> None:
    """LIV-11: after some failures a look-up costs less than 1 ms; hits are back within two periods of probing."""
    backend = FaultyBackend(open_memory(""))
    engine = engine_over(new_engine, backend)
    engine.store(keys(20))
    backend.arm(*(Fault(operation, action) for operation, action in DOWN[how]))
    engine.set_timeouts(**SHORT)
    requests = 0
    while not read_breaker_is_open(engine):
        assert not try_to_use(engine, requests % 20)
        requests += 1
        assert requests < 40
    assert requests >= 4
    began_s = time.monotonic()
    answers, took = [], []
    for number in range(500):
        asked_s = time.perf_counter()
        answers.append(engine.tier.lookup(engine.request(), key(number % 20)))
        took.append(time.perf_counter() - asked_s)
    assert statistics.median(took) < 0.001
    # One of them may have been the trial, or one in each period that they took.
    assert answers.count(Lookup.MISS) >= 499 - (time.monotonic() - began_s) / PROBE_S
    heal(backend, engine)
    took_s = engine.wait(lambda: try_to_use(engine, 3), "a hit")
    assert took_s < 2 * PROBE_S + SLACK_S
    engine.wait(lambda: not read_breaker_is_open(engine))
    assert all(try_to_use(engine, number) for number in range(20))
    assert engine.total("breaker_opened", "read") >= 1
    engine.wait(engine.all_slots_free)


WRITE_DOWN: dict[str, Action] = {
    "raises": Raise(),
    "full": Say(PutResult.failed(NoSpaceError("ENOSPC"))),
    "times out": Say(PutResult(PutStatus.TIMED_OUT)),
    "hangs": Hang(),
}


@pytest.mark.parametrize("how", WRITE_DOWN)
def test_a_store_that_cannot_be_written_sheds_and_comes_back(how: str, new_engine: NewEngine) -> None:
    """LIV-11, and CAP-01's full store: writing resumes when there is room again, and reading goes on all the time."""
    backend = FaultyBackend(open_memory(""))
    engine = engine_over(new_engine, backend, hit_ttl_s=60.0)
    engine.store(keys(5))
    backend.arm(Fault("put", WRITE_DOWN[how]))
    engine.set_timeouts(store_timeout_s=0.1)
    for number in range(100, 140):
        assert not engine.store([key(number)]).success
        if engine.tier.metrics.gauge_value("breaker_open", "write"):
            break
    assert engine.tier.metrics.gauge_value("breaker_open", "write") == 1
    calls = len([event for event in backend.log if event.op == "put"])
    began_s = time.monotonic()
    results = [engine.store(keys(10, start=200)) for _ in range(5)]
    assert not any(result.done for result in results)
    periods = 2 + (time.monotonic() - began_s) / PROBE_S
    assert len([event for event in backend.log if event.op == "put"]) <= calls + periods, "a trial is one chunk, not a job"
    assert engine.total("stores", "shed") >= 47 - periods
    assert try_to_use(engine, 1)
    heal(backend, engine)
    took_s = engine.wait(lambda: engine.store([key(300)]).success, "a store")
    assert took_s < 2 * PROBE_S + SLACK_S
    assert engine.store(keys(10, start=200)).success
    assert engine.tier.metrics.gauge_value("breaker_open", "write") == 0
    engine.wait(engine.all_slots_free)


def test_what_waits_when_the_store_goes_down_does_not_pay_for_it_too(new_engine: NewEngine) -> None:
    """LIV-11: neither loads nor stores that were queued before."""
    backend = FaultyBackend(open_memory(""))
    engine = engine_over(new_engine, backend, breaker_probe_s=60.0)
    engine.store(keys(60))
    for operation in ("get", "put"):
        fault = Fault(operation, Raise())
        backend.arm(Fault(operation, Hang(0.02)), fault)
        some = keys(60) if operation == "get" else keys(60, start=100)
        result = engine.load(some) if operation == "get" else engine.store(some)
        assert result.failed == tuple(some)
        assert backend.fired(fault) <= 5 + engine.most_calls, "five failures, and what was running then"
    assert engine.total("loads", "refused") >= 60 - 6 - engine.most_calls
    assert engine.total("stores", "shed") >= 60 - 6 - engine.most_calls
    assert not engine.tier.busy


def test_questions_that_wait_when_the_store_goes_down_are_misses_at_once(new_engine: NewEngine) -> None:
    backend = FaultyBackend(open_memory(""), [Fault("exists", Hang(0.02)), Fault("exists", Raise())])
    engine = engine_over(new_engine, backend, breaker_probe_s=60.0, lookup_timeout_s=10 * LIMIT_S)
    requests = [engine.request() for _ in range(60)]
    for request in requests:
        engine.tier.lookup(request, key(int(request.split("-")[1])))
    assert engine.ask([key(999)]) == [Lookup.MISS]
    engine.wait(lambda: engine.tier._table.pending == 0)
    assert len(backend.log) <= 5 + engine.most_calls


@pytest.mark.parametrize("operation", ["exists", "get"])
def test_the_breaker_opens_when_every_thread_hangs_however_few(operation: str, way: str, new_engine: NewEngine) -> None:
    """LIV-07, LIV-11: two threads never make five failures, and must not cost every request its time-out."""

    class Two(FaultyBackend):
        @property
        def capabilities(self) -> Capabilities:
            return replace(super().capabilities, max_concurrency=2)

    backend = Two(open_memory(""))
    engine = engine_over(new_engine, backend, io_threads=2, breaker_probe_s=60.0)
    engine.store(keys(4))
    backend.arm(Fault(operation, Hang()))
    engine.set_timeouts(**SHORT)
    engine.wait(lambda: not try_to_use(engine, 0) and read_breaker_is_open(engine))
    engine.set_timeouts(**dict.fromkeys(SHORT, 10 * LIMIT_S))
    for number in range(20):
        assert not try_to_use(engine, number % 4)
    engine.set_timeouts(**SHORT)
    refused = engine.total("loads", "refused")
    assert engine.load(keys(4)).failed == tuple(keys(4))
    if way != "polled":
        # A load that comes all the same is refused, although no thread could say so. A polled one may be begun, and ends by its time.
        assert engine.total("loads", "refused") == refused + 4
    assert engine.store(keys(4, start=50)).failed == tuple(keys(4, start=50))
    # Nothing piles up while nobody works.
    for number in range(300):
        engine.tier.lookup(f"late-{number}", key(number))
        engine.tier.end_request(f"late-{number}")
        engine.step()
    assert engine.tier._table.pending <= 2
    assert len(engine.tier._work._questions) <= 3
    heal(backend, engine)

    def comes_back() -> bool:
        engine.period_passes()
        return try_to_use(engine, 0)

    engine.wait(comes_back, "a hit")
    engine.wait(engine.all_slots_free)


def test_a_job_is_one_trial_and_not_many(new_engine: NewEngine) -> None:
    backend = FaultyBackend(open_memory(""))
    engine = engine_over(new_engine, backend, breaker_probe_s=60.0)
    engine.store(keys(30))
    fault = Fault("get", Raise())
    backend.arm(fault)
    engine.load(keys(30))
    assert read_breaker_is_open(engine)
    before = backend.fired(fault)
    engine.period_passes()
    assert engine.load(keys(30)).failed == tuple(keys(30))
    assert backend.fired(fault) == before + 1


def test_one_bad_place_in_a_good_store_does_not_open_the_breaker(new_engine: NewEngine) -> None:
    """A record on a broken sector fails each time it is asked for; the others are served."""
    bad = Shop(open_memory("")).name(key(0))
    backend = FaultyBackend(open_memory(""))
    engine = engine_over(new_engine, backend, batch_records=4, io_threads=1)
    engine.store(keys(4))
    backend.arm(Fault("get", Say(GetResult.failed(UnavailableError("EIO"))), names=lambda name: name == bad))
    for _ in range(20):
        result = engine.load(keys(4))
        assert result.failed == (key(0),)
    assert not read_breaker_is_open(engine)


def test_a_store_that_refuses_one_record_is_not_down(new_engine: NewEngine) -> None:
    backend = FaultyBackend(open_memory(""), [Fault("put", Say(PutResult.failed(InvalidError("too large"))))])
    engine = engine_over(new_engine, backend)
    for number in range(20):
        assert not engine.store([key(number)]).success
    assert engine.tier.metrics.gauge_value("breaker_open", "write") == 0


def test_a_trial_that_nobody_follows_up_is_not_the_last(new_engine: NewEngine) -> None:
    """The request that was let through ended, or never loaded what it was told: the next one is let through a period later."""
    backend = FaultyBackend(open_memory(""))
    engine = engine_over(new_engine, backend, hit_ttl_s=60.0, breaker_probe_s=60.0)
    engine.store(keys(4))
    backend.arm(Fault("get", Raise()))
    engine.load(keys(4))
    engine.load(keys(4))
    assert read_breaker_is_open(engine)
    backend.heal()
    engine.period_passes()
    assert engine.finds(key(0))
    # It does not load; the next period is another's.
    assert not engine.finds(key(1))
    engine.period_passes()
    assert try_to_use(engine, 2)


def test_a_trial_look_up_stays_pending_until_it_is_answered(new_engine: NewEngine) -> None:
    backend = FaultyBackend(open_memory(""))
    engine = engine_over(new_engine, backend, breaker_probe_s=60.0)
    engine.store(keys(1))
    backend.arm(Fault("exists", Raise()))
    engine.wait(lambda: not try_to_use(engine, 0) and read_breaker_is_open(engine))
    backend.heal()
    backend.arm(Fault("exists", Hang()))
    engine.period_passes()
    assert engine.tier.lookup("trial", key(0)) is Lookup.PENDING
    engine.step()
    assert backend.wait_hanging()
    engine.steps(0.05)
    assert engine.tier.lookup("trial", key(0)) is Lookup.PENDING
    assert engine.tier.lookup("other", key(0)) is Lookup.MISS
    backend.heal()
    assert engine.ask([key(0)], "trial") == [Lookup.HIT]
    assert engine.tier.lookup("other", key(0)) is Lookup.MISS, "a miss holds"
