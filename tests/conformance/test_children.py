"""Processes that the suite starts: what they had said is known after their end, and nothing of them stays."""

from __future__ import annotations

import fcntl
import json
import sys
import tempfile
import termios
import time
from pathlib import Path

import pytest
from leaves_helper import LIFE_S
from suite_runner import run_suite

from kvstore_sdk_conformance.children import Child
from kvstore_sdk_conformance.failure import ConformanceFailure
from kvstore_sdk_conformance.steps import until
from kvstore_sdk_conformance.target import Place

ENDED_S = 30.0
"""For the kernel, to end what was killed."""


def place(folder: Path, target: str = "fs") -> Place:
    return Place(target, {}, str(folder / "store" / "here"))


def is_alive(pid: int) -> bool:
    """Whether it runs; a process that has ended and waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def helped(tmp_path: Path) -> Child:
    (tmp_path / "store").mkdir()
    return Child(place(tmp_path, "leaves_helper:open_helped"), shared=True, log=lambda _: None)


def test_a_kill_ends_at_once_beside_a_helper_that_keeps_the_pipe_open(helped: Child, tmp_path: Path) -> None:
    helped.start()
    [helper] = [int(file.name) for file in (tmp_path / "helpers").iterdir()]
    try:
        began_s = time.monotonic()
        helped.kill()
        assert time.monotonic() - began_s < LIFE_S / 2, "it waited for the helper"
        assert is_alive(helper), "it may be where the records are"
    finally:
        helped.discard()
    assert until(lambda: not is_alive(helper), ENDED_S)


def test_what_was_said_before_a_kill_is_known_after_it(helped: Child) -> None:
    helped.start()
    names = [f"v1/{number}" for number in range(3)]
    helped.post(do="put", names=names, size=10, tag=1, mode="create")
    helped.post(do="exists", names=names)
    said = [{"answer": ["STORED"] * 3}, {"answer": [True] * 3}]
    assert until(lambda: unread_bytes(helped) >= sum(len(json.dumps(line)) + 1 for line in said), 60.0)
    helped.kill()
    assert helped.left() == said
    helped.discard()
    helped.discard()


def unread_bytes(child: Child) -> int:
    assert child._process.stdout is not None
    return int.from_bytes(fcntl.ioctl(child._process.stdout, termios.FIONREAD, bytes(4)), sys.byteorder)


@pytest.mark.parametrize(("shared", "breaks"), [(True, "KV-SHARE-01"), (False, None)])
def test_a_location_that_another_process_cannot_open_breaks_sharing_only_where_it_is_declared(
    tmp_path: Path, shared: bool, breaks: str | None
) -> None:
    child = Child(place(tmp_path, "nosuch"), shared=shared, log=lambda _: None)
    try:
        with pytest.raises(ConformanceFailure) as raised:
            child.start()
        assert raised.value.breaks == breaks
    finally:
        child.discard()


def test_a_right_backend_whose_processes_have_helpers_is_conformant_and_none_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    ran = run_suite("leaves_helper:open_helped", tmp_path, "sharing", "durability")
    assert ran.ids("fail") | ran.ids("error") | ran.ids("blocked") == set()
    assert ran.ids("pass") >= {"KV-DUR-01", "KV-DUR-05", "KV-SHARE-01"}
    helpers = [int(file.name) for file in (tmp_path / "tmp" / "helpers").iterdir()]
    assert helpers
    assert until(lambda: not any(map(is_alive, helpers)), ENDED_S), "they were killed, but one is still there"
