"""Records moved in C: the same answers and files as in Python, whatever is in the way, and nothing touched that was not asked for."""

from __future__ import annotations

import math
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore_sdk.backend import Buffer, Deadline, Get, GetStatus, Mode, Put, PutStatus, Region
from kvstore_sdk_backends.fs import FsBackend, native, open_fs
from kvstore_sdk_backends.fs.folder import MAX_NAME_BYTES
from kvstore_sdk_backends.fs.native import DONE, EXISTS, MISSING, UNDONE, WRITTEN, NativeRecords

pytestmark = pytest.mark.usefixtures("c_alone")

RECORD = os.urandom(16384)
MOST_BYTES = 32768
NAMES = ["v1/a", "v1/b", "v1/deep/er/c", "d", "v1/" + "n" * (MAX_NAME_BYTES - 3), "v1/x/" + "y" * 251, "../out", "", ".dot", "v1//e"]
THERE = ["nothing", "no folder", "record", "short", "long", "empty folder", "full folder", "link", "dangling", "fifo", "file above"]

items = st.fixed_dictionaries(
    {
        "name": st.sampled_from(NAMES),
        "there": st.sampled_from(THERE),
        "sizes": st.lists(st.sampled_from([0, 1, 511, 4096, 8192, 12288, 24576]), min_size=0, max_size=4),
        "shift": st.sampled_from([0, 0, 0, 1, 512]),
        "mode": st.sampled_from(Mode),
        "many": st.sampled_from([False, False, False, True]),
    }
)
batches = st.lists(items, min_size=1, max_size=6, unique_by=lambda item: item["name"])


@pytest.fixture
def records(tmp_path: Path) -> NativeRecords:
    library = native.load()
    assert library
    return NativeRecords(library, str(tmp_path))


@pytest.fixture
def region() -> Iterator[Region]:
    made = Region(1 << 20)
    yield made
    made.close()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=batches, putting=st.booleans(), direct=st.sampled_from(["auto", "never"]))
def test_both_ways_answer_the_same_and_leave_the_same(moved_by: str, batch: list[dict[str, Any]], putting: bool, direct: str) -> None:
    found = [outcome(way, batch, putting, direct) for way in ("Python", "C")]
    assert found[0] == found[1]


