"""A peer at one address: at most one session with it, kept up or left alone for a while."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from enum import Enum

from kvstore_sdk.backend import BackendError, UnavailableError
from kvstore_sdk_backends.p2p.addresses import Address
from kvstore_sdk_backends.p2p.link import Link, PeerRefusedError
from kvstore_sdk_backends.p2p.notices import Notices

__all__ = ["AliasError", "Peer", "State"]

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
"""Between two attempts to connect, doubled from one to the next. The longest is what a peer that is back may wait to be found."""
REFUSED_PAUSE_S = 10.0
"""After a refusal that only a changed setting, or a reset of either engine's cache, can lift."""
SELF_PAUSE_S = 60.0
"""This node itself, or another address of a peer: it may become another's."""
STEADY_S = 1.0
"""A session that lasted as long and is lost is begun again at once."""
MAX_FAULTS = 3
"""Loads in a row that failed although the peer had said that it has the record; then it is not asked for a while."""
SHUN_S, LONGEST_SHUN_S = 2.0, 60.0
MAX_STRIKES = 3
"""Questions in a row that a peer lets wait too long; then its session is ended. One is enough until it has answered again."""
FOR_ROOM, LATER = frozenset({"idle", "full"}), frozenset({"closing", "invalid"})
"""Codes of a Goodbye: after these a session is begun when there is something to ask, after those not at once."""
LOG_EVERY_S = 60.0
"""The same line about the same peer."""


class AliasError(UnavailableError):
    """An address turned out to be the node of another peer, whose session, `link`, stands."""

    def __init__(self, text: str, peer: Peer, link: Link) -> None:
        super().__init__(text)
        self.peer = peer
        self.link = link


class State(Enum):
    """What a peer is about. `IDLE`: until it is asked for; `DOWN`, `REFUSED`: until the next attempt; `ALIAS`: as long as the session
    that the node has at another address."""

    IDLE = "idle"
    CONNECTING = "connecting"
    UP = "up"
    DOWN = "down"
    REFUSED = "refused"
    ALIAS = "alias"
    CLOSED = "closed"


