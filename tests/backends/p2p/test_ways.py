"""Records come over NIXL where it works, and over ZMQ for a while where it does not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from p2p_fake_plane import FakePlane
from p2p_scripted import FakeLink

from kvstore_sdk.backend import UnavailableError
from kvstore_sdk_backends.p2p import peer as peer_module
from kvstore_sdk_backends.p2p import ways as ways_module
from kvstore_sdk_backends.p2p.addresses import Address
from kvstore_sdk_backends.p2p.link import PeerRefusedError
from kvstore_sdk_backends.p2p.peer import Peer, State
from kvstore_sdk_backends.p2p.peers import Peers
from kvstore_sdk_backends.p2p.ways import Ways

LIMIT_S = 20.0
THERE = Address("127.0.0.1", 7400)


class RefusingLink(FakeLink):
    """Its peer may end it by a refusal.

    Attributes:
        refused: The code.
    """

    refused = ""

    @property
    def error(self) -> UnavailableError:
        return PeerRefusedError(self.cause, self.refused) if self.refused else super().error

    def refuse(self, code: str) -> None:
        self.refused = code
        self.end(f"refuses ({code})")


class World:
    """A node that asks one peer, which takes the first path that it is offered.

    Attributes:
        plane: Of the node.
        owner_paths: What the peer can use.
        links: All sessions, in order.
    """

    def __init__(self, *paths: str) -> None:
        self.plane = FakePlane()
        self.owner_paths = ("nixl", "zmq")
        self.links: list[RefusingLink] = []
        self.ways = Ways(lambda address: paths, self.plane)  # type: ignore[arg-type]
        self.peers = Peers([THERE], self.connect, max_peers=4, resolve_s=60.0, may_connect=lambda address: True)
        self.watching = asyncio.ensure_future(self.ways.watch(self.peers))

    async def connect(self, address: Address) -> Any:
        offered = self.ways.offer(address)
        link = RefusingLink(lambda question: None, address.port, next(path for path in offered if path in self.owner_paths))
        link.began_s = time.monotonic()  # type: ignore[attr-defined]
        self.links.append(link)
        self.ways.note(link)  # type: ignore[arg-type]
        return link

    @property
    def paths(self) -> list[str]:
        return [link.welcome.path for link in self.links]

    async def peer(self) -> Peer:
        [peer] = await self.peers.live(soon())
        await peer.ready(soon())
        return peer


@contextmanager
def world(*paths: str) -> Iterator[World]:
    made = World(*paths)
    try:
        yield made
    finally:
        assert not made.watching.done()
        made.watching.cancel()
        made.peers.close("over")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_module, "FIRST_PAUSE_S", 0.005)
    monkeypatch.setattr(peer_module, "LONGEST_PAUSE_S", 0.05)
    monkeypatch.setattr(ways_module, "LOOK_S", 0.005)


def soon() -> float:
    return time.monotonic() + LIMIT_S


def run(step: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(step, 60))


async def until(condition: Any) -> None:
    end_s = soon()
    while not condition():
        assert time.monotonic() < end_s
        await asyncio.sleep(0.002)


async def rest() -> None:
    """Long enough for many looks."""
    await asyncio.sleep(0.1)


def test_while_the_data_plane_is_down_records_come_over_zmq(monkeypatch: pytest.MonkeyPatch) -> None:
    async def steps() -> None:
        with world("nixl", "zmq") as w:
            await w.peer()
            await rest()
            assert w.paths == ["nixl"]
            w.plane.up = False
            await until(lambda: w.paths == ["nixl", "zmq"])
            # As long as it is down nothing else is tried, and later once.
            monkeypatch.setattr(ways_module, "AGAIN_S", 0.01)
            await rest()
            assert w.paths == ["nixl", "zmq"]
            w.plane.up = True
            await until(lambda: w.paths == ["nixl", "zmq", "nixl"])
            await rest()
            assert w.paths == ["nixl", "zmq", "nixl"]

    run(steps())


def test_without_zmq_nobody_is_asked_while_the_data_plane_is_down() -> None:
    """A hit that cannot be loaded is worse than none."""

    async def steps() -> None:
        with world("nixl") as w:
            peer = await w.peer()
            w.plane.up = False
            await until(lambda: peer.state is State.DOWN and peer.why == "the data plane of this node is being restarted")
            assert not peer.live
            w.plane.up = True
            await until(lambda: peer.link is not None)
            assert set(w.paths) == {"nixl"}

    run(steps())


def test_a_peer_that_nixl_does_not_reach_is_asked_over_zmq_and_not_again_and_again() -> None:
    async def steps() -> None:
        with world("nixl", "zmq") as w:
            await w.peer()
            w.links[0].refuse("path")
            await until(lambda: w.paths == ["nixl", "zmq"])
            await rest()
            assert w.paths == ["nixl", "zmq"]
            # Another loss says nothing about NIXL.
            w.links[1].end("lost")
            await until(lambda: len(w.links) == 3)
            assert w.paths[2] == "zmq"

    run(steps())


def test_without_zmq_it_is_left_alone_for_a_while() -> None:
    async def steps() -> None:
        with world("nixl") as w:
            peer = await w.peer()
            w.links[0].refuse("path")
            await until(lambda: "nixl does not reach it" in peer.why)
            assert not peer.live
            await rest()
            assert w.paths == ["nixl"]

    run(steps())


@pytest.mark.parametrize("code", ["busy", "full", "closing"])
def test_another_refusal_says_nothing_about_nixl(code: str) -> None:
    async def steps() -> None:
        with world("nixl", "zmq") as w:
            await w.peer()
            w.links[0].refuse(code)
            await until(lambda: w.paths == ["nixl", "nixl"])

    run(steps())


def test_loads_that_fail_over_nixl_again_and_again_come_over_zmq() -> None:
    async def steps() -> None:
        with world("nixl", "zmq") as w:
            peer = await w.peer()
            for _ in range(peer_module.MAX_FAULTS - 1):
                peer.blame(time.monotonic())
            await rest()
            assert w.paths == ["nixl"]
            peer.blame(time.monotonic())
            await until(lambda: w.paths == ["nixl", "zmq"])
            # It is asked at once.
            assert peer.live

    run(steps())


def test_a_peer_that_never_had_nixl_keeps_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    async def steps() -> None:
        monkeypatch.setattr(ways_module, "AGAIN_S", 0.01)
        with world("nixl", "zmq") as w:
            w.owner_paths = ("zmq",)
            await w.peer()
            await rest()
            assert w.paths == ["zmq"]

    run(steps())


def test_a_session_that_has_open_questions_is_not_ended_to_try_nixl_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def steps() -> None:
        with world("nixl", "zmq") as w:
            await w.peer()
            w.links[0].refuse("path")
            await until(lambda: w.paths == ["nixl", "zmq"])
            monkeypatch.setattr(RefusingLink, "waiting", 1)
            # Its time is over.
            monkeypatch.setattr(ways_module, "AGAIN_S", 0.01)
            w.ways._avoided.clear()
            await rest()
            assert len(w.links) == 2
            monkeypatch.setattr(RefusingLink, "waiting", 0)
            await until(lambda: w.paths == ["nixl", "zmq", "nixl"])

    run(steps())