def outcome(way: str, batch: list[dict[str, Any]], putting: bool, direct: str) -> Any:
    """Answers, memory and files after a call over what `batch` says is there."""
    region = Region(1 << 20)
    with tempfile.TemporaryDirectory(prefix="kvstore-test-") as scratch, pytest.MonkeyPatch.context() as patch:
        if way == "Python":
            patch.setenv("KVSTORE_FS_NATIVE", "0")
        folder = Path(scratch) / "kv"
        store = open_fs(str(folder), max_record_bytes=MOST_BYTES, direct_io=direct)
        for item in batch:
            if item["name"] in NAMES[:6]:
                place(folder / item["name"], item["there"], sum(item["sizes"]), Path(scratch))
        region.view[:] = bytes(range(256)) * (region.size_bytes // 256)
        parts = [buffers(region, number, item) for number, item in enumerate(batch)]
        if putting:
            puts = [Put(item["name"], mine, item["mode"]) for item, mine in zip(batch, parts, strict=True)]
            answers: list[Any] = [(a.status, type(a.error)) for a in store.put(puts, Deadline.after(30))]
        else:
            gets = [Get(item["name"], mine) for item, mine in zip(batch, parts, strict=True)]
            answers = []
            for answer, mine in zip(store.get(gets, Deadline.after(30)), parts, strict=True):
                data = b"".join(part.view for part in mine) if answer.status is GetStatus.FOUND else b""
                answers.append((answer.status, type(answer.error), answer.size_bytes, answer.asked_bytes, data))
        files = tree(folder)
        store.close()
    region.close()
    return answers, files


def place(path: Path, there: str, size: int, scratch: Path) -> None:
    if there == "no folder":
        return
    if there == "file above":
        if path.parent.name == "er":
            path.parent.parent.mkdir(parents=True, exist_ok=True)
            path.parent.touch()
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if there in ("record", "short", "long"):
        path.write_bytes(b"r" * (size + {"record": 0, "short": -min(size, 7), "long": 4096}[there]))
    elif there == "empty folder":
        path.mkdir()
    elif there == "full folder":
        path.mkdir()
        (path / "inner").touch()
    elif there == "link":
        (scratch / "elsewhere").write_bytes(b"e" * size)
        path.symlink_to(scratch / "elsewhere")
    elif there == "dangling":
        path.symlink_to(scratch / "nowhere")
    elif there == "fifo":
        os.mkfifo(path)


def buffers(region: Region, number: int, item: dict[str, Any]) -> list[Buffer]:
    at = number * (128 << 10) + item["shift"]
    made = []
    # More parts than one system call takes.
    for size in [1] * 1100 if item["many"] else item["sizes"]:
        made.append(region.buffer(at, size))
        at += size
    return made


def tree(folder: Path) -> dict[str, Any]:
    """What is below: names, kinds and bytes. Of the half with a dot, what is left of temporary files."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if name.startswith(".kvstore"):
            assert not path.is_file() or path.suffix in (".lock", ".json"), "a temporary file is left"
            continue
        kind = stat.S_IFMT(path.lstat().st_mode)
        found[name] = (kind, path.read_bytes() if kind == stat.S_IFREG else b"", stat.S_IMODE(path.lstat().st_mode))
    return found


def test_a_batch_comes_to_python_for_nothing_but_its_answers(
    open_folder: Callable[..., FsBackend], desk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PERF: of records that are as they should be. The first put of a folder may make it."""
    store = open_folder()
    desk.put(store, "v1/first", RECORD)
    puts = [desk.put_item(f"v1/{number}", RECORD, cuts=(4096,)) for number in range(20)]
    gets = [desk.get_item(f"v1/{number}", len(RECORD)) for number in range(21)]
    for name in ("access", "stat", "open", "fstat", "pwritev", "preadv", "close", "replace", "unlink", "mkdir", "link"):
        monkeypatch.setattr(os, name, None)
    assert [answer.status for answer in store.put(puts, Deadline.after(30))] == [PutStatus.STORED] * 20
    assert [answer.status for answer in store.put(puts, Deadline.after(30))] == [PutStatus.EXISTS] * 20
    found = [answer.status for answer in store.get(gets, Deadline.after(30))]
    monkeypatch.undo()
    assert found == [GetStatus.FOUND] * 20 + [GetStatus.MISSING]
    assert all(get.into[0].view == RECORD for get in gets[:20])


def test_answers_are_in_order_whatever_was_left_to_python(store: FsBackend, desk: Any) -> None:
    """A batch of which every second item is not for C."""
    puts = [desk.put_item(f"v1/{number}" if number % 2 else f"../{number}", RECORD) for number in range(9)]
    assert [answer.status for answer in store.put(puts, Deadline.after(30))] == [PutStatus.FAILED, PutStatus.STORED] * 4 + [
        PutStatus.FAILED
    ]
    gets = [desk.get_item(f"v1/{number}" if number % 2 else f"../{number}", len(RECORD)) for number in range(9)]
    assert [answer.status for answer in store.get(gets, Deadline.after(30))] == [GetStatus.FAILED, GetStatus.FOUND] * 4 + [GetStatus.FAILED]


@pytest.mark.parametrize("why", ["the deadline passed", "closed"])
def test_nothing_is_begun_any_more(records: NativeRecords, region: Region, tmp_path: Path, why: str) -> None:
    (tmp_path / "a").write_bytes(RECORD)
    buffer = region.buffer(0, len(RECORD))
    if why == "closed":
        records.stop()
    at_s = 0.0 if why == "the deadline passed" else math.inf
    assert records.get([Get("a", [buffer])] * 3, True, at_s) == bytes([UNDONE] * 3)
    assert bytes(buffer.view) == bytes(len(RECORD))
    assert records.put([Put("b", [buffer])], [str(tmp_path / "t")], 1 << 30, True, at_s) == bytes([UNDONE])
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_call_with_time_left_is_done(records: NativeRecords, region: Region, tmp_path: Path) -> None:
    buffer = region.buffer(0, len(RECORD))
    buffer.view[:] = RECORD
    temps = [str(tmp_path / "t0"), str(tmp_path / "t1")]
    puts = [Put("a", [buffer]), Put("no/folder", [buffer])]
    assert records.put(puts, temps, 1 << 30, False, math.inf) == bytes([DONE, WRITTEN])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "t1"]
    assert records.put([puts[0]], [temps[0]], 1 << 30, False, math.inf) == bytes([EXISTS])
    assert records.put([puts[0]], [temps[0]], 4096, False, math.inf) == bytes([UNDONE]), "larger than it may be"
    assert records.put([Put("b", [buffer])], [temps[1]], 1 << 30, False, math.inf) == bytes([UNDONE]), "a file is in its way"
    buffer.view[:] = bytes(len(RECORD))
    assert records.get([Get("a", [buffer]), Get("b", [buffer])], False, math.inf) == bytes([DONE, MISSING])
    assert bytes(buffer.view) == RECORD
    assert (tmp_path / "t1").read_bytes() == RECORD


