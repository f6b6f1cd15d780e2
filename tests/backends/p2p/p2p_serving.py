"""A server on this loop, and askers that say exactly what a test tells them."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import zmq
import zmq.asyncio
from p2p_bench import PATIENCE_S, Patient

from kvstore_sdk_backends.p2p.data_path import HEADER, Sender, routing_id
from kvstore_sdk_backends.p2p.decoding import decode
from kvstore_sdk_backends.p2p.guard import Guard
from kvstore_sdk_backends.p2p.limits import Limits
from kvstore_sdk_backends.p2p.messages import VERSIONS, Fetch, Found, Hello, Lookup, Refused, Result, Welcome, encode
from kvstore_sdk_backends.p2p.server import Server

__all__ = ["Asker", "Serving", "serving"]

M = TypeVar("M")


class Asker:
    """One connection to the server, and the data connection of its session.

    Attributes:
        node: As it says Hello.
        unasked: Messages that came and were not what was waited for.
        takes_data: Otherwise its data connection holds next to nothing that was not read.
    """

    def __init__(self, serving: Serving, node: bytes = b"", **options: Any) -> None:
        """`options`: of the control socket, before it connects."""
        self.node = node or os.urandom(16)
        self.unasked: list[Any] = []
        self.takes_data = True
        self._serving = serving
        self._numbers = itertools.count(1)
        self._socket = serving.context.socket(zmq.DEALER, socket_class=zmq.Socket)
        self._socket.linger = 0
        for name, value in options.items():
            setattr(self._socket, name, value)
        self._socket.connect(serving.endpoint)
        self._data: zmq.Socket[bytes] | None = None

    async def send(self, *frames: bytes) -> None:
        await _patiently(lambda: self._socket.send_multipart(frames, zmq.NOBLOCK))

    async def receive(self) -> Any:
        """The next message, whatever it is: also one that came while an answer was waited for."""
        if self.unasked:
            return self.unasked.pop(0)
        return decode(await _patiently(lambda: self._socket.recv(zmq.NOBLOCK)))

    async def answer(self, number: int, kind: type[M]) -> M:
        """The answer to a question, which must be of that kind. Several tasks may wait: who receives leaves what is another's."""

        def step() -> Any:
            while (message := next((one for one in self.unasked if getattr(one, "number", 0) == number), None)) is None:
                self.unasked.append(decode(self._socket.recv(zmq.NOBLOCK)))
            return message

        message = await _patiently(step)
        self.unasked.remove(message)
        assert isinstance(message, kind), message
        return message

    async def ask(self, message: Any, kind: type[M]) -> M:
        """Send a question under a number of its own, and return its answer."""
        message = dataclasses.replace(message, number=next(self._numbers))
        await self.send(encode(message))
        return await self.answer(message.number, kind)

    async def hello(self, **fields: Any) -> Welcome:
        """Begin a session, and its data connection where it has one."""
        hello = Hello(0, VERSIONS, self.node, "", "", ("zmq",))
        welcome = await self.ask(dataclasses.replace(hello, **fields), Welcome)
        if self._data is not None:
            self._data.close(0)
            self._data = None
        if welcome.data_port:
            self._data = self._serving.context.socket(zmq.DEALER, socket_class=zmq.Socket)
            self._data.linger = 0
            self._data.routing_id = routing_id(self.node)
            if not self.takes_data:
                self._data.rcvhwm, self._data.rcvbuf = 1, 4096
            self._data.connect(f"tcp://127.0.0.1:{welcome.data_port}")
            self._data.send(b"")
        return welcome

    async def refused(self, message: Any) -> str:
        """The code of the refusal of a question."""
        return (await self.ask(message, Refused)).code

    async def look_up(self, *names: str, wait_ms: int = 0) -> tuple[int, ...]:
        return (await self.ask(Lookup(0, wait_ms, names), Found)).sizes

    async def fetch(self, *items: tuple[str, int], deadline_s: float = PATIENCE_S) -> tuple[tuple[int, int], ...]:
        """Statuses of records, by name and size."""
        return (await self.ask(self.fetch_of(*items, deadline_s=deadline_s), Result)).statuses

    def fetch_of(self, *items: tuple[str, int], deadline_s: float = PATIENCE_S) -> Fetch:
        return Fetch(0, 0, round(deadline_s * 1000), tuple((name, size, 0, 0) for name, size in items))

    async def take(self, count: int) -> dict[tuple[int, int], bytes]:
        """The next records of the data connection, by number of the fetch and index."""
        taken = {}
        data = self._data
        assert data is not None
        for _ in range(count):
            header, record = await _patiently(lambda: data.recv_multipart(zmq.NOBLOCK))
            number, index, size = HEADER.unpack(header)
            assert len(record) == size
            taken[number, index] = record
        return taken

    def close(self) -> None:
        """Without a word."""
        self._socket.close(0)
        if self._data is not None:
            self._data.close(0)


class Serving:
    """The server of a test."""

    def __init__(self, sources: Sequence[Any], plane: Any, limits: Limits, paths: Sequence[str]) -> None:
        self.node = os.urandom(16)
        self.context = zmq.asyncio.Context()
        self.security = Patient("127.0.0.1")
        self.senders: list[Sender] = []
        socket = self.context.socket(zmq.ROUTER, socket_class=zmq.Socket)
        self.security.secure_server(socket, "control")
        self.guard = Guard(socket, most=512, secured=False)
        port = self.security.bind(socket, 0)
        self.guard.start(port, "a test")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self.server = Server(
            socket,
            node=self.node,
            is_own=lambda node: node == self.node,
            sources=sources,
            plane=plane,
            make_sender=self._make_sender,
            limits=limits,
            paths=paths,
            guard=self.guard,
        )
        self._askers: list[Asker] = []

    @property
    def counts(self) -> dict[str, int]:
        return self.server.counters()

    def asker(self, node: bytes = b"", **options: Any) -> Asker:
        self._askers.append(Asker(self, node, **options))
        return self._askers[-1]

    def _make_sender(self, node: bytes) -> Sender:
        self.senders.append(Sender(self.context, self.security, node))
        return self.senders[-1]

    def close(self) -> None:
        for asker in self._askers:
            asker.close()
        self.guard.close()
        self.context.destroy(0)


@asynccontextmanager
async def serving(*sources: Any, plane: Any = None, paths: Sequence[str] = (), **limits: Any) -> AsyncIterator[Serving]:
    """A server over these sources; at its end every loan is back. Leases last for ever, unless the limits say otherwise."""
    made = Serving(sources, plane, dataclasses.replace(Limits(lease_s=3600.0), **limits), paths)
    run = asyncio.ensure_future(made.server.run())
    try:
        yield made
        assert not run.done()
    finally:
        run.cancel()
        await asyncio.wait({run})
        await made.server.close()
        made.close()
    for source in sources:
        assert source.out == []


async def _patiently(step: Any) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return step()
            except zmq.Again:
                await asyncio.sleep(0.001)
