"""Peers that answer as a test says: real ones on loopback, which say anything, and links without any network."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import zmq

from kvstore_sdk.backend import TimedOutError, UnavailableError
from kvstore_sdk_backends.p2p.addresses import Address
from kvstore_sdk_backends.p2p.data_path import HEADER, routing_id
from kvstore_sdk_backends.p2p.decoding import decode
from kvstore_sdk_backends.p2p.messages import VERSION, Found, Hello, Lookup, MessageError, Welcome, encode

__all__ = ["FakeLink", "ScriptedPeer", "scripted_peer"]

Answer = Callable[[Any], Any]
POLL_MS = 20


class ScriptedPeer:
    """Listens on loopback. `answer` makes of each message what is sent back: a message, bytes as they are, a list of both, or None.

    Attributes:
        asked: All messages that came, in order.
        address: Where it listens.
    """

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.asked: list[Any] = []
        self.node = os.urandom(16)
        self._context = zmq.Context()
        self._control = self._context.socket(zmq.ROUTER)
        self._data = self._context.socket(zmq.ROUTER)
        self._control.linger = self._data.linger = 0
        # The next session of an asker may begin before its last one is seen to be over.
        self._data.router_handover = 1
        self.data_port = self._data.bind_to_random_port("tcp://127.0.0.1")
        self.address = Address("127.0.0.1", self._control.bind_to_random_port("tcp://127.0.0.1"))
        self._asker = b""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="scripted peer", daemon=True)
        self._thread.start()

    def welcome(self, hello: Hello, **changed: Any) -> Welcome:
        fields: dict[str, Any] = {
            "number": hello.number,
            "version": VERSION,
            "node": self.node,
            "path": "zmq",
            "data_port": self.data_port,
            "max_names": 256,
            "max_items": 256,
        }
        return Welcome(**(fields | changed))

    def send_record(self, number: int, index: int, record: bytes, size: int | None = None) -> None:
        """To the asker, over its data connection; from within `answer`."""
        header = HEADER.pack(number, index, len(record) if size is None else size)
        until_s = time.monotonic() + 30
        while True:
            try:
                self._data.router_mandatory = 1
                self._data.send_multipart([routing_id(self._asker), header, record])
                return
            except zmq.ZMQError:
                assert time.monotonic() < until_s, "the asker did not connect for data"
                time.sleep(0.01)

    def close(self) -> None:
        self._over.set()
        self._thread.join(20)
        self._context.destroy(0)

    def _serve(self) -> None:
        while not self._over.is_set():
            if not self._control.poll(POLL_MS):
                continue
            identity, frame = self._control.recv_multipart()
            try:
                message = decode(frame)
            except MessageError as cause:
                message = cause
            self.asked.append(message)
            if isinstance(message, Hello):
                self._asker = message.node
            answers = self.answer(message)
            for one in answers if isinstance(answers, list) else [answers]:
                if one is not None:
                    frames = one if isinstance(one, tuple) else (one if isinstance(one, bytes) else encode(one),)
                    self._control.send_multipart([identity, *frames])


@contextmanager
def scripted_peer(answer: Answer) -> Iterator[ScriptedPeer]:
    """A peer that welcomes whoever says Hello, if `answer` has nothing else to say to that."""

    def answers(message: Any) -> Any:
        said = answer(message)
        return peer.welcome(message) if said is None and isinstance(message, Hello) else said

    peer = ScriptedPeer(answers)
    try:
        yield peer
    finally:
        peer.close()


class FakeLink:
    """A session without a network. `answer` is given each question, and returns what answers it, or an error; None: there is no answer.

    Attributes:
        told: What was said that needs no answer.
        asked: All questions, in order.
        cancelled: Those whose asker was cancelled.
    """

    def __init__(self, answer: Answer, port: int = 1, path: str = "nixl", max_names: int = 256) -> None:
        self.address = Address("127.0.0.1", port)
        self.welcome = Welcome(1, VERSION, os.urandom(16), path, 0, max_names, max_names)
        self.told: list[Any] = []
        self.asked: list[Any] = []
        self.cancelled: list[Any] = []
        self.late: dict[int, Any] = {}
        self.ended = False
        self.cause = self.farewell = ""
        self.receiver: Any = None
        self._answer = answer
        self._numbers = itertools.count(1)
        self._waiting: list[asyncio.Future[Any]] = []
        self._ended = asyncio.Event()
        self._on_end: list[Callable[[], object]] = []

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def number(self) -> int:
        return next(self._numbers)

    def on_end(self, step: Callable[[], object]) -> None:
        self._on_end.append(step)

    async def wait_ended(self) -> None:
        await self._ended.wait()

    def post(self, question: Any, wanted: type[Any], late: Any = None) -> asyncio.Future[Any]:
        if self.ended:
            raise self.error
        self.asked.append(question)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.late[question.number] = late
        answer = self._answer(question)
        if isinstance(answer, BaseException):
            future.set_exception(answer)
        elif answer is not None:
            future.set_result(answer)
        else:
            self._waiting.append(future)
        return future

    async def ask(self, question: Any, wanted: type[Any], until_s: float, late: Any = None) -> Any:
        future = self.post(question, wanted, late)
        try:
            await asyncio.wait({future}, timeout=max(0.0, until_s - time.monotonic()))
        except asyncio.CancelledError:
            future.cancel()
            self.cancelled.append(question)
            raise
        if future.done():
            return future.result()
        raise TimedOutError(f"p2p peer {self.address}: no answer")

    def tell(self, message: Any) -> None:
        self.told.append(message)

    @property
    def error(self) -> UnavailableError:
        return UnavailableError(f"p2p peer {self.address}: {self.cause}")

    def end(self, cause: str) -> UnavailableError:
        if not self.ended:
            self.ended, self.cause = True, cause
            self._ended.set()
            for future in self._waiting:
                if not future.done():
                    future.set_exception(self.error)
                    future.exception()
            for step in self._on_end:
                step()
        return self.error


def having(**sizes: int) -> Answer:
    """A peer that has records of these names, without the `v1/` before them, and answers look-ups alone."""

    def answer(question: Any) -> Any:
        if isinstance(question, Lookup):
            return Found(question.number, tuple(sizes.get(name.removeprefix("v1/"), 0) for name in question.names))
        return None

    return answer


def numbers(messages: Sequence[Any], kind: type[Any]) -> int:
    """How many of these messages are of that kind."""
    return sum(type(message) is kind for message in messages)
