"""What is used once stays in host memory; what is used again goes below, once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from store_bench import Kept, Stand, keys

from kvstore_sdk.keys import ChunkKey
from kvstore_sdk.testing import FaultyBackend
from kvstore_sdk_backends.memory import open_memory

NewStand = Callable[..., Stand]
SECOND = {"admission": "second_touch"}


@pytest.fixture
def backend() -> FaultyBackend:
    return FaultyBackend(Kept(open_memory("")))


def puts(backend: FaultyBackend, stand: Stand, some: list[bytes]) -> int:
    """How often the backend was asked to store one of these."""
    names = {ChunkKey.from_engine(stand.store.identity.namespace, one).name for one in some}
    return sum(len(names.intersection(event.names)) for event in backend.log if event.op == "put")


def test_what_is_stored_once_is_not_written_below_and_a_hit_in_host_memory_writes_it_once(
    new_stand: NewStand, backend: FaultyBackend
) -> None:
    """CAP-11"""
    stand = new_stand(backend, tier_settings=SECOND)
    stand.put(keys(6))
    stand.settle()
    assert not [event for event in backend.log if event.op == "put"], "zero bytes below, a manifest among them"
    assert stand.total("cascades", "below", "not_admitted") == 6
    assert stand.tiers[0].tier.metrics.total("stores", "not_admitted") == 6
    for _ in range(3):
        assert stand.hits(keys(3)) == 3
        assert stand.store.drain()
    assert puts(backend, stand, keys(6)) == puts(backend, stand, keys(3)) == 3
    stand.evict_all()
    assert stand.hits(keys(6)) == 3, "the head is below, the tail was used once"
    assert stand.total("hits", "below") == 3


def test_a_chunk_that_left_host_memory_and_is_stored_again_is_written_below(new_stand: NewStand, backend: FaultyBackend) -> None:
    stand = new_stand(backend, tier_settings=SECOND)
    for expected in (0, 4, 4):
        stand.put(keys(4))
        assert stand.store.drain()
        assert puts(backend, stand, keys(4)) == expected
        stand.evict_all()
    assert stand.hits(keys(4)) == 4


def test_by_default_what_was_stored_once_and_evicted_is_found_below(new_stand: NewStand) -> None:
    """CFG-05"""
    stand = new_stand()
    stand.put(keys(4))
    stand.evict_all()
    assert stand.hits(keys(4)) == 4
    assert stand.total("hits", "below") == 4
    assert not stand.total("cascades", "below", "not_admitted")


def test_a_request_that_was_preempted_is_no_second_use_of_what_it_stored(new_stand: NewStand, backend: FaultyBackend) -> None:
    stand = new_stand(backend, tier_settings=SECOND)
    name = stand.request()
    stand.put(keys(4), name)
    for _ in range(2):
        stand.store.restart_request(name)
        assert stand.hits(keys(4), name) == 4
        assert stand.store.drain()
    assert not puts(backend, stand, keys(4))
    stand.store.end_request(name)
    assert stand.hits(keys(4)) == 4
    assert stand.store.drain()
    assert puts(backend, stand, keys(4)) == 4


def test_each_tier_admits_by_itself(new_stand: NewStand, backend: FaultyBackend) -> None:
    """A fast disk that wears out, and a store that does not."""
    everything = Kept(open_memory(""))
    stand = new_stand({"disk": backend, "far": everything})
    stand.tiers[0].tier._admission.admits_all = False
    stand.put(keys(4))
    assert stand.store.drain()
    assert [stand.has("disk", one) for one in keys(4)] == [False] * 4
    assert [stand.has("far", one) for one in keys(4)] == [True] * 4
    assert stand.hits(keys(2)) == 2
    assert stand.store.drain()
    assert [stand.has("disk", one) for one in keys(4)] == [True, True, False, False]
    assert stand.total("cascades", "far", "stored") == 4


def test_a_hit_that_nobody_loads_is_a_use_too_and_one_at_the_end_is_not_lost(new_stand: NewStand, backend: FaultyBackend) -> None:
    stand = new_stand(backend, tier_settings=SECOND)
    stand.put(keys(4))
    stand.settle()
    stand.ask(keys(4), stand.request())
    stand.store.close()
    assert puts(backend, stand, keys(4)) == 4


def test_what_left_host_memory_between_its_hit_and_its_turn_waits_for_its_next_store(new_stand: NewStand, backend: FaultyBackend) -> None:
    stand = new_stand(backend, tier_settings=SECOND)
    stand.put(keys(4))
    stand.settle()
    name = stand.request()
    assert stand.store.lookup(name, keys(1)[0]).value == "hit"
    stand.store.let_go([name])
    stand.squeeze()
    assert stand.store.drain()
    assert not puts(backend, stand, keys(4))
    stand.put(keys(4))
    assert stand.store.drain()
    assert puts(backend, stand, keys(4)) == 4


def test_touches_of_before_a_reset_count_no_more(new_stand: NewStand, backend: FaultyBackend) -> None:
    stand = new_stand(backend, tier_settings=SECOND)
    stand.put(keys(4))
    stand.settle()
    stand.ask(keys(4), stand.request())
    stand.store.reset()
    stand.generation = 1
    stand.put(keys(4))
    assert stand.store.drain()
    assert not puts(backend, stand, keys(4))
    assert stand.hits(keys(4)) == 4
    assert stand.store.drain()
    assert puts(backend, stand, keys(4)) == 4


def test_what_is_remembered_of_chunks_that_were_kept_out_is_bounded(new_stand: NewStand) -> None:
    stand = new_stand(slots=8, tier_settings=SECOND)
    for start in range(0, 400, 4):
        assert stand.put(keys(4, start)) is not None
        stand.settle()
        assert len(stand.store._cascades._touches._kept_out) <= 2 * stand.host.row_count
    assert stand.hits(keys(4, 396)) == 4
    assert stand.store.drain()
    assert all(stand.has("below", one) for one in keys(4, 396))
