"""Walking: every name once, in memory for one page, with patience for a store that fails now and then and none for one that cheats."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from damage import fill
from made_up import Listing, MadeUp
from places import Place

from kvstore_sdk.backend import (
    Backend,
    BackendError,
    BreachError,
    Capabilities,
    Deadline,
    DeniedError,
    ListEntry,
    ListPage,
    ThrottledError,
    TimedOutError,
    UnavailableError,
    UnsupportedError,
)
from kvstore_sdk.tools import retry as retry_module
from kvstore_sdk.tools.retry import Retry
from kvstore_sdk.tools.stat import stat
from kvstore_sdk.tools.verify import Sample, Verification
from kvstore_sdk.tools.walk import walk


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long was waited, without waiting."""
    pauses: list[float] = []
    monkeypatch.setattr(retry_module.time, "sleep", pauses.append)
    return pauses


def entries(*names: str) -> list[ListEntry]:
    return [ListEntry(name, 8192) for name in names]


def test_pages_of_any_length_give_each_name_once(place: Place) -> None:
    filled = fill(place.tree)
    wanted = sorted(filled.records | filled.manifests)
    with contextlib.closing(place.open()) as backend:
        for page in (1, 3, len(wanted), 1000):
            assert sorted(entry.name for entry in walk(backend, page=page)) == wanted


def test_what_stays_comes_once_while_others_come_and_go(place: Place) -> None:
    filled = fill(place.tree, chunks=8)
    names = sorted(filled.records)
    staying, going = names[::2], names[1::2]
    with contextlib.closing(place.open()) as backend:
        found: list[str] = []
        for number, entry in enumerate(walk(backend, page=3)):
            found.append(entry.name)
            if number < len(going):
                place.tree.remove(going[number])
                place.tree.write(f"{going[number][:-2]}{7 + number}", b"come")
    assert sorted(name for name in found if name in staying) == staying


@pytest.mark.parametrize(
    "failure",
    [UnavailableError("list: down"), TimedOutError("list: late"), ThrottledError("list: slow down", 7.0), OSError(5, "I/O error")],
    ids=lambda failure: type(failure).__name__,
)
def test_a_page_that_fails_for_now_is_asked_for_again(failure: Exception, no_pauses: list[float]) -> None:
    pages = {None: ListPage(entries("a", "b"), "b"), "b": ListPage(entries("c"), None)}
    left = {None: 2, "b": 3}

    def list_(prefix: str, cursor: str | None, limit: int) -> ListPage:
        left[cursor] -= 1
        if left[cursor] >= 0:
            raise failure
        return pages[cursor]

    assert [entry.name for entry in walk(Listing(list_))] == ["a", "b", "c"]
    assert len(no_pauses) == 5
    if isinstance(failure, ThrottledError):
        assert min(no_pauses) >= 7.0


def test_a_store_that_stays_down_ends_the_walk_with_its_own_error(no_pauses: list[float]) -> None:
    def list_(prefix: str, cursor: str | None, limit: int) -> ListPage:
        raise UnavailableError("list: nobody there")

    with pytest.raises(UnavailableError, match="nobody there"):
        list(walk(Listing(list_), retry=Retry(tries=4)))
    assert len(no_pauses) == 3


@pytest.mark.parametrize(
    ("failure", "raised"),
    [
        (DeniedError("list: no"), DeniedError),
        (ThrottledError("list: come back tomorrow", 86400.0), ThrottledError),
        (ValueError("odd"), BackendError),
    ],
    ids=["denied", "asks for a day", "of its own"],
)
def test_what_waiting_does_not_mend_is_not_tried_again(failure: Exception, raised: type[Exception], no_pauses: list[float]) -> None:
    def list_(prefix: str, cursor: str | None, limit: int) -> ListPage:
        raise failure

    with pytest.raises(raised):
        list(walk(Listing(list_)))
    assert no_pauses == []


