"""The line to a child and who reads it, without a child."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from isolation_bench import LONG_S

from kvstore_sdk.backend import BackendError, Deadline, PutStatus, Region, UnavailableError
from kvstore_sdk.isolation.exchange import Exchange
from kvstore_sdk.isolation.link import Link
from kvstore_sdk.isolation.regions import KnownRegions
from kvstore_sdk.isolation.wire import MAX_FRAME_BYTES, encode

Ends = tuple[Link, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """A line, and the child's end of it."""
    ours, theirs = socket.socketpair()
    link = Link(ours)
    with theirs:
        yield link, theirs
        link.close()


def _exchange(link: Link) -> Exchange:
    exchange = Exchange("it", lambda: None)
    exchange.up(link, {})
    return exchange


def _died() -> BackendError:
    return UnavailableError("died")


def test_a_line_is_closed_beside_a_thread_that_reads_an_answer_and_has_to_ask_again(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """A late call returns in doubt, so that its settle has to be asked of the child, which dies meanwhile."""
    link, theirs = ends
    exchange = _exchange(link)
    put = exchange.submit("put", [1], list, Deadline.after(-1.0), None)
    exchange.tend()
    [(_, [result])] = exchange.take()  # type: ignore[misc, has-type]
    assert result.status is PutStatus.IN_DOUBT
    exchange.submit("settle", [result.ticket], lambda: None, Deadline.after(LONG_S), None)
    theirs.sendall(encode([put.number, True, [["in_doubt", None, 7, None, None]]]))
    read, go_on = threading.Event(), threading.Event()
    receive = Link.receive

    def slow(self: Link, until_s: float | None) -> list[Any]:
        messages = receive(self, until_s)
        read.set()
        go_on.wait(LONG_S)
        return messages

    monkeypatch.setattr(Link, "receive", slow)
    reading = threading.Thread(target=exchange.tend, daemon=True)
    reading.start()
    assert read.wait(LONG_S)
    closing = threading.Thread(target=link.close, daemon=True)
    closing.start()
    time.sleep(0.2)
    go_on.set()
    for thread in (reading, closing):
        thread.join(LONG_S)
        assert not thread.is_alive()


def test_a_line_is_closed_also_when_an_interrupt_has_lost_its_reader(ends: Ends) -> None:
    link, theirs = ends
    link.reader.acquire()
    link.close()
    theirs.settimeout(LONG_S)
    assert theirs.recv(1) == b""
    link.reader.release()


def test_a_descriptor_that_waits_to_be_sent_is_that_of_its_region_whoever_gives_the_region_up(ends: Ends) -> None:
    link, theirs = ends
    region, regions = Region(4096), KnownRegions()
    while not link.unsent:
        link.send(bytes(1 << 20))
    known = regions.add(region)
    assert known is not None
    number = known.descriptor.fd
    link.send(b"region", known.descriptor)
    regions.drop(region.id)
    del known
    # Takes the number, if it is free.
    with open("/dev/null", "rb"):
        found: list[int] = []
        theirs.settimeout(LONG_S)
        while not found:
            link.flush()
            found += socket.recv_fds(theirs, 1 << 20, 4)[1]
        assert [os.fstat(fd).st_ino for fd in found] == [os.fstat(region.fd).st_ino]
    os.close(found[0])
    region.close()
    # And it is closed once it was sent.
    link.flush()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


def test_a_call_that_is_begun_while_the_child_dies_ends(ends: Ends) -> None:
    link, _ = ends
    exchange = _exchange(link)

    def payload() -> list[Any]:
        exchange.down(_died(), _died)
        return []

    for wake in (None, threading.Event()):
        call = exchange.submit("exists", ["x"], payload, Deadline.after(LONG_S), wake)
        assert call.ended
        assert call.lost


def test_a_caller_that_comes_by_late_finds_answers_and_not_time_outs(ends: Ends) -> None:
    """An engine's step may be longer than a deadline."""
    link, theirs = ends
    exchange = _exchange(link)
    calls = [exchange.submit("exists", ["x"], lambda: ["x"], Deadline.after(0.1), None) for _ in range(100)]
    for call in calls:
        theirs.sendall(encode([call.number, True, [False]]))
    time.sleep(0.5)
    assert dict(exchange.take()) == {call.number: [False] for call in calls}


@pytest.mark.parametrize(
    ("op", "size_bytes", "may_come"),
    [("exists", 1 << 17, True), ("exists", 1 << 20, False), ("list", MAX_FRAME_BYTES, True), ("list", MAX_FRAME_BYTES + 1, False)],
)
def test_an_answer_is_no_longer_than_what_was_asked(ends: Ends, op: str, size_bytes: int, may_come: bool) -> None:
    link, theirs = ends
    exchange = _exchange(link)
    exchange.submit(op, ["x"], lambda: ["x"], Deadline.after(LONG_S), None)
    theirs.sendall(size_bytes.to_bytes(4, "little"))
    exchange.tend()
    assert (link.broken is None) is may_come


def test_who_waits_on_a_line_that_is_broken_is_told_when_the_child_is_gone(ends: Ends) -> None:
    link, theirs = ends
    exchange = _exchange(link)
    call = exchange.submit("exists", ["x"], lambda: ["x"], Deadline.after(LONG_S), threading.Event())
    theirs.sendall(encode("no answer"))
    waiting = threading.Thread(target=exchange.wait, args=(call,), daemon=True)
    waiting.start()
    until_s = time.monotonic() + LONG_S
    while link.broken is None:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    exchange.down(_died(), _died)
    waiting.join(LONG_S)
    assert not waiting.is_alive()