@pytest.mark.parametrize(("offset", "length"), [(-4096, 4096), ((1 << 20) - 4096, 8192), (1 << 20, 1), (0, -1), (1 << 63, 4096)])
def test_no_address_outside_of_a_region_gets_to_c(records: NativeRecords, region: Region, tmp_path: Path, offset: int, length: int) -> None:
    (tmp_path / "a").write_bytes(RECORD)
    good = region.buffer(0, len(RECORD))
    bad = Buffer(region, offset, length)
    assert records.get([Get("a", [good]), Get("a", [good, bad]), Get("a", [good])], False, math.inf) == bytes([DONE, UNDONE, DONE])
    assert records.put([Put("b", [bad])], [str(tmp_path / "t")], 1 << 30, False, math.inf) == bytes([UNDONE])
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_memory_of_a_closed_region_is_not_touched(store: FsBackend, region: Region) -> None:
    buffer = region.buffer(0, 4096)
    region.close()
    with pytest.raises(ValueError, match="released"):
        store.get([Get("v1/a", [buffer])], Deadline.after(30))


@pytest.mark.parametrize("what", ["not built", "another version", "no library", "switched off"])
def test_without_the_library_python_does_it(
    open_folder: Callable[..., FsBackend], desk: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    if what == "another version":
        monkeypatch.setattr(native, "_ABI", 99)
    elif what == "switched off":
        monkeypatch.setenv("KVSTORE_FS_NATIVE", "0")
    else:
        monkeypatch.setattr(native, "LIBRARY", tmp_path / "lib.so")
        if what == "no library":
            (tmp_path / "lib.so").write_bytes(RECORD)
    assert native.load() is None
    store = open_folder()
    assert desk.put(store, "v1/a", RECORD).status is PutStatus.STORED
    assert desk.get(store, "v1/a", len(RECORD))[1] == RECORD


@pytest.mark.parametrize(("renamed", "why"), [(True, "the deadline passed"), (True, "closed"), (False, "the deadline passed")])
def test_a_rename_whose_answer_is_lost_is_unknown_also_when_no_time_is_left_to_look(
    store: FsBackend, desk: Any, monkeypatch: pytest.MonkeyPatch, renamed: bool, why: str
) -> None:
    """A file server may do it, answer with an error, and take until the deadline for that. TIMED_OUT would say that it is not there."""
    desk.put(store, "v1/first", RECORD)
    assert store._native
    really = store._native.put
    temps: list[str] = []

    def put(puts: Any, names: Any, most_bytes: int, direct: bool, at_s: float) -> bytes:
        temps.extend(names)
        if renamed:
            assert really(puts, names, most_bytes, direct, math.inf) == bytes([DONE])
        else:
            Path(names[0]).write_bytes(RECORD)
        if why == "closed":
            store._closed = True
        return bytes([WRITTEN])

    monkeypatch.setattr(store._native, "put", put)
    [answer] = store.put([desk.put_item("v1/lost", RECORD)], Deadline(0.0) if why == "the deadline passed" else Deadline.after(30))
    assert answer.status is (PutStatus.UNKNOWN if renamed else PutStatus.TIMED_OUT)
    assert not Path(temps[0]).exists()
    store._closed = False
    found, _ = desk.get(store, "v1/lost", len(RECORD))
    assert found.status is (GetStatus.FOUND if renamed else GetStatus.MISSING)


def test_an_exception_in_the_middle_of_a_batch_leaves_no_temporary_file(
    store: FsBackend, desk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """^C for example, while Python does what C has left to it."""
    really, calls = store._records.store, 0

    def interrupted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return really(*arguments)

    monkeypatch.setattr(store._records, "store", interrupted)
    # No folder is there yet: C has written them all.
    puts = [desk.put_item(f"v1/{number}/record", RECORD) for number in range(8)]
    with pytest.raises(KeyboardInterrupt):
        store.put(puts, Deadline.after(30))
    assert calls == 3
    left = Path(store._records._temp_root).rglob("*")
    assert not [path for path in left if path.is_file() and path.stat().st_size == len(RECORD)]


def test_a_deadline_before_all_time_is_one_that_has_passed(store: FsBackend, desk: Any) -> None:
    desk.put(store, "v1/first", RECORD)
    for at_s in (-math.inf, -1e300, 0.0):
        assert [answer.status for answer in store.put([desk.put_item("v1/late", RECORD)], Deadline(at_s))] == [PutStatus.TIMED_OUT]
        assert [answer.status for answer in store.get([desk.get_item("v1/first", len(RECORD))], Deadline(at_s))] == [GetStatus.TIMED_OUT]
