"""A filesystem that fails: a clear answer per item, nothing half-visible, no temporary file left by a process that lives."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore_sdk.backend import (
    ClosedError,
    Deadline,
    DeleteStatus,
    DeniedError,
    Failure,
    GetResult,
    GetStatus,
    InvalidError,
    Mode,
    NoSpaceError,
    PutStatus,
    ReadOnlyError,
    TimedOutError,
    UnavailableError,
)
from kvstore_sdk_backends.fs import FsBackend, io, writing
from kvstore_sdk_backends.fs import backend as backend_module

NAME = "v1/" + "0" * 32 + "/ab/" + "ab" * 32 + "-g0"
RECORD = os.urandom(65536)

KINDS = [
    (errno.ENOSPC, NoSpaceError),
    (errno.EDQUOT, NoSpaceError),
    (errno.EIO, UnavailableError),
    (errno.EACCES, DeniedError),
    (errno.EROFS, ReadOnlyError),
    (errno.ENAMETOOLONG, InvalidError),
    (errno.EMFILE, UnavailableError),
    (errno.ETIMEDOUT, TimedOutError),
]


def later() -> Deadline:
    return Deadline.after(30.0)


def os_error(code: int) -> OSError:
    return OSError(code, os.strerror(code))


class Disk:
    """Takes the place of functions of `os`, and puts them back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._real: dict[str, Any] = {}

    def replace(self, name: str, made: Callable[..., Any]) -> None:
        """`made` gets the real function first, and then what the caller gave."""
        real = self._real.setdefault(name, getattr(os, name))
        self._monkeypatch.setattr(os, name, lambda *args, **kwargs: made(real, *args, **kwargs))

    def fail(self, name: str, code: int, times: int = 1 << 30, *, only: str = "") -> None:
        """The next `times` calls fail, of those whose first argument has `only` in it."""
        left = [times]

        def failing(real: Any, *args: Any, **kwargs: Any) -> Any:
            if not left[0] or only not in str(args[0]):
                return real(*args, **kwargs)
            left[0] -= 1
            raise os_error(code)

        self.replace(name, failing)

    def mend(self) -> None:
        for name, real in self._real.items():
            self._monkeypatch.setattr(os, name, real)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture
def nothing_there(store: FsBackend, desk: Any, disk: Disk, left_behind: Callable[[], list[str]]) -> Callable[[], None]:
    """Checks that no part of the record can be seen, and that storing it works once the disk is mended."""

    def check() -> None:
        disk.mend()
        assert store.exists([NAME], later()) == [False]
        assert desk.get(store, NAME, len(RECORD))[0].status is GetStatus.MISSING
        assert list(store.list("", later()).entries) == []
        assert store.usage(later()).records == 0
        assert left_behind() == []
        assert desk.put(store, NAME, RECORD).status is PutStatus.STORED
        assert desk.get(store, NAME, len(RECORD)) == (GetResult(GetStatus.FOUND), RECORD)

    return check


def failed(result: Any, kind: type[Exception], *words: str) -> None:
    assert result.status is PutStatus.FAILED
    assert type(result.error) is kind
    for word in (f"/{NAME}", *words):
        assert word in str(result.error)


