"""Who evicts: one at a time, the next one when it is gone, and no harm when it was only thought to be."""

from __future__ import annotations

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
from bounded_bench import LIMIT_S, PAGE, ask_in_vain, bytes_of, eventually, later, record

from kvstore_sdk.backend import Deadline, NoSpaceError, PutStatus
from kvstore_sdk_backends.fs import FsBackend, tempfiles
from kvstore_sdk_backends.fs import lease as lease_module
from kvstore_sdk_backends.fs import space as space_module
from kvstore_sdk_backends.fs.ledger import Ledger, Reading

MANY = 40
BOUND = 100
"""Pages, where owners are stopped."""
ELSEWHERE = f"{'f' * 32}-1-{'0' * 16}"
"""A member on a host that is not this one."""


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

    def read(self) -> Reading:
        return Ledger(str(self.path.parents[2])).read()

    def write(self, **values: Any) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_name("test.new")
        new.write_text(json.dumps({"owner": "", "counting": False, "complete": True, "max_bytes": 0, "members": {}} | values))
        new.rename(self.path)

    def age(self, seconds: float) -> None:
        then = time.time() - seconds
        os.utime(self.path, (then, then))

    def is_led_by(self, store: FsBackend) -> bool:
        found = self.read()
        return found.owner == store._records.identity() and not found.counting

    def comes_to_be_led_by(self, store: FsBackend, desk: Any) -> bool:
        """Where the machine stood still for a short lease its owner gave it up, and takes it again when somebody asks for room."""
        numbers = itertools.count()
        return eventually(lambda: self.is_led_by(store) or (desk.put(store, f"asks/{next(numbers)}", record(1)) and False))


@pytest.fixture
def ledger(folder: Path) -> LedgerFile:
    return LedgerFile(folder)


@pytest.fixture
def short_lease(set_lease: Callable[[float], None]) -> float:
    set_lease(0.4)
    return 0.4


def evictors() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kvstore-fs-evictor"]


def test_one_of_those_that_share_a_folder_evicts(
    open_folder: Callable[..., FsBackend], folder: Path, desk: Any, ledger: LedgerFile
) -> None:
    stores = [open_folder(max_bytes=10 * PAGE) for _ in range(3)]
    for number in range(MANY):
        for place, store in enumerate(stores):
            assert desk.put(store, f"{place}/{number}", record(number)).status is PutStatus.STORED
            assert bytes_of(folder) <= 10 * PAGE
    assert len(evictors()) == 1
    assert sum(bool(store.evicted_records) for store in stores) == 1
    # Each count may count one record twice that was stored meanwhile, and evict one for it.
    assert 0 <= sum(store.evicted_records for store in stores) - (3 * MANY - 10) <= 3 * MANY // 10


def test_the_lease_of_a_killed_process_of_this_host_is_taken_at_once(
    open_folder: Callable[..., FsBackend],
    folder: Path,
    desk: Any,
    child: Callable[..., Any],
    ledger: LedgerFile,
    tmp_path: Path,
    set_lease: Callable[[float], None],
) -> None:
    set_lease(LIMIT_S)
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
    # For half of it who stood still while he took it over waits.
    assert time.monotonic() - began_s < LIMIT_S - 5
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
    assert ledger.comes_to_be_led_by(store, desk)
    assert took_s >= (0.0 if clock_s > 0 else short_lease)


def test_the_bound_of_an_owner_that_is_gone_is_not_kept(
    open_folder: Callable[..., FsBackend], folder: Path, desk: Any, ledger: LedgerFile
) -> None:
    open_folder().close()
    ledger.write(owner=ELSEWHERE, max_bytes=PAGE)
    ledger.age(100)
    store = open_folder(max_bytes=10 * PAGE)
    assert desk.put(store, "a", record(1, 8 * PAGE)).status is PutStatus.STORED


