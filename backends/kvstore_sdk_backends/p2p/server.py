"""The owner's half of a node: answers peers, on the node's event loop, whatever they send."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

import zmq

from kvstore_sdk.backend import BackendError, Deadline, RecordSource
from kvstore_sdk_backends.p2p.control_line import ControlLine
from kvstore_sdk_backends.p2p.data_path import Sender
from kvstore_sdk_backends.p2p.decoding import decode
from kvstore_sdk_backends.p2p.fetches import Fetches
from kvstore_sdk_backends.p2p.fitness import path_for, why_unfit, wrong_version
from kvstore_sdk_backends.p2p.guard import Guard, origin_of
from kvstore_sdk_backends.p2p.leases import Leases
from kvstore_sdk_backends.p2p.limits import Limits
from kvstore_sdk_backends.p2p.messages import (
    BUSY,
    FAILED,
    MAX_ITEMS,
    MAX_NAMES,
    VERSION,
    Cancel,
    Fetch,
    ForeignHello,
    Found,
    Goodbye,
    Hello,
    Lookup,
    MessageError,
    Ready,
    Refused,
    Release,
    Result,
    Sent,
    Target,
    Welcome,
    encode,
)
from kvstore_sdk_backends.p2p.notices import Notices
from kvstore_sdk_backends.p2p.plane import Plane
from kvstore_sdk_backends.p2p.sessions import Session, Sessions
from kvstore_sdk_backends.p2p.steps import Steps
from kvstore_sdk_backends.p2p.targets import Targets
from kvstore_sdk_backends.p2p.waits import Waits
from kvstore_sdk_backends.p2p.workers import Workers

__all__ = ["Server"]

logger = logging.getLogger(__name__)

_TARGETS = 2
"""Targets of one session that are being read or wait to be."""
_FAREWELL_MS = 100
"""For what was sent last to go out."""


class Server:
    """Sessions of peers on one control socket. All of it runs on the loop; nothing that a peer sends or leaves undone stops it."""

    def __init__(
        self,
        socket: zmq.Socket,
        *,
        node: bytes,
        is_own: Callable[[bytes], bool],
        sources: Sequence[RecordSource],
        plane: Plane | None,
        make_sender: Callable[[bytes], Sender],
        limits: Limits,
        label: str = "p2p",
        guard: Guard,
        paths: Sequence[str] = (),
    ) -> None:
        """On the loop's thread.

        Args:
            socket: A ROUTER that is bound, not one of asyncio's. The server closes it.
            node: Of this node, as it is asked.
            is_own: Whether that is what this node calls itself where it asks.
            sources: Asked in order; one that is appended later is served from then on.
            plane: Where NIXL is.
            make_sender: Listens for the data connection of a session with that node.
            guard: Of `socket`; it says which connections are gone.
            paths: Ways that data may take; without any, all there are.
        """
        self._node = node
        self._is_own = is_own
        self._sources = sources
        self._paths = tuple(paths) or (("nixl", "zmq") if plane is not None else ("zmq",))
        self._make_sender = make_sender
        self._limits = limits
        self._label = label
        self._guard = guard
        self._sessions = Sessions(limits)
        self._leases = Leases(sources, limits)
        self._waits = Waits(self._leases.sizes, limits)
        # Two a session for transfers, and some for targets.
        self._workers = Workers("kvstore-p2p-serving", limits.session_calls * limits.max_sessions + 8)
        self._targets = Targets(plane, self._workers, limits, label) if plane is not None else None
        self._fetches = Fetches(self._leases, plane, self._workers, limits, self._end)
        self._notices = Notices()
        self._steps = Steps(label)
        self._closed = False
        self._taking = False
        self._counts = dict.fromkeys(("sessions", "lookups", "fetches", "refused", "bad_frames"), 0)
        guard.lost = self._lost
        # A peer that is gone, or does not read, is an error at once, and not a message that is lost.
        socket.router_mandatory = 1
        self._line = ControlLine(socket, self._read, self._failed)

    async def run(self) -> None:
        """Answer look-ups that wait, and end leases, until it is cancelled."""
        await asyncio.gather(self._waits.run(self._safely), self._expire())

    async def close(self) -> None:
        """End all sessions and give all loans back, within `close_s`. Idempotent.

        Whoever closes the data plane does it before: what it may still read is given back here in any case.
        """
        if self._closed:
            return
        self._closed = True
        until = Deadline.after(self._limits.close_s)
        try:
            self.end_sessions("closing", "this node closes")
            self._line.close(_FAREWELL_MS)
            # Transfers over ZMQ are over now, in milliseconds.
            await self._steps.finish(Deadline.after(self._limits.close_s / 2))
            if self._leases.taken and self._targets is not None:
                await self._targets.fence(until)
                await self._steps.finish(until)
        finally:
            # Also when this is cancelled: whoever closes the node takes the memory away next.
            self._leases.close()
            self._workers.close()

    def end_sessions(self, code: str, reason: str) -> None:
        """End all of them, with what they leased. Their peers are told, by a Goodbye of this code, and may begin others."""
        for session in self._sessions:
            self._end(session, reason, code)

    def counters(self) -> dict[str, int]:
        """What was done since the start, and what is held now. From any thread."""
        return self._counts | {
            "fences": self._targets.fences if self._targets is not None else 0,
            "records_sent": self._fetches.records_sent,
            "bytes_sent": self._fetches.bytes_sent,
            "sessions_now": len(self._sessions),
            "waits_now": len(self._waits),
            "leases_now": self._leases.leased,
            "leased_bytes_now": self._leases.leased_bytes,
            "sending_now": self._leases.taken,
        }

    # What comes in.

    def _lost(self, descriptor: int) -> None:
        if (session := self._sessions.of_fd(descriptor)) is not None:
            self._end(session, "its connection is gone")

    def _failed(self, cause: zmq.ZMQError) -> None:
        logger.error("%s: the control socket failed: %s", self._label, cause)

    def _read(self, frames: list[zmq.Frame]) -> None:
        identity = frames[0].bytes
        session = self._sessions.of(identity)
        if session is not None:
            self._guard.read(session.fd, sum(map(len, frames[1:])))
        try:
            if len(frames) != 2:
                raise MessageError(f"p2p: a message is one frame, these are {len(frames) - 1}")
            message = decode(frames[1].buffer)
        except MessageError as error:
            self._counts["bad_frames"] += 1
            self._bad(identity, session, error)
            return
        if isinstance(message, Hello):
            self._hello(identity, frames[1], message)
        elif isinstance(message, ForeignHello):
            self._turn_away(identity, message.number, origin_of(frames[1])[0], *wrong_version(message.versions))
        elif session is None:
            if not isinstance(message, Release | Goodbye | Cancel):
                self._refuse(identity, getattr(message, "number", 0), "unknown", "there is no session; it begins with a Hello")
        else:
            session.heard_s = time.monotonic()
            try:
                self._of_session(session, message)
            except Exception:  # noqa: BLE001  # logged
                self._mishap("a message could not be answered")
                if number := getattr(message, "number", 0):
                    self._refuse(identity, number, "busy", "this node failed to answer; its log says why")

    def _of_session(self, session: Session, message: object) -> None:
        match message:
            case Lookup():
                self._lookup(session, message)
            case Fetch():
                self._fetch(session, message)
            case Release():
                self._leases.release(session.id, message.names)
            case Target():
                self._target(session, message)
            case Cancel():
                self._waits.cut_short(session.id, message.number)
            case Goodbye():
                self._end(session, "")
            case _:
                error = MessageError(f"p2p: {type(message).__name__} is no message of an asker")
                self._bad(session.identity, session, error, getattr(message, "number", 0))

    def _bad(self, identity: bytes, session: Session | None, error: MessageError, number: int = 0) -> None:
        if session is None:
            # Whoever it is has not said Hello, and is not worth an answer. The guard ends connections that stay without a session: not this
            # one at once, whose descriptor may be another's by now.
            self._notices.say(logger.warning, "no session", "%s: dropped what is no message: %s", self._label, error)
            return
        session.bad_frames += 1
        self._refuse(identity, number, "invalid", str(error))
        if session.bad_frames >= self._limits.bad_frames:
            self._end(session, f"it sent {session.bad_frames} frames that are no message", "invalid")

    # Sessions.

    def _hello(self, identity: bytes, frame: zmq.Frame, hello: Hello) -> None:
        host, fd = origin_of(frame)
        # A Hello may be read when its connection is gone, and its descriptor is that of another one. Such a one must not begin a session,
        # which nothing would end, and not end those of others.
        self._guard.look()
        if not self._guard.knows(frame):
            return
        if (refusal := why_unfit(hello, self._is_own, self._sources, offered := self._offered(), self._paths)) is not None:
            self._turn_away(identity, hello.number, host, *refusal)
            return
        replaced = self._sessions.replaced_by(identity, fd)
        if self._sessions.full and not replaced and not self._make_room(host, hello.node):
            self._turn_away(identity, hello.number, host, "full", f"this node serves {self._limits.max_sessions} peers already")
            return
        path = path_for(hello, offered)
        try:
            sender = self._make_sender(hello.node) if path == "zmq" else None
        except BackendError as error:
            self._turn_away(identity, hello.number, host, "full", str(error))
            return
        port = sender.port if sender is not None else 0
        self._line.catch_up()
        if self._put(identity, Welcome(hello.number, VERSION, self._node, path, port, MAX_NAMES, MAX_ITEMS)) is not None:
            if sender is not None:
                sender.close()
            return
        for old in replaced:
            self._end(old, "")
        session = Session(identity, fd, host, hello.node, path, sender, self._limits)
        session.began_s = session.heard_s = time.monotonic()
        self._sessions.add(session)
        self._counts["sessions"] += 1
        self._guard.welcome(frame)

    def _turn_away(self, identity: bytes, number: int, host: str, code: str, text: str) -> None:
        """Refuse a Hello, and say so to whoever may have to set up something otherwise."""
        if code != "self":
            self._notices.say(logger.warning, (host, code), "%s: refused %s: %s", self._label, host or "a connection", text)
        self._refuse(identity, number, code, text)

    def _offered(self) -> tuple[str, ...]:
        """The ways that data may take now."""
        return tuple(path for path in self._paths if path != "nixl" or self._targets is None or self._targets.up)

    def _make_room(self, host: str, node: bytes) -> bool:
        busy = {session.id for session in self._sessions if self._leases.leases_of(session.id) or self._waits.waits_of(session.id)}
        if (given_up := self._sessions.to_give_up(host, node, time.monotonic(), busy)) is not None:
            self._end(*given_up)
        return not self._sessions.full

    def _end(self, session: Session, reason: str, code: str = "failed") -> None:
        """End a session: its leases and waits at once, its transfers as soon as they are over. Its peer is told any reason, with a code."""
        if session.ended:
            return
        session.ended = True
        self._sessions.remove(session)
        self._waits.end(session.id)
        self._leases.end(session.id)
        self._guard.part(session.fd)
        if reason:
            self._notices.say(logger.info, (session.host, reason), "%s: session with %s ended: %s", self._label, session.host, reason)
            # Before the data connection ends, which would be the reason otherwise.
            self._put(session.identity, Goodbye(code, reason))
        if session.sender is not None:
            session.sender.close()
        if session.path == "nixl" and self._targets is not None and not self._closed:
            self._steps.start(self._targets.drop(session))

    # Questions.

    def _lookup(self, session: Session, lookup: Lookup) -> None:
        self._counts["lookups"] += 1
        # Where nothing is served nothing will come.
        if lookup.wait_ms and self._sources and not all(self._leases.sizes(lookup.names)):
            until_s = time.monotonic() + min(lookup.wait_ms / 1000, self._limits.max_wait_s)
            if self._waits.add(session.id, lookup.number, lookup.names, until_s, partial(self._answer, session, lookup)):
                return
        self._answer(session, lookup)

    def _answer(self, session: Session, lookup: Lookup) -> None:
        if not session.ended:
            self._send(session, Found(lookup.number, tuple(self._leases.lease(session.id, lookup.names, time.monotonic()))))

    def _fetch(self, session: Session, fetch: Fetch) -> None:
        self._counts["fetches"] += 1
        limits = self._limits
        if session.fetching >= limits.session_fetches or session.items + len(fetch.items) > limits.session_items:
            self._send(session, Result(fetch.number, ((BUSY, 0),) * len(fetch.items)))
            return
        session.fetching += 1
        session.items += len(fetch.items)
        self._steps.start(self._move(session, fetch))

    async def _move(self, session: Session, fetch: Fetch) -> None:
        try:
            result = await self._fetches.run(session, fetch)
        except Exception:  # noqa: BLE001  # logged
            self._mishap("a transfer failed")
            if session.path == "nixl":
                # It may still land, and nobody here knows when it does not any more.
                self._end(session, "a transfer to it failed")
            result = Result(fetch.number, ((FAILED, 0),) * len(fetch.items))
        finally:
            session.fetching -= 1
            session.items -= len(fetch.items)
        if not session.ended:
            self._send(session, result)

    def _target(self, session: Session, target: Target) -> None:
        if session.path != "nixl" or self._targets is None:
            self._refuse(session.identity, target.number, "path", "this session does not move data over nixl")
        elif session.targets_pending >= _TARGETS:
            self._refuse(session.identity, target.number, "busy", "earlier targets are still being read")
        else:
            session.targets_pending += 1
            before = self._sessions.with_target_beside(session)
            for old in before:
                self._end(old, "its node has a target in another session", "target")
            self._steps.start(self._admit(session, self._targets, target, before))

    async def _admit(self, session: Session, targets: Targets, target: Target, before: Sequence[Session]) -> None:
        try:
            refusal = await targets.admit(session, target, before)
        except Exception:  # noqa: BLE001  # logged
            self._mishap("a target could not be read")
            refusal = "busy", "this node failed to read it; its log says why"
        if session.ended:
            return
        if refusal is None:
            self._send(session, Ready(target.number))
        else:
            self._refuse(session.identity, target.number, *refusal)

    # What goes out.

    def _send(self, session: Session, message: Sent) -> None:
        if (problem := self._put(session.identity, message)) is not None:
            self._end(session, problem)

    def _refuse(self, identity: bytes, number: int, code: str, text: str) -> None:
        self._counts["refused"] += 1
        self._put(identity, Refused(number, code, text))

    def _put(self, identity: bytes, message: Sent) -> str | None:
        """Send, or say why it cannot be sent."""
        try:
            self._line.send(identity, encode(message))
        except zmq.Again:
            return "it does not read what it is sent"
        except zmq.ZMQError as cause:
            return f"it cannot be reached: {cause.strerror}"
        return None

    # What goes on by itself.

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._limits.lease_s / 10))
            self._safely(self._leases.expire)
            for session in [one for one in self._sessions if one.path not in self._offered()]:
                self._end(session, "the data plane of this node is being restarted", "path")

    def _safely(self, step: Callable[[float], None]) -> None:
        try:
            step(time.monotonic())
        except Exception:  # noqa: BLE001  # logged
            # Of a source, which raises nothing by its contract; the next look may do better.
            self._mishap("records could not be looked at")

    def _mishap(self, what: str) -> None:
        """Log an exception that is a fault of this node's, or of a source's. Whoever asked is answered, and waits for no deadline."""
        self._notices.say(logger.exception, what, "%s: %s", self._label, what)
