"""O_DIRECT: used where it works, survived where it is refused, at open or only when a record is written or read."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore_sdk.backend import ConfigError, Deadline, GetResult, GetStatus, PutStatus, UnavailableError
from kvstore_sdk_backends.fs import FsBackend

RECORD = os.urandom(16384)
DIRECT = os.O_DIRECT


class Filesystem:
    """Refuses O_DIRECT where it is told to, and remembers how files were opened. The test's own filesystem may be of any kind."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refuses: set[str] = set()
        self.code = errno.EINVAL
        self.opened: list[bool] = []
        self._direct_fds: set[int] = set()
        self._real = {name: getattr(os, name) for name in ("open", "close", "pwritev", "preadv")}
        real_fcntl = fcntl.fcntl
        for name in self._real:
            monkeypatch.setattr(os, name, getattr(self, name))

        def set_flags(fd: int, command: int, value: int = 0) -> int:
            if command == fcntl.F_GETFL:
                return real_fcntl(fd, command) | (DIRECT if fd in self._direct_fds else 0)
            if not value & DIRECT:
                self._direct_fds.discard(fd)
            return real_fcntl(fd, command, value & ~DIRECT)

        monkeypatch.setattr(fcntl, "fcntl", set_flags)

    def open(self, path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & os.O_DIRECTORY or ("/v1/" not in path and "/tmp/" not in path and "probe" not in path):
            return int(self._real["open"](path, flags, mode, dir_fd=dir_fd))
        is_direct = bool(flags & DIRECT)
        if is_direct and "open" in self.refuses:
            # As Linux does: the file is created, and then the flag is refused.
            if flags & os.O_CREAT:
                self._real["close"](self._real["open"](path, flags & ~DIRECT, mode))
            raise OSError(self.code, os.strerror(self.code))
        fd = int(self._real["open"](path, flags & ~DIRECT, mode))
        if is_direct:
            self._direct_fds.add(fd)
        if not path.endswith(".lock"):
            self.opened.append(is_direct)
        return fd

    def close(self, fd: int) -> None:
        self._direct_fds.discard(fd)
        self._real["close"](fd)

    def pwritev(self, fd: int, views: Any, at: int) -> int:
        return self._move("pwritev", fd, views, at)

    def preadv(self, fd: int, views: Any, at: int) -> int:
        return self._move("preadv", fd, views, at)

    def _move(self, name: str, fd: int, views: Any, at: int) -> int:
        if fd in self._direct_fds:
            if name in self.refuses:
                raise OSError(self.code, os.strerror(self.code))
            for view in views:
                assert len(view) % 4096 == 0, "O_DIRECT takes whole pages"
        return int(self._real[name](fd, views, at))


@pytest.fixture
def filesystem(monkeypatch: pytest.MonkeyPatch) -> Filesystem:
    return Filesystem(monkeypatch)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "kvstore_sdk_backends.fs"]


def test_whole_pages_bypass_the_page_cache(filesystem: Filesystem, open_folder: Callable[..., FsBackend], desk: Any) -> None:
    store = open_folder()
    filesystem.opened.clear()
    desk.put(store, "v1/a", RECORD, cuts=(4096,))
    desk.get(store, "v1/a", 8192, 8192)
    assert filesystem.opened == [True, True]


@pytest.mark.parametrize(("size", "shift"), [(1, 0), (4095, 0), (4097, 0), (8192, 512), (8192, 1)])
def test_what_is_not_whole_pages_goes_through_it(
    filesystem: Filesystem, open_folder: Callable[..., FsBackend], desk: Any, size: int, shift: int
) -> None:
    """A manifest, a record of one byte, a buffer that begins anywhere."""
    store = open_folder()
    filesystem.opened.clear()
    record = os.urandom(size)
    assert desk.put(store, "v1/a", record, shift=shift).status is PutStatus.STORED
    assert desk.get(store, "v1/a", size, shift=shift) == (GetResult(GetStatus.FOUND), record)
    assert filesystem.opened == [False, False]


def test_never_means_never(filesystem: Filesystem, open_folder: Callable[..., FsBackend], desk: Any) -> None:
    store = open_folder(direct_io="never")
    assert desk.put(store, "v1/a", RECORD).status is PutStatus.STORED
    assert desk.get(store, "v1/a", len(RECORD)) == (GetResult(GetStatus.FOUND), RECORD)
    assert set(filesystem.opened) == {False}


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("when", ["open", "pwritev"])
def test_a_filesystem_without_it_is_found_out_at_open(
    filesystem: Filesystem, open_folder: Callable[..., FsBackend], desk: Any, caplog: pytest.LogCaptureFixture, when: str, code: int
) -> None:
    """CFG-03, CFG-06: one warning, and every record is stored through the page cache."""
    filesystem.refuses, filesystem.code = {when}, code
    with caplog.at_level(logging.WARNING):
        store = open_folder()
        assert len(warnings(caplog)) == 1
        for number in range(20):
            assert desk.put(store, f"v1/{number}", RECORD).status is PutStatus.STORED
            assert desk.get(store, f"v1/{number}", len(RECORD)) == (GetResult(GetStatus.FOUND), RECORD)
    assert len(warnings(caplog)) == 1
    assert f"fs {store._root}: this filesystem refuses O_DIRECT ({os.strerror(code)}); the page cache is used" in warnings(caplog)[0]


