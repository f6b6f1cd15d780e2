"""Two writers of one record, one of which fails or is killed: what the other stored is whole and stays."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bounded_bench import eventually

from kvstore_sdk.backend import Deadline, GetResult, GetStatus, Mode, PutResult, PutStatus, UnavailableError
from kvstore_sdk_backends.fs import FsBackend, evictor, lease, space

NAME = "v1/" + "0" * 32 + "/ab/" + "ab" * 32 + "-g0"
RECORD = os.urandom(65536)
LIMIT_S = 30.0


def later() -> Deadline:
    return Deadline.after(LIMIT_S)


@pytest.mark.parametrize("mode", Mode)
def test_a_writer_that_fails_half_way_leaves_what_another_published_meanwhile(
    open_folder: Callable[..., FsBackend], desk: Any, disk: Any, left_behind: Callable[[], list[str]], mode: Mode
) -> None:
    """ATM-04: one has written all and is about to publish; a second one writes half; the first publishes; the second meets an I/O error."""
    first, second = open_folder(), open_folder()
    items = {name: desk.put_item(NAME, RECORD, mode) for name in ("first", "second")}
    second_is_half_way, first_is_there = threading.Event(), threading.Event()
    results: dict[str, PutResult] = {}

    def write(real: Any, fd: int, views: list[memoryview], at: int) -> int:
        if threading.current_thread().name != "second":
            done: int = real(fd, views, at)
            return done
        if at:
            assert first_is_there.wait(LIMIT_S)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        half: int = real(fd, [views[0][: len(RECORD) // 2]], at)
        second_is_half_way.set()
        return half

    def publish(real: Any, source: Any, target: Any, *rest: Any, **more: Any) -> None:
        if threading.current_thread().name == "first":
            assert second_is_half_way.wait(LIMIT_S)
        real(source, target, *rest, **more)

    def store(name: str, backend: FsBackend) -> None:
        [results[name]] = backend.put([items[name]], later())
        if name == "first":
            first_is_there.set()

    disk.replace("pwritev", write)
    disk.replace("replace", publish)
    threads = [threading.Thread(target=store, args=pair, name=pair[0]) for pair in (("first", first), ("second", second))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT_S)
        assert not thread.is_alive()
    disk.mend()
    assert results["first"] == PutResult(PutStatus.STORED)
    assert results["second"].status is PutStatus.FAILED
    assert isinstance(results["second"].error, UnavailableError)
    for backend in (first, second):
        assert desk.get(backend, NAME, len(RECORD)) == (GetResult(GetStatus.FOUND), RECORD)
    assert left_behind() == []


@pytest.mark.parametrize("host", ["here", "elsewhere"])
def test_what_a_killed_owner_stored_is_read_at_once_while_its_lease_still_runs(
    host: str,
    child: Callable[..., Any],
    children: Any,
    folder: Path,
    tmp_path: Path,
    open_folder: Callable[..., FsBackend],
    desk: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ATM-14: the ledger still names the dead one as the owner of the bounded folder; that is about room for new records alone."""
    # However slow this machine is, no lease runs out while the records are read.
    for module in (lease, evictor, space):
        monkeypatch.setattr(module, "LEASE_S", 1000.0)
    note = tmp_path / "note"
    note.touch()
    owner = child("hoard", folder, 1 << 30, 0, 1_000_000, note)
    assert eventually(lambda: int(note.read_bytes() or b"0") >= 10)
    owner.end()
    ledger = folder / ".kvstore/space/ledger"
    if host == "elsewhere":
        # Nobody here can tell that it is dead.
        new = ledger.with_name("test.new")
        new.write_text(json.dumps(json.loads(ledger.read_text()) | {"owner": f"{'f' * 32}-1-{'0' * 16}"}))
        new.rename(ledger)
    named = json.loads(ledger.read_text())["owner"]
    assert named
    stored = dict(children.hoarded(0, number) for number in range(int(note.read_bytes())))
    store = open_folder(max_bytes=1 << 30)
    assert store.exists(list(stored), later()) == [True] * len(stored)
    for name, record in list(stored.items())[:10]:
        assert desk.get(store, name, len(record)) == (GetResult(GetStatus.FOUND), record)
    if host == "elsewhere":
        assert json.loads(ledger.read_text())["owner"] == named, "all of it was read before anybody took the lease over"
