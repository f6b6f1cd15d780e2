"""The scheduler's side and what its workers say: what does not belong together is refused at the start; every slot has its marks."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from vllm_stand import Stand

from kvstore_sdk.backend import Region
from kvstore_sdk.errors import ConfigError
from kvstore_sdk.host import HostTier, SlotPool, join_region
from kvstore_sdk.layout import AttentionShape, Topology, payload_bytes
from kvstore_sdk.vllm import geometry
from kvstore_sdk.vllm.engine_layout import EngineLayout, RankLayout, engine_layout
from kvstore_sdk.vllm.geometry import RankGeometry
from kvstore_sdk.vllm.offloading import assembly
from kvstore_sdk.vllm.offloading import spec as spec_module
from kvstore_sdk.vllm.offloading.device import DeviceCopies
from kvstore_sdk.vllm.offloading.plan import claim_region, control_bytes, most_slots
from kvstore_sdk.vllm.offloading.spec import KVStoreOffloadingSpec
from kvstore_sdk.vllm.spec import KVStoreTieringSpec

PAGE = 4096

Build = Callable[..., Stand]
Change = Callable[[list[RankGeometry]], Any]


@pytest.fixture
def build(stand: Build) -> Build:
    def make(**options: Any) -> Stand:
        extra = {"cpu_bytes_to_use": 1 << 20, **options.pop("extra", {})}
        return stand([], spec_class=KVStoreOffloadingSpec, extra=extra, **options)

    return make


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Callable[[Change], None]:
    """Changes what the scheduler's side hears from its workers."""
    real = geometry.read_records

    def change(how: Change) -> None:
        def read(*arguments: Any) -> list[RankGeometry]:
            records = real(*arguments)
            return how(records) or records

        monkeypatch.setattr(geometry, "read_records", read)

    return change


# --- slots and their marks -----------------------------------------------------------------------------------------------------------

page_counts = st.lists(st.sampled_from([1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 65, 257, 513]), min_size=1, max_size=3)


