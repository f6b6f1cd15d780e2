"""Whose temporary files are swept: those of the dead, at once on this kernel, by age from elsewhere; a living writer's never."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore_sdk.backend import Deadline, GetStatus, PutStatus, UnavailableError
from kvstore_sdk_backends.fs import FsBackend, tempfiles

HOUR = 3600.0
_numbers = itertools.count(1)


@pytest.fixture
def temp_root(folder: Path) -> Path:
    return folder / ".kvstore/tmp"


def kernel() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")


class Remains:
    """What a writer leaves: a lock file that nobody holds, and a folder with a file."""

    def __init__(self, temp_root: Path, *, host: str = "", mount: str = "", lock: bool = True, folder: bool = True) -> None:
        mount = mount or f"{os.stat(temp_root).st_dev:x}"
        self.name = f"{host or kernel()}-{mount}-{next(_numbers):016x}"
        self.lock = temp_root / f"{self.name}.lock"
        self.folder = temp_root / self.name
        self.file = self.folder / "3/19"
        if lock:
            self.lock.touch()
        if folder:
            self.file.parent.mkdir(parents=True)
            self.file.write_bytes(b"half a record")

    def age(self, seconds: float) -> None:
        then = time.time() - seconds
        for path in (self.file, self.file.parent, self.folder, self.lock):
            if path.exists():
                os.utime(path, (then, then))

    @property
    def gone(self) -> bool:
        return not (self.lock.exists() or self.folder.exists())


OTHER_HOST = "f" * 32


def test_a_dead_writer_of_this_kernel_is_swept_at_once(store: FsBackend, temp_root: Path) -> None:
    """ATM-01: free locks of this kernel are proof, whatever the age."""
    dead = [Remains(temp_root) for _ in range(3)]
    assert store.sweep() == 3
    assert all(one.gone for one in dead)
    assert store.sweep() == 0


@pytest.mark.parametrize("parts", [{"folder": False}, {"lock": True}])
def test_every_stage_of_a_death_is_swept(store: FsBackend, temp_root: Path, parts: dict[str, bool]) -> None:
    """Killed between taking the lock and making the folder, or in the middle of a sweep that removed some of it."""
    dead = Remains(temp_root, **parts)
    if parts.get("folder", True):
        dead.file.unlink()
    store.sweep()
    assert dead.gone


def test_an_opening_sweeps(open_folder: Callable[..., FsBackend], temp_root: Path) -> None:
    open_folder().close()
    dead = Remains(temp_root)
    open_folder()
    assert dead.gone


def test_a_living_writer_is_left_alone_however_old_its_files_are(open_folder: Callable[..., FsBackend], temp_root: Path) -> None:
    """A writer that was stopped in a debugger for a day is not dead."""
    alive, sweeper = open_folder(), open_folder()
    path = Path(alive._records._writer.new_path())
    path.write_bytes(b"half a record")
    for one in (path, path.parent, path.parent.parent, path.parent.parent.with_name(path.parent.parent.name + ".lock")):
        os.utime(one, (0, 0))
    assert sweeper.sweep() == 0
    assert alive.sweep() == 0
    assert path.exists()
    alive.close()
    assert not path.exists()


@pytest.mark.parametrize("where", [{"host": OTHER_HOST}, {"mount": "ffff"}, {"host": "nolock", "lock": False}, {"lock": False}])
def test_a_writer_elsewhere_is_judged_by_age_alone(store: FsBackend, temp_root: Path, where: dict[str, Any]) -> None:
    """Another host, another mount of this host, a mount without locks, a lock file that somebody removed: a free lock proves nothing."""
    one = Remains(temp_root, **where)
    for age in (0.0, HOUR, 2 * HOUR - 60):
        one.age(age)
        assert store.sweep() == 0
        assert one.file.exists()
    one.age(2 * HOUR + 60)
    assert store.sweep() == 1
    assert one.gone


def test_of_a_writer_elsewhere_only_the_old_files_go(store: FsBackend, temp_root: Path) -> None:
    """It lives, and one of its puts was abandoned a day ago."""
    one = Remains(temp_root, host=OTHER_HOST)
    one.age(24 * HOUR)
    fresh = one.file.with_name("20")
    fresh.write_bytes(b"half a record")
    assert store.sweep() == 1
    assert fresh.exists()
    assert one.lock.exists()


def test_a_held_lock_protects_a_writer_elsewhere_where_locks_reach(store: FsBackend, temp_root: Path) -> None:
    one = Remains(temp_root, host=OTHER_HOST)
    one.age(24 * HOUR)
    fd = os.open(one.lock, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    assert store.sweep() == 0
    assert one.file.exists()
    os.close(fd)
    assert store.sweep() == 1


def test_ages_are_told_by_the_filesystems_clock(store: FsBackend, temp_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host whose clock is a day ahead must not take every file on the mount for an old one."""
    one = Remains(temp_root, host=OTHER_HOST)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 24 * HOUR)
    assert store.sweep() == 0
    assert one.file.exists()


