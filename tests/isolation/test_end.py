"""Closing, forking, and dying of the parent leave nothing behind."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from isolation_bench import LONG_S, Open, answers, exists, get, is_running, put, wait_until, wait_up

from kvstore_sdk.backend import ClosedError, Deadline, Get, GetStatus, Put, PutStatus, Region, UnavailableError
from kvstore_sdk.isolation import IsolatedBackend, process
from kvstore_sdk.isolation.hello import Spec, hello
from kvstore_sdk.isolation.wire import encode

HERE = Path(__file__).parent


def test_closing_closes_the_store_and_ends_the_child(child: IsolatedBackend, region: Region, tmp_path: Path) -> None:
    pid = child.pid
    assert pid is not None
    child.close()
    assert (tmp_path / "closed").exists()
    assert not is_running(pid)
    assert (child.state, child.pid, child.deaths) == ("closed", None, 0)
    child.close()


def test_after_closing_every_call_says_so(child: IsolatedBackend, region: Region) -> None:
    child.close()
    assert isinstance(exists(child, "x").error, ClosedError)
    assert put(child, region, "x", b"1").status is PutStatus.CLOSED
    assert get(child, region, "x", 1)[0].status is GetStatus.CLOSED
    assert isinstance(child.delete(["x"], Deadline.after(LONG_S))[0].error, ClosedError)
    with pytest.raises(ClosedError):
        child.list("", Deadline.after(LONG_S))
    with pytest.raises(ClosedError):
        child.usage(Deadline.after(LONG_S))
    number = child.begin("exists", ["x"], Deadline.after(LONG_S))
    assert isinstance(answers(child, number)[number][0].error, ClosedError)
    other = Region(4096)
    child.register_region(other)
    child.unregister_region(region)
    other.close()
    child.fence()
    assert child.state == "closed"


def test_a_store_that_hangs_in_closing_is_killed(child: IsolatedBackend, tmp_path: Path) -> None:
    (tmp_path / "hang in close").touch()
    pid = child.pid
    assert pid is not None
    child.close()
    assert not is_running(pid)
    assert child.state == "closed"


def test_calls_that_run_while_it_is_closed_end(open_child: Open, region: Region, tmp_path: Path) -> None:
    """One ends on its own, if the machine lets it in time, the other with the child; both are told."""
    backend = open_child(workers=4)
    backend.register_region(region)
    found: dict[str, Any] = {}

    def ask(name: str) -> None:
        found[name] = put(backend, region, name, b"1234")

    threads = [threading.Thread(target=ask, args=(name,)) for name in ("do/busy/one/0.3", "do/busy/other/3600")]
    for thread in threads:
        thread.start()
    wait_until(lambda: (tmp_path / "one").exists() and (tmp_path / "other").exists(), "both have begun")
    backend.close()
    for thread in threads:
        thread.join(LONG_S)
    assert found["do/busy/one/0.3"].status in (PutStatus.STORED, PutStatus.UNKNOWN)
    # What became of it nobody knows.
    assert found["do/busy/other/3600"].status is PutStatus.UNKNOWN
    assert isinstance(found["do/busy/other/3600"].error, ClosedError)


def test_several_threads_may_close_at_once_and_while_it_is_down(open_child: Open) -> None:
    backend = open_child("open_flaky")
    exists(backend, "do/exit/1")
    wait_until(lambda: backend.deaths >= 2, "it is down")
    threads = [threading.Thread(target=backend.close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert backend.state == "closed"


def test_nothing_is_left_of_many_that_lived_and_died(open_child: Open, region: Region) -> None:
    """RES: descriptors, threads and processes."""

    def live() -> None:
        backend = open_child()
        backend.register_region(region)
        put(backend, region, "x", b"1")
        exists(backend, "do/exit/1")
        wait_up(backend, 1)
        get(backend, region, "do/sleep/0.3", 4, timeout_s=0.01)
        backend.begin("exists", ["x"], Deadline.after(LONG_S))
        backend.close()

    live()
    gc.collect()
    before = _descriptors(), threading.active_count(), _children()
    for _ in range(2):
        live()
    gc.collect()
    assert (_descriptors(), threading.active_count(), _children()) == before


def test_starts_that_fail_leave_nothing(open_child: Open) -> None:
    gc.collect()
    before = _descriptors(), threading.active_count(), _children()
    for factory in ("open_wrong", "open_throws", "open_dies"):
        with pytest.raises(Exception):  # noqa: B017, PT011
            open_child(factory)
    gc.collect()
    assert (_descriptors(), threading.active_count(), _children()) == before


def test_a_child_whose_parent_died_before_it_could_be_tied_to_it_opens_nothing(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(encode(hello(Spec("obeying:open_flaky", {}, str(tmp_path)), "it", 0)))
        # Of another parent: this one has ended, and somebody else has become the child's.
        arguments = [sys.executable, "-P", "-c", process._COMMAND, process._ROOT, str(theirs.fileno()), str(os.getppid())]
        with subprocess.Popen(arguments, pass_fds=(theirs.fileno(),)) as child:
            try:
                assert child.wait(LONG_S) == 1
            finally:
                child.kill()
    assert not (tmp_path / "opened").exists()


STARTS_AGAIN = """
import os, sys, time
if sys.argv[2] == "no standard error":
    os.close(2)
