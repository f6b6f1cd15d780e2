"""A backend that raises, lies, hangs, answers late or writes late costs failed jobs, and nothing else."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from tier_bench import LIMIT_S, PAYLOAD_BYTES, SLOT_BYTES, Engine, Memory, Shop, key, keys, payload

from kvstore_sdk.backend import (
    Backend,
    Capabilities,
    ClosedError,
    DeniedError,
    GetResult,
    GetStatus,
    InvalidError,
    NoSpaceError,
    PutResult,
    PutStatus,
    ThrottledError,
    UnavailableError,
)
from kvstore_sdk.testing import (
    BackendWrapper,
    Fault,
    FaultyBackend,
    Hang,
    InDoubt,
    Raise,
    RecordingBackend,
    Return,
    ReturnLate,
    Say,
    WriteLate,
)
from kvstore_sdk.tier import Lookup
from kvstore_sdk_backends.memory import open_memory

NewEngine = Callable[..., Engine]


class Wide(BackendWrapper):
    """Takes as many calls at a time as is said."""

    def __init__(self, inner: Backend, calls: int) -> None:
        super().__init__(inner)
        self._calls = calls

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(max_record_bytes=1 << 20, max_batch=256, max_concurrency=self._calls)


def faulty(*script: Fault, calls: int = 8, seed: int = 0) -> FaultyBackend:
    return FaultyBackend(Wide(open_memory(""), calls), script, seed=seed)


def only(*numbers: int) -> Callable[[str], bool]:
    """Chooses the records of these chunks."""
    shop = Shop(open_memory(""))
    names = {shop.name(key(number)) for number in numbers}
    return names.__contains__


def in_rest(engine: Engine) -> bool:
    """Whether nothing runs, and nothing is held."""
    return engine.tier._work.is_untouched and engine.all_slots_free()


# Exceptions.


@pytest.mark.parametrize("error", [RuntimeError, UnavailableError, SystemExit, KeyboardInterrupt, MemoryError])
def test_a_put_that_raises_costs_its_job_and_no_other(error: type[BaseException], new_engine: NewEngine) -> None:
    """LIV-10: puts 4 to 10 complete, job 3 fails, and all memory comes back."""
    backend = faulty(Fault("put", Raise(error), names=only(2)))
    engine = new_engine(backend, batch_records=1, retries=0)
    jobs = [engine.submit_store([key(number)], rows=[number]) for number in range(10)]
    assert [engine.result(job).success for job in jobs] == [number != 2 for number in range(10)]
    engine.wait(lambda: in_rest(engine))
    assert len(engine.io_threads()) == 4
    assert engine.total("stores", "stored") == 9
    assert engine.total("stores", "failed") == 1


@pytest.mark.parametrize("error", [RuntimeError, UnavailableError, SystemExit])
def test_a_get_that_raises_never_reports_its_chunk_as_loaded(error: type[BaseException], new_engine: NewEngine) -> None:
    """INT-03, INT-08, LIV-14: which chunks are valid is exact, and the others' rows are as they were."""
    backend = faulty()
    engine = new_engine(backend, batch_records=1, retries=0)
    engine.store(keys(4))
    backend.arm(Fault("get", Raise(error), names=only(2)))
    job = engine.submit_load(keys(4), rows=range(10, 14))
    for row in range(10, 14):
        engine.memory.paint(row, 0xEE) if row == 12 else None
    result = engine.result(job)
    assert (result.done, result.failed) == ((key(0), key(1), key(3)), (key(2),))
    assert engine.memory.is_painted(12, 0xEE)
    assert engine.memory.holds(13, key(3))
    assert not engine.tier.busy
    engine.steps(0.02)
    assert len(engine.results) == 2


