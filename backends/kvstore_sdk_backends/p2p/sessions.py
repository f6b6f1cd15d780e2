"""The peers that a node serves now."""

from __future__ import annotations

import asyncio
import os
from collections import Counter, deque
from collections.abc import Iterator, Sequence

from kvstore_sdk.backend import Deadline
from kvstore_sdk_backends.p2p.data_path import Sender
from kvstore_sdk_backends.p2p.limits import Limits
from kvstore_sdk_backends.p2p.messages import Target

__all__ = ["Room", "Session", "Sessions"]


class Room:
    """So many bytes at a time. First come, first served; what is larger than all of it goes alone."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.used_bytes = 0

    async def enter(self, size_bytes: int, deadline: Deadline) -> bool:
        """Wait for room until the deadline. Whoever got it calls `leave`."""
        if not self._queue and self._fits(size_bytes):
            self.used_bytes += size_bytes
            return True
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = (size_bytes, turn)
        self._queue.append(place)
        try:
            await asyncio.wait({turn}, timeout=deadline.remaining_s())
        except asyncio.CancelledError:
            if turn.done():
                self.leave(size_bytes)
            raise
        finally:
            if not turn.done():
                self._queue.remove(place)
                self._let_in()
        return turn.done()

    def leave(self, size_bytes: int) -> None:
        """Give back what `enter` got."""
        self.used_bytes -= size_bytes
        self._let_in()

    def _fits(self, size_bytes: int) -> bool:
        return not self.used_bytes or self.used_bytes + size_bytes <= self._most_bytes

    def _let_in(self) -> None:
        while self._queue and self._fits(self._queue[0][0]):
            size_bytes, turn = self._queue.popleft()
            self.used_bytes += size_bytes
            turn.set_result(None)


class Session:
    """One peer from its Hello to its end, and what of this node it occupies. `id` is new with each session, and never sent."""

    def __init__(self, identity: bytes, fd: int, host: str, node: bytes, path: str, sender: Sender | None, limits: Limits) -> None:
        """`identity`, `fd`: of the connection, for the control socket and its monitor. `sender`: where the path has one."""
        self.id = os.urandom(16)
        self.identity = identity
        self.fd = fd
        self.host = host
        self.node = node
        self.path = path
        self.sender = sender
        # What peer and data plane agreed on; None while they have not.
        self.target: Target | None = None
        self.targets_pending = 0
        self.targets = asyncio.Lock()
        self.room = Room(limits.session_bytes)
        self.calls = asyncio.Semaphore(limits.session_calls)
        # Fetches that are not over, and their items.
        self.fetching = 0
        self.items = 0
        self.bad_frames = 0
        self.began_s = self.heard_s = 0.0
        self.ended = False

    def __repr__(self) -> str:
        return f"Session({self.host}, node {self.node.hex()[:8]}, {self.path})"


class Sessions:
    """Sessions by connection, which has one at most. A node has one for each of its connections."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._by_identity: dict[bytes, Session] = {}
        self._by_fd: dict[int, Session] = {}
        self._turned_s = -float("inf")

    def __len__(self) -> int:
        return len(self._by_identity)

    def __iter__(self) -> Iterator[Session]:
        """Those there are now; they may be removed meanwhile."""
        return iter(list(self._by_identity.values()))

    def of(self, identity: bytes) -> Session | None:
        """The session of a connection."""
        return self._by_identity.get(identity)

    def of_fd(self, fd: int) -> Session | None:
        """The session whose connection has this descriptor."""
        return self._by_fd.get(fd)

    def replaced_by(self, identity: bytes, fd: int) -> list[Session]:
        """The sessions that a new one with these ends: an earlier one of the connection, and one whose descriptor it got.

        Not one that its node has on another connection: while that stands the node can be reached in two ways, and uses the one it likes.
        """
        found = (self._by_identity.get(identity), self._by_fd.get(fd))
        return list({session.id: session for session in found if session is not None}.values())

    def with_target_beside(self, session: Session) -> list[Session]:
        """Others of its node that have sent a Target: what has one agent is written to in one session."""
        return [one for one in self if one is not session and one.node == session.node and (one.target or one.targets_pending)]

    def add(self, session: Session) -> None:
        """Those that it replaces are removed before."""
        self._by_identity[session.identity] = session
        self._by_fd[session.fd] = session

    def remove(self, session: Session) -> None:
        """Forget a session."""
        del self._by_identity[session.identity]
        del self._by_fd[session.fd]

    @property
    def full(self) -> bool:
        return len(self) >= self._limits.max_sessions

    def to_give_up(self, host: str, node: bytes, now_s: float, busy: set[bytes]) -> tuple[Session, str, str] | None:
        """The session that makes room for a new one of this node, why that one, and the code of that; None where all may stay.

        Args:
            host: Of the new one.
            node: Of the new one, as it calls itself.
            now_s: The time.
            busy: Ids of sessions that hold something.
        """
        if (one := self.idlest(now_s, busy)) is not None:
            return one, "it was idle, and another peer needs its place", "idle"
        if (one := self.of_the_greediest(host, node, now_s, busy)) is not None:
            return one, "its host has the most sessions, and another peer needs a place", "full"
        return None

    def idlest(self, now_s: float, busy: set[bytes]) -> Session | None:
        """The one that may make room for a new one: silent for `idle_s` at least; of the host that has most sessions, the most silent.

        `busy`: ids of sessions that hold something.
        """
        hosts = Counter(session.host for session in self)
        idle = [
            session
            for session in self
            if not session.fetching and session.id not in busy and now_s - session.heard_s >= self._limits.idle_s
        ]
        return min(idle, key=lambda session: (-hosts[session.host], session.heard_s), default=None)

    def of_the_greediest(self, host: str, node: bytes, now_s: float, busy: set[bytes]) -> Session | None:
        """The one that gives way to a new one of `node` where none is idle: of the host that has most sessions, and still has more than the
        other one without it; the most silent of those that hold least.

        Where that is the host of the new one, and has more than half of all there may be: of its node that has most, likewise. Where no
        node has more than another one without any, they take turns, one every `idle_s`: any process of a host may call itself a new node.
        """
        hosts = Counter(session.host for session in self)
        greediest, most = max(hosts.items(), key=lambda one: one[1], default=("", 0))
        if most > hosts[host] + 1:
            return _least([session for session in self if session.host == greediest], busy)
        if 2 * hosts[host] <= self._limits.max_sessions:
            return None
        own = [session for session in self if session.host == host]
        nodes = Counter(session.node for session in own)
        busiest, most = nodes.most_common(1)[0]
        if most > nodes[node] + 1:
            return _least([session for session in own if session.node == busiest], busy)
        if nodes[node] or now_s - self._turned_s < self._limits.idle_s:
            return None
        one = _least([session for session in own if now_s - session.began_s >= self._limits.idle_s], busy)
        if one is not None:
            self._turned_s = now_s
        return one


def _least(sessions: Sequence[Session], busy: set[bytes]) -> Session | None:
    return min(sessions, key=lambda session: (bool(session.fetching), session.id in busy, session.heard_s), default=None)
