"""Processes of two users that share one folder, as docs/backends/fs.md describes it."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore_sdk.backend import ConfigError, Deadline, DeleteStatus, DeniedError, GetStatus, InvalidError, Mode, PutStatus
from kvstore_sdk_backends.fs import FsBackend, open_fs

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become two users")

GROUP = 54321
ALICE, BOB = 54322, 54323
RECORD = os.urandom(8192)


@contextlib.contextmanager
def as_user(uid: int, umask: int = 0o022) -> Iterator[None]:
    """A user with a primary group of their own, in the common one as well."""
    groups, before = os.getgroups(), os.umask(umask)
    os.setgroups([GROUP])
    os.setegid(uid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)
        os.umask(before)


@pytest.fixture
def root() -> Iterator[Path]:
    """What an administrator prepares: a folder of the common group, writable for it, whose content gets that group."""
    above = Path(tempfile.mkdtemp(prefix="kvstore-test-"))
    above.chmod(0o755)
    # What Python loads on first use may lie where only root can read.
    open_fs(str(above / "first")).close()
    made = above / "kv"
    made.mkdir()
    os.chown(made, 0, GROUP)
    made.chmod(0o2770)
    yield made
    shutil.rmtree(above)


def opened(root: Path, uid: int) -> FsBackend:
    with as_user(uid):
        return open_fs(str(root))


def test_two_users_of_one_group_share_a_store(root: Path, desk: Any) -> None:
    """With the usual umask, which would make every folder the first one's own."""
    alice, bob = opened(root, ALICE), opened(root, BOB)
    with as_user(ALICE):
        assert desk.put(alice, "v1/ns/00/a", RECORD).status is PutStatus.STORED
    with as_user(BOB):
        assert desk.get(bob, "v1/ns/00/a", len(RECORD))[1] == RECORD
        assert desk.put(bob, "v1/ns/00/b", RECORD).status is PutStatus.STORED
        assert desk.put(bob, "v1/ns/00/a", RECORD, Mode.REPLACE).status is PutStatus.STORED
        assert bob.delete(["v1/ns/00/a"], Deadline.after(5)) == [DeleteStatus.DELETED]
    for folder in [path for path in root.rglob("*") if path.is_dir()]:
        facts = folder.stat()
        assert (stat.S_IMODE(facts.st_mode), facts.st_gid) == (0o2770, GROUP), folder
    for uid, store in ((ALICE, alice), (BOB, bob)):
        with as_user(uid):
            store.close()
    assert list((root / ".kvstore/tmp").iterdir()) == []


def test_one_user_sweeps_what_a_dead_process_of_another_left(root: Path) -> None:
    alice, bob = opened(root, ALICE), opened(root, BOB)
    with as_user(ALICE):
        Path(alice._records._writer.new_path()).write_bytes(b"half a record")
    with as_user(BOB):
        assert bob.sweep() == 0, "the lock of a living process counts, whoever's it is"
    alice._records.forget()
    with as_user(BOB):
        assert bob.sweep() == 1
        bob.close()
    assert list((root / ".kvstore/tmp").iterdir()) == []


def test_a_folder_that_is_one_users_own_is_refused_to_the_other(root: Path) -> None:
    os.chown(root, ALICE, ALICE)
    root.chmod(0o755)
    opened(root, ALICE).close()
    with pytest.raises(ConfigError, match="permission denied"):
        opened(root, BOB)


def test_a_record_that_may_not_be_replaced_says_nothing_about_the_store(root: Path, desk: Any) -> None:
    """In a folder with the sticky bit only its owner may replace it. A tier must not take that for a store that fails."""
    root.chmod(0o3770)
    alice, bob = opened(root, ALICE), opened(root, BOB)
    with as_user(ALICE):
        assert desk.put(alice, "v1/ns/00/a", RECORD).status is PutStatus.STORED
    with as_user(BOB):
        result = desk.put(bob, "v1/ns/00/a", RECORD, Mode.REPLACE)
        assert result.status is PutStatus.FAILED
        assert isinstance(result.error, InvalidError)
        assert f"{root}/v1/ns/00/a: what is there may not be replaced" in str(result.error)
        assert desk.put(bob, "v1/ns/00/b", RECORD).status is PutStatus.STORED
    (root / "v1/ns/00").chmod(0o550)
    with as_user(BOB):
        for name in ("a", "c"):
            result = desk.put(bob, f"v1/ns/00/{name}", RECORD, Mode.REPLACE)
            assert isinstance(result.error, DeniedError), "this does"
        bob.close()
    with as_user(ALICE):
        alice.close()
    assert list((root / ".kvstore/tmp").iterdir()) == []


def test_a_umask_that_hides_records_is_an_answer(root: Path, desk: Any) -> None:
    """The one thing that is left to the umask."""
    alice, bob = opened(root, ALICE), opened(root, BOB)
    with as_user(ALICE, 0o077):
        desk.put(alice, "v1/ns/00/a", RECORD)
        alice.close()
    with as_user(BOB):
        result = desk.get(bob, "v1/ns/00/a", len(RECORD))[0]
        assert result.status is GetStatus.FAILED
        assert isinstance(result.error, DeniedError)
        bob.close()
