"""Both ends of the data path on one loop, and memory for them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import zmq
import zmq.asyncio

from kvstore_sdk.backend import Buffer, Deadline, Region
from kvstore_sdk_backends.p2p.addresses import Address
from kvstore_sdk_backends.p2p.data_path import Receiver, Sender
from kvstore_sdk_backends.p2p.security import Channel, Security

__all__ = ["MIB", "NODE", "PATIENCE_S", "Bench", "Patient", "bench", "part", "run", "soon", "until"]

PATIENCE_S = 30.0
"""Far more than anything here takes on a machine that is busy."""
MIB = 1 << 20
NODE = b"\x00asker of a test"


class Patient(Security):
    """A test that is held up for long is not taken for a peer that takes nothing."""

    def _limit(self, socket: Any, channel: Channel) -> None:
        super()._limit(socket, channel)
        socket.tcp_maxrt = int(2 * PATIENCE_S * 1000)


class Bench:
    """Both ends on one loop, and what is to be taken down afterwards."""

    def __init__(self) -> None:
        self.context = zmq.asyncio.Context()
        self.security = Patient("127.0.0.1")
        self.lost: list[str] = []
        self._ends: list[Any] = []
        self._regions: list[Region] = []

    def sender(self, **options: Any) -> Sender:
        self._ends.append(Sender(self.context, self.security, NODE, **options))
        made: Sender = self._ends[-1]
        return made

    def receiver(self, port: int, node: bytes = NODE) -> Receiver:
        self._ends.append(Receiver(self.context, self.security, Address("127.0.0.1", port), node, self.lost.append))
        made: Receiver = self._ends[-1]
        return made

    def socket(self, kind: int, **options: Any) -> Any:
        """One of a peer that does as it likes."""
        socket = self.context.socket(kind)
        self._ends.append(socket)
        socket.linger = 0
        for name, value in options.items():
            setattr(socket, name, value)
        return socket

    def memory(self, size: int, seed: int | None = None) -> Buffer:
        self._regions.append(Region(size))
        if seed is not None:
            self._regions[-1].view[:size] = random.Random(seed).randbytes(size)
        return self._regions[-1].buffer(0, size)

    def close(self) -> None:
        for end in self._ends:
            end.close()
        self.context.destroy(0)
        for region in self._regions:
            region.close()


@asynccontextmanager
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    try:
        yield made
    finally:
        made.close()


def part(buffer: Buffer, offset: int, length: int) -> Buffer:
    return buffer.region.buffer(offset, length)


def soon() -> Deadline:
    return Deadline.after(PATIENCE_S)


async def until(what: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not what():
            await asyncio.sleep(0.005)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(90):
            await test()

    asyncio.run(bounded())
