"""A child that dies costs answers, and another one takes its place."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from isolation_bench import LONG_S, Open, exists, get, is_running, put, wait_until, wait_up

from kvstore_sdk.backend import Deadline, Failure, GetStatus, PutStatus, Region, UnavailableError
from kvstore_sdk.isolation import IsolatedBackend

DEATHS = {
    "do/die": "killed by SIGSEGV",
    "do/exit/7": "ended with exit code 7",
    "do/exit/0": "ended with exit code 0",
}


@pytest.mark.parametrize(("deed", "how"), DEATHS.items(), ids=["segmentation fault", "exit", "exit with 0"])
def test_the_calls_of_a_child_that_dies_end_and_say_how(child: IsolatedBackend, region: Region, deed: str, how: str) -> None:
    failure = exists(child, deed)
    assert isinstance(failure, Failure)
    assert type(failure.error) is UnavailableError
    assert how in str(failure.error)
    wait_up(child, 1)
    answer, _ = get(child, region, deed, 4)
    assert answer.status is GetStatus.FAILED
    assert how in str(answer.error)
    wait_up(child, 2)
    stored = put(child, region, deed, b"1234")
    assert stored.status is PutStatus.UNKNOWN
    assert how in str(stored.error)
    wait_up(child, 3)
    with pytest.raises(UnavailableError, match=how):
        child.list(deed, Deadline.after(LONG_S))
    wait_up(child, 4)
    assert child.deaths == 4


def test_a_new_child_serves_the_regions_that_are_known(child: IsolatedBackend, region: Region) -> None:
    gone, late = Region(8192), Region(16384)
    child.register_region(gone)
    pid = child.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    # Announced and given up at any moment: the child is up, dying, or not there.
    child.register_region(late)
    child.unregister_region(gone)
    gone.close()
    wait_up(child, 1)
    assert child.pid != pid
    assert put(child, region, "a", b"1234").status is PutStatus.STORED
    assert get(child, region, "a", 4)[1] == b"1234"
    assert put(child, late, "b", b"9876").status is PutStatus.STORED
    assert get(child, region, "b", 4)[1] == b"9876"
    late.close()


def test_while_it_is_down_every_call_answers_at_once_and_says_when_it_tries_again(open_child: Open, region: Region, tmp_path: Path) -> None:
    backend = open_child("open_flaky")
    backend.register_region(region)
    exists(backend, "do/exit/1")
    wait_until(lambda: backend.deaths >= 2, "the second start fails")
    failure = exists(backend, "x")
    assert isinstance(failure, Failure)
    assert "a new one is started in" in str(failure.error)
    # Nothing was sent: definite.
    assert put(backend, region, "x", b"1").status is PutStatus.FAILED
    assert get(backend, region, "x", 1)[0].status is GetStatus.FAILED
    with pytest.raises(UnavailableError):
        backend.usage(Deadline.after(LONG_S))
    assert backend.settle([], Deadline.after(LONG_S)) == []
    assert backend.state == "down"
    assert backend.pid is None
    (tmp_path / "opened").unlink()
    wait_until(lambda: exists(backend, "x") is False, "it opens again")
    assert backend.restarts == 1


def test_many_calls_at_once_all_end_with_each_death(open_child: Open, region: Region) -> None:
    backend = open_child(workers=8, restarts=1000)
    backend.register_region(region)
    found: list[Any] = []

    def ask(place: int) -> None:
        for turn in range(40):
            name = "do/exit/1" if turn == 20 and place % 4 == 0 else "x"
            found.append(exists(backend, name))
            time.sleep(0.005)

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert not any(thread.is_alive() for thread in threads)
    assert len(found) == 8 * 40
    assert all(answer is False or isinstance(answer.error, UnavailableError) for answer in found)
    assert backend.deaths >= 1
    wait_until(lambda: exists(backend, "x") is False, "it is up again")


def test_after_too_many_deaths_it_is_left_alone(open_child: Open, caplog: pytest.LogCaptureFixture) -> None:
    backend = open_child(restarts=2)
    for death in range(3):
        exists(backend, "do/exit/1")
        if death < 2:
            wait_up(backend, death + 1)
    wait_until(lambda: "in 10 minutes" in caplog.text, "it is given up")
    assert backend.state == "given up"
    failure = exists(backend, "x")
    assert isinstance(failure, Failure)
    assert "started in 59" in str(failure.error) or "started in 600" in str(failure.error)
    backend.close()
    assert backend.state == "closed"


def test_a_child_that_offers_something_else_stays_down(open_child: Open, caplog: pytest.LogCaptureFixture) -> None:
    backend = open_child("open_changes")
    first = backend.capabilities
    exists(backend, "do/exit/1")
    wait_until(lambda: backend.state == "given up", "it is given up")
    assert [record.levelname for record in caplog.records if "something else" in record.getMessage()] == ["ERROR"]
    assert isinstance(exists(backend, "x"), Failure)
    assert backend.capabilities == first
    assert backend.pid is None


def test_processes_that_a_child_started_end_with_it(open_child: Open, tmp_path: Path) -> None:
    backend = open_child()
    exists(backend, "do/grandchild")
    pid = int((tmp_path / "grandchild").read_text())
    assert is_running(pid)
    exists(backend, "do/exit/1")
    wait_until(lambda: not is_running(pid), "the process that the child started ends")


def test_a_region_that_was_closed_by_its_owner_does_no_harm(open_child: Open) -> None:
    backend = open_child()
    region = Region(4096)
    backend.register_region(region)
    region.close()
    exists(backend, "do/exit/1")
    wait_up(backend, 1)
    assert exists(backend, "x") is False
    backend.unregister_region(region)
    with pytest.raises(OSError, match="Bad file descriptor"):
        backend.register_region(region)
