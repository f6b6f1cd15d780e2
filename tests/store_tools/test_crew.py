"""Threads that work through one sequence: everything once, a bounded way ahead, and no thread left."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvstore_sdk.tools.crew import spread

THREADS = 4
LIMIT_S = 30.0


def no_threads() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name.startswith("kvstore-tool")]


@contextlib.contextmanager
def squares() -> Iterator[Callable[[int], int]]:
    yield lambda number: number * number


def test_every_item_is_worked_on_once() -> None:
    assert sorted(spread(range(1000), squares, THREADS)) == [number * number for number in range(1000)]
    assert list(spread([], squares, THREADS)) == []
    assert no_threads()


def test_the_sequence_is_read_only_so_far_ahead() -> None:
    read = [0]

    def source() -> Iterator[int]:
        for number in range(10_000):
            read[0] += 1
            yield number

    with contextlib.closing(spread(source(), squares, THREADS)) as found:
        for taken, _ in zip(range(1, 101), found, strict=False):
            assert read[0] <= taken + 4 * THREADS
    assert no_threads()


@pytest.mark.parametrize("where", ["sequence", "work", "entering"])
def test_the_first_exception_ends_all_of_it(where: str) -> None:
    def source() -> Iterator[int]:
        for number in range(1000):
            if where == "sequence" and number == 50:
                raise KeyError("sequence")
            yield number

    @contextlib.contextmanager
    def worker() -> Iterator[Callable[[int], int]]:
        if where == "entering":
            raise KeyError("entering")

        def work(number: int) -> int:
            if where == "work" and number == 50:
                raise KeyError("work")
            return number

        yield work

    with pytest.raises(KeyError, match=where):
        list(spread(source(), worker, THREADS))
    assert no_threads()


def test_a_worker_is_entered_and_left_in_each_thread_and_used_in_it_alone() -> None:
    lock = threading.Lock()
    entered: list[int] = []
    left: list[int] = []

    @contextlib.contextmanager
    def worker() -> Iterator[Callable[[int], bool]]:
        me = threading.get_ident()
        with lock:
            entered.append(me)
        yield lambda _: threading.get_ident() == me
        with lock:
            left.append(me)

    assert all(spread(range(100), worker, THREADS))
    assert len(entered) == THREADS
    assert sorted(entered) == sorted(left)


def test_whoever_stops_asking_waits_for_no_call_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore_sdk.tools.crew._LINGER_S", 0.1)
    release = threading.Event()

    @contextlib.contextmanager
    def worker() -> Iterator[Callable[[int], int]]:
        def work(number: int) -> int:
            if number:
                assert release.wait(LIMIT_S)
            return number

        yield work

    found = spread(range(100), worker, THREADS)
    assert next(found) == 0
    found.close()
    assert not no_threads()
    release.set()
    end_s = time.monotonic() + LIMIT_S
    while not no_threads():
        assert time.monotonic() < end_s
        time.sleep(0.01)
