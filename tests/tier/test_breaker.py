"""A store that does not work is left alone, and tried again now and then."""

from __future__ import annotations

import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tier_bench import LIMIT_S

from kvstore_sdk.tier import Lookup, TierMetrics
from kvstore_sdk.tier.breaker import Breaker, Breakers
from kvstore_sdk.tier.floor import Floor
from kvstore_sdk.tier.gate import Gate
from kvstore_sdk.tier.lookups import LookupTable

FAILURES, PROBE_S = 3, 2.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


class BreakerAgainstModel(RuleBasedStateMachine):
    """Open after so many failures in a row and not before; one trial each period; closed by a success, unless it is held."""

    @initialize()
    def begin(self) -> None:
        self.clock = Clock()
        self.breaker = Breaker(FAILURES, PROBE_S, self.clock)
        self.in_a_row = 0
        self.open = False
        self.trial_at_s = self.held_until_s = 0.0

    @rule()
    def fail(self) -> None:
        self.in_a_row += 1
        opens = self.in_a_row >= FAILURES
        assert self.breaker.failed() == (opens and not self.open)
        if opens:
            self.open, self.trial_at_s = True, self.clock.now_s + PROBE_S

    @rule()
    def succeed(self) -> None:
        self.breaker.succeeded()
        self.in_a_row = 0
        self.open = self.open and self.clock.now_s < self.held_until_s

    @rule(seconds=st.sampled_from([0.5, 5.0]))
    def hold(self, seconds: float) -> None:
        assert self.breaker.hold(seconds) == (not self.open)
        self.open = True
        self.held_until_s = max(self.held_until_s, self.clock.now_s + seconds)

    @rule()
    def ask(self) -> None:
        may = not self.open or self.clock.now_s >= max(self.trial_at_s, self.held_until_s)
        assert self.breaker.is_due() == may
        assert self.breaker.allows() == may
        if may and self.open:
            # This was the trial of this period.
            self.trial_at_s = self.clock.now_s + PROBE_S

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.5, 10.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @invariant()
    def they_agree(self) -> None:
        assert not hasattr(self, "breaker") or self.breaker.is_open == self.open


TestBreakerAgainstModel = BreakerAgainstModel.TestCase
TestBreakerAgainstModel.settings = settings(max_examples=80, stateful_step_count=40)


def test_only_one_thread_gets_the_trial() -> None:
    clock = Clock()
    breaker = Breaker(1, PROBE_S, clock)
    breaker.failed()
    clock.now_s += PROBE_S
    start, allowed = threading.Barrier(8), []

    def ask() -> None:
        start.wait(10)
        allowed.append(breaker.allows())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert sorted(allowed) == [False] * 7 + [True]


def test_a_trial_that_is_never_answered_is_followed_by_another() -> None:
    clock = Clock()
    breaker = Breaker(1, PROBE_S, clock)
    breaker.failed()
    for _ in range(3):
        clock.now_s += PROBE_S
        assert breaker.allows()
        assert not breaker.allows()