@pytest.mark.parametrize("operation", ["exists", "put", "get"])
@pytest.mark.parametrize(
    "bend",
    [lambda _: None, lambda results: results[:-1], lambda results: results * 2, lambda results: [None] * len(results), lambda _: 7],
    ids=["none", "short", "long", "nothing", "number"],
)
def test_an_answer_that_breaks_the_contract_fails_all_of_its_call(
    operation: str, bend: Callable[[Any], object], new_engine: NewEngine
) -> None:
    """A result list of another length, or with something else in it, is a breach."""
    backend = faulty()
    engine = new_engine(backend, breaker_failures=100)
    if operation != "put":
        engine.store(keys(3))
    backend.arm(Fault(operation, Return(bend), names=only(*range(10))))
    if operation == "exists":
        assert new_engine(backend, breaker_failures=100).ask(keys(3)) == [Lookup.MISS] * 3
        return
    result = engine.store(keys(3)) if operation == "put" else engine.load(keys(3))
    assert result.failed == tuple(keys(3))
    assert engine.total("breaches", operation) >= 1
    assert engine.total("retries") == 0
    engine.wait(lambda: in_rest(engine))


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


# Retries.


def test_what_may_be_retried_is_and_succeeds(new_engine: NewEngine) -> None:
    backend = faulty(Fault("put", Raise(), names=only(0), times=2), Fault("get", Raise(), names=only(0), times=2))
    engine = new_engine(backend)
    assert engine.store([key(0)]).success
    assert engine.load([key(0)]).success
    assert engine.total("retries", "put") == engine.total("retries", "get") == 2


def test_retries_end(new_engine: NewEngine) -> None:
    backend = faulty(Fault("put", Raise()), Fault("get", Raise()))
    engine = new_engine(backend, retries=3, breaker_failures=100)
    assert not engine.store([key(0)]).success
    assert not engine.load([key(0)]).success
    assert [event.op for event in backend.log] == ["put"] * 4 + ["get"] * 4


@pytest.mark.parametrize("error", [NoSpaceError, InvalidError, DeniedError, ClosedError])
def test_what_may_not_be_retried_is_not(error: type[Exception], new_engine: NewEngine) -> None:
    backend = faulty(Fault("put", Say(PutResult.failed(error("injected")))))
    engine = new_engine(backend)
    assert not engine.store([key(0)]).success
    assert len(backend.log) == 1
    assert engine.total("retries") == 0


def test_a_closed_backend_is_not_asked_again(new_engine: NewEngine) -> None:
    backend = faulty(Fault("put", Say(PutResult(PutStatus.CLOSED))), Fault("get", Say(GetResult(GetStatus.CLOSED))))
    engine = new_engine(backend)
    assert not engine.store([key(0)]).success
    assert not engine.load([key(0)]).success
    assert [event.op for event in backend.log] == ["put", "get"]


def test_a_store_that_asks_for_fewer_requests_is_left_alone_for_so_long(new_engine: NewEngine) -> None:
    backend = faulty(Fault("get", Say(GetResult.failed(ThrottledError("slow down", retry_after_s=0.3))), names=only(0), times=1))
    engine = new_engine(backend)
    engine.store([key(0)])
    result = engine.load([key(0)])
    assert result.success
    assert result.elapsed_s >= 0.3


@pytest.mark.parametrize("wish", [None, "soon", math.nan, -1.0, True])
def test_a_wish_that_is_no_time_is_no_reason_to_fail(wish: Any, new_engine: NewEngine) -> None:
    backend = faulty(Fault("get", Say(GetResult.failed(ThrottledError("slow down", retry_after_s=wish))), names=only(0), times=1))
    engine = new_engine(backend, load_timeout_s=5.0)
    engine.store([key(0)])
    assert engine.load([key(0)]).success


def test_a_wish_beyond_the_deadline_fails_at_once(new_engine: NewEngine) -> None:
    backend = faulty(Fault("get", Say(GetResult.failed(ThrottledError("slow down", retry_after_s=math.inf)))))
    engine = new_engine(backend, load_timeout_s=LIMIT_S)
    result = engine.load([key(0)])
    assert not result.success
    assert result.elapsed_s < LIMIT_S / 2


def test_retries_are_spread(new_engine: NewEngine) -> None:
    """Full jitter: clients that failed together do not come back together."""
    backend = RecordingBackend(faulty(Fault("get", Raise(), names=only(*range(20)), times=20)))
    engine = new_engine(backend, batch_records=1, retry_base_s=0.05, breaker_failures=100, load_timeout_s=5.0)
    engine.store(keys(20))
    jobs = [engine.submit_load([key(number)], rows=[number]) for number in range(20)]
    assert all(engine.result(job).success for job in jobs)
    gets = [call for call in backend.calls if call.op == "get"]
    first = {call.names[0]: call.started_s for call in reversed(gets)}
    waits = [call.started_s - first[call.names[0]] for call in gets if call.started_s != first[call.names[0]]]
    assert min(waits) < 0.04
    assert max(waits) > 0.06


