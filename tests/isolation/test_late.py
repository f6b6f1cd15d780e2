"""A call that does not come back is given up, and its memory is free once the call has returned or the child is gone."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from isolation_bench import LONG_S, Open, answers, exists, get, is_running, put, until_in_doubt, wait_until, wait_up

from kvstore_sdk.backend import BackendError, Deadline, Failure, Get, GetStatus, Put, PutStatus, Region, TimedOutError
from kvstore_sdk.isolation import IsolatedBackend


def test_a_late_call_is_in_doubt_until_it_returns(open_child: Open, region: Region, tmp_path: Path) -> None:
    backend = open_child(workers=8, hang_kill_s=600.0)
    backend.register_region(region)
    answer = until_in_doubt(lambda timeout_s: get(backend, region, "do/wait/get", 4, timeout_s)[0])
    stored = until_in_doubt(lambda timeout_s: put(backend, region, "do/wait/put", b"1234", timeout_s))
    assert (answer.status, stored.status) == (GetStatus.IN_DOUBT, PutStatus.IN_DOUBT)
    assert isinstance(answer.error, TimedOutError)
    assert isinstance(exists(backend, "do/wait/exists", timeout_s=0.05).error, TimedOutError)
    tickets = [answer.ticket, stored.ticket]
    assert None not in tickets
    assert backend.settle(tickets, Deadline.after(0.05)) == [False, False]
    (tmp_path / "get").touch()
    wait_until(lambda: backend.settle(tickets, Deadline.after(0.05)) == [True, False], "the get has returned")
    (tmp_path / "put").touch()
    # Waits until all are over.
    assert backend.settle(tickets, Deadline.after(LONG_S)) == [True, True]
    # Final, however often it is asked.
    assert backend.settle(tickets, Deadline.after(0.0)) == [True, True]
    (tmp_path / "exists").touch()
    assert exists(backend, "x") is False
    assert backend.deaths == 0


def test_each_item_of_a_late_batch_has_a_ticket_of_its_own(open_child: Open, region: Region, tmp_path: Path) -> None:
    backend = open_child(workers=8, hang_kill_s=600.0)
    backend.register_region(region)
    gets = [Get("do/wait/go", (region.buffer(0, 4),)), Get("x", (region.buffer(8, 4),))]
    answers = until_in_doubt(lambda timeout_s: backend.get(gets, Deadline.after(timeout_s)))
    assert [answer.status for answer in answers] == [GetStatus.IN_DOUBT] * 2
    assert answers[0].ticket != answers[1].ticket
    (tmp_path / "go").touch()
    assert backend.settle([answer.ticket for answer in answers if answer.ticket is not None], Deadline.after(LONG_S)) == [True, True]


@pytest.mark.parametrize("deed", ["do/hang", "do/spin", "do/hog"])
def test_a_child_that_hangs_is_killed_and_its_memory_is_free(open_child: Open, region: Region, deed: str) -> None:
    """With and without the interpreter's lock. Until it is gone, nothing says that the memory is free."""
    backend = open_child(workers=4, hang_kill_s=1.0)
    backend.register_region(region)
    pid = backend.pid
    assert pid is not None
    answer = until_in_doubt(lambda timeout_s: get(backend, region, deed, 4, timeout_s)[0])
    assert answer.status is GetStatus.IN_DOUBT
    assert answer.ticket is not None
    assert backend.settle([answer.ticket], Deadline.after(LONG_S)) == [True]
    assert not is_running(pid)
    wait_up(backend, 1)
    assert put(backend, region, "a", b"1234").status is PutStatus.STORED
    assert backend.deaths == 1


def test_a_child_with_most_workers_in_late_calls_is_killed(open_child: Open, region: Region, caplog: pytest.LogCaptureFixture) -> None:
    backend = open_child(workers=2, hang_kill_s=600.0)
    wait_until(lambda: exists(backend, "do/hang", timeout_s=0.05) and backend.deaths, "both workers hang, and it is killed")
    wait_up(backend, 1)
    assert "more than half of its 2 workers" in caplog.text
    assert exists(backend, "x") is False


def test_other_calls_go_on_beside_one_that_hangs(open_child: Open) -> None:
    backend = open_child(workers=4, hang_kill_s=600.0)
    exists(backend, "do/hang", timeout_s=0.05)
    assert [exists(backend, "x") for _ in range(20)] == [False] * 20
    assert backend.deaths == 0


