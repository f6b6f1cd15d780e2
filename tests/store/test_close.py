"""Closing lets stores end, closes every tier whatever another one does, and says whether host memory is untouched."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from store_bench import LIMIT_S, Kept, Stand, Wide, identity, key, keys

from kvstore_sdk.testing import BackendWrapper, Fault, FaultyBackend, Hang
from kvstore_sdk.tier import Lookup
from kvstore_sdk_backends.fs import open_fs
from kvstore_sdk_backends.memory import open_memory

NewStand = Callable[..., Stand]


def test_what_was_stored_last_is_in_every_tier(tmp_path: Path, new_stand: NewStand) -> None:
    stand = new_stand(open_fs(str(tmp_path / "kv")), slots=64, cascade_fraction=1.0)
    stand.put(keys(40))
    assert stand.store.close()
    again = new_stand(open_fs(str(tmp_path / "kv")), slots=64)
    assert again.hits(keys(40)) == 40


def test_slow_puts_have_ended_when_it_returns(new_stand: NewStand) -> None:
    """LEAK-06: what is written to host memory afterwards changes nothing that was stored."""
    shop = Kept(open_memory(""))
    backend = FaultyBackend(shop, [Fault("put", Hang())])
    stand = new_stand(backend, slots=16, tier_settings={"batch_records": 1}, close_timeout_s=LIMIT_S)
    stand.put(keys(8))
    assert backend.wait_hanging(3)
    timer = threading.Timer(0.3, backend.heal)
    timer.start()
    assert stand.store.close()
    timer.join()
    assert backend.hanging == 0
    stand.region.view[:] = b"\xff" * len(stand.region.view)
    reader = new_stand({"shop": shop})
    assert reader.hits(keys(8)) == 8


def test_a_put_that_never_ends_is_told_and_bounds_nothing_else(new_stand: NewStand) -> None:
    """LEAK-06: then host memory has to stay as it is."""
    backend = FaultyBackend(Wide(open_memory("")), [Fault("put", Hang())])
    stand = new_stand(Kept(backend), close_timeout_s=0.2, tier_settings={"close_timeout_s": 0.2, "store_timeout_s": 0.2})
    stand.put(keys(2))
    assert backend.wait_hanging()
    began_s = time.monotonic()
    assert not stand.store.close()
    assert time.monotonic() - began_s < LIMIT_S / 2
    assert not stand.store.close()
    assert len(stand.region.view) == stand.region.size_bytes
    backend.heal()


def test_an_error_of_one_tier_does_not_skip_the_others(new_stand: NewStand, caplog: pytest.LogCaptureFixture) -> None:
    closed: list[str] = []

    class Clumsy(BackendWrapper):
        def __init__(self, name: str) -> None:
            super().__init__(open_memory(""))
            self._name = name

        def close(self) -> None:
            closed.append(self._name)
            raise RuntimeError(f"{self._name} cannot be closed")

    stand = new_stand({name: Clumsy(name) for name in ("first", "second", "third")})
    stand.put(keys(2))

    def refuse() -> None:
        raise RuntimeError("no")

    real = stand.tiers[0].tier.close
    stand.tiers[0].tier.close = refuse  # type: ignore[method-assign]
    stand.store.close()
    assert sorted(closed) == ["second", "third"]
    assert "close of tier first failed" in caplog.text
    real()


def test_after_it_nothing_is_found_stored_or_under_way(new_stand: NewStand) -> None:
    stand = new_stand()
    stand.put(keys(2))
    name = stand.request()
    assert stand.ask(keys(2), name) == [Lookup.HIT] * 2
    stand.store.close()
    assert stand.store.lookup(name, key(0)) is Lookup.MISS
    assert stand.store.lookup("new", key(0)) is Lookup.MISS
    assert stand.store.begin_store(name, keys(2, 10)) == [None, None]
    stand.store.end_store(keys(2))
    stand.store.flush()
    stand.store.poll()
    stand.store.reset()
    stand.store.end_request(name)
    assert not stand.store.busy
    assert stand.is_at_rest()
    assert not [thread.name for thread in threading.enumerate() if thread.name == "test-seal"]


def test_stores_that_end_during_it_are_dropped(new_stand: NewStand) -> None:
    stand = new_stand()
    slots = stand.store.begin_store("one", keys(3))
    assert slots is not None
    stand.write(slots)
    stand.store.close()
    stand.store.end_store(keys(3))
    assert stand.is_at_rest()


def test_drain_waits_until_every_tier_has_what_was_stored(new_stand: NewStand) -> None:
    backend = FaultyBackend(Wide(open_memory("")), [Fault("put", Hang(0.05))])
    stand = new_stand(backend)
    stand.put(keys(4))
    assert stand.store.drain()
    assert all(stand.has("below", one) for one in keys(4))


def test_drain_is_bounded(new_stand: NewStand) -> None:
    backend = FaultyBackend(Wide(open_memory("")), [Fault("put", Hang())])
    stand = new_stand(backend, drain_timeout_s=0.1, tier_settings={"store_timeout_s": 30.0})
    stand.put(keys(4))
    assert not stand.store.drain()


def test_a_store_that_was_never_used_closes(new_stand: NewStand) -> None:
    assert new_stand({}, of=identity()).store.close()
    assert new_stand().store.close()
