"""What a store counts of its own."""

from __future__ import annotations

from collections.abc import Callable

from store_bench import Stand, keys

from kvstore_sdk.tier import Lookup


def test_what_is_written_and_never_read_can_be_seen(new_stand: Callable[..., Stand]) -> None:
    """HMA-03. A hit is not a read: the engine may have no use for it."""
    stand = new_stand({}, slots=20)
    stand.put(keys(10))
    looking = stand.request()
    assert stand.ask(keys(10), looking) == [Lookup.HIT] * 10
    stand.store.end_request(looking)
    stand.step()
    assert (stand.total("engine_stores"), stand.total("hits"), stand.total("engine_loads")) == (10, 10, 0)
    reading = stand.request()
    assert stand.ask(keys(4), reading) == [Lookup.HIT] * 4
    stand.load(reading, keys(4))
    stand.store.end_load(reading, keys(4))
    assert (stand.total("engine_stores"), stand.total("engine_loads")) == (10, 4)


def test_what_was_not_written_whole_is_not_counted(new_stand: Callable[..., Stand]) -> None:
    stand = new_stand({}, slots=20)
    assert stand.store.begin_store("writer", keys(3)) is not None
    stand.store.end_store(keys(3), keys(1))
    assert stand.total("engine_stores") == 2


def test_a_store_that_finds_no_room_is_counted_once_however_often_it_is_asked_again(new_stand: Callable[..., Stand]) -> None:
    """An engine asks again at every step; an alarm is to say how much, not how long."""
    stand = new_stand({}, slots=8)
    assert stand.store.begin_store("writer", keys(8)) is not None
    for name in ("first", "second"):
        stand.store.begin_request(name)
    for _ in range(5):
        assert stand.store.begin_store("first", keys(3, 10)) is None
        assert stand.store.begin_store("second", keys(2, 20)) is None
        stand.step()
    assert stand.total("no_room", "store") == 5
    assert stand.store.begin_store("first", keys(4, 10)) is None
    assert stand.total("no_room", "store") == 6
