"""Which folders are accepted: one error that names `location` and the fix, before a byte is written."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore_sdk.backend import (
    Backend,
    ConfigError,
    Deadline,
    DeleteStatus,
    Durability,
    Fork,
    GetStatus,
    PutStatus,
    ReadOnlyError,
    SupportsDelete,
    SupportsList,
    SupportsUsage,
    TimedOutError,
    UnavailableError,
)
from kvstore_sdk_backends.fs import FsBackend, backend, open_fs
from kvstore_sdk_backends.fs import folder as folder_module

LIMIT_S = 30.0
MARKER = {"format": "kvstore-sdk folder", "version": 1}


def everything(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def refused(location: Path | str, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        open_fs(str(location), **options)
    assert caught.value.where == "backend fs"
    assert caught.value.field == "location"
    return caught.value.problem


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Without the rights of root, if the tests have them."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """One that nobody can reach, which pytest's own are not."""
    root = Path(tempfile.mkdtemp(prefix="kvstore-test-"))
    root.chmod(0o755)
    yield root
    for path in root.rglob("*"):
        path.chmod(0o755)
    shutil.rmtree(root)


def test_a_missing_folder_is_created_and_marked(folder: Path, store: FsBackend) -> None:
    assert json.loads((folder / ".kvstore/format.json").read_text()) == MARKER
    store.close()
    assert everything(folder) == [".kvstore", ".kvstore/format.json", ".kvstore/tmp"]


def test_a_record_is_a_file_of_its_name_with_its_bytes(folder: Path, store: FsBackend, desk: Any) -> None:
    """What syncs the folder elsewhere needs to know nothing."""
    name = "v1/" + "0" * 32 + "/ab/" + "ab" * 32 + "-g0"
    desk.put(store, name, b"\0bytes\xff" * 1000)
    assert (folder / name).read_bytes() == b"\0bytes\xff" * 1000
    assert sorted(path.name for path in folder.iterdir()) == [".kvstore", "v1"]


def test_a_parent_is_not_created(tmp_path: Path) -> None:
    """A misspelt path or a volume that is not mounted must not become a store on the system's disk."""
    assert "does not exist; create it, mount it, or fix the path" in refused(tmp_path / "no/kv")
    assert everything(tmp_path) == []


@pytest.mark.parametrize("location", ["", "relative/kv", "~/kv", "host/share", "/with\0nul", "/\ud800", "/", "//"])
def test_what_is_no_absolute_path_is_refused(location: str) -> None:
    assert "name a folder" in refused(location) or "is no absolute path" in refused(location)


def test_a_path_too_long_for_records_is_refused() -> None:
    assert "use a shorter one" in refused("/" + "x" * 3900)


@pytest.mark.parametrize("name", ["kv", "kv/below"])
def test_a_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "kv").write_text("precious")
    assert "is not a folder" in refused(tmp_path / name) or "no path of a folder" in refused(tmp_path / name)
    assert (tmp_path / "kv").read_text() == "precious"


@pytest.mark.parametrize("read_only", [False, True])
def test_a_folder_that_holds_other_things_is_refused(tmp_path: Path, read_only: bool) -> None:
    (tmp_path / "photos").mkdir()
    assert "'photos' for one" in refused(tmp_path, read_only=read_only)
    assert everything(tmp_path) == ["photos"]


@pytest.mark.parametrize(
    "marker",
    [
        {**MARKER, "version": 2},
        {**MARKER, "version": "1"},
        {**MARKER, "format": "another"},
        {"version": 1},
        ["format"],
        7,
        None,
    ],
)
def test_a_folder_of_another_format_or_version_is_refused(tmp_path: Path, marker: object) -> None:
    (tmp_path / ".kvstore").mkdir()
    (tmp_path / ".kvstore/format.json").write_text(json.dumps(marker))
    before = everything(tmp_path)
    for read_only in (False, True):
        assert "name another folder" in refused(tmp_path, read_only=read_only)
    assert everything(tmp_path) == before


@pytest.mark.parametrize("text", [b"{", b"\xff\xfe", b'{"format": ' + b"[" * 3000, b'{"version": 1' + b" " * 10_000 + b"}"])
def test_a_marker_that_cannot_be_read_is_refused_with_the_way_out(tmp_path: Path, text: bytes) -> None:
    (tmp_path / ".kvstore").mkdir()
    (tmp_path / ".kvstore/format.json").write_bytes(text)
    assert "delete that file" in refused(tmp_path)


