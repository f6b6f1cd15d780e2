"""`isolation` in a tier's entry: what may be written, and that it is done, without an engine."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from vllm_stand import Stand

from kvstore_sdk.errors import BackendError, ConfigError
from kvstore_sdk.isolation import IsolatedBackend, IsolationLimits
from kvstore_sdk.tier import TierMetrics
from kvstore_sdk.vllm.offloading.options import parse_offloading_options
from kvstore_sdk.vllm.offloading.spec import KVStoreOffloadingSpec
from kvstore_sdk.vllm.options import ISOLATION_OPTIONS, parse_tier_options
from kvstore_sdk.vllm.spec import KVStoreTieringSpec

WAYS: dict[str, tuple[type[Any], Mapping[str, Any]]] = {
    "vLLM's host memory": (KVStoreTieringSpec, {}),
    "our own": (KVStoreOffloadingSpec, {"cpu_bytes_to_use": 1 << 20}),
}


def entry(folder: Path, **options: Any) -> dict[str, Any]:
    return {"type": "kvstore", "backend": "fs", "location": str(folder), **options}


def parsed(**options: Any) -> IsolationLimits | None:
    return parse_tier_options("tier", {"backend": "fs", "location": "/mnt/kv", **options}).isolation


def test_limits_are_those_that_were_written_and_else_the_defaults() -> None:
    assert parsed() is None
    assert parsed(isolation="none") is None
    assert parsed(isolation="process") == IsolationLimits()
    limits = parsed(isolation="process", isolation_memory_bytes="1GiB", isolation_restarts=3, isolation_hang_kill_s="500ms")
    assert limits == IsolationLimits(memory_bytes=1 << 30, restarts=3, hang_kill_s=0.5)


def test_there_is_an_option_for_every_limit() -> None:
    assert set(ISOLATION_OPTIONS) == {f"isolation_{field.name}" for field in dataclasses.fields(IsolationLimits)}
    assert all(option.help for option in ISOLATION_OPTIONS.values())


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"isolation": "thread"}, "isolation: 'thread' is not one of none, process"),
        ({"isolation": "process", "isolation_memory_bytes": 1}, "isolation_memory_bytes: 1 is out of bounds"),
        ({"isolation": "process", "isolation_memory": "1GiB"}, "isolation_memory: unknown option; did you mean isolation_memory_bytes"),
        ({"isolation_restarts": 3}, "isolation_restarts: is not looked at without isolation=process"),
        ({"isolation": "none", "isolation_hang_kill_s": 3}, "isolation_hang_kill_s: is not looked at without isolation=process"),
    ],
)
def test_what_would_do_nothing_or_other_than_meant_is_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parsed(**options)


def test_each_tier_has_its_own() -> None:
    tiers = [entry(Path("/mnt/a"), isolation="process", isolation_restarts=1), entry(Path("/mnt/b"))]
    found = parse_offloading_options("spec", {"cpu_bytes_to_use": 1 << 20, "secondary_tiers": tiers})
    assert [tier.options.isolation for tier in found.tiers] == [IsolationLimits(restarts=1), None]
    with pytest.raises(ConfigError, match="isolation: stands in each entry of secondary_tiers"):
        parse_offloading_options("spec", {"cpu_bytes_to_use": 1 << 20, "secondary_tiers": tiers, "kvstore": {"isolation": "process"}})
    with pytest.raises(ConfigError, match=r"isolation: .* belongs in each entry of secondary_tiers"):
        parse_offloading_options("spec", {"cpu_bytes_to_use": 1 << 20, "secondary_tiers": tiers, "isolation": "process"})


def tier_of(made: Stand) -> Any:
    return made.adapter._tier if hasattr(made.manager, "secondary_tiers") else made.manager._store._tiers[0].tier


@pytest.mark.parametrize("way", WAYS)
def test_the_backend_runs_in_a_child_and_its_tier_says_so(way: str, stand: Callable[..., Stand], tmp_path: Path) -> None:
    spec, extra = WAYS[way]
    made = stand([entry(tmp_path / "kv", isolation="process", isolation_memory_bytes="1GiB")], spec_class=spec, extra=extra)
    tier = tier_of(made)
    assert isinstance(tier._backend, IsolatedBackend)
    assert tier._backend.pid != os.getpid()
    metrics: TierMetrics = tier.metrics
    assert metrics.gauge_value("isolation_up") == 1
    assert metrics.total("isolation_deaths") == 0
    child = Path(f"/proc/{tier._backend.pid}")
    made.close()
    assert not child.exists()


@pytest.mark.parametrize("way", WAYS)
def test_a_backend_that_cannot_be_opened_is_refused_as_without_a_child(way: str, stand: Callable[..., Stand], tmp_path: Path) -> None:
    spec, extra = WAYS[way]
    said = []
    for isolation in ("none", "process"):
        with pytest.raises(ConfigError) as raised:
            stand([entry(tmp_path / "nowhere" / "kv", isolation=isolation)], spec_class=spec, extra=extra)
        said.append(str(raised.value))
    assert "location" in said[0]
    assert said[0] == said[1]


@pytest.mark.parametrize("way", WAYS)
def test_a_factory_that_crashes_ends_the_start_and_not_the_process(way: str, stand: Callable[..., Stand], tmp_path: Path) -> None:
    spec, extra = WAYS[way]
    crashing = {"type": "kvstore", "backend": "hostile_backends:open_crashing", "location": str(tmp_path / "kv"), "isolation": "process"}
    with pytest.raises(BackendError, match="SIGSEGV") as raised:
        stand([crashing], spec_class=spec, extra=extra)
    assert "hostile_backends:open_crashing" in str(raised.value)
