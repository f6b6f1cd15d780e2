"""Regions that processes map by their path, and what dead processes leave behind."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import stat
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore_sdk.backend import Region
from kvstore_sdk.errors import ConfigError
from kvstore_sdk.host import create_region, is_abandoned, join_region, open_region, sweep_regions
from kvstore_sdk.host import region as region_module

SIZE = 1 << 20
KEEP_LENGTH = 1


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    """The call of the kernel; Python has only the one that sets the length too."""
    call = ctypes.CDLL(None, use_errno=True).fallocate
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    assert call(fd, mode, offset, length) == 0, os.strerror(ctypes.get_errno())


# Opens a region, leaves its mark, says what it got, and lives until its input ends.
MEMBER = """
import os, sys
from kvstore_sdk.host import open_region
path, size, place = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
region = open_region(path, size, 60)
region.view[place] = place + 1
print(os.fstat(region.fd).st_ino, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Of a kind where regions lie. A lease, and so the answer to who uses a file, is not to be had on every volume."""
    path = Path("/dev/shm") / f"kvstore-test-{uuid.uuid4().hex}"
    path.mkdir()
    yield path
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


@contextlib.contextmanager
def member(path: Path, size: int = SIZE, place: int = 0) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-c", MEMBER, str(path), str(size), str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate(timeout=60)


def inode_of(child: subprocess.Popen[str]) -> int:
    assert child.stdout is not None
    return int(child.stdout.readline())


def test_a_region_is_this_users_alone_and_all_of_it_is_there(folder: Path) -> None:
    """A page that comes only at its first touch may not come at all, and then the process ends."""
    path = folder / "region"
    region = create_region(str(path), SIZE)
    status = path.stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == region.size_bytes == SIZE
    assert status.st_blocks * 512 >= SIZE
    with pytest.raises(FileExistsError):
        create_region(str(path), SIZE)
    region.close()


def test_who_joins_has_the_same_bytes(folder: Path) -> None:
    path = str(folder / "region")
    created, joined = create_region(path, SIZE), join_region(path, SIZE, 5)
    created.view[12345] = 99
    assert joined.view[12345] == 99
    created.close()
    joined.close()


@pytest.mark.parametrize("size", [0, -4096, 4097])
def test_a_size_that_is_not_whole_pages_is_refused_before_anything_is_there(folder: Path, size: int) -> None:
    for opening in (
        lambda path: create_region(path, size),
        lambda path: join_region(path, size, 1),
        lambda path: open_region(path, size, 1),
    ):
        with pytest.raises(ConfigError, match=r"host region: size_bytes: .*region: -?\d+ is not a positive multiple of 4096"):
            opening(str(folder / "region"))
    assert not list(folder.iterdir())


def test_a_region_larger_than_what_is_free_is_refused_before_it_is_mapped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CFG-10: path, needed and free bytes, instead of a bus error later."""
    real = os.statvfs(folder)
    little = os.statvfs_result((*real[:1], 4096, *real[2:3], 256, 256, *real[5:]))
    allocated: list[int] = []
    monkeypatch.setattr(os, "statvfs", lambda path: little)
    monkeypatch.setattr(os, "posix_fallocate", lambda *arguments: allocated.append(1))
    path = str(folder / "region")
    for opening in (lambda: create_region(path, 2 << 20), lambda: open_region(path, 2 << 20, 5)):
        with pytest.raises(ConfigError, match=f"{path} needs {2 << 20} bytes and {1 << 20} are free there"):
            opening()
    assert not allocated
    assert not list(folder.iterdir()), "nothing is left behind"


def test_memory_that_is_gone_when_it_is_allocated_is_refused_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the question how much is free and the allocation somebody else takes it."""

    def refuse(*arguments: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(ConfigError, match=rf"region needs {SIZE} bytes and \d+ are free there"):
        create_region(str(folder / "region"), SIZE)
    assert not list(folder.iterdir())


def test_a_folder_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{folder}/none/region cannot be created: No such file"):
        open_region(str(folder / "none" / "region"), SIZE, 1)


def test_a_link_is_refused(folder: Path, tmp_path: Path) -> None:
    """Whoever may write in /dev/shm could otherwise have this user's files overwritten."""
    target = tmp_path / "target"
    target.write_bytes(bytes(SIZE))
    (folder / "region").symlink_to(target)
    for opening in (join_region, open_region):
        with pytest.raises(ConfigError, match="region is a link; remove it, or choose another path"):
            opening(str(folder / "region"), SIZE, 1)
    assert target.read_bytes() == bytes(SIZE)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to give a file to another user")
def test_another_users_file_is_refused(folder: Path) -> None:
    path = folder / "region"
    path.write_bytes(bytes(SIZE))
    os.chown(path, 12345, 12345)
    for opening in (join_region, open_region):
        with pytest.raises(ConfigError, match="region belongs to user 12345; remove it, or choose another path"):
            opening(str(path), SIZE, 1)
    assert sweep_regions(str(folder), ".*") == []
    assert path.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to give a file to another user")
@pytest.mark.parametrize("opening", [join_region, open_region])
def test_another_users_file_that_takes_the_name_meanwhile_is_not_joined(
    opening: Callable[..., Region], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at our file and its opening its owner takes the name away, and anybody may have it in a folder like /dev/shm."""
    path = folder / "region"
    region = create_region(str(path), SIZE)
    real, others = os.open, []

    def late(name: str, flags: int, *mode: int) -> int:
        if flags & os.O_RDWR and not flags & os.O_CREAT and not others:
            path.unlink()
            others.append(real(path, os.O_RDWR | os.O_CREAT, 0o666))
            os.ftruncate(others[0], SIZE)
            os.fchown(others[0], 12345, 12345)
        return real(name, flags, *mode)

    monkeypatch.setattr(os, "open", late)
    with pytest.raises(ConfigError, match="region belongs to user 12345"):
        opening(str(path), SIZE, 1)
    assert others
    os.close(others[0])
    region.close()


def test_a_folder_in_its_place_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "region").mkdir()
    with pytest.raises(ConfigError, match="region is no file"):
        open_region(str(tmp_path / "region"), SIZE, 1)


@pytest.mark.parametrize("wrong", [SIZE - 4096, SIZE + 4096])
def test_a_region_of_another_size_is_refused(folder: Path, wrong: int) -> None:
    """Two processes of one engine with two configurations."""
    path = str(folder / "region")
    region = create_region(path, SIZE)
    for opening in (join_region, open_region):
        with pytest.raises(ConfigError, match=rf"{path} has {SIZE} bytes, .* {wrong}.*must give it one size"):
            opening(path, wrong, 0.2)
    assert os.path.exists(path)
    region.close()


def test_who_comes_first_waits_for_the_region(folder: Path) -> None:
    path = folder / "region"
    with pytest.raises(ConfigError, match="does not exist, and no process made it"):
        join_region(str(path), SIZE, 0.05)
    with member(path) as child:
        region = join_region(str(path), SIZE, 60)
        assert os.fstat(region.fd).st_ino == inode_of(child)
        region.close()


def test_who_joins_does_not_wait_for_a_maker_that_stopped(folder: Path) -> None:
    """It is still there and holds the file, but adds no memory to it."""
    path = folder / "region"
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    with pytest.raises(ConfigError, match=f"held by another process, which has reserved 0 of {SIZE} bytes in .* too slowly, or not at all"):
        join_region(str(path), SIZE, 0.05)
    os.close(fd)


@pytest.mark.parametrize("opening", [join_region, open_region])
def test_who_joins_waits_as_long_as_memory_is_being_reserved(
    opening: Callable[..., Region], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which takes minutes where a host has much of it, and longer than the file may stand still."""
    path = folder / "region"
    monkeypatch.setattr(region_module, "_RESERVE_BYTES_PER_S", 1e6)
    started = threading.Event()

    def reserve() -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        for part in range(10):
            # As `fallocate` does it: there is more and more memory, and no length until all of it is there.
            fallocate(fd, KEEP_LENGTH, part << 20, 1 << 20)
            started.set()
            time.sleep(0.4)
        os.ftruncate(fd, 10 << 20)
        done.wait(60)
        os.close(fd)

    done = threading.Event()
    maker = threading.Thread(target=reserve)
    maker.start()
    try:
        assert started.wait(60)
        region = opening(str(path), 10 << 20, 3.0)
        assert region.size_bytes == 10 << 20
        region.close()
    finally:
        done.set()
        maker.join(60)


def test_the_wait_for_memory_that_comes_very_slowly_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or an engine with a sick machine would never start, and never say why."""
    path = folder / "region"
    monkeypatch.setattr(region_module, "_RESERVE_BYTES_PER_S", 1e12)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    stop = threading.Event()

    def reserve() -> None:
        for part in range(2000):
            fallocate(fd, KEEP_LENGTH, part << 12, 1 << 12)
            if stop.wait(0.01):
                return

    maker = threading.Thread(target=reserve)
    maker.start()
    try:
        with pytest.raises(ConfigError, match=rf"has reserved \d+ of {1 << 30} bytes in .* too slowly"):
            join_region(str(path), 1 << 30, 0.3)
    finally:
        stop.set()
        maker.join(60)
        os.close(fd)


def test_four_processes_that_open_a_region_at_once_share_one(folder: Path) -> None:
    path = folder / "region"
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(member(path, place=place)) for place in range(4)]
        inodes = {inode_of(child) for child in children}
        region = open_region(str(path), SIZE, 60)
        assert inodes == {os.fstat(region.fd).st_ino}
        assert bytes(region.view[:4]) == b"\1\2\3\4"
        region.close()


def test_four_processes_replace_what_a_dead_engine_left_and_share_the_new_one(folder: Path) -> None:
    """To join it would be to read a dead engine's plan; to replace it twice would be two regions."""
    path = folder / "region"
    path.write_bytes(b"\xff" * SIZE)
    before = path.stat().st_ino
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(member(path, place=place)) for place in range(4)]
        inodes = {inode_of(child) for child in children}
        region = join_region(str(path), SIZE, 60)
        assert inodes == {os.fstat(region.fd).st_ino}
        assert before not in inodes
        assert bytes(region.view[:5]) == b"\1\2\3\4\0"
        region.close()


def test_what_dead_processes_left_is_not_joined(folder: Path) -> None:
    path = folder / "region"
    path.write_bytes(bytes(SIZE))
    with pytest.raises(ConfigError, match=f"has {SIZE} bytes and no process uses it: whoever made it ended"):
        join_region(str(path), SIZE, 0.05)
    assert path.exists(), "it is not the joiner's to remove"


def test_a_region_that_a_process_uses_is_not_abandoned_until_it_ends(folder: Path) -> None:
    path = folder / "region"
    with member(path) as child:
        inode_of(child)
        assert not is_abandoned(str(path))
        assert sweep_regions(str(folder), "region") == []
        child.send_signal(signal.SIGKILL)
        child.wait(60)
    assert is_abandoned(str(path))
    assert sweep_regions(str(folder), "region") == [str(path)]


def test_a_region_that_is_mapped_though_its_descriptor_is_closed_is_not_abandoned(folder: Path) -> None:
    path = str(folder / "region")
    region = create_region(path, SIZE)
    view = region.view[:1]
    region.close()
    assert not is_abandoned(path)
    view.release()


def test_a_sweep_takes_what_matches_and_leaves_the_rest(folder: Path, tmp_path: Path) -> None:
    for name in ("kv_1.mmap", "kv_2.mmap", "kv_2.mmap.rank0", "other"):
        (folder / name).write_bytes(b"x")
    (tmp_path / "target").write_bytes(b"x")
    (folder / "kv_3.mmap").symlink_to(tmp_path / "target")
    used = create_region(str(folder / "kv_4.mmap"), 4096)
    assert sweep_regions(str(folder), r"kv_\d+\.mmap(\.rank\d)?", keep=["kv_2.mmap"]) == [str(folder / "kv_1.mmap")]
    assert {path.name for path in folder.iterdir()} == {"kv_2.mmap", "kv_2.mmap.rank0", "kv_3.mmap", "kv_4.mmap", "other"}
    used.close()


def test_engines_that_are_killed_again_and_again_fill_nothing(folder: Path) -> None:
    """LEAK-01: each under a name of its own, as every engine has."""
    in_use = []
    for start in range(5):
        sweep_regions(str(folder), r"region-\d")
        with member(folder / f"region-{start}") as child:
            inode_of(child)
            in_use.append(sum(path.stat().st_blocks for path in folder.iterdir()))
            os.kill(child.pid, signal.SIGKILL)
            child.wait(60)
    assert in_use == in_use[:1] * 5
    assert len(list(folder.iterdir())) == 1


def test_what_another_process_is_about_to_remove_is_neither_joined_nor_removed(folder: Path) -> None:
    """It would remove the file that this one had made in its place. And who stays like that for good blocks nobody for long."""
    path = folder / "region"
    path.write_bytes(bytes(SIZE))
    with open(path, "rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        for opening in (join_region, open_region):
            with pytest.raises(ConfigError, match="region"):
                opening(str(path), SIZE, 0.1)
        assert sweep_regions(str(folder), "region") == []
        assert os.fstat(other.fileno()).st_ino == path.stat().st_ino
    assert sweep_regions(str(folder), "region") == [str(path)]


def test_a_lock_on_a_file_that_is_no_longer_there_allows_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening a file and locking it another process replaces it, and a third one is at the new one."""
    path = folder / "region"
    path.write_bytes(bytes(SIZE))
    real = fcntl.flock
    third: list[int] = []

    def late(fd: int, how: int) -> None:
        if not third:
            path.unlink()
            path.write_bytes(bytes(SIZE))
            third.append(os.open(path, os.O_RDONLY))
            real(third[0], fcntl.LOCK_EX)
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(ConfigError, match="comes and goes"):
        open_region(str(path), SIZE, 0.1)
    assert os.fstat(third[0]).st_ino == path.stat().st_ino
    os.close(third[0])
    open_region(str(path), SIZE, 5).close()