def test_a_marker_that_is_a_fifo_is_not_waited_for(folder: Path, store: FsBackend, desk: Any) -> None:
    """LIV-07's kind: a put looks at the marker when its folder of temporary files is gone."""
    marker = folder / ".kvstore/format.json"
    marker.unlink()
    os.mkfifo(marker)
    shutil.rmtree(folder / ".kvstore/tmp")
    result = desk.put(store, "v1/a", b"x")
    assert result.status is PutStatus.FAILED
    assert "is not this store any more" in str(result.error)
    with contextlib.closing(open_fs(str(folder))) as again:
        assert json.loads(marker.read_text()) == MARKER
        assert desk.put(again, "v1/a", b"x").status is PutStatus.STORED


@pytest.mark.parametrize("text", [b"", b"\0" * 47, b"\n"])
def test_a_marker_that_a_power_cut_emptied_is_written_again(tmp_path: Path, text: bytes) -> None:
    (tmp_path / ".kvstore").mkdir()
    (tmp_path / "v1").mkdir()
    (tmp_path / ".kvstore/format.json").write_bytes(text)
    open_fs(str(tmp_path)).close()
    assert json.loads((tmp_path / ".kvstore/format.json").read_text()) == MARKER


def test_records_that_were_synced_here_are_adopted(folder: Path, open_folder: Callable[..., FsBackend], desk: Any) -> None:
    """A copy of a store without its hidden folder, on a fresh filesystem, is a store."""
    (folder / "v1/x/00").mkdir(parents=True)
    (folder / "lost+found").mkdir()
    (folder / "v1/x/00/a").write_bytes(b"synced")
    assert desk.get(open_folder(), "v1/x/00/a", 6)[1] == b"synced"


def test_a_link_to_a_folder_is_a_folder(folder: Path, tmp_path: Path, open_folder: Callable[..., FsBackend], desk: Any) -> None:
    (tmp_path / "real").mkdir()
    folder.symlink_to(tmp_path / "real")
    assert desk.put(open_folder(), "a", b"x").status is PutStatus.STORED
    assert (tmp_path / "real/a").read_bytes() == b"x"


def test_a_slash_at_the_end_is_no_part_of_the_path(folder: Path, open_folder: Callable[..., FsBackend], desk: Any) -> None:
    desk.put(open_folder(f"{folder}/"), "a", b"x")
    assert open_folder().exists(["a"], Deadline.after(LIMIT_S)) == [True]


def test_a_folder_without_permission_is_refused(public_folder: Path) -> None:
    public_folder.chmod(0o555)
    with as_nobody():
        assert "permission denied" in refused(public_folder)
    public_folder.chmod(0o000)
    with as_nobody():
        assert "permission denied" in refused(public_folder)
        assert "permission denied" in refused(public_folder / "kv")


