from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvstore_sdk.backend import Region
from redis_server import RedisServer, redis_server


@pytest.fixture(scope="module")
def shared_server() -> Iterator[RedisServer]:
    """One server for all tests of a module that leave it as it is."""
    with tempfile.TemporaryDirectory() as folder, redis_server(Path(folder)) as server:
        yield server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """One that a test may stop, pause and fill."""
    with redis_server(tmp_path) as server:
        yield server


@pytest.fixture
def region() -> Iterator[Region]:
    region = Region(8 << 20)
    yield region
    region.close()