@pytest.mark.parametrize("when", ["open", "pwritev", "preadv"])
def test_a_later_refusal_is_survived_with_one_warning(
    filesystem: Filesystem,
    open_folder: Callable[..., FsBackend],
    desk: Any,
    caplog: pytest.LogCaptureFixture,
    left_behind: Callable[[], list[str]],
    when: str,
) -> None:
    """CFG-03: every put and get succeeds, from the first on, also when many threads find out at once."""
    store = open_folder()
    assert desk.put(store, "v1/before", RECORD).status is PutStatus.STORED
    filesystem.refuses = {when}
    puts = [desk.put_item(f"v1/{number}", RECORD) for number in range(16)]
    gets = [desk.get_item("v1/before", len(RECORD)) for _ in range(16)]
    start = threading.Barrier(4)
    answers: list[Any] = []

    def run(mine: slice) -> None:
        start.wait(10)
        answers.extend(store.put(puts[mine], Deadline.after(30)))
        answers.extend(store.get(gets[mine], Deadline.after(30)))

    with caplog.at_level(logging.WARNING):
        threads = [threading.Thread(target=run, args=(slice(number, None, 4),), name=f"user-{number}") for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert len(answers) == 32
    assert {answer.status for answer in answers} == {PutStatus.STORED, GetStatus.FOUND}
    assert all(get.into[0].view == RECORD for get in gets)
    assert len(warnings(caplog)) == 1
    assert left_behind() == []
    filesystem.opened.clear()
    desk.put(store, "v1/after", RECORD)
    assert filesystem.opened == [False], "it is not tried again and again"


def test_an_error_that_is_no_refusal_does_not_end_it(
    filesystem: Filesystem, open_folder: Callable[..., FsBackend], desk: Any, left_behind: Callable[[], list[str]]
) -> None:
    store = open_folder()
    filesystem.refuses, filesystem.code = {"pwritev"}, errno.EIO
    result = desk.put(store, "v1/a", RECORD)
    assert result.status is PutStatus.FAILED
    assert isinstance(result.error, UnavailableError)
    filesystem.refuses = set()
    filesystem.opened.clear()
    assert desk.put(store, "v1/a", RECORD).status is PutStatus.STORED
    assert filesystem.opened == [True]
    assert left_behind() == []


@pytest.mark.parametrize("when", ["open", "pwritev"])
@pytest.mark.parametrize("there", ["nothing", "an empty folder", "a store"])
def test_always_refuses_a_filesystem_without_it_before_anything_is_written(
    filesystem: Filesystem,
    open_folder: Callable[..., FsBackend],
    folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    there: str,
    when: str,
) -> None:
    if there == "a store":
        open_folder().close()
    elif there == "an empty folder":
        folder.mkdir()
    before = sorted(tmp_path.rglob("*"))
    filesystem.refuses = {when}
    with caplog.at_level(logging.WARNING), pytest.raises(ConfigError) as caught:
        open_folder(direct_io="always")
    assert caught.value.field == "direct_io"
    assert "auto" in caught.value.problem
    assert sorted(tmp_path.rglob("*")) == before
    assert warnings(caplog) == [], "nothing goes on with the page cache"


def test_always_where_nothing_can_be_written_is_the_error_it_is(
    open_folder: Callable[..., FsBackend], folder: Path, disk: Any, tmp_path: Path
) -> None:
    disk.fail("pwritev", errno.EIO)
    with pytest.raises(UnavailableError, match=f"fs open {folder}: EIO"):
        open_folder(direct_io="always")
    assert list(tmp_path.iterdir()) == []


def test_two_that_open_with_always_do_not_meet(open_folder: Callable[..., FsBackend], folder: Path) -> None:
    """The file by which one of them tries is no foreign thing to the other."""
    folder.mkdir()
    (folder / ".kvstore-probe-00").touch()
    open_folder(direct_io="always")


def test_always_is_about_opening(filesystem: Filesystem, open_folder: Callable[..., FsBackend], desk: Any) -> None:
    """A store that serves is not stopped by a volume that changes its mind."""
    store = open_folder(direct_io="always")
    filesystem.refuses = {"pwritev"}
    assert desk.put(store, "v1/a", RECORD).status is PutStatus.STORED


def test_the_real_filesystem_agrees(open_folder: Callable[..., FsBackend], desk: Any) -> None:
    """With nothing replaced: whatever this disk does, records come back."""
    store = open_folder()
    for size in (1, 512, 4096, 1 << 20):
        record = os.urandom(size)
        assert desk.put(store, f"v1/{size}", record).status is PutStatus.STORED
        assert desk.get(store, f"v1/{size}", size) == (GetResult(GetStatus.FOUND), record)
