"""Deadlines, shutdown and calls that hang: everything ends in time, and what was given up becomes visible never."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore_sdk.backend import ClosedError, Deadline, Failure, GetResult, GetStatus, PutStatus
from kvstore_sdk_backends.fs import FsBackend, io
from kvstore_sdk_backends.fs import backend as backend_module

NAME = "v1/" + "0" * 32 + "/ab/" + "ab" * 32 + "-g0"
RECORD = os.urandom(65536)
LIMIT_S = 30.0
HANG_S = 100.0
"""Longer than anybody here waits for what may hang."""


def later() -> Deadline:
    return Deadline.after(LIMIT_S)


def sleep_past(deadline: Deadline) -> None:
    while not deadline.expired:
        time.sleep(0.01)


@pytest.fixture
def nothing_there(store: FsBackend, disk: Any, left_behind: Callable[[], list[str]]) -> Callable[[], None]:
    """Checks that no part of the record can be seen."""

    def check() -> None:
        disk.mend()
        assert store.exists([NAME], later()) == [False]
        assert list(store.list("", later()).entries) == []
        assert left_behind() == []

    return check


def test_a_put_that_runs_out_of_time_is_given_up_between_two_chunks(
    store: FsBackend, desk: Any, disk: Any, monkeypatch: pytest.MonkeyPatch, nothing_there: Any
) -> None:
    monkeypatch.setattr(io, "CHUNK_BYTES", 8192)
    written: list[int] = []
    items = [desk.put_item(name, RECORD) for name in (NAME, "next")]
    deadline = Deadline.after(3.0)

    def write(real: Any, fd: int, views: list[memoryview], at: int) -> int:
        done: int = real(fd, views, at)
        written.append(done)
        if len(written) == 2:
            sleep_past(deadline)
        return done

    disk.replace("pwritev", write)
    assert [result.status for result in store.put(items, deadline)] == [PutStatus.TIMED_OUT] * 2
    # Of eight; the machine may have stood still before that.
    assert len(written) <= 2
    assert set(written) <= {8192}
    nothing_there()


def test_a_put_whose_time_is_up_when_all_is_written_is_not_published(store: FsBackend, desk: Any, disk: Any, nothing_there: Any) -> None:
    """TIMED_OUT promises that nothing became visible."""

    def write(real: Any, fd: int, views: list[memoryview], at: int) -> int:
        time.sleep(0.1)
        done: int = real(fd, views, at)
        return done

    disk.replace("pwritev", write)
    assert store.put([desk.put_item(NAME, RECORD)], Deadline.after(0.05))[0].status is PutStatus.TIMED_OUT
    nothing_there()


def test_no_put_outlives_the_age_at_which_its_file_may_be_swept(
    store: FsBackend, desk: Any, monkeypatch: pytest.MonkeyPatch, disk: Any, nothing_there: Any
) -> None:
    monkeypatch.setattr(backend_module, "LONGEST_PUT_S", 0.05)

    def write(real: Any, *args: Any) -> int:
        time.sleep(0.1)
        done: int = real(*args)
        return done

    disk.replace("pwritev", write)
    assert store.put([desk.put_item(NAME, RECORD)], Deadline.after(3600))[0].status is PutStatus.TIMED_OUT
    monkeypatch.setattr(backend_module, "LONGEST_PUT_S", 3600.0)
    nothing_there()


def test_a_get_that_runs_out_of_time_is_given_up_between_two_chunks(
    store: FsBackend, desk: Any, disk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.put(store, NAME, RECORD)
    monkeypatch.setattr(io, "CHUNK_BYTES", 8192)

    def read(real: Any, *args: Any) -> int:
        time.sleep(0.1)
        done: int = real(*args)
        return done

    disk.replace("preadv", read)
    results = store.get([desk.get_item(NAME, len(RECORD)) for _ in range(2)], Deadline.after(0.15))
    assert [result.status for result in results] == [GetStatus.TIMED_OUT] * 2


@pytest.mark.parametrize("chunk", [4096, 12288, 1 << 20])
@pytest.mark.parametrize("iov_max", [1, 3, 1024])
def test_large_records_go_in_several_calls(store: FsBackend, desk: Any, monkeypatch: pytest.MonkeyPatch, chunk: int, iov_max: int) -> None:
    """More bytes, or more buffers, than one system call may carry."""
    monkeypatch.setattr(io, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(io, "IOV_MAX", iov_max)
    assert desk.put(store, NAME, RECORD, cuts=(4096, 4096, 20480, 40960)).status is PutStatus.STORED
    assert desk.get(store, NAME, 8192, 0, 16384, 40960) == (GetResult(GetStatus.FOUND), RECORD)
    assert desk.put(store, "odd", RECORD, cuts=(1, 5000, 60001), shift=3).status is PutStatus.STORED
    assert desk.get(store, "odd", 100, 65436, shift=5) == (GetResult(GetStatus.FOUND), RECORD)


class Hung:
    """A step of the disk that waits until it is told to go on."""

    def __init__(self, disk: Any, step: str, *, first: bool = True) -> None:
        self.reached, self.go = threading.Event(), threading.Event()

        def wait(real: Any, *args: Any, **kwargs: Any) -> Any:
            if first:
                done = real(*args, **kwargs)
            self.reached.set()
            self.go.wait(HANG_S)
            return done if first else real(*args, **kwargs)

        disk.replace(step, wait)


def test_close_waits_for_running_puts_and_they_answer(
    folder: Path, store: FsBackend, desk: Any, disk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_module, "CLOSE_WAIT_S", LIMIT_S)
    hung = Hung(disk, "pwritev")
    items = [desk.put_item(name, RECORD) for name in ("a", "b")]
    results: list[Any] = []
    caller = threading.Thread(target=lambda: results.extend(store.put(items, later())), name="caller")
    caller.start()
    assert hung.reached.wait(LIMIT_S)
    closer = threading.Thread(target=store.close, name="closer")
    closer.start()
    closer.join(0.1)
    assert closer.is_alive()
    hung.go.set()
    caller.join(LIMIT_S)
    closer.join(LIMIT_S)
    assert [result.status for result in results] == [PutStatus.CLOSED] * 2
    assert not (folder / "a").exists()
    assert list((folder / ".kvstore/tmp").iterdir()) == []


def test_close_is_bounded_when_a_put_hangs(folder: Path, store: FsBackend, desk: Any, disk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """LIV-07. The put that comes back later cleans up after itself and publishes nothing."""
    monkeypatch.setattr(backend_module, "CLOSE_WAIT_S", 0.1)
    hung = Hung(disk, "pwritev")
    results: list[Any] = []
    item = desk.put_item(NAME, RECORD)
    caller = threading.Thread(target=lambda: results.extend(store.put([item], later())), name="caller")
    caller.start()
    assert hung.reached.wait(LIMIT_S)
    store.close()
    assert caller.is_alive(), "close waited for the put"
    [answer] = store.exists([NAME], later())
    assert isinstance(answer, Failure)
    assert isinstance(answer.error, ClosedError)
    hung.go.set()
    caller.join(LIMIT_S)
    assert [result.status for result in results] == [PutStatus.CLOSED]
    assert not (folder / NAME).exists()
    assert list((folder / ".kvstore/tmp").iterdir()) == []


def test_close_is_bounded_when_the_filesystem_hangs(store: FsBackend, disk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """LIV-07: nothing runs, but removing the writer's folder does not come back."""
    monkeypatch.setattr(backend_module, "CLOSE_WAIT_S", 0.1)
    hung = Hung(disk, "rmdir", first=False)
    store.close()
    assert hung.reached.wait(LIMIT_S)
    left = [thread for thread in threading.enumerate() if thread.name.startswith("fs close")]
    assert left, "close waited for the filesystem"
    hung.go.set()
    for thread in left:
        thread.join(LIMIT_S)


def test_one_hung_get_does_not_stop_the_others(store: FsBackend, desk: Any, disk: Any) -> None:
    """LIV-07: calls share no lock while they wait for the disk."""
    desk.put(store, "slow", RECORD)
    desk.put(store, "fast", b"fast")
    hung = Hung(disk, "preadv")
    slow, fast = desk.get_item("slow", len(RECORD)), desk.get_item("fast", 4)
    results: list[Any] = []
    caller = threading.Thread(target=lambda: results.extend(store.get([slow], later())), name="caller")
    caller.start()
    assert hung.reached.wait(LIMIT_S)
    disk.mend()
    assert store.get([fast], later())[0].status is GetStatus.FOUND
    assert desk.put(store, "new", RECORD).status is PutStatus.STORED
    hung.go.set()
    caller.join(LIMIT_S)
    assert [result.status for result in results] == [GetStatus.FOUND]
