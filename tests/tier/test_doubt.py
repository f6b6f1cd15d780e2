"""What a backend calls in doubt stays out of use until it is settled, and is bounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tier_bench import SLOT_BYTES, Engine, Shop, key, keys
from tier_faults import faulty, in_rest, only

from kvstore_sdk.testing import (
    Fault,
    InDoubt,
    Raise,
    RecordingBackend,
    Return,
)

NewEngine = Callable[..., Engine]


@pytest.fixture(params=["staged", "direct", "polled"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


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
    engine.wait(lambda: engine.free_slots() == 8)
    # The rest of the slots goes on working, and nothing comes near the others.
    assert engine.store(keys(20, start=40)).success
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
    engine.wait(lambda: engine.free_slots() == 3)
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


def test_memory_in_doubt_is_bounded(new_engine: NewEngine) -> None:
    """When it is full the breakers open, and when it is settled the store works again."""
    backend = faulty(Fault("get", InDoubt(), times=0))
    engine = new_engine(backend, batch_records=1, staging_bytes=32 * SLOT_BYTES, max_quarantined_bytes=4 * SLOT_BYTES, breaker_failures=100)
    engine.store(keys(32), rows=range(32))
    backend.arm(Fault("get", InDoubt()))
    jobs = [engine.submit_load([key(number)], rows=[number]) for number in range(32)]
    assert all(not engine.result(job).success for job in jobs)
    held = engine.tier.metrics.gauge_value("quarantined_bytes")
    assert 4 * SLOT_BYTES <= held <= (4 + engine.most_calls) * SLOT_BYTES, "the bound, and what was running when it was reached"
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
    engine.wait(lambda: engine.free_slots() == 63)
    engine.wait(lambda: in_rest(engine))


class Unreadable(list[Any]):
    """An answer of a vendor's class, which fails when it is looked at."""

    def __iter__(self) -> Any:
        raise RuntimeError("on purpose")

    def __len__(self) -> int:
        raise RuntimeError("on purpose")


@pytest.mark.parametrize("answer", [[], Unreadable()], ids=["too short", "raises"])
@pytest.mark.parametrize("operation", ["get", "put"])
def test_answers_that_cannot_be_read_keep_rows_out_of_use_where_they_may_have_been_in_doubt(
    operation: str, answer: Any, way: str, new_engine: NewEngine
) -> None:
    """A transfer whose ticket was lost may go on for ever: its row never comes back, and no ticket is asked about. A slot of staging memory
    does come back: what is written into it is checked elsewhere."""
    backend = faulty(Fault("get", InDoubt(), times=0))
    engine = new_engine(backend, batch_records=4, breaker_failures=100)
    engine.store(keys(8))
    engine.wait(engine.in_rest)
    some = keys(4) if operation == "get" else keys(4, start=20)
    # Not by a rule: the faulty backend would look at the answer itself.
    setattr(backend, operation, lambda items, deadline: answer)
    result = engine.load(some) if operation == "get" else engine.store(some)
    delattr(backend, operation)
    assert result.failed == tuple(some)
    assert engine.total("breaches", operation) > 0
    held = engine.tier.metrics.gauge_value("quarantined_bytes")
    assert held == (0 if way == "staged" else 4 * SLOT_BYTES)
    assert engine.store(keys(8, start=40)).success
    assert engine.tier.metrics.gauge_value("quarantined_bytes") == held
    assert engine.total("breaches", "settle") == 0
    assert engine.tier.touches_memory is (way != "staged")
