"""Whatever a backend, a tier or a policy does: no slot and no job is lost, and no byte is wrong."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from store_bench import LIMIT_S, Kept, Stand, Wide, key, keys, payload

from kvstore_sdk.backend import Deadline, Get, GetStatus, Region
from kvstore_sdk.format import HEADER_BYTES, record_bytes
from kvstore_sdk.host.lru import LRU
from kvstore_sdk.keys import ChunkKey
from kvstore_sdk.store import cascades as cascades_module
from kvstore_sdk.store.cascades import Cascades
from kvstore_sdk.testing import BackendWrapper, Fault, FaultyBackend, Hang, InDoubt, Raise, Return, WriteLate
from kvstore_sdk.tier import Lookup
from kvstore_sdk_backends.memory import open_memory

NewStand = Callable[..., Stand]


def fill_up(stand: Stand, start: int) -> None:
    """Store until every slot that may be taken was."""
    for number in range(3 * stand.host.row_count):
        stand.put([key(start + number)])
        stand.step()


def stored_payload(stand: Stand, tier: str, one: bytes) -> bytes:
    region = Region(record_bytes(5000))
    buffer = region.buffer(0, record_bytes(5000))
    name = ChunkKey.from_engine(stand.identity.namespace, one).name
    [result] = stand.backends[tier].get([Get(name, (buffer,))], Deadline.after(LIMIT_S))
    assert result.status is GetStatus.FOUND
    return bytes(buffer.view[HEADER_BYTES : HEADER_BYTES + 5000])


def test_a_chunk_whose_put_outlived_its_job_is_read_but_not_overwritten(new_stand: NewStand) -> None:
    """RACE-03: what lands in the end is what was stored."""
    backend = FaultyBackend(Wide(open_memory("")), [Fault("put", Hang())])
    stand = new_stand(backend, slots=8)
    stand.put(keys(2))
    assert backend.wait_hanging()
    stand.time_is_up()
    stand.settle()
    assert stand.total("cascades", "below", "failed") == 2
    held = int(stand.store.metrics.gauge_value("held_slots"))
    assert held >= 1
    assert stand.hits(keys(2)) == 2
    fill_up(stand, 100)
    still = [one for one in keys(2) if stand.host.get(one) is not None]
    assert len(still) >= held
    assert stand.hits(still) == len(still)
    backend.heal()
    stand.wait(stand.is_at_rest, "the held slots")
    for one in still:
        if stand.has("below", one):
            assert stored_payload(stand, "below", one) == payload(one, 5000)
    fill_up(stand, 500)
    assert not any(stand.host.get(one) for one in keys(2))


def test_a_slot_that_a_late_get_may_write_is_nobodys_until_it_returned(new_stand: NewStand) -> None:
    backend = FaultyBackend(Wide(open_memory("")))
    stand = new_stand(backend, slots=8)
    stand.put(keys(3))
    stand.settle()
    stand.evict_all()
    backend.arm(Fault("get", Hang()))
    name = stand.request()
    stand.wait(lambda: [stand.store.lookup(name, one) for one in keys(3)] and backend.hanging, "a call that hangs")
    stand.time_is_up()
    stand.set_timeouts(lookup_timeout_s=0.5)
    assert stand.ask(keys(3), name) == [Lookup.MISS] * 3
    stand.set_timeouts(lookup_timeout_s=LIMIT_S)
    assert stand.total("promotions", "below", "late") >= 1
    assert stand.store.metrics.gauge_value("held_slots") >= 1
    fill_up(stand, 100)
    there = [one for one in keys(60, 100) if stand.host.get(one) is not None]
    backend.heal()
    stand.wait(lambda: stand.store.metrics.gauge_value("held_slots") == 0, "the quarantine's end")
    # The late call wrote into its own slot, and into no other.
    for one in there:
        slot = stand.host.get(one)
        assert slot is not None
        assert stand.is_right(slot, one)
    stand.settle()
    assert stand.is_at_rest()


@pytest.mark.parametrize("operation", ["put", "get"])
def test_slots_in_doubt_are_held_until_the_backend_settled_them(operation: str, new_stand: NewStand) -> None:
    doubt = Fault(operation, InDoubt())
    backend = FaultyBackend(Wide(open_memory("")), [Fault("put", InDoubt(), times=0)])
    stand = new_stand(backend, slots=16)
    stand.put(keys(2))
    stand.settle()
    stand.evict_all()
    backend.arm(doubt)
    if operation == "put":
        stand.put(keys(2, 10))
        stand.settle()
    else:
        assert stand.hits(keys(2)) == 0
    assert stand.store.metrics.gauge_value("held_slots") == 2
    fill_up(stand, 100)
    backend.heal()
    stand.settle()
    stand.wait(stand.is_at_rest, "the held slots")


def test_writing_late_into_a_buffer_spoils_no_chunk_of_another_request(new_stand: NewStand) -> None:
    """INT-03: the backend breaks its contract after an answer that says nothing was read; what is READY was verified."""
    backend = FaultyBackend(Wide(open_memory("")))
    stand = new_stand(backend, tier_settings={"retries": 0})
    stand.put(keys(2))
    stand.settle()
    stand.evict_all()
    backend.arm(Fault("get", WriteLate(seconds=None), times=1))
    stand.hits(keys(2))
    stand.settle()
    backend.heal()
    assert stand.put(keys(2)) is not None
    assert stand.hits(keys(2)) == 2


@pytest.mark.parametrize("error", [RuntimeError, SystemExit, KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("operation", ["exists", "put", "get"])
def test_a_backend_that_raises_costs_misses_and_nothing_else(operation: str, error: type[BaseException], new_stand: NewStand) -> None:
    backend = FaultyBackend(Wide(open_memory("")))
    stand = new_stand(backend)
    stand.put(keys(4))
    stand.settle()
    stand.evict_all()
    backend.arm(Fault(operation, Raise(error)))
    stand.hits([*keys(4), key(50)])
    assert stand.put(keys(4, 10)) is not None
    stand.settle()
    assert stand.hits(keys(4, 10)) == 4
    assert stand.is_at_rest()


def test_answers_that_are_none_cost_misses_and_nothing_else(new_stand: NewStand) -> None:
    backend = FaultyBackend(Wide(open_memory("")))
    stand = new_stand(backend)
    stand.put(keys(4))
    stand.settle()
    stand.evict_all()
    backend.arm(Fault("*", Return(lambda _: None)))
    assert stand.hits(keys(4)) == 0
    stand.settle()
    assert stand.is_at_rest()


@pytest.mark.parametrize("method", ["lookup", "flush", "poll", "submit_store", "submit_load", "take_events", "end_request"])
def test_a_tier_that_raises_loses_nothing(method: str, new_stand: NewStand, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not; if it did, every slot would come back all the same, and the other tier would serve."""
    stand = new_stand({"bad": open_memory(""), "good": open_memory("")}, lookup_timeout_s=3.0)
    stand.put(keys(4))
    stand.settle()
    stand.evict_all()
    tier = stand.tiers[0].tier
    monkeypatch.setattr(tier, method, lambda *_: (_ for _ in ()).throw(RuntimeError("a fault of the SDK")))
    name = stand.request()
    stand.hits(keys(4), name)
    stand.store.end_request(name)
    stand.put(keys(3, 10))
    stand.store.take_events()
    stand.wait(lambda: method == "take_events" or stand.total("faults", "tier"), "the fault")
    monkeypatch.undo()
    stand.settle()
    stand.wait(stand.is_at_rest, "every slot")
    assert stand.hits(keys(3, 10)) == 3