class Peer:
    """Connects again and again, by one task and so never twice at a time. All of it belongs to the loop.

    Attributes:
        address: A number and a port.
        state: See `State`.
        used_s: When it was last asked for; a peer that only a request named is let go some time after.
        hit_s: When it last had a record that was looked for.
        connects: Attempts to begin a session.
        itself: It turned out to be this node.
        why: What is the matter, or not, as one clause.
    """

    def __init__(self, address: Address, connect: Callable[[Address], Awaitable[Link]], notices: Notices | None = None) -> None:
        """`connect` opens a session, or raises a `BackendError`, within some seconds. `notices`: of all peers of a node."""
        self.address = address
        self.state = State.IDLE
        self.used_s = time.monotonic()
        self.hit_s = 0.0
        self.connects = 0
        self.itself = False
        self._connect = connect
        self._notices = notices if notices is not None else Notices(LOG_EVERY_S)
        self._link: Link | None = None
        self._alias: Peer | None = None
        self._task: asyncio.Task[None] | None = None
        self._failures = 0
        self._strikes = 0
        self._struck_s = 0.0
        self._faults = 0
        self._blamed_s = 0.0
        self._shunned_until_s = 0.0
        self._renewals = 0
        self._returning = False
        self.why = "was not asked yet"
        self._news = asyncio.Event()
        self._hurry = asyncio.Event()
        self._said: tuple[str, float] = ("", 0.0)

    def __repr__(self) -> str:
        return f"Peer({self.address}, {self.state.value})"

    @property
    def link(self) -> Link | None:
        """The session that stands."""
        return self._link if self._link is not None and not self._link.ended else None

    @property
    def path(self) -> str:
        """Which records take, or took when there was a session last; empty: there was none."""
        return self._link.welcome.path if self._link is not None else ""

    @property
    def failing(self) -> bool:
        """Whether the last loads from it have failed, so many that it is not asked for a while."""
        return self._faults >= MAX_FAULTS

    @property
    def alias(self) -> Peer | None:
        """The peer that has a session with the same node; None where it is this one, or nobody."""
        return self._alias if self._alias is not None and self._alias.link is not None else None

    @property
    def live(self) -> bool:
        """Whether to ask it: its session stands, or is being begun for the first time, or for the first time after it was lost."""
        if self._shunned_until_s > time.monotonic():
            return False
        return self.link is not None or (self.state in (State.IDLE, State.CONNECTING) and not self._failures)

    @property
    def returning(self) -> bool:
        """Whether its session was lost just now, after all was well, and the attempt that follows has not failed."""
        return self._returning and self.link is None and self._shunned_until_s <= time.monotonic()

    def start(self) -> None:
        """Begin to connect. Idempotent."""
        if self._task is None and self.state is not State.CLOSED:
            self._task = asyncio.ensure_future(self._run())

    async def ready(self, until_s: float) -> Link:
        """The session, which is waited for only while there is hope. That of the node at its other address, where this is an `alias`.

        Raises:
            UnavailableError: there is none by `until_s`, or not soon. The message says why.
        """
        self.used_s = time.monotonic()
        self.start()
        while (link := self.link) is None:
            if self.state is State.IDLE:
                self._hurry.set()
            if (alias := self.alias) is not None:
                return await alias.ready(until_s)
            left_s = until_s - time.monotonic()
            if not self.live or left_s <= 0:
                raise UnavailableError(f"p2p peer {self.address}: {self.why}")
            try:
                await asyncio.wait_for(self._news.wait(), left_s)
            except TimeoutError:
                self.why = "does not answer"
        return link

    async def again(self, until_s: float) -> bool:
        """Whether there is a session, or there is another one by `until_s` after the one that was lost: that is waited for while it is
        `returning`."""
        while self.returning and (left_s := until_s - time.monotonic()) > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), left_s)
        return self.link is not None

    def praise(self) -> None:
        """It answered."""
        self._failures = self._strikes = 0

    def strike(self, link: Link, asked_s: float) -> None:
        """It let a question wait too long. All that were under way with one that waited too long before are one with that."""
        if asked_s < self._struck_s:
            return
        self._struck_s = time.monotonic()
        self._strikes += 1
        if self._strikes >= (1 if self._failures else MAX_STRIKES):
            self._failures += 1
            self._returning = False
            link.end(f"did not answer in time, {self._strikes} times in a row")

    def thank(self) -> None:
        """It gave a record."""
        self._faults = 0

    def blame(self, began_s: float) -> None:
        """A load from it failed, of what it had said it has. All that were under way with one that failed before are one with that."""
        if began_s < self._blamed_s:
            return
        self._blamed_s = time.monotonic()
        self._faults += 1
        self.hit_s = 0.0
        if self._faults >= MAX_FAULTS:
            shun_s = min(LONGEST_SHUN_S, SHUN_S * 2.0 ** min(self._faults - MAX_FAULTS, 10))
            self._shunned_until_s = time.monotonic() + shun_s
            self.why = f"{self._faults} loads in a row have failed"
            self._say(logging.WARNING, f"is not asked for a while: {self.why}")

    def renew(self, why: str) -> None:
        """End the session, and begin another one at once."""
        self._failures = self._faults = 0
        self._shunned_until_s = 0.0
        self._renewals += 1
        if self._link is not None:
            self._link.end(why)
        self._hurry.set()

    def close(self, why: str) -> None:
        """End the session, and begin no other. Idempotent."""
        self._returning = False
        self._set(State.CLOSED, why)
        if self._task is not None:
            self._task.cancel()
        if self._link is not None:
            self._link.end(why)

    def _set(self, state: State, why: str) -> None:
        self.state = state
        self.why = why
        self._news.set()
        self._news = asyncio.Event()

    async def _run(self) -> None:
        while True:
            self._hurry.clear()
            self._set(State.CONNECTING, "is being connected to")
            self.connects += 1
            renewals = self._renewals
            try:
                self._link = link = await self._connect(self.address)
            except AliasError as error:
                await self._stand_aside(error)
                continue
            except Exception as error:  # noqa: BLE001  # one of another kind must not end all attempts
                await self._rest(self._fail(error))
                continue
            if renewals != self._renewals:
                link.end("what this node says of itself has changed")
                continue
            began_s = time.monotonic()
            self._strikes = 0
            self._alias = None
            self.itself = False
            self._returning = True
            self._set(State.UP, "is up")
            self._say(logging.INFO, f"is up, records come over {link.welcome.path}")
            await link.wait_ended()
            if link.farewell in FOR_ROOM:
                await self._stand_by(link)
                continue
            steady = time.monotonic() - began_s >= STEADY_S and link.farewell not in LATER
            self._returning = self._returning and not self._failures
            self._failures += not steady
            self._set(State.DOWN, link.cause)
            self._say(logging.WARNING, f"is lost: {link.cause}")
            if self._failures:
                await self._rest(self._pause_s())

    async def _stand_by(self, link: Link) -> None:
        """Until there is something to ask: who came back before that would take the place of another one, and that one of the next."""
        self._failures = 0
        self._returning = False
        self._set(State.IDLE, link.cause)
        self._say(logging.INFO, link.cause)
        await self._hurry.wait()

    async def _stand_aside(self, error: AliasError) -> None:
        """Until the session at the other address ends, or this address may be another's."""
        if self._alias is not error.peer:
            logger.info("p2p peer %s: %s", self.address, _reason(error))
        self._alias = error.peer
        self._failures = 0
        self._returning = False
        self._set(State.ALIAS, _reason(error))
        waiting = [asyncio.ensure_future(wait) for wait in (error.link.wait_ended(), self._hurry.wait())]
        try:
            await asyncio.wait(waiting, timeout=SELF_PAUSE_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waiting:
                wait.cancel()
        if error.link.ended:
            self._alias = None

    def _fail(self, error: Exception) -> float:
        """There is no session. Returns for how long not to ask for one."""
        self._failures += 1
        self._returning = False
        self._alias = None
        refused = isinstance(error, PeerRefusedError)
        known = isinstance(error, BackendError)
        why = _reason(error) if known else f"cannot be connected to ({type(error).__name__}: {error}); that is for this backend to fix"
        self._set(State.REFUSED if refused else State.DOWN, why)
        self.itself = isinstance(error, PeerRefusedError) and error.code == "self"
        if self.itself:
            return SELF_PAUSE_S
        self._say(logging.WARNING, why)
        return REFUSED_PAUSE_S if isinstance(error, PeerRefusedError) and error.lasting else self._pause_s()

    def _pause_s(self) -> float:
        longest_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self._failures, 10))
        return longest_s * random.uniform(0.5, 1.0)

    async def _rest(self, pause_s: float) -> None:
        try:
            await asyncio.wait_for(self._hurry.wait(), pause_s)
        except TimeoutError:
            return

    def _say(self, level: int, text: str) -> None:
        now_s = time.monotonic()
        if text == self._said[0] and now_s - self._said[1] < LOG_EVERY_S:
            return
        self._said = (text, now_s)
        if level == logging.WARNING and not self.path:
            # Of the ports of a host where nobody is, one stands for all.
            self._notices.say(logger.warning, (self.address.host, text), "p2p peer %s: %s", self.address, text)
        else:
            logger.log(level, "p2p peer %s: %s", self.address, text)


def _reason(error: Exception) -> str:
    """Without the words that say whose it is."""
    return str(error).partition(": ")[2] or str(error)
