"""What tiers did not get: the tail goes with it, it is offered again, and nothing grows without bound."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from store_bench import Stand, Wide, key, keys

from kvstore_sdk.keys import ChunkKey
from kvstore_sdk.testing import Fault, FaultyBackend, Hang, InDoubt
from kvstore_sdk.tier import Lookup
from kvstore_sdk_backends.memory import open_memory

NewStand = Callable[..., Stand]


def test_what_is_shed_is_the_end_of_a_store_and_no_hole(new_stand: NewStand) -> None:
    """Chunks of another group are smaller, and would fit in what is left of the share."""
    backend = FaultyBackend(Wide(open_memory("")), [Fault("put", Hang())])
    stand = new_stand(backend, slots=100, sizes=(30_000, 3_000), cascade_fraction=0.108)
    both = [*keys(32), *keys(32, group=1)]
    assert stand.put(both) is not None
    stand.wait(lambda: backend.hanging)
    stand.squeeze()
    backend.heal()
    stand.settle()
    kept = [stand.has("below", one) for one in both]
    count = kept.index(False)
    assert 0 < count < 32
    assert not any(kept[count:])
    assert stand.total("cascades", "below", "shed") == 64 - count


def test_what_finds_a_tier_busy_waits_its_turn_and_a_drained_tier_has_it_all(new_stand: NewStand) -> None:
    """CAP-05: no pin keeps it; order is that of the stores, heads first."""
    backend = FaultyBackend(Wide(open_memory("")), [Fault("put", Hang())])
    stand = new_stand(backend, slots=64, cascade_fraction=0.25)
    for start in range(0, 40, 8):
        assert stand.put(keys(8, start)) is not None
    stand.wait(lambda: backend.hanging)
    stand.step()
    assert stand.pinned() <= 16
    backend.heal()
    assert stand.store.drain()
    assert all(stand.has("below", one) for one in keys(40))
    assert stand.total("cascades", "below", "stored") == 40
    assert not stand.total("cascades", "below", "shed")
    put = [name for event in backend.log if event.op == "put" for name in event.names]
    order = [ChunkKey.from_engine(stand.identity.namespace, one).name for one in keys(40)]
    assert put.index(order[39]) > put.index(order[20]) > put.index(order[0])
    assert stand.is_at_rest()


def test_what_is_evicted_before_its_turn_is_shed_and_counted(new_stand: NewStand) -> None:
    backend = FaultyBackend(Wide(open_memory("")), [Fault("put", Hang())])
    stand = new_stand(backend, slots=16, cascade_fraction=0.25)
    for start in range(0, 64, 4):
        assert stand.put(keys(4, start)) is not None
        stand.step()
    backend.heal()
    assert stand.store.drain()
    stored, shed = (stand.total("cascades", "below", result) for result in ("stored", "shed"))
    assert stored + shed == 64
    assert stored >= 8
    assert stored == sum(stand.has("below", one) for one in keys(64))
    assert stand.is_at_rest()


def test_the_first_chunks_that_are_shed_are_told_and_a_drained_store_counts_them(
    new_stand: NewStand, caplog: pytest.LogCaptureFixture
) -> None:
    """CAP-05: `drain` says that nothing goes on, not that every tier has everything."""
    backend = FaultyBackend(Wide(open_memory("")), [Fault("put", Hang())])
    stand = new_stand(backend, slots=16, cascade_fraction=0.25)
    with caplog.at_level(logging.WARNING, "kvstore_sdk"):
        assert stand.put(keys(8)) is not None
        stand.wait(lambda: backend.hanging)
        stand.squeeze()
        assert stand.put(keys(4, 8)) is not None
        backend.heal()
        assert stand.store.drain()
    shed = stand.total("cascades", "below", "shed")
    assert 0 < shed == sum(not stand.has("below", one) for one in keys(12))
    (line,) = [record.getMessage() for record in caplog.records if "does not get" in record.getMessage()]
    assert "tier below does not get 4 chunks" in line
    assert "cascade_fraction" in line


def test_a_tier_that_was_busy_gets_what_it_lacks_and_the_others_get_nothing_twice(new_stand: NewStand) -> None:
    slow = FaultyBackend(Wide(open_memory("")), [Fault("put", Hang())])
    stand = new_stand({"slow": slow, "fast": open_memory("")}, slots=16, cascade_fraction=0.25)
    for number in range(8):
        assert stand.put([key(number)]) is not None
        stand.wait(lambda number=number: stand.has("fast", key(number)))
    stand.wait(lambda: stand.total("cascades", "fast", "stored") == 8)
    assert stand.pinned() == 2
    slow.heal()
    assert stand.store.drain()
    assert all(stand.has("slow", one) for one in keys(8))
    assert stand.total("cascades", "slow", "stored") == 8
    assert stand.total("cascades", "fast", "stored") == 8
    assert stand.is_at_rest()


def test_slots_that_late_calls_read_count_against_the_share_of_their_tier(new_stand: NewStand) -> None:
    """LIV-08: each store gives up, its call does not, and the next one comes."""
    backend = FaultyBackend(Wide(open_memory(""), 64), [Fault("put", Hang())])
    settings = {"store_timeout_s": 0.03, "breaker_failures": 1000, "io_threads": 64}
    stand = new_stand(backend, slots=32, cascade_fraction=0.25, tier_settings=settings)
    for number in range(60):
        assert stand.put([key(number)]) is not None
        stand.settle()
        assert stand.store.metrics.gauge_value("held_slots") <= 8
    assert stand.store.metrics.gauge_value("held_slots") == 8
    assert stand.store.metrics.gauge_value("cascade_bytes") == 8 * stand.record_bytes
    backend.heal()
    stand.wait(stand.is_at_rest)
    assert stand.store.metrics.gauge_value("cascade_bytes") == 0
    assert stand.put([key(100)]) is not None
    stand.settle()
    assert stand.has("below", key(100))


class Garbled(FaultyBackend):
    """Declares that it may leave operations in doubt, and gives answers of which nobody can tell whether they are."""

    garbles = ""

    def put(self, puts: Any, deadline: Any) -> Any:
        return [object()] * len(puts) if self.garbles == "put" else super().put(puts, deadline)

    def get(self, gets: Any, deadline: Any) -> Any:
        return [object()] * len(gets) if self.garbles == "get" else super().get(gets, deadline)


@pytest.mark.parametrize("operation", ["put", "get"])
def test_slots_that_are_in_doubt_for_ever_are_few_and_shown(operation: str, new_stand: NewStand) -> None:
    """The tier is asked for no more than its share; host memory serves hits and takes stores as before; close says what may be touched."""
    backend = Garbled(Wide(open_memory("")), [Fault("put", InDoubt(), times=0)])
    settings = {"breaker_failures": 1000, "close_timeout_s": 0.5}
    stand = new_stand(backend, slots=32, cascade_fraction=0.25, lookup_timeout_s=0.5, close_timeout_s=0.5, tier_settings=settings)
    for start in range(0, 40, 4):
        stand.put(keys(4, start))
        stand.settle()
    stand.evict_all()
    backend.garbles = operation
    for turn in range(20):
        if operation == "get":
            assert stand.ask([key(turn)], stand.request()) == [Lookup.MISS]
        assert stand.put(keys(4, 1000 + 4 * turn)) is not None
        stand.settle()
        assert stand.hits(keys(4, 1000 + 4 * turn)) == 4
    held = stand.store.metrics.gauge_value("held_slots")
    most = 8 if operation == "put" else 32 * 0.125 + 1
    assert 0 < held <= most
    assert stand.host.stats().background_bytes == held * stand.record_bytes
    # More than the tier's share is not tried; hits need no tier.
    assert stand.put(keys(20, 5000)) is not None
    stand.settle()
    assert stand.hits(keys(16, 5000)) == 16
    stand.settle()
    assert not stand.store.close()
