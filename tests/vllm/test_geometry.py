"""Geometry records, and what dead engines leave in /dev/shm."""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from vllm_stand import Stand

from kvstore_sdk.errors import ConfigError
from kvstore_sdk.vllm import geometry
from kvstore_sdk.vllm.geometry import RankGeometry, host_id, is_abandoned, read_records, record_path, sweep, write_record

SHM = Path("/dev/shm")


def record(rank: int = 0, world_size: int = 1, **changes: object) -> RankGeometry:
    made = RankGeometry(
        rank=rank,
        world_size=world_size,
        host=host_id(),
        rows=6,
        row_bytes=8192,
        extents={0: [(0, 64), (128, 64)], 2: [(64, 32)]},
        groups={0: {"kind": "full", "layers": ["a"]}, 2: {"kind": "mamba", "layers": ["b"]}},
        facts={"engine": "vllm 0.32.0", "lora": False},
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


@pytest.fixture
def region(tmp_path: Path) -> str:
    return str(tmp_path / "vllm_offload_engine.mmap")


@pytest.fixture
def shared_region() -> Iterator[Path]:
    """A path beside vLLM's regions, where the kernel grants leases."""
    path = SHM / f"vllm_offload_kvstore-test-{os.getpid()}.mmap"
    yield path
    for found in SHM.glob(f"*kvstore-test-{os.getpid()}*"):
        found.unlink()


def test_a_record_comes_back_as_it_was_written(region: str) -> None:
    fd = write_record(region, record())
    assert read_records(region, 1, 1.0) == [record()]
    assert Path(record_path(region, 0)).stat().st_mode & 0o777 == 0o600
    os.close(fd)


def test_reading_waits_for_every_rank(region: str) -> None:
    fds = [write_record(region, record(1, 2))]
    late = threading.Timer(0.2, lambda: fds.append(write_record(region, record(0, 2))))
    late.start()
    assert [found.rank for found in read_records(region, 2, 5.0)] == [0, 1]
    late.join()
    for fd in fds:
        os.close(fd)


def test_a_missing_rank_is_named_after_a_bounded_wait(region: str) -> None:
    """LIV-18, TOP-07: all workers have to be on this machine."""
    os.close(write_record(region, record(1, 3)))
    started = time.monotonic()
    with pytest.raises(ConfigError, match=r"no record of rank 0, 2 of 3 .* after 0\.1 s; all workers must run on this machine"):
        read_records(region, 3, 0.1)
    assert time.monotonic() - started < 2.0


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"host": "elsewhere"}, "nnodes: rank 1 runs on another machine"),
        ({"world_size": 4}, "rank 1 belongs to an engine of 4 ranks"),
        ({"row_bytes": 4096}, "pipeline_parallel_size: rank 1 has 6 rows of 4096 bytes and rank 0 6 of 8192"),
        ({"extents": {0: [(0, 8)]}}, "different KV cache groups"),
        ({"facts": {"engine": "vllm 0.31.0", "lora": False}}, "engine: rank 1 says 'vllm 0.31.0' and rank 0 'vllm 0.32.0'"),
        ({"facts": {"engine": "vllm 0.32.0"}}, "lora: rank 1 says None"),
    ],
)
def test_records_that_do_not_belong_together_are_refused(other: dict[str, object], words: str, region: str) -> None:
    """TOP-04, TOP-06."""
    os.close(write_record(region, record(0, 2)))
    os.close(write_record(region, dataclasses.replace(record(1, 2), **other)))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=words):
        read_records(region, 2, 1.0)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"{}",
        b'{"geometry": 99}',
        json.dumps(json.loads(record().to_json()) | {"extents": 5}).encode(),
        b"\x80\x04K\x01.",
    ],
)
def test_a_record_that_cannot_be_understood_is_refused(text: bytes, region: str) -> None:
    Path(record_path(region, 0)).write_bytes(text)
    with pytest.raises(ConfigError, match=r"geometry: .*kvstore-sdk"):
        read_records(region, 1, 1.0)


def test_a_record_of_any_size_is_not_read(region: str) -> None:
    with open(record_path(region, 0), "wb") as file:
        file.truncate(geometry.MAX_RECORD_BYTES + 1)
    with pytest.raises(ConfigError, match="no record of this adapter"):
        read_records(region, 1, 1.0)


def test_a_link_in_a_records_place_is_not_followed(region: str, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(record().to_json())
    os.symlink(tmp_path / "elsewhere", record_path(region, 0))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_records(region, 1, 0.1)


def test_a_file_is_abandoned_once_nobody_has_it_open_or_mapped(shared_region: Path) -> None:
    """T-U3. Asked of the kernel: a name in /proc would miss other containers."""
    fd = os.open(shared_region, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    assert not is_abandoned(str(shared_region)), "just being created"
    os.ftruncate(fd, 8192)
    mapping = mmap.mmap(fd, 8192)
    os.close(fd)
    assert not is_abandoned(str(shared_region)), "mapped, but no longer open"
    script = (
        "import mmap, sys; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 8192); f.close(); print(1, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", script, shared_region], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        mapping.close()
        assert not is_abandoned(str(shared_region)), "mapped by another process"
        other.kill()
        other.wait()
    assert is_abandoned(str(shared_region))
    assert not is_abandoned(str(shared_region) + ".none")


def test_a_sweep_takes_what_is_dead_and_nothing_else(shared_region: Path) -> None:
    """LEAK-01: regions and records of killed engines go; live ones, our own and strangers' files stay."""
    mine = f"kvstore-test-{os.getpid()}"
    dead = [
        SHM / f"vllm_offload_{mine}-dead.mmap",
        SHM / f"vllm_offload_{mine}-dead.mmap.3",
        SHM / f"kvstore_vllm_offload_{mine}-dead.rank0.json",
    ]
    own = [SHM / f"vllm_offload_{mine}-own.mmap", SHM / f"kvstore_vllm_offload_{mine}-own.rank1.json"]
    strange = [SHM / f"{mine}-strange.mmap", SHM / f"vllm_{mine}.mmap"]
    for path in (*dead, *own, *strange):
        path.write_bytes(b"x")
    live = SHM / f"vllm_offload_{mine}-live.mmap"
    fd = write_record(str(live), record())
    holder = os.open(live, os.O_CREAT | os.O_RDWR, 0o600)
    removed = sweep("/dev/shm", keep=str(own[0]))
    assert {path for path in removed if mine in path} == {str(path) for path in dead}
    assert all(path.exists() for path in (*own, *strange, live, Path(record_path(str(live), 0))))
    os.close(fd)
    os.close(holder)


def test_an_engine_leaves_no_name_behind_once_it_runs(stand: Callable[..., Stand], tmp_path: Path) -> None:
    """T-U3, LEAK-01: from then on no kind of death can leave anything in /dev/shm."""
    made = stand([{"type": "kvstore", "backend": "fs", "location": str(tmp_path / "kv")}])
    assert not [path for path in SHM.iterdir() if made.engine_id in path.name]
    made.close()
    assert not [path for path in SHM.iterdir() if made.engine_id in path.name]


def test_without_any_of_our_tiers_the_spec_still_leaves_nothing_behind(stand: Callable[..., Stand]) -> None:
    made = stand([])
    assert not [path for path in SHM.iterdir() if made.engine_id in path.name]
