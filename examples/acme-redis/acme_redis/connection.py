"""A connection of redis-py that keeps the deadline of a call.

redis-py's own time-outs are fixed when it connects, and start anew with each part of an answer: a slow answer may take for ever. Here
every wait for a socket ends at the deadline of the call that the thread makes, connecting and logging in included.
"""

import socket
import threading
from typing import Any

import redis

# Of the call that this thread makes: `deadline`, and `connected`, whether its requests may have left.
CALL = threading.local()


class DeadlineSocket(socket.socket):
    def recv(self, *arguments: Any) -> bytes:
        self._arm()
        return super().recv(*arguments)

    def recv_into(self, *arguments: Any) -> int:
        self._arm()
        return super().recv_into(*arguments)

    def sendall(self, *arguments: Any) -> None:
        self._arm()
        super().sendall(*arguments)

    def _arm(self) -> None:
        if self.gettimeout() != 0:  # 0 is the pool, looking whether the server has hung up
            self.settimeout(max(CALL.deadline.remaining_s(), 0.001))


class DeadlineConnection(redis.Connection):
    """Keeps its socket in `sockets`: whoever shuts that down, from any thread, ends a call that waits for the server."""

    def __init__(self, sockets: dict[redis.Connection, socket.socket], **options: Any) -> None:
        # Not the packer of hiredis: it copies whole batches, holding the GIL, and no deadline stops it.
        encode = redis.ConnectionPool().get_encoder().encode
        super().__init__(command_packer=redis.connection.PythonRespSerializer(6000, encode), **options)
        self._sockets = sockets

    def connect(self) -> None:
        CALL.connected = False
        super().connect()
        CALL.connected = True

    def _connect(self) -> socket.socket:
        self.socket_connect_timeout = max(CALL.deadline.remaining_s(), 0.001)
        self._sockets[self] = DeadlineSocket(fileno=super()._connect().detach())
        return self._sockets[self]
