"""`KVStoreOffloadingSpec`: what it takes, what it refuses, and what it leaves behind."""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm_stand import Stand

from kvstore_sdk.backend import ConfigError
from kvstore_sdk.vllm import compat
from kvstore_sdk.vllm.offloading.options import parse_offloading_options
from kvstore_sdk.vllm.offloading.spec import KVStoreOffloadingSpec

Build = Callable[..., Stand]
WHERE = "KVStoreOffloadingSpec"
LEAST = (256 << 10) + 4096 + 2 * 12288
"""The plan, a page of marks, and two records of the larger group of the stand: a header page and 6,144 bytes in two pages."""


def entry(folder: Path | str, **options: Any) -> dict[str, Any]:
    return {"type": "kvstore", "backend": "fs", "location": str(folder), **options}


@pytest.fixture
def build(stand: Build) -> Build:
    def make(tiers: list[dict[str, Any]] | None = None, **options: Any) -> Stand:
        extra = {"cpu_bytes_to_use": 1 << 20, **options.pop("extra", {})}
        return stand(tiers or [], spec_class=KVStoreOffloadingSpec, extra=extra, **options)

    return make


def in_shared_memory() -> set[str]:
    """What stands of this process have there; other engines of the machine come and go."""
    return {name for name in os.listdir("/dev/shm") if f"kvstore-test-{os.getpid()}-" in name}


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({}, ["cpu_bytes_to_use", "is missing"]),
        ({"cpu_bytes_to_use": "8 parsecs"}, ["cpu_bytes_to_use", "'8 parsecs'", "4GiB"]),
        ({"cpu_bytes_to_use": 0}, ["cpu_bytes_to_use", "out of bounds"]),
        ({"cpu_bytes_to_use": True}, ["cpu_bytes_to_use", "True"]),
        ({"cpu_bytes_to_use": 1, "eviction_policy": 7}, ["eviction_policy", "not a string"]),
        ({"cpu_bytes_to_use": 1, "cache_policy_module_path": "x"}, ["cache_policy_module_path", "module:factory"]),
        ({"cpu_bytes_to_use": 1, "canonical_layout": True}, ["canonical_layout", "leave it out"]),
        ({"cpu_bytes_to_use": 1, "store_threshold": 2}, ["store_threshold", "arc"]),
        ({"cpu_bytes_to_use": 1, "secondary_tiers": {}}, []),
        ({"cpu_bytes_to_use": 1, "secondary_tiers": "fs"}, ["secondary_tiers", "list of tables"]),
        ({"cpu_bytes_to_use": 1, "secondary_tiers": [{"type": "fs", "root_dir": "/kv"}]}, ["secondary_tiers", "'fs'", "'kvstore'"]),
        ({"cpu_bytes_to_use": 1, "secondary_tiers": [entry("/kv", io_treads=1)]}, ["tier '1:kvstore'", "io_treads", "io_threads"]),
        ({"cpu_bytes_to_use": 1, "kvstore": []}, ["kvstore", "table of options"]),
        ({"cpu_bytes_to_use": 1, "kvstore": {"hold_timeout": 1}}, ["hold_timeout", "unknown option", "hold_timeout_s", "weights_version"]),
        ({"cpu_bytes_to_use": 1, "kvstore": {"may_store": False}}, ["may_store", "each entry of secondary_tiers"]),
        ({"cpu_bytes_to_use": 1, "kvstore": {"io_threads": 1}}, ["io_threads", "each entry of secondary_tiers"]),
        ({"cpu_bytes_to_use": 1, "kvstore": {"weight_version": "x"}}, ["weight_version", "did you mean weights_version?"]),
        ({"cpu_bytes_to_use": 1, "secondary_tiers": [entry("/kv", reserve_bytes=1)]}, ["reserve_bytes", "the table kvstore"]),
        ({"cpu_bytes_to_use": 1, "kvstore": {"hold_timeout_s": "x"}}, ["hold_timeout_s", "seconds"]),
        (
            {"cpu_bytes_to_use": 1, "kvstore": {"weights_version": "a"}, "secondary_tiers": [entry("/kv", weights_version="b")]},
            ["weights_version", "kvstore", "tier 1"],
        ),
        (
            {"cpu_bytes_to_use": 1, "secondary_tiers": [entry("/kv", weights_version="a"), entry("/other")]},
            ["weights_version", "1:kvstore", "2:kvstore"],
        ),
        (
            {"cpu_bytes_to_use": 1, "secondary_tiers": [entry("/kv", tenant_salt="hunter2"), entry("/other", tenant_salt="hunter3")]},
            ["tenant_salt", "differs"],
        ),
    ],
)
def test_wrong_options_are_refused_by_name(extra: dict[str, Any], words: list[str]) -> None:
    if not words:
        assert parse_offloading_options(WHERE, extra).tiers == ()
        return
    with pytest.raises(ConfigError) as caught:
        parse_offloading_options(WHERE, extra)
    message = str(caught.value)
    assert [word for word in words if word not in message] == []
    assert "hunter" not in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "size", [0, -1, 0.5, 1e30, 1 << 70, 10**5000, float("nan"), float("inf"), -float("inf"), [1]], ids=itertools.count()
)
def test_a_size_that_is_no_size_is_refused_by_name(size: object) -> None:
    with pytest.raises(ConfigError, match=r"^KVStoreOffloadingSpec: cpu_bytes_to_use: "):
        parse_offloading_options(WHERE, {"cpu_bytes_to_use": size})


