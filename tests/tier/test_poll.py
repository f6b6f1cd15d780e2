"""A poll that has nothing to report is one look at `ready`; what has to be reported gets there without anybody asking."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from tier_bench import LIMIT_S, Engine, Memory, Shop, identity, key, keys

from kvstore_sdk.backend import GetResult, GetStatus, UnavailableError
from kvstore_sdk.testing import Fault, FaultyBackend, Hang, Return
from kvstore_sdk.tier import JobResult, Lookup, Tier, TierSettings
from kvstore_sdk.tier.watch import Watch
from kvstore_sdk_backends.memory import open_memory

NewEngine = Callable[..., Engine]


def until_ready(engine: Engine) -> list[JobResult]:
    """What the first polls return that are worth it, by an engine that does nothing else meanwhile."""
    end_s = time.monotonic() + LIMIT_S
    while True:
        while not engine.tier.ready:
            assert time.monotonic() < end_s, "nothing is ready"
            time.sleep(0.001)
        if results := engine.tier.poll():
            return results


def test_a_job_ends_by_its_deadline_though_nobody_polled_or_flushed_before(new_engine: NewEngine) -> None:
    backend = FaultyBackend(open_memory(""), [Fault("get", Hang())])
    engine = new_engine(backend, load_timeout_s=0.2)
    began_s = time.monotonic()
    job_id = engine.submit_load([key(0)])
    [result] = until_ready(engine)
    assert (result.job_id, result.failed) == (job_id, (key(0),))
    assert time.monotonic() - began_s >= 0.2


def test_jobs_end_by_their_deadlines_one_after_the_other(new_engine: NewEngine) -> None:
    """Also those that came while the thread that looks at the clock was asleep, and after it had been told that somebody has looked."""
    backend = FaultyBackend(open_memory(""), [Fault("get", Hang(), times=3)])
    engine = new_engine(backend, load_timeout_s=0.1)
    ended: list[int] = []
    submitted = []
    for number in range(3):
        submitted.append(engine.submit_load([key(number)], [number]))
        time.sleep(0.03)
    while len(ended) < 3:
        ended += [result.job_id for result in until_ready(engine)]
    assert ended == submitted
    time.sleep(0.15)
    later = engine.submit_load([key(9)], [9])
    assert [result.job_id for result in until_ready(engine)] == [later]


def test_what_is_stored_and_loaded_is_ready_by_itself(new_engine: NewEngine) -> None:
    engine = new_engine()
    stored = engine.submit_store(keys(3))
    assert [(result.job_id, result.success) for result in until_ready(engine)] == [(stored, True)]
    # Nobody flushed: whoever hears of the job can hear of its keys.
    assert [engine.tier.lookup("r", one) for one in keys(3)] == [Lookup.HIT] * 3
    loaded = engine.submit_load(keys(3))
    assert [(result.job_id, result.success) for result in until_ready(engine)] == [(loaded, True)]


def test_while_nothing_is_ready_a_poll_returns_nothing_and_looks_at_nothing(new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = new_engine()
    engine.store(keys(2))
    engine.wait(lambda: not engine.tier.ready)
    monkeypatch.setattr(engine.tier, "_look_around", lambda: pytest.fail("a look at more than `ready`"))
    engine.tier.ready.clear()
    assert engine.tier.poll() == []


def test_a_chunk_whose_load_failed_is_no_hit_to_whoever_polls(new_engine: NewEngine) -> None:
    """Though the request may be told HIT once more, and neither asks anything nor flushes."""
    backend = FaultyBackend(open_memory(""))
    engine = new_engine(backend, max_hits_per_request=5)
    engine.store(keys(1))
    assert engine.ask(keys(1), "r") == [Lookup.HIT]
    backend.arm(Fault("get", Return([GetResult(GetStatus.MISSING)])))
    engine.submit_load(keys(1))
    [result] = until_ready(engine)
    assert result.failed == (key(0),)
    assert engine.tier.lookup("r", key(0)) is not Lookup.HIT
    assert not Shop(backend.inner).has(key(9))


def test_without_a_thread_that_looks_at_the_clock_each_poll_does(new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may have no thread left."""
    monkeypatch.setattr(Watch, "start", lambda watch: False)
    backend = FaultyBackend(open_memory(""), [Fault("get", Hang())])
    engine = new_engine(backend, load_timeout_s=0.1)
    job_id = engine.submit_load([key(0)])
    assert [result.job_id for result in until_ready(engine)] == [job_id]
    assert engine.tier.ready


