"""After a reset nothing from before is served, by host memory or by any tier, whatever was under way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from store_bench import LIMIT_S, Stand, Wide, key, keys

from kvstore_sdk.store import cascades as cascades_module
from kvstore_sdk.testing import Fault, FaultyBackend, Hang, Raise, ReadLate
from kvstore_sdk.tier import Lookup
from kvstore_sdk_backends.fs import open_fs
from kvstore_sdk_backends.memory import open_memory

NewStand = Callable[..., Stand]


def test_every_earlier_key_is_a_miss_in_every_tier(tmp_path: Path, new_stand: NewStand) -> None:
    """CFG-12: also for those who open the same folders again."""
    folders = {name: str(tmp_path / name) for name in ("first", "second")}
    stand = new_stand({name: open_fs(folder) for name, folder in folders.items()})
    stand.put(keys(6))
    stand.settle()
    before = stand.identity
    stand.store.reset()
    assert stand.hits(keys(6)) == 0
    assert stand.store.identity.namespace != before.namespace
    again = new_stand({name: open_fs(folder) for name, folder in folders.items()}, of=stand.store.identity)
    assert again.hits(keys(6)) == 0


def test_what_is_stored_after_it_is_served(new_stand: NewStand) -> None:
    stand = new_stand()
    stand.put(keys(4))
    stand.settle()
    stand.store.reset()
    stand.generation = 1
    stand.put(keys(4))
    stand.settle()
    assert stand.hits(keys(4)) == 4
    stand.evict_all()
    assert stand.hits(keys(4)) == 4
    assert stand.is_at_rest()


def test_all_tiers_share_one_fresh_namespace(new_stand: NewStand) -> None:
    stand = new_stand({"first": open_memory(""), "second": open_memory("")})
    stand.store.reset()
    assert {below.tier.identity for below in stand.tiers} == {stand.store.identity}
    assert stand.store.identity.epoch
    stand.put(keys(2))
    stand.settle()
    assert all(stand.has(tier, one) for tier in ("first", "second") for one in keys(2))


def test_named_weights_make_engines_share_again(new_stand: NewStand) -> None:
    shop = open_memory("")
    one, other = new_stand({"shop": Wide(shop)}), new_stand({"shop": Wide(shop)})
    for stand in (one, other):
        stand.store.reset("w1")
    one.put(keys(3))
    one.settle()
    assert other.hits(keys(3)) == 3
    assert one.store.identity.weights == "w1"


def test_what_was_computed_before_it_is_not_stored_after_it(new_stand: NewStand) -> None:
    """KEY-08. The engine offloads again what it computed for running requests, whether they stored something before or not."""
    stand = new_stand()
    running, asking, quiet, ended, preempted = (stand.request() for _ in range(5))
    stand.put(keys(2), running)
    stand.ask([key(9)], asking)
    stand.put(keys(2, 20), preempted)
    stand.store.reset()
    stand.store.reset()
    stand.store.end_request(ended)
    for name in (running, asking, quiet, ended, preempted):
        assert stand.put(keys(4), name) == [None] * 4
    assert stand.hits(keys(4)) == 0
    # It starts over, and computes with the new weights; likewise whoever comes anew, even under an id of before.
    stand.generation = 1
    stand.store.restart_request(preempted)
    assert None not in (stand.put(keys(2, 20), preempted) or [None])
    stand.store.begin_request(ended)
    assert None not in (stand.put(keys(2, 30), ended) or [None])
    stand.settle()
    assert [stand.hits(keys(2, 20)), stand.hits(keys(2, 30)), stand.hits(keys(4))] == [2, 2, 0]
    stand.store.end_request(running)
    assert stand.put(keys(4), running) == [None] * 4, "a store may come after the end of its request"
    stand.evict_all()
    assert [stand.hits(keys(2, 20)), stand.hits(keys(2, 30)), stand.hits(keys(4))] == [2, 2, 0]


def test_a_request_that_waited_for_its_first_step_stores_what_it_computes(new_stand: NewStand) -> None:
    stand = new_stand()
    stand.put(keys(2, 50))
    waiting, loading = stand.request(), stand.request()
    stand.load(loading, keys(2, 50)[: stand.ask(keys(2, 50), loading).count(Lookup.HIT)])
    stand.store.reset()
    stand.store.reset()
    stand.store.begin_computing([waiting, loading, "nobody"])
    stand.generation = 1
    assert stand.put(keys(2), loading) == [None] * 2, "what it loaded before is on the device"
    assert None not in (stand.put(keys(2), waiting) or [None])
    assert stand.hits(keys(2)) == 2


@pytest.mark.parametrize("fault", [Hang(), ReadLate()], ids=["late", "late and wrong"])
def test_a_put_that_was_in_flight_does_not_reappear(fault: Hang | ReadLate, new_stand: NewStand) -> None:
    """CFG-12: it may land in the old namespace only, and its slots are not written before it has."""
    backend = FaultyBackend(Wide(open_memory("")), [Fault("put", fault)])
    stand = new_stand(backend, slots=8, tier_settings={"drain_timeout_s": 0.05})
    before = stand.identity
    stand.put(keys(4))
    if isinstance(fault, Hang):
        assert backend.wait_hanging()
    else:
        stand.wait(lambda: backend.fired(backend.log[-1].faults[0]) if backend.log and backend.log[-1].faults else 0)
    stand.store.reset()
    backend.arm()
    stand.generation = 1
    for number in range(40):
        stand.put([key(1000 + number)])
        stand.step()
    assert stand.hits(keys(4)) == 0
    backend.heal()
    assert backend.wait_late()
    stand.wait(stand.is_at_rest)
    assert stand.hits(keys(4)) == 0
    old = new_stand({"old": Wide(backend.inner)}, of=before)
    if isinstance(fault, Hang):
        # What landed in the old namespace is what was stored there, not what took its place in host memory.
        assert any(old.hits([one]) for one in keys(4))


def test_everything_in_flight_at_once_ends_and_serves_nothing(new_stand: NewStand) -> None:
    backend = FaultyBackend(Wide(open_memory("")))
    stand = new_stand(backend, slots=48, tier_settings={"drain_timeout_s": 0.1})
    stand.put(keys(6))
    stand.put(keys(4, 50))
    stand.settle()
    stand.evict_all()
    # Held hits, an engine's load and store, promotions and cascades, a look-up without an answer.
    stand.put(keys(3, 10))
    holder, loader, writer, waiter, asker = (stand.request() for _ in range(5))
    assert stand.ask(keys(3, 10), holder) == [Lookup.HIT] * 3
    stand.settle()
    backend.arm(Fault("*", Hang()))
    stand.store.begin_load(loader, keys(2, 10))
    filled = stand.store.begin_store(writer, keys(2, 20))
    assert filled is not None
    # And a load and a store whose ends nobody will ever tell.
    stand.store.begin_load(writer, keys(3, 10))
    assert stand.store.begin_store(loader, keys(2, 60)) is not None
    stand.put(keys(2, 30))
    stand.wait(lambda: [stand.store.lookup(waiter, one) for one in keys(6)] and stand.store.metrics.gauge_value("open_promotions") == 6)
    assert stand.store.lookup(asker, key(77)) is Lookup.PENDING
    stand.step()
    assert backend.wait_hanging(2)
    stand.store.reset()
    stand.generation = 1
    everything = [*keys(6), *keys(3, 10), *keys(2, 20), *keys(2, 30), *keys(4, 50), key(77)]
    names = (holder, loader, writer, waiter, asker)
    assert all(stand.store.lookup(name, one) is not Lookup.HIT for name in names for one in everything)
    # Ends of transfers from before say nothing.
    stand.store.end_load(loader, keys(2, 10))
    stand.store.end_store(keys(2, 20))
    assert stand.store.lookup(stand.request(), key(20)) is not Lookup.HIT
    backend.heal()
    stand.wait(stand.is_at_rest, "every slot")
    assert stand.hits(everything) == 0
    assert stand.put(keys(48, 200)) is not None
    stand.settle()
    assert stand.hits(keys(36, 200)) == 36
    for name in names:
        stand.store.end_request(name)
    stand.settle()
    assert stand.is_at_rest()


def test_a_tier_that_cannot_be_reset_is_not_used_any_more(new_stand: NewStand, monkeypatch: pytest.MonkeyPatch) -> None:
    stand = new_stand({"bad": open_memory(""), "good": open_memory("")})
    stand.put(keys(3))
    stand.settle()

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("not now")

    monkeypatch.setattr(stand.tiers[0].tier, "reset", refuse)
    stand.store.reset()
    stand.generation = 1
    assert stand.hits(keys(3)) == 0
    stand.put(keys(3, 10))
    stand.settle()
    assert not stand.has("bad", key(10))
    assert stand.has("good", key(10))


def test_a_backend_that_fails_while_it_is_reset_serves_nothing_old(new_stand: NewStand) -> None:
    backend = FaultyBackend(Wide(open_memory("")))
    stand = new_stand(backend)
    stand.put(keys(3))
    stand.settle()
    backend.arm(Fault("*", Raise(RuntimeError), times=20))
    stand.store.reset()
    assert stand.hits(keys(3)) == 0
    backend.heal()
    assert stand.hits(keys(3)) == 0


def test_what_is_being_sealed_meanwhile_is_given_to_no_tier(new_stand: NewStand, monkeypatch: pytest.MonkeyPatch) -> None:
    stand = new_stand()
    began, go_on = threading.Event(), threading.Event()
    real = cascades_module.seal

    def slowly(*args: Any) -> None:
        began.set()
        assert go_on.wait(LIMIT_S)
        real(*args)

    monkeypatch.setattr(cascades_module, "seal", slowly)
    stand.put([key(0)])
    # Waits behind the first, and is dropped there.
    stand.put([key(1)])
    assert began.wait(LIMIT_S)
    stand.store.reset()
    go_on.set()
    stand.settle()
    assert stand.tiers[0].tier.metrics.total("stores") == 0
    assert stand.is_at_rest()
    stand.put([key(2)])
    stand.settle()
    assert stand.has("below", key(2))