def half(real: Any, fd: int, views: list[memoryview], at: int) -> int:
    """Moves half of what it is given, in whole pages."""
    first = views[0]
    done: int = real(fd, [first[: max(4096, len(first) // 2 // 4096 * 4096)]], at)
    return done


def test_a_short_write_is_not_taken_for_a_whole_one(store: FsBackend, desk: Any, disk: Disk, nothing_there: Any) -> None:
    """INT-04: half is written, and then the disk is full."""
    calls: list[int] = []

    def write(real: Any, fd: int, views: list[memoryview], at: int) -> int:
        calls.append(at)
        if at:
            raise os_error(errno.ENOSPC)
        return half(real, fd, views, at)

    disk.replace("pwritev", write)
    failed(desk.put(store, NAME, RECORD), NoSpaceError, "fs put", "ENOSPC")
    assert calls == [0, 32768]
    nothing_there()


def test_short_writes_that_go_on_make_a_whole_record(store: FsBackend, desk: Any, disk: Disk, nothing_there: Any) -> None:
    disk.replace("pwritev", half)
    assert desk.put(store, NAME, RECORD, cuts=(4096, 20000)).status is PutStatus.STORED
    disk.mend()
    assert desk.get(store, NAME, len(RECORD)) == (GetResult(GetStatus.FOUND), RECORD)
    assert store.delete([NAME], later()) == [DeleteStatus.DELETED]
    nothing_there()


def test_short_reads_that_go_on_fill_the_buffers(store: FsBackend, desk: Any, disk: Disk) -> None:
    desk.put(store, NAME, RECORD)
    disk.replace("preadv", half)
    assert desk.get(store, NAME, 20000, 45536) == (GetResult(GetStatus.FOUND), RECORD)


def test_an_odd_short_write_is_finished_and_does_not_end_direct_io(store: FsBackend, desk: Any, disk: Disk) -> None:
    """The rest of it begins off a page, which O_DIRECT refuses; that says nothing about the filesystem."""
    enabled = store._direct.enabled

    def write(real: Any, fd: int, views: list[memoryview], at: int) -> int:
        done: int = real(fd, views, at) if at else real(fd, [views[0][:4096]], 0)
        return done if at else done - 96

    disk.replace("pwritev", write)
    assert desk.put(store, NAME, RECORD).status is PutStatus.STORED
    assert desk.get(store, NAME, len(RECORD))[1] == RECORD
    assert store._direct.enabled is enabled


def test_a_write_that_takes_nothing_fails(store: FsBackend, desk: Any, disk: Disk, nothing_there: Any) -> None:
    """It must neither be repeated for ever nor pass for done."""
    disk.replace("pwritev", lambda real, fd, views, at: 0)
    failed(desk.put(store, NAME, RECORD), UnavailableError, "took 0 of 65536 bytes")
    nothing_there()


def test_an_error_in_the_second_write_fails_the_put(store: FsBackend, desk: Any, disk: Disk, nothing_there: Any) -> None:
    """INT-02"""

    def write(real: Any, fd: int, views: list[memoryview], at: int) -> int:
        if at:
            raise os_error(errno.EIO)
        return half(real, fd, views, at)

    disk.replace("pwritev", write)
    failed(desk.put(store, NAME, RECORD), UnavailableError, "EIO")
    nothing_there()


@pytest.mark.parametrize(("code", "kind"), KINDS)
@pytest.mark.parametrize("step", ["pwritev", "close", "replace", "mkdir", "open"])
def test_each_step_of_a_put_may_fail(store: FsBackend, desk: Any, disk: Disk, nothing_there: Any, step: str, code: int, kind: Any) -> None:
    """A network filesystem tells that it is full when a file is closed; ENAMETOOLONG comes from filesystems for short names."""
    if step == "close":

        def close(real: Any, fd: int) -> None:
            real(fd)
            raise os_error(code)

        disk.replace("close", close)
    else:
        disk.fail(step, code)
    failed(desk.put(store, NAME, RECORD), kind, "fs put", errno.errorcode[code])
    nothing_there()


@pytest.mark.parametrize("code", [errno.ENOENT, errno.EACCES, errno.EPERM, errno.EXDEV])
@pytest.mark.parametrize("mode", Mode)
def test_a_rename_that_fails_is_a_failed_put(store: FsBackend, desk: Any, disk: Disk, nothing_there: Any, code: int, mode: Mode) -> None:
    """ATM-13: skipping it with a warning would report a record that is not there."""
    disk.fail("replace", code)
    result = desk.put(store, NAME, RECORD, mode)
    assert result.status is PutStatus.FAILED
    assert errno.errorcode[code] in str(result.error)
    nothing_there()


def test_a_failed_replace_leaves_the_old_record(store: FsBackend, desk: Any, disk: Disk, left_behind: Any) -> None:
    desk.put(store, NAME, RECORD)
    for step in ("open", "pwritev", "replace"):
        disk.fail(step, errno.EIO, 1)
        failed(desk.put(store, NAME, bytes(65536), Mode.REPLACE), UnavailableError, "EIO")
        disk.mend()
        assert desk.get(store, NAME, len(RECORD)) == (GetResult(GetStatus.FOUND), RECORD)
    assert left_behind() == []


def test_a_rename_whose_answer_was_lost_is_unknown(store: FsBackend, desk: Any, disk: Disk, left_behind: Any) -> None:
    """A file server renamed it and the answer got lost, or came as ENOENT to the second try: the record may be there."""

    def rename(real: Any, source: str, target: str) -> None:
        real(source, target)
        raise os_error(errno.EIO)

    desk.put(store, NAME, RECORD)
    disk.replace("replace", rename)
    result = desk.put(store, NAME, RECORD, Mode.REPLACE)
    assert result.status is PutStatus.UNKNOWN
    assert isinstance(result.error, UnavailableError)
    disk.mend()
    assert desk.get(store, NAME, len(RECORD)) == (GetResult(GetStatus.FOUND), RECORD)
    assert left_behind() == []


def test_when_not_even_the_temporary_file_goes_the_answer_is_unknown_and_close_removes_it(
    folder: Path, store: FsBackend, desk: Any, disk: Disk, left_behind: Any
) -> None:
    disk.fail("replace", errno.EIO)
    disk.fail("unlink", errno.EIO)
    assert desk.put(store, NAME, RECORD).status is PutStatus.UNKNOWN
    disk.mend()
    assert len(left_behind()) == 1
    assert store.sweep() == 0
    store.close()
    assert left_behind() == []
    assert list((folder / ".kvstore/tmp").iterdir()) == []


def test_an_exception_of_another_kind_leaves_no_temporary_file(store: FsBackend, desk: Any, disk: Disk, nothing_there: Any) -> None:
    def interrupt(real: Any, *_: Any) -> None:
        raise KeyboardInterrupt

    for step in ("pwritev", "replace"):
        disk.replace(step, interrupt)
        with pytest.raises(KeyboardInterrupt):
            desk.put(store, NAME, RECORD)
        disk.mend()
    nothing_there()


def test_one_failing_item_fails_alone(store: FsBackend, desk: Any, disk: Disk) -> None:
    disk.fail("replace", errno.ENOSPC, 2)
    puts = [desk.put_item(f"n{number}", RECORD) for number in range(4)]
    statuses = [result.status for result in store.put(puts, later())]
    assert statuses == [PutStatus.FAILED] * 2 + [PutStatus.STORED] * 2
    assert store.exists([f"n{number}" for number in range(4)], later()) == [False, False, True, True]


@pytest.mark.parametrize(("code", "kind"), KINDS)
@pytest.mark.parametrize("step", ["open", "fstat", "preadv"])
def test_each_step_of_a_get_may_fail(store: FsBackend, desk: Any, disk: Disk, step: str, code: int, kind: Any) -> None:
    """LIV-14"""
    desk.put(store, NAME, RECORD)
    disk.fail(step, code)
    result, _ = desk.get(store, NAME, len(RECORD))
    disk.mend()
    assert result.status is GetStatus.FAILED
    assert type(result.error) is kind
    assert f"fs get {store._root}/{NAME}: {errno.errorcode[code]}" in str(result.error)


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ENOTDIR, errno.ESTALE])
def test_what_vanished_is_a_miss(store: FsBackend, desk: Any, disk: Disk, code: int) -> None:
    """ATM-10. ESTALE: another host removed the file between two steps."""
    desk.put(store, NAME, RECORD)
    for step in ("open", "preadv", "stat"):
        disk.fail(step, code, 1, only="" if step == "preadv" else NAME)
        if step == "stat":
            assert store.exists([NAME], later()) == [False]
        else:
            assert desk.get(store, NAME, len(RECORD))[0] == GetResult(GetStatus.MISSING)
        disk.mend()


def test_a_file_that_was_removed_by_hand_is_a_miss(folder: Path, store: FsBackend, desk: Any) -> None:
    """ATM-10"""
    desk.put(store, NAME, RECORD)
    assert store.exists([NAME], later()) == [True]
    (folder / NAME).unlink()
    assert desk.get(store, NAME, len(RECORD))[0] == GetResult(GetStatus.MISSING)
    assert store.exists([NAME], later()) == [False]
    assert store.delete([NAME], later()) == [DeleteStatus.ABSENT]


def test_a_file_that_shrinks_while_it_is_read_has_the_wrong_size(folder: Path, store: FsBackend, desk: Any, disk: Disk) -> None:
    desk.put(store, NAME, RECORD)

    def read(real: Any, fd: int, views: list[memoryview], at: int) -> int:
        done = half(real, fd, views, at)
        os.truncate(folder / NAME, 32768)
        return done

    disk.replace("preadv", read)
    assert desk.get(store, NAME, len(RECORD))[0] == GetResult.wrong_size(32768, 65536)


@pytest.mark.parametrize(("change", "size"), [(-1, 65535), (1, 65537), (-65536, 0), (4096, 69632)])
def test_a_cut_or_longer_file_is_told_with_both_sizes(folder: Path, store: FsBackend, desk: Any, change: int, size: int) -> None:
    desk.put(store, NAME, RECORD)
    with open(folder / NAME, "r+b") as file:
        file.truncate(len(RECORD) + change)
    assert desk.get(store, NAME, len(RECORD))[0] == GetResult.wrong_size(size, 65536)
    assert desk.put(store, NAME, RECORD, Mode.REPLACE).status is PutStatus.STORED
    assert desk.get(store, NAME, len(RECORD))[1] == RECORD


@pytest.mark.parametrize("mode", Mode)
def test_a_folder_in_a_records_place_is_no_record_and_is_repaired(folder: Path, store: FsBackend, desk: Any, mode: Mode) -> None:
    direct = store._direct.enabled
    desk.put(store, NAME, RECORD)
    (folder / NAME).unlink()
    (folder / NAME).mkdir()
    assert store.exists([NAME], later()) == [False]
    result, _ = desk.get(store, NAME, len(RECORD))
    assert result.status is GetStatus.FAILED
    assert isinstance(result.error, InvalidError)
    assert "stands in the record's place" in str(result.error)
    assert store._direct.enabled is direct, "a folder refuses O_DIRECT on every filesystem"
    assert store.delete([NAME], later()) == [DeleteStatus.ABSENT]
    assert list(store.list("", later()).entries) == []
    assert desk.put(store, NAME, RECORD, mode).status is PutStatus.STORED
    assert desk.get(store, NAME, len(RECORD)) == (GetResult(GetStatus.FOUND), RECORD)


def test_a_folder_that_holds_something_is_left_alone(folder: Path, store: FsBackend, desk: Any, left_behind: Any) -> None:
    """It may hold somebody's records: `a` and `a/b` cannot both be files."""
    desk.put(store, "a/b", b"x")
    for mode in Mode:
        result = desk.put(store, "a", RECORD, mode)
        assert result.status is PutStatus.FAILED
        assert isinstance(result.error, InvalidError)
        assert "cannot be removed" in str(result.error)
    assert desk.get(store, "a/b", 1)[1] == b"x"
    assert left_behind() == []


def test_a_file_in_a_folders_place_is_a_failed_put(store: FsBackend, desk: Any, left_behind: Any) -> None:
    desk.put(store, "a", b"x")
    result = desk.put(store, "a/b", RECORD)
    assert result.status is PutStatus.FAILED
    assert isinstance(result.error, InvalidError)
    assert store.exists(["a/b", "a"], later()) == [False, True]
    assert left_behind() == []


def test_links_and_special_files_are_no_records(tmp_path: Path, folder: Path, store: FsBackend, desk: Any) -> None:
    """A link could lead out of the folder, and opening a FIFO would wait for its writer for ever."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * 16)
    for name, plant in (("link", lambda path: path.symlink_to(secret)), ("fifo", os.mkfifo)):
        plant(folder / name)
        assert store.exists([name], later()) == [False]
        for size in (16, 0):
            result, found = desk.get(store, name, size)
            assert result.status is GetStatus.FAILED
            assert isinstance(result.error, InvalidError)
            assert found == b"\xee" * size
        assert list(store.list("", later()).entries) == []
        assert desk.put(store, name, b"record").status is PutStatus.STORED
        assert desk.get(store, name, 6)[1] == b"record"
        store.delete([name], later())
    assert secret.read_bytes() == b"s" * 16


@pytest.mark.parametrize(("code", "kind"), KINDS)
def test_exists_and_delete_tell_an_error_from_a_miss(store: FsBackend, desk: Any, disk: Disk, code: int, kind: Any) -> None:
    """LIV-12"""
    desk.put(store, NAME, RECORD)
    disk.fail("stat", code, only=NAME)
    disk.fail("unlink", code)
    [exists] = store.exists([NAME], later())
    [deleted] = store.delete([NAME], later())
    disk.mend()
    for answer, doing in ((exists, "fs exists"), (deleted, "fs delete")):
        assert isinstance(answer, Failure)
        assert type(answer.error) is kind
        assert str(answer.error).startswith(f"{doing} {store._root}/{NAME}: {errno.errorcode[code]}")


def test_listing_and_usage_say_what_went_wrong(store: FsBackend, desk: Any, disk: Disk) -> None:
    desk.put(store, NAME, RECORD)
    disk.fail("scandir", errno.EIO)
    with pytest.raises(UnavailableError, match=r"fs list .*EIO"):
        store.list("", later())
    with pytest.raises(UnavailableError, match=r"fs usage .*EIO"):
        store.usage(later())
    with pytest.raises(UnavailableError, match=r"fs sweep .*EIO"):
        store.sweep()
    disk.mend()
    past = Deadline.after(-1)
    for call in (lambda: store.list("", past), lambda: store.usage(past)):
        with pytest.raises(TimedOutError, match=r"fs walk .*the deadline passed"):
            call()


def test_a_record_that_vanishes_during_a_listing_is_passed_over(folder: Path, store: FsBackend, desk: Any, disk: Disk) -> None:
    for name in ("a", "b/c", "d"):
        desk.put(store, name, b"x")

    def stat(real: Any, path: Any, **kwargs: Any) -> Any:
        if str(path).endswith("/a"):
            (folder / "a").unlink()
            (folder / "b/c").unlink()
            (folder / "b").rmdir()
        return real(path, **kwargs)

    disk.replace("stat", stat)
    assert [entry.name for entry in store.list("", later()).entries] == ["d"]


@pytest.mark.parametrize("name", ["v1", "v1/" + "0" * 32, "v1/" + "0" * 32 + "/ab"])
def test_folders_that_somebody_removed_are_made_again(folder: Path, store: FsBackend, desk: Any, name: str) -> None:
    desk.put(store, NAME, RECORD)
    store.delete([NAME], later())
    (folder / name).rename(folder.with_name("moved"))
    assert desk.put(store, NAME, RECORD).status is PutStatus.STORED
    assert desk.get(store, NAME, len(RECORD))[1] == RECORD


def test_a_put_that_runs_out_of_time_is_given_up_between_two_chunks(
    store: FsBackend, desk: Any, disk: Disk, monkeypatch: pytest.MonkeyPatch, nothing_there: Any
) -> None:
    monkeypatch.setattr(io, "CHUNK_BYTES", 8192)
    written: list[int] = []

    def write(real: Any, fd: int, views: list[memoryview], at: int) -> int:
        time.sleep(0.1)
        done: int = real(fd, views, at)
        written.append(done)
        return done

    disk.replace("pwritev", write)
    item = desk.put_item(NAME, RECORD)
    start_s = time.monotonic()
    [result, second] = store.put([item, desk.put_item("next", RECORD)], Deadline.after(0.15))
    assert time.monotonic() - start_s < 0.6
    assert (result.status, second.status) == (PutStatus.TIMED_OUT, PutStatus.TIMED_OUT)
    assert written == [8192] * 2
    nothing_there()


def test_a_put_whose_time_is_up_when_all_is_written_is_not_published(store: FsBackend, desk: Any, disk: Disk, nothing_there: Any) -> None:
    """TIMED_OUT promises that nothing became visible."""

    def write(real: Any, fd: int, views: list[memoryview], at: int) -> int:
        time.sleep(0.1)
        done: int = real(fd, views, at)
        return done

    disk.replace("pwritev", write)
    assert store.put([desk.put_item(NAME, RECORD)], Deadline.after(0.05))[0].status is PutStatus.TIMED_OUT
    nothing_there()


def test_no_put_outlives_the_age_at_which_its_file_may_be_swept(
    store: FsBackend, desk: Any, monkeypatch: pytest.MonkeyPatch, disk: Disk, nothing_there: Any
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
    store: FsBackend, desk: Any, disk: Disk, monkeypatch: pytest.MonkeyPatch
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

    def __init__(self, disk: Disk, step: str, *, first: bool = True) -> None:
        self.reached, self.go = threading.Event(), threading.Event()

        def wait(real: Any, *args: Any, **kwargs: Any) -> Any:
            if first:
                done = real(*args, **kwargs)
            self.reached.set()
            self.go.wait(30)
            return done if first else real(*args, **kwargs)

        disk.replace(step, wait)


def test_close_waits_for_running_puts_and_they_answer(folder: Path, store: FsBackend, desk: Any, disk: Disk) -> None:
    hung = Hung(disk, "pwritev")
    items = [desk.put_item(name, RECORD) for name in ("a", "b")]
    results: list[Any] = []
    caller = threading.Thread(target=lambda: results.extend(store.put(items, later())), name="caller")
    caller.start()
    assert hung.reached.wait(10)
    closer = threading.Thread(target=store.close, name="closer")
    closer.start()
    closer.join(0.1)
    assert closer.is_alive()
    hung.go.set()
    caller.join(30)
    closer.join(30)
    assert [result.status for result in results] == [PutStatus.CLOSED] * 2
    assert not (folder / "a").exists()
    assert list((folder / ".kvstore/tmp").iterdir()) == []


def test_close_is_bounded_when_a_put_hangs(folder: Path, store: FsBackend, desk: Any, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """LIV-07. The put that comes back later cleans up after itself and publishes nothing."""
    monkeypatch.setattr(backend_module, "CLOSE_WAIT_S", 0.1)
    hung = Hung(disk, "pwritev")
    results: list[Any] = []
    item = desk.put_item(NAME, RECORD)
    caller = threading.Thread(target=lambda: results.extend(store.put([item], later())), name="caller")
    caller.start()
    assert hung.reached.wait(10)
    start_s = time.monotonic()
    store.close()
    assert time.monotonic() - start_s < 2
    [answer] = store.exists([NAME], later())
    assert isinstance(answer, Failure)
    assert isinstance(answer.error, ClosedError)
    hung.go.set()
    caller.join(30)
    assert [result.status for result in results] == [PutStatus.CLOSED]
    assert not (folder / NAME).exists()
    assert list((folder / ".kvstore/tmp").iterdir()) == []


def test_close_is_bounded_when_the_filesystem_hangs(store: FsBackend, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """LIV-07: nothing runs, but removing the writer's folder does not come back."""
    monkeypatch.setattr(backend_module, "CLOSE_WAIT_S", 0.1)
    hung = Hung(disk, "rmdir", first=False)
    start_s = time.monotonic()
    store.close()
    assert time.monotonic() - start_s < 2
    assert hung.reached.is_set()
    hung.go.set()
    for thread in threading.enumerate():
        if thread.name.startswith("fs close"):
            thread.join(30)


def test_one_hung_get_does_not_stop_the_others(store: FsBackend, desk: Any, disk: Disk) -> None:
    """LIV-07: calls share no lock while they wait for the disk."""
    desk.put(store, "slow", RECORD)
    desk.put(store, "fast", b"fast")
    hung = Hung(disk, "preadv")
    slow, fast = desk.get_item("slow", len(RECORD)), desk.get_item("fast", 4)
    results: list[Any] = []
    caller = threading.Thread(target=lambda: results.extend(store.get([slow], later())), name="caller")
    caller.start()
    assert hung.reached.wait(10)
    disk.mend()
    assert store.get([fast], Deadline.after(5))[0].status is GetStatus.FOUND
    assert desk.put(store, "new", RECORD).status is PutStatus.STORED
    hung.go.set()
    caller.join(30)
    assert [result.status for result in results] == [GetStatus.FOUND]


def test_a_put_takes_five_system_calls_and_a_get_four(store: FsBackend, desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """PERF: each call is a round trip on a network filesystem. The first put of a folder may make it."""
    desk.put(store, NAME, RECORD)
    store.delete([NAME], later())
    calls: list[str] = []
    for name in ("access", "stat", "open", "fstat", "pwritev", "preadv", "close", "replace", "unlink", "mkdir", "link"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, name=name, real=real, **kwargs: calls.append(name) or real(*args, **kwargs))
    desk.put(store, NAME, RECORD)
    assert calls == ["access", "open", "pwritev", "close", "replace"]
    calls.clear()
    desk.get(store, NAME, len(RECORD))
    assert calls == ["open", "fstat", "preadv", "close"]
    assert writing.OPEN_SWEEP_S < backend_module.OPEN_WAIT_S
