"""A Tier whose calls nobody waits for: the engine's thread begins them and takes their answers, for a bounded time whenever it comes by."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from polled_backend import Polled
from record_rows import RecordRows
from tier_bench import LIMIT_S, Engine, identity, key, keys
from tier_faults import faulty

from kvstore_sdk.isolation import PolledBackend, open_isolated
from kvstore_sdk.testing import Fault, Hang
from kvstore_sdk.tier import Lookup, Tier, TierSettings
from kvstore_sdk.tier import crew as module
from kvstore_sdk_backends.memory import open_memory

NewEngine = Callable[..., Engine]


@pytest.fixture
def way() -> str:
    return "polled"


def asked(engine: Engine) -> dict[str, int]:
    """How many calls of each operation its backend has been asked for."""
    backend = engine.tier._backend
    assert isinstance(backend, Polled)
    return backend.asked


def test_no_thread_is_started_and_calls_begin_when_somebody_comes_by(new_engine: NewEngine) -> None:
    before = {thread.name for thread in threading.enumerate()}
    engine = new_engine(name="polled")
    job = engine.submit_store(keys(3))
    time.sleep(0.05)
    assert asked(engine) == {}
    assert engine.result(job).success
    assert engine.load(keys(3)).success
    assert all(engine.memory.holds(row, key(row)) for row in range(3))
    assert engine.finds(key(0))
    assert not [thread.name for thread in threading.enumerate() if thread.name not in before and thread.name.startswith("polled")]


def test_where_records_are_staged_threads_wait_for_the_calls(new_engine: NewEngine) -> None:
    """Copies would be the engine's to make."""
    backend = Polled(open_memory(""))
    assert isinstance(backend, PolledBackend)
    engine = new_engine(backend, memory=None, polled=False)
    assert engine.store(keys(3)).success
    assert len(engine.io_threads()) == 4
    assert asked(engine) == {}


def test_a_long_step_finds_more_calls_under_way_than_are_worked_on(new_engine: NewEngine) -> None:
    backend = faulty(Fault("get", Hang(), times=0))
    engine = new_engine(backend, batch_records=1, load_timeout_s=LIMIT_S, staging_bytes=1 << 20)
    engine.store(keys(48))
    engine.wait(engine.in_rest)
    hang = Fault("get", Hang())
    backend.arm(hang)
    began = asked(engine).get("get", 0)
    engine.submit_load(keys(48))
    engine.steps(0.05)
    assert asked(engine)["get"] - began == engine.most_calls == 16
    backend.heal()
    engine.wait(lambda: not engine.tier.busy)


