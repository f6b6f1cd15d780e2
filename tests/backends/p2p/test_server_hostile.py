"""A good asker is answered, and nothing stays behind, whatever others send or leave undone."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import socket as sockets

import msgpack
import zmq
from p2p_bench import PATIENCE_S, run, until
from p2p_fake_plane import FakePlane
from p2p_serving import Asker, Serving, serving
from p2p_sources import CountingSource, content

from kvstore_sdk_backends.p2p.messages import (
    FOUND,
    MISSING,
    VERSION,
    VERSIONS,
    Cancel,
    Fetch,
    Goodbye,
    Hello,
    Lookup,
    Ready,
    Refused,
    Release,
    Result,
    Target,
    encode,
)

NAMES = tuple(f"n{number}" for number in range(256))


async def served(s: Serving, asker: Asker, name: str = "a") -> None:
    """The good asker gets a record."""
    assert await asker.look_up(name) == (100,)
    assert await asker.fetch((name, 100)) == ((FOUND, 100),)
    assert list((await asker.take(1)).values()) == [content(name, 100)]


def test_an_asker_that_never_reads_is_left() -> None:
    """It asks for more than its connection holds of answers; what it is not told costs nobody else anything."""

    async def test() -> None:
        source = CountingSource({"a": 100})
        async with serving(source) as s:
            deaf, good = s.asker(rcvhwm=1, rcvbuf=4096), s.asker()
            await good.hello()
            # Its own answers fill the way to it: nothing is read, not even the Welcome.
            await deaf.send(encode(Hello(1, VERSIONS, deaf.node, "", "", ("zmq",))))
            await until(lambda: s.counts["sessions_now"] == 2)
            question = encode(Lookup(2, 0, ("a", *NAMES[1:])))
            async with asyncio.timeout(PATIENCE_S):
                while s.counts["sessions_now"] == 2:
                    try:
                        deaf._socket.send(question, zmq.NOBLOCK)
                    except zmq.Again:
                        await asyncio.sleep(0.001)
                    else:
                        await asyncio.sleep(0)
            assert source.out == []
            await served(s, good)

    run(test)


def test_a_data_connection_that_nobody_reads_ends_alone() -> None:
    async def test() -> None:
        size = 1 << 20
        source = CountingSource({"a": 100} | dict.fromkeys(NAMES[:40], size))
        async with serving(source) as s:
            deaf, good = s.asker(), s.asker()
            deaf.takes_data = False
            await deaf.hello()
            await good.hello()
            # Its data connection stands.
            assert await deaf.fetch(("a", 100)) == ((FOUND, 100),)
            fetch = deaf.fetch_of(*((name, size) for name in NAMES[:40]), deadline_s=0.5)
            await deaf.send(encode(dataclasses.replace(fetch, number=1001)))
            await until(lambda: s.counts["sending_now"])
            await served(s, good)
            # A second after the deadline its memory is taken back.
            assert isinstance(await deaf.receive(), Goodbye)
            await until(lambda: not s.counts["sending_now"])
            await served(s, good)

    run(test)


def test_many_that_say_hello_take_so_many_places_and_an_idle_one_goes_for_the_next() -> None:
    async def test() -> None:
        source = CountingSource({"a": 100})
        # Nobody is idle while they come.
        async with serving(source, max_sessions=4, idle_s=3600.0) as s:
            good = s.asker()
            await good.hello()
            await good.look_up("a")
            crowd = [s.asker() for _ in range(40)]
            for one in crowd:
                await one.send(encode(Hello(1, VERSIONS, one.node, "", "", ("zmq",))))
            answers = [await one.receive() for one in crowd]
            assert s.counts["sessions_now"] == 4
            assert {answer.code for answer in answers if isinstance(answer, Refused)} == {"full"}
            assert sum(isinstance(answer, Refused) for answer in answers) == 37
            assert len(s.senders) == 4
            # It holds a lease, so it is not idle; those that came with the crowd are, after a while.
            object.__setattr__(s.server._limits, "idle_s", 0.0)
            late = s.asker()
            await late.hello()
            assert s.counts["sessions_now"] == 4
            await served(s, good)
            await served(s, late)

    run(test)


def test_a_flood_of_questions_leaves_turns_to_the_others() -> None:
    async def test() -> None:
        source = CountingSource({"a": 100})
        async with serving(source) as s:
            good, loud = s.asker(), s.asker()
            await good.hello()
            await loud.hello()
            over = False

            async def flood() -> None:
                question = encode(Lookup(2, 0, NAMES))
                while not over:
                    for step in (lambda: loud._socket.send(question, zmq.NOBLOCK), lambda: loud._socket.recv(zmq.NOBLOCK)):
                        try:
                            step()
                        except zmq.Again:
                            await asyncio.sleep(0)

            flooding = asyncio.ensure_future(flood())
            try:
                for _ in range(30):
                    await served(s, good)
                assert s.counts["lookups"] > 100
            finally:
                over = True
                await flooding

    run(test)


def test_garbage_of_every_kind_ends_at_worst_whoever_sends_it() -> None:
    """Frames of random bytes, of random msgpack, of parts, and messages with one byte changed, with and without a session; in any order."""

    async def test() -> None:
        dice = random.Random(7)
        source, plane = CountingSource({"a": 100, "b": 100}), FakePlane()
        async with serving(source, plane=plane) as s:
            good = s.asker()
            await good.hello()
            for batch in range(40):
                bad = s.asker()
                if batch % 3:
                    await bad.hello(paths=("nixl",) if batch % 3 == 1 else ("zmq",))
                for _ in range(100):
                    await bad.send(*(frame_of(dice, bad) for _ in range(dice.choice((1, 1, 1, 1, 1, 2, 5)))))
                    while bad._socket.poll(0):
                        bad._socket.recv()
                await served(s, good)
                bad.close()
            await until(lambda: s.counts["sessions_now"] == 1)
            await until(lambda: s.counts["sending_now"] == 0)
            assert s.counts["bad_frames"] > 100

    run(test)


def frame_of(dice: random.Random, asker: Asker) -> bytes:
    """Something that an asker might send, right or wrong."""
    number = dice.choice((0, 1, dice.randrange(2**63)))
    names = tuple(dice.choice(("a", "b", "x")) for _ in range(dice.randrange(1, 9)))
    good = [
        Hello(number, (0, dice.randrange(3)), asker.node, "", "", (dice.choice(("zmq", "nixl")),)),
        Lookup(number, dice.choice((0, 1, 10_000)), names),
        Fetch(number, dice.choice((0, 1)), dice.choice((0, 100)), tuple((name, 100, 0, dice.randrange(2000)) for name in names)),
        Release(names),
        Target(number, b"agent", ((4096, 1000),)),
        Cancel(number),
        Ready(number),
        Refused(number, "busy", "no"),
        Result(number, ((FOUND, 1), (MISSING, 0))),
    ]
    frame = bytearray(encode(dice.choice(good)))
    match dice.randrange(4):
        case 0:
            return bytes(frame)
        case 1:
            frame[dice.randrange(len(frame))] = dice.randrange(256)
            return bytes(frame)
        case 2:
            return dice.randbytes(dice.choice((0, 1, 10, 5000)))
        case _:
            values = [dice.choice((None, True, -1, 0, 2**64 - 1, 1.5, "x" * 300, b"y" * 300, [], {}, [[]])) for _ in range(6)]
            return bytes(msgpack.packb([VERSION, dice.randrange(12), *values]))


def test_connections_that_say_nothing_do_not_matter() -> None:
    async def test() -> None:
        source = CountingSource({"a": 100})
        async with serving(source) as s:
            port = int(s.endpoint.rpartition(":")[2])
            silent = [sockets.create_connection(("127.0.0.1", port)) for _ in range(50)]
            try:
                for number, connection in enumerate(silent):
                    connection.send(b"GET / HTTP/1.1\r\n\r\n"[: number % 19])
                good = s.asker()
                await good.hello()
                await served(s, good)
            finally:
                for connection in silent:
                    connection.close()

    run(test)
