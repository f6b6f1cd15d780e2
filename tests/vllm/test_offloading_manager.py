"""Our own manager under vLLM's calls: both sides of an engine without a model, two ranks, two groups."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from vllm_records import is_good, record_paths
from vllm_stand import Stand, offload

from kvstore_sdk.vllm import compat
from kvstore_sdk.vllm.metrics import HOST_PREFIX, PREFIX, STORE_PREFIX
from kvstore_sdk.vllm.offloading.manager import KVStoreOffloadingManager
from kvstore_sdk.vllm.offloading.spec import KVStoreOffloadingSpec
from kvstore_sdk.vllm.offloading.transfers import SlotSpec

ROOMY = 1 << 20
BLOCKS = [[0, 1, 2, 3], [4, 5, 6, 7]]
OTHERS = [[8, 9, 10, 11], [12, 13, 14, 15]]
INTO = [[20, 21, 22, 23], [24, 25, 26, 27]]

Build = Callable[..., Stand]


@pytest.fixture
def build(stand: Build) -> Build:
    """Builds a stand with our own manager. `slots`: how many of the larger chunks host memory holds."""

    def make(tiers: list[dict[str, Any]] | None = None, *, slots: int | None = None, **options: Any) -> Stand:
        # Plan, a page of marks, and records of a header page and two: 6,144 bytes of group 0, 3,072 bytes of group 1.
        size = ROOMY if slots is None else (256 << 10) + 4096 + slots * 12288
        extra = {"cpu_bytes_to_use": size, **options.pop("extra", {})}
        return stand(tiers or [], spec_class=KVStoreOffloadingSpec, extra=extra, **options)

    return make


def entry(folder: Path, **options: Any) -> dict[str, Any]:
    return {"type": "kvstore", "backend": "fs", "location": str(folder), **options}


def stored(made: Stand, seed: str = "a", blocks: list[list[int]] = BLOCKS) -> list[bytes]:
    """Store two chunks of each group, in a request of their own; returns their keys."""
    keys = made.keys(seed, 2)
    request = made.request(seed, keys)
    assert made.lookup(request, keys) == [False] * 4
    made.store(request, keys, blocks)
    made.finish(request)
    made.settle()
    return keys


def test_what_was_stored_is_loaded_byte_for_byte(build: Build) -> None:
    made = build()
    written = made.fill(1, BLOCKS)
    keys = stored(made)
    request = made.request("second", keys)
    assert made.lookup(request, keys) == [True] * 4
    made.load(request, keys, INTO)
    assert made.content(INTO) == written


def test_what_left_host_memory_comes_back_from_the_tier(build: Build, tmp_path: Path) -> None:
    """Pushed out by others, then promoted: byte for byte, on both ranks and in both groups."""
    made = build([entry(tmp_path / "kv")], slots=10)
    written = made.fill(1, BLOCKS)
    keys = stored(made)
    for name in "bcdef":
        stored(made, name, OTHERS)
    records = record_paths(tmp_path / "kv")
    assert set(keys) <= {key.to_engine() for key in records}
    assert all(is_good(key, path) for key, path in records.items())
    request = made.request("second", keys)
    first = [made.manager.lookup(key, request) for key in keys]
    assert compat.HIT not in first
    assert made.lookup(request, keys) == [True] * 4
    made.load(request, keys, INTO)
    assert made.content(INTO) == written
    assert made.manager._store.metrics.total("hits", "1:kvstore") > 0


def test_only_what_is_not_there_is_stored_in_the_order_of_the_request(build: Build) -> None:
    made = build()
    known = stored(made)
    fresh = made.keys("b", 2)
    request = made.request("second")
    mixed = [fresh[0], known[1], fresh[1], known[0]]
    output = made.manager.prepare_store(mixed, request)
    assert output.keys_to_store == [fresh[0], fresh[1]]
    assert len(output.store_spec.numbers) == 2
    again = made.manager.prepare_store(mixed, request)
    assert again.keys_to_store == []
    assert made.manager.prepare_store([], request).keys_to_store == []


def test_no_room_is_none_until_there_is_some(build: Build) -> None:
    """vLLM asks again for None, and never again for an empty list."""
    made = build(slots=4, groups=1)
    keys = made.keys("a", 4)
    request = made.request("first")
    assert len(made.manager.prepare_store(keys, request).keys_to_store) == 4
    assert made.manager.prepare_store(made.keys("b", 1), request) is None
    made.manager.complete_store(set(keys), request)
    assert len(made.manager.prepare_store(made.keys("b", 1), request).keys_to_store) == 1


def test_what_is_being_written_is_pending(build: Build) -> None:
    made = build()
    keys = made.keys("a", 2)
    made.manager.prepare_store(keys, made.request("first"))
    second = made.request("second")
    assert made.manager.lookup(keys[0], second) is compat.PENDING


def test_what_a_rank_did_not_write_is_not_there(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    """INT-10. vLLM hears of a transfer only that it ended."""
    made = build()
    keys = made.keys("a", 2)
    request = made.request("first", keys)
    absent, made.workers = made.workers[1], made.workers[:1]
    with caplog.at_level(logging.ERROR, "kvstore_sdk"):
        made.store(request, keys, BLOCKS)
    assert "not all ranks wrote them" in caplog.text
    second = made.request("second", keys)
    assert made.lookup(second, keys) == [False] * 4
    assert made.manager._store.metrics.total("incomplete_stores") == 4
    made.workers.append(absent)
    third = made.request("third", keys)
    made.store(third, keys, BLOCKS)
    assert made.lookup(made.request("fourth", keys), keys) == [True] * 4


def test_what_lacks_blocks_is_dropped(build: Build) -> None:
    """INT-10. The second chunk of group 0 has no second block: nobody could tell from its bytes."""
    made = build()
    keys = made.keys("a", 2)
    request = made.request("first", keys)
    output = made.manager.prepare_store(keys, request)
    made._transfer(made.device_spec([[0, 1, 2], [4, 5, 6, 7]]), output.store_spec, store=True)
    made.manager.complete_store(set(keys), request)
    found = made.lookup(made.request("second", keys), keys)
    assert found == [False, False, True, True]


def test_a_request_that_was_preempted_finds_what_it_stored_itself(build: Build) -> None:
    made = build()
    keys = made.keys("a", 2)
    request = made.request("first", keys)
    assert made.lookup(request, keys) == [False] * 4
    made.store(request, keys, BLOCKS)
    assert made.lookup(request, keys) == [False] * 4
    made.manager.on_schedule_end(offload.ScheduleEndContext(new_req_ids=[], preempted_req_ids=["first"]))
    assert made.lookup(request, keys) == [True] * 4


def test_a_request_that_was_preempted_is_one_use(build: Build) -> None:
    made = build()
    with mock.patch.object(made.manager._store.host, "used") as used:
        keys = made.keys("a", 2)
        request = made.request("first", keys)
        made.store(request, keys, BLOCKS)
        made.manager.on_schedule_end(offload.ScheduleEndContext(new_req_ids=[], preempted_req_ids=["first"]))
        assert made.lookup(request, keys) == [True] * 4
        made.load(request, keys, INTO)
        assert not used.called
        made.finish(request)
    assert [sorted(call.args[0]) for call in used.call_args_list] == [sorted(keys)]


def test_parts_of_a_chunk_are_neither_found_nor_stored(build: Build) -> None:
    """T-U2."""
    made = build()
    keys = stored(made)
    request = made.request("second", keys)
    request.set_offload_key_position(keys[0], made.chunk_tokens + 16)
    assert made.manager.lookup(keys[0], request) is compat.MISS
    fresh = made.keys("b", 2)
    request.set_offload_key_position(fresh[0], made.chunk_tokens + 16)
    output = made.manager.prepare_store(fresh[:2], request)
    assert output.keys_to_store == [fresh[1]]


def test_a_reset_is_final(build: Build, tmp_path: Path) -> None:
    """KEY-12. Nothing of before is served, also not what was on its way, and nobody else shares what comes after."""
    made = build([entry(tmp_path / "kv")])
    keys = stored(made)
    flying = made.keys("late", 2)
    request = made.request("flying", flying)
    output = made.manager.prepare_store(flying, request)
    made.manager.reset_cache()
    made._transfer(made.device_spec(BLOCKS), output.store_spec, store=True)
    made.manager.complete_store(set(flying), request)
    second = made.request("second", keys)
    assert made.lookup(second, keys + flying) == [False] * 8
    made.fill(2, OTHERS)
    stored(made, "b", OTHERS)
    assert made.lookup(made.request("third", keys), made.keys("b", 2)) == [True] * 4
    other = build([entry(tmp_path / "kv")])
    assert other.lookup(other.request("other", keys), keys) == [True] * 4
    assert other.lookup(other.request("more", keys), made.keys("b", 2)) == [False] * 4


def test_what_was_computed_before_a_reset_is_not_stored_after_it(build: Build, tmp_path: Path) -> None:
    """KEY-08. vLLM offloads running requests from their first chunk again; after a preemption what it computed anew."""
    made = build([entry(tmp_path / "kv")])
    keys = made.keys("a", 2)
    running, waiting = made.request("running", keys), made.request("waiting", keys)
    made.store(running, keys, BLOCKS)
    made.manager.reset_cache()
    output = made.manager.prepare_store(keys, running)
    assert list(output.keys_to_store) == []
    assert made.lookup(made.request("new", keys), keys) == [False] * 4
    made.fill(2, OTHERS)
    made.manager.on_schedule_end(offload.ScheduleEndContext(new_req_ids=["waiting"], preempted_req_ids=["running"]))
    made.store(running, keys, OTHERS)
    others = made.keys("b", 2)
    made.store(waiting, others, OTHERS)
    assert made.lookup(made.request("newer", keys), keys + others) == [True] * 8


def test_a_load_that_is_under_way_survives_a_reset(build: Build) -> None:
    """vLLM never reports it; its slots must not be written by promotions meanwhile."""
    made = build()
    written = made.fill(1, BLOCKS)
    keys = stored(made)
    request = made.request("second", keys)
    assert made.lookup(request, keys) == [True] * 4
    host = made.manager.prepare_load(keys, request)
    made.manager.reset_cache()
    made._transfer(made.device_spec(INTO), host, store=False)
    assert made.content(INTO) == written
    made.manager.complete_load(set(keys), request)
    assert not made.manager.has_pending_work()


def test_events_say_which_medium(build: Build, tmp_path: Path) -> None:
    made = build([entry(tmp_path / "kv", locality="REMOTE")], slots=10, extra={"test_events": True})
    for name in "abcdef":
        stored(made, name)
    events = list(made.manager.take_events())
    counts = Counter((event.medium, event.removed, event.locality, event.ownership) for event in events for _ in event.keys)
    assert counts[offload.Medium.CPU, False, None, None] == 24
    assert counts[offload.Medium.CPU, True, None, None] > 0
    assert counts[offload.Medium.STORAGE, False, offload.Locality.REMOTE, "1:kvstore"] == 24
    assert list(made.manager.take_events()) == []


def test_a_request_may_leave_tiers_out(build: Build, tmp_path: Path) -> None:
    stored(build([entry(tmp_path / "kv")]))
    made = build([entry(tmp_path / "kv")])
    keys = made.keys("a", 2)
    only_cpu = offload.TierFilter(matchers=(offload.TierMatcher(medium=offload.Medium.CPU),))
    first = made.request("first", keys, load_tier_filter=only_cpu)
    assert made.lookup(first, keys) == [False] * 4
    made.manager.on_schedule_end(offload.ScheduleEndContext(new_req_ids=[], preempted_req_ids=["first"]))
    assert made.lookup(first, keys) == [False] * 4
    assert made.lookup(made.request("second", keys), keys) == [True] * 4


def test_where_a_hit_came_from_is_told(build: Build, tmp_path: Path) -> None:
    sources = importlib.import_module("vllm.v1.metrics.cache_hit_source").CacheHitSource
    first = build([entry(tmp_path / "kv")])
    keys = stored(first)
    request = first.request("second", keys)
    first.lookup(request, keys)
    assert first.manager.get_load_source(keys[0], request) is sources.HOST
    second = build([entry(tmp_path / "kv")])
    request = second.request("third", keys)
    second.lookup(request, keys)
    assert second.manager.get_load_source(keys[0], request) is sources.DISK
    third = build([entry(tmp_path / "kv", locality="REMOTE")])
    request = third.request("fourth", keys)
    third.lookup(request, keys)
    assert third.manager.get_load_source(keys[0], request) is sources.EXTERNAL_UNSPECIFIED


def test_all_that_is_counted_is_declared(build: Build, tmp_path: Path) -> None:
    """T18 to T24: vLLM's own Prometheus code takes it."""
    import prometheus_client
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadPromMetrics
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    # What engines of other tests left in this process.
    unregister_vllm_metrics()
    made = build([entry(tmp_path / "kv")])
    keys = stored(made)
    request = made.request("second", keys)
    assert made.lookup(request, keys) == [True] * 4
    made.load(request, keys, INTO)
    made.finish(request)
    made.step()
    declared = KVStoreOffloadingSpec.build_metric_definitions(made.extra)
    stats = made.manager.get_stats()
    kinds = {kind: kind for kind in (prometheus_client.Counter, prometheus_client.Gauge, prometheus_client.Histogram)}
    made.extra.update(spec_name="KVStoreOffloadingSpec", spec_module_path="kvstore_sdk.vllm")
    shown = OffloadPromMetrics(made.configs[0], kinds, ["model_name", "engine"], {0: ["offloading", "0"]})
    shown.observe(stats.data, 0)
    read = prometheus_client.REGISTRY.get_sample_value
    labels = {"model_name": "offloading", "engine": "0"}
    assert read(f"{STORE_PREFIX}hits_total", {**labels, "tier": "host"}) == 4.0
    assert read(f"{PREFIX}stores_total", {**labels, "tier": "1:kvstore", "result": "stored"}) == 4.0
    for group in ("0", "1"):
        of_group = {**labels, "tier": "host", "group": group}
        assert read(f"{HOST_PREFIX}hits_total", of_group) == 2.0
        assert read(f"{HOST_PREFIX}used_slots", of_group) == 2.0
    unregister_vllm_metrics()
    assert all(name.startswith(PREFIX) for name in declared)