def test_a_kernel_without_a_name_trusts_no_lock(store: FsBackend, temp_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts that cannot tell themselves apart must not take each other for one."""
    monkeypatch.setattr(tempfiles, "_kernel", lambda: "nolock")
    one = Remains(temp_root, host="nolock")
    assert store.sweep() == 0
    assert one.file.exists()


def test_what_is_no_writers_is_left_alone(store: FsBackend, temp_root: Path) -> None:
    (temp_root / "README").write_text("notes")
    (temp_root / "mine").mkdir()
    (temp_root / "mine/file").write_text("x")
    os.utime(temp_root / "mine/file", (0, 0))
    assert store.sweep() == 0
    assert (temp_root / "README").exists()
    assert (temp_root / "mine/file").exists()


def test_a_put_sweeps_once_an_hour(
    store: FsBackend, temp_root: Path, desk: Any, monkeypatch: pytest.MonkeyPatch, open_folder: Callable[..., FsBackend]
) -> None:
    """ATM-01: of a fleet that stays up, nobody opens the store, and its members die all the same."""
    first, clock = Remains(temp_root), [0.0]
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + clock[0])
    clock[0] = HOUR - 60
    assert desk.put(store, "v1/a", b"x").status is PutStatus.STORED
    assert first.file.exists()
    clock[0] = HOUR
    assert desk.put(store, "v1/b", b"x").status is PutStatus.STORED
    assert first.gone
    second = Remains(temp_root)
    clock[0] = 2 * HOUR - 60
    assert desk.put(store, "v1/c", b"x").status is PutStatus.STORED
    assert second.file.exists()
    clock[0] = 2 * HOUR + 60
    assert desk.put(store, "v1/d", b"x").status is PutStatus.STORED
    assert second.gone


def test_a_put_that_sweeps_is_bounded_and_the_rest_comes_soon(store: FsBackend, desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [HOUR]
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + clock[0])
    limits: list[float] = []

    def slow(deadline: Deadline) -> int:
        limits.append(deadline.remaining_s())
        clock[0] += max(0.0, deadline.remaining_s())
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(store._records, "sweep", slow)
    for later_s in (0.0, 50.0, 15.0):
        clock[0] += later_s
        assert desk.put(store, f"v1/{later_s}", b"x").status is PutStatus.STORED
    assert len(limits) == 2
    assert max(limits) <= 0.05
    clock[0] += 120
    store.put([desk.put_item("v1/b", b"x")], Deadline.after(0.0))
    assert len(limits) == 2, "never beyond the deadline of the call"


@pytest.mark.parametrize("lock", [True, False], ids=["dead here", "old from elsewhere"])
@pytest.mark.parametrize("where", ["writer", "subfolder", "file"])
def test_a_sweep_follows_no_link(store: FsBackend, temp_root: Path, tmp_path: Path, where: str, lock: bool) -> None:
    """Whoever may write to the store could otherwise have it delete what only the engine's user may delete."""
    precious = tmp_path / "home/3/thesis"
    precious.parent.mkdir(parents=True)
    precious.write_text("precious")
    (precious.parents[1] / "notes").write_text("precious")
    dead = Remains(temp_root, lock=lock)
    dead.age(3 * HOUR)
    dead.file.unlink()
    link = {"writer": dead.folder, "subfolder": dead.file.parent, "file": dead.file}[where]
    if where != "file":
        dead.file.parent.rmdir()
    if where == "writer":
        dead.folder.rmdir()
    link.symlink_to(precious if where == "file" else precious.parents[1])
    for path in (precious, precious.parent, precious.parents[1], precious.parents[1] / "notes", link, link.parent):
        os.utime(path, (0, 0), follow_symlinks=False)
    store.sweep()
    assert precious.read_text() == "precious"
    assert (precious.parents[1] / "notes").exists()
    assert where == "writer" or not os.path.lexists(link), "the link itself is nothing but remains"


def test_a_folder_that_becomes_a_link_during_the_sweep_is_not_followed(
    store: FsBackend, temp_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    precious = tmp_path / "home/thesis"
    precious.parent.mkdir()
    precious.write_text("precious")
    dead = Remains(temp_root)
    real = os.open

    def swap(path: Any, *args: Any, **kwargs: Any) -> int:
        # In the instant after it was seen to be a folder.
        if path == "3":
            dead.file.unlink()
            dead.file.parent.rmdir()
            dead.file.parent.symlink_to(precious.parent)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", swap)
    assert store.sweep() == 0
    assert dead.file.parent.is_symlink(), "the swap took place"
    assert precious.read_text() == "precious"


def test_a_sweep_is_bounded_and_the_next_one_goes_on(store: FsBackend, temp_root: Path) -> None:
    dead = [Remains(temp_root) for _ in range(5)]
    assert store.sweep(Deadline.after(-1.0)) == 0
    assert not any(one.gone for one in dead)
    assert store.sweep(Deadline.after(30.0)) == 5


def test_a_sweep_goes_past_what_it_may_not_remove(store: FsBackend, temp_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The remains of another user."""
    theirs, ours = Remains(temp_root), Remains(temp_root)
    kept = theirs.file.parent.stat().st_ino
    unlink = os.unlink

    def refuse(path: Any, **kwargs: Any) -> None:
        if "dir_fd" in kwargs and os.fstat(kwargs["dir_fd"]).st_ino == kept:
            raise PermissionError(errno.EACCES, "Permission denied")
        unlink(path, **kwargs)

    monkeypatch.setattr(os, "unlink", refuse)
    assert store.sweep() == 1
    assert ours.gone
    assert theirs.file.exists()


def test_records_are_stored_where_there_are_no_locks(
    open_folder: Callable[..., FsBackend], temp_root: Path, desk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """INT-09's kind: a filesystem that lacks a feature must not stop the store, nor weaken it unsaid."""

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    store, sweeper = open_folder(), open_folder()
    assert sorted(path.name[:7] for path in temp_root.iterdir()) == ["nolock-"] * 2
    path = Path(store._records._writer.new_path())
    path.write_bytes(b"half a record")
    assert sweeper.sweep() == 0
    os.utime(path, (0, 0))
    assert sweeper.sweep() == 1
    assert desk.put(store, "a", b"x").status is PutStatus.STORED
    assert desk.get(sweeper, "a", 1)[0].status is GetStatus.FOUND
    store.close()
    sweeper.close()
    assert list(temp_root.iterdir()) == []


def test_openings_and_sweeps_may_race(open_folder: Callable[..., FsBackend], temp_root: Path, desk: Any, folder: Path) -> None:
    """A sweep that meets a lock file in the instant before it is locked must not take the new writer for a dead one."""
    open_folder()
    stop = threading.Event()
    failed: list[BaseException] = []

    def run(step: Callable[[], None]) -> threading.Thread:
        def loop() -> None:
            try:
                while not stop.is_set():
                    step()
            except BaseException as error:
                failed.append(error)
                raise

        thread = threading.Thread(target=loop, name="racer")
        thread.start()
        return thread

    threads = [run(lambda: tempfiles.sweep(str(temp_root), Deadline.after(5)) and None) for _ in range(2)]
    try:
        for number in range(60):
            backend = open_folder()
            assert desk.put(backend, f"v1/{number}", b"x" * 4096).status is PutStatus.STORED
            backend.close()
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
    assert failed == []


def test_a_lock_that_a_sweep_took_first_is_given_up_for_another(
    temp_root: Path, open_folder: Callable[..., FsBackend], monkeypatch: pytest.MonkeyPatch, desk: Any
) -> None:
    """The race of the test above, step by step: held by the sweep, removed by it, or removed and there again."""
    open_folder().close()
    real = fcntl.flock
    turns = iter(["held", "removed", "replaced", "free"])
    seen: list[str] = []

    def interfere(fd: int, how: int) -> None:
        turn = next(turns, "free")
        seen.append(turn)
        if turn == "held":
            raise BlockingIOError(errno.EWOULDBLOCK, "Resource temporarily unavailable")
        path = os.readlink(f"/proc/self/fd/{fd}")
        if turn in ("removed", "replaced"):
            os.unlink(path)
        if turn == "replaced":
            Path(path).touch()
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", interfere)
    monkeypatch.setattr(tempfiles, "_writers", lambda _: [])
    store = open_folder()
    assert seen == ["held", "removed", "replaced", "free"]
    assert desk.put(store, "a", b"x").status is PutStatus.STORED
    name = store._records._writer.name
    assert {name, f"{name}.lock"} <= {path.name for path in temp_root.iterdir()}


@pytest.mark.parametrize("what", ["everything", "writer", "subfolders", "lock"])
def test_a_writer_whose_folder_was_removed_makes_another(folder: Path, temp_root: Path, store: FsBackend, desk: Any, what: str) -> None:
    """Somebody tidied up by hand, or a host with a wrong clock swept: no put may fail for that."""
    name = store._records._writer.name
    if what == "everything":
        shutil.rmtree(temp_root)
    elif what == "writer":
        shutil.rmtree(temp_root / name)
    elif what == "subfolders":
        for sub in list((temp_root / name).iterdir())[::2]:
            sub.rmdir()
    else:
        (temp_root / f"{name}.lock").unlink()
    for number in range(20):
        assert desk.put(store, f"v1/{number}", b"x" * 4096).status is PutStatus.STORED
    store.close()
    assert list(temp_root.iterdir()) == []


@pytest.mark.usefixtures("python_alone")
def test_a_put_that_loses_its_temporary_file_says_so_and_tears_nothing(
    folder: Path, temp_root: Path, store: FsBackend, desk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worst that a sweep could do, were its proofs wrong."""
    write = os.pwritev

    def lose(fd: int, views: Any, at: int) -> int:
        done = write(fd, views, at)
        for path in temp_root.rglob("*"):
            if path.is_file() and not path.name.endswith(".lock"):
                path.unlink()
        return done

    monkeypatch.setattr(os, "pwritev", lose)
    result = desk.put(store, "a", b"x" * 8192)
    monkeypatch.undo()
    assert result.status is PutStatus.UNKNOWN
    assert isinstance(result.error, UnavailableError)
    assert store.exists(["a"], Deadline.after(5)) == [False]
    assert desk.put(store, "a", b"x" * 8192).status is PutStatus.STORED


def test_a_volume_that_is_gone_is_not_written_to(folder: Path, store: FsBackend, desk: Any) -> None:
    """Unmounted, its mount point is an empty folder of the system's disk, which must not fill up instead."""
    desk.put(store, "a", b"x")
    folder.rename(folder.with_name("volume"))
    for make in (lambda: None, folder.mkdir):
        make()
        result = desk.put(store, "b", b"x")
        assert result.status is PutStatus.FAILED
        assert isinstance(result.error, UnavailableError)
        assert "is its volume mounted?" in str(result.error)
        assert desk.get(store, "a", 1)[0].status is GetStatus.MISSING
        assert store.sweep() == 0
    assert list(folder.iterdir()) == []
    folder.rmdir()
    folder.with_name("volume").rename(folder)
    assert desk.put(store, "b", b"x").status is PutStatus.STORED
    assert desk.get(store, "a", 1)[0].status is GetStatus.FOUND


def test_descriptors_do_not_run_out_when_the_folder_is_removed_again_and_again(temp_root: Path, store: FsBackend, desk: Any) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for number in range(30):
        shutil.rmtree(temp_root)
        assert desk.put(store, f"v1/{number}", b"x").status is PutStatus.STORED
    assert len(os.listdir("/proc/self/fd")) <= before + 8
    store.close()
    assert len(os.listdir("/proc/self/fd")) < before


def test_two_backends_of_one_process_are_two_writers(open_folder: Callable[..., FsBackend], desk: Any) -> None:
    """ATM-03: shared temporary names would let one publish the other's half."""
    first, second = open_folder(), open_folder()
    assert first._records._writer.name != second._records._writer.name
    first.close()
    assert desk.put(second, "a", b"x").status is PutStatus.STORED


def test_no_name_is_given_twice(store: FsBackend) -> None:
    writer = store._records._writer
    names: list[str] = []
    threads = [threading.Thread(target=lambda: names.extend(writer.new_path() for _ in range(1000)), name="namer") for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(names) == len(set(names)) == 8000