@given(page_counts, st.integers(100, 1 << 20), st.sampled_from([1, 2, 4, 8, 16]))
@example([65, 257], (10 << 30) // PAGE, 8)
@example([9, 2, 4], 2400, 1)
def test_every_slot_has_a_mark_whatever_the_sizes(pages: list[int], region_pages: int, ranks: int) -> None:
    """How the host tier divides a region depends on where the slots start, and that on how many there are."""
    region, sizes = region_pages * PAGE, {count * PAGE for count in pages}
    bound = most_slots(region, sizes)
    start = control_bytes(bound, ranks)
    if start < region:
        assert SlotPool(start, region - start, sizes).slot_numbers <= bound


@given(page_counts, st.integers(1300, 6000), st.sampled_from([1, 8]))
def test_the_plan_has_a_place_for_every_slot_of_the_host_tier(pages: list[int], region_pages: int, ranks: int) -> None:
    """A worker would end the engine at the first slot beyond; and that comes when the last of the memory is used, hours after the start."""
    shapes = [AttentionShape(layers=1, blocks=1, block_tokens=16, heads=1, token_head_bytes=count * PAGE // 16) for count in pages]
    sizes = {group: payload_bytes(shape) for group, shape in enumerate(shapes)}
    known: Any = SimpleNamespace(parallel=SimpleNamespace(world_size=ranks), blocks_per_chunk=1)
    layout = EngineLayout(layout="kv1:x", version=1, groups=tuple((shape, Topology(ranks, (1,))) for shape in shapes))
    region: Any = SimpleNamespace(size_bytes=region_pages * PAGE)
    plan = assembly._plan(known, layout, sizes, region.size_bytes)
    host = HostTier(region, sizes, start=plan.slots_start)
    plan.check(region.size_bytes)
    assert host.row_count <= plan.slot_count


def test_slots_without_marks_are_refused_before_there_is_a_plan(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever may be wrong with the bound: at the start, and not when memory is full."""
    monkeypatch.setattr(assembly, "most_slots", lambda region_bytes, sizes: 3)
    written: list[Any] = []
    monkeypatch.setattr(assembly, "write_plan", lambda region, plan: written.append(plan))
    with pytest.raises(ConfigError, match=r"cpu_bytes_to_use: \d+ slots of 3 that have marks"):
        build()
    assert not written


# --- what workers say --------------------------------------------------------------------------------------------------------------


def without_layout(records: Sequence[RankGeometry]) -> list[RankGeometry]:
    groups = {group: {name: fact for name, fact in facts.items() if name != "layout"} for group, facts in records[1].groups.items()}
    return [records[0], dataclasses.replace(records[1], groups=groups)]


def with_layout(records: Sequence[RankGeometry], **changes: Any) -> list[RankGeometry]:
    groups = {group: {**facts, "layout": {**facts["layout"], **changes}} for group, facts in records[1].groups.items()}
    return [records[0], dataclasses.replace(records[1], groups=groups)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            without_layout,
            r"geometry: rank 1 does not say how it keeps KV cache group 0 \(KeyError: 'layout'\); do all workers run this spec",
        ),
        (lambda records: with_layout(records, shape={"kind": "indexer"}), "geometry: rank 1 does not say .*indexer"),
        (lambda records: with_layout(records, pages=7), r"geometry: rank 1 does not say .*TypeError"),
        (
            lambda records: with_layout(records, pages=[1024]),
            "geometry: the ranks do not make one engine: rank 1 has 1 layers of .* group 0",
        ),
    ],
)
def test_workers_that_do_not_belong_together_are_refused(change: Change, words: str, build: Build, told: Callable[[Change], None]) -> None:
    told(change)
    with pytest.raises(ConfigError, match=words):
        build()


@pytest.mark.parametrize("way", ["ours", "vLLM's"])
def test_a_region_that_no_worker_mapped_is_refused(way: str, stand: Build, told: Callable[[Change], None], tmp_path: Path) -> None:
    """KEY-12. Of another engine of this id, whose workers would write into it."""
    told(lambda records: [records[0], dataclasses.replace(records[1], region="0:0")])
    spec_class = KVStoreOffloadingSpec if way == "ours" else KVStoreTieringSpec
    tier = {"type": "kvstore", "backend": "fs", "location": str(tmp_path / "kv")}
    with pytest.raises(ConfigError, match="engine_id: rank 1 mapped another region of this name"):
        stand([tier], spec_class=spec_class, extra={"cpu_bytes_to_use": 1 << 20})
    assert list(tmp_path.iterdir()) == []


def test_a_region_that_another_scheduler_serves_is_refused(build: Build, told: Callable[[Change], None]) -> None:
    others: list[Region] = []

    def serve(records: list[RankGeometry]) -> None:
        (found,) = [name for name in os.listdir("/dev/shm") if name.startswith(f"kvstore_offload_kvstore-test-{os.getpid()}-")]
        others.append(join_region(f"/dev/shm/{found}", 1 << 20, 1.0))
        claim_region(others[0])

    told(serve)
    with pytest.raises(ConfigError, match="engine_id: another engine of this id serves the region"):
        build()
    others[0].close()


@pytest.mark.parametrize("interior", ["", "lbh-ktv"], ids=["opaque", "certified"])
def test_ranks_of_a_stage_with_other_layers_are_refused(interior: str) -> None:
    """The ranks of a stage hold parts of the same layers. A worker would find out at its first transfer, and end the engine."""
    shape = AttentionShape(layers=2, blocks=1, block_tokens=16, heads=2, token_head_bytes=8) if interior else None
    rank = RankLayout(interior=interior, shape=shape, pages=(128, 128), why="" if interior else "amx")
    other = dataclasses.replace(rank, pages=(128,), shape=shape and dataclasses.replace(shape, layers=1))
    assert engine_layout([[rank, rank, other, other]], stages=2, blocks=1).groups[0][1] == Topology(2, (2, 1))
    with pytest.raises(ValueError, match=r"rank 3 has 1 layers of KV cache group 0, rank 2 of its stage 2"):
        engine_layout([[rank, rank, rank, other]], stages=2, blocks=1)


def test_the_schedulers_side_makes_no_region_of_its_own(
    build: Build, told: Callable[[Change], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No worker would map it: each transfer would go somewhere else."""
    monkeypatch.setattr(spec_module, "REGION_TIMEOUT_S", 0.1)
    names: list[str] = []

    def take_away(records: list[RankGeometry]) -> None:
        (found,) = [name for name in os.listdir("/dev/shm") if name.startswith(f"kvstore_offload_kvstore-test-{os.getpid()}-")]
        names.append(found)
        os.unlink(f"/dev/shm/{found}")

    told(take_away)
    with pytest.raises(ConfigError, match="does not exist, and no process made it"):
        build()
    assert names[0] not in os.listdir("/dev/shm")


def test_a_worker_that_cannot_announce_itself_lets_go_of_everything(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the region, and before that of what it made of it: pinned memory of a GPU must not be unmapped."""
    steps: list[str] = []
    shutdown = DeviceCopies.shutdown

    def ended(self: DeviceCopies) -> None:
        steps.append("shutdown")
        shutdown(self)

    def fail(self: Any, *arguments: Any) -> None:
        steps.append("announce")
        raise OSError("no room for a record")

    monkeypatch.setattr(DeviceCopies, "shutdown", ended)
    monkeypatch.setattr(KVStoreOffloadingSpec, "_announce", fail)
    before = mapped()
    with pytest.raises(OSError, match="no room for a record"):
        build()
    assert steps == ["announce", "shutdown"]
    assert mapped() == before
    for name in os.listdir("/dev/shm"):
        if name.startswith(f"kvstore_offload_kvstore-test-{os.getpid()}-"):
            os.unlink(f"/dev/shm/{name}")


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("kvstore_offload_")


@pytest.mark.parametrize("tiers", [0, 1])
def test_an_order_of_bytes_that_no_test_has_seen_is_told_once_to_those_who_share(
    tiers: int, stand: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = assembly.engine_layout
    monkeypatch.setattr(assembly, "engine_layout", lambda *a, **k: dataclasses.replace(real(*a, **k), untested=("lbhnc",)))
    entries = [{"type": "kvstore", "backend": "fs", "location": str(tmp_path / "kv")}] * tiers
    with caplog.at_level(logging.INFO, "kvstore_sdk"):
        stand(entries, spec_class=KVStoreOffloadingSpec, extra={"cpu_bytes_to_use": 1 << 20})
    (record,) = [record for record in caplog.records if "never seen on a device" in record.getMessage()]
    assert record.levelno == (logging.WARNING if tiers else logging.INFO)
    assert "lbhnc" in record.getMessage()
