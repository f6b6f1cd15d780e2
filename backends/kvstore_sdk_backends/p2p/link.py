"""One session with a peer that is asked: from its Hello to its end, which comes once and for one reason."""

from __future__ import annotations

import asyncio
import errno
import itertools
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import zmq

from kvstore_sdk.backend import BackendError, TimedOutError, UnavailableError
from kvstore_sdk_backends.p2p.addresses import Address
from kvstore_sdk_backends.p2p.control_line import ControlLine
from kvstore_sdk_backends.p2p.data_path import Receiver
from kvstore_sdk_backends.p2p.decoding import decode
from kvstore_sdk_backends.p2p.handshakes import FAILED_HANDSHAKES, why_not_connected
from kvstore_sdk_backends.p2p.messages import (
    VERSION,
    VERSIONS,
    Cancel,
    Fetch,
    Found,
    Goodbye,
    Hello,
    Lookup,
    Message,
    MessageError,
    Ready,
    Refused,
    Release,
    Result,
    Target,
    Welcome,
    encode,
)
from kvstore_sdk_backends.p2p.monitor import FLOODED, Monitor
from kvstore_sdk_backends.p2p.security import Security

__all__ = ["CONNECT_S", "Greeting", "Link", "PeerRefusedError"]

CONNECT_S = 3.0
"""From the first packet to the Welcome."""
_REASON_S = 1.0
MAX_QUESTIONS = 4096
"""Without an answer, those that nobody waits for any more among them. A peer that lets so many come together is not answering."""

_UNREAD_BYTES = 8 << 20
"""What may have come and not been read. The answers to all that is asked at a time are shorter."""

_LASTING = frozenset({"version", "namespace", "layout", "path", "self"})
_PASSING = frozenset({"busy", "full"})
_EVENTS = zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED | FAILED_HANDSHAKES

A = TypeVar("A", Welcome, Ready, Found, Result)


class PeerRefusedError(UnavailableError):
    """A peer does not want this session. `code` is that of the refusal."""

    def __init__(self, text: str, code: str) -> None:
        super().__init__(text)
        self.code = code

    @property
    def lasting(self) -> bool:
        """Whether asking again soon is of no use: one of the two has to be set up otherwise."""
        return self.code in _LASTING


@dataclass(frozen=True, slots=True)
class Greeting:
    """What this node says of itself: the fields of a Hello."""

    node: bytes
    namespace: str
    layout: str
    paths: tuple[str, ...]


@dataclass(slots=True, eq=False)
class _Question:
    """A message that asks for an answer.

    Attributes:
        wanted: Kind of the answer.
        count: Entries that it must have, of a Found or a Result.
        answer: Cancelled when nobody waits any more; then `late` gets the answer.
    """

    wanted: type[Any]
    count: int
    answer: asyncio.Future[Any]
    late: Callable[[Any], object] | None


