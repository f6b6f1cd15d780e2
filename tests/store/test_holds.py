"""A hit is kept for its request until it is loaded or let go; nothing is kept longer, and nothing is released twice."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from store_bench import LIMIT_S, Stand, key, keys

from kvstore_sdk.keys import parse_name
from kvstore_sdk.store import lookups as lookups_module
from kvstore_sdk.testing import Fault, FaultyBackend, Hang
from kvstore_sdk.tier import Lookup
from kvstore_sdk_backends.memory import open_memory

NewStand = Callable[..., Stand]


def look_up(stand: Stand, request: str, some_keys: list[bytes]) -> None:
    assert stand.ask(some_keys, request) == [Lookup.HIT] * len(some_keys)


def drive_out(stand: Stand) -> None:
    """Store until everything that may leave has left."""
    for number in range(4 * stand.host.row_count):
        assert stand.put([key(5000 + number)]) is not None


def test_a_hit_is_still_there_steps_later_whatever_was_stored_meanwhile(new_stand: NewStand) -> None:
    stand = new_stand({}, slots=16)
    stand.put(keys(10))
    name = stand.request()
    look_up(stand, name, keys(10))
    drive_out(stand)
    stand.load(name, keys(10))


def test_a_hit_that_a_tier_brought_is_there_until_it_is_loaded(new_stand: NewStand) -> None:
    stand = new_stand(slots=16)
    stand.put(keys(10))
    stand.settle()
    stand.evict_all()
    name = stand.request()
    look_up(stand, name, keys(10))
    drive_out(stand)
    assert stand.store.source(name, key(3)) == "below"
    stand.load(name, keys(10))


def test_look_ups_that_were_never_loaded_leave_nothing_pinned(new_stand: NewStand) -> None:
    """LEAK-02: neither after the end of the request, nor after it was let go, nor after the time of a hold; and the chunks can go."""
    ways: dict[str, Callable[[Stand, str], object]] = {
        "end": lambda stand, name: stand.store.end_request(name),
        "let go": lambda stand, name: stand.store.let_go([name, "nobody"]),
        "expire": lambda stand, name: (stand.set_timeouts(hold_timeout_s=0.0), time.sleep(0.01), stand.step()),
    }
    for way in ways.values():
        stand = new_stand({}, slots=120)
        stand.put(keys(100))
        name = stand.request()
        look_up(stand, name, keys(85))
        look_up(stand, name, keys(90))
        stand.put([key(1000)])
        assert stand.pinned() == 90
        way(stand, name)
        assert stand.pinned() == 0
        assert stand.is_at_rest()
        stand.put(keys(120, 1000))
        assert stand.hits(keys(100)) == 0


def test_a_request_whose_hold_expired_finds_its_chunks_again(new_stand: NewStand) -> None:
    stand = new_stand({})
    stand.put(keys(4))
    name = stand.request()
    look_up(stand, name, keys(4))
    stand.set_timeouts(hold_timeout_s=0.0)
    time.sleep(0.01)
    stand.step()
    stand.set_timeouts(hold_timeout_s=LIMIT_S)
    assert stand.total("expired_holds") == 1
    look_up(stand, name, keys(4))
    stand.load(name, keys(4))
    assert stand.total("hits", "host") == 4


def test_loading_releases_the_other_hits_of_the_request(new_stand: NewStand) -> None:
    stand = new_stand({})
    stand.put(keys(6))
    name = stand.request()
    look_up(stand, name, keys(6))
    stand.store.begin_load(name, keys(4))
    assert stand.pinned() == 4
    stand.store.end_load(name, keys(4))
    assert stand.is_at_rest()


def test_a_load_that_is_ended_twice_releases_nobody_elses_pin(new_stand: NewStand) -> None:
    """RACE-05: a third holder's pin still protects the chunk."""
    stand = new_stand({}, slots=8)
    stand.put([key(0)])
    first, second = stand.request(), stand.request()
    stand.store.begin_load(first, [key(0)])
    [slot] = stand.store.begin_load(second, [key(0)])
    stand.store.end_load(first, [key(0)])
    stand.store.end_load(first, [key(0)])
    stand.store.end_load("nobody", [key(0)])
    assert stand.total("double_releases") == 2
    drive_out(stand)
    assert stand.is_right(slot, key(0))
    stand.store.end_load(second, {key(0)})
    assert stand.is_at_rest()


def test_a_load_may_be_ended_in_parts_and_after_its_request(new_stand: NewStand) -> None:
    """RACE-10."""
    stand = new_stand({})
    stand.put(keys(4))
    name = stand.request()
    stand.store.begin_load(name, keys(4))
    stand.store.end_request(name)
    stand.store.end_load(name, keys(2))
    assert stand.pinned() == 4
    stand.store.end_load(name, set(keys(4)))
    assert stand.is_at_rest()
    assert stand.total("double_releases") == 2


def test_two_requests_hold_one_chunk_each_for_itself(new_stand: NewStand) -> None:
    stand = new_stand({}, slots=8)
    stand.put([key(0)])
    first, second = stand.request(), stand.request()
    look_up(stand, first, [key(0)])
    look_up(stand, second, [key(0)])
    stand.store.end_request(first)
    drive_out(stand)
    stand.load(second, [key(0)])


