"""A loop for callers that block: what it returns, how long that may take, and what is left of it."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
from forking import in_child
from scripted_client import Calling

from kvstore_sdk.backend import BackendError, ClosedError, TimedOutError
from kvstore_sdk_backends.loop import EventLoop


def test_a_step_on_the_loop_returns_raises_and_is_bounded() -> None:
    loop = EventLoop("kvstore-test")

    async def fail() -> None:
        raise BackendError("as told")

    async def nothing() -> None: ...

    assert loop.run("test", lambda: asyncio.sleep(0, "done"), 10) == "done"
    with pytest.raises(BackendError, match="as told"):
        loop.run("test", fail, 10)
    with pytest.raises(TimedOutError, match="test open: not done within"):
        loop.run("test open", lambda: asyncio.sleep(3600), 0.05)
    assert loop.close(nothing, 5)
    with pytest.raises(ClosedError, match="test: the backend is closed"):
        loop.run("test", lambda: asyncio.sleep(0), 60)


def test_a_look_up_that_hangs_holds_up_neither_closing_nor_the_end_of_the_process() -> None:
    script = """
import asyncio, time
from kvstore_sdk.backend import TimedOutError
from kvstore_sdk_backends.loop import EventLoop

async def look_up(): await asyncio.get_running_loop().run_in_executor(None, time.sleep, 3600)
async def nothing(): pass

loop = EventLoop("kvstore-test")
try:
    loop.run("test", look_up, 0.1)
except TimedOutError:
    print(loop.close(nothing, 30))
"""
    # Bounded by an hour otherwise.
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=250, check=True)
    assert (ended.stdout, ended.stderr) == ("True\n", "")


def test_a_look_up_tells_what_it_found_or_raised() -> None:
    loop = EventLoop("kvstore-test")

    async def nothing() -> None: ...

    async def look_up(step: Callable[[str], int], text: str) -> int:
        return await asyncio.get_running_loop().run_in_executor(None, step, text)

    assert loop.run("test", lambda: look_up(int, "7"), 10) == 7
    with pytest.raises(ValueError, match="seven"):
        loop.run("test", lambda: look_up(int, "seven"), 10)
    assert loop.close(nothing, 5)


def test_a_look_up_for_which_there_is_no_thread_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = EventLoop("kvstore-test")

    async def nothing() -> None: ...

    async def look_up() -> int:
        return await asyncio.get_running_loop().run_in_executor(None, int, "7")

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(OSError, match="can't start new thread"):
            loop.run("test", look_up, 10)
    assert loop.run("test", look_up, 10) == 7
    assert loop.close(nothing, 5)


def test_what_a_child_throws_away_stays_with_its_parent() -> None:
    """A transport that is collected in the child unregisters its socket: from a set of the child's own."""
    loop = EventLoop("kvstore-test")
    near, far = socket.socketpair()
    near.setblocking(False)

    async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(sock=near)

    reader, writer = loop.run("test", connect, 10)
    in_child(writer.close)
    asked = Calling(lambda: loop.run("test", lambda: reader.readexactly(4), 10))
    far.sendall(b"here")
    assert asked.answer() == b"here"

    async def disconnect() -> None:
        writer.close()
        await writer.wait_closed()

    assert loop.close(disconnect, 5)
    far.close()