def test_one_time_by_does_a_bounded_share_of_what_waits(new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = new_engine(batch_records=1, store_timeout_s=LIMIT_S, load_timeout_s=LIMIT_S)
    engine.store(keys(12))
    engine.wait(engine.in_rest)
    monkeypatch.setattr(module, "_MOST_S", 0.0)
    monkeypatch.setattr(module, "_LEAST_S", 0.0)
    job = engine.submit_load(keys(12))
    began, loaded = asked(engine)["get"], engine.total("loads", "loaded")
    for number in range(1, 5):
        engine.tier.poll()
        assert asked(engine)["get"] - began <= number
        assert engine.total("loads", "loaded") - loaded <= number
    assert engine.result(job).success


def test_what_was_answered_while_nobody_came_by_is_neither_late_nor_lost(new_engine: NewEngine) -> None:
    engine = new_engine(load_timeout_s=3.0)
    engine.store(keys(4))
    engine.wait(engine.in_rest)
    job = engine.submit_load(keys(4))
    engine.tier.flush()
    time.sleep(3.2)
    assert engine.result(job).success
    assert engine.total("abandoned_calls") == 0
    assert engine.tier.metrics.gauge_value("breaker_open", "read") == 0


def test_a_call_that_hangs_costs_its_job_in_time_and_holds_its_row_until_it_returns(new_engine: NewEngine) -> None:
    backend = faulty()
    engine = new_engine(backend, breaker_failures=100)
    engine.store(keys(2))
    engine.wait(engine.in_rest)
    backend.arm(Fault("get", Hang(), times=1))
    job = engine.submit_load([key(0)], rows=[7])
    engine.step()
    assert backend.wait_hanging()
    engine.time_is_up()
    result = engine.result(job)
    assert result.failed == (key(0),)
    assert result.held == (7,)
    engine.steps(0.6)
    assert engine.held[7] == 1, "its call may still write there"
    engine.wait(lambda: engine.load([key(1)]).success, "a load of another row")
    backend.heal()
    engine.wait(engine.in_rest)


def test_drain_comes_by_itself(new_engine: NewEngine) -> None:
    engine = new_engine(faulty(Fault("put", Hang(0.02))), batch_records=1, drain_timeout_s=LIMIT_S, store_timeout_s=LIMIT_S)
    jobs = [engine.submit_store([key(number)], rows=[number]) for number in range(20)]
    engine.tier.drain()
    results = engine.tier.poll()
    assert sorted(result.job_id for result in results) == jobs
    assert all(result.success for result in results)


def test_close_takes_in_what_it_ends_and_settles_what_was_in_doubt(new_engine: NewEngine) -> None:
    backend = faulty()
    engine = new_engine(backend)
    engine.store(keys(2))
    engine.wait(engine.in_rest)
    # It hangs until the backend is closed.
    backend.arm(Fault("get", Hang()))
    engine.set_timeouts(load_timeout_s=2.0)
    assert engine.load(keys(2)).failed == tuple(keys(2))
    engine.wait(lambda: engine.tier._work.in_doubt)
    engine.tier.close()
    assert not engine.tier.touches_memory
    engine.step()
    assert not engine.held.total()


def test_an_interrupt_of_the_engines_thread_passes_and_costs_no_more_than_its_batch(new_engine: NewEngine) -> None:
    """The signal that ends an engine is raised in whatever its thread does: here while a record is looked for."""
    engine = new_engine(batch_records=1)
    engine.store(keys(4))
    engine.wait(engine.in_rest)
    record, rows = engine.memory.record, []

    def interrupted(row: int):  # type: ignore[no-untyped-def]
        rows.append(row)
        if len(rows) == 1:
            raise KeyboardInterrupt
        return record(row)

    engine.memory.record = interrupted
    job = engine.submit_load(keys(4))
    with pytest.raises(KeyboardInterrupt):
        engine.tier.flush()
    result = engine.result(job)
    assert len(result.failed) == 1
    assert len(result.done) == 3
    engine.wait(engine.in_rest)


def test_threads_that_come_by_together_do_everything_once(new_engine: NewEngine) -> None:
    """Health questions are asked by a thread of their own."""
    engine = new_engine(batch_records=1)
    stop = threading.Event()

    def pump() -> None:
        while not stop.is_set():
            engine.tier._crew.pump()

    others = [threading.Thread(target=pump) for _ in range(2)]
    for other in others:
        other.start()
    try:
        for start in range(0, 60, 20):
            assert engine.store(keys(20, start)).success
            assert engine.load(keys(20, start)).success
            assert engine.ask(keys(20, start)) == [Lookup.HIT] * 20
    finally:
        stop.set()
        for other in others:
            other.join(LIMIT_S)
    engine.wait(engine.in_rest)
    assert engine.total("stores", "stored") == engine.total("loads", "loaded") == 60


def test_a_child_process_is_driven_without_threads_and_its_death_costs_misses(tmp_path: Path) -> None:
    """The real one: killed while it is used, it comes back, and nothing of it is left after `close`."""
    backend = open_isolated("fs", location=str(tmp_path / "kv"))
    engine = Engine(backend, memory=RecordRows(64), load_timeout_s=LIMIT_S, store_timeout_s=LIMIT_S, lookup_timeout_s=LIMIT_S)
    try:
        assert not engine.io_threads()
        assert engine.store(keys(20)).success
        assert engine.load(keys(20)).success
        assert all(engine.memory.holds(row, key(row)) for row in range(20))
        pid = backend.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        engine.wait(lambda: backend.deaths == 1)
        job = engine.submit_load(keys(20))
        assert len(engine.result(job).done) + len(engine.result(job).failed) == 20
        engine.wait(lambda: engine.finds(key(0)) and engine.load(keys(20)).success, "loads from the next child")
        assert backend.restarts == 1
        engine.wait(engine.in_rest)
    finally:
        engine.close()
    assert not engine.tier.touches_memory
    assert backend.pid is None


def test_a_polled_tier_needs_no_thread_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Polled(open_memory(""))

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    tier = Tier(backend, RecordRows(8), identity=identity(), settings=TierSettings(health_probe_s=0))
    monkeypatch.undo()
    tier.close()