def test_requests_that_want_one_chunk_share_one_promotion(new_stand: NewStand) -> None:
    backend = FaultyBackend(open_memory(""))
    stand = new_stand(backend, slots=24, tier_settings={"load_timeout_s": LIMIT_S})
    stand.put(keys(3))
    stand.settle()
    stand.evict_all()
    backend.arm(Fault("get", Hang()))
    names = [stand.request() for _ in range(10)]
    stand.wait(lambda: [stand.store.lookup(name, one) for name in names for one in keys(3)] and backend.hanging)
    assert stand.store.metrics.gauge_value("open_promotions") == 3
    backend.heal()
    for name in names:
        assert stand.hits(keys(3), name) == 3
    gets = [name for event in backend.log if event.op == "get" for name in event.names if parse_name(name)]
    assert len(gets) == 3
    assert stand.total("hits", "below") == 30
    for name in names:
        stand.store.end_request(name)
    assert stand.is_at_rest()


def test_a_promotion_goes_on_without_the_request_that_wanted_it(new_stand: NewStand) -> None:
    backend = FaultyBackend(open_memory(""))
    stand = new_stand(backend, tier_settings={"load_timeout_s": LIMIT_S})
    stand.put(keys(3))
    stand.settle()
    stand.evict_all()
    backend.arm(Fault("get", Hang()))
    name = stand.request()
    stand.wait(lambda: [stand.store.lookup(name, one) for one in keys(3)] and backend.hanging)
    stand.store.end_request(name)
    backend.heal()
    stand.settle()
    assert stand.is_at_rest()
    assert stand.hits(keys(3)) == 3


def test_a_miss_holds_for_its_request_and_for_no_other(new_stand: NewStand) -> None:
    stand = new_stand()
    name = stand.request()
    assert stand.ask([key(0)], name) == [Lookup.MISS]
    stand.put([key(0)])
    assert stand.ask([key(0)], name) == [Lookup.MISS]
    assert stand.hits([key(0)]) == 1
    assert stand.total("misses") == 1


def test_requests_whose_end_is_never_told_are_forgotten(new_stand: NewStand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups_module, "_MAX_REQUESTS", 100)
    stand = new_stand({})
    stand.put([key(0)])
    for number in range(1000):
        assert stand.store.lookup(f"lost-{number}", key(0)) is Lookup.HIT
    assert len(stand.store._lookups.requests) == 100
    assert len(stand.store._holds) <= 100


def test_a_queue_of_any_length_widens_no_filter_and_forgets_nobody(new_stand: NewStand, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine may queue far more requests than ever look something up, and what began first runs first."""
    monkeypatch.setattr(lookups_module, "_MAX_REQUESTS", 100)
    stand = new_stand()
    stand.put(keys(2))
    stand.settle()
    stand.evict_all()
    stand.store.begin_request("first", [])
    for number in range(1000):
        stand.store.begin_request(f"queued-{number}")
    assert stand.ask([key(0)], "first") == [Lookup.MISS]
    for number in range(1000):
        stand.store.lookup(f"other-{number}", key(1))
    assert stand.total("forgotten_requests") == 901
    # It did not end, so that it may load from no tier still.
    assert stand.ask([key(0)], "first") == [Lookup.MISS]
    assert stand.hits(keys(2)) == 2
    stand.store.end_request("first")
    assert stand.hits(keys(2), "first") == 2


def test_a_chunk_that_a_tier_has_is_pending_for_a_time_whatever_fails(new_stand: NewStand, monkeypatch: pytest.MonkeyPatch) -> None:
    stand = new_stand(lookup_timeout_s=0.05)
    stand.put([key(0)])
    stand.settle()
    stand.evict_all()
    monkeypatch.setattr(stand.store._promotions, "send", lambda: None)
    assert stand.ask([key(0)], stand.request()) == [Lookup.MISS]


def test_hits_whose_pin_fails_are_looked_up_again(new_stand: NewStand, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never a HIT that nothing holds: of no request, though only one met the error."""
    stand = new_stand({}, slots=200)
    stand.put(keys(6))
    first, second = stand.request(), stand.request()
    look_up(stand, first, keys(3))
    look_up(stand, second, keys(3, 3))
    real, failures = stand.host.pin, [RuntimeError("no")]

    def pin(slots: Any, background: bool) -> Any:
        if failures:
            raise failures.pop()
        return real(slots, background)

    monkeypatch.setattr(stand.host, "pin", pin)
    with pytest.raises(RuntimeError, match="no"):
        stand.put([key(20)])
    drive_out(stand)
    assert stand.ask(keys(3), first) == [Lookup.MISS] * 3
    assert [stand.store.lookup(second, one) for one in keys(3, 3)] == [Lookup.HIT] * 3
    stand.load(second, keys(3, 3))


def test_a_store_to_tiers_takes_no_room_that_hits_were_promised(new_stand: NewStand) -> None:
    """Between the beginning and the end of a store others look up; what they were told stays."""
    backend = FaultyBackend(open_memory(""))
    stand = new_stand(backend, slots=8)
    stand.put(keys(6))
    stand.settle()
    backend.arm(Fault("put", Hang()))
    slots = stand.store.begin_store("writer", keys(2, 10))
    assert slots is not None
    stand.write(slots)
    reader = stand.request()
    look_up(stand, reader, keys(6))
    stand.store.end_store(keys(2, 10))
    drive_out(stand)
    stand.load(reader, keys(6))