def test_what_decides_the_identity_may_stand_in_one_place_for_all_tiers() -> None:
    given = {
        "cpu_bytes_to_use": 1 << 20,
        "kvstore": {"weights_version": "v1", "lora_digests": {"a": "1"}, "hold_timeout_s": "5s", "reserve_bytes": "64KiB"},
        "secondary_tiers": [entry("/near", may_store=False, locality="LOCAL"), entry("/far", weights_version="v1", io_threads=2)],
    }
    found = parse_offloading_options(WHERE, given)
    assert [tier.name for tier in found.tiers] == ["1:kvstore", "2:kvstore"]
    assert {tier.options.adapter.weights_version for tier in found.tiers} == {"v1"}
    assert found.adapter.lora_digests == {"a": "1"}
    assert [tier.options.adapter.may_store for tier in found.tiers] == [False, True]
    assert found.store.hold_timeout_s == 5.0
    assert found.host.reserve_bytes == 65536
    assert found.tiers[1].options.settings.io_threads == 2
    assert parse_offloading_options(WHERE, given | {"secondary_tiers": []}).adapter.weights_version == "v1"


def test_two_tiers_on_one_place_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """Every chunk would be put there twice."""
    twice = [entry("/kv"), entry("/other"), entry("/kv", io_threads=2)]
    parse_offloading_options(WHERE, {"cpu_bytes_to_use": 1, "secondary_tiers": twice})
    (line,) = [record.getMessage() for record in caplog.records]
    assert "tiers 1:kvstore and 3:kvstore are one and the same place" in line
    caplog.clear()
    private = [{"type": "kvstore", "backend": "memory:"}] * 2
    parse_offloading_options(WHERE, {"cpu_bytes_to_use": 1, "secondary_tiers": [*private, entry("/kv")]})
    assert caplog.records == []


def test_no_secret_is_shown() -> None:
    given = {"cpu_bytes_to_use": 1, "kvstore": {"tenant_salt": "hunter2"}, "secondary_tiers": [entry("/kv")]}
    assert "hunter2" not in repr(parse_offloading_options(WHERE, given))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel_config__nnodes": 2}, "nnodes: 2 machines"),
        ({"extra": {"cpu_bytes_to_use": 1000}}, f"cpu_bytes_to_use: 1000 bytes are too few: {LEAST} are needed at least"),
        ({"extra": {"cpu_bytes_to_use": LEAST - 1}}, f"cpu_bytes_to_use: {LEAST - 1} bytes are too few: {LEAST} are needed at least"),
        ({"extra": {"cpu_bytes_to_use": 1 << 60}}, r"cpu_bytes_to_use: /dev/shm/kvstore_offload_\S+ needs \d+ bytes"),
        ({"extra": {"eviction_policy": "mru"}}, "KVStoreOffloadingSpec: eviction_policy: .*mru"),
        ({"extra": {"kvstore": {"reserve_bytes": "1GiB"}}}, "KVStoreOffloadingSpec: reserve_bytes"),
    ],
)
def test_an_engine_that_cannot_be_served_is_refused(changes: dict[str, Any], words: str, build: Build, tmp_path: Path) -> None:
    """Nothing was opened, and no name stays in shared memory but what a worker made before it refused."""
    before = in_shared_memory()
    with pytest.raises(ConfigError, match=words):
        build([entry(tmp_path / "kv")], **changes)
    assert list(tmp_path.iterdir()) == []
    for name in in_shared_memory() - before:
        os.unlink(f"/dev/shm/{name}")


def test_the_least_that_is_named_is_enough(build: Build) -> None:
    made = build(groups=1, extra={"cpu_bytes_to_use": LEAST})
    keys = made.keys("a", 1)
    request = made.request("first", keys)
    made.store(request, keys, [[0, 1]])
    assert made.lookup(made.request("second", keys), keys) == [True]


