"""Geometry records, and what dead engines leave in /dev/shm."""

from __future__ import annotations

import dataclasses
import itertools
import json
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_stand import Stand

import kvstore_sdk.vllm
from kvstore_sdk.errors import ConfigError
from kvstore_sdk.vllm import compat, geometry
from kvstore_sdk.vllm.geometry import (
    RankGeometry,
    host_id,
    is_abandoned,
    read_records,
    record_path,
    refuse_other_regions,
    region_id,
    sweep,
    write_record,
)
from kvstore_sdk.vllm.marks import RowMarks, marks_path

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
        region="1:2",
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


@pytest.fixture
def region(tmp_path: Path) -> str:
    return str(tmp_path / "vllm_offload_engine.mmap")


@pytest.fixture
def write(region: str) -> Iterator[Callable[..., int]]:
    """Writes the record of a process that runs: this one."""
    fds: list[int] = []

    def make(made: RankGeometry | bytes, rank: int = 0) -> int:
        if isinstance(made, RankGeometry):
            fds.append(write_record(region, made))
        else:
            fds.append(os.open(record_path(region, rank), os.O_CREAT | os.O_RDWR, 0o600))
            os.write(fds[-1], made)
        return fds[-1]

    yield make
    for fd in fds:
        os.close(fd)


@pytest.fixture
def shared_region() -> Iterator[Path]:
    """A path beside vLLM's regions, where the kernel grants leases."""
    path = SHM / f"vllm_offload_kvstore-test-{os.getpid()}.mmap"
    yield path
    for found in SHM.glob(f"*kvstore-test-{os.getpid()}*"):
        found.unlink()


def test_a_record_comes_back_as_it_was_written(region: str, write: Callable[..., int]) -> None:
    write(record())
    assert read_records(region, 1, 1.0) == [record()]
    assert Path(record_path(region, 0)).stat().st_mode & 0o777 == 0o600


def test_reading_waits_for_every_rank(region: str) -> None:
    fds = [write_record(region, record(1, 2))]
    late = threading.Timer(0.2, lambda: fds.append(write_record(region, record(0, 2))))
    late.start()
    assert [found.rank for found in read_records(region, 2, 30.0)] == [0, 1]
    late.join()
    for fd in fds:
        os.close(fd)


def test_a_missing_rank_is_named_after_a_bounded_wait(region: str, write: Callable[..., int]) -> None:
    """LIV-18, TOP-07: all workers have to be on this machine."""
    write(record(1, 3))
    started = time.monotonic()
    with pytest.raises(ConfigError, match=r"no record of rank 0, 2 of 3 .* after 0\.1 s; all workers must run on this machine"):
        read_records(region, 3, 0.1)
    assert time.monotonic() - started < 20.0


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
def test_records_that_do_not_belong_together_are_refused(
    other: dict[str, object], words: str, region: str, write: Callable[..., int]
) -> None:
    """TOP-04, TOP-06."""
    write(record(0, 2))
    write(dataclasses.replace(record(1, 2), **other))  # type: ignore[arg-type]
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
        b"[" * 200_000,
        *(
            json.dumps(json.loads(record().to_json()) | changes).encode()
            for changes in (
                {"rows": float("inf")},
                {"row_bytes": float("nan")},
                {"rows": -5},
                {"rows": 1.5},
                {"world_size": 0},
                {"row_bytes": 1 << 80},
                {"extents": {"0": [[-1, 4]]}},
                {"extents": {"0": [[0, 1 << 80]]}},
            )
        ),
    ],
    ids=itertools.count(),
)
def test_a_record_that_cannot_be_understood_is_refused(text: bytes, region: str, write: Callable[..., int]) -> None:
    write(text)
    with pytest.raises(ConfigError, match=r"geometry: .*kvstore-sdk"):
        read_records(region, 1, 1.0)


