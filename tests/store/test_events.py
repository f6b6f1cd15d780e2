"""Every change of host memory and of a tier is told once, with where it happened."""

from __future__ import annotations

from collections.abc import Callable

from store_bench import LIMIT_S, Stand, Wide, key, keys

from kvstore_sdk.backend import Deadline
from kvstore_sdk.keys import ChunkKey
from kvstore_sdk.store import HOST, StoreEvent, StoreSettings, TieredStore
from kvstore_sdk.testing import Fault, FaultyBackend, Raise
from kvstore_sdk_backends.memory import open_memory

NewStand = Callable[..., Stand]


def test_what_came_and_went_is_told_once_each(new_stand: NewStand) -> None:
    """OBS-04: three stored, one evicted, one found missing; failed puts tell nothing."""
    shop = open_memory("")
    backend = FaultyBackend(Wide(shop))
    stand = new_stand(backend, slots=4)
    stand.put(keys(3))
    stand.settle()
    assert sorted(stand.events()) == sorted([("below", one, False) for one in keys(3)] + [(HOST, one, False) for one in keys(3)])
    assert stand.events() == []
    # The fifth chunk in four slots; failed by the tier.
    backend.arm(Fault("put", Raise(RuntimeError)))
    stand.put(keys(2, 10))
    stand.settle()
    gone = [one for one in keys(3) if stand.host.get(one) is None]
    assert len(gone) == 1
    assert sorted(stand.events()) == sorted([(HOST, gone[0], True), (HOST, key(10), False), (HOST, key(11), False)])
    backend.heal()
    shop.delete([ChunkKey.from_engine(stand.identity.namespace, gone[0]).name], Deadline.after(LIMIT_S))
    # A slot was taken for it, so one more chunk went from host memory.
    assert stand.hits(gone) == 0
    told = stand.events()
    assert [event for event in told if event[0] == "below"] == [("below", gone[0], True)]
    assert [(removed, stand.host.get(one)) for tier, one, removed in told if tier == HOST] == [(True, None)]
    assert stand.hits(gone) == 0
    assert stand.events() == []


def test_a_chunk_that_comes_back_is_told_in_the_order_of_things(new_stand: NewStand) -> None:
    stand = new_stand(slots=2)
    stand.put([key(0)])
    stand.settle()
    for number in (1, 2):
        stand.put([key(number)])
        stand.settle()
    assert stand.hits([key(0)]) == 1
    told = [(one, removed) for tier, one, removed in stand.events() if tier == HOST]
    assert [removed for one, removed in told if one == key(0)] == [False, True, False]
    there: set[bytes] = set()
    for one, removed in told:
        (there.discard if removed else there.add)(one)
    assert there == {one for one in keys(3) if stand.host.get(one) is not None}


def test_a_reset_tells_that_host_memory_is_empty(new_stand: NewStand) -> None:
    stand = new_stand({})
    stand.put(keys(3))
    stand.events()
    stand.store.reset()
    assert sorted(stand.events()) == sorted((HOST, one, True) for one in keys(3))


def test_what_tiers_told_before_a_reset_is_not_told_after_it(new_stand: NewStand) -> None:
    """The engine says by itself that everything is cleared; what came after that would be believed."""
    stand = new_stand()
    stand.put(keys(3))
    stand.settle()
    stand.store.reset()
    stand.put([key(9)])
    stand.settle()
    told = stand.events()
    assert [event for event in told if event[0] == "below"] == [("below", key(9), False)]
    there: set[bytes] = set()
    for tier, one, removed in told:
        if tier == HOST:
            (there.discard if removed else there.add)(one)
    assert there == {key(9)}


def test_incomplete_chunks_are_not_told(new_stand: NewStand) -> None:
    stand = new_stand({})
    assert stand.store.begin_store("one", keys(2)) is not None
    stand.store.end_store(keys(2), incomplete=keys(2))
    assert stand.events() == []


def test_events_say_where_a_tier_is(new_stand: NewStand) -> None:
    stand = new_stand({"near": open_memory(""), "far": open_memory("")}, localities={"near": "LOCAL", "far": "REMOTE"})
    stand.put([key(0)])
    stand.settle()
    events = stand.raw_events()
    assert StoreEvent((key(0),), False, HOST) in events
    assert {(event.tier, event.locality) for event in events} == {(HOST, ""), ("near", "LOCAL"), ("far", "REMOTE")}


def test_a_store_that_keeps_no_events_has_none(new_stand: NewStand) -> None:
    stand = new_stand({})
    quiet = TieredStore(stand.host, [], identity=stand.identity, settings=StoreSettings())
    assert quiet.begin_store("one", [key(0)]) is not None
    quiet.end_store([key(0)])
    assert quiet.take_events() == []
