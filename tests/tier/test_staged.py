"""The staged way: a backend never sees the rows, and a row is touched while its job is open, and only then."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable

import pytest
from tier_bench import HOLE, LIMIT_S, PAYLOAD_BYTES, SLOT_BYTES, Engine, Memory, Shop, key, keys, payload
from tier_faults import faulty, in_rest, only

from kvstore_sdk.backend import ConfigError, Region
from kvstore_sdk.testing import (
    Fault,
    Hang,
    InDoubt,
    RecordingBackend,
    WriteLate,
)
from kvstore_sdk.tier import staged

NewEngine = Callable[..., Engine]


def test_an_engine_memory_that_cannot_be_copied_fails_its_chunk_alone(new_engine: NewEngine, caplog: pytest.LogCaptureFixture) -> None:
    """Not the backend's doing; the others of the batch, the slots and the threads go on all the same."""
    engine = new_engine(io_threads=1, batch_records=8)
    broken = {2}

    def copy(way: str, row: int) -> None:
        if row in broken:
            raise RuntimeError(f"row {row} cannot be copied {way}")

    engine.memory.on_copy = copy
    stored = engine.store(keys(5))
    assert (stored.failed, engine.total("stores", "failed")) == ((key(2),), 1)
    broken.clear()
    engine.store(keys(5))
    broken.add(3)
    loaded = engine.load(keys(5))
    assert (loaded.failed, engine.total("loads", "failed")) == ((key(3),), 1)
    assert all(engine.memory.holds(row, key(row)) for row in (0, 1, 2, 4))
    engine.wait(lambda: in_rest(engine))
    assert len(engine.io_threads()) == 1
    assert "row 2 of the engine's memory failed" in caplog.text


