"""A filesystem that stops answering, as a dead file server does: no call returns, and no signal helps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from vllm_engines import Engine, Stored, fs_entry
from vllm_faulty import set_timeouts

SERVER = Path(__file__).with_name("fuse_server.py")
SHORT = {"lookup_timeout_s": 0.3, "load_timeout_s": 0.5, "store_timeout_s": 0.5}
LIMIT_S = 30.0
"""A machine that computes slowly takes longer than the time-outs; a mount that hangs does for ever."""


@pytest.fixture
def mount(folder: Path, tmp_path: Path) -> Iterator[tuple[Path, Callable[[], None]]]:
    """The stored folder as a mount, and what makes it hang."""
    where = tmp_path / "mount"
    where.mkdir()
    server = subprocess.Popen([sys.executable, SERVER, folder, where], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    yield where, lambda: os.kill(server.pid, signal.SIGUSR1)
    # The end of the server ends every call that waits for it.
    server.kill()
    server.communicate()
    subprocess.run(["umount", "-l", where], check=True, timeout=30)


def test_a_mount_that_stops_answering_costs_deadlines_and_nothing_else(
    stored: Stored, mount: tuple[Path, Callable[[], None]], start: Callable[..., Engine]
) -> None:
    """LIV-07: requests go on with right answers, a reset and the shutdown stay bounded."""
    where, hang = mount
    engine = start(stored.model, fs_entry(where, close_timeout_s=1.0, drain_timeout_s=1.0))
    answers = engine.ask(stored.prompts[:2])
    stored.check(answers)
    assert [answer.reused for answer in answers] == [stored.reuse] * 2, "it works as long as it answers"
    hang()
    set_timeouts(engine.tier, **SHORT)
    for number in range(2, 8):
        started = time.monotonic()
        answers = engine.ask([stored.prompts[number]])
        stored.check(answers, first=number)
        assert time.monotonic() - started < LIMIT_S
    assert engine.metrics.total("abandoned_calls") > 0
    assert engine.metrics.total("breaker_opened") > 0
    started = time.monotonic()
    engine.reset()
    assert time.monotonic() - started < LIMIT_S
    stored.check(engine.ask(stored.prompts[:1]))
    started = time.monotonic()
    engine.stop()
    assert time.monotonic() - started < LIMIT_S