def test_an_engine_that_hashes_from_another_seed_shares_nothing(build: Build) -> None:
    made = build()
    before = made.manager._store.identity.namespace
    made.manager._hash_unconfirmed = b"something else"
    keys = stored(made)
    assert made.manager._hash_unconfirmed is None
    assert made.manager._store.identity.namespace != before
    request = made.request("second", keys)
    assert made.lookup(request, keys) == [True] * 4


def test_where_a_wrong_seed_cannot_be_answered_nothing_is_stored(
    build: Build, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its keys would be under a name that others share."""
    made = build()
    made.manager._hash_unconfirmed = b"something else"
    monkeypatch.setattr(made.manager._store, "reset", lambda: 1 // 0)
    keys = made.keys("a", 2)
    request = made.request("first", keys)
    assert "switched off" in caplog.text
    assert made.manager.prepare_store(keys, request).keys_to_store == []
    assert made.manager.lookup(keys[0], request) is compat.MISS


class _Broken:
    """A store in which everything goes wrong."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} is broken")


def test_no_method_raises_but_the_one_that_would_give_wrong_kv(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    """T6 to T8, T17."""
    made = build()
    keys = made.keys("a", 2)
    request = made.request("first", keys)
    manager = made.manager
    real, opened = manager._store, manager._open
    manager._store = _Broken()
    manager._open = opened._replace(store=_Broken(), marks=_Broken())
    with caplog.at_level(logging.ERROR, "kvstore_sdk"):
        assert isinstance(manager.on_new_request(request), offload.RequestOffloadingContext)
        assert manager.lookup(keys[0], request) is compat.MISS
        assert manager.prepare_store(keys, request).keys_to_store == []
        manager.complete_store(set(keys), request)
        manager.complete_load(set(keys), request)
        manager.on_schedule_end(offload.ScheduleEndContext(new_req_ids=["first"], preempted_req_ids=["first"]))
        manager.on_request_finished(request)
        manager.touch(keys, request)
        manager.get_load_source(keys[0], request)
        assert manager.has_pending_work() is False
        assert list(manager.take_events()) == []
        assert manager.get_stats() is None
        assert len(manager.prepare_load([], request).numbers) == 0
        with pytest.raises(RuntimeError):
            manager.prepare_load(keys, request)
        manager.reset_cache()
        manager.shutdown()
    assert "lookup failed" in caplog.text
    real.close()
    opened.marks.close()
    opened.release()


def test_a_load_of_what_was_never_a_hit_is_refused(build: Build) -> None:
    """The engine could not be told later that the blocks hold nothing."""
    made = build()
    with pytest.raises(KeyError):
        made.manager.prepare_load(made.keys("a", 1), made.request("first"))


def test_a_seed_that_was_not_expected_makes_the_chunks_private(build: Build, tmp_path: Path) -> None:
    """KEY-06. The engine draws its seed after the manager was built."""
    made = build([entry(tmp_path / "kv")])
    before = made.manager._store.identity.namespace
    with mock.patch.object(compat, "is_none_hash", return_value=False):
        keys = stored(made)
    assert made.manager._store.identity.namespace != before
    other = build([entry(tmp_path / "kv")])
    assert other.lookup(other.request("other", keys), keys) == [False] * 4


def test_shutdown_leaves_nothing_and_may_come_twice(build: Build, tmp_path: Path) -> None:
    made = build([entry(tmp_path / "kv")])
    stored(made)
    assert not [name for name in os.listdir("/dev/shm") if made.engine_id in name]
    manager = made.manager
    made.close()
    manager.shutdown()
    request = made.request("late")
    assert manager.lookup(made.keys("a", 1)[0], request) is compat.MISS
    assert manager.prepare_store(made.keys("a", 1), request).keys_to_store == []
    manager.complete_store(set(), request)
    manager.on_schedule_end()
    manager.reset_cache()
    with Path("/proc/self/maps").open() as maps:
        assert made.engine_id not in maps.read()


def test_every_method_takes_what_vllm_passes() -> None:
    base = offload.OffloadingManager
    for name, method in inspect.getmembers(base, inspect.isfunction):
        if name.startswith("_"):
            continue
        ours = inspect.signature(getattr(KVStoreOffloadingManager, name)).parameters.values()
        takes_any = any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in ours)
        assert takes_any or [*inspect.signature(method).parameters] == [parameter.name for parameter in ours], name
    assert isinstance(SlotSpec((), ()), offload.LoadStoreSpec)
