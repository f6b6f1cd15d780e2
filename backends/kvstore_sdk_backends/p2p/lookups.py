"""Which peers have these records: whom a request named first, then the others, a few at a time."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence

from kvstore_sdk.backend import BackendError, TimedOutError, UnavailableError
from kvstore_sdk_backends.p2p.hints import Hinted, Hints
from kvstore_sdk_backends.p2p.link import Link
from kvstore_sdk_backends.p2p.messages import MAX_WAIT_MS, Found, Lookup, Release
from kvstore_sdk_backends.p2p.peer import Peer
from kvstore_sdk_backends.p2p.peers import Peers
from kvstore_sdk_backends.p2p.places import Places
from kvstore_sdk_backends.p2p.suspects import Suspects

__all__ = ["Hunt", "Lookups"]

STRIKE_AFTER_S = 0.2
"""A question that had less time than this says nothing about the peer that did not answer it."""
LEFT_S = 0.3
"""Of the call's time, for what comes after a wait."""
AGAIN_S = 5.0
"""For a peer whose session was lost to have another one; an attempt takes 3 s at most."""
STRAGGLERS_S = 2.0
"""When the last record of a chain is there, for those before it: an owner's threads store them side by side."""


class Hunt:
    """Names that are being looked for.

    Attributes:
        missing: Those that were not found yet, in order.
        avoid: Peers that are not asked.
        put_off: What hints say that name a peer which is suspect, for after all others.
        answered: How many peers have answered.
        error: The first that a listed peer caused.
    """

    def __init__(self, names: Sequence[str], avoid: Collection[Peer] = ()) -> None:
        self.avoid = avoid
        self.missing: dict[str, None] = dict.fromkeys(names)
        self.put_off: dict[Hinted, Sequence[str]] = {}
        self.answered = 0
        self.error: BackendError | None = None

    def fail(self, error: BackendError, hint: Hinted | None = None) -> None:
        """A peer did not answer. One that only a request named says nothing about the others."""
        if hint is None:
            self.error = self.error or error

    def failure(self) -> BackendError | None:
        """Why it cannot be said that what is missing is nowhere; None where it can be: some peer has answered, or there is none."""
        return None if self.answered else self.error