def test_a_put_whose_answer_was_lost_is_repeated_and_found(new_engine: NewEngine) -> None:
    backend = faulty(Fault("put", Say(PutResult(PutStatus.UNKNOWN), after=True), names=only(0), times=1))
    engine = new_engine(backend)
    assert engine.store([key(0)]).success
    assert engine.total("stores", "exists") == 1


def test_a_put_whose_answer_was_lost_and_that_did_nothing_is_repeated(new_engine: NewEngine) -> None:
    backend = faulty(Fault("put", Say(PutResult(PutStatus.UNKNOWN)), names=only(0), times=1))
    engine = new_engine(backend)
    assert engine.store([key(0)]).success
    assert engine.total("stores", "stored") == 1
    assert Shop(backend).has(key(0))


# Lies.


def test_a_store_that_lies_about_storing_is_found_out_by_the_load(new_engine: NewEngine) -> None:
    """ATM-10: the engine asks for what is not there, and hears a miss."""
    backend = faulty(Fault("put", Say(PutResult(PutStatus.STORED))))
    engine = new_engine(backend)
    assert engine.store([key(0)]).success
    assert engine.finds(key(0))
    assert engine.load([key(0)]).failed == (key(0),)
    assert engine.memory.is_painted(0)
    backend.heal()
    assert not engine.finds(key(0))
    assert engine.events() == [(key(0), False), (key(0), True)]


def test_a_store_that_says_found_and_fills_nothing_is_found_out(new_engine: NewEngine) -> None:
    """Not even when the slot still holds the very record, from another key's place: key and bytes are bound."""
    backend = faulty()
    engine = new_engine(backend, io_threads=1, staging_bytes=2 * SLOT_BYTES)
    engine.store([key(0), key(1)])
    backend.arm(Fault("get", Say(GetResult(GetStatus.FOUND)), names=only(1)))
    assert engine.load([key(0)], rows=[0]).success
    assert engine.load([key(1)], rows=[1]).failed == (key(1),)
    assert engine.memory.is_painted(1)


def test_a_replace_that_answers_exists_has_failed(new_engine: NewEngine) -> None:
    backend = faulty()
    engine = new_engine(backend, retries=0)
    engine.store([key(0)])
    Shop(backend).replace(key(0), bytes(12288))
    engine.load([key(0)])
    backend.arm(Fault("put", Say(PutResult(PutStatus.EXISTS))))
    assert engine.store([key(0)]).failed == (key(0),)
    assert not engine.finds(key(0))


# Hanging.


def test_a_look_up_that_hangs_is_a_miss_in_time(new_engine: NewEngine) -> None:
    """LIV-02, LIV-03"""
    backend = faulty(Fault("exists", Hang()))
    engine = new_engine(backend, lookup_timeout_s=0.2)
    began_s = time.monotonic()
    assert engine.ask(keys(3)) == [Lookup.MISS] * 3
    assert 0.2 <= time.monotonic() - began_s < 2.0
    assert engine.total("lookup_timeouts") == 3
    engine.wait(lambda: engine.total("abandoned_calls", "exists") == 1)
    backend.heal()
    engine.wait(lambda: in_rest(engine))


def test_sixteen_reads_that_hang_stop_nothing_else(new_engine: NewEngine) -> None:
    """LIV-07: a 17th load fails in time, other tiers serve, and close is bounded."""
    backend = faulty(calls=16)
    engine = new_engine(backend, io_threads=16, batch_records=1, load_timeout_s=0.3, close_timeout_s=0.5, breaker_failures=100)
    engine.store(keys(20))
    # It does not even let go of them when it is closed.
    backend.arm(Fault("get", Hang()), Fault("close", Hang()))
    hung = [engine.submit_load([key(number)], rows=[number]) for number in range(16)]
    assert backend.wait_hanging(16)
    late = engine.submit_load([key(17)], rows=[17])
    result = engine.result(late)
    assert not result.success
    assert result.elapsed_s < 2.0
    assert all(not engine.result(job).success for job in hung)
    other = new_engine()
    assert other.store(keys(3)).success
    assert other.load(keys(3)).success
    began_s = time.monotonic()
    engine.tier.close()
    assert time.monotonic() - began_s < 0.5 + 0.5
    for row in range(18):
        engine.memory.paint(row, 0xEE)
    backend.heal()
    for thread in engine.io_threads():
        thread.join(LIMIT_S)
    assert all(engine.memory.is_painted(row, 0xEE) for row in range(18))