@pytest.mark.parametrize("given", ["1MiB", 1 << 20, float(1 << 20)])
def test_the_size_of_host_memory_takes_a_unit(given: object) -> None:
    assert parse_offloading_options(WHERE, {"cpu_bytes_to_use": given}).host_bytes == 1 << 20


@pytest.mark.parametrize(
    ("tiers", "changes", "words"),
    [
        (0, {}, "its chunks are kept in host memory alone"),
        (1, {}, "its chunks are shared by engines of this vLLM version, kind of machine and topology"),
        (1, {"extra": {"kvstore": {"private": True}}}, "its chunks are private to this process"),
    ],
)
def test_the_start_says_what_an_operator_asks(
    tiers: int, changes: dict[str, Any], words: str, build: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "kvstore_sdk"):
        made = build([entry(tmp_path / "kv")] * tiers, **changes)
    (line,) = [line for record in caplog.records if "host memory for" in (line := record.getMessage())]
    slots = {group: found.slots for group, found in made.manager._store.host.stats().groups.items()}
    assert f"layout opaque-ranks: {words}; 1048576 bytes of host memory for" in line
    assert f"{slots[0]} chunks of 12288 bytes or {slots[1]} chunks of 8192 bytes, policy lru, reserve " in line
    assert f"tiers: {'1:kvstore (fs)' if tiers else 'none'}; default settings" in line


def test_a_tier_that_cannot_be_opened_closes_the_others(build: Build, tmp_path: Path) -> None:
    """And the region has no name any more, and is not mapped by the scheduler's side."""
    (tmp_path / "file").write_text("")
    before = in_shared_memory()
    with pytest.raises(Exception, match="file"):
        build([entry(tmp_path / "kv"), entry(tmp_path / "file" / "kv")])
    assert in_shared_memory() == before


def test_lora_without_digests_stores_nothing(build: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kvstore_sdk"):
        made = build([entry(tmp_path / "kv")], lora_config=object())
    assert "LoRA is enabled" in caplog.text
    request = made.request("first")
    assert made.manager.prepare_store(made.keys("a", 2), request).keys_to_store == []
    assert made.manager.lookup(made.keys("a", 1)[0], request) is compat.MISS
    assert list(tmp_path.iterdir()) == []


def test_an_opaque_layout_keeps_its_writer_in_the_identity(build: Build, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """The stand's attention backend is on no list."""
    with caplog.at_level(logging.WARNING, "kvstore_sdk"):
        one, two = build([entry(tmp_path / "kv")]), build([entry(tmp_path / "kv")], ranks=1)
    assert "not on the list of certified caches" in caplog.text
    identities = [made.manager._store.identity for made in (one, two)]
    assert {identity.layout for identity in identities} == {"opaque-ranks"}
    assert "FAKE_ATTN" in identities[0].writer.variant
    assert identities[0].namespace != identities[1].namespace


def test_the_region_has_no_name_once_the_engine_started(build: Build) -> None:
    """T-U3: whatever ends the processes, the memory goes with them."""
    made = build()
    assert not [name for name in os.listdir("/dev/shm") if made.engine_id in name]
    with Path("/proc/self/maps").open() as maps:
        assert f"kvstore_offload_{made.engine_id}.mmap (deleted)" in maps.read()


def test_what_a_killed_engine_left_is_swept_by_the_next(build: Build) -> None:
    """A worker that dies before the scheduler's side came."""
    name = f"kvstore_offload_kvstore-test-{os.getpid()}-killed.mmap"
    script = (
        "import os, sys; from kvstore_sdk.host import create_region;"
        f"create_region('/dev/shm/{name}', 1 << 20); open('/dev/shm/kvstore_{name[:-5]}.rank0.json', 'w').close(); os._exit(9)"
    )
    done = subprocess.run([sys.executable, "-c", script], timeout=250, check=False)
    assert done.returncode == 9
    assert os.path.exists(f"/dev/shm/{name}")
    build()
    assert not [found for found in os.listdir("/dev/shm") if f"{os.getpid()}-killed" in found]


def test_the_frontend_declares_without_opening(tmp_path: Path) -> None:
    declared = KVStoreOffloadingSpec.build_metric_definitions({"secondary_tiers": [entry(tmp_path / "kv")]})
    assert "vllm:kvstore_tiered_hits" in declared
    assert "vllm:kvstore_host_evictions" in declared
    assert "vllm:kvstore_loads" in declared
    assert list(tmp_path.iterdir()) == []
