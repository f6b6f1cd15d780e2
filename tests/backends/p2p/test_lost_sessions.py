"""A session that is lost costs no load that has time left: nothing is written any more, and there is another session at once."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgpack")

from p2p_nodes import wait_for
from p2p_scripted import ScriptedPeer, numbers, scripted_peer
from p2p_tcp_relay import Relay, free_ports

from kvstore_sdk.backend import Buffer, Deadline, Get, GetResult, GetStatus, Put, PutStatus, Region, open_backend
from kvstore_sdk_backends.p2p.messages import FOUND, Fetch, Found, Goodbye, Hello, Lookup, Result
from kvstore_sdk_backends.p2p.peer import MAX_FAULTS, State

LIMIT_S = 30.0
SIZE = 16384
NAME = "v1/a"


def load(node: Any, region: Region, size: int = SIZE) -> GetResult:
    [result] = node.get([Get(NAME, (Buffer(region, 0, size),))], Deadline.after(LIMIT_S))
    return result


def there(node: Any) -> bool:
    [answer] = node.exists([NAME], Deadline.after(LIMIT_S))
    return answer is True


class Breaking:
    """A peer that has `NAME`, and loses the session with the first loads, in a way of its own."""

    def __init__(self, losses: int, way: str) -> None:
        self.losses = losses
        self.way = way
        self.peer: ScriptedPeer

    def answer(self, message: Any) -> Any:
        if isinstance(message, Lookup):
            return Found(message.number, (SIZE,) * len(message.names))
        if not isinstance(message, Fetch):
            return None
        if self.losses > 0:
            self.losses -= 1
            if self.way == "goodbye":
                return Goodbye("failed", "a transfer broke off")
            # Of another size than it says.
            self.peer.send_record(message.number, 0, b"x" * SIZE, SIZE + 1)
            return None
        self.peer.send_record(message.number, 0, b"r" * SIZE)
        return Result(message.number, ((FOUND, SIZE),))


@pytest.mark.parametrize("way", ["goodbye", "data"])
def test_a_load_whose_session_is_lost_is_tried_once_more_in_the_next_one(way: str, open_node: Callable[..., Any], region: Region) -> None:
    breaking = Breaking(1, way)
    with scripted_peer(breaking.answer) as breaking.peer:
        asker = open_node(breaking.peer.address, answer_timeout_s=LIMIT_S)
        wait_for(lambda: there(asker), LIMIT_S)
        assert load(asker, region).status is GetStatus.FOUND
        assert region.buffer(0, SIZE).view == b"r" * SIZE
        assert numbers(breaking.peer.asked, Hello) == 2


def test_one_that_was_lost_before_the_load_is_waited_for(open_node: Callable[..., Any], region: Region) -> None:
    breaking = Breaking(0, "goodbye")
    with scripted_peer(breaking.answer) as breaking.peer:
        asker = open_node(breaking.peer.address, answer_timeout_s=LIMIT_S)
        wait_for(lambda: there(asker), LIMIT_S)
        [peer] = asker._peers.all()
        for _ in range(5):
            asker._loop.run("test", lambda: _end(peer), LIMIT_S)
            assert load(asker, region).status is GetStatus.FOUND


async def _end(peer: Any) -> None:
    peer.link.end("lost")


def test_a_peer_that_loses_each_session_is_tried_twice_a_load_and_then_left_alone(open_node: Callable[..., Any], region: Region) -> None:
    """LIV-20"""
    breaking = Breaking(1000, "data")
    with scripted_peer(breaking.answer) as breaking.peer:
        asker = open_node(breaking.peer.address, answer_timeout_s=LIMIT_S)
        for number in range(1, MAX_FAULTS + 1):
            wait_for(lambda: there(asker), LIMIT_S)
            assert load(asker, region).status is GetStatus.FAILED
            assert numbers(breaking.peer.asked, Fetch) == 2 * number
        [peer] = asker._peers.all()
        assert peer.failing


def test_a_peer_that_is_gone_is_not_waited_for(open_node: Callable[..., Any], region: Region) -> None:
    """LIV-04: one attempt says so."""
    with scripted_peer(Breaking(0, "goodbye").answer) as gone:
        asker = open_node(gone.address, answer_timeout_s=LIMIT_S)
        wait_for(lambda: there(asker), LIMIT_S)
    [peer] = asker._peers.all()
    began_s = time.monotonic()
    assert load(asker, region).status is GetStatus.FAILED
    assert time.monotonic() - began_s < LIMIT_S
    assert peer.state is State.DOWN
    assert not peer.returning


@pytest.mark.usefixtures("patient")
def test_connections_that_are_cut_at_any_moment_cost_no_load() -> None:
    """In the middle of a record, or of what was said about it."""
    size, draw = 4 << 20, random.Random(7)
    control, *data = free_ports(9)
    with ExitStack() as closing:
        relay = Relay([control, *data])
        closing.callback(relay.close)
        ports = {"data_ports": f"{data[0]}-{data[-1]}"}
        owner = open_backend("p2p", {"serve_bytes": 2 * size, "data": "zmq"} | ports, location=f"127.0.0.2:{control}")
        closing.callback(owner.close)
        # A look-up may take as long as it likes.
        asker = open_backend("p2p", {"peers": f"127.0.0.1:{control}", "answer_timeout_s": LIMIT_S, "data": "zmq"}, location="127.0.0.1:0")
        closing.callback(asker.close)
        regions = [Region(size), Region(size)]
        for one in regions:
            closing.callback(one.close)
        regions[0].view[:] = draw.randbytes(size)
        [stored] = owner.put([Put(NAME, (Buffer(regions[0], 0, size),))], Deadline.after(LIMIT_S))
        assert stored.status is PutStatus.STORED
        for _ in range(20):
            wait_for(lambda: there(asker), LIMIT_S)
            cutting = threading.Timer(draw.uniform(0.0, 0.01), relay.cut)
            cutting.start()
            result = load(asker, regions[1], size)
            cutting.join()
            assert result.status is GetStatus.FOUND, result.error
            assert regions[1].view == regions[0].view
