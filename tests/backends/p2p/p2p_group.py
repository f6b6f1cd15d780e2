"""Peers that answer as a test tells them, and the look-ups that ask them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from p2p_scripted import Answer, FakeLink

from kvstore_sdk.backend import UnavailableError
from kvstore_sdk_backends.p2p.addresses import Address
from kvstore_sdk_backends.p2p.hints import Hints
from kvstore_sdk_backends.p2p.lookups import Hunt, Lookups
from kvstore_sdk_backends.p2p.messages import Lookup, Release
from kvstore_sdk_backends.p2p.peers import Peers
from kvstore_sdk_backends.p2p.places import Places

__all__ = ["LIMIT_S", "Group", "missing", "run"]

LIMIT_S = 20.0


class Group:
    """Peers on ports 1, 2, 3 of this machine, each of which answers as told; all of them are listed but for the last `named`."""

    def __init__(self, *answers: Answer, named: int = 0, fan_out: int = 4, answer_timeout_s: float = LIMIT_S, max_names: int = 256) -> None:
        self.links = {port: FakeLink(answer, port, max_names=max_names) for port, answer in enumerate(answers, 1)}
        listed = [Address("127.0.0.1", port) for port in self.links][: len(answers) - named]
        self.peers = Peers(listed, self._connect, max_peers=64, resolve_s=60, may_connect=lambda address: True)
        self.hints = Hints()
        self.places = Places()
        self.lookups = Lookups(self.peers, self.places, self.hints, fan_out=fan_out, answer_timeout_s=answer_timeout_s)

    async def up(self) -> None:
        """Have a session with each: what is short afterwards is the time for answers alone."""
        self.peers.start()
        for peer in self.peers.all():
            await peer.ready(time.monotonic() + LIMIT_S)

    async def _connect(self, address: Address) -> Any:
        if self.links[address.port].ended:
            raise UnavailableError(f"p2p peer {address}: nobody listens there")
        return self.links[address.port]

    async def find(self, *names: str, limit_s: float = LIMIT_S, wait: bool = False, **how: Any) -> Hunt:
        asked = [f"v1/{name}" for name in names]
        hinted = self.hints.take(asked, wait=True) if wait else None
        return await self.lookups.find(asked, time.monotonic() + limit_s, hinted=hinted, **how)

    def asked(self, port: int) -> list[tuple[str, ...]]:
        return [tuple(name.removeprefix("v1/") for name in one.names) for one in self.links[port].asked if isinstance(one, Lookup)]

    def released(self, port: int) -> list[str]:
        return [name.removeprefix("v1/") for one in self.links[port].told if isinstance(one, Release) for name in one.names]

    def place(self, name: str) -> int | None:
        place = self.places.of(f"v1/{name}")
        return place.link.address.port if place is not None else None


def run(step: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(step, 60))


def missing(hunt: Hunt) -> list[str]:
    return [name.removeprefix("v1/") for name in hunt.missing]
