"""Real filesystems that are full, out of inodes or read-only. They need the right to mount; CI has it."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore_sdk.backend import ConfigError, Deadline, DeleteStatus, Failure, GetStatus, Mode, NoSpaceError, PutStatus, ReadOnlyError
from kvstore_sdk_backends.fs import FsBackend

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount; test_faults.py shows the like with injected errors")


def later() -> Deadline:
    return Deadline.after(30.0)


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts a small tmpfs with some options, or changes those of one."""
    mounted: list[Path] = []

    def run(options: str, remount: bool = False) -> Path:
        where = tmp_path / "volume"
        if not remount:
            where.mkdir()
            mounted.append(where)
        subprocess.run(["mount", "-t", "tmpfs", "-o", ("remount," if remount else "") + options, "none", where], check=True, timeout=30)
        return where

    yield run
    for where in mounted:
        # Lazily: a test that failed may still have a file open.
        subprocess.run(["umount", "-l", where], check=True, timeout=30)


def fill(store: FsBackend, desk: Any, size: int) -> tuple[int, Any]:
    """Store records until one fails: (how many were stored, the failed result)."""
    item = desk.put_item("", os.urandom(size))
    for number in range(1000):
        [result] = store.put([type(item)(f"v1/{number}", item.parts)], later())
        if result.status is not PutStatus.STORED:
            return number, result
    raise AssertionError("the volume did not fill up")


@pytest.mark.parametrize(("options", "size"), [("size=1m", 131072), ("size=8m,nr_inodes=60", 4096)])
def test_a_full_volume_fails_the_put_alone(
    mount: Callable[..., Path], open_folder: Callable[..., FsBackend], desk: Any, left_behind: Any, options: str, size: int
) -> None:
    """No room for bytes, and no room for another file."""
    volume = mount(options)
    store = open_folder(volume / "kv")
    count, result = fill(store, desk, size)
    assert count > 3
    assert result.status is PutStatus.FAILED
    assert isinstance(result.error, NoSpaceError)
    assert f"{volume}/kv/v1/{count}: ENOSPC" in str(result.error)
    names = [f"v1/{number}" for number in range(count + 1)]
    assert store.exists(names, later()) == [True] * count + [False]
    assert [path for path in (volume / "kv/.kvstore/tmp").rglob("*") if path.is_file() and path.suffix != ".lock"] == []
    usage = store.usage(later())
    assert (usage.records, usage.used_bytes) == (count, count * size)
    assert desk.get(store, "v1/0", size)[0].status is GetStatus.FOUND
    # What has room again is used again.
    assert store.delete(["v1/0", "v1/1"], later()) == [DeleteStatus.DELETED] * 2
    assert desk.put(store, "v1/again", os.urandom(size)).status is PutStatus.STORED


def test_capacity_is_what_the_store_can_grow_to(mount: Callable[..., Path], open_folder: Callable[..., FsBackend], desk: Any) -> None:
    """OBS-01"""
    volume = mount("size=4m")
    (volume / "others").write_bytes(bytes(1 << 20))
    store = open_folder(volume / "kv")
    desk.put(store, "a", os.urandom(1 << 20))
    usage = store.usage(later())
    assert usage.used_bytes == 1 << 20
    assert usage.capacity_bytes is not None
    assert 3 * (1 << 20) - 262144 <= usage.capacity_bytes <= 3 * (1 << 20)


@pytest.mark.parametrize(("options", "size"), [("size=1m", 131072), ("size=8m,nr_inodes=60", 4096)])
def test_a_full_store_can_be_opened_and_read_and_stores_again_when_there_is_room(
    mount: Callable[..., Path], open_folder: Callable[..., FsBackend], desk: Any, caplog: pytest.LogCaptureFixture, options: str, size: int
) -> None:
    """An engine that restarts on a full disk keeps the use of what is stored."""
    volume = mount(options)
    first = open_folder(volume / "kv")
    fill(first, desk, size)
    # Whatever is left, in blocks or files.
    first.close()
    filler = volume / "filler"
    filler.mkdir()
    with contextlib.suppress(OSError):
        for number in range(10_000):
            (filler / str(number)).write_bytes(bytes(4096))
    with caplog.at_level(logging.WARNING):
        store = open_folder(volume / "kv")
    assert "no space" in caplog.text
    assert "loading works" in caplog.text
    assert desk.get(store, "v1/0", size)[0].status is GetStatus.FOUND
    result = desk.put(store, "v1/new", os.urandom(size))
    assert result.status is PutStatus.FAILED
    assert isinstance(result.error, NoSpaceError)
    subprocess.run(["rm", "-r", filler], check=True, timeout=30)
    store.delete(["v1/0", "v1/1"], later())
    assert desk.put(store, "v1/new", os.urandom(size)).status is PutStatus.STORED
    store.close()
    assert list((volume / "kv/.kvstore/tmp").iterdir()) == []


def test_a_new_store_on_a_full_volume_is_one_error(mount: Callable[..., Path], open_folder: Callable[..., FsBackend]) -> None:
    volume = mount("size=1m,nr_inodes=4")
    with pytest.raises(NoSpaceError, match=f"fs open {volume}/kv: ENOSPC"):
        open_folder(volume / "kv")


def test_a_read_only_mount_is_refused_and_can_be_read(mount: Callable[..., Path], open_folder: Callable[..., FsBackend], desk: Any) -> None:
    volume = mount("size=1m")
    writer = open_folder(volume / "kv")
    desk.put(writer, "a", b"x")
    writer.close()
    mount("ro", remount=True)
    with pytest.raises(ConfigError, match="read-only filesystem; remount it, or set read_only=true") as caught:
        open_folder(volume / "kv")
    assert caught.value.field == "location"
    reader = open_folder(volume / "kv", read_only=True)
    assert reader.exists(["a", "b"], later()) == [True, False]
    assert desk.get(reader, "a", 1)[1] == b"x"
    assert [entry.name for entry in reader.list("", later()).entries] == ["a"]


def test_a_volume_that_becomes_read_only_fails_each_put(
    mount: Callable[..., Path], open_folder: Callable[..., FsBackend], desk: Any
) -> None:
    """As filesystems do after an error."""
    volume = mount("size=1m")
    store = open_folder(volume / "kv")
    desk.put(store, "a", b"x")
    # The kernel waits for files that are open for writing, such as the lock, unless it is the filesystem that gives up.
    store._records.end()
    mount("ro", remount=True)
    for mode in Mode:
        result = desk.put(store, "b", b"x", mode)
        assert result.status is PutStatus.FAILED
        assert isinstance(result.error, ReadOnlyError)
    [deleted] = store.delete(["a"], later())
    assert isinstance(deleted, Failure)
    assert isinstance(deleted.error, ReadOnlyError)
    assert desk.get(store, "a", 1)[0].status is GetStatus.FOUND
    with pytest.raises(ReadOnlyError, match="EROFS"):
        store.sweep()
    store.close()
    mount("rw", remount=True)
    again = open_folder(volume / "kv")
    assert desk.put(again, "b", b"x").status is PutStatus.STORED


def test_another_filesystem_below_the_folder_is_an_error_and_no_copy(
    mount: Callable[..., Path], open_folder: Callable[..., FsBackend], desk: Any, folder: Path, left_behind: Any
) -> None:
    """A record that had to be copied there could be seen half."""
    volume = mount("size=1m")
    store = open_folder()
    (folder / "v1").symlink_to(volume)
    result = desk.put(store, "v1/a", b"x")
    assert result.status is PutStatus.FAILED
    assert "EXDEV" in str(result.error)
    assert list(volume.iterdir()) == []
    assert left_behind() == []
