"""A session begins with whom it can serve, and ends with its connection, its node, or a newer one."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time

import pytest
from p2p_bench import run, until
from p2p_serving import Asker, serving
from p2p_sources import CountingSource

from kvstore_sdk_backends.p2p.messages import (
    FOUND,
    VERSION,
    VERSIONS,
    Goodbye,
    Hello,
    Lookup,
    Refused,
    encode,
)

NAMESPACE, OTHER_NAMESPACE = "ab" * 16, "cd" * 16


def hello(asker: Asker, **fields: object) -> Hello:
    return dataclasses.replace(Hello(0, VERSIONS, asker.node, "", "", ("zmq",)), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"versions": (VERSION + 1, VERSION + 3)}, "version"),
        ({"namespace": OTHER_NAMESPACE}, "namespace"),
        ({"layout": "other"}, "layout"),
        ({"paths": ("nixl", "carrier_pigeon")}, "path"),
    ],
)
def test_who_could_use_nothing_is_refused(fields: dict[str, object], code: str) -> None:
    async def test() -> None:
        async with serving(CountingSource({"a": 100}, namespace=NAMESPACE, layout="here")) as s:
            asker = s.asker()
            assert await asker.refused(hello(asker, **fields)) == code
            assert await asker.refused(Lookup(0, 0, ("a",))) == "unknown"
            welcome = await asker.hello(namespace=NAMESPACE, layout="here")
            assert welcome.path == "zmq"
            assert await s.asker().hello()

    run(test)


def test_a_hello_of_another_version_is_told_which_ones_this_node_speaks() -> None:
    async def test() -> None:
        async with serving() as s:
            asker = s.asker()
            # Version 9, kind Hello, number 5, versions 7 to 9.
            await asker.send(b"\x94\x09\x01\x05\x92\x07\x09")
            refused = await asker.answer(5, Refused)
            assert (refused.code, refused.versions) == ("version", VERSIONS)
            assert "{} to {}".format(*VERSIONS) in refused.text

    run(test)


def test_who_speaks_another_version_or_finds_no_room_is_in_the_log_once(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with serving(max_sessions=1, idle_s=600.0) as s:
            await s.asker().hello()
            for _ in range(3):
                # As above: what a node of another version sends.
                asker = s.asker()
                await asker.send(b"\x94\x09\x01\x05\x92\x07\x09")
                assert (await asker.answer(5, Refused)).code == "version"
                assert await asker.refused(hello(asker)) == "full"

    run(test)
    said = [message for message in caplog.messages if "refused 127.0.0.1: " in message]
    assert len(said) == 2
    assert "this node speaks versions" in said[0]
    assert "the other one 7 to 9" in said[0]
    assert said[1].endswith("this node serves 1 peers already")


def test_a_node_does_not_serve_itself() -> None:
    async def test() -> None:
        async with serving() as s:
            asker = s.asker(s.node)
            assert await asker.refused(hello(asker)) == "self"

    run(test)


def test_a_restarted_asker_is_a_new_session_and_the_old_one_is_over() -> None:
    """LIV-17: leases and data connection of the old one end with the connection that it came over, and not those of the new one."""

    async def test() -> None:
        source = CountingSource({"a": 100, "b": 100})
        async with serving(source) as s:
            old, new = s.asker(), s.asker()
            await old.hello()
            await old.look_up("a")
            await new.hello()
            await new.look_up("b")
            old.close()
            await until(lambda: s.counts["sessions_now"] == 1)
            assert [loan.name for loan in source.out] == ["b"]
            assert [sender.closed for sender in s.senders] == [True, False]
            assert await new.fetch(("a", 100), ("b", 100)) == ((FOUND, 100),) * 2

    run(test)


def test_a_node_that_comes_twice_has_two_sessions_and_none_ends_the_other() -> None:
    """As one does that knows this node by two addresses, until it notices."""

    async def test() -> None:
        source = CountingSource({"a": 100})
        async with serving(source) as s:
            first, second = s.asker(), s.asker()
            second.node = first.node
            for asker in (first, second, first, second):
                await asker.hello()
                assert s.counts["sessions_now"] == (1 if asker is first and s.counts["sessions"] == 1 else 2)
            for asker in (first, second):
                assert await asker.look_up("a") == (100,)
                assert await asker.fetch(("a", 100)) == ((FOUND, 100),)
                assert asker.unasked == []
            second.close()
            await until(lambda: s.counts["sessions_now"] == 1)
            assert await first.fetch(("a", 100)) == ((FOUND, 100),)

    run(test)


def test_what_others_leased_is_theirs_no_more_when_all_sessions_are_ended() -> None:
    async def test() -> None:
        source = CountingSource({"a": 100})
        async with serving(source) as s:
            askers = [s.asker() for _ in range(3)]
            for asker in askers:
                await asker.hello()
                await asker.look_up("a")
            s.server.end_sessions("namespace", "the records are others")
            assert source.out == []
            source.remove("a")
            for asker in askers:
                assert await asker.receive() == Goodbye("namespace", "the records are others")
                assert await asker.refused(Lookup(0, 0, ("a",))) == "unknown"
                await asker.hello()
                assert await asker.look_up("a") == (0,)

    run(test)


def test_a_second_hello_on_a_connection_begins_anew() -> None:
    async def test() -> None:
        source = CountingSource({"a": 100})
        async with serving(source) as s:
            asker = s.asker()
            await asker.hello()
            await asker.look_up("a")
            asker.node = os.urandom(16)
            await asker.hello()
            assert source.out == []
            assert s.counts["sessions_now"] == 1
            assert await asker.fetch(("a", 100)) == ((FOUND, 100),)

    run(test)


def test_a_session_ends_with_its_connection() -> None:
    """And one whose connection gets the descriptor of the old one is not taken for it."""

    async def test() -> None:
        source = CountingSource({"a": 100})
        async with serving(source) as s:
            for _ in range(20):
                asker = s.asker()
                await asker.hello()
                assert await asker.look_up("a") == (100,)
                await asyncio.sleep(0)
                assert len(source.out) == s.counts["sessions_now"]
                asker.close()
            await until(lambda: not s.counts["sessions_now"])
            assert source.out == []
            assert all(sender.closed for sender in s.senders)

    run(test)


def test_who_says_hello_and_goes_leaves_no_session() -> None:
    """Also where it is gone before its Hello is read."""

    async def test() -> None:
        async with serving() as s:
            for number in range(60):
                asker = s.asker()
                await asker.send(encode(dataclasses.replace(hello(asker), number=1)))
                if number % 2:
                    # The loop, and the server with it, stands still while the connection comes and goes.
                    time.sleep(0.01)
                else:
                    await asyncio.sleep(0.002)
                asker.close()
                if number % 2:
                    time.sleep(0.01)
            await until(lambda: not s.guard.connections)
            await until(lambda: not s.counts["sessions_now"])
            assert all(sender.closed for sender in s.senders)
            assert await s.asker().hello()

    run(test)


def test_an_asker_that_connects_again_and_again_is_served_at_last_in_one_session() -> None:
    """LIV-17: what was said on connections that are gone may be read after what is said on the last one, and must not end its session."""

    async def test() -> None:
        source = CountingSource({"a": 100})
        async with serving(source) as s:
            node = os.urandom(16)
            for _ in range(30):
                # The loop, and the server with it, stands still while connections come and go.
                for _ in range(3):
                    gone = s.asker(node)
                    await gone.send(encode(dataclasses.replace(hello(gone), number=1)))
                    time.sleep(0.003)
                    gone.close()
                last = s.asker(node)
                await last.hello()
                assert await last.fetch(("a", 100)) == ((FOUND, 100),)
                await until(lambda: s.counts["sessions_now"] == 1)
                assert await last.fetch(("a", 100)) == ((FOUND, 100),)
                last.close()

    run(test)


def test_whoever_takes_all_places_and_asks_in_each_keeps_nobody_out() -> None:
    """Each under another name, so that it cannot be told from as many peers of one host."""

    async def test() -> None:
        async with serving(CountingSource({"a": 100}), max_sessions=4, idle_s=0.5) as s:
            hog = [s.asker() for _ in range(4)]
            for one in hog:
                await one.hello()
            over = asyncio.Event()

            async def ask_in_each() -> None:
                while not over.is_set():
                    for number, one in enumerate(hog):
                        await one.send(encode(Lookup(number + 1, 0, ("none",))))
                    await asyncio.sleep(0.05)

            asking = asyncio.ensure_future(ask_in_each())
            try:
                good = s.asker()
                end_s = time.monotonic() + 20
                while isinstance(await good.ask(hello(good), object), Refused):
                    assert time.monotonic() < end_s
                    await asyncio.sleep(0.05)
                assert await good.look_up("a") == (100,)
                assert s.counts["sessions_now"] == 4
            finally:
                over.set()
                await asking

    run(test)