def test_staging_memory_that_cannot_be_had_is_refused_by_name(new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Region:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(staged, "Region", refuse)
    with pytest.raises(ConfigError, match=r"staging_bytes: \d+ bytes of staging memory cannot be had: Cannot allocate memory; give less"):
        new_engine()


def test_even_an_exit_in_the_engines_memory_does_not_end_a_thread(new_engine: NewEngine) -> None:
    engine = new_engine(io_threads=1, batch_records=8)
    engine.store(keys(3))

    def copy(way: str, row: int) -> None:
        raise SystemExit(f"{way} {row}")

    engine.memory.on_copy = copy
    assert engine.load(keys(3)).failed == tuple(keys(3))
    assert engine.store(keys(3, start=10)).failed == tuple(keys(3, start=10))
    engine.memory.on_copy = lambda way, row: None
    assert engine.load(keys(3)).success
    assert len(engine.io_threads()) == 1
    assert engine.total("loads", "failed") == engine.total("stores", "failed") == 3
    engine.wait(lambda: in_rest(engine))


def test_sixteen_reads_that_hang_stop_nothing_else(new_engine: NewEngine) -> None:
    """LIV-07: a 17th load fails in time, other tiers serve, and close is bounded."""
    backend = faulty(calls=16)
    engine = new_engine(backend, io_threads=16, batch_records=1, close_timeout_s=0.5, breaker_failures=100)
    engine.store(keys(20))
    # It does not even let go of them when it is closed.
    backend.arm(Fault("get", Hang()), Fault("close", Hang()))
    hung = [engine.submit_load([key(number)], rows=[number]) for number in range(16)]
    assert backend.wait_hanging(16)
    engine.set_timeouts(load_timeout_s=0.3)
    assert not engine.load([key(17)], rows=[17]).success
    engine.time_is_up()
    assert all(not engine.result(job).success for job in hung)
    other = new_engine()
    assert other.store(keys(3)).success
    assert other.load(keys(3)).success
    began_s = time.monotonic()
    engine.tier.close()
    assert time.monotonic() - began_s < LIMIT_S
    for row in range(18):
        engine.memory.paint(row, 0xEE)
    backend.heal()
    for thread in engine.io_threads():
        thread.join(LIMIT_S)
    assert all(engine.memory.is_painted(row, 0xEE) for row in range(18))


def test_what_a_late_call_stored_is_what_was_submitted(new_engine: NewEngine) -> None:
    """RACE-03: the engine reuses the row as soon as the job was reported."""
    backend = faulty(Fault("put", Hang(), names=only(0), times=1))
    engine = new_engine(backend)
    job = engine.submit_store([key(0)], rows=[0])
    assert backend.wait_hanging()
    engine.time_is_up()
    assert not engine.result(job).success
    engine.memory.paint(0, 0xFF)
    backend.heal()
    engine.wait(lambda: in_rest(engine))
    assert Shop(backend).record(key(0))[4096 : 4096 + PAYLOAD_BYTES[0]] == payload(key(0))


def test_a_row_is_not_read_after_its_job_was_reported(new_engine: NewEngine) -> None:
    """RACE-03: what waited too long is never stored under its key with what is in the row by then."""
    backend = faulty(calls=2)
    engine = new_engine(backend, io_threads=2, batch_records=1)
    backend.arm(Fault("put", Hang(), times=1))
    engine.submit_store([key(0)], rows=[0])
    assert backend.wait_hanging()
    waiting = engine.submit_store([key(1)], rows=[1])
    engine.time_is_up()
    assert not engine.result(waiting).success
    engine.memory.paint(1, 0xFF)
    backend.heal()
    engine.steps(0.1)
    engine.wait(lambda: in_rest(engine))
    assert not Shop(backend).has(key(1))
    assert ("out", 1, 0) not in engine.memory.copied


def test_a_row_is_not_read_after_its_job_was_reported_not_even_by_a_batch_that_has_begun(new_engine: NewEngine) -> None:
    """RACE-03: one job ends while the batch is busy with the rows of another."""
    backend = faulty(Fault("exists", Hang(), times=1), calls=1)
    engine = new_engine(backend, io_threads=1, batch_records=32, store_timeout_s=0.2, min_bytes_per_s=5_000.0, lookup_timeout_s=LIMIT_S)
    engine.tier.lookup("r", key(99))
    engine.tier.flush()
    assert backend.wait_hanging()
    copying, go_on = threading.Event(), threading.Event()

    def copy(way: str, row: int) -> None:
        copying.set()
        go_on.wait(LIMIT_S)

    engine.memory.on_copy = copy
    # Its deadline is later, because it has more bytes.
    long = engine.submit_store(keys(20), rows=range(20))
    short = engine.submit_store([key(50)], rows=[50])
    backend.release()
    assert copying.wait(LIMIT_S)
    assert not engine.result(short).success
    assert long not in engine.results
    engine.memory.paint(50, 0xFF)
    go_on.set()
    engine.result(long)
    engine.wait(lambda: in_rest(engine))
    assert ("out", 50, 0) not in engine.memory.copied
    assert not Shop(backend).has(key(50))


@pytest.mark.parametrize("after", [False, True])
def test_a_row_is_not_written_after_its_job_was_reported(after: bool, new_engine: NewEngine) -> None:
    """The records come late, whole and right; their rows belong to somebody else by then."""
    backend = faulty(calls=64)
    engine = new_engine(backend)
    engine.store(keys(8))
    backend.arm(Fault("get", Hang(after=after), times=4))
    job = engine.submit_load(keys(8), rows=range(8))
    assert backend.wait_hanging()
    engine.time_is_up()
    assert engine.result(job).failed
    for row in range(8):
        engine.memory.paint(row, 0xEE)
    backend.heal()
    engine.wait(lambda: in_rest(engine))
    engine.steps(0.05)
    assert all(engine.memory.is_painted(row, 0xEE) for row in range(8))
    assert engine.total("loads") == 8


def test_a_copy_that_takes_long_does_not_let_a_job_be_reported_before_it_ends(new_engine: NewEngine) -> None:
    """Whoever copies holds the job open: a result never comes in the middle of a copy."""
    engine = new_engine()
    engine.store([key(0)])
    engine.set_timeouts(load_timeout_s=0.1)
    copying: list[str] = []

    def copy(way: str, row: int) -> None:
        copying.append("begun")
        time.sleep(0.4)
        copying.append("over")

    engine.memory.on_copy = copy
    result = engine.load([key(0)], rows=[1])
    assert copying in (["begun", "over"], [])
    engine.memory.paint(1, 0xEE)
    engine.steps(0.1)
    assert engine.memory.is_painted(1, 0xEE)
    assert len(result.done) + len(result.failed) == 1


def test_a_backend_that_writes_late_changes_no_row(new_engine: NewEngine) -> None:
    """The breach is in staging memory; the row that was loaded into meanwhile keeps what was verified."""
    backend = faulty(Fault("get", WriteLate(), names=only(0), times=1))
    engine = new_engine(backend, retries=0)
    engine.store(keys(2))
    assert engine.load([key(0)], rows=[5]).failed == (key(0),)
    assert engine.load([key(1)], rows=[5]).success
    backend.release()
    assert backend.wait_late()
    assert engine.memory.holds(5, key(1))
    assert engine.load([key(1)], rows=[6]).success
    assert engine.memory.holds(6, key(1))


def test_a_late_write_into_a_slot_in_use_is_found(new_engine: NewEngine) -> None:
    """One slot is in use when the late write comes: what it destroys is read again, not delivered."""
    backend = faulty(Fault("get", WriteLate(), names=only(0), times=1))
    engine = new_engine(backend, retries=0, io_threads=1, staging_bytes=2 * SLOT_BYTES)
    engine.store(keys(2))
    engine.load([key(0)], rows=[5])
    backend.arm(Fault("get", Hang(after=True), names=only(1), times=1))
    job = engine.submit_load([key(1)], rows=[6])
    assert backend.wait_hanging()
    backend.release()
    assert backend.wait_late()
    result = engine.result(job)
    assert engine.memory.holds(6, key(1)) if result.success else engine.memory.is_painted(6)


def test_a_copy_that_raises_loses_no_slot_in_doubt(new_engine: NewEngine) -> None:
    backend = faulty(Fault("get", InDoubt(), times=0))
    recording = RecordingBackend(backend)
    engine = new_engine(recording, io_threads=1, batch_records=4, staging_bytes=8 * SLOT_BYTES)
    engine.store(keys(4))
    backend.arm(Fault("get", InDoubt(), names=only(0)))

    def copy(way: str, row: int) -> None:
        raise SystemExit(way)

    engine.memory.on_copy = copy
    assert engine.load(keys(4)).failed == tuple(keys(4))
    engine.memory.on_copy = lambda way, row: None
    engine.wait(lambda: engine.free_slots() == 7)
    assert engine.store(keys(20, start=10)).success
    backend.heal()
    engine.wait(lambda: in_rest(engine))
    assert not recording.breaches


def test_an_engine_memory_is_used_by_our_threads_only(new_engine: NewEngine) -> None:
    """The engine's own thread is never kept by a copy."""
    seen: set[str] = set()

    class Watched(Memory):
        def copy_out(self, row: int, group: int, payload: memoryview) -> None:
            seen.add(threading.current_thread().name)
            super().copy_out(row, group, payload)

        def copy_in(self, row: int, group: int, payload: memoryview) -> None:
            seen.add(threading.current_thread().name)
            super().copy_in(row, group, payload)

    engine = new_engine(memory=Watched(8))
    engine.store(keys(8))
    engine.load(keys(8))
    assert seen
    assert all(name.startswith("test-io-") for name in seen)


def test_stale_bytes_of_a_row_are_in_no_record(new_engine: NewEngine) -> None:
    """Only the bytes of the chunk's own group are stored."""
    engine = new_engine()
    marker = bytes(range(200, 232))
    for row in range(4):
        engine.memory.view(row)[:] = (marker * 200)[: len(engine.memory.view(row))]
        engine.memory.write(row, key(row, group=1))
    job = engine.submit_store([key(row, group=1) for row in range(4)], range(4), generation=None)
    assert engine.result(job).success
    assert all(marker not in Shop(engine.backend).record(key(row, group=1)) for row in range(4))


def test_a_load_touches_only_the_bytes_of_its_group(new_engine: NewEngine) -> None:
    engine = new_engine()
    some = [key(row, group=1) for row in range(4)]
    engine.store(some)
    job = engine.submit_load(some, range(4))
    for row in range(4):
        engine.memory.paint(row)
    assert engine.result(job).success
    assert all(engine.memory.holds(row, one) for row, one in enumerate(some))
    assert set(bytes(engine.memory.view(0))[PAYLOAD_BYTES[1] :]) == {HOLE}