def test_a_look_between_that_at_the_clock_and_the_ring_costs_no_deadline(new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread rings for what the engine has just seen to, and must not wait for ever to be answered."""
    armed, seen, flushed = threading.Event(), threading.Event(), threading.Event()

    def ring(watch: Any, rung: bool) -> None:
        if rung and armed.is_set():
            armed.clear()
            seen.set()
            flushed.wait(LIMIT_S)
        watch.__dict__["rung"] = rung

    monkeypatch.setattr(Watch, "_rung", property(lambda watch: watch.__dict__.get("rung", False), ring), raising=False)
    backend = FaultyBackend(open_memory(""), [Fault("get", Hang())])
    armed.set()
    engine = new_engine(backend, load_timeout_s=0.2)
    assert seen.wait(LIMIT_S)
    engine.tier.flush()
    flushed.set()
    job_id = engine.submit_load([key(0)])
    assert [result.job_id for result in until_ready(engine)] == [job_id]


def test_a_look_around_that_fails_loses_no_job(new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = new_engine()
    job_id = engine.submit_store(keys(2))
    end_s = time.monotonic() + LIMIT_S
    while not any(job is not None for job in engine.tier.ready.copy()):
        assert time.monotonic() < end_s
        time.sleep(0.001)
    engine.tier.wake()
    with monkeypatch.context() as patch:
        patch.setattr(engine.tier, "_look_around", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.tier.poll()
    assert [(result.job_id, result.success) for result in until_ready(engine)] == [(job_id, True)]


def test_the_thread_that_looks_at_the_clock_ends_with_the_tier(new_engine: NewEngine) -> None:
    for _ in range(20):
        engine = new_engine(name="clocked", lookup_timeout_s=0.01)
        engine.close()
        assert not [thread for thread in threading.enumerate() if thread.name == "clocked-watch"]


def tier_that_answers(answer: Any) -> Tier:
    return Tier(open_memory(""), Memory(8), identity=identity(), settings=TierSettings(), answer=answer)


def polled(tier: Tier) -> list[JobResult]:
    end_s = time.monotonic() + LIMIT_S
    while not (results := tier.poll()):
        assert time.monotonic() < end_s
        time.sleep(0.001)
    return results


def test_the_answer_to_a_job_is_made_once_and_not_by_whoever_polls() -> None:
    made: list[tuple[JobResult, bool, threading.Thread]] = []

    def answer(result: JobResult, load: bool) -> object:
        made.append((result, load, threading.current_thread()))
        return f"answer {len(made)}"

    tier = tier_that_answers(answer)
    try:
        tier.submit_store(1, keys(2), [0, 1])
        [stored] = polled(tier)
        tier.submit_load(2, keys(2), [2, 3])
        [loaded] = polled(tier)
    finally:
        tier.close()
    assert [stored.answer, loaded.answer] == ["answer 1", "answer 2"]
    assert [(result.job_id, result.success, load) for result, load, _ in made] == [(1, True, False), (2, True, True)]
    assert all(by is not threading.current_thread() for _, _, by in made)


def test_a_job_is_reported_though_its_answer_cannot_be_made() -> None:
    def answer(result: JobResult, load: bool) -> object:
        raise UnavailableError("no answer")

    tier = tier_that_answers(answer)
    try:
        tier.submit_store(1, keys(2), [0, 1])
        [result] = polled(tier)
    finally:
        tier.close()
    assert result.success
    assert result.answer is None
