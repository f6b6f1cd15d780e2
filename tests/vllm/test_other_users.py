"""What another user put beside the region of an engine is not believed: `/dev/shm` is everybody's."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore_sdk.errors import ConfigError
from kvstore_sdk.vllm.geometry import RankGeometry, host_id, read_records, record_path, sweep, write_record
from kvstore_sdk.vllm.marks import RowMarks, marks_path

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs to give a file to another user")
OTHER_USER = 12345


@pytest.fixture
def region(tmp_path: Path) -> str:
    return str(tmp_path / "vllm_offload_engine.mmap")


@pytest.fixture
def record() -> RankGeometry:
    return RankGeometry(
        rank=0,
        world_size=1,
        host=host_id(),
        rows=6,
        row_bytes=8192,
        extents={0: [(0, 64)]},
        groups={0: {"kind": "full", "layers": ["a"]}},
        facts={"engine": "vllm 0.32.0", "lora": False},
        region="1:2",
    )


def give_away(path: str) -> None:
    os.chown(path, OTHER_USER, OTHER_USER)


def test_a_geometry_record_of_another_user_is_none(region: str, record: RankGeometry) -> None:
    fd = write_record(region, record)
    assert read_records(region, 1, 1.0) == [record]
    give_away(record_path(region, 0))
    with pytest.raises(ConfigError, match="no record of rank 0 of 1"):
        read_records(region, 1, 0.1)
    os.close(fd)


def test_marks_of_another_user_are_refused(region: str) -> None:
    RowMarks.create(region, 0, 6)
    assert not RowMarks.open(region, 0, 6).marked([0, 5]).any()
    give_away(marks_path(region, 0))
    with pytest.raises(ConfigError, match="is not a file of 6 bytes that this user made"):
        RowMarks.open(region, 0, 6)


def test_a_sweep_leaves_what_is_another_users(tmp_path: Path, region: str, record: RankGeometry) -> None:
    os.close(write_record(region, record))
    give_away(record_path(region, 0))
    assert sweep(str(tmp_path), keep=None) == []
    assert json.loads(Path(record_path(region, 0)).read_text())["rank"] == 0


MAKERS: dict[str, Callable[[str, RankGeometry], object]] = {
    "record": write_record,
    "marks": lambda region, record: RowMarks.create(region, record.rank, record.rows),
}


@pytest.mark.parametrize("what", MAKERS)
def test_what_is_written_there_is_this_users_alone(what: str, region: str, record: RankGeometry) -> None:
    before = os.umask(0)
    try:
        made = MAKERS[what](region, record)
    finally:
        os.umask(before)
    [path] = Path(region).parent.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    if isinstance(made, int):
        os.close(made)
