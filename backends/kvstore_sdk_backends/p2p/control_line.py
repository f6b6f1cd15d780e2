"""A control socket of a node, read and written without ever waiting for a peer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import zmq

from kvstore_sdk_backends.p2p.notices import Notices

__all__ = ["ControlLine"]

logger = logging.getLogger(__name__)

_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_TURN = 8
"""Messages taken before the loop does something else."""


class ControlLine:
    """A ROUTER or a DEALER on the node's event loop. It takes one message of each peer in turn, as libzmq has it."""

    def __init__(self, socket: zmq.Socket, read: Callable[[list[zmq.Frame]], object], failed: Callable[[zmq.ZMQError], object]) -> None:
        """
        Args:
            socket: Bound or connected, and not one of asyncio's: their sends would wait behind that of a peer that does not read, and each
                message would cost some turns of the loop. It is closed with this.
            read: Called on the loop with each message, from a ROUTER with the identity first.
            failed: Called with the error when the socket cannot be read any more.
        """
        self._loop = asyncio.get_running_loop()
        self._socket = socket
        self._read = read
        self._failed = failed
        self._notices = Notices()
        self._soon = False
        self._closed = False
        self._descriptor = socket.FD
        self._loop.add_reader(self._descriptor, self._take)
        # The descriptor tells of changes alone, and there may have been one before it was looked at.
        self._take_soon()

    def send(self, *frames: bytes) -> None:
        """Send a message; to a ROUTER with the identity first.

        Raises:
            zmq.Again: the peer does not read what it is sent.
            zmq.ZMQError: it cannot be reached, or this is closed.
        """
        try:
            for frame in frames[:-1]:
                self._socket.send(frame, _MORE)
            self._socket.send(frames[-1], zmq.NOBLOCK)
        finally:
            # Sending may use up the signal that something has come.
            self.catch_up()

    def take(self) -> None:
        """Read what has come, without waiting for the loop to tell of it."""
        self._take()

    def catch_up(self) -> None:
        """Take note of what has come and of connections that are gone: sending to one of them is an error from now on, and not a message
        that is lost."""
        if not self._closed and self._socket.get(zmq.EVENTS) & zmq.POLLIN:
            self._take_soon()

    def close(self, linger_ms: int = 0) -> None:
        """Take and send nothing more; what was sent before may still go out for `linger_ms`. Idempotent."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._descriptor)
            self._socket.close(linger_ms)

    def _take_soon(self) -> None:
        if not self._soon and not self._closed:
            self._soon = True
            self._loop.call_soon(self._take_after_sending)

    def _take_after_sending(self) -> None:
        self._soon = False
        self._take()

    def _take(self) -> None:
        for _ in range(_TURN):
            if self._closed:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            except zmq.ZMQError as cause:
                self._failed(cause)
                return
            try:
                self._read(frames)
            except Exception as cause:  # noqa: BLE001  # logged
                # A fault of this node's in one answer must cost the others nothing.
                self._notices.say(logger.exception, type(cause).__name__, "p2p: a message could not be answered")
        self._take_soon()
