"""Whatever a child writes to its parent ends in errors, and at most in its own end."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from isolation_bench import LONG_S, Open, answers, exists, get, put, wait_until, wait_up

from kvstore_sdk.backend import BackendError, Deadline, Failure, Get, Put, PutStatus, Region, UnavailableError


@pytest.mark.parametrize("deed", ["do/garbage", "do/oversized", "do/unasked"])
def test_what_is_no_message_ends_the_child(open_child: Open, deed: str, caplog: pytest.LogCaptureFixture) -> None:
    """SEC-06"""
    backend = open_child(workers=8, hang_kill_s=600.0)
    failure = exists(backend, deed)
    assert isinstance(failure, Failure)
    assert type(failure.error) is UnavailableError
    assert "broke the protocol" in str(failure.error)
    wait_up(backend, 1)
    assert exists(backend, "x") is False


def test_a_child_that_hangs_up_is_ended(open_child: Open) -> None:
    backend = open_child(workers=8, hang_kill_s=600.0)
    pid = backend.pid
    failure = exists(backend, "do/hang_up")
    assert isinstance(failure, Failure)
    wait_up(backend, 1)
    assert backend.pid != pid


def test_a_child_that_lies_while_it_starts_again_is_ended_and_another_started(open_child: Open, tmp_path: Path) -> None:
    backend = open_child("open_lies_again")
    exists(backend, "do/exit/1")
    wait_until(lambda: backend.deaths >= 2, "the second start fails")
    (tmp_path / "opened").unlink()
    wait_up(backend, 1)
    assert exists(backend, "x") is False


def test_a_child_that_has_no_room_for_a_region_is_started_again(open_child: Open, region: Region) -> None:
    """A descriptor that is lost must not have the next one mapped in its place."""
    backend = open_child()
    with pytest.raises(BackendError):
        exists(backend, "do/descriptors")
    backend.register_region(region)
    wait_up(backend, 1)
    assert put(backend, region, "a", b"1234").status is PutStatus.STORED
    assert get(backend, region, "a", 4)[1] == b"1234"


def test_a_child_that_uses_too_much_memory_is_restarted(open_child: Open, caplog: pytest.LogCaptureFixture) -> None:
    backend = open_child(memory_bytes=256 << 20)
    for _ in range(2):
        exists(backend, "do/leak/50")
    time.sleep(1.0)
    assert backend.deaths == 0
    for _ in range(4):
        exists(backend, "do/leak/50")
    wait_up(backend, 1)
    assert "bytes of memory, 268435456 are allowed" in caplog.text
    wait_until(lambda: exists(backend, "x") is False, "the new child answers")


def test_a_call_that_runs_while_memory_runs_out_may_end(open_child: Open) -> None:
    """New ones are refused meanwhile."""
    backend = open_child(workers=4, memory_bytes=128 << 20)
    running = backend.begin("exists", ["do/sleep/0.7"], Deadline.after(LONG_S))
    leaking = backend.begin("exists", ["do/leak/150"], Deadline.after(LONG_S))
    assert answers(backend, running, leaking) == {running: [False], leaking: [False]}
    wait_up(backend, 1)


def test_a_region_counts_for_nobody(open_child: Open) -> None:
    """Memory of regions is shared, however much of it a child has touched."""
    backend = open_child(memory_bytes=128 << 20)
    region = Region(512 << 20)
    try:
        backend.register_region(region)
        for start in range(0, region.size_bytes, 64 << 20):
            region.view[start : start + (64 << 20) : 4096] = bytes(64 << 8)
            backend.put([Put("x", (region.buffer(start, 1 << 20),))], Deadline.after(LONG_S))
            backend.get([Get("x", (region.buffer(start + (32 << 20), 1 << 20),))], Deadline.after(LONG_S))
        time.sleep(0.6)
        assert backend.deaths == 0
    finally:
        backend.close()
        region.close()