class Moody(LRU):
    """A policy that fails once, in the call that it is told to."""

    fails_in = ""
    error: BaseException = RuntimeError("is broken")

    def __getattribute__(self, name: str) -> Any:
        if name == Moody.fails_in:
            Moody.fails_in = ""
            raise Moody.error
        return super().__getattribute__(name)


def open_moody(capacity: int) -> Moody:
    return Moody(capacity)


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize("error", [RuntimeError("is broken"), SystemExit(1), Mute()], ids=["raises", "exits", "mute"])
@pytest.mark.parametrize("method", ["insert", "miss", "used", "pin", "unpin", "victim", "evict", "remove", "clear"])
def test_a_policy_that_fails_breaks_no_promise(
    method: str, error: BaseException, new_stand: NewStand, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A hit stays one, whatever is stored in between; nobody meets the error; no slot is lost, and none is pinned for ever."""
    monkeypatch.setitem(sys.modules, "moody", sys.modules[__name__])
    stand = new_stand(policy="moody:open_moody", slots=8)
    stand.put(keys(8))
    stand.settle()
    waiting = stand.request()
    assert stand.ask(keys(4), waiting) == [Lookup.HIT] * 4
    monkeypatch.setattr(Moody, "fails_in", method)
    monkeypatch.setattr(Moody, "error", error)
    for number in range(12):
        assert stand.put([key(50 + number)]) is not None
    stand.store.begin_store("nobody", [key(80)])
    stand.store.end_store([key(80)], incomplete=[key(80)])
    assert [stand.store.lookup(waiting, one) for one in keys(4)] == [Lookup.HIT] * 4
    stand.load(waiting, keys(4))
    stand.store.end_request(waiting)
    if method == "clear":
        stand.settle()
        stand.store.reset()
    assert "from now on the least recently used leaves first" in caplog.text
    assert not Moody.fails_in
    stand.settle()
    assert stand.is_at_rest()
    assert stand.host.stats().background_bytes == 0
    slots = stand.put(keys(8, 100))
    assert slots is not None
    assert None not in slots
    # What tiers still read leaves less room for hits.
    stand.settle()
    assert stand.hits(keys(6, 100)) == 6


def test_a_chunk_that_cannot_be_sealed_costs_itself_alone(new_stand: NewStand, monkeypatch: pytest.MonkeyPatch) -> None:
    stand = new_stand()
    real = cascades_module.seal

    def refuse(record: memoryview, named: ChunkKey, *rest: Any) -> None:
        if named.to_engine() == key(1):
            raise RuntimeError("this one is not")
        real(record, named, *rest)

    monkeypatch.setattr(cascades_module, "seal", refuse)
    stand.put(keys(3))
    stand.settle()
    assert [stand.has("below", one) for one in keys(3)] == [True, False, True]
    assert stand.hits(keys(3)) == 3
    assert stand.is_at_rest()
    stand.put(keys(3, 10))
    stand.settle()
    assert stand.has("below", key(12))


def test_sealing_goes_on_whatever_happened_when_chunks_were_sealed(new_stand: NewStand, monkeypatch: pytest.MonkeyPatch) -> None:
    stand = new_stand()
    real, fails = Cascades._submit, [SystemExit(1)]

    def submit(*args: Any) -> None:
        if fails:
            raise fails.pop()
        real(*args)

    monkeypatch.setattr(Cascades, "_submit", submit)
    stand.put(keys(3))
    stand.settle()
    assert not fails
    stand.put(keys(3, 10))
    stand.settle()
    assert stand.has("below", key(12))
    assert stand.is_at_rest()


def test_an_engine_that_computed_a_chunk_does_not_wait_for_a_tier_to_bring_it(new_stand: NewStand) -> None:
    """The tier hangs; the chunk is stored all the same, and what the tier brings late is thrown away."""
    backend = FaultyBackend(Wide(open_memory("")))
    stand = new_stand(backend, tier_settings={"load_timeout_s": LIMIT_S})
    stand.put(keys(2))
    stand.settle()
    stand.evict_all()
    backend.arm(Fault("get", Hang()))
    waiting = stand.request()
    stand.wait(lambda: [stand.store.lookup(waiting, one) for one in keys(2)] and backend.hanging)
    stand.generation = 1
    slots = stand.put(keys(2))
    assert slots is not None
    assert None not in slots
    assert stand.ask(keys(2), waiting) == [Lookup.HIT] * 2
    stand.load(waiting, keys(2))
    backend.heal()
    stand.settle()
    assert stand.hits(keys(2)) == 2
    assert stand.total("promotions", "below", "unwanted") == 2
    assert stand.total("promotions", "below", "failed") == 0
    assert stand.is_at_rest()


def test_a_dead_tier_costs_neither_stores_nor_other_tiers(new_stand: NewStand) -> None:
    """LIV-11."""

    class Dead(BackendWrapper):
        def exists(self, names: Any, deadline: Any) -> Any:
            raise ConnectionError("refused")

        put = get = exists

    stand = new_stand({"dead": Dead(open_memory("")), "good": Kept(open_memory(""))}, slots=64)
    for start in range(0, 30, 3):
        stand.put(keys(3, start))
    stand.settle()
    stand.evict_all()
    for start in range(0, 30, 3):
        assert stand.hits(keys(3, start)) == 3
    assert stand.total("hits", "good") == 30
    assert threading.active_count() < 40
