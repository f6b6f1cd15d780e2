"""How many connections a node's control socket holds, and for how long without a session."""

from __future__ import annotations

import asyncio
import logging
import os
import socket as sockets
import stat
import struct
import time
from contextlib import suppress
from dataclasses import dataclass

import zmq
import zmq.asyncio

from kvstore_sdk_backends.p2p.handshakes import FAILED_HANDSHAKES, why_refused
from kvstore_sdk_backends.p2p.notices import Notices

__all__ = ["SESSION_S", "Guard"]

logger = logging.getLogger(__name__)

SESSION_S = 5.0
"""What a connection has for its handshake and its Hello. libzmq ends a handshake that takes 3 s, but not a peer that speaks ZMTP 1.0, as
whatever begins with the wrong byte seems to, nor one that says nothing afterwards."""

_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | FAILED_HANDSHAKES
_EVENT = struct.Struct("=HI")
_SWEEP_S = 0.5
_BATCH = 64


@dataclass(slots=True)
class _Connection:
    host: str
    since: float
    known: bool = False
    ended: bool = False


class Guard:
    """Ends connections that are too many, or have no session after `SESSION_S`; says in the log whom the handshake refused, and why.

    Without it each connection costs the engine a descriptor, for as long as it likes. All of it runs on the loop's thread.
    """

    def __init__(self, socket: zmq.asyncio.Socket, *, most: int, secured: bool, label: str) -> None:
        """Before `socket` is bound. `most`: connections at one time. `label`: of the node, in the log."""
        self._most = most
        self._secured = secured
        self._label = label
        self._notices = Notices()
        self._open: dict[int, _Connection] = {}  # by descriptor, the oldest first
        self._failure: tuple[int, int] | None = None
        self._socket = socket
        self._monitor = socket.get_monitor_socket(_EVENTS)
        self._port = 0

    @property
    def connections(self) -> int:
        """How many there are now."""
        return len(self._open)

    async def run(self, port: int) -> None:
        """Watch until it is cancelled. `port`: which the socket was bound to."""
        self._port = port
        # Read without waiting until nothing is left: a flood is thousands of events a second.
        events = zmq.Socket.shadow(self._monitor)
        while True:
            if await self._monitor.poll(round(_SWEEP_S * 1000)):
                for _ in range(_BATCH):
                    try:
                        message = events.recv_multipart(zmq.NOBLOCK)
                    except zmq.Again:
                        break
                    self._note(*_EVENT.unpack(message[0]))
            self._sweep()
            await asyncio.sleep(0)

    def close(self) -> None:
        """After `run` has ended, before the socket is closed."""
        self._socket.disable_monitor()

    def welcome(self, frame: zmq.Frame) -> None:
        """The connection that `frame` came over has a session, and stays."""
        if (connection := self._open.get(_descriptor_of(frame))) is not None:
            connection.known = True

    def end(self, frame: zmq.Frame) -> None:
        """End the connection that `frame` came over: it does not speak the protocol."""
        if (connection := self._open.get(descriptor := _descriptor_of(frame))) is not None:
            self._end(descriptor, connection)

    def _note(self, event: int, value: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._accepted(value)
        elif event == zmq.EVENT_DISCONNECTED:
            connection = self._open.pop(value, None)
            # The event before it, of the same thread, is of the same connection.
            if self._failure is not None and connection is not None and not connection.ended:
                self._say(connection.host, why_refused(*self._failure, secured=self._secured))
            self._failure = None
        else:
            self._failure = event, value

    def _accepted(self, descriptor: int) -> None:
        self._open.pop(descriptor, None)
        self._open[descriptor] = _Connection(_host_of(descriptor, self._port), time.monotonic())
        if len(self._open) <= self._most:
            return
        # Who has none yet goes first: sessions, which are fewer than connections, are not for whoever opens many.
        for oldest, other in self._open.items():
            if not other.known and not other.ended:
                self._end(oldest, other)
                self._say(other.host, f"{self._most} connections are open, and it has no session")
                return

    def _sweep(self) -> None:
        late = time.monotonic() - SESSION_S
        for descriptor, connection in self._open.items():
            if connection.since > late:
                return
            if not connection.known and not connection.ended:
                self._end(descriptor, connection)
                self._say(connection.host, f"it connected, and was no node within {SESSION_S:g} s")

    def _end(self, descriptor: int, connection: _Connection) -> None:
        connection.ended = True
        if (copy := _own(descriptor, self._port)) is not None:
            with copy, suppress(OSError):
                copy.shutdown(sockets.SHUT_RDWR)

    def _say(self, host: str, why: str) -> None:
        if why and (unsaid := self._notices.due((host, why))) is not None:
            logger.warning("%s: refused %s: %s%s", self._label, host or "a connection", why, Notices.more(unsaid))


def _descriptor_of(frame: zmq.Frame) -> int:
    try:
        return int(frame.get("__fd"))
    except (zmq.ZMQError, TypeError, ValueError):
        return -1


def _host_of(descriptor: int, port: int) -> str:
    copy = _own(descriptor, port)
    if copy is None:
        return ""
    with copy:
        try:
            return str(copy.getpeername()[0])
        except OSError:
            return ""


def _own(descriptor: int, port: int) -> sockets.socket | None:
    """A copy of a descriptor that libzmq told of; None where it is no connection to `port` any more.

    libzmq may have closed it since, and it may be anything of the engine's by now: whoever holds a copy that is a connection to this port
    can end at worst another of those.
    """
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return None
        number = os.dup(descriptor)
    except OSError:
        return None
    try:
        copy = sockets.socket(fileno=number)
    except OSError:
        os.close(number)
        return None
    try:
        if copy.family in (sockets.AF_INET, sockets.AF_INET6) and copy.getsockname()[1] == port:
            return copy
    except OSError:
        pass
    copy.close()
    return None
