"""What libzmq tells of the connection of a socket, on the node's event loop."""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Callable
from contextlib import suppress

import zmq

from kvstore_sdk_backends.p2p.unread import Unread

__all__ = ["FLOODED", "Monitor"]

FLOODED = 0
"""No event of libzmq's: more has come, and was not read, than may."""

_LOOK_S = 0.1

_EVENT = struct.Struct("=HI")


class Monitor:
    """The events of a socket that connects: few, and of one connection."""

    def __init__(self, socket: zmq.Socket, events: int, note: Callable[[int, int], object], most: Callable[[], int]) -> None:
        """Before `socket`, which is not one of asyncio's, is connected.

        Args:
            socket: Closed after this.
            events: Which of them.
            note: Called with each event and its value, and with `FLOODED`.
            most: Bytes that may have come and not been read.
        """
        self._loop = asyncio.get_running_loop()
        self._socket = socket
        self._note = note
        self._most = most
        self._unread: Unread | None = None
        self._timer: asyncio.TimerHandle | None = None
        endpoint = f"inproc://kvstore-p2p-monitor-{os.urandom(8).hex()}"
        socket.monitor(endpoint, events | zmq.EVENT_CONNECTED)
        self._events: zmq.Socket = socket.context.socket(zmq.PAIR, socket_class=zmq.Socket)
        self._events.linger = 0
        self._events.connect(endpoint)
        self._loop.add_reader(self._events.FD, self.take)
        # The descriptor tells of changes alone, and there may have been one before it was looked at.
        self._loop.call_soon(self.take)

    def read(self, size: int) -> None:
        """A message of so many bytes was read."""
        if self._unread is not None:
            self._unread.read(size)

    def close(self) -> None:
        """Note nothing more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        if not self._events.closed:
            self._loop.remove_reader(self._events.FD)
            with suppress(zmq.ZMQError):
                self._socket.disable_monitor()
            self._events.close(0)

    def take(self) -> None:
        """Note what libzmq has told."""
        while not self._events.closed:
            try:
                message = self._events.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            event, value = _EVENT.unpack(message[0])
            if event == zmq.EVENT_CONNECTED:
                self._unread = Unread(value)
                self._timer = self._loop.call_later(_LOOK_S, self._look, self._unread)
            else:
                self._note(event, value)

    def _look(self, unread: Unread) -> None:
        self._timer = self._loop.call_later(_LOOK_S, self._look, unread)
        if unread.look() > self._most():
            self._note(FLOODED, 0)