def test_threads_that_hang_are_stood_in_for_where_the_backend_allows_more_calls(new_engine: NewEngine) -> None:
    """LIV-07: and the stand-ins leave when those come back."""
    backend = faulty(calls=64)
    engine = new_engine(backend, batch_records=1, load_timeout_s=0.3, breaker_failures=100)
    engine.store(keys(10))
    backend.arm(Fault("get", Hang(), times=4))
    hung = [engine.submit_load([key(number)], rows=[number]) for number in range(4)]
    assert backend.wait_hanging(4)
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
    engine = new_engine(recording, batch_records=1, load_timeout_s=0.1, breaker_failures=100)
    engine.store(keys(30))
    backend.arm(Fault("get", Hang()))
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
    engine = new_engine(backend, batch_records=1, store_timeout_s=0.3, breaker_failures=100)
    backend.arm(Fault("put", Hang(), names=only(0, 1, 2)))
    hung = [engine.submit_store([key(number)], rows=[number]) for number in range(3)]
    assert backend.wait_hanging(3)
    results = [engine.result(job) for job in hung]
    assert all(not result.success and result.elapsed_s < 2.0 for result in results)
    engine.wait(lambda: engine.total("abandoned_calls", "put") == 3)
    assert engine.store(keys(5, start=10), rows=range(10, 15)).success
    backend.heal()
    engine.wait(lambda: in_rest(engine))


def test_what_a_late_call_stored_is_what_was_submitted(new_engine: NewEngine) -> None:
    """RACE-03: the engine reuses the row as soon as the job was reported."""
    backend = faulty(Fault("put", Hang(), names=only(0), times=1))
    engine = new_engine(backend, store_timeout_s=0.2)
    assert not engine.store([key(0)]).success
    engine.memory.paint(0, 0xFF)
    backend.heal()
    engine.wait(lambda: in_rest(engine))
    assert Shop(backend).record(key(0))[4096 : 4096 + PAYLOAD_BYTES[0]] == payload(key(0))


def test_a_row_is_not_read_after_its_job_was_reported(new_engine: NewEngine) -> None:
    """RACE-03: what waited too long is never stored under its key with what is in the row by then."""
    backend = faulty(calls=2)
    engine = new_engine(backend, io_threads=2, batch_records=1, store_timeout_s=0.2)
    backend.arm(Fault("put", Hang(), times=1))
    engine.submit_store([key(0)], rows=[0])
    assert backend.wait_hanging()
    waiting = engine.submit_store([key(1)], rows=[1])
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
    engine = new_engine(backend, io_threads=1, batch_records=32, store_timeout_s=0.2, min_bytes_per_s=50_000.0, lookup_timeout_s=LIMIT_S)
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
    engine = new_engine(backend, load_timeout_s=0.2)
    engine.store(keys(8))
    backend.arm(Fault("get", Hang(after=after), times=4))
    result = engine.load(keys(8), rows=range(8))
    assert result.failed
    for row in range(8):
        engine.memory.paint(row, 0xEE)
    backend.heal()
    engine.wait(lambda: in_rest(engine))
    engine.steps(0.05)
    assert all(engine.memory.is_painted(row, 0xEE) for row in range(8))
    assert engine.total("loads") == 8


def test_an_answer_that_comes_after_the_deadline_is_dropped(new_engine: NewEngine) -> None:
    backend = faulty()
    engine = new_engine(backend, load_timeout_s=0.1, store_timeout_s=0.1, lookup_timeout_s=0.1)
    engine.store(keys(2))
    backend.arm(Fault("*", ReturnLate(0.3)))
    assert engine.load(keys(2)).failed == tuple(keys(2))
    other = new_engine(backend, lookup_timeout_s=0.1)
    assert other.ask(keys(2)) == [Lookup.MISS] * 2
    assert not engine.store(keys(2, start=5), rows=[5, 6]).success
    engine.wait(lambda: engine.total("abandoned_calls", "get") >= 1)


