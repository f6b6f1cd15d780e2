"""A session with a peer: what it says is believed only where it can be, and whatever else it says ends the session in one line."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from contextlib import closing, suppress
from typing import Any

import pytest
import zmq.asyncio
from p2p_bench import until
from p2p_scripted import ScriptedPeer, having, numbers, scripted_peer

from kvstore_sdk.backend import TimedOutError, UnavailableError
from kvstore_sdk_backends.p2p import link as link_module
from kvstore_sdk_backends.p2p.link import Greeting, Link, PeerRefusedError
from kvstore_sdk_backends.p2p.messages import (
    FOUND,
    VERSION,
    VERSIONS,
    Cancel,
    Fetch,
    ForeignHello,
    Found,
    Goodbye,
    Hello,
    Lookup,
    Ready,
    Refused,
    Release,
    Result,
    Welcome,
    encode,
)
from kvstore_sdk_backends.p2p.security import Security

pytestmark = pytest.mark.usefixtures("patient")

LIMIT_S = 20.0
GREETING = Greeting(os.urandom(16), "", "", ("nixl", "zmq"))


def run(step: Callable[[zmq.asyncio.Context], Coroutine[Any, Any, None]]) -> None:
    async def steps() -> None:
        context = zmq.asyncio.Context()
        try:
            await asyncio.wait_for(step(context), 60)
        finally:
            context.destroy(linger=0)

    asyncio.run(steps())


async def meet(context: zmq.asyncio.Context, peer: ScriptedPeer) -> Link:
    return await Link.open(peer.address, GREETING, context, Security("127.0.0.1"))


def soon() -> float:
    return time.monotonic() + LIMIT_S


def test_a_question_has_its_answer_whatever_comes_in_between() -> None:
    held: list[Any] = []

    def answer(message: Any) -> Any:
        if isinstance(message, Lookup):
            held.append(Found(message.number, (len(message.names[0]),)))
            return held[::-1] if len(held) == 3 else None
        return None

    async def steps(context: zmq.asyncio.Context) -> None:
        link = await meet(context, peer)
        assert link.welcome.path == "zmq"
        names = ["a", "bb", "ccc"]
        asks = [link.ask(Lookup(link.number(), 0, (name,)), Found, soon()) for name in names]
        assert [found.sizes for found in await asyncio.gather(*asks)] == [(1,), (2,), (3,)]
        assert link.waiting == 0
        link.end("over")

    with scripted_peer(answer) as peer:
        run(steps)
        hello = peer.asked[0]
        assert (hello.node, hello.paths) == (GREETING.node, GREETING.paths)


def test_a_look_up_that_waits_is_called_off_when_nobody_waits_for_it_any_more() -> None:
    def answer(message: Any) -> Any:
        return Found(message.number, (9,)) if isinstance(message, Cancel) else None

    async def steps(context: zmq.asyncio.Context) -> None:
        link = await meet(context, peer)
        late: list[Found] = []
        questions = [Lookup(link.number(), wait_ms, ("a",)) for wait_ms in (0, 60_000)]
        asks = [asyncio.ensure_future(link.ask(question, Found, soon(), late.append)) for question in questions]
        await until(lambda: numbers(peer.asked, Lookup) == 2)
        for asking in asks:
            asking.cancel()
        # What it finds after all is settled as any late answer.
        await until(lambda: late)
        assert [found.number for found in late] == [questions[1].number]
        assert [message for message in peer.asked if isinstance(message, Cancel)] == [Cancel(questions[1].number)]
        assert not link.ended
        link.end("over")

    with scripted_peer(answer) as peer:
        run(steps)


def test_an_answer_that_nobody_waits_for_any_more_is_not_lost() -> None:
    async def steps(context: zmq.asyncio.Context) -> None:
        link = await meet(context, peer)
        late: list[Found] = []
        question = Lookup(link.number(), 0, ("a",))
        with pytest.raises(TimedOutError, match="no answer to a Lookup in time"):
            await link.ask(question, Found, time.monotonic() + 0.05, late.append)
        other = Lookup(link.number(), 0, ("b",))
        asking = asyncio.ensure_future(link.ask(other, Found, soon(), late.append))
        await asyncio.sleep(0.05)
        asking.cancel()
        await until(lambda: numbers(peer.asked, Lookup) == 2)
        # The next question has the peer answer all that it was asked.
        await link.ask(Lookup(link.number(), 0, ("c",)), Found, soon())
        assert sorted(found.number for found in late) == [question.number, other.number]
        assert not link.ended
        link.end("over")

    def answer(message: Any) -> Any:
        if isinstance(message, Lookup) and message.names == ("c",):
            return [Found(one.number, (1,)) for one in peer.asked if isinstance(one, Lookup)]
        return None

    with scripted_peer(answer) as peer:
        run(steps)


BREACHES: dict[str, tuple[Callable[[Lookup], Any], str]] = {
    "an answer to no question": (lambda asked: Found(asked.number + 7, (1,)), "answers no question"),
    "the same answer twice": (lambda asked: [Found(asked.number, (0,)), Found(asked.number, (0,))], "answers no question"),
    "another kind of answer": (lambda asked: Ready(asked.number), "answered with a Ready, asked was for a Found"),
    "more answers than questions": (lambda asked: Found(asked.number, (1, 1)), "answered 1 questions with 2 answers"),
    "a result for a look-up": (lambda asked: Result(asked.number, ((FOUND, 1),)), "answered with a Result"),
    "garbage": (lambda asked: b"\xc1garbage", "sent what cannot be read"),
    "a size that no record has": (lambda asked: encode(Found(asked.number, (1 << 50,))), "sent what cannot be read"),
    "two parts": (lambda asked: (encode(Found(asked.number, (1,))), b"more"), "several parts"),
    "a question": (lambda asked: Lookup(1, 0, ("a",)), "sent a Lookup, which is not for an asker"),
    "another version": (lambda asked: b"\x93\x07\x07\x01", "frame of version 7"),
    "a refusal of nothing": (lambda asked: Refused(0, "invalid", "what was that"), "refuses (invalid): what was that"),
    "a session it does not know": (lambda asked: Refused(asked.number, "unknown", "who are you"), "refuses (unknown): who are you"),
    "goodbye": (lambda asked: Goodbye("closing", "it closes"), "ended the session (closing): it closes"),
    "goodbye for a reason that is not known": (lambda asked: Goodbye("flood", "out"), "ended the session (flood): out"),
}


@pytest.mark.parametrize("breach", BREACHES)
def test_what_no_peer_may_say_ends_the_session_and_what_waits(breach: str) -> None:
    make, line = BREACHES[breach]

    async def steps(context: zmq.asyncio.Context) -> None:
        link = await meet(context, peer)
        ended: list[str] = []
        link.on_end(lambda: ended.append(link.cause))
        asks = [link.ask(Lookup(link.number(), 0, (name,)), Found, soon()) for name in ("quiet", "bad")]
        answers = await asyncio.gather(*asks, return_exceptions=True)
        await asyncio.wait_for(link.wait_ended(), LIMIT_S)
        for answer in answers:
            assert isinstance(answer, (UnavailableError, Found))
            assert not isinstance(answer, TimedOutError)
        assert isinstance(answers[0], UnavailableError)
        assert f"p2p peer {peer.address}: " in str(answers[0])
        assert line in link.cause
        assert len(ended) == 1
        assert "\n" not in link.cause
        with pytest.raises(UnavailableError):
            link.post(Lookup(link.number(), 0, ("a",)), Found)
        link.tell(Release(("a",)))

    def answer(message: Any) -> Any:
        return make(message) if isinstance(message, Lookup) and message.names == ("bad",) else None

    with scripted_peer(answer) as peer:
        run(steps)


def test_being_busy_fails_the_question_and_not_the_session() -> None:
    async def steps(context: zmq.asyncio.Context) -> None:
        link = await meet(context, peer)
        with pytest.raises(PeerRefusedError, match=r"refuses \(busy\): too much") as caught:
            await link.ask(Fetch(link.number(), 0, 1000, (("busy", 1, 0, 0),)), Result, soon())
        assert not caught.value.lasting
        assert (await link.ask(Lookup(link.number(), 0, ("v1/a",)), Found, soon())).sizes == (9,)
        link.end("over")

    has = having(a=9)
    with scripted_peer(lambda message: Refused(message.number, "busy", "too much") if isinstance(message, Fetch) else has(message)) as peer:
        run(steps)


REFUSALS: dict[str, tuple[Callable[[Hello], Any], str]] = {
    "version": (
        lambda hello: Refused(hello.number, "version", "", (3, 5)),
        f"speaks protocol versions 3 to 5, this node {VERSIONS[0]} to {VERSIONS[1]}; upgrade the older one",
    ),
    "namespace": (lambda hello: Refused(hello.number, "namespace", "other weights"), "refuses (namespace): other weights"),
    "no session yet": (lambda hello: Refused(0, "unknown", "say hello"), "refuses (unknown): say hello"),
    "a path that was not offered": (
        lambda hello: Welcome(hello.number, VERSION, b"x" * 16, "pigeon", 0, 1, 1),
        f"welcomes version {VERSION}, path 'pigeon', which were not offered",
    ),
    "a version that was not offered": (
        lambda hello: Welcome(hello.number, 9, b"x" * 16, "zmq", 1, 1, 1),
        "welcomes version 9, path 'zmq', which were not offered",
    ),
    "itself": (lambda hello: Refused(hello.number, "self", "the same node"), "refuses (self): the same node"),
    "garbage": (lambda hello: b"HTTP/1.1 400 Bad Request", "sent what cannot be read"),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_without_a_welcome_there_is_no_session_and_a_line_that_says_why(refusal: str) -> None:
    make, line = REFUSALS[refusal]

    async def steps(context: zmq.asyncio.Context) -> None:
        with pytest.raises(UnavailableError) as caught:
            await meet(context, peer)
        assert str(caught.value).startswith(f"p2p peer {peer.address}: ")
        assert line in str(caught.value)
        if refusal in ("version", "namespace", "itself"):
            assert isinstance(caught.value, PeerRefusedError)
            assert caught.value.lasting

    with scripted_peer(lambda message: make(message) if isinstance(message, Hello) else None) as peer:
        run(steps)
        assert not [message for message in peer.asked if isinstance(message, ForeignHello)]


def test_sessions_that_end_leave_no_descriptor() -> None:
    def open_now() -> int:
        return len(os.listdir("/proc/self/fd"))

    async def steps(context: zmq.asyncio.Context) -> None:
        (await meet(context, peer)).end("over")
        # libzmq closes what a session had a moment later.
        await asyncio.sleep(0.5)
        before = open_now()
        for _ in range(10):
            (await meet(context, peer)).end("over")
        peer.answer = lambda message: [peer.welcome(message), b"\xc1"]
        for _ in range(10):
            with suppress(UnavailableError):
                (await meet(context, peer)).end("over")
        await until(lambda: open_now() <= before)

    with scripted_peer(lambda message: None) as peer:
        run(steps)


# pyzmq says of a socket that it could not make that nobody has closed it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:Unclosed socket:ResourceWarning")
@pytest.mark.parametrize("sockets", [0, 1, 2, 3])
def test_where_there_are_no_sockets_the_error_says_what_to_raise(sockets: int) -> None:
    """A session over ZMQ takes more than these: the last of them, the data connection, when the peer has said Welcome."""

    async def steps(context: zmq.asyncio.Context) -> None:
        context.set(zmq.MAX_SOCKETS, 1 + sockets)
        with closing(context.socket(zmq.PAIR, socket_class=zmq.Socket)):
            with pytest.raises(UnavailableError, match=r"cannot be connected to: Too many open files; raise ulimit -n") as error:
                await meet(context, peer)
            assert type(error.value) is UnavailableError
            assert str(peer.address) in str(error.value)

    with scripted_peer(lambda message: None) as peer:
        run(steps)


def test_nobody_there_is_said_at_once_and_silence_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def steps(context: zmq.asyncio.Context) -> None:
        began_s = time.monotonic()
        with pytest.raises(TimedOutError, match="no answer to a Hello in time"):
            await meet(context, peer)
        assert time.monotonic() - began_s < LIMIT_S
        peer.close()
        monkeypatch.setattr(link_module, "CONNECT_S", 3600.0)
        with pytest.raises(UnavailableError, match="nobody listens there, or nobody answers"):
            await meet(context, peer)

    monkeypatch.setattr(link_module, "CONNECT_S", 0.1)
    with scripted_peer(lambda message: [] if isinstance(message, Hello) else None) as peer:
        run(steps)


def test_questions_that_are_never_answered_end_the_session_before_they_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "MAX_QUESTIONS", 10)

    async def steps(context: zmq.asyncio.Context) -> None:
        link = await meet(context, peer)
        for _ in range(10):
            link.post(Lookup(link.number(), 0, ("a",)), Found).cancel()
        with pytest.raises(UnavailableError, match="left 10 questions without an answer"):
            link.post(Lookup(link.number(), 0, ("a",)), Found)
        assert link.ended

    with scripted_peer(lambda message: None) as peer:
        run(steps)


def test_the_end_of_the_peer_is_noticed_while_nobody_asks_anything() -> None:
    async def steps(context: zmq.asyncio.Context) -> None:
        link = await meet(context, peer)
        peer.close()
        await asyncio.wait_for(link.wait_ended(), LIMIT_S)
        assert "lost" in link.cause

    with scripted_peer(lambda message: None) as peer:
        run(steps)
