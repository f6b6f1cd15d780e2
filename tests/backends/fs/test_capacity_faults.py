"""A bounded folder on a disk that fails, among other users, and with somebody who interferes."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bounded_bench import LIMIT_S, PAGE, ask_in_vain, bytes_of, eventually, is_counted, later, record

from kvstore_sdk.backend import ClosedError, DeniedError, GetStatus, Mode, NoSpaceError, PutStatus, UnavailableError
from kvstore_sdk_backends.fs import FsBackend


@pytest.fixture
def full(open_folder: Callable[..., FsBackend], desk: Any) -> FsBackend:
    store = open_folder(max_bytes=10 * PAGE, direct_io="never")
    for number in range(10):
        assert desk.put(store, f"a/{number}", record(number)).status is PutStatus.STORED
    return store


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_no_room_for_a_request_fails_the_put(full: FsBackend, desk: Any, disk: Any, folder: Path, code: int) -> None:
    disk.fail("open", code, only="/space/")
    result = desk.put(full, "b", record(1))
    assert result.status is PutStatus.FAILED
    assert isinstance(result.error, NoSpaceError)
    assert desk.get(full, "a/1", PAGE)[0].status is GetStatus.FOUND
    disk.mend()
    assert desk.put(full, "b", record(1)).status is PutStatus.STORED
    assert bytes_of(folder) == 10 * PAGE


@pytest.mark.parametrize("step", ["write", "replace"])
def test_a_ledger_that_cannot_be_written_grants_nothing_and_is_said_once(
    full: FsBackend, desk: Any, disk: Any, folder: Path, caplog: pytest.LogCaptureFixture, step: str
) -> None:
    disk.fail(step, errno.EIO, only="/space/" if step == "replace" else "")
    with caplog.at_level(logging.WARNING):
        for number in range(2):
            result = ask_in_vain(full, desk.put_item(f"b/{number}", record(1)))
            assert isinstance(result.error, NoSpaceError)
    assert len([r for r in caplog.records if "cannot evict" in r.getMessage()]) == 1
    assert bytes_of(folder) <= 10 * PAGE
    disk.mend()
    assert eventually(lambda: desk.put(full, f"c/{time.monotonic_ns()}", record(1)).status is PutStatus.STORED)
    assert bytes_of(folder) <= 10 * PAGE


def test_a_folder_that_cannot_be_counted_grants_nothing(
    open_folder: Callable[..., FsBackend], desk: Any, disk: Any, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A count that leaves something out would be an unbounded store."""
    before = open_folder()
    for number in range(10):
        desk.put(before, f"a/{number}", record(number))
    before.close()

    def scan(real: Any, where: Any) -> Any:
        if isinstance(where, int) and threading.current_thread().name == "kvstore-fs-evictor":
            raise OSError(errno.EIO, "I/O error")
        return real(where)

    disk.replace("scandir", scan)
    with caplog.at_level(logging.WARNING):
        store = open_folder(max_bytes=10 * PAGE)
        result = ask_in_vain(store, desk.put_item("b", record(1)))
    assert isinstance(result.error, NoSpaceError)
    assert len([r for r in caplog.records if "cannot evict" in r.getMessage()]) == 1
    disk.mend()
    assert desk.put(store, "b", record(1)).status is PutStatus.STORED
    assert bytes_of(folder) == 10 * PAGE