class Lookups:
    """All of it belongs to the loop.

    Attributes:
        counts: What became of questions, for `P2PBackend.counters`.
    """

    def __init__(self, peers: Peers, places: Places, hints: Hints, *, fan_out: int, answer_timeout_s: float) -> None:
        self._peers = peers
        self._places = places
        self._hints = hints
        self._fan_out = fan_out
        self._answer_timeout_s = answer_timeout_s
        self._suspects = Suspects()
        # Those that nobody waits for any more: what they find has to be released.
        self._asking: set[asyncio.Task[None]] = set()
        self.counts = {"lookups": 0, "lookup_timeouts": 0, "lookup_failures": 0, "found": 0, "released": 0, "corrupt": 0}

    async def find(
        self,
        names: Sequence[str],
        until_s: float,
        *,
        hinted: Mapping[Hinted, Sequence[str]] | None = None,
        avoid: Collection[Peer] = (),
    ) -> Hunt:
        """Ask until each name was found, all were asked, or it is `until_s`. Where they are is noted in the places.

        Args:
            hinted: What hints say of these names, for who waits for what is not there yet. Without it nobody waits.
            avoid: Not to be asked: loads from them have just failed.
        """
        hunt = Hunt(names, avoid)
        if hinted is None:
            hinted = self._hints.take(names, wait=False)
        await self._ask_hinted(hinted, hunt, until_s, suspect=False)
        if hunt.missing and not self._peers.alone:
            await self._ask_all(hunt, until_s)
        if hunt.missing:
            await self._ask_hinted(hunt.put_off, hunt, until_s, suspect=True)
        return hunt

    def suspect(self, names: Sequence[str]) -> None:
        """These records came, and are corrupt: forget where they were, and ask others first, also where a request named who gave them."""
        for name in names:
            if (peer := self._places.forget(name)) is not None:
                self.counts["corrupt"] += 1
                self._suspects.note(peer)

    async def find_again(self, hunt: Hunt, until_s: float) -> Hunt:
        """Ask once more for what was not found, where a peer whose session was just lost has another one soon. Else returns `hunt`."""
        if not hunt.missing or not await self._peers.again(min(until_s, time.monotonic() + AGAIN_S)):
            return hunt
        return await self.find(list(hunt.missing), until_s, avoid=hunt.avoid)

    def _keep(self, ask: asyncio.Task[None]) -> asyncio.Task[None]:
        self._asking.add(ask)
        ask.add_done_callback(self._asking.discard)
        return ask

    async def _ask_hinted(self, hinted: Mapping[Hinted, Sequence[str]], hunt: Hunt, until_s: float, *, suspect: bool) -> None:
        if hinted:
            asks = [self._ask_named(hint, group, hunt, until_s, suspect) for hint, group in hinted.items()]
            await asyncio.wait({self._keep(ask) for ask in asks}, timeout=max(0.0, until_s - time.monotonic()))

    async def _ask_all(self, hunt: Hunt, until_s: float) -> None:
        live = await self._peers.live(min(until_s, time.monotonic() + self._answer_timeout_s))
        if not live:
            hunt.fail(UnavailableError(f"no peer can be asked now: {self._peers.why_none()}"))
            return
        for suspect in (False, True):
            if hunt.missing:
                await self._ask_these([peer for peer in live if (peer in self._suspects) is suspect], hunt, until_s)

    async def _ask_these(self, peers: Sequence[Peer], hunt: Hunt, until_s: float) -> None:
        waiting = deque(peer for peer in peers if peer not in hunt.avoid)
        running: set[asyncio.Task[None]] = set()
        while hunt.missing and (waiting or running):
            while waiting and len(running) < self._fan_out:
                ask = self._ask(waiting.popleft(), list(hunt.missing), hunt, until_s)
                running.add(self._keep(asyncio.ensure_future(ask)))
            done, running = await asyncio.wait(running, timeout=max(0.0, until_s - time.monotonic()), return_when=asyncio.FIRST_COMPLETED)
            if not done:
                hunt.fail(TimedOutError("no peer has answered by the deadline"))
                return

    def _ask_named(self, hint: Hinted, names: Sequence[str], hunt: Hunt, until_s: float, suspect: bool) -> asyncio.Task[None]:
        async def ask() -> None:
            soon_s = min(until_s, time.monotonic() + self._answer_timeout_s)
            peers = await self._peers.named(hint.address, soon_s)
            peers = [peer for peer in peers[: self._fan_out] if peer not in hunt.avoid]
            if not suspect and any(peer in self._suspects for peer in peers):
                hunt.put_off[hint] = names
            peers = [peer for peer in peers if (peer in self._suspects) is suspect]
            asks = {self._keep(asyncio.ensure_future(self._ask(peer, names, hunt, until_s, hint))) for peer in peers}
            while asks and any(name in hunt.missing for name in names):
                _, asks = await asyncio.wait(asks, return_when=asyncio.FIRST_COMPLETED)
            for one in asks:
                # Another of its addresses has all of it: this one need not wait for it any longer.
                one.cancel()

        return asyncio.ensure_future(ask())

    async def _ask(self, peer: Peer, names: Sequence[str], hunt: Hunt, until_s: float, hint: Hinted | None = None) -> None:
        """Ask one peer for all names. Raises nothing."""
        self.counts["lookups"] += 1
        try:
            link = await peer.ready(min(until_s, time.monotonic() + self._answer_timeout_s))
            # Known by now, where its node has a session at another address.
            peer = peer.alias or peer
            wait_s = min(hint.wait_s, until_s - time.monotonic() - LEFT_S) if hint is not None else 0.0
            if hint is not None and wait_s > 0 and hint.until:
                waited_s = time.monotonic() + wait_s
                await self._ask_batch(peer, link, hint.until[-1:], hunt, until_s, wait_s)
                if hint.until[-1] not in hunt.missing:
                    await self._ask_in_batches(peer, link, hint.until, hunt, until_s, min(waited_s, time.monotonic() + STRAGGLERS_S))
                wait_s = 0.0
            await self._ask_in_batches(peer, link, names, hunt, until_s, time.monotonic() + wait_s)
            hunt.answered += 1
        except TimedOutError as error:
            self.counts["lookup_timeouts"] += 1
            hunt.fail(error, hint)
        except BackendError as error:
            self.counts["lookup_failures"] += 1
            hunt.fail(error, hint)

    async def _ask_in_batches(self, peer: Peer, link: Link, names: Sequence[str], hunt: Hunt, until_s: float, waited_s: float) -> None:
        """Ask for what is missing of these, and wait for it until `waited_s`."""
        step = link.welcome.max_names
        for at in range(0, len(names), step):
            if batch := tuple(name for name in names[at : at + step] if name in hunt.missing):
                await self._ask_batch(peer, link, batch, hunt, until_s, waited_s - time.monotonic())

    async def _ask_batch(self, peer: Peer, link: Link, names: tuple[str, ...], hunt: Hunt, until_s: float, wait_s: float) -> None:
        asked_s = time.monotonic()
        answer_s = min(until_s, asked_s + max(0.0, wait_s) + self._answer_timeout_s)
        question = Lookup(link.number(), min(int(max(0.0, wait_s) * 1000), MAX_WAIT_MS), names)

        def late(found: Found) -> None:
            self._take(peer, link, names, found, None)

        try:
            found = await link.ask(question, Found, answer_s, late)
        except TimedOutError:
            if time.monotonic() - asked_s - max(0.0, wait_s) >= STRIKE_AFTER_S:
                peer.strike(link, asked_s)
            raise
        peer.praise()
        self._take(peer, link, names, found, hunt)

    def _take(self, peer: Peer, link: Link, names: Sequence[str], found: Found, hunt: Hunt | None) -> None:
        lost = []
        for name, size_bytes in zip(names, found.sizes, strict=True):
            if not size_bytes:
                continue
            if hunt is not None and name in hunt.missing:
                del hunt.missing[name]
                self.counts["found"] += 1
                peer.hit_s = time.monotonic()
                self._places.note(name, peer, link, size_bytes)
            elif (place := self._places.of(name)) is None or place.link is not link:
                # Another peer has it too, or nobody waits for it any more: this one need not keep it for us.
                lost.append(name)
        if lost:
            self.counts["released"] += len(lost)
            link.tell(Release(tuple(lost)))
