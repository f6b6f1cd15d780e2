"""A bounded folder: what is stored, what goes, and what is counted."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bounded_bench import LIMIT_S, PAGE, ask_in_vain, bytes_of, eventually, is_counted, later, record

from kvstore_sdk.backend import (
    ConfigError,
    Deadline,
    DeleteStatus,
    GetStatus,
    InvalidError,
    Mode,
    NoSpaceError,
    PutStatus,
    Usage,
    open_backend,
)
from kvstore_sdk_backends.fs import FsBackend
from kvstore_sdk_backends.fs import space as space_module
from kvstore_sdk_backends.fs.ledger import Ledger

HOUR = 3600.0


def names_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and ".kvstore" not in path.parts}


def age(folder: Path, name: str, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(folder / name, (then, then))


def test_more_than_the_bound_was_stored_and_the_newest_are_there(open_folder: Callable[..., FsBackend], folder: Path, desk: Any) -> None:
    """CAP-01: not one record fewer than fits, not one more."""
    store = open_folder(max_bytes=10 * PAGE)
    for number in range(60):
        assert desk.put(store, f"a/{number}", record(number)).status is PutStatus.STORED
        # The filesystem's clock may stand still for several puts.
        age(folder, f"a/{number}", 1000 - number)
        assert bytes_of(folder) <= 10 * PAGE
    assert names_in(folder) == {f"a/{number}" for number in range(50, 60)}
    assert store.usage(later()) == Usage(10, 10 * PAGE, 10 * PAGE)
    assert (store.evicted_records, store.evicted_bytes) == (50, 50 * PAGE)
    for number in range(60):
        result, seen = desk.get(store, f"a/{number}", PAGE)
        assert result.status is (GetStatus.FOUND if number >= 50 else GetStatus.MISSING)
        assert number < 50 or seen == record(number)


def test_four_threads_never_exceed_the_bound(open_folder: Callable[..., FsBackend], folder: Path, desk: Any) -> None:
    store = open_folder(max_bytes=10 * PAGE)
    seen: list[int] = []
    items = [[desk.put_item(f"{thread}/{number}", record(number)) for number in range(100)] for thread in range(4)]
    statuses: list[PutStatus] = []

    def run(puts: list[Any]) -> None:
        statuses.extend(store.put([put], later())[0].status for put in puts)

    threads = [threading.Thread(target=run, args=(puts,), name="storing") for puts in items]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        seen.append(bytes_of(folder) if folder.exists() else 0)
    for thread in threads:
        thread.join(30)
    assert statuses == [PutStatus.STORED] * 400
    # A walk is not of one moment: each thread may have stored one more behind it.
    assert max(seen) <= (10 + 4) * PAGE
    # Files that were counted again while the last puts were being written may have been counted twice: then one more each was evicted.
    assert (10 - 4) * PAGE <= bytes_of(folder) <= 10 * PAGE


def test_what_can_never_fit_is_refused_and_evicts_nothing(open_folder: Callable[..., FsBackend], folder: Path, desk: Any) -> None:
    """CAP-04."""
    store = open_folder(max_bytes=10 * PAGE)
    for number in range(10):
        desk.put(store, f"a/{number}", record(number))
    result = desk.put(store, "large", record(1, 11 * PAGE))
    assert result.status is PutStatus.FAILED
    assert isinstance(result.error, InvalidError)
    assert len(names_in(folder)) == 10
    assert store.evicted_records == 0
    assert store.capabilities.max_record_bytes == 10 * PAGE
    assert desk.put(store, "all", record(1, 10 * PAGE)).status is PutStatus.STORED
    assert names_in(folder) == {"all"}


@pytest.mark.parametrize(("options", "most"), [({"max_bytes": 1 << 20}, 1 << 20), ({"max_bytes": 1 << 20, "max_record_bytes": 5}, 5)])
def test_the_largest_record_is_the_smaller_of_both(open_folder: Callable[..., FsBackend], options: dict[str, int], most: int) -> None:
    assert open_folder(**options).capabilities.max_record_bytes == most


@pytest.mark.parametrize("mode", list(Mode))
def test_a_record_that_is_stored_again_is_counted_once(open_folder: Callable[..., FsBackend], folder: Path, desk: Any, mode: Mode) -> None:
    """CAP-03."""
    store = open_folder(max_bytes=2 * PAGE)
    for _ in range(5):
        desk.put(store, "a", record(1), mode)
    assert store.usage(later()).used_bytes == PAGE
    desk.put(store, "b", record(2))
    assert names_in(folder) == {"a", "b"}
    # Full now: its growth is what a record needs, and there is none.
    for _ in range(5):
        desk.put(store, "a", record(3), mode)
    assert names_in(folder) == {"a", "b"}
    assert store.evicted_records == 0


def test_replacing_by_other_sizes_is_counted_by_the_difference(open_folder: Callable[..., FsBackend], folder: Path, desk: Any) -> None:
    store = open_folder(max_bytes=10 * PAGE)
    for size in (8, 1, 9, 2, 6):
        assert desk.put(store, "a", record(size, size * PAGE), Mode.REPLACE).status is PutStatus.STORED
    for number in range(4):
        desk.put(store, f"b/{number}", record(number))
    assert len(names_in(folder)) == 5
    assert store.evicted_records == 0
    desk.put(store, "c", record(7))
    assert bytes_of(folder) <= 10 * PAGE
    assert store.evicted_records == 1


def test_what_is_deleted_makes_room(open_folder: Callable[..., FsBackend], folder: Path, desk: Any) -> None:
    store = open_folder(max_bytes=4 * PAGE)
    for turn in range(20):
        for number in range(4):
            desk.put(store, f"{turn}/{number}", record(number))
        assert store.delete([f"{turn}/{number}" for number in range(4)], later()) == [DeleteStatus.DELETED] * 4
    assert store.delete(["0/0", "never", "0"], later()) == [DeleteStatus.ABSENT] * 3
    assert store.evicted_records == 0


def test_a_put_that_fails_counts_nothing(open_folder: Callable[..., FsBackend], folder: Path, desk: Any, disk: Any) -> None:
    store = open_folder(max_bytes=10 * PAGE, direct_io="never")
    disk.fail("pwritev", 28)
    for number in range(30):
        assert isinstance(desk.put(store, f"a/{number}", record(number)).error, NoSpaceError)
    disk.mend()
    for step, mode in (("replace", Mode.REPLACE), ("link", Mode.CREATE)):
        disk.fail(step, 5, only="/tmp/")
        for number in range(30):
            assert desk.put(store, f"b/{number}", record(number), mode).status is PutStatus.FAILED
        disk.mend()
    for number in range(10):
        assert desk.put(store, f"c/{number}", record(number)).status is PutStatus.STORED
    assert store.evicted_records == 0
    assert len(names_in(folder)) == 10


def test_of_those_that_create_one_record_at_once_one_is_counted(
    open_folder: Callable[..., FsBackend], folder: Path, desk: Any, disk: Any
) -> None:
    """A fleet that starts stores the same chunks at the same time: none of them must be evicted for what was counted twice."""
    stores = [open_folder(max_bytes=64 * PAGE) for _ in range(4)]
    barrier = threading.Barrier(4)

    def link(real: Any, *args: Any, **kwargs: Any) -> None:
        # Past the look for the record that is there, all of them.
        barrier.wait(30)
        real(*args, **kwargs)

    disk.replace("link", link)
    items = [[desk.put_item(f"a/{number}", record(number)) for number in range(48)] for _ in stores]
    answers: list[list[PutStatus]] = [[] for _ in stores]

    def create(place: int) -> None:
        answers[place] += [stores[place].put([item], later())[0].status for item in items[place]]

    threads = [threading.Thread(target=create, args=(place,), name="creating") for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [sorted(status.name for status in each) for each in zip(*answers, strict=True)] == [["EXISTS"] * 3 + ["STORED"]] * 48
    disk.mend()
    for number in range(10):
        assert desk.put(stores[0], f"b/{number}", record(number)).status is PutStatus.STORED
    assert len(names_in(folder)) == 58
    assert sum(store.evicted_records for store in stores) == 0


def test_where_there_are_no_links_a_record_is_created_all_the_same(
    open_folder: Callable[..., FsBackend], folder: Path, desk: Any, disk: Any
) -> None:
    store = open_folder(max_bytes=64 * PAGE)
    disk.fail("link", 1)
    for number in range(10):
        assert desk.put(store, f"a/{number}", record(number)).status is PutStatus.STORED
    assert desk.put(store, "a/1", record(7)).status is PutStatus.EXISTS
    assert store.usage(later()) == Usage(10, 10 * PAGE, 64 * PAGE)


def test_a_smaller_bound_evicts_the_oldest_down_to_it(open_folder: Callable[..., FsBackend], folder: Path, desk: Any) -> None:
    store = open_folder()
    for number in range(100):
        desk.put(store, f"a/{number}", record(number))
        age(folder, f"a/{number}", 10000 - number)
    store.close()
    smaller = open_folder(max_bytes=30 * PAGE)
    assert eventually(lambda: bytes_of(folder) <= 30 * PAGE)
    assert names_in(folder) == {f"a/{number}" for number in range(70, 100)}
    assert smaller.usage(later()).used_bytes == 30 * PAGE


def test_an_open_record_stays_readable_when_it_is_evicted(
    open_folder: Callable[..., FsBackend], folder: Path, desk: Any, disk: Any
) -> None:
    """RACE-01, ATM-10."""
    store = open_folder(max_bytes=2 * PAGE)
    desk.put(store, "a", record(1))

    def read(real: Any, *args: Any) -> int:
        disk.mend()
        for number in range(4):
            desk.put(store, f"b/{number}", record(number))
        assert not (folder / "a").exists()
        done: int = real(*args)
        return done

    disk.replace("preadv", read)
    result, seen = desk.get(store, "a", PAGE)
    assert (result.status, seen) == (GetStatus.FOUND, record(1))
    assert desk.get(store, "a", PAGE)[0].status is GetStatus.MISSING
    assert store.exists(["a"], later()) == [False]


def test_a_get_that_finds_refreshes_the_time_once_an_hour(open_folder: Callable[..., FsBackend], folder: Path, desk: Any) -> None:
    store = open_folder(max_bytes=10 * PAGE)
    desk.put(store, "a", record(1))
    for old, refreshed in ((HOUR - 60, False), (HOUR + 60, True), (40 * HOUR, True), (-HOUR + 60, False), (-2 * HOUR, True)):
        age(folder, "a", old)
        before = (folder / "a").stat().st_mtime_ns
        assert desk.get(store, "a", PAGE)[0].status is GetStatus.FOUND
        after = (folder / "a").stat().st_mtime_ns
        assert (after != before) is refreshed, old
        assert not refreshed or abs(time.time() - after / 1e9) < 60
        assert desk.get(store, "a", PAGE)[0].status is GetStatus.FOUND
        assert (folder / "a").stat().st_mtime_ns == after


def test_only_what_was_found_counts_as_used(open_folder: Callable[..., FsBackend], folder: Path, desk: Any) -> None:
    store = open_folder(max_bytes=10 * PAGE)
    desk.put(store, "a", record(1))
    age(folder, "a", 2 * HOUR)
    before = (folder / "a").stat().st_mtime_ns
    assert desk.get(store, "a", 2 * PAGE)[0].status is GetStatus.WRONG_SIZE
    assert store.exists(["a"], later()) == [True]
    assert (folder / "a").stat().st_mtime_ns == before


@pytest.mark.parametrize("options", [{}, {"read_only": True}])
def test_a_folder_without_a_bound_keeps_its_times(
    open_folder: Callable[..., FsBackend], folder: Path, desk: Any, options: dict[str, Any]
) -> None:
    desk.put(open_folder(), "a", record(1))
    age(folder, "a", 2 * HOUR)
    before = (folder / "a").stat().st_mtime_ns
    assert desk.get(open_folder(**options), "a", PAGE)[0].status is GetStatus.FOUND
    assert (folder / "a").stat().st_mtime_ns == before
    assert not (folder / ".kvstore/space").exists()


def test_what_is_used_stays(open_folder: Callable[..., FsBackend], folder: Path, desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space_module, "REFRESH_S", 0.0)
    store = open_folder(max_bytes=100 * PAGE)
    for number in range(100):
        desk.put(store, f"a/{number}", record(number))
        age(folder, f"a/{number}", 5000 - number)
    for number in range(0, 100, 2):
        desk.get(store, f"a/{number}", PAGE)
    for number in range(50):
        desk.put(store, f"b/{number}", record(number))
    assert {name for name in names_in(folder) if name.startswith("a/")} == {f"a/{number}" for number in range(0, 100, 2)}


@pytest.mark.parametrize("value", [0, -1, 1 << 61, "much", 1.5, True, "4 PiB"])
def test_a_wrong_bound_is_refused_with_one_line(folder: Path, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^backend \S+: max_bytes: .*$") as caught:
        open_backend("kvstore_sdk_backends.fs:open_fs", {"max_bytes": value}, location=str(folder))
    assert "\n" not in str(caught.value)
    assert not folder.exists()


def test_a_bound_on_what_is_only_read_is_refused(open_folder: Callable[..., FsBackend], folder: Path) -> None:
    open_folder().close()
    with pytest.raises(ConfigError, match=r"backend fs: max_bytes: .*read_only.*leave one of them out"):
        open_folder(read_only=True, max_bytes=PAGE)
    with pytest.raises(ConfigError, match="max_bytes"):
        open_folder(folder.parent / "other", read_only=True, max_bytes=PAGE)


def test_of_two_bounds_the_larger_is_kept_while_both_are_open(
    open_folder: Callable[..., FsBackend], folder: Path, desk: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """One process with a wrong bound must not empty the store of all others."""
    large = open_folder(max_bytes=20 * PAGE)
    for number in range(20):
        desk.put(large, f"a/{number}", record(number))
    with caplog.at_level(logging.WARNING):
        small = open_folder(max_bytes=5 * PAGE)
    assert [record.getMessage().split(": ", 1)[1] for record in caplog.records] == [
        f"max_bytes {5 * PAGE} here, {20 * PAGE} for others; the larger one is kept while both are open"
    ]
    assert desk.put(small, "b", record(1)).status is PutStatus.STORED
    assert len(names_in(folder)) == 20
    large.close()
    assert desk.put(small, "c", record(1)).status is PutStatus.STORED
    assert eventually(lambda: bytes_of(folder) <= 5 * PAGE)
    larger = open_folder(max_bytes=10 * PAGE)
    for number in range(20):
        assert desk.put(larger, f"d/{number}", record(number)).status is PutStatus.STORED
        assert bytes_of(folder) <= 10 * PAGE
    assert bytes_of(folder) == 10 * PAGE


def test_whoever_has_no_bound_where_others_have_is_told(
    open_folder: Callable[..., FsBackend], folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space_module, "END_S", LIMIT_S)
    bounded = open_folder(max_bytes=5 * PAGE)
    assert eventually(lambda: bool(bounded._space and bounded._space._ledger.read().owner))
    with caplog.at_level(logging.WARNING):
        open_folder()
    assert [record.getMessage() for record in caplog.records] == [
        f"fs {folder}: others keep it below {5 * PAGE} bytes (max_bytes), which this process was not told to do"
    ]
    bounded.close()
    caplog.clear()
    open_folder()
    assert caplog.records == []


def test_files_are_counted_when_the_last_one_was_killed(
    open_folder: Callable[..., FsBackend], folder: Path, desk: Any, child: Callable[..., Any], tmp_path: Path
) -> None:
    """ATM-09: what is there is there, whatever a process that is dead knew of it."""
    max_bytes = 4 << 20
    note = tmp_path / "note"
    note.touch()
    hoarder = child("hoard", folder, max_bytes, 0, 100_000, note)
    assert eventually(lambda: int(note.read_bytes() or b"0") > 300, 2 * LIMIT_S)
    hoarder.end()
    left = bytes_of(folder)
    assert max_bytes * 0.9 < left <= max_bytes
    store = open_folder(max_bytes=max_bytes)
    # On a busy machine the lease may have to run out, and half of it again.
    assert eventually(lambda: is_counted(store), 60.0)
    assert store.usage(later()).used_bytes == bytes_of(folder)
    for number in range(30):
        assert desk.put(store, f"a/{number}", record(number, 65536)).status is PutStatus.STORED
        assert bytes_of(folder) <= max_bytes
    assert store.evicted_bytes >= 30 * 65536 - (max_bytes - left)
    assert store._space
    evictor = store._space._evictor
    assert eventually(lambda: evictor._lost == 0 or evictor._room() >= 0)


def test_a_put_that_finds_no_room_answers_before_its_deadline(
    open_folder: Callable[..., FsBackend], folder: Path, desk: Any, set_lease: Callable[[float], None]
) -> None:
    """Somebody on another host evicts, and does not answer."""
    set_lease(1000.0)
    store = open_folder(max_bytes=4 * PAGE)
    assert eventually(lambda: is_counted(store))
    assert store._space
    ledger = folder / ".kvstore/space/ledger"
    body = json.loads(ledger.read_text()) | {"owner": f"{'f' * 32}-1-{'0' * 16}", "members": {}}
    (folder / "ledger.new").write_text(json.dumps(body))
    os.rename(folder / "ledger.new", ledger)
    [hurried] = store.put([desk.put_item("a", record(1))], Deadline.after(0.2))
    assert hurried.status is PutStatus.TIMED_OUT
    # An answer that comes after the deadline would be that this passed.
    result = ask_in_vain(store, desk.put_item("a", record(1)))
    assert result.status is PutStatus.FAILED
    assert isinstance(result.error, NoSpaceError)
    assert "max_bytes" in str(result.error)
    assert names_in(folder) == set()
    assert json.loads(ledger.read_text())["owner"].startswith("f"), "a living owner keeps the lease"


def test_a_put_that_waits_for_room_ends_with_the_backend(open_folder: Callable[..., FsBackend], folder: Path, desk: Any) -> None:
    store = open_folder(max_bytes=4 * PAGE)
    assert eventually(lambda: is_counted(store))
    ledger = folder / ".kvstore/space/ledger"
    body = json.loads(ledger.read_text()) | {"owner": f"{'f' * 32}-1-{'0' * 16}", "members": {}}
    (folder / "ledger.new").write_text(json.dumps(body))
    os.rename(folder / "ledger.new", ledger)
    results: list[Any] = []
    item = desk.put_item("a", record(1))
    # Longer than it is waited for below.
    waiting = threading.Thread(target=lambda: results.extend(store.put([item], Deadline.after(2 * LIMIT_S))), name="waiting")
    waiting.start()
    assert eventually(lambda: bool(store._puts))
    store.close()
    waiting.join(LIMIT_S)
    assert [result.status for result in results] == [PutStatus.CLOSED]


def test_closing_gives_up_the_lease_and_leaves_no_thread(
    open_folder: Callable[..., FsBackend], folder: Path, desk: Any, set_lease: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_lease(LIMIT_S)
    monkeypatch.setattr(space_module, "END_S", LIMIT_S)
    store = open_folder(max_bytes=4 * PAGE)
    desk.put(store, "a", record(1))
    store.close()
    assert [thread for thread in threading.enumerate() if thread.name == "kvstore-fs-evictor"] == []
    assert os.listdir(folder / ".kvstore/space") == ["ledger"]
    found = Ledger(str(folder)).read()
    assert (found.owner, found.complete, found.members) == ("", True, {})
    second = open_folder(max_bytes=4 * PAGE)
    began_s = time.monotonic()
    assert desk.put(second, "b", record(1)).status is PutStatus.STORED
    # Nobody waited until it ran out; for half of it who stood still while he took it over does.
    assert time.monotonic() - began_s < LIMIT_S - 5


@pytest.fixture
def slow_count(disk: Any) -> Iterator[threading.Event]:
    """Counting waits at the first folder of records until it may go on."""
    go_on = threading.Event()

    def scan(real: Any, where: Any) -> Any:
        if threading.current_thread().name == "kvstore-fs-evictor" and isinstance(where, int):
            go_on.wait(100)
        return real(where)

    disk.replace("scandir", scan)
    yield go_on
    go_on.set()


def test_until_the_files_are_counted_nothing_is_stored(
    open_folder: Callable[..., FsBackend], folder: Path, desk: Any, slow_count: threading.Event
) -> None:
    """Opening does not wait for it, and loading works."""
    before = open_folder()
    for number in range(4):
        desk.put(before, f"a/{number}", record(number))
    before.close()
    store = open_folder(max_bytes=4 * PAGE)
    assert desk.get(store, "a/1", PAGE)[0].status is GetStatus.FOUND
    result = ask_in_vain(store, desk.put_item("b", record(1)), timeout_s=1.2)
    assert isinstance(result.error, NoSpaceError)
    assert desk.put(store, "a/1", record(1)).status is PutStatus.EXISTS
    slow_count.set()
    assert desk.put(store, "b", record(1)).status is PutStatus.STORED
    assert bytes_of(folder) == 4 * PAGE


def test_a_record_as_large_as_the_bound_stays_until_its_room_is_needed(open_folder: Callable[..., FsBackend], desk: Any) -> None:
    size = 1 << 20
    store = open_folder(max_bytes=size)
    for number in range(40):
        # Small ones that are evicted first, so that some of the bound would be kept free for more of them.
        assert desk.put(store, f"small{number}", bytes(64 << 10)).status is PutStatus.STORED
    assert desk.put(store, "large", bytes(size)).status is PutStatus.STORED
    until_s = time.monotonic() + 1.0
    while time.monotonic() < until_s:
        assert store.exists(["large"], later()) == [True]
        time.sleep(0.01)
    assert desk.put(store, "small", bytes(PAGE)).status is PutStatus.STORED
    assert store.exists(["large", "small"], later()) == [False, True]