def test_a_living_owner_elsewhere_keeps_the_lease(
    open_folder: Callable[..., FsBackend], folder: Path, desk: Any, ledger: LedgerFile, short_lease: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Ledger.read

    def read_while_it_lives(self: Ledger) -> Reading:
        os.utime(ledger.path)
        return real(self)

    open_folder().close()
    ledger.write(owner=ELSEWHERE, max_bytes=10 * PAGE)
    with monkeypatch.context() as living:
        # Whenever somebody looks it has just been touched, however long the machine stood still.
        living.setattr(Ledger, "read", read_while_it_lives)
        store = open_folder(max_bytes=10 * PAGE)
        result = ask_in_vain(store, desk.put_item("a", record(1)), 4 * short_lease)
        assert isinstance(result.error, NoSpaceError)
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
    assert eventually(lambda: not evictors())
    store.close()
    assert ledger.body()["owner"] == ELSEWHERE


def test_grants_of_the_last_owner_are_honoured_until_they_run_out(
    open_folder: Callable[..., FsBackend], folder: Path, desk: Any, ledger: LedgerFile, set_lease: Callable[[float], None]
) -> None:
    """ATM-09: a member on another host may be writing what its evictor, dead by now, had granted it."""
    before = open_folder()
    for number in range(4):
        desk.put(before, f"a/{number}", record(number))
    before.close()
    ledger.write(owner=ELSEWHERE, max_bytes=10 * PAGE, members={ELSEWHERE: [7, 100 * PAGE, 96 * PAGE, 0, 10 * PAGE, 0]})
    ledger.age(100)
    lease_s = 2.0
    set_lease(lease_s)
    began_s = lease_module.boot_s()
    store = open_folder(max_bytes=10 * PAGE)
    for number in range(4):
        desk.put(store, f"b/{number}", record(number))
        there = bytes_of(folder)
        assert there + 4 * PAGE <= 10 * PAGE or lease_module.boot_s() - began_s >= lease_s
    time.sleep(lease_s)
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
        statuses.extend(store.put([put], later())[0].status for put in puts)

    threads = [threading.Thread(target=run, args=pair, name="storing") for pair in zip(stores, items, strict=True)]
    for thread in threads:
        thread.start()
    most = 0
    while any(thread.is_alive() for thread in threads):
        began_s = time.monotonic()
        there = bytes_of(folder)
        # A walk is not of one moment, and says nothing when the machine stood still meanwhile.
        if time.monotonic() - began_s < 0.01:
            most = max(most, there)
    for thread in threads:
        thread.join(LIMIT_S)
    assert statuses == [PutStatus.STORED] * 4 * MANY
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
            threading.Thread(target=lambda s=store, i=item, r=results: r.extend(s.put([i], later())), name="storing")
            for store, item in zip(stores, items, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * LIMIT_S)
        assert [result.status for result in results] == [PutStatus.STORED] * 6
        assert bytes_of(folder) <= 30 * PAGE
    assert eventually(lambda: len(evictors()) == sum(ledger.is_led_by(store) for store in stores) == 1)


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
        assert ask_in_vain(store, desk.put_item("a", record(1))).status is PutStatus.FAILED
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
    open_folder: Callable[..., FsBackend], folder: Path, desk: Any, monkeypatch: pytest.MonkeyPatch, set_lease: Callable[[float], None]
) -> None:
    """It asks again, whatever it had left."""
    set_lease(20.0)
    store = open_folder(max_bytes=1000 * PAGE)
    desk.put(store, "a", record(1))
    assert store._space
    left = store._space._allowance - store._space._settled
    assert left >= PAGE
    serial = store._space._serial
    desk.put(store, "b", record(1))
    assert store._space._serial == serial
    real = space_module.boot_s
    monkeypatch.setattr(space_module, "boot_s", lambda: real() + lease_module.LEASE_S)
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
    # Room that was being given out in that instant may still count as taken.
    assert len(list(folder.rglob("c/*"))) >= 7


