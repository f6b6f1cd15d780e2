"""Over which path records come from whom: over NIXL, and for a while over ZMQ where NIXL does not work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from kvstore_sdk.backend import UnavailableError
from kvstore_sdk_backends.p2p.addresses import Address
from kvstore_sdk_backends.p2p.link import Link, PeerRefusedError
from kvstore_sdk_backends.p2p.peer import Peer
from kvstore_sdk_backends.p2p.peers import Peers
from kvstore_sdk_backends.p2p.plane import Plane

__all__ = ["Ways"]

AGAIN_S = 180.0
"""How long records come over ZMQ before NIXL is tried again."""
REFUSED_S = 10.0
"""The same where they may not, and do not come at all meanwhile."""
LOOK_S = 0.5
_MOST = 1024
"""Addresses that are remembered."""


class Ways:
    """What to offer in which Hello, and which sessions to begin anew, since what was offered holds no more. Belongs to the loop.

    A hit that cannot be loaded costs more than a miss, so a session over NIXL ends while this node's data plane is down, where the peer's
    does not reach it, and where loads from the peer fail again and again.

    Attributes:
        zmq_only: NIXL is not to be used any more. Of any thread.
    """

    def __init__(self, paths: Callable[[Address], tuple[str, ...]], plane: Plane | None) -> None:
        """`paths`: those that may be used with a peer there, the preferred one first."""
        self.zmq_only = False
        self._usual = paths
        self._plane = plane
        self._avoided: dict[Address, float] = {}
        """Where NIXL did not work, and until when it is not tried."""
        self._reached: dict[Address, float] = {}
        """Where it did, and when a session last began."""

    def offer(self, address: Address) -> tuple[str, ...]:
        """The paths for a new session with a peer there.

        Raises:
            UnavailableError: there is none now.
        """
        paths = self._paths_of(address)
        if (problem := self._problem(address)) and "nixl" in paths:
            paths = tuple(path for path in paths if path != "nixl")
            if not paths:
                raise UnavailableError(f"p2p peer {address}: {problem}")
        return paths

    def note(self, link: Link) -> None:
        """A session has begun."""
        if link.welcome.path == "nixl":
            _remember(self._reached, link.address, time.monotonic())
            link.on_end(lambda: self._look_back(link))

    async def watch(self, peers: Peers) -> None:
        """Begin sessions anew where that is due, until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            for peer in peers.all():
                if why := self._why_anew(peer):
                    peer.renew(why)

    def _paths_of(self, address: Address) -> tuple[str, ...]:
        return ("zmq",) if self.zmq_only else self._usual(address)

    def _problem(self, address: Address) -> str:
        """Why not over NIXL."""
        if self._plane is not None and not self._plane.up:
            return "the data plane of this node is being restarted"
        return "nixl does not reach it, or is not reached by it" if self._avoided.get(address, 0.0) > time.monotonic() else ""

    def _why_anew(self, peer: Peer) -> str:
        may_change = "zmq" in self._paths_of(peer.address)
        if peer.path == "nixl" and peer.failing and may_change:
            self._avoid(peer.address)
            return "loads over nixl fail; records come over zmq for a while"
        if (link := peer.link) is None:
            return ""
        if peer.path == "nixl":
            return "the data plane of this node is being restarted" if self._plane is not None and not self._plane.up else ""
        due = time.monotonic() - link.began_s >= AGAIN_S and peer.address in self._reached and not link.waiting
        return "nixl is tried again" if due and not self._problem(peer.address) and "nixl" in self._paths_of(peer.address) else ""

    def _look_back(self, link: Link) -> None:
        if isinstance(link.error, PeerRefusedError) and link.error.code == "path":
            self._avoid(link.address)

    def _avoid(self, address: Address) -> None:
        pause_s = AGAIN_S if "zmq" in self._paths_of(address) else REFUSED_S
        _remember(self._avoided, address, time.monotonic() + pause_s)


def _remember(known: dict[Address, float], address: Address, at_s: float) -> None:
    known.pop(address, None)
    while len(known) >= _MOST:
        del known[next(iter(known))]
    known[address] = at_s
