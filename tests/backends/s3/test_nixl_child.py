"""The engine NIXL as it is opened: in a child process, which may die, and of which nothing stays."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_proxy import FaultProxy
from nixl_store import RECORD, SIZE, get, put, until
from s3_server import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY

from kvstore_sdk.backend import ConfigError, GetStatus, PutStatus, Region, UnavailableError
from kvstore_sdk.isolation import IsolatedBackend, open_isolated
from kvstore_sdk_backends.s3 import S3Backend, open_s3

pytestmark = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")

BROKEN = "raise ImportError('broken on purpose', name='nixl')\n"


@pytest.fixture
def opened(proxy: FaultProxy, bucket: str) -> Iterator[Callable[..., Any]]:
    """Opens the bucket as everybody does."""
    made: list[Any] = []

    def open_it(engine: str = "nixl", **options: Any) -> Any:
        given = {"endpoint": proxy.endpoint, "access_key_id": ACCESS_KEY_ID, "secret_access_key": SECRET_ACCESS_KEY} | options
        made.append(open_s3(f"{bucket}/kv", engine=engine, region=REGION, addressing="path", probe="off", **given))
        return made[-1]

    yield open_it
    for backend in made:
        backend.close()


@pytest.fixture
def region() -> Iterator[Region]:
    made = Region(4 * SIZE)
    yield made
    made.close()


def children_of(pid: int) -> set[int]:
    """Also of those that ended and were not waited for."""
    found = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.add(int(name))
    return found


def test_it_runs_in_a_child_that_may_die_and_shows_no_key(opened: Callable[..., Any], region: Region, proxy: FaultProxy) -> None:
    """LIV-08: what was stored is found by the child that takes its place; the keys are in neither its arguments nor its environment."""
    backend = opened(request_retries=1, tags="team=kv")
    backend.register_region(region)
    assert isinstance(backend, IsolatedBackend)
    first = backend.pid
    assert "nixl" in Path(f"/proc/{first}/maps").read_text()
    shown = Path(f"/proc/{first}/cmdline").read_bytes() + Path(f"/proc/{first}/environ").read_bytes() + repr(backend).encode()
    assert SECRET_ACCESS_KEY.encode() not in shown
    assert put(backend, region).status is PutStatus.STORED
    assert proxy.requests[-1].headers["x-amz-tagging"] == "team=kv", "its options reach the child"
    os.kill(first, signal.SIGSEGV)
    until(lambda: get(backend, region).status is GetStatus.FOUND)
    assert region.view[:SIZE] == RECORD
    assert (backend.deaths, backend.restarts) == (1, 1)
    assert "aws-sdk-cpp" in proxy.requests[-1].headers["user-agent"]
    second = backend.pid
    backend.close()
    assert second != first
    assert not {first, second} & children_of(os.getpid())


def test_in_the_child_of_an_isolated_backend_there_is_no_other_child(proxy: FaultProxy, bucket: str, region: Region) -> None:
    options = {"engine": "auto", "endpoint": proxy.endpoint, "region": REGION, "addressing": "path"}
    keys = {"access_key_id": ACCESS_KEY_ID, "secret_access_key": SECRET_ACCESS_KEY}
    backend = open_isolated("s3", options | keys, location=f"{bucket}/kv")
    try:
        backend.register_region(region)
        assert put(backend, region).status is PutStatus.STORED
        assert "aws-sdk-cpp" in proxy.requests[-1].headers["user-agent"]
        assert children_of(backend.pid) == set()
    finally:
        backend.close()


def test_where_the_child_cannot_use_it_auto_takes_s3fs_in_this_process(
    opened: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "nixl").mkdir()
    (tmp_path / "nixl" / "__init__.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    caplog.set_level(logging.INFO)
    before = children_of(os.getpid())
    backend = opened("auto")
    assert isinstance(backend, S3Backend)
    told = [record.getMessage() for record in caplog.records if record.name == "kvstore_sdk_backends.s3.opening"]
    assert len(told) == 1
    assert "engine s3fs, since nixl cannot be used: nixl cannot be imported (broken on purpose)" in told[0]
    with pytest.raises(ConfigError, match="engine: nixl cannot be imported"):
        opened("nixl")
    assert children_of(os.getpid()) <= before


def test_nixl_that_crashes_where_it_begins_is_done_without(
    opened: Callable[..., Any], region: Region, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "nixl").mkdir()
    (tmp_path / "nixl" / "__init__.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    monkeypatch.syspath_prepend(tmp_path)
    caplog.set_level(logging.INFO)
    backend = opened("auto")
    assert isinstance(backend, S3Backend)
    assert put(backend, region).status is PutStatus.STORED
    assert "engine s3fs, since nixl cannot be used: nixl did not come up" in caplog.text
    with pytest.raises(UnavailableError, match="SIGSEGV"):
        opened("nixl")


def test_what_is_refused_in_the_child_is_said_as_if_there_were_none(proxy: FaultProxy) -> None:
    said = set()
    for engine in ("s3fs", "nixl", "auto"):
        keys = {"access_key_id": ACCESS_KEY_ID, "secret_access_key": SECRET_ACCESS_KEY}
        with pytest.raises(ConfigError) as raised:
            open_s3("there-is-none/kv", engine=engine, endpoint=proxy.endpoint, region=REGION, addressing="path", probe="read", **keys)
        # The name of the object that was looked for is drawn.
        said.add((raised.value.where, raised.value.field, re.sub(r"probe-\w+", "probe", raised.value.problem)))
    assert len(said) == 1
