"""Two nodes whose records go over NIXL: the same answers, and what becomes of them when a data plane is lost."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from p2p_pairs import keep, soon, wait_for
from scripted_client import Calling

from kvstore_sdk.backend import Deadline, Get, GetStatus, Region
from kvstore_sdk_backends.p2p.backend import P2PBackend

pytestmark = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")

SIZE = 1 << 20
RECORDS = {f"r{number}": random.Random(number).randbytes(SIZE) for number in range(8)}


@pytest.fixture
def region() -> Iterator[Region]:
    made = Region(len(RECORDS) * SIZE)
    yield made
    made.close()


@pytest.fixture
def owner(open_node: Callable[..., P2PBackend]) -> P2PBackend:
    node = open_node(data="nixl", serve_bytes=32 << 20, ucx_tls="tcp,self")
    keep(node, **RECORDS)
    return node


@pytest.fixture
def asker(open_node: Callable[..., P2PBackend], owner: P2PBackend, region: Region) -> P2PBackend:
    node = open_node(owner.address, data="nixl", ucx_tls="tcp,self")
    node.register_region(region)
    return node


def load(node: P2PBackend, region: Region, limit_s: float = 20.0) -> list[Any]:
    gets = [Get(f"v1/{name}", (region.buffer(place * SIZE, SIZE),)) for place, name in enumerate(RECORDS)]
    return node.get(gets, Deadline.after(limit_s))


def loads(node: P2PBackend, region: Region) -> bool:
    """Whether all records come, whole."""
    region.view[:] = bytes(region.size_bytes)
    results = load(node, region)
    wrong = [
        name
        for place, (name, record) in enumerate(RECORDS.items())
        if results[place].status is GetStatus.FOUND and bytes(region.view[place * SIZE : (place + 1) * SIZE]) != record
    ]
    assert wrong == []
    # What is in doubt is not touched before it is settled.
    tickets = [result.ticket for result in results if result.status is GetStatus.IN_DOUBT]
    wait_for(lambda: all(node.settle(tickets, Deadline.after(0.1))))
    return [result.status for result in results] == [GetStatus.FOUND] * len(RECORDS)


def test_records_come_and_those_that_do_not_are_told_apart(owner: P2PBackend, asker: P2PBackend, region: Region) -> None:
    assert loads(asker, region)
    region.view[:] = b"\xee" * region.size_bytes
    found, missing, shorter = asker.get(
        [
            Get("v1/r3", (region.buffer(64, SIZE),)),
            Get("v1/nothing", (region.buffer(2 * SIZE, SIZE),)),
            Get("v1/r4", (region.buffer(4 * SIZE, 100),)),
        ],
        soon(),
    )
    assert (found.status, missing.status, shorter.status) == (GetStatus.FOUND, GetStatus.MISSING, GetStatus.WRONG_SIZE)
    assert (shorter.size_bytes, shorter.asked_bytes) == (SIZE, 100)
    assert bytes(region.view[64 : 64 + SIZE]) == RECORDS["r3"]
    assert bytes(region.view[:64]) == b"\xee" * 64
    assert bytes(region.view[64 + SIZE :]) == b"\xee" * (region.size_bytes - SIZE - 64)
    # Memory that is announced later is told to the peer as well.
    other = Region(SIZE)
    asker.register_region(other)
    [result] = asker.get([Get("v1/r5", (other.buffer(0, SIZE),))], soon())
    assert result.status is GetStatus.FOUND
    assert bytes(other.view) == RECORDS["r5"]
    asker.unregister_region(other)
    other.close()
    assert loads(asker, region)


@pytest.mark.parametrize("whose", ["asker", "owner"])
def test_a_data_plane_that_dies_costs_what_was_under_way_and_is_there_again(
    whose: str, owner: P2PBackend, asker: P2PBackend, region: Region
) -> None:
    assert loads(asker, region)
    plane = (asker if whose == "asker" else owner)._node.plane
    assert plane is not None
    stop = threading.Event()
    came: list[bool] = []

    def go_on() -> None:
        while not stop.is_set():
            came.append(loads(asker, region))

    loading = Calling(go_on)
    wait_for(lambda: came)
    pid = plane.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: plane.pid not in (None, pid))
    seen = len(came)
    wait_for(lambda: any(came[seen:]))
    stop.set()
    loading.answer(60)
    wait_for(lambda: loads(asker, region))
    assert asker.counters()["doubt_bytes_now"] == 0


def test_closing_in_the_middle_of_a_load_leaves_nothing_in_doubt(owner: P2PBackend, asker: P2PBackend, region: Region) -> None:
    assert loads(asker, region)
    plane = owner._node.plane
    assert plane is not None
    assert plane.pid is not None
    os.kill(plane.pid, signal.SIGSTOP)
    try:
        running = Calling(lambda: load(asker, region, 600))
        wait_for(lambda: asker._doubts.landings)
        asker.close()
        assert {result.status for result in running.answer(30)} == {GetStatus.CLOSED}
        # It is the caller's again, from here on.
        region.view[:] = b"\x5a" * region.size_bytes
    finally:
        os.kill(plane.pid, signal.SIGCONT)
    # What the owner was to write it finds nobody for, or writes now.
    time.sleep(1.0)
    assert bytes(region.view) == b"\x5a" * region.size_bytes
    owner.close()
    assert bytes(region.view) == b"\x5a" * region.size_bytes


def test_nothing_is_written_into_memory_of_a_load_that_was_given_up(owner: P2PBackend, asker: P2PBackend, region: Region) -> None:
    assert loads(asker, region)
    plane = owner._node.plane
    assert plane is not None
    assert plane.pid is not None
    os.kill(plane.pid, signal.SIGSTOP)
    try:
        tickets: list[Any] = []

        def given_up() -> bool:
            """Of a load that was begun in its time."""
            results = load(asker, region, 0.3)
            assert {result.status for result in results} <= {GetStatus.IN_DOUBT, GetStatus.TIMED_OUT}
            tickets.extend(result.ticket for result in results if result.ticket is not None)
            return bool(tickets)

        wait_for(given_up)
        assert not any(asker.settle(tickets, Deadline.after(0.2)))
        assert asker.counters()["doubt_bytes_now"] > 0
    finally:
        os.kill(plane.pid, signal.SIGCONT)
    # The owner goes on, and says when it is done, or its session ends and the asker's child with it.
    wait_for(lambda: all(asker.settle(tickets, Deadline.after(0.5))))
    region.view[:] = b"\x5a" * region.size_bytes
    assert asker.exists(["v1/r0"], soon()) == [True]
    assert bytes(region.view) == b"\x5a" * region.size_bytes
    wait_for(lambda: loads(asker, region))
