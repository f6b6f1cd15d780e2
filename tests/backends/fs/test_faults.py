"""A filesystem that fails: a clear answer per item, nothing half-visible, no temporary file left by a process that lives."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore_sdk.backend import (
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
from kvstore_sdk_backends.fs import FsBackend, writing
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


@pytest.fixture
def nothing_there(store: FsBackend, desk: Any, disk: Any, left_behind: Callable[[], list[str]]) -> Callable[[], None]:
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


def test_a_short_write_is_not_taken_for_a_whole_one(store: FsBackend, desk: Any, disk: Any, nothing_there: Any) -> None:
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


def test_short_writes_that_go_on_make_a_whole_record(store: FsBackend, desk: Any, disk: Any, nothing_there: Any) -> None:
    disk.replace("pwritev", half)
    assert desk.put(store, NAME, RECORD, cuts=(4096, 20000)).status is PutStatus.STORED
    disk.mend()
    assert desk.get(store, NAME, len(RECORD)) == (GetResult(GetStatus.FOUND), RECORD)
    assert store.delete([NAME], later()) == [DeleteStatus.DELETED]
    nothing_there()


def test_short_reads_that_go_on_fill_the_buffers(store: FsBackend, desk: Any, disk: Any) -> None:
    desk.put(store, NAME, RECORD)
    disk.replace("preadv", half)
    assert desk.get(store, NAME, 20000, 45536) == (GetResult(GetStatus.FOUND), RECORD)


def test_an_odd_short_write_is_finished_and_does_not_end_direct_io(store: FsBackend, desk: Any, disk: Any) -> None:
    """The rest of it begins off a page, which O_DIRECT refuses; that says nothing about the filesystem."""
    enabled = store._direct.enabled

    def write(real: Any, fd: int, views: list[memoryview], at: int) -> int:
        done: int = real(fd, views, at) if at else real(fd, [views[0][:4096]], 0)
        return done if at else done - 96

    disk.replace("pwritev", write)
    assert desk.put(store, NAME, RECORD).status is PutStatus.STORED
    assert desk.get(store, NAME, len(RECORD))[1] == RECORD
    assert store._direct.enabled is enabled


def test_a_write_that_takes_nothing_fails(store: FsBackend, desk: Any, disk: Any, nothing_there: Any) -> None:
    """It must neither be repeated for ever nor pass for done."""
    disk.replace("pwritev", lambda real, fd, views, at: 0)
    failed(desk.put(store, NAME, RECORD), UnavailableError, "took 0 of 65536 bytes")
    nothing_there()


def test_an_error_in_the_second_write_fails_the_put(store: FsBackend, desk: Any, disk: Any, nothing_there: Any) -> None:
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
def test_each_step_of_a_put_may_fail(store: FsBackend, desk: Any, disk: Any, nothing_there: Any, step: str, code: int, kind: Any) -> None:
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
def test_a_rename_that_fails_is_a_failed_put(store: FsBackend, desk: Any, disk: Any, nothing_there: Any, code: int, mode: Mode) -> None:
    """ATM-13: skipping it with a warning would report a record that is not there."""
    disk.fail("replace", code)
    result = desk.put(store, NAME, RECORD, mode)
    assert result.status is PutStatus.FAILED
    assert errno.errorcode[code] in str(result.error)
    nothing_there()


def test_a_failed_replace_leaves_the_old_record(store: FsBackend, desk: Any, disk: Any, left_behind: Any) -> None:
    desk.put(store, NAME, RECORD)
    for step in ("open", "pwritev", "replace"):
        disk.fail(step, errno.EIO, 1)
        failed(desk.put(store, NAME, bytes(65536), Mode.REPLACE), UnavailableError, "EIO")
        disk.mend()
        assert desk.get(store, NAME, len(RECORD)) == (GetResult(GetStatus.FOUND), RECORD)
    assert left_behind() == []


def test_a_rename_whose_answer_was_lost_is_unknown(store: FsBackend, desk: Any, disk: Any, left_behind: Any) -> None:
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
    folder: Path, store: FsBackend, desk: Any, disk: Any, left_behind: Any
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


def test_an_exception_of_another_kind_leaves_no_temporary_file(store: FsBackend, desk: Any, disk: Any, nothing_there: Any) -> None:
    def interrupt(real: Any, *_: Any) -> None:
        raise KeyboardInterrupt

    for step in ("pwritev", "replace"):
        disk.replace(step, interrupt)
        with pytest.raises(KeyboardInterrupt):
            desk.put(store, NAME, RECORD)
        disk.mend()
    nothing_there()


def test_one_failing_item_fails_alone(store: FsBackend, desk: Any, disk: Any) -> None:
    disk.fail("replace", errno.ENOSPC, 2)
    puts = [desk.put_item(f"n{number}", RECORD) for number in range(4)]
    statuses = [result.status for result in store.put(puts, later())]
    assert statuses == [PutStatus.FAILED] * 2 + [PutStatus.STORED] * 2
    assert store.exists([f"n{number}" for number in range(4)], later()) == [False, False, True, True]


@pytest.mark.parametrize(("code", "kind"), KINDS)
@pytest.mark.parametrize("step", ["open", "preadv"])
def test_each_step_of_a_get_may_fail(store: FsBackend, desk: Any, disk: Any, step: str, code: int, kind: Any) -> None:
    """LIV-14"""
    desk.put(store, NAME, RECORD)
    disk.fail(step, code)
    result, _ = desk.get(store, NAME, len(RECORD))
    disk.mend()
    assert result.status is GetStatus.FAILED
    assert type(result.error) is kind
    assert f"fs get {store._root}/{NAME}: {errno.errorcode[code]}" in str(result.error)


def test_the_size_of_a_wrong_record_may_not_be_had(store: FsBackend, desk: Any, disk: Any) -> None:
    """LIV-14: a read that shows another length asks for the size; that question may fail too."""
    desk.put(store, NAME, RECORD)
    disk.fail("fstat", errno.EIO)
    results = [desk.get(store, NAME, asked)[0] for asked in (len(RECORD) - 1, len(RECORD) + 1)]
    disk.mend()
    assert [result.status for result in results] == [GetStatus.FAILED] * 2
    assert {type(result.error) for result in results} == {UnavailableError}


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ENOTDIR, errno.ESTALE])
def test_what_vanished_is_a_miss(store: FsBackend, desk: Any, disk: Any, code: int) -> None:
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


def test_a_file_that_shrinks_while_it_is_read_has_the_wrong_size(folder: Path, store: FsBackend, desk: Any, disk: Any) -> None:
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
def test_exists_and_delete_tell_an_error_from_a_miss(store: FsBackend, desk: Any, disk: Any, code: int, kind: Any) -> None:
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


def test_listing_and_usage_say_what_went_wrong(store: FsBackend, desk: Any, disk: Any) -> None:
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


def test_a_record_that_vanishes_during_a_listing_is_passed_over(folder: Path, store: FsBackend, desk: Any, disk: Any) -> None:
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


@pytest.mark.usefixtures("python_alone")
def test_a_put_takes_five_system_calls_and_a_get_three(store: FsBackend, desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert calls == ["open", "preadv", "close"]
    assert writing.OPEN_SWEEP_S < backend_module.OPEN_WAIT_S
