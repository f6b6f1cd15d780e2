"""A tier knows whether its store answers, also while nobody uses it, and uses it again soon after it came back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from tier_bench import LIMIT_S, PATIENT, Engine, key, keys

from kvstore_sdk.backend import Capabilities
from kvstore_sdk.testing import BackendWrapper, Event, Fault, FaultyBackend, Hang, Raise
from kvstore_sdk.tier import Lookup
from kvstore_sdk.tier.breaker import Breaker, Breakers
from kvstore_sdk.tier.health import Health
from kvstore_sdk.tier.probe import Probe
from kvstore_sdk_backends.memory import open_memory

NewEngine = Callable[..., Engine]
FAILURES, TRIAL_S, PROBE_S, TIMEOUT_S = 3, 2.0, 5.0, 1.0
STEP_S = 0.125
"""Sums of it are exact."""


class Watched:
    """A health whose questions somebody answers by hand, and a clock."""

    def __init__(self) -> None:
        self.now_s = 50.0
        self.breakers = Breakers(*(Breaker(FAILURES, TRIAL_S, lambda: self.now_s) for _ in range(3)))
        self.asked: list[Probe] = []
        self.health = Health("test", self.breakers, probe_s=PROBE_S, timeout_s=TIMEOUT_S, send=self.asked.append, clock=lambda: self.now_s)

    def turn(self, seconds: float) -> int:
        """Let time go by in small steps. Returns how many questions came."""
        before = len(self.asked)
        for _ in range(round(seconds / STEP_S)):
            self.now_s += STEP_S
            self.health.check()
        return len(self.asked) - before

    def answer(self, works: bool) -> None:
        """As a thread of the tier does."""
        self.asked[-1].answered = works
        if works:
            self.breakers.exists.succeeded()
        else:
            self.breakers.exists.failed()

    def open(self, *breakers: Breaker) -> None:
        for breaker in breakers:
            for _ in range(FAILURES):
                breaker.failed()


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_an_idle_store_is_asked_each_period_and_one_that_is_used_is_not(watched: Watched) -> None:
    assert watched.turn(PROBE_S - STEP_S) == 0
    assert watched.turn(2 * STEP_S) == 1
    watched.answer(True)
    assert watched.turn(PROBE_S) == 1
    watched.answer(True)
    for _ in range(40):
        assert watched.turn(0.5) == 0
        watched.breakers.get.succeeded()
    assert watched.turn(PROBE_S + STEP_S) == 1


def test_it_is_healthy_until_an_answer_fails_and_again_after_the_next(watched: Watched) -> None:
    assert watched.health.healthy
    before = True
    for works in (True, False, False, True):
        watched.turn(PROBE_S + STEP_S)
        assert watched.health.healthy == before, "while it is asked nothing is new"
        watched.answer(works)
        assert watched.health.healthy == works
        before = works
    watched.answer(False)
    watched.now_s += 0.1
    watched.breakers.get.succeeded()
    assert watched.health.healthy, "a load was answered since"


def test_a_question_that_hangs_makes_it_unhealthy_and_no_second_one_follows_it_soon(watched: Watched) -> None:
    """A backend that never returns may take one thread this way, not all of them."""
    assert watched.turn(PROBE_S) == 1
    assert watched.health.healthy
    assert watched.turn(TIMEOUT_S + 1.0) == 0
    assert not watched.health.healthy
    assert watched.asked[0].over, "if it waits in the queue it need not be asked any more"
    assert watched.turn(50.0) == 0
    assert watched.turn(10.0) == 1
    watched.answer(True)
    assert watched.health.healthy


@pytest.mark.parametrize("which", ["exists", "get", "put", "all"])
def test_what_nobody_tries_is_closed_when_the_store_answers(watched: Watched, which: str) -> None:
    """Within two periods, without any traffic."""
    three = {"exists": watched.breakers.exists, "get": watched.breakers.get, "put": watched.breakers.put}
    watched.open(*(three.values() if which == "all" else (three[which],)))
    assert watched.health.healthy == (which == "put")
    for _ in range(4):
        assert watched.turn(PROBE_S) >= 1
        watched.answer(False)
        assert not watched.health.healthy
    for _ in range(2):
        watched.turn(PROBE_S)
        watched.answer(True)
    watched.turn(STEP_S)
    assert watched.health.healthy
    assert not any(breaker.is_open for breaker in three.values())


def test_an_answer_to_a_question_is_no_news_of_loads_while_these_are_tried(watched: Watched) -> None:
    watched.open(watched.breakers.get)
    for _ in range(20):
        watched.turn(TRIAL_S)
        if watched.asked and watched.asked[-1].answered is None:
            watched.answer(True)
        assert watched.breakers.get.allows(), "the trial of a request"
        watched.breakers.get.failed()
        assert watched.breakers.get.is_open
        assert not watched.health.healthy


def test_what_was_closed_on_trust_is_opened_by_its_next_failure(watched: Watched) -> None:
    watched.open(watched.breakers.get)
    watched.turn(2 * TRIAL_S)
    watched.breakers.get.ease()
    assert not watched.breakers.get.is_open
    assert watched.breakers.get.failed()
    assert watched.breakers.get.is_open


def test_a_store_that_is_to_be_left_alone_is_left_alone(watched: Watched) -> None:
    for breaker in (watched.breakers.exists, watched.breakers.get, watched.breakers.put):
        breaker.hold(60.0)
    assert watched.turn(59.0) == 0
    assert watched.turn(2.0) == 1
    watched.answer(True)
    assert watched.turn(PROBE_S) == 1
    watched.answer(True)
    assert watched.turn(STEP_S) == 0
    assert watched.health.healthy


def test_a_question_that_was_taken_out_of_the_queue_is_forgotten(watched: Watched) -> None:
    assert watched.turn(PROBE_S) == 1
    watched.health.forget()
    assert watched.turn(PROBE_S - STEP_S) == 0
    assert watched.health.healthy
    assert watched.turn(2 * STEP_S) == 1


def healthy(engine: Engine) -> bool:
    return engine.tier.metrics.gauge_value("healthy") == 1


def asked(backend: FaultyBackend) -> list[Event]:
    return [event for event in backend.log if event.op == "exists"]


def wait_idle(until: Callable[[], bool]) -> None:
    """Wait while the engine does nothing."""
    end_s = time.monotonic() + LIMIT_S
    while not until():
        assert time.monotonic() < end_s, "it did not come"
        time.sleep(0.005)


@pytest.fixture(params=["staged", "polled"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


PROBING = PATIENT | {"health_probe_s": 0.05, "breaker_probe_s": 0.05, "breaker_failures": 2, "retries": 0}


class ReadOnly(BackendWrapper):
    """Says that it is."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities, read_only=True)


