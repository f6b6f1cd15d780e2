"""A peer that speaks the protocol as far as it is told to, and counts what it is asked."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Collection
from contextlib import suppress

import zmq

from kvstore_sdk_backends.p2p.decoding import decode
from kvstore_sdk_backends.p2p.messages import MISSING, VERSION, Fetch, Found, Hello, Lookup, MessageError, Result, Welcome, encode

__all__ = ["FakePeer"]

POLL_MS = 20
BIND_S = 20.0


class FakePeer:
    """Listens on loopback. Data never comes from it.

    Attributes:
        port: Where it listens; the same for all its lives.
        node: Its id; another one after each `restart`.
        hellos: Of all its lives.
    """

    def __init__(self, answers: Collection[type] = (Hello, Lookup, Fetch), *, size: int = 0) -> None:
        """It answers questions of these kinds, and no others. It has every record, of `size` bytes, and gives none; 0: it has none."""
        self._answers = frozenset(answers)
        self._size = size
        self._lock = threading.Lock()
        self._asked: Counter[str] = Counter()
        self._context = zmq.Context()
        self._data = self._context.socket(zmq.ROUTER)
        self._data.linger = 0
        self._data_port = self._data.bind_to_random_port("tcp://127.0.0.1")
        self.port = 0
        self._thread: threading.Thread | None = None
        self._start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def asked(self, kind: type) -> int:
        """How many messages of this kind came, in all its lives."""
        with self._lock:
            return self._asked[kind.__name__]

    def die(self) -> None:
        """Close all connections, without a word."""
        self._over.set()
        assert self._thread is not None
        self._thread.join()

    def restart(self) -> None:
        """Die, and be there again as somebody else."""
        self.die()
        self._start()

    def close(self) -> None:
        self.die()
        self._data.close(0)
        self._context.destroy(0)

    def _start(self) -> None:
        self.node = os.urandom(16)
        self._over = threading.Event()
        socket = self._context.socket(zmq.ROUTER)
        socket.linger = 0
        if self.port:
            self._bind_again(socket)
        else:
            self.port = socket.bind_to_random_port("tcp://127.0.0.1")
        self._thread = threading.Thread(target=self._serve, args=(socket, self._over), name="fake peer", daemon=True)
        self._thread.start()

    def _bind_again(self, socket: zmq.Socket[bytes]) -> None:
        """The library closes the socket of the life before some time after it was asked to."""
        until_s = time.monotonic() + BIND_S
        while True:
            try:
                socket.bind(f"tcp://127.0.0.1:{self.port}")
                return
            except zmq.ZMQError:
                if time.monotonic() >= until_s:
                    raise
                time.sleep(0.005)

    def _serve(self, socket: zmq.Socket[bytes], over: threading.Event) -> None:
        with socket:
            while not over.is_set():
                if not socket.poll(POLL_MS):
                    continue
                identity, *frames = socket.recv_multipart()
                for frame in frames:
                    with suppress(MessageError):
                        if (answer := self._answer(decode(frame))) is not None:
                            socket.send_multipart([identity, encode(answer)])

    def _answer(self, message: object) -> Welcome | Found | Result | None:
        with self._lock:
            self._asked[type(message).__name__] += 1
        if type(message) not in self._answers:
            return None
        if isinstance(message, Hello):
            path = "zmq" if "zmq" in message.paths else message.paths[0]
            return Welcome(message.number, VERSION, self.node, path, self._data_port, 256, 256)
        if isinstance(message, Lookup):
            return Found(message.number, (self._size,) * len(message.names))
        if isinstance(message, Fetch):
            return Result(message.number, ((MISSING, 0),) * len(message.items))
        return None
