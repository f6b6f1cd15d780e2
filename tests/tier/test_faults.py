"""A backend that raises or lies costs failed jobs, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from tier_bench import LIMIT_S, SLOT_BYTES, Engine, Shop, key, keys
from tier_faults import faulty, in_rest, only

from kvstore_sdk.backend import (
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
    Fault,
    Raise,
    RecordingBackend,
    Return,
    Say,
)
from kvstore_sdk.tier import Lookup

NewEngine = Callable[..., Engine]


@pytest.fixture(params=["staged", "direct", "polled"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("error", [RuntimeError, UnavailableError, SystemExit, KeyboardInterrupt, MemoryError])
def test_a_put_that_raises_costs_its_job_and_no_other(error: type[BaseException], way: str, new_engine: NewEngine) -> None:
    """LIV-10: puts 4 to 10 complete, job 3 fails, and all memory comes back."""
    backend = faulty(Fault("put", Raise(error), names=only(2)))
    engine = new_engine(backend, batch_records=1, retries=0)
    jobs = [engine.submit_store([key(number)], rows=[number]) for number in range(10)]
    assert [engine.result(job).success for job in jobs] == [number != 2 for number in range(10)]
    engine.wait(lambda: in_rest(engine))
    assert len(engine.io_threads()) == (0 if way == "polled" else 4)
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
    operation: str, bend: Callable[[Any], object], way: str, new_engine: NewEngine
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
    if way != "polled":
        # There it may have been in doubt, and stays so.
        engine.wait(lambda: in_rest(engine))


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
    engine = new_engine(backend)
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
    engine = new_engine(backend, batch_records=1, retry_base_s=0.05, breaker_failures=100)
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


def test_a_store_that_lies_about_storing_is_found_out_by_the_load(new_engine: NewEngine) -> None:
    """ATM-10: the engine asks for what is not there, and hears a miss."""
    backend = faulty(Fault("put", Say(PutResult(PutStatus.STORED))))
    engine = new_engine(backend)
    assert engine.store([key(0)]).success
    assert engine.finds(key(0))
    assert engine.load([key(0)]).failed == (key(0),)
    assert engine.memory.spared(0)
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
    assert engine.memory.spared(1)


def test_a_replace_that_answers_exists_has_failed(new_engine: NewEngine) -> None:
    backend = faulty()
    engine = new_engine(backend, retries=0)
    engine.store([key(0)])
    Shop(backend).replace(key(0), bytes(12288))
    engine.load([key(0)])
    backend.arm(Fault("put", Say(PutResult(PutStatus.EXISTS))))
    assert engine.store([key(0)]).failed == (key(0),)
    assert not engine.finds(key(0))