@pytest.mark.parametrize("kind", ["writing", "not writing", "read-only"])
def test_an_idle_tier_finds_out_that_its_store_died_and_that_it_came_back(kind: str, new_engine: NewEngine) -> None:
    """Nobody calls the tier meanwhile; a request that comes afterwards finds all of its chunks at once."""
    records = open_memory("")
    new_engine(records).store(keys(20))
    backend = FaultyBackend(ReadOnly(records) if kind == "read-only" else records)
    engine = new_engine(backend, may_store=kind != "not writing", **PROBING)
    wait_idle(lambda: bool(asked(backend)) and healthy(engine))
    backend.arm(Fault("*", Raise()))
    wait_idle(lambda: not healthy(engine) and engine.tier._exists.is_open)
    backend.heal()
    wait_idle(lambda: healthy(engine))
    assert not engine.tier._exists.is_open
    assert engine.ask(keys(20)) == [Lookup.HIT] * 20
    assert engine.load(keys(20)).success
    assert not [event for event in backend.log if event.op == "put"], "nothing is written to find out"


def test_loads_that_failed_are_trusted_again_without_a_request_that_tries_them(new_engine: NewEngine) -> None:
    backend = FaultyBackend(open_memory(""))
    engine = new_engine(backend, batch_records=1, **PROBING)
    engine.store(keys(20))
    backend.arm(Fault("get", Raise()))
    engine.load(keys(20))
    assert engine.tier._get.is_open or engine.total("breaker_opened", "read")
    backend.heal()
    wait_idle(lambda: healthy(engine))
    assert engine.ask(keys(20)) == [Lookup.HIT] * 20
    assert engine.load(keys(20)).success


