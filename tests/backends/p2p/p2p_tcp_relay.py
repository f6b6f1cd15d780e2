"""Somebody on the way between two nodes, who sees what they say and can cut their connections."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable
from contextlib import ExitStack, suppress

__all__ = ["Relay", "free_ports"]


class Relay:
    """Passes on what comes to 127.0.0.1 to the same port of 127.0.0.2, and keeps it.

    Its sockets block, and end by being shut down: two threads have each of them, and a time-out would be set for both.
    """

    def __init__(self, ports: Iterable[int]) -> None:
        self.seen = bytearray()
        self._listening = [socket.create_server(("127.0.0.1", port)) for port in ports]
        self._passing: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._accepting = [threading.Thread(target=self._accept, args=(server,)) for server in self._listening]
        for thread in self._accepting:
            thread.start()

    def cut(self) -> None:
        """End all connections that there are; others may come."""
        for one in list(self._passing):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for sockets, threads in ((self._listening, self._accepting), (self._passing, self._threads)):
            for one in sockets:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()
            for one in sockets:
                one.close()

    def _accept(self, server: socket.socket) -> None:
        port = server.getsockname()[1]
        while True:
            try:
                asker, _ = server.accept()
            except OSError:
                return
            self._passing.append(asker)
            try:
                owner = socket.create_connection(("127.0.0.2", port))
            except OSError:
                asker.shutdown(socket.SHUT_RDWR)
                continue
            self._passing.append(owner)
            for source, target in ((asker, owner), (owner, asker)):
                passing = threading.Thread(target=self._pass, args=(source, target))
                self._threads.append(passing)
                passing.start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while some := source.recv(1 << 16):
                self.seen += some
                target.sendall(some)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def free_ports(count: int) -> range:
    """So many in a row that nobody has, on either address."""
    while True:
        with ExitStack() as closing, suppress(OSError, OverflowError):
            first = closing.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            for port in range(first, first + count):
                if port > first:
                    closing.enter_context(socket.create_server(("127.0.0.1", port)))
                closing.enter_context(socket.create_server(("127.0.0.2", port)))
            return range(first, first + count)