def test_a_record_of_another_rank_is_refused(region: str, write: Callable[..., int]) -> None:
    write(record(1, 2).to_json())
    with pytest.raises(ConfigError, match=r"rank0\.json is a record of rank 1"):
        read_records(region, 1, 1.0)


def test_a_record_of_a_process_that_ended_is_not_believed(shared_region: Path) -> None:
    """It may be of an earlier engine of the same id, of another model."""
    os.close(write_record(str(shared_region), record()))
    with pytest.raises(ConfigError, match=r"no record of rank 0 .*; the process that wrote that of rank 0 ended; all workers must"):
        read_records(str(shared_region), 1, 0.1)
    fd = write_record(str(shared_region), record())
    assert read_records(str(shared_region), 1, 1.0) == [record()]
    os.close(fd)


def test_a_pipe_in_a_files_place_is_passed_over(region: str) -> None:
    """To open it would last until somebody opens its other end."""
    os.mkfifo(record_path(region, 0))
    started = time.monotonic()
    with pytest.raises(ConfigError, match="no record of rank 0"):
        read_records(region, 1, 0.1)
    os.mkfifo(marks_path(region, 0))
    with pytest.raises(ConfigError, match="is not a file of 6 bytes"):
        RowMarks.open(region, 0, 6)
    assert time.monotonic() - started < 20.0


def test_a_rank_that_mapped_another_region_is_refused(shared_region: Path) -> None:
    """KEY-12. Two engines of one id: what one of them writes would be read as the other's."""
    ids = []
    for _ in range(2):
        with shared_region.open("wb") as file:
            ids.append(region_id(file.fileno()))
            refuse_other_regions([record(0, 2, region=ids[-1]), record(1, 2, region=ids[-1])], file.fileno())
            others = [record(0, 2, region=ids[-1]), record(1, 2, region=ids[0] + "0")]
            with pytest.raises(ConfigError, match="engine_id: rank 1 mapped another region of this name"):
                refuse_other_regions(others, file.fileno())
        shared_region.unlink()


def test_a_record_of_any_size_is_not_read(region: str, write: Callable[..., int]) -> None:
    os.ftruncate(write(b""), geometry.MAX_RECORD_BYTES + 1)
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


@pytest.mark.parametrize("spec", ["KVStoreTieringSpec", "KVStoreOffloadingSpec"])
def test_what_earlier_engines_of_the_same_id_left_goes_with_the_start(
    spec: str, stand: Callable[..., Stand], monkeypatch: pytest.MonkeyPatch
) -> None:
    """LEAK-01: a record that a killed worker had not named yet, and that of a rank that this engine does not have."""
    spec_class = getattr(kvstore_sdk.vllm, spec)
    left: list[Path] = []
    real = spec_class.get_manager

    def leave(made: Any) -> Any:
        path = made._region_path() if hasattr(made, "_region_path") else compat.region_path(made)
        left.extend([Path(record_path(path, 0) + ".4194305"), Path(record_path(path, 7))])
        for one in left:
            one.write_bytes(b"{")
        return real(made)

    monkeypatch.setattr(spec_class, "get_manager", leave)
    stand([], spec_class=spec_class, extra={"cpu_bytes_to_use": 1 << 20})
    assert len(left) == 2
    assert not any(path.exists() for path in left)


def test_an_engine_leaves_no_name_behind_once_it_runs(stand: Callable[..., Stand], tmp_path: Path) -> None:
    """T-U3, LEAK-01: from then on no kind of death can leave anything in /dev/shm."""
    made = stand([{"type": "kvstore", "backend": "fs", "location": str(tmp_path / "kv")}])
    assert not [path for path in SHM.iterdir() if made.engine_id in path.name]
    made.close()
    assert not [path for path in SHM.iterdir() if made.engine_id in path.name]


def test_without_any_of_our_tiers_the_spec_still_leaves_nothing_behind(stand: Callable[..., Stand]) -> None:
    made = stand([])
    assert not [path for path in SHM.iterdir() if made.engine_id in path.name]
