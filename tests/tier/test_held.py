"""A row that a call may still touch when its job ends is held, and released exactly once."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

import pytest
from record_rows import RecordRows, Watched, places
from tier_bench import LIMIT_S, SLOT_BYTES, Engine, Shop, key, keys
from tier_faults import faulty, only

from kvstore_sdk.backend import Buffer
from kvstore_sdk.testing import Fault, FaultyBackend, Hang, InDoubt, Raise, RecordingBackend
from kvstore_sdk.tier import direct as direct_module

NewEngine = Callable[..., Engine]


@pytest.fixture
def way() -> str:
    return "direct"


@pytest.mark.parametrize("after", [False, True])
def test_a_load_that_hangs_ends_in_time_and_its_rows_are_released_once_when_the_call_returns(after: bool, new_engine: NewEngine) -> None:
    backend = faulty(calls=64)
    engine = new_engine(backend, batch_records=1)
    engine.store(keys(8))
    hang = Fault("get", Hang(after=after), names=only(1, 2))
    backend.arm(hang)
    job = engine.submit_load(keys(4), rows=range(10, 14))
    assert backend.wait_hanging(2)
    engine.wait(lambda: engine.total("loads", "loaded") == 2)
    engine.time_is_up()
    result = engine.result(job)
    assert (result.failed, result.held) == ((key(1), key(2)), (11, 12))
    assert engine.memory.holds(10, key(0))
    assert engine.memory.holds(13, key(3))
    if not after:
        assert engine.memory.is_painted(11)
        assert engine.memory.is_painted(12)
    engine.wait(lambda: engine.tier.metrics.gauge_value("quarantined_bytes") == 2 * SLOT_BYTES)
    # Nobody else may load into them, and everything else goes on.
    assert engine.load([key(5)], rows=[11]).failed == (key(5),)
    assert engine.total("loads", "refused") == 1
    assert engine.load([key(6)], rows=[20]).success
    engine.steps(0.05)
    assert engine.held == {11: 1, 12: 1}
    backend.heal()
    engine.wait(engine.in_rest)
    assert engine.held == {11: 0, 12: 0}
    # The late call wrote what it was asked for, before that, and nothing after it.
    for row in (11, 12):
        engine.memory.paint(row, 0xEE)
    engine.steps(0.05)
    assert all(engine.memory.is_painted(row, 0xEE) for row in (11, 12))
    assert engine.load([key(5)], rows=[11]).success


def test_a_store_that_hangs_holds_its_row_for_reading_only(new_engine: NewEngine) -> None:
    """It stores what was submitted, as the row does not change while it is held; other stores may read the row too."""
    backend = faulty(Fault("put", Hang(), names=only(0), times=1), calls=64)
    engine = new_engine(backend)
    job = engine.submit_store([key(0)], rows=[7])
    assert backend.wait_hanging()
    engine.time_is_up()
    result = engine.result(job)
    assert (result.failed, result.held) == ((key(0),), (7,))
    engine.tier.submit_load(99, [key(0)], [7])
    assert engine.result(99).failed == (key(0),)
    again = engine.result(engine.submit_store([key(0)], [7], generation=None))
    assert (again.done, again.held) == ((key(0),), ())
    assert engine.held == {7: 1}
    backend.heal()
    engine.wait(engine.in_rest)
    assert Shop(backend).record(key(0)) == engine.memory.sealed(key(0))


def test_a_row_that_is_held_twice_is_released_twice(new_engine: NewEngine) -> None:
    backend = faulty(Fault("put", Hang(), names=only(0)), calls=64)
    engine = new_engine(backend)
    jobs = [engine.submit_store([key(0)], [3]), engine.submit_store([key(0)], [3], generation=None)]
    assert backend.wait_hanging(2)
    engine.time_is_up()
    assert [engine.result(job).held for job in jobs] == [(3,), (3,)]
    backend.heal()
    engine.wait(engine.in_rest)
    assert engine.held == {3: 0}


def test_a_row_is_released_after_its_result_and_not_before(new_engine: NewEngine) -> None:
    """The call may come back between the end of the job and the engine's next poll: then the row was never held, or is released later."""
    backend = faulty()
    engine = new_engine(backend)
    engine.store(keys(1))
    backend.arm(Fault("get", Hang(), names=only(0), times=1))
    engine.submit_load(keys(1), rows=[4])
    assert backend.wait_hanging()
    engine.tier._desk.expire_all()
    assert engine.tier.take_released() == []
    backend.release()
    end_s = time.monotonic() + LIMIT_S
    while not engine.tier._work.is_untouched:
        assert time.monotonic() < end_s
        time.sleep(0.001)
    assert engine.tier.take_released() == []
    [result] = engine.tier.poll()
    assert (result.failed, result.held) == ((key(0),), ())
    assert engine.tier.take_released() == []


@pytest.mark.parametrize("operation", ["get", "put"])
def test_rows_in_doubt_are_held_until_they_are_settled(operation: str, new_engine: NewEngine) -> None:
    backend = faulty(Fault("get", InDoubt(), times=0))
    recording = RecordingBackend(backend)
    engine = new_engine(recording, breaker_failures=100, load_timeout_s=LIMIT_S, store_timeout_s=LIMIT_S)
    engine.store(keys(4))
    backend.arm(Fault(operation, InDoubt(), names=only(1, 21)))
    some, submit = (keys(4), engine.submit_load) if operation == "get" else (keys(4, start=20), engine.submit_store)
    result = engine.result(submit(some, range(10, 14)))
    assert (result.failed, result.held) == ((some[1],), (11,))
    assert engine.tier.metrics.gauge_value("quarantined_bytes") == SLOT_BYTES
    engine.steps(0.2)
    assert engine.held == {11: 1}
    backend.heal()
    engine.wait(engine.in_rest)
    assert engine.held == {11: 0}
    assert not recording.breaches
    if operation == "put":
        assert Shop(backend).record(some[1]) == engine.memory.sealed(some[1])


