"""What connections to a node's socket may cost it: how many there are, how long without a session, and what came over them unread."""

from __future__ import annotations

import asyncio
import logging
import os
import socket as sockets
import stat
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import zmq

from kvstore_sdk_backends.p2p.handshakes import FAILED_HANDSHAKES, why_refused
from kvstore_sdk_backends.p2p.notices import Notices
from kvstore_sdk_backends.p2p.unread import Unread

__all__ = ["SESSION_S", "Guard", "origin_of"]

logger = logging.getLogger(__name__)

SESSION_S = 5.0
"""What a connection has for its handshake and its Hello, and for the next Hello once a session ended. libzmq ends a handshake that takes
3 s, but not a peer that speaks ZMTP 1.0, as whatever begins with the wrong byte seems to, nor one that says nothing afterwards."""

_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | FAILED_HANDSHAKES
_EVENT = struct.Struct("=HI")
_SWEEP_S = 0.1
_STRANGER_BYTES = 64 << 10
"""What a connection without a session may send. A handshake and a Hello are some KiB; empty parts of a message cost 30 times what they
are on the wire."""
_MAX_UNREAD_BYTES = 16 << 20
"""Some peers ask as much in a second in which this node reads nothing; whom it ends, begins anew."""
_MOST_REASONS = 64
_TURN = 2048
"""Events that are read before the loop does something else."""


@dataclass(slots=True)
class _Connection:
    host: str
    since: float
    unread: Unread
    welcome: bool = False
    ended: bool = False