class Stop:
    """Holds up the first call of a function until `go_on`: what a stopped process looks like to others."""

    def __init__(self, real: Callable[..., Any], only: Callable[..., bool] = lambda *_: True) -> None:
        self._real = real
        self._only = only
        self._reached, self._over = threading.Event(), threading.Event()

    def __call__(self, *args: Any) -> Any:
        if self._only(*args) and not self._reached.is_set():
            self._reached.set()
            self._over.wait(100)
        return self._real(*args)

    def wait(self) -> None:
        assert self._reached.wait(LIMIT_S)

    def go_on(self) -> None:
        self._over.set()


@pytest.fixture
def open_on(open_folder: Callable[..., FsBackend], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], FsBackend]:
    """Opens the folder on a host of its own: none sees whether another lives."""

    def open_it(host: str) -> FsBackend:
        monkeypatch.setattr(tempfiles, "_kernel", lambda: host * 32)
        store = open_folder(max_bytes=BOUND * PAGE)
        monkeypatch.setattr(tempfiles, "_kernel", lambda: "e" * 32)
        return store

    return open_it


def fill(desk: Any, store: FsBackend, prefix: str, count: int, folder: Path) -> None:
    for number in range(count):
        assert desk.put(store, f"{prefix}/{number}", record(number)).status is PutStatus.STORED
        assert bytes_of(folder) <= BOUND * PAGE


def stopped_between_look_and_write(store: FsBackend, where: str, monkeypatch: pytest.MonkeyPatch) -> Stop:
    """Stops the owner `store` the next time that it writes."""
    assert store._space
    ledger = store._space._ledger
    if where == "before it writes":
        stop = Stop(ledger.write)
        monkeypatch.setattr(ledger, "write", stop)
    else:
        stop = Stop(os.replace, lambda source, _: source == ledger._new_path)
        monkeypatch.setattr(os, "replace", stop)
    return stop


@pytest.mark.parametrize("where", ["before it writes", "at the rename"])
@pytest.mark.parametrize("first", ["the old owner", "its successor"])
def test_an_owner_that_wrote_over_its_successor_grants_nothing_that_it_knows_no_more(
    open_on: Callable[[str], FsBackend],
    folder: Path,
    desk: Any,
    ledger: LedgerFile,
    monkeypatch: pytest.MonkeyPatch,
    short_lease: float,
    where: str,
    first: str,
) -> None:
    """Neither does the successor: both begin with a count, when what the other had granted has run out."""
    old, new = open_on("a"), open_on("b")
    fill(desk, old, "a", 5, folder)
    assert ledger.comes_to_be_led_by(old, desk)
    stop = stopped_between_look_and_write(old, where, monkeypatch)
    try:
        fill(desk, new, "b", 90, folder)
        stop.wait()
        assert ledger.comes_to_be_led_by(new, desk)
    finally:
        late_s = lease_module.boot_s()
        stop.go_on()
    # Marked, should its process end now, and be known to be gone at once.
    assert eventually(lambda: (ledger.read().owner, ledger.read().complete) == ("", False))
    stores = (old, new) if first == "the old owner" else (new, old)
    # More than is left of any grant.
    fill(desk, stores[0], "c", 4, folder)
    assert lease_module.boot_s() - late_s >= short_lease / 2
    for turn, store in enumerate(stores):
        fill(desk, store, f"d{turn}", 60, folder)
    assert ledger.is_led_by(stores[0]) or ledger.comes_to_be_led_by(stores[1], desk)


def test_a_farewell_that_comes_late_is_not_taken_for_the_successors(
    open_on: Callable[[str], FsBackend],
    folder: Path,
    desk: Any,
    ledger: LedgerFile,
    monkeypatch: pytest.MonkeyPatch,
    short_lease: float,
) -> None:
    old, new = open_on("a"), open_on("b")
    fill(desk, old, "a", 5, folder)
    assert old._space
    stop = Stop(os.utime, lambda _, times=None: bool(times))
    monkeypatch.setattr(os, "utime", stop)
    closing = threading.Thread(target=old.close, name="closing")
    closing.start()
    try:
        stop.wait()
        fill(desk, new, "b", 90, folder)
    finally:
        stop.go_on()
        closing.join(LIMIT_S)
    assert ledger.comes_to_be_led_by(new, desk)
    assert eventually(lambda: not evictors()[1:])
    fill(desk, new, "c", 60, folder)
    assert ledger.comes_to_be_led_by(new, desk)


