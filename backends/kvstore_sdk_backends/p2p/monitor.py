"""What libzmq tells of the connection of a socket, on the node's event loop."""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Callable
from contextlib import suppress

import zmq

__all__ = ["Monitor"]

_EVENT = struct.Struct("=HI")


class Monitor:
    """The events of a socket that connects: few, and of one connection."""

    def __init__(self, socket: zmq.Socket, events: int, note: Callable[[int, int], object]) -> None:
        """Before `socket`, which is not one of asyncio's, is connected.

        Args:
            socket: Closed after this.
            events: Which of them.
            note: Called with each event and its value.
        """
        self._loop = asyncio.get_running_loop()
        self._socket = socket
        self._note = note
        endpoint = f"inproc://kvstore-p2p-monitor-{os.urandom(8).hex()}"
        socket.monitor(endpoint, events)
        self._events: zmq.Socket = socket.context.socket(zmq.PAIR, socket_class=zmq.Socket)
        self._events.linger = 0
        self._events.connect(endpoint)
        self._loop.add_reader(self._events.FD, self._take)
        # The descriptor tells of changes alone, and there may have been one before it was looked at.
        self._loop.call_soon(self._take)

    def close(self) -> None:
        """Note nothing more. Idempotent."""
        if not self._events.closed:
            self._loop.remove_reader(self._events.FD)
            with suppress(zmq.ZMQError):
                self._socket.disable_monitor()
            self._events.close(0)

    def _take(self) -> None:
        while not self._events.closed:
            try:
                event = self._events.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._note(*_EVENT.unpack(event[0]))
