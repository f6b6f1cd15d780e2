"""The line to the parent, from the child's side."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

from kvstore_sdk.isolation.wire import Frames, encode

__all__ = ["Line"]

logger = logging.getLogger("kvstore_sdk.isolation")

_RECEIVE_BYTES = 256 << 10
_MAX_FDS = 16


class Line:
    """One stream socket. One thread receives, any sends. The end of the line is the end of this process."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        # It was inherited; what vendor code starts must not have it.
        sock.set_inheritable(False)
        self._socket = sock
        self._frames = Frames()
        self._messages: Iterator[Any] = iter(())
        self._fds: deque[int] = deque()
        self._sending = threading.Lock()
        self._pid = os.getpid()
        # Nor must a process that vendor code forks speak in our name, or keep the line open after us.
        os.register_at_fork(after_in_child=sock.close)

    def receive(self) -> tuple[Any, deque[int]]:
        """The next message, and the descriptors that came so far and nobody has taken. Ends the process when the parent is gone."""
        while True:
            for message in self._messages:
                return message, self._fds
            try:
                data, fds, flags, _ = socket.recv_fds(self._socket, _RECEIVE_BYTES, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
            except OSError:
                os._exit(1)
            if not data:
                os._exit(0)
            if flags & socket.MSG_CTRUNC:
                # Which of them is lost nobody can say, and the next would be mapped in its place.
                logger.error("the child has no room for the descriptor of a region: it has too many open; it ends")
                os._exit(1)
            self._fds.extend(fds)
            self._messages = self._frames.feed(data)

    def send(self, message: object) -> None:
        """Send a message; waits while the parent does not read.

        Raises:
            WireError: it cannot be sent. Nothing was.
        """
        if os.getpid() != self._pid:
            return
        frame = encode(message)
        with self._sending:
            try:
                self._socket.sendall(frame)
            except OSError:
                os._exit(1)