class Gated:
    """A gate, its breakers, and a table with a clock."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.breakers = Breakers(*(Breaker(FAILURES, PROBE_S, self.clock) for _ in range(3)))
        self.table = LookupTable(timeout_s=1.0, ttl_s=1000.0, max_keys=100, max_hits=1, clock=self.clock)
        self.floor = Floor(0.0, PROBE_S, self.clock)
        self.gate = Gate(self.breakers, self.floor, self.table)

    def turn(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.table.now_s = self.clock.now_s
        self.table.expire()

    def open(self, breaker: Breaker) -> None:
        for _ in range(FAILURES):
            breaker.failed()

    def asked(self) -> list[bytes]:
        return [key for probe in self.table.take_unsent() for key in probe.keys]


@pytest.fixture
def gated() -> Gated:
    return Gated()


def test_a_look_up_is_a_miss_while_questions_fail_and_it_holds(gated: Gated) -> None:
    """LIV-11: nothing is asked, and nothing that is known is believed."""
    gated.table.stored((b"known",))
    gated.open(gated.breakers.exists)
    assert [gated.gate.lookup("r", key) for key in (b"known", b"new", b"new")] == [Lookup.MISS] * 3
    assert not gated.asked()
    gated.breakers.exists.succeeded()
    assert gated.gate.lookup("r", b"known") is Lookup.MISS
    assert gated.gate.lookup("s", b"known") is Lookup.HIT


def test_one_look_up_each_period_asks_whether_the_store_works_again(gated: Gated) -> None:
    gated.table.stored((b"known",))
    gated.open(gated.breakers.exists)
    gated.turn(PROBE_S)
    assert [gated.gate.lookup("r", key) for key in (b"known", b"other")] == [Lookup.PENDING, Lookup.MISS]
    # It stays pending until it is answered, although the breaker is open.
    assert gated.gate.lookup("r", b"known") is Lookup.PENDING
    [probe] = gated.table.take_unsent()
    assert probe.trial
    gated.breakers.exists.succeeded()
    gated.table.answer(probe, probe.keys, True)
    assert gated.gate.lookup("r", b"known") is Lookup.HIT


def test_a_trial_that_fails_is_a_miss_and_another_comes_a_period_later(gated: Gated) -> None:
    gated.open(gated.breakers.exists)
    gated.turn(PROBE_S)
    assert gated.gate.lookup("r", b"k") is Lookup.PENDING
    [probe] = gated.table.take_unsent()
    gated.breakers.exists.failed()
    gated.table.answer(probe, probe.keys, None)
    assert [gated.gate.lookup("r", b"k"), gated.gate.lookup("s", b"k")] == [Lookup.MISS] * 2
    gated.turn(PROBE_S)
    assert gated.gate.lookup("t", b"k") is Lookup.PENDING


def test_a_request_that_was_answered_does_not_waste_the_trial(gated: Gated) -> None:
    gated.table.stored((b"known",))
    assert gated.gate.lookup("r", b"known") is Lookup.HIT
    gated.table.lost(b"bad", bad=True, gone=True)
    gated.open(gated.breakers.exists)
    gated.turn(PROBE_S)
    assert gated.gate.lookup("r", b"known") is Lookup.MISS
    assert gated.gate.lookup("r", b"bad") is Lookup.MISS
    assert gated.gate.lookup("s", b"known") is Lookup.PENDING


def test_a_look_up_is_a_miss_while_loads_fail_although_questions_are_answered(gated: Gated) -> None:
    """LIV-11: what `exists` says is no news of `get`."""
    gated.table.stored((b"known",))
    gated.open(gated.breakers.get)
    gated.breakers.exists.succeeded()
    assert gated.gate.lookup("r", b"known") is Lookup.MISS
    assert not gated.gate.may_load(b"known")


def test_the_hit_that_tries_a_store_again_is_followed_by_its_load(gated: Gated) -> None:
    gated.table.stored((b"a", b"b"))
    gated.open(gated.breakers.get)
    gated.turn(PROBE_S)
    # Not there: it does not use up the trial.
    assert gated.gate.lookup("r", b"new") is Lookup.PENDING
    assert [gated.gate.lookup("r", key) for key in (b"a", b"b")] == [Lookup.HIT, Lookup.MISS]
    assert gated.gate.loads_warily
    assert [gated.gate.may_load(key) for key in (b"b", b"a", b"a")] == [False, True, False]
    gated.breakers.get.succeeded()
    assert gated.gate.lookup("s", b"b") is Lookup.HIT
    assert not gated.gate.loads_warily


def test_a_load_without_a_look_up_is_a_trial_too(gated: Gated) -> None:
    gated.open(gated.breakers.get)
    assert not gated.gate.may_load(b"a")
    gated.turn(PROBE_S)
    assert [gated.gate.may_load(key) for key in (b"a", b"b")] == [True, False]


def test_one_store_each_period_tries_a_store_again(gated: Gated) -> None:
    gated.open(gated.breakers.put)
    assert gated.gate.stores_warily
    assert not gated.gate.may_store()
    gated.turn(PROBE_S)
    assert [gated.gate.may_store(), gated.gate.may_store()] == [True, False]


def test_holding_the_breakers_counts_each_side_that_it_opened() -> None:
    metrics, clock = TierMetrics(), Clock()
    breakers = Breakers(*(Breaker(FAILURES, PROBE_S, clock) for _ in range(3)))
    assert breakers.hold(metrics, 5.0)
    assert not breakers.hold(metrics, 5.0)
    assert metrics.total("breaker_opened", "read") == metrics.total("breaker_opened", "write") == 1
    for breaker in (breakers.exists, breakers.get, breakers.put):
        breaker.succeeded()
        assert breaker.is_open
    clock.now_s += 5.0
    for breaker in (breakers.exists, breakers.get, breakers.put):
        breaker.succeeded()
        assert not breaker.is_open


def test_a_table_is_wary_from_when_a_breaker_opens_until_a_look_finds_that_all_are_closed(gated: Gated) -> None:
    breaker = Breaker(FAILURES, PROBE_S, gated.clock, opened=gated.table.be_wary)
    gate = Gate(Breakers(breaker, gated.breakers.get, gated.breakers.put), gated.floor, gated.table)
    gated.open(breaker)
    assert gated.table.wary
    gate.look()
    assert gated.table.wary
    breaker.succeeded()
    gate.look()
    assert not gated.table.wary
    breaker.hold(1.0)
    assert gated.table.wary
