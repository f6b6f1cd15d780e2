"""What the comparisons of `fs` make of their rounds, and how they cut work."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def fs(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("fs")


@pytest.fixture
def fs_child(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("fs_child")


@pytest.fixture
def fio(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("fio")


@pytest.fixture
def cell(script: Callable[[str], ModuleType]) -> Callable[..., Any]:
    """A cell with these ratios in its rounds."""
    result = script("harness").CellResult
    return lambda name, *ratios: result(name, True, [*ratios], [1.0] * len(ratios), [*ratios])


def test_each_size_is_judged_and_warm_gets_by_themselves(fs: ModuleType, cell: Callable[..., Any]) -> None:
    small = [cell("put 32 KiB, 1 thread, direct", 0.9, 0.9), cell("get 32 KiB, 1 thread, direct", 1.0, 1.0)]
    large = [cell("put 1024 KiB, 1 thread, direct", 2.0, 2.0)]
    warm = [cell("get 32 KiB, 1 thread, warm", 0.95, 0.95)]
    found = {entry["name"]: entry for entry in fs.judged([*small, *large, *warm], [("32 KiB", small), ("1024 KiB", large)])}
    assert {name: entry["met"] for name, entry in found.items()} == {"fs": True, "fs-sizes": False, "fs-warm": True}
    assert found["fs-sizes"]["found"] == "32 KiB 0.95 (0.95 to 0.95), 1024 KiB 2.00 (2.00 to 2.00)"


def test_a_target_whose_cells_were_not_measured_is_not_judged(fs: ModuleType, cell: Callable[..., Any]) -> None:
    assert fs.judged([cell("put 32 KiB, 8 threads, unchecked", 1.0)], []) == []


def test_the_mean_over_cells_is_taken_round_by_round(fs: ModuleType, cell: Callable[..., Any]) -> None:
    assert fs.rounds_of([cell("a", 1.0, 4.0), cell("b", 4.0, 4.0)]) == pytest.approx([2.0, 4.0])


def test_an_unknown_mode_is_refused_with_the_ones_there_are(fs: ModuleType) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"no mode hot; there are direct, warm"):
        fs.parse_modes("direct,hot")
    assert fs.parse_sizes("32KiB,1MiB,512") == [32768, 1048576, 512]


@pytest.mark.parametrize(("chunks", "threads", "first"), [(64, 1, 16), (64, 8, 8), (16, 16, 1), (5, 8, 1)])
def test_a_job_is_cut_so_that_every_thread_has_a_part(fs_child: ModuleType, chunks: int, threads: int, first: int) -> None:
    cut = fs_child.batches_of(range(chunks), threads)
    assert len(cut[0]) == first
    assert [*range(chunks)] == [chunk for batch in cut for chunk in batch]


def test_a_side_opens_a_store_once_and_closes_it_before_the_next(fs_child: ModuleType) -> None:
    log: list[str] = []

    class Store:
        checks = True

        def __init__(self, folder: object, direct: bool, region_bytes: int) -> None:
            log.append(f"open {folder} {region_bytes}")

        def close(self) -> None:
            log.append("close")

        def prepare(self, tag: str, size: int, chunks: int) -> list[int]:
            return [*range(chunks)]

        def put(self, size: int, batch: object) -> None:
            log.append(f"put {self.checks}")

    side = fs_child.Side(Store)
    question = {"op": "put", "folder": "/a", "direct": True, "chunk_bytes": 4096, "threads": 1, "chunks": 2, "tag": "t"}
    assert side.answer(question)["seconds"] >= 0
    side.answer(question | {"checks": False})
    side.answer(question | {"folder": "/b"})
    assert log == ["open /a 16384", "put True", "put False", "close", "open /b 16384", "put True"]


def test_fio_has_as_many_transfers_in_flight_as_ours_has_threads(fio: ModuleType, tmp_path: Path) -> None:
    threads = fio.command(tmp_path, "psync", "put", 1 << 20, 8, 16)
    assert {"--numjobs=8", "--iodepth=1", "--nrfiles=16", "--rw=write", "--direct=1"} <= {*threads}
    ring = fio.command(tmp_path, "io_uring", "get", 1 << 20, 8, 16)
    assert {"--numjobs=1", "--iodepth=8", "--nrfiles=128", "--rw=read", f"--size={128 << 20}"} <= {*ring}


def test_fio_counts_only_if_it_moved_everything(fio: ModuleType) -> None:
    said = "fio: a note before\n" + json.dumps({"jobs": [{"read": {"io_bytes": 8192, "bw_bytes": 2_000_000}}]})
    assert fio.rate_of(said, "get", 8192) == 2.0
    with pytest.raises(RuntimeError, match="8192 bytes instead of 16384"):
        fio.rate_of(said, "get", 16384)
