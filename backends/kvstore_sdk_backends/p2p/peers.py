"""Whom this node asks: peers that an operator listed, by name or number, and those that a request named."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial

from kvstore_sdk_backends.p2p.addresses import Address, resolve
from kvstore_sdk_backends.p2p.link import Link
from kvstore_sdk_backends.p2p.notices import Notices
from kvstore_sdk_backends.p2p.peer import AliasError, Peer

__all__ = ["Peers"]

logger = logging.getLogger(__name__)

IDLE_S = 60.0
"""After that a peer that a request named is let go."""
MAX_NAMES = 256
"""Names of hosts, out of requests, whose addresses are kept."""
MAX_RESOLVING = 8
"""Of those, how many are looked up at a time: each takes a thread, for as long as a resolver takes that does not answer."""


class Peers:
    """One `Peer` an address, and one session a node, however many of its addresses are known. All of it belongs to the loop."""

    def __init__(
        self,
        listed: Sequence[Address],
        connect: Callable[[Address], Awaitable[Link]],
        *,
        max_peers: int,
        resolve_s: float,
        may_connect: Callable[[Address], bool],
        lookup: Callable[[Address], Iterable[Address]] = resolve,
    ) -> None:
        """
        Args:
            listed: By the operator.
            connect: Opens a session with what one of them resolves to.
            max_peers: Addresses at one time; those that requests named give way.
            resolve_s: Between two look-ups of a name.
            may_connect: Whether an address, or whatever a name stands for, may be connected to at all.
            lookup: The addresses of a name, or an `OSError`. It may block.
        """
        self.listed = tuple(listed)
        self._connect = connect
        self._max_peers = max_peers
        self._resolve_s = resolve_s
        self._may_connect = may_connect
        self._lookup = lookup
        self._peers: dict[Address, Peer] = {}
        self._own: dict[Address, frozenset[Address]] = {}
        """By what an operator wrote, the numeric addresses it stands for."""
        self._named: dict[Address, tuple[float, tuple[Address, ...]]] = {}
        self._resolving: dict[Address, asyncio.Future[Iterable[Address]]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._resolved = asyncio.Event()
        self._closed = False
        self._said: set[str] = set()
        self._notices = Notices()

    def start(self) -> None:
        """Connect to all that are listed. Idempotent."""
        if self._tasks or self._closed:
            return
        names = [address for address in self.listed if not address.is_numeric]
        for address in self.listed:
            if address.is_numeric:
                self._own[address] = frozenset({address})
        self._update()
        if not names:
            self._resolved.set()
        self._tasks = [asyncio.ensure_future(self._follow(name, names)) for name in names]
        self._tasks.append(asyncio.ensure_future(self._tidy()))

    async def live(self, until_s: float) -> list[Peer]:
        """Those of the listed to ask: who had a record last comes first. Waits for names to resolve, the first time."""
        self.start()
        if not self._resolved.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._resolved.wait(), max(0.0, until_s - time.monotonic()))
        return sorted(_live(self._listed_peers()), key=lambda peer: -peer.hit_s)

    @property
    def alone(self) -> bool:
        """Whether there is nobody to ask: nobody is listed, or all of them are this node itself."""
        return not self.listed or (self._resolved.is_set() and bool(found := self._listed_peers()) and all(peer.itself for peer in found))

    async def named(self, address: Address, until_s: float) -> list[Peer]:
        """Those that a request named, who are looked up and connected to if need be; none where that must not or cannot be."""
        self.start()
        addresses = (address,) if address.is_numeric else await self._resolve_named(address, until_s)
        found = [peer for one in addresses if (peer := self._take(one)) is not None]
        for peer in found:
            peer.used_s = time.monotonic()
            peer.start()
        return _live(found)

    async def again(self, until_s: float) -> bool:
        """Whether one of those whose sessions were lost just now has another one, by `until_s`. They are waited for together."""
        found = await asyncio.gather(*(peer.again(until_s) for peer in self.all() if peer.returning))
        return any(found)

    def all(self) -> list[Peer]:
        return list(self._peers.values())

    def renew(self, why: str) -> None:
        """Begin all sessions anew: what this node says of itself has changed."""
        for peer in self.all():
            peer.renew(why)

    def close(self, why: str) -> None:
        self._closed = True
        for task in self._tasks:
            task.cancel()
        for resolving in self._resolving.values():
            resolving.cancel()
        for peer in self.all():
            peer.close(why)

    def why_none(self) -> str:
        """For an error: what is the matter with those that are listed."""
        found = self._listed_peers()
        if not found:
            return "none of the names in peers resolves to an address that may be connected to"
        said = [f"{peer.address}: {peer.why}" for peer in found if not peer.live and not peer.itself]
        return "; ".join(said[:3]) + (f"; and {len(said) - 3} more" if len(said) > 3 else "")

    def _listed_peers(self) -> list[Peer]:
        own = frozenset().union(*self._own.values())
        return [peer for address, peer in self._peers.items() if address in own]

    def _take(self, address: Address) -> Peer | None:
        if (peer := self._peers.get(address)) is not None:
            return peer
        if self._closed:
            return None
        if not self._may_ask(address):
            return None
        if len(self._peers) >= self._max_peers and not self._make_room():
            self._say(f"p2p: more than max_peers {self._max_peers} peers are in use; others that requests name are not asked")
            return None
        peer = self._peers[address] = Peer(address, self._begin, self._notices)
        return peer

    def _may_ask(self, address: Address) -> bool:
        may = self._may_connect(address)
        if not may:
            self._say(f"p2p: a request names {address}, which is not on loopback: that needs key_file, or insecure=true")
        return may

    async def _begin(self, address: Address) -> Link:
        """A session with the node there, unless there is one: two would be one too many for both.

        Raises:
            AliasError: there is.
            BackendError: the node there has none for this one.
        """
        link = await self._connect(address)
        own = frozenset().union(*self._own.values())
        for peer in self.all():
            other = peer.link
            if peer.address == address or other is None or other.welcome.node != link.welcome.node:
                continue
            if address in own and peer.address not in own:
                # Whoever a request names may say that it is whatever node; whom the operator listed is asked in any case.
                other.end(f"is the node at {address}, which is listed")
                continue
            raise AliasError(str(link.end(f"is the node at {peer.address}, whose session is used")), peer, other)
        return link

    def _make_room(self) -> bool:
        """Let the one go that was named longest ago and is in no use."""
        own = frozenset().union(*self._own.values())
        idle = [peer for peer in self.all() if peer.address not in own and not _is_in_use(peer)]
        if not idle:
            return False
        peer = min(idle, key=lambda peer: peer.used_s)
        peer.close("made room for another peer")
        del self._peers[peer.address]
        return True

    def _update(self) -> None:
        """Have a peer for each address that is listed, and none for those that names no longer stand for."""
        own = frozenset().union(*self._own.values())
        for address in sorted(own):
            if address in self._peers:
                continue
            if not self._may_connect(address):
                self._say(f"p2p: {address}, of peers, is not on loopback: that needs key_file, or insecure=true")
            elif len(self._peers) >= self._max_peers and not self._make_room():
                self._say(f"p2p: peers are more than max_peers {self._max_peers} addresses; those beyond are not asked")
            else:
                self._peers[address] = Peer(address, self._begin, self._notices)
        for address in own:
            if (peer := self._peers.get(address)) is not None:
                peer.start()

    async def _follow(self, name: Address, names: Sequence[Address]) -> None:
        """Look a name up again and again, one look-up at a time however long it takes."""
        while True:
            try:
                before = self._own.get(name, frozenset())
                found = frozenset(await asyncio.get_running_loop().run_in_executor(None, self._lookup, name))
                self._own[name] = found
                for address in before - frozenset().union(*self._own.values()):
                    if (peer := self._peers.pop(address, None)) is not None:
                        peer.close(f"{name.host} does not stand for it any more")
                self._update()
            except OSError as cause:
                # What it stood for last goes on being asked.
                self._own.setdefault(name, frozenset())
                self._say(f"p2p: {name}, of peers, does not resolve: {cause}; it is looked up again every {self._resolve_s:g} s")
            if all(one in self._own for one in names):
                self._resolved.set()
            await asyncio.sleep(self._resolve_s)

    async def _resolve_named(self, address: Address, until_s: float) -> tuple[Address, ...]:
        now_s = time.monotonic()
        known = self._named.get(address)
        if known is not None and known[0] > now_s:
            return known[1]
        if not self._may_ask(address):
            # No resolver is to hear from here what somebody wrote into a request.
            return ()
        if (resolving := self._resolving.get(address)) is None:
            if len(self._resolving) >= MAX_RESOLVING:
                self._say(f"p2p: {MAX_RESOLVING} names that requests name are being looked up; others are not asked meanwhile")
                return ()
            resolving = self._resolving[address] = asyncio.get_running_loop().run_in_executor(None, self._lookup, address)
            resolving.add_done_callback(partial(self._end_resolving, address))
        # It goes on, with its thread, also when nobody waits any more.
        await asyncio.wait({resolving}, timeout=max(0.0, until_s - now_s))
        if not resolving.done():
            self._note_named(address, (), "no answer")
        known = self._named.get(address)
        return known[1] if known is not None else ()

    def _end_resolving(self, address: Address, resolving: asyncio.Future[Iterable[Address]]) -> None:
        del self._resolving[address]
        if resolving.cancelled():
            return
        try:
            self._note_named(address, tuple(resolving.result()))
        except OSError as cause:
            self._note_named(address, (), str(cause))

    def _note_named(self, address: Address, found: tuple[Address, ...], problem: str = "") -> None:
        if problem:
            self._say(f"p2p: {address.host}, which a request names, does not resolve: {problem}")
        self._named.pop(address, None)
        while len(self._named) >= MAX_NAMES:
            del self._named[next(iter(self._named))]
        self._named[address] = (time.monotonic() + self._resolve_s, found)

    async def _tidy(self) -> None:
        while True:
            await asyncio.sleep(IDLE_S / 4)
            self._said.clear()
            own = frozenset().union(*self._own.values())
            for peer in self.all():
                if peer.address not in own and not _is_in_use(peer) and time.monotonic() - peer.used_s > IDLE_S:
                    peer.close("was not asked for anything any more")
                    del self._peers[peer.address]

    def _say(self, text: str) -> None:
        """A line at most every so often, and of so many kinds."""
        if text not in self._said and len(self._said) < 100:
            self._said.add(text)
            logger.warning("%s", text)


def _is_in_use(peer: Peer) -> bool:
    """Whether a question to it waits for its answer, or records of it are to come."""
    link = peer.link
    return link is not None and bool(link.waiting or (link.receiver is not None and link.receiver.waiting))


def _live(peers: Iterable[Peer]) -> list[Peer]:
    """Those to ask, each node once."""
    return [peer for peer in dict.fromkeys(peer.alias or peer for peer in peers) if peer.live]