class Guard:
    """Ends connections that are too many, have no session after `SESSION_S`, or fill the memory; tells whom the handshake refused.

    Without it each connection costs the engine a descriptor, for as long as it likes, and as much memory: libzmq takes whatever comes, and
    keeps what is no whole message. All of it runs on the loop's thread.

    None is ended for what a frame of it says: that may be read when its connection is over, and its descriptor another's.

    Attributes:
        lost: Called with the descriptor of each connection that is over.
    """

    def __init__(
        self, socket: zmq.Socket, *, most: int, secured: bool, label: str = "p2p", max_unread_bytes: int = _MAX_UNREAD_BYTES
    ) -> None:
        """On the loop's thread, before `socket`, which is not one of asyncio's, is bound.

        Args:
            most: Connections at one time.
            secured: The node has a key.
            label: In the log.
            max_unread_bytes: Of all connections together. When more came than was read, the one with most of it is ended.
        """
        self.lost: Callable[[int], object] | None = None
        self._loop = asyncio.get_running_loop()
        self._port = 0
        self._most = most
        self._secured = secured
        self._label = label
        self._max_unread_bytes = max_unread_bytes
        self._notices = Notices()
        self._open: dict[int, _Connection] = {}  # the oldest first
        self._failure: tuple[int, int] | None = None
        # Why a connection was refused whose host is not known, and since when no other one was for the same.
        self._nameless: dict[str, float] = {}
        self._named = Notices()
        self._socket = socket
        events = f"inproc://kvstore-p2p-guard-{os.urandom(8).hex()}"
        socket.monitor(events, _EVENTS)
        self._monitor: zmq.Socket = socket.context.socket(zmq.PAIR, socket_class=zmq.Socket)
        self._monitor.linger = 0
        self._monitor.connect(events)

    @property
    def connections(self) -> int:
        """How many there are now."""
        return len(self._open)

    def start(self, port: int, label: str = "") -> None:
        """Begin to watch. `port`: which the socket was bound to. `label`: in the log, where it has the port in it."""
        self._port = port
        self._label = label or self._label
        self._loop.add_reader(self._monitor.FD, self.look)

    async def run(self) -> None:
        """End those that have had no session for too long or have sent too much, until it is cancelled."""
        while True:
            self.look()
            self._sweep()
            await asyncio.sleep(_SWEEP_S)

    def close(self) -> None:
        """After `run` has ended, before the socket is closed. Idempotent."""
        if not self._monitor.closed:
            self._loop.remove_reader(self._monitor.FD)
            with suppress(zmq.ZMQError):
                self._socket.disable_monitor()
            self._monitor.close(0)

    def look(self) -> None:
        """Take the events that have come. What is known of a connection is then as new as what is read from the socket afterwards."""
        for _ in range(_TURN):
            if self._monitor.closed:
                return
            try:
                message = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._note(*_EVENT.unpack(message[0]))
        # The descriptor tells of changes alone: what is left has to be asked for.
        self._loop.call_soon(self.look)

    def knows(self, frame: zmq.Frame) -> bool:
        """Whether the connection that `frame` came over is still there, after a `look`."""
        return origin_of(frame)[1] in self._open

    def welcome(self, frame: zmq.Frame) -> None:
        """The connection that `frame` came over has a session, and stays."""
        if (connection := self._open.get(origin_of(frame)[1])) is not None:
            connection.welcome = True
            connection.unread.forget()

    def read(self, descriptor: int, size: int) -> None:
        """A message of `size` bytes was read, of the session over that connection."""
        if (connection := self._open.get(descriptor)) is not None:
            connection.unread.read(size)

    def part(self, descriptor: int) -> None:
        """Its session ended; there may be another one soon."""
        if (connection := self._open.get(descriptor)) is not None:
            connection.welcome = False
            connection.since = time.monotonic()
            connection.unread.forget()

    def _note(self, event: int, value: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._accepted(value)
        elif event == zmq.EVENT_DISCONNECTED:
            connection = self._open.pop(value, None)
            # The event before it, of the same thread of libzmq, is of the same connection.
            if self._failure is not None and connection is not None and not connection.ended:
                self._say(connection.host, why_refused(*self._failure, secured=self._secured))
            self._failure = None
            if self.lost is not None:
                self.lost(value)
        elif event & FAILED_HANDSHAKES:
            self._failure = event, value

    def _sweep(self) -> None:
        late = time.monotonic() - SESSION_S
        for descriptor, connection in self._open.items():
            connection.unread.look()
            if connection.welcome or connection.ended:
                continue
            if connection.since < late:
                self._end(descriptor, connection)
                self._say(connection.host, f"it was connected for {SESSION_S:g} s without a session")
            elif connection.unread.bytes > _STRANGER_BYTES:
                self._end(descriptor, connection)
                self._say(connection.host, f"it sent more than {_STRANGER_BYTES} bytes without a session")
        for why in [why for why, since in self._nameless.items() if since < late]:
            del self._nameless[why]
            if self._named.due(why) is not None:
                logger.warning("%s: refused a connection: %s", self._label, why)
        left = {descriptor: connection for descriptor, connection in self._open.items() if not connection.ended}
        while sum(connection.unread.bytes for connection in left.values()) > self._max_unread_bytes:
            descriptor = max(left, key=lambda descriptor: left[descriptor].unread.bytes)
            connection = left.pop(descriptor)
            self._end(descriptor, connection)
            self._say(connection.host, f"{connection.unread.bytes} bytes came from it that are no whole message, or more than can be read")

    def _accepted(self, descriptor: int) -> None:
        self._open.pop(descriptor, None)
        self._open[descriptor] = _Connection(_host_of(descriptor, self._port), time.monotonic(), Unread(descriptor))
        if len(self._open) <= self._most:
            return
        # Sessions, which are fewer than connections may be, are not for whoever opens many.
        for oldest, connection in self._open.items():
            if not connection.welcome and not connection.ended:
                self._end(oldest, connection)
                self._say(connection.host, f"{self._most} connections are open, and it has no session")
                return

    def _end(self, descriptor: int, connection: _Connection) -> None:
        connection.ended = True
        if (copy := _own(descriptor, self._port)) is not None:
            with copy, suppress(OSError):
                copy.shutdown(sockets.SHUT_RDWR)

    def _say(self, host: str, why: str) -> None:
        if not why:
            return
        if host:
            self._nameless.pop(why, None)
            self._named.due(why)
            self._notices.say(logger.warning, (host, why), "%s: refused %s: %s", self._label, host, why)
        elif len(self._nameless) < _MOST_REASONS:
            # It was gone before it was looked at. Most come again, and are known then.
            self._nameless.setdefault(why, time.monotonic())


def origin_of(frame: zmq.Frame) -> tuple[str, int]:
    """Host and descriptor of the connection that a frame came over, which was received without being copied, as libzmq tells them; empty
    and -1 where it tells nothing, as of a peer that speaks ZMTP 1.0."""
    try:
        return str(frame.get("Peer-Address")), int(frame.get("__fd"))
    except (zmq.ZMQError, TypeError, ValueError):
        return "", -1


def _host_of(descriptor: int, port: int) -> str:
    if (copy := _own(descriptor, port)) is None:
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
        # Of a file even closing a copy would be felt: it drops the locks that the process has on it.
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