def test_a_copy_that_takes_long_does_not_let_a_job_be_reported_before_it_ends(new_engine: NewEngine) -> None:
    """Whoever copies holds the job open: a result never comes in the middle of a copy."""
    engine = new_engine(load_timeout_s=0.1)
    engine.store([key(0)])
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


# Late writers, and transfers in doubt.


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


@pytest.mark.parametrize("operation", ["get", "put"])
def test_slots_in_doubt_are_out_of_use_until_they_are_settled(operation: str, new_engine: NewEngine) -> None:
    """Nothing is read into, or written over, memory that a transfer may still touch."""
    backend = faulty(Fault("get", InDoubt(), times=0))
    recording = RecordingBackend(backend)
    engine = new_engine(recording, batch_records=4, staging_bytes=16 * SLOT_BYTES, breaker_failures=100)
    engine.store(keys(8))
    backend.arm(Fault(operation, InDoubt(), names=only(*range(8), *range(20, 28))))
    some = keys(8) if operation == "get" else keys(8, start=20)
    result = engine.load(some) if operation == "get" else engine.store(some)
    assert result.failed == tuple(some)
    assert engine.total("loads" if operation == "get" else "stores", "timeout") == 8
    assert engine.tier.metrics.gauge_value("quarantined_bytes") == 8 * SLOT_BYTES
    assert engine.free_slots() == 8
    # The rest of the slots goes on working, and nothing comes near the others.
    assert engine.store(keys(20, start=40), rows=range(20)).success
    assert engine.load(keys(20, start=40)).success
    assert engine.tier.metrics.gauge_value("quarantined_bytes") == 8 * SLOT_BYTES
    backend.heal()
    engine.wait(lambda: in_rest(engine))
    assert engine.tier.metrics.gauge_value("quarantined_bytes") == 0
    assert not recording.breaches
    if operation == "get":
        assert engine.load(some).success
    else:
        assert all(Shop(backend).has(one) for one in some)


def test_a_second_look_that_is_in_doubt_keeps_its_slot(new_engine: NewEngine) -> None:
    backend = faulty(Fault("get", InDoubt(), times=0))
    recording = RecordingBackend(backend)
    engine = new_engine(recording, staging_bytes=4 * SLOT_BYTES)
    engine.store([key(0)])
    Shop(backend).replace(key(0), bytes(12288))
    backend.arm(Fault("get", InDoubt(), names=only(0), skip=1))
    assert engine.load([key(0)]).failed == (key(0),)
    assert engine.free_slots() == 3
    assert engine.store(keys(10, start=10)).success
    backend.heal()
    engine.wait(lambda: in_rest(engine))
    assert not recording.breaches


@pytest.mark.parametrize("operation", ["get", "put"])
def test_a_manifest_in_doubt_keeps_its_slot(operation: str, new_engine: NewEngine) -> None:
    backend = faulty(Fault(operation, InDoubt(), names=lambda name: name.endswith("manifest.json")))
    recording = RecordingBackend(backend)
    engine = new_engine(recording, staging_bytes=4 * SLOT_BYTES)
    assert engine.store([key(0)]).success
    engine.wait(lambda: engine.total("manifests", "failed") == 1)
    engine.wait(lambda: engine.free_slots() == 3)
    assert engine.store(keys(10, start=10)).success
    assert engine.load(keys(10, start=10)).success
    backend.heal()
    engine.wait(lambda: in_rest(engine))
    assert not recording.breaches


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
    assert engine.free_slots() == 7
    assert engine.store(keys(20, start=10)).success
    backend.heal()
    engine.wait(lambda: in_rest(engine))
    assert not recording.breaches


