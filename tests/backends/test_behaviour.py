"""What the protocol promises, of every backend."""

from __future__ import annotations

import importlib.util
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from s3_server import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY, S3Server

from kvstore_sdk.backend import (
    ClosedError,
    Deadline,
    DeleteStatus,
    Failure,
    GetResult,
    GetStatus,
    InvalidError,
    Mode,
    PutStatus,
    TimedOutError,
)
from kvstore_sdk_backends.fs import open_fs
from kvstore_sdk_backends.memory import open_memory
from kvstore_sdk_backends.s3 import open_s3

NAME = "v1/" + "0" * 32 + "/ab/" + "ab" * 32 + "-g0"
SOON = 30.0

SERVED = ["s3fs", "nixl"]
"""Engines of the backend for object stores."""

MANY = 1000

_locations = itertools.count()


def later() -> Deadline:
    return Deadline.after(SOON)


@pytest.fixture(params=["memory", "fs", *SERVED])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Opens one and the same store, again and again."""
    opened = []
    kind: str = request.param
    # In this process, where it takes no second to open; the child that it has otherwise has tests of its own.
    request.getfixturevalue("monkeypatch").setattr("kvstore_sdk_backends.s3.opening.in_child", lambda: True)
    location = f"test-{next(_locations)}"
    if kind in SERVED:
        if importlib.util.find_spec(kind) is None:
            pytest.skip(f"{kind} is not installed")
        server: S3Server = request.getfixturevalue("s3_server")
        location = f"{server.make_bucket(f'behaviour-{location}')}/kv"

    def open_it(**options: Any) -> Any:
        if kind == "memory":
            made: Any = open_memory(location, **options)
        elif kind == "fs":
            made = open_fs(str(tmp_path / "kv"), **options)
        else:
            keys = {"access_key_id": ACCESS_KEY_ID, "secret_access_key": SECRET_ACCESS_KEY}
            made = open_s3(location, engine=kind, endpoint=server.endpoint, region=REGION, probe="off", **keys, **options)
        opened.append(made)
        return made

    yield open_it
    for backend in opened:
        backend.close()


@pytest.fixture
def backend(reopen: Callable[..., Any]) -> Any:
    return reopen()


@pytest.fixture
def rounds(request: pytest.FixtureRequest) -> int:
    """How often a race is run: what takes memory microseconds takes a server milliseconds."""
    return 60 if request.node.callspec.params["reopen"] in SERVED else MANY


def answers_of_create(backend: Any) -> tuple[PutStatus, ...]:
    """What CREATE may answer where a record is. NIXL knows no condition, and replaces."""
    return (PutStatus.EXISTS, PutStatus.STORED) if type(backend).__name__ == "NixlS3Backend" else (PutStatus.EXISTS,)


@pytest.mark.parametrize("size", [0, 1, 511, 4095, 4096, 4097, 8192, 131072, (1 << 20) + 3])
def test_get_returns_exactly_the_bytes_that_put_stored(backend: Any, desk: Any, size: int) -> None:
    record = os.urandom(size)
    assert desk.put(backend, NAME, record).status is PutStatus.STORED
    assert backend.exists([NAME], later()) == [True]
    assert desk.get(backend, NAME, size) == (GetResult(GetStatus.FOUND), record)


@pytest.mark.parametrize("shift", [0, 1, 8, 512])
def test_parts_of_any_size_and_place_make_one_record(backend: Any, desk: Any, shift: int) -> None:
    """A backend that declares no alignment must take what it is given."""
    record = os.urandom(20000)
    several = backend.capabilities.max_parts > 4
    cuts = (1, 4097, 4097, 12289) if several else ()
    assert desk.put(backend, NAME, record, cuts=cuts, shift=shift).status is PutStatus.STORED
    assert desk.get(backend, NAME, 20000) == (GetResult(GetStatus.FOUND), record)
    sizes = (8192, 0, 11807, 1) if several else (20000,)
    assert desk.get(backend, NAME, *sizes, shift=shift) == (GetResult(GetStatus.FOUND), record)


def test_the_declared_number_of_parts_is_taken(backend: Any, desk: Any) -> None:
    parts = backend.capabilities.max_parts
    record = os.urandom(4096 * parts)
    assert desk.put(backend, NAME, record, cuts=range(4096, 4096 * parts, 4096)).status is PutStatus.STORED
    assert desk.get(backend, NAME, *[4096] * parts) == (GetResult(GetStatus.FOUND), record)


def test_the_declared_batch_is_taken_and_answered_in_order(backend: Any, desk: Any, rounds: int) -> None:
    # Of a server a part; the conformance suite sends it all of a batch.
    count = backend.capabilities.max_batch if rounds == MANY else rounds
    puts = [desk.put_item(f"r{number}", b"%d" % number) for number in range(count)]
    assert [result.status for result in backend.put(puts, later())] == [PutStatus.STORED] * count
    names = [f"r{number * 2}" for number in range(count)]
    assert backend.exists(names, later()) == [number * 2 < count for number in range(count)]
    gets = [desk.get_item(name, len(name) - 1) for name in names]
    statuses = [result.status for result in backend.get(gets, later())]
    assert statuses == [GetStatus.FOUND if number * 2 < count else GetStatus.MISSING for number in range(count)]
    assert all(
        bytes(get.into[0].view) == get.name[1:].encode() for get, status in zip(gets, statuses, strict=True) if status is GetStatus.FOUND
    )


def test_missing_is_a_result(backend: Any, desk: Any) -> None:
    """API-05: a miss must not look like a record of no bytes."""
    assert backend.exists([NAME], later()) == [False]
    assert desk.get(backend, NAME, 4096)[0] == GetResult(GetStatus.MISSING)
    assert desk.get(backend, NAME, 0)[0] == GetResult(GetStatus.MISSING)
    assert backend.delete([NAME], later()) == [DeleteStatus.ABSENT]


@pytest.mark.parametrize(("stored", "asked"), [(4096, 8192), (8192, 4096), (1, 2), (2, 1), (0, 1), (1, 0), (4096, 4097)])
def test_another_size_is_told_with_both_sizes(backend: Any, desk: Any, stored: int, asked: int) -> None:
    """INT-05: a record that was cut must not be read as far as it goes."""
    desk.put(backend, NAME, bytes(stored))
    assert desk.get(backend, NAME, asked)[0] == GetResult.wrong_size(stored, asked)


def test_create_leaves_what_is_there_and_replace_takes_its_place(backend: Any, desk: Any) -> None:
    assert desk.put(backend, NAME, b"first").status is PutStatus.STORED
    again = desk.put(backend, NAME, b"other").status
    assert again in answers_of_create(backend)
    assert desk.get(backend, NAME, 5)[1] == (b"first" if again is PutStatus.EXISTS else b"other")
    assert desk.put(backend, NAME, b"longer one", Mode.REPLACE).status is PutStatus.STORED
    assert desk.get(backend, NAME, 10)[1] == b"longer one"
    assert desk.put(backend, "new", b"x", Mode.REPLACE).status is PutStatus.STORED


def test_what_was_put_is_a_copy(backend: Any, desk: Any) -> None:
    """RACE-03: the caller reuses its memory as soon as the call is over."""
    item = desk.put_item(NAME, b"original")
    assert backend.put([item], later())[0].status is PutStatus.STORED
    item.parts[0].view[:] = b"\xff" * 8
    assert desk.get(backend, NAME, 8)[1] == b"original"


def test_a_get_touches_its_buffers_alone(backend: Any, desk: Any) -> None:
    desk.put(backend, NAME, b"x" * 100)
    desk.region.view[:] = b"\xaa" * desk.region.size_bytes
    item = desk.get_item(NAME, 60, 40, shift=7)
    backend.get([item], later())
    for part in item.into:
        part.view[:] = b"\xaa" * part.length
    assert desk.region.view == b"\xaa" * desk.region.size_bytes


def test_delete_is_told_apart_from_absent(backend: Any, desk: Any) -> None:
    """ATM-11"""
    desk.put(backend, NAME, b"x")
    assert backend.delete([NAME, "never"], later()) == [DeleteStatus.DELETED, DeleteStatus.ABSENT]
    assert backend.delete([NAME], later()) == [DeleteStatus.ABSENT]
    assert backend.exists([NAME], later()) == [False]
    assert desk.put(backend, NAME, b"again").status is PutStatus.STORED


@pytest.mark.parametrize("name", ["../up", "/etc/passwd", "a//b", "", ".kvstore/format.json", "a/.hidden", "x" * 256, "a\0b", "é"])
def test_a_name_that_is_none_of_the_sdks_is_refused(backend: Any, desk: Any, name: str) -> None:
    put, get = desk.put(backend, name, b"x"), desk.get(backend, name, 1)[0]
    [exists] = backend.exists([name], later())
    [deleted] = backend.delete([name], later())
    assert (put.status, get.status) == (PutStatus.FAILED, GetStatus.FAILED)
    for error in (put.error, get.error, exists.error, deleted.error):
        assert isinstance(error, InvalidError)
        assert repr(name) in str(error)


def test_a_bad_item_fails_alone(backend: Any, desk: Any) -> None:
    puts = [desk.put_item(name, b"x") for name in ("a", "..", "b")]
    assert [result.status for result in backend.put(puts, later())] == [PutStatus.STORED, PutStatus.FAILED, PutStatus.STORED]
    gets = [desk.get_item(name, 1) for name in ("a", "..", "b")]
    assert [result.status for result in backend.get(gets, later())] == [GetStatus.FOUND, GetStatus.FAILED, GetStatus.FOUND]


def test_a_record_above_the_limit_is_refused_with_both_numbers(reopen: Callable[..., Any], desk: Any) -> None:
    backend = reopen(max_record_bytes=5000)
    assert backend.capabilities.max_record_bytes == 5000
    assert desk.put(backend, "fits", bytes(5000)).status is PutStatus.STORED
    result = desk.put(backend, "large", bytes(5001), cuts=(3000,)[: backend.capabilities.max_parts - 1])
    assert result.status is PutStatus.FAILED
    assert isinstance(result.error, InvalidError)
    assert "5001" in str(result.error)
    assert "5000" in str(result.error)
    assert backend.exists(["large"], later()) == [False]


def test_a_second_view_sees_the_same_records(reopen: Callable[..., Any], desk: Any) -> None:
    """ATM-08: what was stored is found after a restart, with nothing written again."""
    first = reopen()
    for number in range(100):
        desk.put(first, f"k{number}", b"%d" % number)
    first.close()
    second = reopen()
    assert second.exists([f"k{number}" for number in range(100)], later()) == [True] * 100
    assert desk.get(second, "k42", 2)[1] == b"42"
    assert desk.put(second, "k42", b"42").status in answers_of_create(second)


def listing(backend: Any, prefix: str = "", limit: int = 1000) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    cursor = None
    while True:
        page = backend.list(prefix, later(), cursor, limit)
        assert len(page.entries) <= limit
        found += [(entry.name, entry.size_bytes) for entry in page.entries]
        cursor = page.cursor
        if cursor is None:
            return found


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 1000])
def test_a_listing_has_every_record_once(backend: Any, desk: Any, limit: int) -> None:
    names = ["a", "b-c", "b/a", "b/c/d", "b/c.e", "b.d", "c0", "c1", "v1/x/00/1", "v1/x/01/2", "v1/y/00/3"]
    for number, name in enumerate(names):
        desk.put(backend, name, bytes(number))
    assert sorted(listing(backend, limit=limit)) == sorted((name, number) for number, name in enumerate(names))
    for prefix in ("b", "b/", "b/c", "v1/x", "v1/x/0", "v1/x/00/1", "nothing", "c", "../", "/"):
        assert sorted(listing(backend, prefix, limit)) == sorted((n, s) for s, n in enumerate(names) if n.startswith(prefix)), prefix


def test_a_listing_goes_on_where_it_was_while_records_come_and_go(backend: Any, desk: Any) -> None:
    for number in range(20):
        desk.put(backend, f"d{number % 4}/r{number:02}", b"x")
    kept = {f"d{number % 4}/r{number:02}" for number in range(20)}
    seen, cursor = [], None
    for step in range(100):
        page = backend.list("", later(), cursor, 3)
        seen += [entry.name for entry in page.entries]
        if page.cursor is None:
            break
        # The very record that the cursor names goes away, and others come before and after it.
        kept.discard(page.cursor)
        backend.delete([page.cursor], later())
        cursor = page.cursor
        desk.put(backend, f"d0/n{step}", b"x")
        desk.put(backend, f"z/n{step}", b"x")
    assert len(seen) == len(set(seen))
    assert kept <= set(seen)


@pytest.mark.parametrize("cursor", ["zzz", "../../x", "/", "a//b", "\0", "a/b/c/d/e"])
def test_any_cursor_is_survived(backend: Any, desk: Any, cursor: str) -> None:
    desk.put(backend, "a/b", b"x")
    assert [entry.name for entry in backend.list("", later(), cursor).entries] in ([], ["a/b"])


def test_a_page_has_at_least_one_place(backend: Any) -> None:
    with pytest.raises(InvalidError, match="limit 0"):
        backend.list("", later(), None, 0)


def test_usage_counts_each_record_once(backend: Any, desk: Any) -> None:
    """CAP-03, OBS-01"""
    assert (backend.usage(later()).records, backend.usage(later()).used_bytes) == (0, 0)
    for _ in range(5):
        desk.put(backend, "a", bytes(8192), Mode.REPLACE)
    desk.put(backend, "b/c", bytes(100))
    desk.put(backend, "b/c", bytes(100))
    usage = backend.usage(later())
    assert (usage.records, usage.used_bytes) == (2, 8292)
    assert usage.capacity_bytes is None or usage.capacity_bytes >= usage.used_bytes
    backend.delete(["a"], later())
    assert backend.usage(later()).used_bytes == 100


def test_after_close_everything_answers_closed(backend: Any, desk: Any) -> None:
    desk.put(backend, NAME, b"x")
    backend.close()
    backend.close()
    put, get = desk.put(backend, "late", b"x"), desk.get(backend, NAME, 1)[0]
    assert (put.status, get.status) == (PutStatus.CLOSED, GetStatus.CLOSED)
    for answer in (*backend.exists([NAME, "b"], later()), *backend.delete([NAME], later())):
        assert isinstance(answer, Failure)
        assert isinstance(answer.error, ClosedError)
    for call in (lambda: backend.list("", later()), lambda: backend.usage(later())):
        with pytest.raises(ClosedError):
            call()


def test_what_is_not_done_by_the_deadline_timed_out(backend: Any, desk: Any) -> None:
    """Of a batch whose time is up nothing after the first item may be half done."""
    past = Deadline.after(-1.0)
    results = backend.put([desk.put_item(f"p{number}", b"x") for number in range(3)], past)
    visible = backend.exists([f"p{number}" for number in range(3)], later())
    assert [result.status for result in results[1:]] == [PutStatus.TIMED_OUT] * 2
    assert visible == [result.status is PutStatus.STORED for result in results]
    desk.put(backend, "a", b"x")
    assert [result.status for result in backend.get([desk.get_item("a", 1) for _ in range(3)], past)][1:] == [GetStatus.TIMED_OUT] * 2


def test_sixty_four_racing_creates_of_one_record_leave_one_whole_record(backend: Any, desk: Any) -> None:
    record = os.urandom(16384)
    threads = min(8, backend.capabilities.max_concurrency)
    items = [[desk.put_item(NAME, record) for _ in range(8)] for _ in range(threads)]
    start = threading.Barrier(threads)
    statuses: list[PutStatus] = []

    def run(mine: list[Any]) -> None:
        start.wait(10)
        statuses.extend(backend.put([item], later())[0].status for item in mine)

    workers = [threading.Thread(target=run, args=(mine,), name=f"racer-{number}") for number, mine in enumerate(items)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert len(statuses) == 64
    assert set(statuses) <= {PutStatus.STORED, PutStatus.EXISTS}
    assert PutStatus.STORED in statuses
    assert desk.get(backend, NAME, 16384) == (GetResult(GetStatus.FOUND), record)


def test_a_reader_sees_one_payload_or_the_other_while_they_replace_each_other(backend: Any, desk: Any, rounds: int) -> None:
    """ATM-05"""
    payloads = [bytes([value]) * 12288 for value in (1, 2)]
    items = [desk.put_item("k", payload, Mode.REPLACE) for payload in payloads]
    backend.put(items[:1], later())
    stop = threading.Event()

    def write() -> None:
        for turn in itertools.cycle(range(2)):
            if stop.is_set():
                return
            backend.put([items[turn]], later())

    writer = threading.Thread(target=write, name="replacer")
    writer.start()
    seen: list[int] = []
    item = desk.get_item("k", 12288)
    until_s = time.monotonic() + SOON
    try:
        while (len(seen) < rounds or len(set(seen)) < 2) and time.monotonic() < until_s:
            item.into[0].view[:] = b"\xee" * 12288
            assert backend.get([item], later()) == [GetResult(GetStatus.FOUND)]
            assert bytes(item.into[0].view) in payloads
            seen.append(item.into[0].view[0])
    finally:
        stop.set()
        writer.join(SOON)
    assert set(seen) == {1, 2}


def test_a_reader_that_meets_a_delete_finds_the_whole_record_or_none(backend: Any, desk: Any, rounds: int) -> None:
    """RACE-01"""
    record = os.urandom(65536)
    item = desk.put_item("k", record)
    done = threading.Event()

    def churn() -> None:
        for _ in range(rounds // 3):
            backend.put([item], later())
            backend.delete(["k"], later())
        done.set()

    churner = threading.Thread(target=churn, name="churner")
    churner.start()
    get = desk.get_item("k", 65536)
    while not done.is_set():
        get.into[0].view[:] = b"\xee" * 65536
        [result] = backend.get([get], later())
        assert result.status in (GetStatus.FOUND, GetStatus.MISSING)
        assert result.status is GetStatus.MISSING or get.into[0].view == record
    churner.join(30)


def test_a_timed_out_name_is_a_failure_and_no_miss(reopen: Callable[..., Any]) -> None:
    """A miss that is none would be remembered as one."""
    backend = reopen()
    for answer in backend.exists(["a", "b"], Deadline.after(-1.0)):
        assert answer is False or isinstance(answer.error, TimedOutError)
