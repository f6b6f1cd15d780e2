"""A tier that admits at the second touch writes what is used again, once, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tier_bench import PATIENT, Engine, Shop, key, keys

from kvstore_sdk.testing import Fault, FaultyBackend, Raise, WrongBytes
from kvstore_sdk.tier.admission import Admission
from kvstore_sdk_backends.memory import open_memory

NewEngine = Callable[..., Engine]


@pytest.fixture(params=["staged", "direct", "polled"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def new_engine(new_engine: NewEngine) -> NewEngine:
    return partial(new_engine, **PATIENT)


def written(backend: FaultyBackend, shop: Shop, some: list[bytes]) -> int:
    """How often a backend was asked to store one of these."""
    names = {shop.name(one) for one in some}
    return sum(len(names.intersection(event.names)) for event in backend.log if event.op == "put")


@given(st.lists(st.lists(st.binary(min_size=1, max_size=1), max_size=4), max_size=40), st.integers(1, 300))
def test_a_chunk_is_admitted_from_its_second_touch_on_unless_it_was_forgotten(jobs: list[list[bytes]], most: int) -> None:
    admission, touched = Admission("second_touch", most), list[bytes]()
    for job in jobs:
        new = []
        for one in job:
            if one in touched:
                touched.remove(one)
            else:
                new.append(one)
            touched.append(one)
        assert admission.touch_all(job) == new
        touched = touched[-most:]
        assert len(admission) == len(touched)


def test_what_is_stored_once_is_not_written_and_what_is_stored_again_is_written_once(new_engine: NewEngine) -> None:
    """CAP-11"""
    backend = FaultyBackend(open_memory(""))
    engine, shop = new_engine(backend, admission="second_touch"), Shop(backend)
    some = keys(6)
    first = engine.store(some)
    assert first.success
    assert (first.done, first.skipped, first.moved_bytes) == ((), tuple(some), 0)
    assert not [event for event in backend.log if event.op == "put"], "zero bytes below, a manifest among them"
    assert engine.total("stores", "not_admitted") == 6
    # A request that asks and finds nothing computes the chunk, and stores it: that store is the touch.
    assert not engine.finds(some[0])
    assert engine.store([*some[:3], key(99)]).done == tuple(some[:3])
    assert engine.store(some[:3]).done == tuple(some[:3])
    assert written(backend, shop, some) == 3
    assert engine.total("stores", "stored") == 3
    assert engine.total("stores", "not_admitted") == 7
    assert [engine.finds(one) for one in some] == [True] * 3 + [False] * 3


def test_by_default_what_was_stored_once_is_found_and_loaded(new_engine: NewEngine) -> None:
    """CFG-05"""
    engine = new_engine()
    assert engine.store(keys(3)).done == tuple(keys(3))
    assert all(engine.finds(one) for one in keys(3))
    assert engine.load(keys(3)).success
    assert not engine.total("stores", "not_admitted")


def test_a_chunk_whose_write_failed_is_written_at_its_next_store(new_engine: NewEngine) -> None:
    backend = FaultyBackend(open_memory(""), [Fault("put", Raise(), times=1)])
    engine = new_engine(backend, admission="second_touch", retries=0)
    engine.store(keys(1))
    assert engine.store(keys(1)).failed == tuple(keys(1))
    assert engine.store(keys(1)).done == tuple(keys(1))


def test_a_bad_record_is_replaced_by_the_first_store_that_comes(new_engine: NewEngine) -> None:
    """It was worth a record before; and who found it bad was not who had stored it."""
    backend = FaultyBackend(open_memory(""))
    writer, reader = new_engine(backend), new_engine(backend, admission="second_touch")
    writer.store(keys(1))
    backend.arm(fault := Fault("get", WrongBytes()))
    assert not reader.load(keys(1)).success
    backend.heal()
    assert backend.fired(fault) >= 2
    assert reader.store(keys(1)).done == tuple(keys(1))
    assert reader.load(keys(1)).success


def test_touches_of_before_a_reset_count_no_more(new_engine: NewEngine) -> None:
    engine = new_engine(admission="second_touch")
    engine.store(keys(2))
    engine.tier.reset()
    assert engine.store(keys(2)).skipped == tuple(keys(2))
    assert engine.store(keys(2)).done == tuple(keys(2))


def test_whoever_asks_before_a_store_hears_what_the_store_is_told(new_engine: NewEngine) -> None:
    engine = new_engine(admission="second_touch")
    assert engine.tier.admit(keys(2)) == []
    assert engine.tier.admit(keys(3)) == keys(2)
    assert engine.store(keys(2)).done == tuple(keys(2))
    assert engine.total("stores", "not_admitted") == 3
    assert new_engine().tier.admit(keys(3)) == keys(3)