def test_pages_that_take_too_long_get_shorter() -> None:
    names = [f"n{number:03}" for number in range(100)]
    asked: list[int] = []

    def list_(prefix: str, cursor: str | None, limit: int) -> ListPage:
        asked.append(limit)
        if limit > 20:
            raise TimedOutError("list: late")
        start = int(cursor or 0)
        end = start + limit
        return ListPage(entries(*names[start:end]), str(end) if end < len(names) else None)

    assert [entry.name for entry in walk(Listing(list_), page=1000)] == names
    assert asked[:4] == [1000, 250, 62, 15]
    assert set(asked[4:]) == {15}


@pytest.mark.parametrize(
    "page",
    [
        None,
        [],
        ListPage(["a"], None),  # type: ignore[list-item]
        ListPage(entries("a"), 3),  # type: ignore[arg-type]
        ListPage([ListEntry("a", -1)], None),
        ListPage([ListEntry("a", 1.5)], None),  # type: ignore[arg-type]
        ListPage([ListEntry("a", True)], None),
        ListPage([ListEntry("a", 1, "yesterday")], None),  # type: ignore[arg-type]
        ListPage(7, None),  # type: ignore[arg-type]
    ],
    ids=["none", "list", "names", "cursor", "negative", "fraction", "bool", "time", "number"],
)
def test_an_answer_that_is_no_page_is_a_breach(page: Any) -> None:
    with pytest.raises(BackendError) as raised:
        list(walk(Listing(lambda *_: page)))
    assert "list" in str(raised.value)
    assert "vendor" in str(raised.value) or "raised TypeError" in str(raised.value)


@pytest.mark.parametrize("cursors", [["again", "again"], [f"c{number}" for number in range(20_000)]], ids=["same", "empty pages"])
def test_a_listing_without_an_end_ends(cursors: list[str]) -> None:
    given: Iterator[str] = itertools.chain(cursors, itertools.repeat(cursors[-1]))
    with pytest.raises(BreachError, match="does not get on"):
        list(walk(Listing(lambda *_: ListPage([], next(given)))))


def test_a_store_that_does_not_list_is_told_before_anything_is_asked() -> None:
    class Bare:
        capabilities = Capabilities(max_record_bytes=8192)

        def exists(self, names: Any, deadline: Deadline) -> list[Any]:
            raise AssertionError

        put = get = exists

        def close(self) -> None:
            pass

    backend: Backend = Bare()
    with pytest.raises(UnsupportedError, match="Bare does not list what it holds"):
        walk(backend)


def peak_of(work: Callable[[int], object], count: int) -> int:
    tracemalloc.start()
    try:
        work(count)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def walk_of(count: int) -> None:
    assert sum(1 for _ in walk(MadeUp(count))) == count


def stat_of(count: int) -> None:
    assert stat(MadeUp(count), "", Retry()).records.count == count


def verify_of(count: int) -> None:
    run = Verification(MadeUp(count), Retry(), sample=Sample(records=100, seed=1), threads=2)
    assert list(run) == []
    assert run.listed == count


@pytest.mark.parametrize("work", [walk_of, stat_of, verify_of])
def test_memory_is_that_of_a_page_however_many_names_there_are(work: Callable[[int], object]) -> None:
    work(100)
    few = peak_of(work, 2000)
    many = peak_of(work, 30_000)
    assert many < few + 200_000, f"{few} bytes for 2,000 names, {many} for 30,000"


def resident_of(*command: str) -> tuple[int, int]:
    """The most memory that the command had, and the lines that it printed."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    child = subprocess.Popen([sys.executable, "-m", "kvstore_sdk", *command], stdout=subprocess.PIPE, env=environment)
    assert child.stdout is not None
    lines = sum(block.count(b"\n") for block in iter(lambda: child.stdout.read(1 << 20), b""))  # type: ignore[union-attr]
    child.stdout.close()
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0
    return used.ru_maxrss * 1024, lines


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", [["ls"], ["ls", "--json"], ["stat"], ["verify", "--sample", "1000"]], ids=" ".join)
def test_a_million_names_take_no_more_memory_than_a_thousand(command: list[str]) -> None:
    """A list of them would have 200 MB."""
    store = ["made_up:open_made_up", "--location"]
    few, _ = resident_of(*command, *store, "1000")
    many, lines = resident_of(*command, *store, "1000000")
    assert many < few + (8 << 20)
    if command[0] == "ls":
        assert lines == 1_000_000