from kvstore_sdk.backend import Deadline
from kvstore_sdk.isolation import open_isolated
folder = os.path.join(sys.argv[1], "job")
os.mkdir(folder)
os.chdir(folder)
if sys.argv[2] == "many descriptors":
    many = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
backend = open_isolated("obeying:open_obeys", location=sys.argv[1])
if sys.argv[2] == "no working folder":
    os.rmdir(folder)
backend.fence()
until_s = time.monotonic() + 40
while not backend.restarts and time.monotonic() < until_s:
    time.sleep(0.01)
print(backend.restarts, backend.exists(["x"], Deadline.after(60)))
backend.close()
"""


@pytest.mark.parametrize("what", ["no standard error", "no working folder", "many descriptors"])
def test_children_come_up_whatever_their_parent_lacks(tmp_path: Path, what: str) -> None:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", STARTS_AGAIN, str(tmp_path), what],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.stdout == "1 [False]\n", done.stderr


PARENT = """
import sys, time
from kvstore_sdk.backend import Deadline
from kvstore_sdk.isolation import open_isolated
backends = [open_isolated("obeying:open_obeys", location=sys.argv[1]) for _ in range(2)]
backends[1].begin("exists", [sys.argv[2]], Deadline.after(100))
time.sleep(0.5)
print(*(backend.pid for backend in backends), flush=True)
if sys.argv[3] == "wait":
    time.sleep(100)
"""


@pytest.mark.parametrize(
    ("deed", "end"), [("x", "killed"), ("do/hang", "killed"), ("do/hog", "killed"), ("do/spin", "killed"), ("do/hog", "ended")]
)
def test_no_child_outlives_its_parent(tmp_path: Path, deed: str, end: str) -> None:
    """Whatever it is doing, and however the parent went."""
    arguments = [sys.executable, "-c", PARENT, str(tmp_path), deed, "wait" if end == "killed" else "end"]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    with subprocess.Popen(arguments, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        if end == "killed":
            assert all(map(is_running, pids))
            parent.send_signal(signal.SIGKILL)
        parent.wait(LONG_S)
    wait_until(lambda: not any(map(is_running, pids)), "the children end")


def test_a_forked_process_gets_errors_and_the_parent_goes_on(child: IsolatedBackend, region: Region) -> None:
    assert put(child, region, "x", b"1234").status is PutStatus.STORED
    stop = threading.Event()
    found: list[Any] = []

    def ask() -> None:
        while not stop.is_set():
            found.append(get(child, region, "x", 4)[1])

    assert _watched()
    asking = threading.Thread(target=ask)
    asking.start()
    codes = []
    try:
        for _ in range(5):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    code = _what_a_fork_gets(child, region)
                finally:
                    os._exit(code)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    finally:
        stop.set()
        asking.join(LONG_S)
    assert codes == [0] * 5
    assert set(found) == {b"1234"}
    assert (child.deaths, child.state) == (0, "up")


def _what_a_fork_gets(child: IsolatedBackend, region: Region) -> int:
    """0, or the number of the first thing that is wrong. Nothing may hang."""
    signal.alarm(30)
    if _watched():
        return 8
    if not isinstance(exists(child, "x").error, UnavailableError):
        return 2
    # The memory is the parent's as well.
    buffer, deadline = region.buffer(512 << 10, 1), Deadline.after(LONG_S)
    if child.put([Put("x", (buffer,))], deadline)[0].status is not PutStatus.FAILED:
        return 3
    if child.get([Get("x", (buffer,))], deadline)[0].status is not GetStatus.FAILED:
        return 7
    try:
        child.list("", Deadline.after(LONG_S))
        return 4
    except UnavailableError:
        pass
    number = child.begin("put", [Put("x", (buffer,))], deadline)
    child.wait_answers(time.monotonic() + 30)
    [(told, error)] = child.take_answers()
    if told != number or not isinstance(error, UnavailableError):
        return 5
    other = Region(4096)
    try:
        child.register_region(other)
        return 6
    except UnavailableError:
        pass
    child.fence()
    child.close()
    return 0


def _watched() -> list[str]:
    """What a keeper holds of its child and of the memory."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    return [link for link in links if "[pidfd]" in link]


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _children() -> int:
    tasks = Path("/proc/self/task").iterdir()
    return len({pid for task in tasks for pid in (task / "children").read_text().split()})
