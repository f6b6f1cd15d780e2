"""Loads that are slower than the operator's floor are not begun, and a store that is fast again is used again."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import pytest
from polled_backend import Polled
from tier_bench import LIMIT_S, PATIENT, Engine, key, keys

from kvstore_sdk.testing import Fault, FaultyBackend, Hang
from kvstore_sdk.tier import Lookup
from kvstore_sdk.tier.floor import Floor
from kvstore_sdk_backends.memory import open_memory

NewEngine = Callable[..., Engine]
PROBE_S = 2.0
MB = 1_000_000


@pytest.fixture
def new_engine(new_engine: NewEngine) -> NewEngine:
    return partial(new_engine, **PATIENT)


class Clock:
    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


class Loads:
    """A floor of 100 MB/s, and calls that take time."""

    def __init__(self, min_mb_per_s: float = 100.0) -> None:
        self.clock = Clock()
        self.floor = Floor(min_mb_per_s, PROBE_S, self.clock)

    def call(self, moved_bytes: int, seconds: float) -> bool:
        """One after the other."""
        began_s = self.clock.now_s
        self.clock.now_s += seconds
        return self.floor.loaded(moved_bytes, began_s, self.clock.now_s)

    def slow_down(self) -> None:
        assert [self.call(MB, 0.1) for _ in range(8)] == [False] * 7 + [True]
        assert self.floor.is_slow


def test_a_store_is_too_slow_when_its_last_calls_are_and_not_by_one_of_them() -> None:
    loads = Loads()
    for _ in range(32):
        assert not loads.call(10 * MB, 0.05)
    assert loads.floor.mb_per_s == pytest.approx(200.0)
    assert not loads.call(MB, 0.2)
    assert not loads.floor.is_slow
    said = [loads.call(MB, 0.2) for _ in range(32)]
    assert said.count(True) == 1, "it is said once"
    assert loads.floor.is_slow


def test_loads_at_the_same_time_count_together() -> None:
    """Eight at a time with 20 MB/s each are a store of 160 MB/s."""
    loads = Loads()
    for _ in range(4):
        began_s = loads.clock.now_s
        loads.clock.now_s += 0.5
        assert not any(loads.floor.loaded(10 * MB, began_s, loads.clock.now_s) for _ in range(8))
    assert loads.floor.mb_per_s == pytest.approx(160.0)
    # They overlap, and none of the time counts twice.
    loads = Loads()
    for number in range(10):
        loads.clock.now_s = 100.0 + number
        loads.floor.loaded(50 * MB, 98.0, loads.clock.now_s)
    assert loads.floor.mb_per_s == pytest.approx(500 / 11)


def test_time_without_loads_is_nobodys() -> None:
    loads = Loads()
    for _ in range(20):
        loads.call(10 * MB, 0.05)
        loads.clock.now_s += 60.0
    assert loads.floor.mb_per_s == pytest.approx(200.0)
    assert not loads.floor.is_slow


def test_while_it_is_slow_one_request_each_period_passes() -> None:
    loads = Loads()
    assert loads.floor.passes("a")
    loads.slow_down()
    assert not loads.floor.passes("a")
    loads.clock.now_s += PROBE_S
    assert [loads.floor.passes(name) for name in ("a", "b", "a")] == [True, False, True]
    loads.clock.now_s += PROBE_S
    assert [loads.floor.passes(name) for name in ("b", "a", "b")] == [True, False, True]


def test_the_loads_of_the_request_that_tries_it_decide() -> None:
    loads = Loads()
    loads.slow_down()
    loads.clock.now_s += PROBE_S
    assert loads.floor.passes("a")
    # Two calls that end together are not a fast one: the first took the time of both.
    began_s = loads.clock.now_s
    loads.clock.now_s += 1.0
    loads.floor.loaded(30 * MB, began_s, loads.clock.now_s)
    loads.floor.loaded(30 * MB, began_s, loads.clock.now_s)
    assert loads.floor.is_slow
    loads.clock.now_s += PROBE_S
    assert loads.floor.passes("b")
    assert not loads.call(30 * MB, 0.1)
    assert not loads.floor.is_slow
    assert all(loads.floor.passes(name) for name in "abc")


def test_time_in_which_nobody_looked_does_not_count_against_a_store() -> None:
    """An engine that polls sees each answer a step of 0.1 s later; one that is not there at the first look certainly took until then."""
    loads = Loads()
    step_s = 0.1

    def call(steps: int) -> bool:
        began_s = loads.clock.now_s
        loads.clock.now_s += steps * step_s
        return loads.floor.loaded(MB, began_s, loads.clock.now_s - step_s)

    assert not any(call(1) for _ in range(100))
    assert loads.floor.mb_per_s == pytest.approx(10.0), "as the engine saw it"
    # Two steps are at least one: 10 MB/s at the most.
    assert [call(2) for _ in range(40)].count(True) == 1
    assert loads.floor.is_slow
    loads.clock.now_s += PROBE_S
    assert loads.floor.passes("a")
    assert not call(2)
    assert loads.floor.is_slow
    loads.clock.now_s += PROBE_S
    assert loads.floor.passes("b")
    assert not call(1)
    assert not loads.floor.is_slow


def test_without_a_floor_loads_are_measured_and_never_too_slow() -> None:
    loads = Loads(0.0)
    assert loads.floor.mb_per_s == 0.0
    assert not any(loads.call(1, 10.0) for _ in range(64))
    assert not loads.floor.is_slow
    assert loads.floor.mb_per_s > 0.0


def slow_engine(new_engine: NewEngine, backend: FaultyBackend) -> Engine:
    """Its store brings one or, polled, four chunks of 5 kB each 0.1 s while it hangs, less than half of the floor; in memory some
    milliseconds are enough for it."""
    return new_engine(backend, min_load_mb_per_s=0.5, io_threads=1, batch_records=1, breaker_probe_s=0.1)


@pytest.mark.parametrize("way", ["staged", "polled"])
def test_look_ups_are_misses_while_the_store_is_slower_than_the_floor_and_hits_when_it_is_not(new_engine: NewEngine) -> None:
    """PERF-04"""
    backend = FaultyBackend(open_memory(""))
    engine = slow_engine(new_engine, backend)
    engine.store(keys(40))
    backend.arm(Fault("get", Hang(0.1)))

    def is_slow() -> bool:
        # Nothing that was told HIT is refused: only look-ups are.
        assert engine.load(keys(4)).success
        return engine.tier._floor.is_slow

    engine.wait(is_slow, "a store that is too slow")
    assert 0 < engine.tier.metrics.gauge_value("load_mb_per_s") < 0.5
    gets = sum(event.op == "get" for event in backend.log)
    answers = [engine.tier.lookup(engine.request(), key(number)) for number in range(40)]
    assert answers.count(Lookup.MISS) > 20, "each request may have been a trial, if the machine stood still before it"
    engine.step()
    assert engine.total("lookups_too_slow") == engine.total("lookups", "miss") == answers.count(Lookup.MISS)
    assert sum(event.op == "get" for event in backend.log) == gets
    backend.heal()

    def comes_back() -> bool:
        request = engine.request()
        if (hits := [one for one in keys(4) if engine.tier.lookup(request, one) is Lookup.HIT]) and not engine.load(hits).success:
            raise AssertionError("a load failed")
        engine.tier.end_request(request)
        return not engine.tier._floor.is_slow

    engine.wait(comes_back, "a store that is fast enough")
    assert engine.ask(keys(40)) == [Lookup.HIT] * 40


def test_a_request_that_was_told_hit_is_not_told_otherwise_because_loads_are_slow(new_engine: NewEngine) -> None:
    engine = slow_engine(new_engine, FaultyBackend(open_memory("")))
    tier = engine.tier
    engine.store(keys(2))
    tier._table.max_hits = 5
    assert tier.lookup("r", key(0)) is Lookup.HIT
    tier._floor.is_slow, tier._floor._next_trial_s = True, float("inf")
    tier._table.be_wary()
    assert [tier.lookup(*asked) for asked in (("r", key(0)), ("r", key(1)), ("s", key(0)))] == [Lookup.HIT, Lookup.MISS, Lookup.MISS]
    # What was a miss stays one.
    tier._floor.is_slow = False
    assert tier.lookup("r", key(1)) is Lookup.MISS


@pytest.mark.parametrize("way", ["polled"])
def test_a_polled_store_is_not_slow_because_the_engine_comes_by_late(new_engine: NewEngine) -> None:
    engine = slow_engine(new_engine, FaultyBackend(open_memory("")))
    tier, backend = engine.tier, engine.tier._backend
    assert isinstance(backend, Polled)
    engine.store(keys(1))
    engine.wait(engine.in_rest)

    def load() -> None:
        job = engine.submit_load(keys(1))
        tier.poll()
        end_s = time.monotonic() + LIMIT_S
        while not backend.has_answers:
            assert time.monotonic() < end_s, "the store did not answer"
            time.sleep(0.001)
        # What is left of the engine's step: a seventh of the floor, if it were the store's.
        time.sleep(0.07)
        assert engine.result(job).success

    for _ in range(10):
        load()
    assert 0 < tier.metrics.gauge_value("load_mb_per_s") < 0.5
    assert not tier._floor.is_slow
    # And one that was slow comes back.
    tier._floor.is_slow = True
    tier._table.be_wary()
    assert engine.ask(keys(1)) == [Lookup.HIT]
    load()
    assert not tier._floor.is_slow
