"""The same answers without a thread that waits for them."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from isolation_bench import LONG_S, Open, answers, exists, until_in_doubt, wait_until, wait_up

from kvstore_sdk.backend import (
    Deadline,
    DeleteStatus,
    Failure,
    Get,
    GetResult,
    GetStatus,
    InvalidError,
    Put,
    PutResult,
    PutStatus,
    Region,
    ThrottledError,
    TimedOutError,
    UnavailableError,
    UnsupportedError,
)
from kvstore_sdk.isolation import IsolatedBackend


def test_each_operation_answers_as_its_method(child: IsolatedBackend, region: Region) -> None:
    region.view[:4] = b"1234"
    put = child.begin("put", [Put("x", (region.buffer(0, 4),))], Deadline.after(LONG_S))
    assert answers(child, put) == {put: [PutResult(PutStatus.STORED)]}
    get = child.begin("get", [Get("x", (region.buffer(8, 4),)), Get("y", (region.buffer(16, 4),))], Deadline.after(LONG_S))
    there = child.begin("exists", ["x", "y"], Deadline.after(LONG_S))
    assert answers(child, get, there) == {
        get: [GetResult(GetStatus.FOUND), GetResult(GetStatus.MISSING)],
        there: [True, False],
    }
    assert bytes(region.view[8:12]) == b"1234"
    gone = child.begin("delete", ["x", "y"], Deadline.after(LONG_S))
    assert answers(child, gone) == {gone: [DeleteStatus.DELETED, DeleteStatus.ABSENT]}
    assert child.take_answers() == []


def test_exceptions_are_answers(child: IsolatedBackend, region: Region) -> None:
    other = Region(4096)
    throttled = child.begin("exists", ["do/throttle"], Deadline.after(LONG_S))
    unknown = child.begin("get", [Get("x", (other.buffer(0, 4),))], Deadline.after(LONG_S))
    odd = child.begin("list", [""], Deadline.after(LONG_S))
    strange = child.begin("exists", [object()], Deadline.after(LONG_S))
    found = answers(child, throttled, unknown, odd, strange)
    assert isinstance(found[throttled], ThrottledError)
    assert isinstance(found[unknown], InvalidError)
    assert isinstance(found[odd], UnsupportedError)
    assert isinstance(found[strange], UnavailableError)
    other.close()


def test_what_the_backend_lacks_is_refused(open_child: Open) -> None:
    backend = open_child("open_plain")
    number = backend.begin("delete", ["x"], Deadline.after(LONG_S))
    assert isinstance(answers(backend, number)[number], UnsupportedError)


def test_nothing_is_waited_for_while_nothing_is_asked(child: IsolatedBackend) -> None:
    child.wait_answers(time.monotonic() + 1000)
    assert child.take_answers() == []


def test_more_calls_than_workers_queue_in_the_child(open_child: Open, region: Region) -> None:
    backend = open_child(workers=2)
    backend.register_region(region)
    numbers = [backend.begin("exists", ["x"] * 10, Deadline.after(LONG_S)) for _ in range(500)]
    assert answers(backend, *numbers) == {number: [False] * 10 for number in numbers}


def test_a_call_that_waited_for_a_worker_until_its_deadline_was_not_begun(open_child: Open, region: Region, tmp_path: Path) -> None:
    backend = open_child(workers=1, hang_kill_s=600.0)
    backend.register_region(region)
    blocking = backend.begin("exists", ["do/sleep/0.8"], Deadline.after(LONG_S))
    late = backend.begin("put", [Put("x", (region.buffer(0, 4),))], Deadline.after(0.4))
    [result] = answers(backend, late)[late]
    if result.status is PutStatus.IN_DOUBT:
        assert backend.settle([result.ticket], Deadline.after(LONG_S)) == [True]
    else:
        assert result.status is PutStatus.TIMED_OUT
    answers_of_blocking = exists(backend, "x")
    assert answers_of_blocking is False
    assert blocking != late


def test_deadlines_and_settling_need_no_thread(open_child: Open, region: Region, tmp_path: Path) -> None:
    backend = open_child(workers=8, hang_kill_s=600.0)
    backend.register_region(region)

    def ask(timeout_s: float) -> GetResult:
        number = backend.begin("get", [Get("do/wait/go", (region.buffer(0, 4),))], Deadline.after(timeout_s))
        [result] = answers(backend, number)[number]
        return result

    result = until_in_doubt(ask)
    assert result.status is GetStatus.IN_DOUBT
    there = backend.begin("exists", ["do/wait/go"], Deadline.after(0.2))
    assert isinstance(answers(backend, there)[there][0].error, TimedOutError)
    early = backend.begin("settle", [result.ticket], Deadline.after(0.1))
    assert answers(backend, early) == {early: [False]}
    waiting = backend.begin("settle", [result.ticket], Deadline.after(LONG_S))
    (tmp_path / "go").touch()
    assert answers(backend, waiting) == {waiting: [True]}


def test_a_death_ends_polled_calls(open_child: Open, region: Region) -> None:
    backend = open_child(workers=8, hang_kill_s=600.0)
    backend.register_region(region)
    numbers = [
        backend.begin("exists", ["do/hang"], Deadline.after(LONG_S)),
        backend.begin("get", [Get("do/hang", (region.buffer(0, 4),))], Deadline.after(LONG_S)),
        backend.begin("put", [Put("do/hang", (region.buffer(8, 4),))], Deadline.after(LONG_S)),
    ]
    assert backend.pid is not None
    os.kill(backend.pid, signal.SIGKILL)
    found = answers(backend, *numbers)
    assert isinstance(found[numbers[0]][0], Failure)
    assert found[numbers[1]][0].status is GetStatus.FAILED
    assert found[numbers[2]][0].status is PutStatus.UNKNOWN
    assert "SIGKILL" in str(found[numbers[2]][0].error)
    wait_up(backend, 1)


def test_blocking_and_polled_calls_share_the_line(child: IsolatedBackend) -> None:
    stop = threading.Event()
    wrong: list[object] = []

    def ask() -> None:
        while not stop.is_set():
            if (answer := exists(child, "x")) is not False:
                wrong.append(answer)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(50):
            numbers = [child.begin("exists", ["x"], Deadline.after(LONG_S)) for _ in range(5)]
            assert answers(child, *numbers) == {number: [False] for number in numbers}
    finally:
        stop.set()
        for thread in threads:
            thread.join(LONG_S)
    assert wrong == []
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("deed", ["do/hang", "do/hog"])
def test_a_child_that_reads_nothing_makes_nobody_wait(open_child: Open, deed: str) -> None:
    """What it does not take is refused in the end, and all ends with its death."""
    backend = open_child(workers=1, hang_kill_s=0.5)
    numbers = [backend.begin("exists", [deed], Deadline.after(1.0))]
    time.sleep(0.2)
    names = ["n" * 200] * 1000
    numbers += [backend.begin("exists", names, Deadline.after(1.0)) for _ in range(300)]
    found = answers(backend, *numbers)
    assert len(found) == 301
    assert all(isinstance(answer[0], Failure) for answer in found.values() if answer != [False] * 1000)
    wait_until(lambda: backend.deaths >= 1, "it is killed")