def test_questions_of_the_tier_itself_are_counted_as_nobodys(new_engine: NewEngine) -> None:
    backend = FaultyBackend(open_memory(""))
    engine = new_engine(backend, **PROBING)
    wait_idle(lambda: len(asked(backend)) >= 3)
    engine.steps(0.1)
    assert not engine.total("lookups")
    assert not engine.total("lookup_timeouts")
    delta = engine.tier.metrics.take()
    assert not [series for series in delta.observations if series[0] == "lookup_seconds"]
    assert not engine.events()


def test_a_store_that_hangs_is_asked_once_and_keeps_one_thread(new_engine: NewEngine) -> None:
    backend = FaultyBackend(open_memory(""), [Fault("exists", Hang())])
    # A backend that is polled has no thread of ours, and answers by itself when a call of its hangs.
    engine = new_engine(backend, polled=False, **(PROBING | {"lookup_timeout_s": 0.05, "breaker_failures": 100}))
    wait_idle(lambda: not healthy(engine))
    engine.steps(0.5)
    assert backend.hanging == 1
    assert engine.store(keys(3)).success
    backend.heal()
    wait_idle(lambda: healthy(engine))


def test_a_reset_loses_no_question_and_a_closed_tier_asks_none(new_engine: NewEngine) -> None:
    backend = FaultyBackend(open_memory(""))
    engine = new_engine(backend, **PROBING)
    for _ in range(3):
        engine.tier.reset()
        seen = len(backend.log)
        wait_idle(lambda seen=seen: len(backend.log) > seen and healthy(engine))
    engine.tier.close()
    assert not any(thread.is_alive() for thread in engine.tier._health.threads)


def test_a_question_that_no_thread_came_to_is_asked_again_as_soon_as_one_does(new_engine: NewEngine) -> None:
    """All of them hung, and nobody uses the tier when the store comes back."""
    backend = FaultyBackend(open_memory(""))
    engine = new_engine(backend, io_threads=1, batch_records=1, **(PROBING | {"health_probe_s": 0.5, "lookup_timeout_s": 0.05}))
    some = keys(engine.most_calls)
    engine.store(some)
    engine.wait(engine.in_rest)
    backend.arm(Fault("get", Hang()))
    engine.submit_load(some)
    engine.wait(lambda: backend.hanging == engine.most_calls)
    known = len(asked(backend))
    wait_idle(lambda: (probe := engine.tier._health._probe) is not None and not probe.is_wanted)
    assert len(asked(backend)) == known
    backend.heal()
    wait_idle(lambda: len(asked(backend)) > known and healthy(engine))


def test_a_question_that_failed_in_the_tier_itself_is_asked_again(new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FaultyBackend(open_memory(""))
    engine = new_engine(backend, **PROBING)
    engine.store(keys(1))

    def fail(*_: object) -> None:
        raise AssertionError("a fault of ours")

    with monkeypatch.context() as broken:
        broken.setattr(engine.tier._calls, "exists", fail)
        wait_idle(lambda: not healthy(engine))
    seen = len(asked(backend))
    wait_idle(lambda: len(asked(backend)) > seen and healthy(engine))


def test_without_a_period_nothing_is_asked(new_engine: NewEngine) -> None:
    backend = FaultyBackend(open_memory(""))
    engine = new_engine(backend, health_probe_s=0.0)
    engine.steps(0.1)
    assert not engine.tier._health.threads
    assert not asked(backend)
    assert engine.ask([key(1)]) == [Lookup.MISS]
    assert healthy(engine)
