"""Who is asked: what an operator listed, by whatever addresses its names have now, and whom a request named, if that may be."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import time
from collections.abc import Coroutine, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from p2p_bench import until
from p2p_scripted import FakeLink

from kvstore_sdk.backend import UnavailableError
from kvstore_sdk_backends.p2p import peer as peer_module
from kvstore_sdk_backends.p2p import peers as peers_module
from kvstore_sdk_backends.p2p.addresses import Address
from kvstore_sdk_backends.p2p.link import PeerRefusedError
from kvstore_sdk_backends.p2p.messages import Found, Lookup
from kvstore_sdk_backends.p2p.peers import Peers

LIMIT_S = 20.0


def at(number: int, port: int = 7400) -> Address:
    return Address(f"10.0.0.{number}", port)


NAME = Address("kv.example", 7400)


class World:
    """Names and what they stand for, and who is where.

    Attributes:
        names: What looking a name up finds; what is no address is raised.
        connected: Where sessions were begun.
        nodes: The node at an address, where it is one of several of that node.
        links: The sessions that were begun, in order.
        itself: Addresses of this node.
    """

    def __init__(self, **names: Iterable[Address] | OSError) -> None:
        self.names: dict[str, Iterable[Address] | OSError] = {name.replace("_", "."): found for name, found in names.items()}
        self.connected: list[Address] = []
        self.itself: set[Address] = set()
        self.nodes: dict[Address, bytes] = {}
        self.links: list[FakeLink] = []
        self.lookups = 0
        self.looked_up: set[str] = set()
        self.hold = threading.Event()
        self.hold.set()

    def lookup(self, address: Address) -> Iterable[Address]:
        self.lookups += 1
        self.looked_up.add(address.host)
        assert self.hold.wait(LIMIT_S)
        found = self.names[address.host]
        if isinstance(found, OSError):
            raise found
        return found

    async def connect(self, address: Address) -> Any:
        self.connected.append(address)
        if address in self.itself:
            raise PeerRefusedError(f"p2p peer {address}: refuses (self): it is you", "self")
        link = FakeLink(lambda question: None)
        if address in self.nodes:
            link.welcome = dataclasses.replace(link.welcome, node=self.nodes[address])
        self.links.append(link)
        return link

    def peers(self, *listed: Address, **options: Any) -> Peers:
        chosen: dict[str, Any] = {"max_peers": 8, "resolve_s": 0.02, "may_connect": lambda address: True, "lookup": self.lookup}
        return Peers(listed, self.connect, **(chosen | options))


def run(step: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(step, 60))


def soon() -> float:
    return time.monotonic() + LIMIT_S


async def live(peers: Peers) -> set[Address]:
    return {peer.address for peer in await peers.live(soon())}


def test_all_addresses_of_a_name_are_peers_and_follow_it() -> None:
    async def steps() -> None:
        world = World(kv_example=[at(1), at(2)])
        peers = world.peers(NAME, at(9))
        assert await live(peers) == {at(1), at(2), at(9)}
        first = {peer.address: peer for peer in peers.all()}
        world.names["kv.example"] = [at(2), at(3)]
        await until(lambda: {peer.address for peer in peers.all()} == {at(2), at(3), at(9)})
        # Whoever stayed kept its session.
        await until(lambda: len(world.connected) >= 4)
        assert world.connected.count(at(2)) == 1
        assert first[at(1)].state.value == "closed"
        peers.close("over")

    run(steps())


def test_a_name_that_does_not_resolve_is_said_once_and_what_it_stood_for_goes_on_being_asked(caplog: pytest.LogCaptureFixture) -> None:
    async def steps() -> None:
        world = World(kv_example=[at(1)])
        peers = world.peers(NAME)
        assert await live(peers) == {at(1)}
        world.names["kv.example"] = OSError("no such host")
        before = world.lookups
        await until(lambda: world.lookups > before + 5)
        assert await live(peers) == {at(1)}
        world.names["kv.example"] = [at(2)]
        await until(lambda: {peer.address for peer in peers.all()} == {at(2)})
        peers.close("over")

    with caplog.at_level(logging.WARNING):
        run(steps())
    assert [record.getMessage() for record in caplog.records] == [
        "p2p: kv.example:7400, of peers, does not resolve: no such host; it is looked up again every 0.02 s"
    ]


def test_a_resolver_that_hangs_delays_for_a_bounded_time_and_is_asked_once() -> None:
    async def steps() -> None:
        world = World(kv_example=[at(1)])
        world.hold.clear()
        peers = world.peers(NAME, at(9))
        began_s = time.monotonic()
        assert {peer.address for peer in await peers.live(time.monotonic() + 0.05)} == {at(9)}
        assert time.monotonic() - began_s < LIMIT_S
        await asyncio.sleep(0.1)
        assert world.lookups == 1
        world.hold.set()
        await until(lambda: len(peers.all()) == 2)
        peers.close("over")

    run(steps())


def test_no_more_than_so_many_are_asked_and_the_listed_come_first(caplog: pytest.LogCaptureFixture) -> None:
    async def steps() -> None:
        world = World()
        peers = world.peers(*(at(number) for number in range(1, 6)), max_peers=4)
        assert await live(peers) == {at(number) for number in range(1, 5)}
        assert await peers.named(at(50), soon()) == []
        peers.close("over")

    with caplog.at_level(logging.WARNING):
        run(steps())
    assert [record.getMessage() for record in caplog.records] == [
        "p2p: peers are more than max_peers 4 addresses; those beyond are not asked",
        "p2p: more than max_peers 4 peers are in use; others that requests name are not asked",
    ]


def test_whom_a_request_names_is_asked_for_that_request_alone_and_gives_way_to_others() -> None:
    async def steps() -> None:
        world = World()
        peers = world.peers(at(1), max_peers=3)
        for number in range(10, 30):
            [peer] = await peers.named(at(number), soon())
            assert peer.address == at(number)
            await peer.ready(soon())
            assert await live(peers) == {at(1)}
            assert len(peers.all()) <= 3
        # One that a request named and an operator listed is one peer.
        [peer] = await peers.named(at(1), soon())
        assert peer in await peers.live(soon())
        assert world.connected.count(at(1)) == 1
        peers.close("over")

    run(steps())


def test_a_name_in_a_request_is_looked_up_once_in_a_while() -> None:
    async def steps() -> None:
        world = World(kv_example=[at(4), at(5)], gone_example=OSError("no such host"))
        peers = world.peers(resolve_s=60.0)
        for _ in range(5):
            assert {peer.address for peer in await peers.named(NAME, soon())} == {at(4), at(5)}
            assert await peers.named(Address("gone.example", 1), soon()) == []
        assert world.lookups == 2
        peers.close("over")

    run(steps())


def test_names_that_requests_name_are_looked_up_by_few_threads_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    async def steps() -> None:
        monkeypatch.setattr(peers_module, "MAX_RESOLVING", 3)
        names = [Address(f"h{number}.example", 7400) for number in range(30)]
        world = World(**{f"h{number}_example": [at(number)] for number in range(30)})
        world.hold.clear()
        peers = world.peers(resolve_s=60.0)
        shortly = time.monotonic() + 0.1
        assert await asyncio.gather(*(peers.named(name, shortly) for name in names * 2)) == [[]] * 60
        await until(lambda: world.lookups == 3)
        # None of them has ended, and nobody waits for them.
        assert await peers.named(names[20], soon()) == []
        assert world.lookups == 3
        world.hold.set()
        await until(lambda: not peers._resolving)
        assert [peer.address for peer in await peers.named(names[20], soon())] == [at(20)]
        # What came late is known by now.
        assert [peer.address for peer in await peers.named(names[0], soon())] == [at(0)]
        assert world.lookups == 4
        peers.close("over")

    run(steps())


def test_where_nobody_may_connect_to_nobody_does(caplog: pytest.LogCaptureFixture) -> None:
    async def steps() -> None:
        world = World(kv_example=[at(1)])
        peers = world.peers(at(2), NAME, may_connect=lambda address: False)
        assert await live(peers) == set()
        assert await peers.named(at(3), soon()) == []
        assert await peers.named(Address("of.a.request", 1), soon()) == []
        await asyncio.sleep(0.05)
        assert world.connected == []
        # What a request names is told to no resolver either.
        assert world.looked_up == {NAME.host}
        peers.close("over")

    with caplog.at_level(logging.WARNING):
        run(steps())
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == len(set(said)) == 4
    assert all("is not on loopback: that needs key_file, or insecure=true" in line for line in said)


def test_this_node_itself_is_nobody_to_ask() -> None:
    async def steps() -> None:
        world = World(kv_example=[at(1)])
        world.itself = {at(1)}
        peers = world.peers(NAME)
        await peers.live(soon())
        await until(lambda: peers.alone)
        assert await peers.live(soon()) == []
        world.names["kv.example"] = [at(1), at(2)]
        await until(lambda: not peers.alone)
        await until(lambda: at(2) in world.connected)
        assert await live(peers) == {at(2)}
        peers.close("over")

    run(steps())


def test_a_node_of_several_addresses_has_one_session_and_is_asked_once(caplog: pytest.LogCaptureFixture) -> None:
    async def steps() -> None:
        world = World()
        world.nodes = {at(1): b"one", at(2): b"one", at(3): b"other"}
        peers = world.peers(at(1), at(2), at(3))
        await peers.live(soon())
        await until(lambda: any(peer.alias for peer in peers.all()))
        [alias] = [peer for peer in peers.all() if peer.alias]
        standing = alias.alias
        assert standing is not None
        for _ in range(3):
            assert set(await peers.live(soon())) == {peer for peer in peers.all() if peer is not alias}
            await asyncio.sleep(0.01)
        assert len(world.connected) == 3
        assert await alias.ready(soon()) is standing.link
        # Whom a request names by the other address is the one that has the session.
        assert await peers.named(alias.address, soon()) == [standing]
        peers.close("over")

    with caplog.at_level(logging.INFO):
        run(steps())
    said = [line for line in caplog.messages if "is the node at" in line]
    assert len(said) == 1
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_the_other_address_of_a_node_takes_over_when_the_first_is_lost() -> None:
    async def steps() -> None:
        world = World()
        world.nodes = {at(1): b"one", at(2): b"one"}
        peers = world.peers(at(1))
        [first] = await peers.live(soon())
        link = await first.ready(soon())
        world.nodes[at(1)] = b"somebody else"
        # A request that names the other address waits for the session that is there, and gets it.
        [named] = await peers.named(at(2), soon())
        assert await named.ready(soon()) is link
        assert named.alias is first
        link.end("the cable is cut")
        await until(lambda: first.link is not None and named.link is not None)
        assert named.alias is None
        assert set(await peers.named(at(2), soon())) == {named}
        peers.close("over")

    run(steps())


def test_whom_the_operator_listed_is_asked_whoever_a_request_names_says_that_it_is() -> None:
    async def steps() -> None:
        world = World()
        world.nodes = {at(1): b"one", at(7): b"one"}
        false_one_first = asyncio.Event()
        connect = world.connect

        async def late(address: Address) -> Any:
            if address == at(1):
                await false_one_first.wait()
            return await connect(address)

        world.connect = late  # type: ignore[method-assign]
        peers = world.peers(at(1))
        [named] = await peers.named(at(7), soon())
        false_link = await named.ready(soon())
        false_one_first.set()
        await until(lambda: named.alias is not None)
        [listed] = await peers.live(soon())
        assert listed.address == at(1)
        assert false_link.ended
        assert await named.ready(soon()) is listed.link is not None
        peers.close("over")

    run(steps())


def test_an_address_that_was_another_one_of_a_node_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_module, "SELF_PAUSE_S", 0.02)

    async def steps() -> None:
        world = World()
        world.nodes = {at(1): b"one", at(2): b"one"}
        peers = world.peers(at(1), at(2))
        await peers.live(soon())
        await until(lambda: len(world.connected) > 4)
        assert [link.ended for link in world.links].count(False) == 1
        assert len(await peers.live(soon())) == 1
        for number in (1, 2):
            world.nodes[at(number)] = b"%d" % number
        await until(lambda: all(peer.link is not None for peer in peers.all()))
        assert len(await peers.live(soon())) == 2
        peers.close("over")

    run(steps())


def test_of_a_range_of_ports_where_nobody_is_one_line_stands_for_all(caplog: pytest.LogCaptureFixture) -> None:
    async def steps() -> None:
        world = World()

        async def nobody(address: Address) -> Any:
            world.connected.append(address)
            raise UnavailableError(f"p2p peer {address}: nobody listens there")

        world.connect = nobody  # type: ignore[method-assign]
        peers = world.peers(*(at(1, port) for port in range(7400, 7432)), at(2), max_peers=64)
        await peers.live(soon())
        await until(lambda: len(set(world.connected)) == 33)
        await until(lambda: all(peer.state is peer_module.State.DOWN for peer in peers.all()))
        peers.close("over")

    with caplog.at_level(logging.INFO):
        run(steps())
    assert sorted(line.split(":")[0] for line in caplog.messages) == ["p2p peer 10.0.0.1", "p2p peer 10.0.0.2"]


def test_without_a_list_there_is_nobody_to_ask() -> None:
    assert World().peers().alone
    assert not World().peers(at(1)).alone


def test_those_that_nobody_names_any_more_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "IDLE_S", 0.2)

    async def steps() -> None:
        peers = World().peers(at(1))
        [peer] = await peers.named(at(7), soon())
        link: Any = await peer.ready(soon())
        # One that is to answer when a record comes has as long as that takes.
        waiting = link.post(Lookup(1, 60_000, ("a",)), Found)
        assert len(peers.all()) == 2
        await asyncio.sleep(4 * peers_module.IDLE_S)
        assert not link.ended
        link._waiting.remove(waiting)
        # Nor one whose records are on their way.
        link.receiver = SimpleNamespace(waiting=1)
        await asyncio.sleep(4 * peers_module.IDLE_S)
        assert not link.ended
        link.receiver.waiting = 0
        await until(lambda: [peer.address for peer in peers.all()] == [at(1)])
        assert link.ended
        peers.close("over")

    run(steps())


def test_who_had_a_record_last_is_asked_first() -> None:
    async def steps() -> None:
        peers = World().peers(at(1), at(2), at(3))
        first = await peers.live(soon())
        first[2].hit_s = 5.0
        assert (await peers.live(soon()))[0] is first[2]
        peers.close("over")

    run(steps())


def test_after_closing_nobody_is_connected_to() -> None:
    async def steps() -> None:
        world = World(kv_example=[at(1)])
        peers = world.peers(NAME, at(2))
        await peers.live(soon())
        peers.close("over")
        before = len(world.connected), world.lookups
        assert await peers.named(at(3), soon()) == []
        await asyncio.sleep(0.1)
        assert (len(world.connected), world.lookups) == before

    run(steps())