def test_of_two_that_take_over_the_one_that_was_stopped_knows_it(
    open_on: Callable[[str], FsBackend],
    folder: Path,
    desk: Any,
    ledger: LedgerFile,
    monkeypatch: pytest.MonkeyPatch,
    short_lease: float,
) -> None:
    """It found the ledger abandoned, and writes when another has granted by one of his own."""
    before, slow = open_on("a"), open_on("b")
    fill(desk, before, "a", 5, folder)
    stop = stopped_between_look_and_write(slow, "before it writes", monkeypatch)
    before.close()
    results: list[Any] = []
    item = desk.put_item("b", record(1))
    putting = threading.Thread(target=lambda: results.extend(slow.put([item], later())), name="putting")
    putting.start()
    try:
        stop.wait()
        quick = open_on("c")
        fill(desk, quick, "c", 90, folder)
        assert ledger.comes_to_be_led_by(quick, desk)
    finally:
        late_s = lease_module.boot_s()
        stop.go_on()
    assert ledger.comes_to_be_led_by(slow, desk)
    assert lease_module.boot_s() - late_s >= short_lease / 2
    putting.join(LIMIT_S)
    assert [result.status for result in results] == [PutStatus.STORED]
    for store, prefix in ((quick, "d"), (slow, "e")):
        fill(desk, store, prefix, 60, folder)


def test_who_was_stopped_while_nobody_took_over_goes_on_without_a_count(
    open_folder: Callable[..., FsBackend],
    folder: Path,
    desk: Any,
    ledger: LedgerFile,
    monkeypatch: pytest.MonkeyPatch,
    set_lease: Callable[[float], None],
) -> None:
    set_lease(2.0)
    store = open_folder(max_bytes=BOUND * PAGE)
    fill(desk, store, "a", 5, folder)
    assert store._space
    counted_at = store._space._evictor._counted_at
    stop = Stop(store._space._ledger.touch)
    monkeypatch.setattr(store._space._ledger, "touch", stop)
    stop.wait()
    time.sleep(4.0)
    stop.go_on()
    fill(desk, store, "b", 20, folder)
    assert store._space._evictor._counted_at == counted_at


def test_a_ledger_that_does_not_know_all_grants_is_taken_over_when_they_have_run_out(
    open_folder: Callable[..., FsBackend], folder: Path, desk: Any, ledger: LedgerFile, short_lease: float
) -> None:
    """Its owner was killed before it had waited for that, and is known to be gone at once."""
    open_folder().close()
    ledger.write(complete=False)
    began_s = lease_module.boot_s()
    store = open_folder(max_bytes=BOUND * PAGE)
    fill(desk, store, "a", 1, folder)
    assert lease_module.boot_s() - began_s >= short_lease / 2


def test_an_answer_that_comes_late_is_asked_for_again(
    open_folder: Callable[..., FsBackend], desk: Any, monkeypatch: pytest.MonkeyPatch, set_lease: Callable[[float], None]
) -> None:
    """It may be one that an old owner wrote over a successor's ledger."""
    set_lease(20.0)
    store = open_folder(max_bytes=1000 * PAGE)
    desk.put(store, "a", record(1))
    space = store._space
    assert space
    real_s, read, slept_s = space_module.boot_s, space._ledger.read, [0.0]
    monkeypatch.setattr(space_module, "boot_s", lambda: real_s() + slept_s[0])

    def read_and_sleep() -> Any:
        found = read()
        answer = found.members.get(space._member())
        if threading.current_thread() is threading.main_thread() and answer and answer.serial >= space._serial and not slept_s[0]:
            slept_s[0] = lease_module.LEASE_S / 4
        return found

    monkeypatch.setattr(space._ledger, "read", read_and_sleep)
    serial = space._serial
    assert desk.put(store, "b", record(1, 100 * PAGE)).status is PutStatus.STORED
    assert slept_s[0]
    assert space._serial == serial + 2
