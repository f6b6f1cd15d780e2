"""What was stored is loaded again, byte for byte: from host memory, and from every tier below it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from store_bench import Stand, key, keys

from kvstore_sdk.errors import ConfigError
from kvstore_sdk.store import HOST, StoreTier, TieredStore
from kvstore_sdk.testing import Fault, FaultyBackend, WrongBytes
from kvstore_sdk.tier import Lookup
from kvstore_sdk_backends.fs import open_fs
from kvstore_sdk_backends.memory import open_memory

NewStand = Callable[..., Stand]


def test_what_was_stored_is_a_hit_at_once(new_stand: NewStand) -> None:
    stand = new_stand()
    assert stand.put(keys(4)) is not None
    assert stand.hits(keys(4)) == 4


def test_a_store_without_tiers_is_host_memory_alone(new_stand: NewStand) -> None:
    stand = new_stand({})
    stand.put(keys(4))
    assert stand.hits(keys(6)) == 4
    assert not stand.store.busy


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_what_left_host_memory_comes_back_from_a_folder(policy: str, tmp_path: Path, new_stand: NewStand) -> None:
    stand = new_stand(open_fs(str(tmp_path / "kv")), policy=policy, sizes=(5000, 900))
    both = [*keys(4), *keys(4, group=1)]
    stand.put(both)
    stand.settle()
    stand.evict_all()
    assert stand.hits(both) == 8
    assert stand.total("hits", "below") == 8
    assert stand.hits(both) == 8
    assert stand.total("hits", HOST) == 8


def test_every_tier_gets_what_is_stored(new_stand: NewStand) -> None:
    stand = new_stand({"first": open_memory(""), "second": open_memory("")})
    stand.put(keys(5))
    stand.settle()
    assert all(stand.has(tier, one) for tier in ("first", "second") for one in keys(5))
    assert stand.is_at_rest()


def test_a_chunk_that_is_there_is_not_written_again(new_stand: NewStand) -> None:
    stand = new_stand()
    stand.put(keys(2))
    slots = stand.put(keys(4))
    assert slots is not None
    assert [slot is None for slot in slots] == [True, True, False, False]
    assert stand.hits(keys(4)) == 4


def test_a_chunk_that_is_being_written_is_pending_and_then_a_hit(new_stand: NewStand) -> None:
    stand = new_stand()
    writer, reader = stand.request(), stand.request()
    slots = stand.store.begin_store(writer, keys(2))
    assert slots is not None
    assert stand.store.is_filling(key(0))
    assert stand.store.lookup(reader, key(0)) is Lookup.PENDING
    assert stand.store.begin_store(stand.request(), keys(2)) == [None, None]
    stand.write(slots)
    stand.store.end_store(keys(2))
    assert stand.store.lookup(reader, key(0)) is Lookup.HIT
    assert stand.store.source(reader, key(0)) == "host"


def test_a_chunk_that_lacks_a_part_is_dropped(new_stand: NewStand) -> None:
    """INT-10: in host memory and in every tier."""
    stand = new_stand()
    name = stand.request()
    slots = stand.store.begin_store(name, keys(3))
    assert slots is not None
    stand.write(slots)
    stand.store.end_store(keys(3), incomplete=[key(1)])
    stand.settle()
    assert stand.ask(keys(3), stand.request()) == [Lookup.HIT, Lookup.MISS, Lookup.HIT]
    assert not stand.has("below", key(1))
    assert stand.total("incomplete_stores") == 1


def test_a_corrupt_record_is_a_miss_and_never_bytes(new_stand: NewStand) -> None:
    """INT-01: what a request reads from a slot is what was stored under the key."""
    backend = FaultyBackend(open_memory(""))
    stand = new_stand(backend)
    stand.put(keys(3))
    stand.settle()
    stand.evict_all()
    backend.arm(Fault("get", WrongBytes()))
    assert stand.hits(keys(3)) == 0
    assert stand.total("promotions", "below", "failed") >= 1
    assert stand.is_at_rest()
    backend.heal()
    assert stand.put(keys(3)) is not None
    stand.settle()
    stand.evict_all()
    assert stand.hits(keys(3)) == 3


def test_ends_of_stores_that_nobody_began_are_passed_over(new_stand: NewStand) -> None:
    stand = new_stand()
    stand.store.end_store(keys(3))
    assert stand.ask(keys(3), stand.request()) == [Lookup.MISS] * 3


def test_loading_what_was_no_hit_is_refused_and_pins_nothing(new_stand: NewStand) -> None:
    stand = new_stand({})
    stand.put(keys(2))
    with pytest.raises(KeyError, match="load only what was HIT"):
        stand.store.begin_load(stand.request(), keys(3))
    assert stand.is_at_rest()


def test_an_empty_load_is_no_load(new_stand: NewStand) -> None:
    stand = new_stand()
    name = stand.request()
    assert stand.store.begin_load(name, []) == []
    stand.store.end_load(name, [])
    assert stand.total("double_releases") == 0


def test_a_key_of_a_group_that_is_not_there_is_a_miss_and_not_stored(new_stand: NewStand) -> None:
    stand = new_stand()
    strange = key(0, group=7)
    assert stand.store.lookup(stand.request(), strange) is Lookup.MISS
    slots = stand.put([key(0), strange])
    assert slots is not None
    assert [slot is None for slot in slots] == [False, True]
    assert stand.store.lookup(stand.request(), b"") is Lookup.MISS


def test_tiers_of_one_name_or_another_identity_are_refused(new_stand: NewStand) -> None:
    stand = new_stand()
    below = stand.tiers[0]
    for tiers, of, words in (
        ([below, StoreTier("below", below.tier)], stand.identity, "there twice"),
        ([below], new_stand(of=None, sizes=(6000,)).identity, "another identity"),
    ):
        with pytest.raises(ConfigError, match=words):
            TieredStore(stand.host, tiers, identity=of)
    with pytest.raises(ConfigError, match="no name for a tier"):
        StoreTier(HOST, below.tier)
