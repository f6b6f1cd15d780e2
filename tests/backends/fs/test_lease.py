"""Who evicts: one at a time, the next one when it is gone, and no harm when it was only thought to be."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore_sdk.backend import Deadline, NoSpaceError, PutStatus
from kvstore_sdk_backends.fs import FsBackend, tempfiles
from kvstore_sdk_backends.fs import evictor as evictor_module
from kvstore_sdk_backends.fs import space as space_module

PAGE = 4096
MANY = 40
ELSEWHERE = f"{'f' * 32}-1-{'0' * 16}"
"""A member on a host that is not this one."""


def record(number: int, size: int = PAGE) -> bytes:
    return bytes([number % 251]) * size


def bytes_of(folder: Path) -> int:
    """Of all records. What goes while they are counted is none."""
    total = 0
    for above, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += 0 if "/.kvstore" in above else os.stat(f"{above}/{name}").st_size
    return total


def eventually(true: Callable[[], bool], limit_s: float = 20.0) -> bool:
    until_s = time.monotonic() + limit_s
    while not true() and time.monotonic() < until_s:
        time.sleep(0.005)
    return true()


class LedgerFile:
    """The ledger, as others write it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / ".kvstore/space/ledger"

    def body(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(self.path.read_text())
        except FileNotFoundError:
            return {"owner": "", "counting": True}
        return found

    def write(self, **values: Any) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_name("test.new")
        new.write_text(json.dumps({"owner": "", "counting": False, "max_bytes": 0, "members": {}} | values))
        new.rename(self.path)

    def age(self, seconds: float) -> None:
        then = time.time() - seconds
        os.utime(self.path, (then, then))

    def is_led_by(self, store: FsBackend) -> bool:
        body = self.body()
        return body["owner"] == store._records.identity() and not body["counting"]


@pytest.fixture
def ledger(folder: Path) -> LedgerFile:
    return LedgerFile(folder)


@pytest.fixture
def short_lease(monkeypatch: pytest.MonkeyPatch) -> float:
    lease_s = 0.4
    monkeypatch.setattr(evictor_module, "LEASE_S", lease_s)
    monkeypatch.setattr(space_module, "LEASE_S", lease_s)
    monkeypatch.setattr(space_module, "_AGAIN_S", lease_s / 4)
    return lease_s


def test_one_of_those_that_share_a_folder_evicts(
    open_folder: Callable[..., FsBackend], folder: Path, desk: Any, ledger: LedgerFile
) -> None:
    stores = [open_folder(max_bytes=10 * PAGE) for _ in range(3)]
    for number in range(MANY):
        for place, store in enumerate(stores):
            assert desk.put(store, f"{place}/{number}", record(number)).status is PutStatus.STORED
            assert bytes_of(folder) <= 10 * PAGE
    assert len([thread for thread in threading.enumerate() if thread.name == "kvstore-fs-evictor"]) == 1
    assert sum(bool(store.evicted_records) for store in stores) == 1
    assert sum(store.evicted_records for store in stores) == 3 * MANY - 10


def test_the_lease_of_a_killed_process_of_this_host_is_taken_at_once(
    open_folder: Callable[..., FsBackend], folder: Path, desk: Any, child: Callable[..., Any], ledger: LedgerFile, tmp_path: Path
) -> None:
    note = tmp_path / "note"
    note.touch()
    hoarder = child("hoard", folder, 20 * 65536, 0, 1_000_000, note)
    assert eventually(lambda: bool(ledger.body()["owner"]))
    owner = ledger.body()["owner"]
    store = open_folder(max_bytes=20 * 65536)
    assert desk.put(store, "a", record(1)).status is PutStatus.STORED
    assert ledger.body()["owner"] == owner
    hoarder.end()
    began_s = time.monotonic()
    for number in range(MANY):
        assert desk.put(store, f"b/{number}", record(number, 65536)).status is PutStatus.STORED
        assert bytes_of(folder) <= 20 * 65536
    assert time.monotonic() - began_s < evictor_module.LEASE_S / 2
    assert ledger.is_led_by(store)
    # Nothing is kept for it any more.
    assert eventually(lambda: [*ledger.body()["members"]] == [store._records.identity()])


@pytest.mark.parametrize("clock_s", [0.0, -100_000.0, 100_000.0], ids=["now", "in the future", "long ago"])
def test_the_lease_of_another_host_is_taken_when_it_has_run_out(
    open_folder: Callable[..., FsBackend], folder: Path, desk: Any, ledger: LedgerFile, short_lease: float, clock_s: float
) -> None:
    """By the filesystem's clock, or, when that was set, by watching it."""
    open_folder().close()
    ledger.write(owner=ELSEWHERE, max_bytes=10 * PAGE)
    ledger.age(clock_s)
    began_s = time.monotonic()
    store = open_folder(max_bytes=10 * PAGE)
    assert desk.put(store, "a", record(1)).status is PutStatus.STORED
    took_s = time.monotonic() - began_s
    assert ledger.is_led_by(store)
    assert took_s >= (0.0 if clock_s > 0 else short_lease)
    assert took_s < 10


def test_the_bound_of_an_owner_that_is_gone_is_not_kept(
    open_folder: Callable[..., FsBackend], folder: Path, desk: Any, ledger: LedgerFile
) -> None:
    open_folder().close()
    ledger.write(owner=ELSEWHERE, max_bytes=PAGE)
    ledger.age(100)
    store = open_folder(max_bytes=10 * PAGE)
    assert desk.put(store, "a", record(1, 8 * PAGE)).status is PutStatus.STORED


def test_a_living_owner_elsewhere_keeps_the_lease(
    open_folder: Callable[..., FsBackend], folder: Path, desk: Any, ledger: LedgerFile, short_lease: float
) -> None:
    open_folder().close()
    ledger.write(owner=ELSEWHERE, max_bytes=10 * PAGE)
    store = open_folder(max_bytes=10 * PAGE)
    over = threading.Event()

    def live() -> None:
        while not over.wait(short_lease / 8):
            os.utime(ledger.path)

    other = threading.Thread(target=live, name="elsewhere")
    other.start()
    try:
        [result] = store.put([desk.put_item("a", record(1))], Deadline.after(4 * short_lease))
        assert isinstance(result.error, NoSpaceError)
    finally:
        over.set()
        other.join(10)
    assert ledger.body()["owner"] == ELSEWHERE
    assert desk.put(store, "a", record(1)).status is PutStatus.STORED


def test_who_lost_the_lease_writes_and_evicts_no_more(
    open_folder: Callable[..., FsBackend], folder: Path, desk: Any, ledger: LedgerFile
) -> None:
    """It was stopped for a while, and somebody took over: no word of it, and the grants of the other stand."""
    store = open_folder(max_bytes=10 * PAGE)
    for number in range(10):
        desk.put(store, f"a/{number}", record(number))
    ledger.write(owner=ELSEWHERE, max_bytes=10 * PAGE, members={ELSEWHERE: [1, 5, 0, 0, 10 * PAGE, 0]})
    [result] = store.put([desk.put_item("b", record(1))], Deadline.after(0.5))
    assert result.status is PutStatus.TIMED_OUT
    assert ledger.body()["owner"] == ELSEWHERE
    assert ledger.body()["members"] == {ELSEWHERE: [1, 5, 0, 0, 10 * PAGE, 0]}
    assert store.evicted_records == 0
    assert [thread for thread in threading.enumerate() if thread.name == "kvstore-fs-evictor"] == []
    store.close()
    assert ledger.body()["owner"] == ELSEWHERE


def test_grants_of_the_last_owner_are_honoured_until_they_run_out(
    open_folder: Callable[..., FsBackend], folder: Path, desk: Any, ledger: LedgerFile, short_lease: float
) -> None:
    """ATM-09: a member on another host may be writing what its evictor, dead by now, had granted it."""
    before = open_folder()
    for number in range(4):
        desk.put(before, f"a/{number}", record(number))
    before.close()
    ledger.write(owner=ELSEWHERE, max_bytes=10 * PAGE, members={ELSEWHERE: [7, 100 * PAGE, 96 * PAGE, 0, 10 * PAGE, 0]})
    ledger.age(100)
    store = open_folder(max_bytes=10 * PAGE)
    for number in range(4):
        desk.put(store, f"b/{number}", record(number))
        assert bytes_of(folder) + 4 * PAGE <= 10 * PAGE
    time.sleep(short_lease)
    # Nothing was heard of it: what it was granted is taken for written, then the files are counted, and it was not.
    for number in range(8):
        desk.put(store, f"c/{number}", record(number))
    assert eventually(lambda: desk.put(store, f"d/{time.monotonic_ns()}", record(1)) and bytes_of(folder) == 10 * PAGE)


@pytest.mark.parametrize("locks", ["kernels of their own", "no locks"])
def test_two_hosts_keep_one_bound(
    open_folder: Callable[..., FsBackend], folder: Path, desk: Any, monkeypatch: pytest.MonkeyPatch, short_lease: float, locks: str
) -> None:
    """Different kernels, or a mount without locks: nothing but the files tells one of the other."""
    if locks == "no locks":

        def refuse(fd: int, operation: int) -> None:
            raise OSError(95, "no locks here")

        monkeypatch.setattr(fcntl, "flock", refuse)
    hosts = itertools.cycle(["a" * 32, "b" * 32])
    stores = []
    for _ in range(4):
        host = next(hosts)
        monkeypatch.setattr(tempfiles, "_kernel", lambda host=host: host)
        stores.append(open_folder(max_bytes=20 * PAGE))
    monkeypatch.setattr(tempfiles, "_kernel", lambda: "c" * 32)
    items = [[desk.put_item(f"{place}/{number}", record(number)) for number in range(MANY)] for place in range(4)]
    statuses: list[PutStatus] = []

    def run(store: FsBackend, puts: list[Any]) -> None:
        statuses.extend(store.put([put], Deadline.after(30))[0].status for put in puts)

    threads = [threading.Thread(target=run, args=pair, name="storing") for pair in zip(stores, items, strict=True)]
    for thread in threads:
        thread.start()
    most = 0
    while any(thread.is_alive() for thread in threads):
        most = max(most, bytes_of(folder))
    for thread in threads:
        thread.join(30)
    assert statuses == [PutStatus.STORED] * 4 * MANY
    # A walk is not of one moment.
    assert most <= (20 + 4) * PAGE
    assert bytes_of(folder) <= 20 * PAGE
    # The one that evicts goes: the others go on, when its lease was given up, or has run out.
    for store in stores[:3]:
        store.close()
        assert desk.put(stores[3], f"last/{stores.index(store)}", record(1)).status is PutStatus.STORED


def test_of_many_that_take_the_lease_at_once_one_has_it(
    open_folder: Callable[..., FsBackend], folder: Path, desk: Any, ledger: LedgerFile
) -> None:
    stores = [open_folder(max_bytes=30 * PAGE) for _ in range(6)]
    for turn in range(5):
        # Nobody's: all of them find that at the same time.
        ledger.write(owner="", members=ledger.body()["members"])
        items = [desk.put_item(f"{turn}/{place}", record(place)) for place in range(6)]
        results: list[Any] = []
        threads = [
            threading.Thread(target=lambda s=store, i=item, r=results: r.extend(s.put([i], Deadline.after(30))), name="storing")
            for store, item in zip(stores, items, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(40)
        assert [result.status for result in results] == [PutStatus.STORED] * 6
        assert bytes_of(folder) <= 30 * PAGE
    assert eventually(lambda: len([t for t in threading.enumerate() if t.name == "kvstore-fs-evictor"]) == 1)
    assert sum(ledger.is_led_by(store) for store in stores) == 1


@pytest.mark.parametrize(
    "rubbish", ["fifo", "folder", "full folder", "link", "empty", "text", "list", "other types", "huge", "old grants", "deep"]
)
def test_a_ledger_that_cannot_be_understood_is_replaced(
    open_folder: Callable[..., FsBackend], folder: Path, desk: Any, ledger: LedgerFile, rubbish: str, tmp_path: Path
) -> None:
    open_folder().close()
    path = ledger.path
    path.parent.mkdir()
    if rubbish == "fifo":
        os.mkfifo(path)
    elif rubbish.endswith("folder"):
        path.mkdir()
        if rubbish == "full folder":
            (path / "x").touch()
    elif rubbish == "link":
        (tmp_path / "precious").write_text("precious")
        path.symlink_to(tmp_path / "precious")
    elif rubbish == "huge":
        with path.open("wb") as target:
            target.truncate(1 << 40)
    else:
        texts = {
            "empty": "",
            "text": "\0\xff{",
            "list": "[1]",
            "other types": '{"owner": 1, "counting": 0, "max_bytes": "x", "members": {"a": 3}}',
            "old grants": '{"owner": "x", "counting": 0, "max_bytes": 5, "members": {"a": [1, 2]}}',
            "deep": "[" * 100_000,
        }
        path.write_text(texts[rubbish])
    store = open_folder(max_bytes=10 * PAGE)
    if rubbish == "full folder":
        [result] = store.put([desk.put_item("a", record(1))], Deadline.after(1.5))
        assert result.status is PutStatus.FAILED
        shutil.rmtree(path)
    for number in range(MANY):
        assert desk.put(store, f"b/{number}", record(number)).status is PutStatus.STORED
    assert bytes_of(folder) == 10 * PAGE
    assert ledger.is_led_by(store)
    assert rubbish != "link" or (tmp_path / "precious").read_text() == "precious"


def test_other_files_beside_the_ledger_are_left_alone(
    open_folder: Callable[..., FsBackend], folder: Path, desk: Any, ledger: LedgerFile
) -> None:
    open_folder().close()
    ledger.path.parent.mkdir()
    names = ["notes.txt", "a.1.2", f"{ELSEWHERE}.1.2.3", "a.99999999999999999999999.0.1.1", ".x", "a.b.c.d.e"]
    for name in names:
        (ledger.path.parent / name).touch()
    (ledger.path.parent / "a.1.0.5.40960").mkdir()
    os.mkfifo(ledger.path.parent / "b.1.0.0.40960")
    store = open_folder(max_bytes=10 * PAGE)
    for number in range(MANY):
        assert desk.put(store, f"b/{number}", record(number)).status is PutStatus.STORED
    assert {*names, "a.1.0.5.40960"} <= set(os.listdir(ledger.path.parent))
    assert bytes_of(folder) <= 10 * PAGE


def test_a_stopped_process_comes_back_to_a_grant_that_has_run_out(
    open_folder: Callable[..., FsBackend], folder: Path, desk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks again, whatever it had left."""
    store = open_folder(max_bytes=1000 * PAGE)
    desk.put(store, "a", record(1))
    assert store._space
    left = store._space._allowance - store._space._settled
    assert left >= PAGE
    serial = store._space._serial
    desk.put(store, "b", record(1))
    assert store._space._serial == serial
    real = space_module.boot_s
    monkeypatch.setattr(space_module, "boot_s", lambda: real() + evictor_module.LEASE_S)
    desk.put(store, "c", record(1))
    assert store._space._serial == serial + 1


def test_a_folder_that_is_no_store_any_more_is_not_made_one(
    open_folder: Callable[..., FsBackend], folder: Path, desk: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Unmounted: nothing is written to the mount point, and it goes on when the volume is back."""
    store = open_folder(max_bytes=10 * PAGE)
    desk.put(store, "a", record(1))
    folder.rename(folder.with_name("volume"))
    folder.mkdir()
    with caplog.at_level(logging.WARNING):
        result = desk.put(store, "b", record(1))
        time.sleep(0.2)
    assert result.status is PutStatus.FAILED
    assert "is its volume mounted?" in str(result.error)
    assert [*folder.iterdir()] == []
    folder.rmdir()
    folder.with_name("volume").rename(folder)
    for number in range(MANY):
        assert desk.put(store, f"c/{number}", record(number)).status is PutStatus.STORED
    assert bytes_of(folder) == 10 * PAGE


@pytest.mark.parametrize("what", [".kvstore/space", ".kvstore/tmp"])
def test_what_somebody_removes_from_under_it_is_made_again(
    open_folder: Callable[..., FsBackend], folder: Path, desk: Any, what: str
) -> None:
    store = open_folder(max_bytes=10 * PAGE)
    for number in range(MANY):
        if number % 7 == 3:
            shutil.rmtree(folder / what)
        assert desk.put(store, f"c/{number}", record(number)).status is PutStatus.STORED
        # What was being written in that instant may come on top, until that is known.
        assert bytes_of(folder) <= 11 * PAGE
    desk.put(store, "d", record(1))
    assert eventually(lambda: bytes_of(folder) <= 10 * PAGE)
    assert len(list(folder.rglob("c/*"))) >= 9