def test_records_that_may_not_be_removed_fill_the_bound(
    full: FsBackend, desk: Any, disk: Any, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another user's, in a folder with the sticky bit, or immutable ones."""

    def unlink(real: Any, path: Any, **how: Any) -> None:
        if "dir_fd" in how and not str(path).startswith("7"):
            raise PermissionError(errno.EPERM, "not permitted")
        real(path, **how)

    disk.replace("unlink", unlink)
    assert desk.put(full, "b", record(1)).status is PutStatus.STORED
    assert not (folder / "a/7").exists()
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            result = desk.put(full, f"c/{number}", record(1))
            assert isinstance(result.error, NoSpaceError)
            assert "cannot be evicted" in str(result.error), "it waited for its deadline"
    assert len([r for r in caplog.records if "may not be removed" in r.getMessage()]) == 1
    assert bytes_of(folder) == 10 * PAGE
    disk.mend()
    assert eventually(lambda: desk.put(full, f"d/{time.monotonic_ns()}", record(1)).status is PutStatus.STORED)


def test_a_time_that_may_not_be_refreshed_is_no_failure(full: FsBackend, desk: Any, disk: Any, folder: Path) -> None:
    os.utime(folder / "a/1", (1, 1))

    def utime(real: Any, path: Any, *args: Any, **how: Any) -> None:
        if isinstance(path, int):
            raise PermissionError(errno.EPERM, "not permitted")
        real(path, *args, **how)

    disk.replace("utime", utime)
    for _ in range(3):
        result, seen = desk.get(full, "a/1", PAGE)
        assert (result.status, seen) == (GetStatus.FOUND, record(1))
    assert (folder / "a/1").stat().st_mtime == 1


def test_a_ledger_that_may_not_be_read_fails_the_put(full: FsBackend, desk: Any, disk: Any) -> None:
    disk.fail("open", errno.EACCES, only="/space/ledger")
    result = desk.put(full, "b", record(1))
    assert isinstance(result.error, DeniedError)
    disk.mend()
    assert eventually(lambda: desk.put(full, f"c/{time.monotonic_ns()}", record(1)).status is PutStatus.STORED)


def test_a_ledger_that_is_replaced_all_the_time_is_read_again(full: FsBackend, desk: Any, disk: Any) -> None:
    """ESTALE: on a network filesystem, the file that was found is gone when it is opened."""
    disk.fail("open", errno.ESTALE, 2, only="/space/ledger")
    assert desk.put(full, "b", record(1)).status is PutStatus.STORED


def test_files_that_vanish_are_counted_in_the_end(
    open_folder: Callable[..., FsBackend], desk: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ATM-10, ATM-11: somebody deletes by a rule of his own, while the store is in use."""
    store = open_folder(max_bytes=30 * PAGE)
    chance = random.Random(3)
    over = threading.Event()

    def interfere() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError, IndexError):
                shard = folder / "a" / str(chance.randrange(4))
                shutil.rmtree(shard) if chance.random() < 0.3 else (shard / chance.choice(os.listdir(shard))).unlink()
            time.sleep(0.002)

    someone = threading.Thread(target=interfere, name="somebody")
    someone.start()
    try:
        for number in range(300):
            assert desk.put(store, f"a/{number % 4}/{number}", record(number)).status is PutStatus.STORED
            assert bytes_of(folder) <= 30 * PAGE
    finally:
        over.set()
        someone.join(LIMIT_S)
    assert store._space
    store.close()
    again = open_folder(max_bytes=30 * PAGE)
    for number in range(60):
        desk.put(again, f"b/{number}", record(number))
    assert again.usage(later()).used_bytes == bytes_of(folder) == 30 * PAGE


def test_a_folder_in_a_record_s_place_and_a_link_are_replaced_within_the_bound(full: FsBackend, desk: Any, folder: Path) -> None:
    (folder / "b").symlink_to(folder / "a/1")
    (folder / "c").mkdir()
    os.mkfifo(folder / "d")
    for name in ("b", "c", "d"):
        assert desk.put(full, name, record(9), Mode.REPLACE).status is PutStatus.STORED
        assert desk.get(full, name, PAGE) == (desk.get(full, name, PAGE)[0], record(9))
    assert bytes_of(folder) == 10 * PAGE


def test_eviction_follows_no_link(open_folder: Callable[..., FsBackend], desk: Any, folder: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    for number in range(5):
        (precious / str(number)).write_bytes(record(number))
    open_folder().close()
    (folder / "a").mkdir()
    (folder / "a/b").symlink_to(precious)
    (folder / "a/c").symlink_to(precious / "0")
    store = open_folder(max_bytes=3 * PAGE)
    for number in range(20):
        assert desk.put(store, f"d/{number}", record(number)).status is PutStatus.STORED
    assert len(os.listdir(precious)) == 5
    assert (folder / "a/c").is_symlink()


@pytest.mark.parametrize("jump_s", [86_400.0, -86_400.0])
def test_a_clock_of_this_host_that_is_set_changes_nothing(
    full: FsBackend, desk: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump_s)
    for number in range(30):
        assert desk.put(full, f"b/{number}", record(number)).status is PutStatus.STORED
    before = (folder / "b/29").stat().st_mtime_ns
    assert desk.get(full, "b/29", PAGE)[0].status is GetStatus.FOUND
    assert (folder / "b/29").stat().st_mtime_ns == before
    assert full.evicted_records == 30
    assert is_counted(full)


@pytest.mark.parametrize("jump_s", [86_400.0, -86_400.0])
def test_a_clock_of_the_filesystem_that_was_set_evicts_in_the_order_of_storing(
    full: FsBackend, desk: Any, folder: Path, jump_s: float
) -> None:
    """What was stored before that is older, whatever its time says."""
    for number in range(10):
        then = time.time() - jump_s - 100 + number
        os.utime(folder / f"a/{number}", (then, then))
    for number in range(5):
        assert desk.put(full, f"b/{number}", record(number)).status is PutStatus.STORED
    assert {path.name for path in (folder / "b").iterdir()} == set("01234")
    assert {path.name for path in (folder / "a").iterdir()} == set("56789")


def test_sixty_four_threads_get_through_a_bound_of_one_record(open_folder: Callable[..., FsBackend], desk: Any, folder: Path) -> None:
    """Each waits for the others' records to be whole, and then evicts them."""
    store = open_folder(max_bytes=PAGE)
    items = [desk.put_item(f"a/{number}", record(number)) for number in range(64)]
    statuses: list[PutStatus] = []
    threads = [
        threading.Thread(target=lambda item=item: statuses.append(store.put([item], later())[0].status), name="storing") for item in items
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT_S)
    assert statuses == [PutStatus.STORED] * 64
    assert bytes_of(folder) == PAGE


def test_a_batch_larger_than_the_bound_is_stored_one_after_another(open_folder: Callable[..., FsBackend], desk: Any, folder: Path) -> None:
    store = open_folder(max_bytes=3 * PAGE)
    results = store.put([desk.put_item(f"a/{number}", record(number)) for number in range(20)], later())
    assert [result.status for result in results] == [PutStatus.STORED] * 20
    assert bytes_of(folder) == 3 * PAGE


def test_what_the_rename_left_open_is_counted(full: FsBackend, desk: Any, disk: Any, folder: Path) -> None:
    """A file server did it and lost the answer: UNKNOWN, and the record is there."""

    def replace(real: Any, source: str, target: str) -> None:
        real(source, target)
        if target.endswith("/lost"):
            raise OSError(errno.EIO, "I/O error")

    disk.replace("replace", replace)
    assert desk.put(full, "lost", record(1), Mode.REPLACE).status is PutStatus.UNKNOWN
    for number in range(20):
        desk.put(full, f"b/{number}", record(number))
        assert bytes_of(folder) <= 10 * PAGE


def test_a_replaced_record_that_is_evicted_meanwhile_is_counted(full: FsBackend, desk: Any, disk: Any, folder: Path) -> None:
    """It needed no room when its put began, and needs it when it ends."""
    os.utime(folder / "a/3", (1, 1))

    def write(real: Any, *args: Any) -> int:
        disk.mend()
        # Evicts a/3, the oldest.
        assert desk.put(full, "b", record(1)).status is PutStatus.STORED
        assert not (folder / "a/3").exists()
        done: int = real(*args)
        return done

    disk.replace("pwritev", write)
    assert desk.put(full, "a/3", record(5), Mode.REPLACE).status is PutStatus.STORED
    assert bytes_of(folder) == 10 * PAGE
    assert (folder / "a/3").exists()


def test_a_forked_child_is_refused_and_does_not_evict(full: FsBackend, desk: Any, folder: Path) -> None:
    read, write = os.pipe()
    item = desk.put_item("b", record(1))
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            [result] = full.put([item], later())
            full.close()
            os.write(write, type(result.error).__name__.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        assert answer.read() == ClosedError.__name__
    os.waitpid(pid, 0)
    assert desk.put(full, "b", record(1)).status is PutStatus.STORED
    assert is_counted(full)


def test_a_closed_backend_leaves_no_descriptor_open(open_folder: Callable[..., FsBackend], desk: Any) -> None:
    def held() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = held()
    for turn in range(5):
        store = open_folder(max_bytes=10 * PAGE)
        for number in range(30):
            desk.put(store, f"{turn}/{number}", record(number))
        store.close()
    assert held() == before


def test_a_root_that_is_gone_is_an_error_and_no_folder(full: FsBackend, desk: Any, folder: Path) -> None:
    shutil.rmtree(folder)
    result = desk.put(full, "b", record(1))
    assert isinstance(result.error, UnavailableError)
    assert not folder.exists()