def test_a_fence_ends_all_at_once(open_child: Open, region: Region) -> None:
    backend = open_child(workers=8, hang_kill_s=600.0)
    backend.register_region(region)
    pid = backend.pid
    assert pid is not None
    answer = until_in_doubt(lambda timeout_s: get(backend, region, "do/hang", 4, timeout_s)[0])
    assert answer.ticket is not None
    backend.fence()
    assert backend.settle([answer.ticket], Deadline.after(LONG_S)) == [True]
    assert not is_running(pid)
    wait_up(backend, 1)
    assert get(backend, region, "x", 4)[0].status is GetStatus.MISSING


def test_what_the_backend_leaves_in_doubt_stays_so_until_the_backend_settles_it(open_child: Open, region: Region) -> None:
    backend = open_child(in_doubt=True)
    backend.register_region(region)
    answer, _ = get(backend, region, "do/in_doubt_get", 4)
    stored = put(backend, region, "do/in_doubt_put", b"1234")
    assert (answer.status, stored.status) == (GetStatus.IN_DOUBT, PutStatus.IN_DOUBT)
    tickets = [answer.ticket, stored.ticket]
    assert backend.settle(tickets, Deadline.after(0.1)) == [False, False]
    exists(backend, "do/settle_now")
    assert backend.settle(tickets, Deadline.after(LONG_S)) == [True, True]


def test_a_late_call_that_returns_in_doubt_stays_in_doubt(open_child: Open, region: Region, tmp_path: Path) -> None:
    backend = open_child(workers=8, in_doubt=True, hang_kill_s=600.0)
    backend.register_region(region)
    gets = [Get("do/wait/go", (region.buffer(0, 4),)), Get("do/in_doubt_get", (region.buffer(8, 4),))]
    answers = until_in_doubt(lambda timeout_s: backend.get(gets, Deadline.after(timeout_s)))
    tickets = [answer.ticket for answer in answers]
    (tmp_path / "go").touch()
    # It has returned, and its transfers may go on.
    assert backend.settle(tickets, Deadline.after(1.0)) == [False, False]
    exists(backend, "do/settle_now")
    assert backend.settle(tickets, Deadline.after(LONG_S)) == [True, True]


def test_tickets_of_a_dead_child_are_over(open_child: Open, region: Region) -> None:
    backend = open_child(in_doubt=True)
    backend.register_region(region)
    stored = put(backend, region, "do/in_doubt_put", b"1234")
    assert stored.ticket is not None
    assert backend.settle([stored.ticket], Deadline.after(0.1)) == [False]
    exists(backend, "do/exit/1")
    assert backend.settle([stored.ticket], Deadline.after(LONG_S)) == [True]


def test_a_backend_that_may_not_doubt_breaks_the_contract_when_it_does(child: IsolatedBackend, region: Region) -> None:
    answer, _ = get(child, region, "do/in_doubt_get", 4)
    assert (answer.status, type(answer.error).__name__) == (GetStatus.FAILED, "BreachError")


@pytest.mark.parametrize("deed", ["do/odd_type", "do/odd_list"])
def test_an_answer_that_cannot_be_read_and_may_leave_doubt_ends_the_child(open_child: Open, region: Region, deed: str) -> None:
    """There is nobody else who could say when its buffers are free."""
    backend = open_child(in_doubt=True)
    backend.register_region(region)
    answer, _ = get(backend, region, deed, 4)
    assert answer.status is GetStatus.IN_DOUBT
    assert answer.ticket is not None
    assert backend.settle([answer.ticket], Deadline.after(LONG_S)) == [True]
    wait_up(backend, 1)


def test_loads_overtake_stores_that_wait_for_a_worker(open_child: Open, region: Region, tmp_path: Path) -> None:
    backend = open_child(workers=4, hang_kill_s=600.0)
    backend.register_region(region)
    puts = [backend.begin("put", [Put("do/wait/go", (region.buffer(0, 4),))], Deadline.after(LONG_S)) for _ in range(20)]
    assert [exists(backend, "x") for _ in range(10)] == [False] * 10
    (tmp_path / "go").touch()
    assert answers(backend, *puts).keys() == set(puts)


def test_a_call_waits_no_longer_than_its_deadline_and_a_little(open_child: Open) -> None:
    """Also those that wait while another thread receives for them."""
    backend = open_child(workers=16, hang_kill_s=600.0)
    ended: list[object] = []

    def ask(timeout_s: float) -> None:
        try:
            ended.append(exists(backend, "do/hang", timeout_s))
        except BackendError as error:
            ended.append(error)

    began_s = time.monotonic()
    threads = [threading.Thread(target=ask, args=(0.1 + 0.05 * number,)) for number in range(7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert len(ended) == 7
    assert all(isinstance(answer, Failure) for answer in ended)
    assert time.monotonic() - began_s < LONG_S