def test_one_without_write_permission_can_read(public_folder: Path, desk: Any) -> None:
    writer = open_fs(str(public_folder / "kv"))
    desk.put(writer, "a", b"shared")
    writer.close()
    for path in (public_folder / "kv", *(public_folder / "kv").rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    with as_nobody():
        assert "permission denied" in refused(public_folder / "kv")
        reader = open_fs(str(public_folder / "kv"), read_only=True)
        assert desk.get(reader, "a", 6)[1] == b"shared"
        reader.close()


def test_read_only_creates_changes_and_removes_nothing(folder: Path, open_folder: Callable[..., FsBackend], desk: Any) -> None:
    writer = open_folder()
    desk.put(writer, "a", b"x")
    writer.close()
    before = everything(folder), os.stat(folder).st_mtime_ns, os.stat(folder / ".kvstore/tmp").st_mtime_ns
    reader = open_folder(read_only=True)
    assert reader.capabilities.read_only
    result = desk.put(reader, "b", b"x")
    assert result.status is PutStatus.FAILED
    assert isinstance(result.error, ReadOnlyError)
    [deleted] = reader.delete(["a"], Deadline.after(LIMIT_S))
    assert not isinstance(deleted, DeleteStatus)
    assert isinstance(deleted.error, ReadOnlyError)
    with pytest.raises(ReadOnlyError, match="read_only"):
        reader.sweep()
    assert desk.get(reader, "a", 1)[0].status is GetStatus.FOUND
    assert [entry.name for entry in reader.list("", Deadline.after(LIMIT_S)).entries] == ["a"]
    assert reader.usage(Deadline.after(LIMIT_S)).records == 1
    reader.close()
    assert (everything(folder), os.stat(folder).st_mtime_ns, os.stat(folder / ".kvstore/tmp").st_mtime_ns) == before


def test_read_only_wants_a_folder_but_no_marker(folder: Path, open_folder: Callable[..., FsBackend]) -> None:
    """Whoever only reads may be there first."""
    assert "read_only creates nothing" in refused(folder, read_only=True)
    assert not folder.exists()
    folder.mkdir()
    assert open_folder(read_only=True).exists(["a"], Deadline.after(LIMIT_S)) == [False]
    assert everything(folder) == []


def test_what_is_offered_is_what_is_declared(store: FsBackend) -> None:
    offered = store.capabilities
    typed: Backend = store
    assert typed is store
    assert isinstance(store, SupportsDelete)
    assert isinstance(store, SupportsList)
    assert isinstance(store, SupportsUsage)
    assert (offered.shared, offered.read_only, offered.in_doubt) == (True, False, False)
    assert (offered.durability, offered.fork) == (Durability.PROCESS_CRASH, Fork.REFUSES)


@pytest.mark.parametrize(("kind", "fresh"), [("ext4", True), ("nfs4", False), ("cifs", False), ("ceph", True)])
def test_a_mount_that_remembers_misses_does_not_promise_to_see_others_records(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, open_folder: Callable[..., FsBackend], kind: str, fresh: bool
) -> None:
    """RACE-11: on NFS another host's new record may be missing for a minute."""
    device = os.stat(tmp_path).st_dev
    table = tmp_path / "mountinfo"
    table.write_text(
        f"22 1 0:0 / /proc rw - proc proc rw\n23 1 {os.major(device)}:{os.minor(device)} / / rw shared:1 master:2 - {kind} x rw\n"
    )
    real_open = open
    monkeypatch.setattr(
        folder_module, "open", lambda path, *a, **k: real_open(table if path == "/proc/self/mountinfo" else path, *a, **k), raising=False
    )
    assert open_folder().capabilities.read_after_write is fresh


def test_a_dead_mount_ends_the_opening_with_the_step_it_waits_for(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """LIV-18. The step that comes back later must not leave a writer behind."""
    answers = threading.Event()
    real = folder_module.inspect

    def hang(root: str, read_only: bool) -> bool:
        answers.wait(LIMIT_S)
        return real(root, read_only)

    monkeypatch.setattr(backend, "inspect", hang)
    monkeypatch.setattr(backend, "OPEN_WAIT_S", 0.1)
    with pytest.raises(TimedOutError, match=f"fs open {folder}: the filesystem did not answer within 0.1 s"):
        open_fs(str(folder))
    answers.set()
    thread = next(thread for thread in threading.enumerate() if thread.name == f"fs open {folder}")
    thread.join(LIMIT_S)
    assert everything(folder) == [".kvstore", ".kvstore/format.json", ".kvstore/tmp"]


@pytest.mark.parametrize(
    ("code", "kind"),
    [(errno.EIO, UnavailableError), (errno.ESTALE, UnavailableError), (errno.EROFS, ConfigError), (errno.EPERM, ConfigError)],
)
def test_a_filesystem_that_fails_at_open_is_one_error(
    monkeypatch: pytest.MonkeyPatch, folder: Path, code: int, kind: type[Exception]
) -> None:
    folder.mkdir()

    def fail(path: str, *_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code), path)

    monkeypatch.setattr(os, "mkdir", fail)
    with pytest.raises(kind, match=str(folder)):
        open_fs(str(folder))
    assert everything(folder) == []


def test_an_opening_that_fails_late_leaves_no_writer(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(UnavailableError, match="EIO"):
        open_fs(str(folder))
    assert everything(folder) == [".kvstore", ".kvstore/tmp"]
    monkeypatch.undo()
    open_fs(str(folder)).close()


def test_two_that_open_a_new_folder_at_once_both_succeed(folder: Path) -> None:
    for turn in range(10):
        where = folder.with_name(f"kv{turn}")
        start = threading.Barrier(4)
        failed: list[BaseException] = []

        def run(where: Path = where, start: threading.Barrier = start, failed: list[BaseException] = failed) -> None:
            start.wait(LIMIT_S)
            try:
                open_fs(str(where)).close()
            except BaseException as error:
                failed.append(error)
                raise

        threads = [threading.Thread(target=run, name=f"opener-{number}") for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        assert failed == []
        assert everything(where) == [".kvstore", ".kvstore/format.json", ".kvstore/tmp"]


def test_opening_a_large_store_does_not_read_it(
    folder: Path, open_folder: Callable[..., FsBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_folder().close()
    for number in range(256):
        (folder / f"v1/x/{number:02x}").mkdir(parents=True)
    looked_at: list[str] = []
    real = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: looked_at.append(str(path)) or real(path))
    open_folder()
    assert [path for path in looked_at if "/v1" in path] == []