def test_rows_held_count_against_what_may_be_held_and_open_the_breakers(new_engine: NewEngine) -> None:
    backend = faulty(calls=64)
    engine = new_engine(backend, batch_records=1, breaker_failures=100, max_quarantined_bytes=3 * SLOT_BYTES)
    engine.store(keys(8))
    backend.arm(Fault("get", Hang()))
    jobs = [engine.submit_load([key(number)], rows=[20 + number]) for number in range(4)]
    assert backend.wait_hanging(4)
    engine.time_is_up()
    assert all(engine.result(job).held for job in jobs)
    engine.wait(lambda: engine.tier.metrics.gauge_value("breaker_open", "read") == 1)
    assert engine.load([key(6)], rows=[30]).held == ()
    backend.heal()
    engine.wait(engine.in_rest)
    engine.wait(lambda: engine.finds(key(0)))


def test_a_bad_record_is_looked_at_only_while_its_row_is_ours(new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that ends while a row is verified holds it: what the engine writes there next is not taken for what was stored."""
    engine = new_engine()
    engine.store(keys(1))
    real = direct_module.verify
    verifying, go_on = threading.Event(), threading.Event()

    def slow(*args):  # type: ignore[no-untyped-def]
        verifying.set()
        go_on.wait(LIMIT_S)
        return real(*args)

    monkeypatch.setattr(direct_module, "verify", slow)
    job = engine.submit_load(keys(1), rows=[5])
    assert verifying.wait(LIMIT_S)
    engine.time_is_up()
    assert engine.result(job).held == (5,)
    go_on.set()
    engine.wait(engine.in_rest)
    assert engine.memory.holds(5, key(0))
    assert engine.total("corrupt") == 0


@pytest.mark.parametrize("operation", ["get", "put"])
def test_no_call_begins_to_touch_a_row_after_its_job_was_reported(operation: str, new_engine: NewEngine) -> None:
    """RACE-03: one job ends while the batch that it is in is got ready; its row is not in the call."""
    backend = Watched(faulty(Fault("exists", Hang(), times=1), calls=1))
    faults = backend.inner
    assert isinstance(faults, FaultyBackend)
    preparing, go_on = threading.Event(), threading.Event()

    class Slow(RecordRows):
        def record(self, row: int) -> Buffer:
            if threading.current_thread().name.startswith("test-io"):
                preparing.set()
                go_on.wait(LIMIT_S)
            return super().record(row)

    memory = Slow(64)
    timeouts = {"store_timeout_s": 0.2, "load_timeout_s": 0.2, "min_bytes_per_s": 5_000.0, "lookup_timeout_s": LIMIT_S}
    engine = new_engine(backend, memory=memory, io_threads=1, batch_records=32, **timeouts)
    writer = new_engine(faults)
    if operation == "get":
        writer.store(keys(20))
        writer.store([key(50)])
    engine.tier.lookup("r", key(99))
    engine.tier.flush()
    assert faults.wait_hanging()
    submit = engine.submit_load if operation == "get" else engine.submit_store
    # Its deadline is later, because it has more bytes.
    long = submit(keys(20), range(20))
    short = submit([key(50)], [50])
    faults.release()
    assert preparing.wait(LIMIT_S)
    result = engine.result(short)
    assert (result.failed, result.held) == ((key(50),), ())
    assert long not in engine.results
    go_on.set()
    assert engine.result(long).success
    engine.wait(engine.in_rest)
    assert len(places(backend.buffers[operation], memory)) == 20
    assert memory.record(50).offset not in {offset for offset, _ in places(backend.buffers[operation], memory)}


def test_close_during_calls_that_hang_holds_their_rows_and_leaves_the_memory_mapped(
    new_engine: NewEngine, caplog: pytest.LogCaptureFixture
) -> None:
    backend = Watched(faulty(calls=64))
    faults = backend.inner
    assert isinstance(faults, FaultyBackend)
    engine = new_engine(backend, close_timeout_s=0.4, load_timeout_s=10 * LIMIT_S, batch_records=1)
    engine.store(keys(3))
    faults.arm(Fault("get", Hang(after=True), names=only(1)), Fault("close", Hang()))
    job = engine.submit_load(keys(3), rows=range(10, 13))
    assert faults.wait_hanging()
    engine.wait(lambda: engine.total("loads", "loaded") == 2)
    began_s = time.monotonic()
    engine.tier.close()
    assert time.monotonic() - began_s < LIMIT_S
    assert "the memory of records stays mapped" in caplog.text
    assert engine.result(job).held == (11,)
    assert engine.tier.touches_memory
    assert ("unregister", engine.memory.region) not in backend.regions
    assert engine.tier.take_released() == []
    faults.heal()
    # Who still asks hears of it, though the tier is closed.
    engine.wait(lambda: not engine.held.total())
    assert engine.tier.touches_memory, "the backend was never told that the region is given up"


def test_a_region_that_is_in_doubt_for_ever_is_not_unmapped_when_its_owner_forgets_it(new_engine: NewEngine) -> None:
    backend = faulty(Fault("get", InDoubt(), times=0), Fault("settle", Raise(RuntimeError)))
    engine = Engine(backend, memory=RecordRows(8), close_timeout_s=0.3)
    engine.store(keys(1))
    backend.arm(Fault("get", InDoubt()))
    assert engine.load(keys(1)).held == (0,)
    region = weakref.ref(engine.memory.region)
    engine.tier.close()
    assert engine.tier.take_released() == []
    del engine
    assert region() is not None
    backend.heal()