def test_memory_in_doubt_is_bounded(new_engine: NewEngine) -> None:
    """When it is full the breakers open, and when it is settled the store works again."""
    backend = faulty(Fault("get", InDoubt(), times=0))
    engine = new_engine(backend, batch_records=1, staging_bytes=32 * SLOT_BYTES, max_quarantined_bytes=4 * SLOT_BYTES, breaker_failures=100)
    engine.store(keys(32), rows=range(32))
    backend.arm(Fault("get", InDoubt()))
    jobs = [engine.submit_load([key(number)], rows=[number]) for number in range(32)]
    assert all(not engine.result(job).success for job in jobs)
    held = engine.tier.metrics.gauge_value("quarantined_bytes")
    assert 4 * SLOT_BYTES <= held <= (4 + 4) * SLOT_BYTES, "the bound, and what was running when it was reached"
    assert engine.tier.metrics.gauge_value("breaker_open", "read") == 1
    assert not engine.finds(key(0))
    engine.steps(0.3)
    assert engine.tier.metrics.gauge_value("quarantined_bytes") == held, "no trial adds to it"
    backend.heal()
    engine.wait(lambda: engine.finds(key(0)))
    assert engine.load([key(0)]).success
    engine.wait(lambda: in_rest(engine))


def test_settling_does_not_take_the_only_thread(new_engine: NewEngine) -> None:
    backend = faulty(Fault("get", InDoubt(), times=0))
    engine = new_engine(backend, io_threads=1, lookup_timeout_s=1.0)
    engine.store(keys(4))
    backend.arm(Fault("get", InDoubt(), names=only(0)))
    engine.load([key(0)])
    took_s = []
    for number in range(1, 4):
        result = engine.load([key(number)])
        assert result.success
        took_s.append(result.elapsed_s)
    assert min(took_s) < 0.5


@pytest.mark.parametrize("action", [Raise(RuntimeError), Return(lambda _: None), Return(lambda results: [None] * len(results))])
def test_a_settle_that_goes_wrong_frees_nothing_and_is_asked_again(action: Any, new_engine: NewEngine) -> None:
    backend = faulty(Fault("get", InDoubt(), times=0))
    engine = new_engine(backend)
    engine.store([key(0)])
    settle = Fault("settle", action, times=3)
    backend.arm(Fault("get", InDoubt(0.01), times=1), settle)
    engine.load([key(0)])
    engine.wait(lambda: backend.fired(settle) >= 2)
    assert engine.free_slots() == 63
    engine.wait(lambda: in_rest(engine))


# Back-pressure.


def test_stores_beyond_the_bound_are_shed_and_counted(new_engine: NewEngine) -> None:
    """LIV-08: the queue never holds more than its bound, and every job is reported."""
    bound = 20 * PAYLOAD_BYTES[0]
    backend = faulty(Fault("put", Hang(0.01)))
    engine = new_engine(backend, batch_records=1, max_queued_store_bytes=bound, store_timeout_s=LIMIT_S)
    jobs = []
    for number in range(2000):
        jobs.append(engine.submit_store([key(number)], rows=[number % 64], generation=None))
        assert engine.tier.metrics.gauge_value("queued_store_bytes") <= bound
        if number % 50 == 0:
            engine.step()
    for job in jobs:
        engine.result(job)
    shed, stored = engine.total("stores", "shed"), engine.total("stores", "stored")
    assert shed + stored == 2000
    assert shed > 1000
    assert stored >= 20
    assert engine.tier.metrics.gauge_value("queued_store_bytes") == 0


def test_a_load_does_not_wait_for_the_stores_before_it(new_engine: NewEngine) -> None:
    """LIV-09"""
    backend = faulty()
    engine = new_engine(backend, batch_records=1, store_timeout_s=LIMIT_S)
    engine.store(keys(1))
    backend.arm(Fault("put", Hang(0.05)))
    stores = engine.submit_store(keys(60, start=10), rows=range(1, 61))
    result = engine.load([key(0)], rows=[0])
    assert result.success
    assert result.elapsed_s < 0.5
    assert stores not in engine.results
    assert engine.result(stores).success


def test_a_probe_does_not_wait_for_stores(new_engine: NewEngine) -> None:
    """LIV-09"""
    backend = faulty(Fault("put", Hang(0.05)))
    engine = new_engine(backend, batch_records=1, store_timeout_s=LIMIT_S)
    stores = engine.submit_store(keys(60), rows=range(60))
    assert engine.ask([key(99)]) == [Lookup.MISS]
    assert stores not in engine.results
    assert engine.result(stores).success


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