class Link:
    """A session. All of it belongs to the loop.

    The peer is not trusted: an answer to no question, of another kind or length than asked, or that cannot be read, ends the session, and
    whatever waits for an answer then fails at once.

    Attributes:
        address: Of the peer.
        greeting: What this node said of itself.
        welcome: What the peer said of the session.
        receiver: Of the records, where the path is zmq.
        began_s: When it stood.
        cause: Why it ended; empty while it stands.
        farewell: Code of the Goodbye that ended it; empty where none did.
        answered: How many questions the peer has answered.
    """

    def __init__(self, address: Address, greeting: Greeting, context: zmq.Context, security: Security) -> None:
        """Connects. Use `open`."""
        self.address = address
        self.greeting = greeting
        self.began_s = time.monotonic()
        self.cause = ""
        self.farewell = ""
        self.answered = 0
        self.welcome = Welcome(0, VERSION, b"", "", 0, 1, 1)
        self.receiver: Receiver | None = None
        self._secured = security.key is not None
        self._numbers = itertools.count(1)
        self._questions: dict[int, _Question] = {}
        self._on_end: list[Callable[[], object]] = []
        self._ended = asyncio.Event()
        self._refusal = ""
        socket: zmq.Socket | None = None
        try:
            socket = context.socket(zmq.DEALER, socket_class=zmq.Socket)
            security.secure_client(socket, "control", address)
            self._monitor = Monitor(socket, _EVENTS, self._note, lambda: _UNREAD_BYTES)
            try:
                socket.connect(address.endpoint)
                self._line = ControlLine(socket, self._read, self._fail)
            except BaseException:
                self._monitor.close()
                raise
        except BaseException as cause:
            if socket is not None:
                socket.close(0)
            if not isinstance(cause, zmq.ZMQError):
                raise
            raise UnavailableError(f"p2p peer {address}: cannot be connected to: {_why(cause)}") from None

    def __repr__(self) -> str:
        return f"Link({self.address}, {self.cause or 'open'})"

    @classmethod
    async def open(cls, address: Address, greeting: Greeting, context: zmq.Context, security: Security) -> Link:
        """Connect and say Hello. Takes `CONNECT_S` at most.

        Raises:
            PeerRefusedError: the peer refused the session.
            UnavailableError: there is no session; the message says why.
        """
        link = cls(address, greeting, context, security)
        try:
            hello = Hello(link.number(), VERSIONS, greeting.node, greeting.namespace, greeting.layout, greeting.paths)
            try:
                welcome = await link.ask(hello, Welcome, time.monotonic() + CONNECT_S)
            except TimedOutError:
                raise
            except UnavailableError as error:
                # A handshake that is refused takes the way of the Hello with it, some ms before the monitor says why.
                with suppress(TimeoutError):
                    await asyncio.wait_for(link.wait_ended(), _REASON_S)
                raise (link.error if link.ended else error) from None
            if link.ended:
                # By what came behind the Welcome.
                raise link.error
            if welcome.version != VERSION or welcome.path not in greeting.paths:
                raise UnavailableError(
                    f"p2p peer {address}: welcomes version {welcome.version}, path {welcome.path!r}, which were not offered"
                )
            link.welcome = welcome
            if welcome.path == "zmq":
                data = Address(address.host, welcome.data_port)
                link.receiver = Receiver(context, security, data, greeting.node, link._lose)
        except zmq.ZMQError as cause:
            raise link.end(f"its data port cannot be connected to: {_why(cause)}") from None
        except BaseException as error:
            link.end(str(error) or type(error).__name__)
            raise
        return link

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    @property
    def waiting(self) -> int:
        """Questions that are not answered."""
        return len(self._questions)

    async def wait_ended(self) -> None:
        await self._ended.wait()

    def on_end(self, step: Callable[[], object]) -> None:
        """Have `step` called when the session ends: at once if it has."""
        if self.ended:
            step()
        else:
            self._on_end.append(step)

    def number(self) -> int:
        """For the next question."""
        return next(self._numbers)

    async def ask(
        self, question: Hello | Target | Lookup | Fetch, wanted: type[A], until_s: float, late: Callable[[A], object] | None = None
    ) -> A:
        """The answer to `question`. `late` is called with one that comes when nobody waits any more: on the loop, and never after the end.
        Of a Lookup that waits, and is cancelled here, it comes at once.

        Raises:
            TimedOutError: there is none at `until_s`.
            PeerRefusedError: the peer will not do this, and the session goes on.
            UnavailableError: the session ended.
        """
        answer = self.post(question, wanted, late)
        try:
            await asyncio.wait({answer}, timeout=max(0.0, until_s - time.monotonic()))
        except asyncio.CancelledError:
            if answer.cancel():
                if isinstance(question, Lookup) and question.wait_ms:
                    self.tell(Cancel(question.number))
            elif not answer.cancelled() and answer.exception() is None and late is not None:
                late(answer.result())
            raise
        if answer.done():
            return answer.result()
        answer.cancel()
        raise TimedOutError(f"p2p peer {self.address}: no answer to a {type(question).__name__} in time")

    def post(
        self, question: Hello | Target | Lookup | Fetch, wanted: type[A], late: Callable[[A], object] | None = None
    ) -> asyncio.Future[A]:
        """What will have the answer, or the error, as `ask` says; to be cancelled when nobody waits for it any more.

        Raises:
            UnavailableError: the session ended, or takes no more messages now.
        """
        if self.ended:
            raise self.error
        if len(self._questions) >= MAX_QUESTIONS:
            raise self.end(f"left {MAX_QUESTIONS} questions without an answer")
        count = len(question.names) if isinstance(question, Lookup) else len(question.items) if isinstance(question, Fetch) else 0
        answer: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._send(encode(question))
        self._questions[question.number] = _Question(wanted, count, answer, late)
        return answer

    def tell(self, message: Release | Cancel | Goodbye) -> None:
        """Send what needs no answer. What cannot be sent now is dropped."""
        if not self.ended:
            # The peer's leases and waits end by themselves.
            with suppress(BackendError):
                self._send(encode(message))

    def end(self, cause: str) -> UnavailableError:
        """End the session and whatever waits for its answers. The first cause stands. Returns the error for whoever asks."""
        if not self.ended:
            self.cause = cause.removeprefix(f"p2p peer {self.address}: ")
            self._ended.set()
            self._monitor.close()
            self._line.close()
            if self.receiver is not None:
                self.receiver.close()
            questions, self._questions = self._questions, {}
            for question in questions.values():
                _fail(question, self.error)
            for step in self._on_end:
                step()
            self._on_end.clear()
        return self.error

    @property
    def error(self) -> UnavailableError:
        """What whoever waits is told once the session has ended."""
        if self._refusal:
            return PeerRefusedError(f"p2p peer {self.address}: {self.cause}", self._refusal)
        return UnavailableError(f"p2p peer {self.address}: {self.cause}")

    def _send(self, frame: bytes) -> None:
        """Hand over to ZMQ, without waiting.

        Raises:
            UnavailableError: the peer takes nothing, or the session ended.
        """
        try:
            self._line.send(frame)
        except zmq.Again:
            # So it is also where the connection is gone. Then that has been told of before.
            self._monitor.take()
            raise self.error if self.ended else UnavailableError(f"p2p peer {self.address}: takes no more messages now") from None
        except zmq.ZMQError as cause:
            raise self.end(f"the connection failed: {cause.strerror}") from None

    def _read(self, frames: list[zmq.Frame]) -> None:
        self._monitor.read(sum(map(len, frames)))
        if len(frames) != 1:
            self.end("sent a message of several parts, which the protocol does not have")
            return
        try:
            message = decode(frames[0].buffer)
        except MessageError as cause:
            self.end(f"sent what cannot be read: {cause}")
            return
        self._take(message)

    def _fail(self, cause: zmq.ZMQError) -> None:
        self.end(f"the connection failed: {cause.strerror}")

    def _note(self, event: int, value: int) -> None:
        if event & FAILED_HANDSHAKES:
            self.end(why_not_connected(event, value, secured=self._secured))
        elif event == zmq.EVENT_CLOSED:
            self.end("nobody listens there, or nobody answers")
        elif event == FLOODED:
            self.end("sent a message that does not end, or more than can be read")
        elif event == zmq.EVENT_DISCONNECTED:
            # Before it hung up it may have said why.
            self._line.take()
            self.end("the connection is lost" if self.answered else "it hung up at once; is it a kvstore node, with room for one more?")

    def _take(self, message: Message) -> None:
        match message:
            case Refused():
                self._take_refusal(message)
            case Welcome() | Ready() | Found() | Result():
                question = self._questions.pop(message.number, None)
                if question is None:
                    self.end(f"sent a {type(message).__name__} that answers no question")
                elif type(message) is not question.wanted:
                    _fail(question, self.end(f"answered with a {type(message).__name__}, asked was for a {question.wanted.__name__}"))
                elif _count(message) != question.count:
                    _fail(question, self.end(f"answered {question.count} questions with {_count(message)} answers"))
                else:
                    self.answered += 1
                    if not question.answer.done():
                        question.answer.set_result(message)
                    elif question.late is not None:
                        question.late(message)
            case Goodbye():
                self.farewell = message.code
                self.end(f"ended the session ({message.code}): {message.text}")
            case _:
                self.end(f"sent a {type(message).__name__}, which is not for an asker")

    def _take_refusal(self, refusal: Refused) -> None:
        if refusal.code == "version":
            theirs, ours = refusal.versions, VERSIONS
            text = f"speaks protocol versions {theirs[0]} to {theirs[1]}, this node {ours[0]} to {ours[1]}; upgrade the older one"
        else:
            text = f"refuses ({refusal.code}): {refusal.text}"
        question = self._questions.pop(refusal.number, None)
        if question is not None and question.wanted is not Welcome and refusal.code in _PASSING:
            self.answered += 1
            _fail(question, PeerRefusedError(f"p2p peer {self.address}: {text}", refusal.code))
            return
        self._refusal = refusal.code
        if question is not None:
            _fail(question, PeerRefusedError(f"p2p peer {self.address}: {text}", refusal.code))
        self.end(text)

    def _lose(self, cause: str) -> None:
        # It may have said why on the other connection.
        self._line.take()
        self.end(cause)


def _why(cause: zmq.ZMQError) -> str:
    """Why there is no socket, or no connection."""
    spent = cause.errno in (errno.EMFILE, errno.ENFILE)
    return f"{cause.strerror}; raise ulimit -n" if spent else cause.strerror


def _count(message: Welcome | Ready | Found | Result) -> int:
    return len(message.sizes) if isinstance(message, Found) else len(message.statuses) if isinstance(message, Result) else 0


def _fail(question: _Question, error: UnavailableError) -> None:
    if not question.answer.done():
        question.answer.set_exception(error)
        # Whoever waits gets it; and where nobody does any more, nothing is to be said of it.
        question.answer.exception()
