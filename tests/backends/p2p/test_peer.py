"""A peer is connected to by one task, left alone while it does not answer, and asked again when it is back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any

import pytest
from p2p_bench import until
from p2p_scripted import FakeLink

from kvstore_sdk.backend import UnavailableError
from kvstore_sdk_backends.p2p import peer as peer_module
from kvstore_sdk_backends.p2p.addresses import Address
from kvstore_sdk_backends.p2p.link import PeerRefusedError
from kvstore_sdk_backends.p2p.peer import Peer, State

ADDRESS = Address("127.0.0.1", 7400)
LIMIT_S = 20.0


class Network:
    """What connecting comes to: what is in `outcomes`, one after another, and then a session each time."""

    def __init__(self, *outcomes: BaseException | None) -> None:
        self.outcomes = list(outcomes)
        self.links: list[FakeLink] = []
        self.attempts = 0
        self.running = self.most_running = 0
        self.delay_s = 0.0

    async def connect(self, address: Address) -> Any:
        self.attempts += 1
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self.delay_s)
            outcome = self.outcomes.pop(0) if self.outcomes else None
            if outcome is not None:
                raise outcome
            self.links.append(FakeLink(lambda question: None))
            return self.links[-1]
        finally:
            self.running -= 1


def run(step: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(step, 60))


def soon() -> float:
    return time.monotonic() + LIMIT_S


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_module, "FIRST_PAUSE_S", 0.005)
    monkeypatch.setattr(peer_module, "LONGEST_PAUSE_S", 0.05)


def test_nobody_is_connected_to_before_it_is_asked_for() -> None:
    async def steps() -> None:
        network = Network()
        peer = Peer(ADDRESS, network.connect)
        await asyncio.sleep(0.02)
        assert network.attempts == 0
        assert peer.state is State.IDLE
        assert peer.live
        link = await peer.ready(soon())
        assert link is network.links[0]
        assert peer.state is State.UP
        peer.close("over")

    run(steps())


def test_who_comes_meanwhile_waits_for_the_same_session() -> None:
    """RACE-08"""

    async def steps() -> None:
        network = Network()
        network.delay_s = 0.05
        peer = Peer(ADDRESS, network.connect)
        links = await asyncio.gather(*(peer.ready(soon()) for _ in range(16)))
        assert set(links) == {network.links[0]}
        for life in range(2, 6):
            network.links[-1].end("lost")
            assert peer.link is None
            links = await asyncio.gather(*(_eventually(peer) for _ in range(16)))
            assert set(links) == {network.links[-1]}
            assert network.attempts == life
        assert network.most_running == 1
        peer.close("over")

    run(steps())


async def _eventually(peer: Peer) -> Any:
    while True:
        try:
            return await peer.ready(soon())
        except UnavailableError:
            await asyncio.sleep(0.002)


def test_while_it_does_not_answer_nobody_waits_for_it() -> None:
    async def steps() -> None:
        network = Network(*[UnavailableError(f"p2p peer {ADDRESS}: nobody listens there")] * 3)
        peer = Peer(ADDRESS, network.connect)
        with pytest.raises(UnavailableError, match=r"p2p peer 127\.0\.0\.1:7400: nobody listens there"):
            await peer.ready(soon())
        assert not peer.live
        assert peer.state is State.DOWN
        # It comes back without being asked for.
        await until(lambda: peer.link is not None)
        assert network.attempts == 4
        assert peer.live
        peer.close("over")

    run(steps())


def test_the_pauses_grow_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_module, "FIRST_PAUSE_S", 0.1)
    monkeypatch.setattr(peer_module, "LONGEST_PAUSE_S", 5.0)
    pauses = []
    peer = Peer(ADDRESS, Network().connect)
    for _ in range(12):
        peer._fail(UnavailableError("p2p peer x: down"))
        pauses.append(peer._pause_s())
    assert all(0.1 <= pause_s <= 5.0 for pause_s in pauses)
    assert pauses[0] <= 0.2
    assert min(pauses[6:]) >= 2.5


def test_waiting_for_one_that_does_not_come_up_is_bounded() -> None:
    async def steps() -> None:
        network = Network()
        network.delay_s = 3600
        peer = Peer(ADDRESS, network.connect)
        began_s = time.monotonic()
        with pytest.raises(UnavailableError, match="does not answer"):
            await peer.ready(time.monotonic() + 0.05)
        assert time.monotonic() - began_s < LIMIT_S
        peer.close("over")

    run(steps())


@pytest.mark.parametrize("code", ["namespace", "layout", "version", "path"])
def test_one_that_refuses_for_good_is_left_alone_until_this_node_has_something_else_to_say(
    code: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_module, "REFUSED_PAUSE_S", 3600.0)

    async def steps() -> None:
        network = Network(PeerRefusedError(f"p2p peer {ADDRESS}: refuses ({code}): it has another", code))
        peer = Peer(ADDRESS, network.connect)
        with pytest.raises(UnavailableError, match="it has another"):
            await peer.ready(soon())
        assert peer.state is State.REFUSED
        assert not peer.live
        await asyncio.sleep(0.1)
        assert network.attempts == 1
        peer.renew("another namespace")
        await until(lambda: peer.link is not None)
        assert network.attempts == 2
        peer.close("over")

    with caplog.at_level(logging.WARNING):
        run(steps())
    assert [record.getMessage() for record in caplog.records if code in record.getMessage()] == [
        f"p2p peer 127.0.0.1:7400: refuses ({code}): it has another"
    ]


def test_this_node_itself_is_no_peer_and_no_trouble(caplog: pytest.LogCaptureFixture) -> None:
    async def steps() -> None:
        peer = Peer(ADDRESS, Network(PeerRefusedError(f"p2p peer {ADDRESS}: refuses (self): it is you", "self")).connect)
        with pytest.raises(UnavailableError):
            await peer.ready(soon())
        assert peer.itself
        assert not peer.live
        peer.close("over")

    with caplog.at_level(logging.INFO):
        run(steps())
    assert caplog.records == []


def test_what_fails_in_another_way_than_it_should_ends_nothing() -> None:
    async def steps() -> None:
        network = Network(ValueError("a fault"))
        peer = Peer(ADDRESS, network.connect)
        with pytest.raises(UnavailableError, match="ValueError"):
            await peer.ready(soon())
        await until(lambda: peer.link is not None)
        peer.close("over")

    run(steps())


def test_a_session_that_was_begun_before_a_change_is_not_used() -> None:
    async def steps() -> None:
        network = Network()
        network.delay_s = 0.05
        peer = Peer(ADDRESS, network.connect)
        waiting = asyncio.ensure_future(peer.ready(soon()))
        await until(lambda: network.running == 1)
        peer.renew("another namespace")
        link = await waiting
        await until(lambda: len(network.links) == 2)
        assert network.links[0].ended
        assert link is network.links[1]
        peer.close("over")

    run(steps())


def test_one_that_lets_questions_wait_is_left_alone_and_then_asked_at_once_and_left_alone_sooner() -> None:
    async def steps() -> None:
        network = Network()
        peer = Peer(ADDRESS, network.connect)
        link: Any = await peer.ready(soon())
        peer.strike(link, time.monotonic())
        peer.strike(link, time.monotonic())
        peer.praise()
        for _ in range(2):
            peer.strike(link, time.monotonic())
        assert not link.ended
        peer.strike(link, time.monotonic())
        assert link.ended
        await until(lambda: peer.link is not None)
        # Until it has answered, one is enough.
        peer.strike(peer.link, time.monotonic())  # type: ignore[arg-type]
        assert network.links[1].ended
        peer.close("over")

    run(steps())


def test_questions_that_waited_too_long_together_are_one() -> None:
    """Of many threads that ask a peer which stood still once each has a question that was not answered."""

    async def steps() -> None:
        peer = Peer(ADDRESS, Network().connect)
        link: Any = await peer.ready(soon())
        for _ in range(peer_module.MAX_STRIKES - 1):
            asked_s = time.monotonic()
            await asyncio.sleep(0.01)
            for number in range(50):
                peer.strike(link, asked_s - number % 2)
        assert not link.ended
        peer.strike(link, time.monotonic())
        assert link.ended
        peer.close("over")

    run(steps())


def test_one_that_never_gives_what_it_says_it_has_is_not_asked_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """LIV-20"""
    monkeypatch.setattr(peer_module, "SHUN_S", 0.05)

    async def steps() -> None:
        peer = Peer(ADDRESS, Network().connect)
        await peer.ready(soon())
        peer.blame(time.monotonic())
        peer.blame(time.monotonic())
        peer.thank()
        for _ in range(2):
            peer.blame(time.monotonic())
        assert peer.live
        peer.blame(time.monotonic())
        assert not peer.live
        assert "loads in a row have failed" in peer.why
        await until(lambda: peer.live)
        peer.close("over")

    run(steps())


def test_loads_that_failed_together_are_one_failure(caplog: pytest.LogCaptureFixture) -> None:
    """Of many threads that wait for one peer which stood still each has a load that failed, and it is no worse than with one thread."""

    async def steps() -> None:
        peer = Peer(ADDRESS, Network().connect)
        await peer.ready(soon())
        for _ in range(peer_module.MAX_FAULTS - 1):
            began_s = time.monotonic()
            await asyncio.sleep(0.01)
            for number in range(50):
                peer.blame(began_s - number % 2)
        assert peer.live
        for number in range(50):
            peer.blame(time.monotonic() if not number else began_s)
        assert not peer.live
        peer.close("over")

    with caplog.at_level(logging.WARNING):
        run(steps())
    assert [record.getMessage() for record in caplog.records] == [
        "p2p peer 127.0.0.1:7400: is not asked for a while: 3 loads in a row have failed"
    ]


def test_closing_ends_the_session_and_all_waiting() -> None:
    async def steps() -> None:
        network = Network()
        network.delay_s = 3600
        peer = Peer(ADDRESS, network.connect)
        waiting = asyncio.ensure_future(peer.ready(soon()))
        await until(lambda: network.running == 1)
        peer.close("this node was closed")
        with pytest.raises(UnavailableError, match="this node was closed"):
            await waiting
        peer.close("again")
        assert peer.state is State.CLOSED
        await until(lambda: network.running == 0)

    run(steps())


def test_a_line_is_not_repeated(caplog: pytest.LogCaptureFixture) -> None:
    async def steps() -> None:
        network = Network(*[UnavailableError(f"p2p peer {ADDRESS}: nobody listens there")] * 5)
        peer = Peer(ADDRESS, network.connect)
        peer.start()
        await until(lambda: peer.link is not None)
        peer.close("over")

    with caplog.at_level(logging.WARNING):
        run(steps())
    assert [record.getMessage() for record in caplog.records] == ["p2p peer 127.0.0.1:7400: nobody listens there"]


@pytest.mark.parametrize("failed_before", [False, True])
def test_who_was_sent_away_for_room_comes_back_when_there_is_something_to_ask(
    failed_before: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Before that it would take the place of another one, which would take that of the next, for ever."""

    async def steps() -> None:
        network = Network(*[UnavailableError(f"p2p peer {ADDRESS}: nobody listens there")] * failed_before)
        peer = Peer(ADDRESS, network.connect)
        peer.start()
        await until(lambda: peer.link is not None)
        for life in range(1, 4):
            attempts = network.attempts
            network.links[-1].farewell = "full" if life == 2 else "idle"
            network.links[-1].end("ended the session (idle): it was idle, and another peer needs its place")
            await until(lambda: peer.state is State.IDLE)
            # Some of the longest pauses.
            await asyncio.sleep(4 * peer_module.LONGEST_PAUSE_S)
            assert network.attempts == attempts
            assert peer.live
            assert not peer.returning
            assert await peer.ready(soon()) is network.links[life]
        peer.close("over")

    with caplog.at_level(logging.INFO):
        run(steps())
    said = [record for record in caplog.records if "needs its place" in record.getMessage()]
    assert {(record.levelname, record.getMessage()) for record in said} == {
        ("INFO", f"p2p peer {ADDRESS}: ended the session (idle): it was idle, and another peer needs its place")
    }
    assert "is lost" not in caplog.text


@pytest.mark.parametrize(
    ("farewell", "at_once"), [("closing", False), ("invalid", False), ("namespace", True), ("failed", True), ("", True)]
)
def test_who_ends_a_session_for_good_is_left_alone_for_a_while(farewell: str, at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a session that has lasted, which is begun again at once otherwise."""
    monkeypatch.setattr(peer_module, "STEADY_S", 0.0)
    rested: list[float] = []

    async def steps() -> None:
        network = Network()
        peer = Peer(ADDRESS, network.connect)
        link: Any = await peer.ready(soon())
        pause_s = peer._pause_s
        monkeypatch.setattr(peer, "_pause_s", lambda: rested.append(pause_s()) or rested[-1])
        link.farewell = farewell
        link.end("over")
        await until(lambda: network.attempts == 2)
        peer.close("over")

    run(steps())
    assert bool(rested) != at_once
