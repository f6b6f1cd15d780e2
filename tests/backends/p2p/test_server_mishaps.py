"""What goes wrong in a node itself is an answer to whoever asked, at once: nobody waits for a deadline."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import socket
from collections.abc import Sequence

import pytest
from p2p_bench import run, until
from p2p_fake_plane import FakePlane
from p2p_serving import serving
from p2p_sources import CountingSource
from test_serving_nixl import begin, fetch, target

from kvstore_sdk.backend import Loan
from kvstore_sdk_backends.p2p.messages import FAILED, FOUND, VERSIONS, Hello, Lookup, Ready, Release, Result, encode


class BrokenSource(CountingSource):
    """Breaks its contract, by raising, while it is `broken`: `sizes`, or `lend`."""

    broken = ""

    def sizes(self, names: Sequence[str]) -> list[int]:
        if self.broken == "sizes":
            raise NameError("a fault")
        return super().sizes(names)

    def lend(self, names: Sequence[str]) -> list[Loan | None]:
        if self.broken == "lend":
            raise NameError("a fault")
        return super().lend(names)


@pytest.mark.parametrize("broken", ["sizes", "lend"])
def test_a_fetch_and_a_look_up_that_fail_are_answered(broken: str, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        source = BrokenSource({"a": 100})
        async with serving(source) as s:
            asker = s.asker()
            await asker.hello()
            for _ in range(3):
                source.broken = broken
                assert await asker.fetch(("a", 100), deadline_s=600.0) == ((FAILED, 0),)
                assert await asker.refused(Lookup(0, 0, ("a",))) == "busy"
                source.broken = ""
                assert await asker.fetch(("a", 100)) == ((FOUND, 100),)
                await asker.take(1)
            assert s.counts["sessions_now"] == 1

    run(test)
    said = [record.getMessage() for record in caplog.records if record.name.endswith("p2p.server")]
    # Each once, with where it happened.
    assert sorted(said) == sorted(set(said))
    assert "p2p: a message could not be answered" in said
    assert all(record.exc_info for record in caplog.records)


def test_a_release_that_fails_is_no_news_to_its_peer() -> None:
    async def test() -> None:
        source = CountingSource({"a": 100})
        async with serving(source) as s:
            asker = s.asker()
            await asker.hello()
            assert await asker.look_up("a") == (100,)
            give_back = source.give_back

            def broken(loans: Sequence[Loan]) -> None:
                give_back(loans)
                raise NameError("a fault")

            source.give_back = broken  # type: ignore[method-assign]
            await asker.send(encode(Release(("a",))))
            assert await asker.look_up("b") == (0,)
            assert asker.unasked == []
            source.give_back = give_back  # type: ignore[method-assign]

    run(test)


def test_a_fetch_over_nixl_that_fails_ends_the_session_since_it_may_still_land() -> None:
    async def test() -> None:
        source, plane = BrokenSource({"a": 100}), FakePlane()
        async with serving(source, plane=plane) as s:
            asker = await begin(s)
            source.broken = "sizes"
            await asker.send(encode(dataclasses.replace(fetch(("a", 100, 0, 0)), number=9)))
            assert (await asker.receive()).code == "failed"
            assert s.counts["sessions_now"] == 0

    run(test)


def test_a_target_whose_reading_fails_is_refused_for_now() -> None:
    async def test() -> None:
        source, plane = CountingSource({"a": 100}), FakePlane()
        async with serving(source, plane=plane) as s:
            asker = s.asker()
            await asker.hello(paths=("nixl",))
            admit = plane.admit

            def broken(*arguments: object) -> None:
                raise NameError("a fault")

            plane.admit = broken  # type: ignore[method-assign]
            assert await asker.refused(target()) == "busy"
            plane.admit = admit  # type: ignore[method-assign]
            await asker.ask(target(), Ready)
            result = await asker.ask(fetch(("a", 100, 0, 0), target=3), Result)
            assert result.statuses == ((FOUND, 100),)

    run(test)


def test_a_peer_of_whose_connection_nothing_is_known_costs_no_line_each(caplog: pytest.LogCaptureFixture) -> None:
    """ZMTP 1.0 has no properties, and libzmq still speaks it: neither host nor descriptor of such a connection is told."""

    async def test() -> None:
        source = CountingSource({"a": 100})
        async with serving(source) as s:
            host, port = s.endpoint.removeprefix("tcp://").split(":")
            with socket.create_connection((host, int(port))) as stranger:
                stranger.sendall(b"\x01\0")
                await asyncio.sleep(0.2)
                for hello in (encode(Hello(1, VERSIONS, b"n" * 16, "", "", ("zmq",))), b"\x94\x09\x01\x05\x92\x07\x09"):
                    stranger.sendall(50 * (bytes([len(hello) + 1, 0]) + hello))
                await until(lambda: any("speaks version" in message for message in caplog.messages))
                asker = s.asker()
                await asker.hello()
                assert await asker.look_up("a") == (100,)
                assert s.counts["sessions_now"] == 1

    with caplog.at_level(logging.INFO):
        run(test)
    assert not [record for record in caplog.records if record.exc_info]
    assert len([message for message in caplog.messages if "refused a connection: this node speaks version" in message]) == 1
