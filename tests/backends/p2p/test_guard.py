"""Connections that are no sessions cost little, and nobody else anything."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgpack")

import zmq
import zmq.asyncio
from p2p_bench import run, until

from kvstore_sdk_backends.p2p import guard as guards
from kvstore_sdk_backends.p2p.addresses import Address
from kvstore_sdk_backends.p2p.admission import Admission
from kvstore_sdk_backends.p2p.guard import Guard
from kvstore_sdk_backends.p2p.keys import CurveKey
from kvstore_sdk_backends.p2p.security import Security

pytestmark = pytest.mark.usefixtures("patient")

WAIT_S = 30.0
GREETING_OF_ZMTP_3 = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03"


class Node:
    """A control socket that answers every frame with itself, and welcomes whoever says `hello`."""

    def __init__(self, key: CurveKey | None, most: int) -> None:
        self.context = zmq.asyncio.Context()
        self.connections: list[socket.socket] = []
        self.security = Security("127.0.0.1", key=key)
        self.key = key
        self.socket = self.context.socket(zmq.ROUTER, socket_class=zmq.Socket)
        self.security.secure_server(self.socket, "control")
        self.guard = Guard(self.socket, most=most, secured=key is not None)
        self.port = self.security.bind(self.socket, 0)
        self.guard.start(self.port, "node under test")
        self.tasks = [asyncio.ensure_future(self._answer()), asyncio.ensure_future(self.guard.run())]
        self.admission = None
        if key is not None:
            self.admission = Admission(self.context, key, "node under test")
            self.tasks.append(asyncio.ensure_future(self.admission.run()))

    async def _answer(self) -> None:
        while True:
            try:
                name, *_, word = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                await asyncio.sleep(0.005)
                continue
            self.guard.look()
            if word.bytes == b"hello":
                self.guard.welcome(word)
            elif word.bytes == b"goodbye":
                self.guard.part(int(word.get("__fd")))
            self.socket.send_multipart([name.bytes, word.bytes])

    def client(self, key: CurveKey | None = None) -> zmq.asyncio.Socket:
        made = self.context.socket(zmq.DEALER)
        Security("127.0.0.1", key=key or self.key).secure_client(made, "control", Address("127.0.0.1", self.port))
        made.connect(f"tcp://127.0.0.1:{self.port}")
        return made

    def connect(self, said: bytes = b"") -> socket.socket:
        made = socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S)
        self.connections.append(made)
        made.sendall(said)
        return made

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.guard.close()
        if self.admission is not None:
            self.admission.close()
        for connection in self.connections:
            connection.close()
        self.context.destroy(linger=0)


@asynccontextmanager
async def running(key: CurveKey | None = None, most: int = 64) -> AsyncIterator[Node]:
    node = Node(key, most)
    try:
        yield node
    finally:
        await node.close()


async def echoes(client: zmq.asyncio.Socket, word: bytes = b"hello") -> bool:
    await client.send(word)
    return bool(await asyncio.wait_for(client.recv(), WAIT_S) == word)


def was_ended(connection: socket.socket) -> bool:
    """Whether the other side has ended it; what it said before is read and dropped."""
    connection.setblocking(False)
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


@pytest.fixture
def key() -> CurveKey:
    return CurveKey(*zmq.curve_keypair())


SILENT = {
    "nothing": b"",
    "half a greeting": GREETING_OF_ZMTP_3[:5],
    "a greeting and no more": GREETING_OF_ZMTP_3 + b"\0NULL".ljust(53, b"\0"),
    "a browser": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "zeros": bytes(4096),
    "what ZMTP 1.0 looks like": b"\x01\x00" + b"\x05\x00abcd",
}


@pytest.mark.parametrize("secured", [False, True], ids=["plain", "with a key"])
def test_whoever_says_no_hello_is_cut_off_and_the_others_stay(secured: bool, key: CurveKey, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "SESSION_S", WAIT_S)

    async def test() -> None:
        async with running(key if secured else None) as node:
            good = node.client()
            assert await echoes(good)
            strangers = [node.connect(said) for said in SILENT.values()]
            monkeypatch.setattr(guards, "SESSION_S", 0.3)
            await until(lambda: all(map(was_ended, strangers)))
            await until(lambda: node.guard.connections == 1)
            await asyncio.sleep(0.6)  # longer than SESSION_S: a session is not cut
            assert await echoes(good, b"again")

    run(test)


def test_a_client_that_speaks_the_transport_and_says_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "SESSION_S", WAIT_S)

    async def test() -> None:
        async with running() as node:
            mute = node.client()
            await until(lambda: node.guard.connections == 1)
            monkeypatch.setattr(guards, "SESSION_S", 0.3)
            await until(lambda: node.guard.connections == 0)
            mute.close(linger=0)

    run(test)


def test_a_connection_whose_session_ended_has_time_for_another_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "SESSION_S", WAIT_S)

    async def test() -> None:
        async with running() as node:
            good, done = node.client(), node.client()
            assert await echoes(good)
            assert await echoes(done)
            assert await echoes(done, b"goodbye")
            assert await echoes(done)  # and hello again
            monkeypatch.setattr(guards, "SESSION_S", 0.3)
            await asyncio.sleep(0.6)
            assert node.guard.connections == 2
            assert await echoes(done, b"goodbye")
            await until(lambda: node.guard.connections == 1)
            assert await echoes(good, b"again")

    run(test)


@pytest.mark.parametrize("secured", [False, True], ids=["plain", "with a key"])
def test_a_flood_of_connections_is_bounded_and_a_session_survives_it(secured: bool, key: CurveKey, monkeypatch: pytest.MonkeyPatch) -> None:
    # Or that alone would end them.
    monkeypatch.setattr(guards, "SESSION_S", 3600.0)

    async def test() -> None:
        async with running(key if secured else None, most=16) as node:
            good = node.client()
            assert await echoes(good)
            before = len(os.listdir("/proc/self/fd"))
            flood = []
            for _ in range(300):
                flood.append(node.connect())
                # The loop is the node's own, too.
                await asyncio.sleep(0)
            # Whoever comes later would have to give way to what has not been let in yet.
            await until(lambda: sum(map(was_ended, flood)) >= 300 - 16)
            # Which libzmq closes in a thread of its own.
            await until(lambda: node.guard.connections <= 16)
            # Both ends of each are of this process.
            await until(lambda: len(os.listdir("/proc/self/fd")) - before <= 300 + 16)
            assert await echoes(good, b"again")
            another = node.client()
            assert await echoes(another)
            for connection in flood:
                connection.close()
            await until(lambda: node.guard.connections == 2)

    run(test)


def test_the_log_says_once_who_was_refused_and_why(key: CurveKey, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)

    async def test() -> None:
        async with running(key) as node:
            strangers = [node.client(CurveKey(*zmq.curve_keypair())) for _ in range(5)]
            await until(lambda: "its key_file is not this node's" in caplog.text)
            await until(lambda: node.guard.connections == 0)
            for stranger in strangers:
                stranger.close(linger=0)

    run(test)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == len(set(lines))
    # A connection may be over before anybody could ask whose it was.
    assert set(lines) <= {f"node under test: refused {who}: its key_file is not this node's" for who in ("127.0.0.1", "a connection")}


def test_a_holder_of_the_public_half_alone_is_not_let_in(key: CurveKey, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with running(key) as node:
            stranger = node.context.socket(zmq.DEALER)
            public, secret = zmq.curve_keypair()
            stranger.curve_serverkey, stranger.curve_publickey, stranger.curve_secretkey = key.public, public, secret
            stranger.reconnect_ivl = -1
            stranger.connect(f"tcp://127.0.0.1:{node.port}")
            await stranger.send(b"hello")
            await until(lambda: "its key is not the one of key_file here" in caplog.text)
            await until(lambda: node.guard.connections == 0)
            assert await stranger.poll(200) == 0
            stranger.close(linger=0)

    run(test)


def test_while_nobody_answers_for_admission_nobody_is_let_in(key: CurveKey) -> None:
    async def test() -> None:
        async with running(key) as node:
            node.tasks[-1].cancel()
            await asyncio.gather(node.tasks[-1], return_exceptions=True)
            assert node.admission is not None
            node.admission.close()
            member = node.client()
            with suppress(zmq.Again):
                await member.send(b"hello", zmq.NOBLOCK)
            assert await member.poll(1000) == 0
            member.close(linger=0)

    run(test)
