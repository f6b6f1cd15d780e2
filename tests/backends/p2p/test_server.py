"""A server answers a good asker, whatever the others do."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time

import pytest
from p2p_bench import PATIENCE_S, run, until
from p2p_serving import serving
from p2p_sources import CountingSource, content

from kvstore_sdk_backends.p2p.messages import (
    BUSY,
    FAILED,
    FOUND,
    MISSING,
    WRONG_SIZE,
    Cancel,
    Found,
    Goodbye,
    Lookup,
    Ready,
    Refused,
    Release,
    Result,
    Target,
    encode,
)

MIB = 1 << 20


def sizes(count: int, size_bytes: int) -> dict[str, int]:
    return {f"n{number}": size_bytes for number in range(count)}


def test_a_session_looks_up_and_fetches() -> None:
    async def test() -> None:
        source = CountingSource({"a": 5000, "b": 100, "c": MIB})
        async with serving(source) as s:
            asker = s.asker()
            welcome = await asker.hello()
            assert (welcome.node, welcome.path) == (s.node, "zmq")
            assert await asker.look_up("a", "x", "b") == (5000, 0, 100)
            statuses = await asker.fetch(("a", 5000), ("x", 7), ("b", 99), ("c", MIB))
            assert statuses == ((FOUND, 5000), (MISSING, 0), (WRONG_SIZE, 100), (FOUND, MIB))
            records = await asker.take(2)
            assert sorted(records.values(), key=len) == [content("a", 5000), content("c", MIB)]
            assert [index for _, index in sorted(records)] == [0, 3]
            # That of "b" is as it was: it was asked for in another size.
            assert [loan.name for loan in source.out] == ["b"]

    run(test)


def test_where_nothing_is_served_nobody_is_kept_waiting() -> None:
    async def test() -> None:
        async with serving() as s:
            asker = s.asker()
            await asker.hello()
            # An hour: the answer comes, or the test fails.
            assert await asker.look_up("a", "b", wait_ms=3_600_000) == (0, 0)
            assert s.counts["waits_now"] == 0

    run(test)


def test_records_larger_than_all_bounds_go_one_after_another() -> None:
    async def test() -> None:
        source = CountingSource(sizes(12, 3 * MIB))
        async with serving(source, session_bytes=4 * MIB) as s:
            asker = s.asker()
            await asker.hello()
            taking = asyncio.ensure_future(asker.take(12))
            assert await asker.fetch(*sizes(12, 3 * MIB).items()) == ((FOUND, 3 * MIB),) * 12
            assert {index: record for (_, index), record in (await taking).items()} == {
                index: content(f"n{index}", 3 * MIB) for index in range(12)
            }
            assert source.out == []

    run(test)


def test_leases_end_by_release_goodbye_and_time() -> None:
    """LEAK-02"""

    async def test() -> None:
        source = CountingSource({"a": 100, "b": 100, "c": 100})
        async with serving(source) as s:
            asker = s.asker()
            await asker.hello()
            await asker.look_up("a", "b")
            await asker.send(encode(Release(("a", "x"))))
            await until(lambda: [loan.name for loan in source.out] == ["b"])
            await asker.send(encode(Goodbye("closing", "")))
            await until(lambda: not s.counts["sessions_now"])
            assert source.out == []
            await asker.hello()
            object.__setattr__(s.server._limits, "lease_s", 0.2)
            await asker.look_up("c")
            assert source.lent == 3
            await until(lambda: not source.out)
            assert s.counts["sessions_now"] == 1

    run(test)


def test_a_look_up_that_waits_is_answered_when_the_last_record_is_ready() -> None:
    async def test() -> None:
        source = CountingSource(sizes(3, 100))
        source.remove("n1")
        async with serving(source) as s:
            asker, other = s.asker(), s.asker()
            await asker.hello()
            await other.hello()
            waiting = asyncio.ensure_future(asker.look_up("n0", "n1", "n2", wait_ms=60_000))
            await until(lambda: s.counts["waits_now"] == 1)
            assert await other.look_up("n1") == (0,)
            assert not waiting.done()
            source._end -= 100
            source.add("n1", 100)
            assert await waiting == (100, 100, 100)
            assert s.counts["waits_now"] == 0
            assert s.counts["leases_now"] == 3

    run(test)


def test_a_look_up_that_waits_in_vain_says_what_is_there() -> None:
    async def test() -> None:
        async with serving(CountingSource({"a": 100})) as s:
            asker = s.asker()
            await asker.hello()
            began_s = time.monotonic()
            assert await asker.look_up("x", "a", wait_ms=300) == (0, 100)
            assert time.monotonic() - began_s >= 0.3

    run(test)


def test_one_wait_too_many_is_answered_at_once() -> None:
    async def test() -> None:
        async with serving(CountingSource({"a": 100}), session_waits=1) as s:
            asker = s.asker()
            await asker.hello()
            await asker.send(encode(Lookup(1000, 60_000, ("x",))))
            await until(lambda: s.counts["waits_now"] == 1)
            assert await asker.look_up("x", "a", wait_ms=60_000) == (0, 100)
            assert s.counts["waits_now"] == 1

    run(test)


def test_a_session_that_ends_waits_no_more() -> None:
    async def test() -> None:
        async with serving(CountingSource({"a": 100})) as s:
            asker = s.asker()
            await asker.hello()
            await asker.send(encode(Lookup(1000, 60_000, ("x",))))
            await until(lambda: s.counts["waits_now"] == 1)
            asker.close()
            await until(lambda: not s.counts["sessions_now"])
            assert s.counts["waits_now"] == 0

    run(test)


def test_a_record_that_is_spoilt_when_it_is_sealed_is_not_sent() -> None:
    async def test() -> None:
        source = CountingSource({"a": 100, "b": 200})
        source.spoilt.add("a")
        async with serving(source) as s:
            asker = s.asker()
            await asker.hello()
            assert await asker.fetch(("a", 100), ("b", 200)) == ((FAILED, 0), (FOUND, 200))
            assert list((await asker.take(1)).values()) == [content("b", 200)]
            assert source.sealed == ["a", "b"]
            assert source.out == []

    run(test)


def test_a_fetch_waits_for_records_that_are_all_lent_out() -> None:
    async def test() -> None:
        source = CountingSource(sizes(5, 100), most_loans=1)
        async with serving(source, loan_s=PATIENCE_S) as s:
            asker = s.asker()
            await asker.hello()
            assert await asker.fetch(*sizes(5, 100).items()) == ((FOUND, 100),) * 5
            [held] = source.lend(["n0"])
            assert held is not None
            waiting = asyncio.ensure_future(asker.fetch(("n1", 100)))
            assert await s.asker().hello()
            assert not waiting.done()
            source.give_back([held])
            assert await waiting == ((FOUND, 100),)
            [held] = source.lend(["n0"])
            assert held is not None
            assert await asker.fetch(("n1", 100), deadline_s=0.2) == ((BUSY, 100),)
            source.give_back([held])

    run(test)


def test_a_record_that_cannot_be_lent_for_long_is_busy() -> None:
    """Whoever asks may have another peer to ask, or compute it."""

    async def test() -> None:
        source = CountingSource({"a": 100}, most_loans=0)
        async with serving(source, loan_s=0.1) as s:
            asker = s.asker()
            await asker.hello()
            assert await asker.fetch(("a", 100)) == ((BUSY, 100),)

    run(test)


@pytest.mark.parametrize("limits", [{"session_fetches": 2}, {"session_items": 3}])
def test_one_fetch_too_many_is_busy(limits: dict[str, int]) -> None:
    async def test() -> None:
        source = CountingSource({"a": 100}, most_loans=0)
        async with serving(source, loan_s=PATIENCE_S, **limits) as s:
            asker = s.asker()
            await asker.hello()
            for number in (1001, 1002):
                await asker.send(encode(dataclasses.replace(asker.fetch_of(("a", 100)), number=number)))
            assert await asker.fetch(("a", 100), ("a", 100)) == ((BUSY, 0), (BUSY, 0))
            source.most_loans = 1
            for number in (1001, 1002):
                assert (await asker.answer(number, Result)).statuses == ((FOUND, 100),)
            assert await asker.fetch(("a", 100), ("a", 100)) == ((FOUND, 100), (FOUND, 100))

    run(test)


def test_frames_that_are_no_message_are_refused_and_too_many_end_the_session() -> None:
    async def test() -> None:
        source = CountingSource({"a": 100})
        async with serving(source, bad_frames=4) as s:
            asker, good = s.asker(), s.asker()
            await asker.hello()
            await good.hello()
            await asker.look_up("a")
            # The number of what is no question of an asker is that of the refusal, as far as it could be read.
            wrong = [((b"",), 0), ((os.urandom(100),), 0), ((encode(Found(71, (1,))),), 71), ((encode(Goodbye("closing", "")), b"more"), 0)]
            for frames, number in wrong:
                await asker.send(*frames)
                refused = await asker.answer(number, Refused)
                assert refused.code == "invalid"
                assert "\n" not in refused.text
            await until(lambda: s.counts["sessions_now"] == 1)
            assert source.out == []
            assert await good.fetch(("a", 100)) == ((FOUND, 100),)

    run(test)


def test_a_target_is_refused_where_data_takes_another_way() -> None:
    async def test() -> None:
        async with serving() as s:
            asker = s.asker()
            await asker.hello()
            assert await asker.refused(Target(0, b"agent", ((1, 1),))) == "path"

    run(test)


def test_strangers_hear_nothing_but_that_they_have_no_session() -> None:
    async def test() -> None:
        source = CountingSource({"a": 100})
        async with serving(source) as s:
            for question in (Lookup(0, 0, ("a",)), Lookup(0, 1000, ("x",)), s.asker().fetch_of(("a", 100)), Ready(0)):
                assert await s.asker().refused(question) == "unknown"
            stranger = s.asker()
            for message in (Release(("a",)), Goodbye("closing", ""), Cancel(1)):
                await stranger.send(encode(message))
            assert await stranger.refused(Lookup(0, 0, ("a",))) == "unknown"
            assert source.lent == 0

    run(test)


def test_closing_tells_the_askers_gives_all_loans_back_and_is_bounded() -> None:
    """LEAK-07: with a look-up that waits, a fetch that nobody reads, and leases."""

    async def test() -> None:
        source = CountingSource(sizes(40, MIB))
        async with serving(source) as s:
            asker = s.asker()
            await asker.hello()
            await asker.look_up(*sizes(10, 0))
            await asker.send(encode(Lookup(1000, 60_000, ("x",))))
            await asker.send(encode(dataclasses.replace(asker.fetch_of(*sizes(40, MIB).items()), number=1001)))
            await until(lambda: s.counts["sending_now"])
            async with asyncio.timeout(20.0):
                await s.server.close()
                await s.server.close()
            assert source.out == []
            # The last of what it says, though its socket is closed by now.
            while not isinstance(said := await asker.receive(), Goodbye):
                pass
            assert said == Goodbye("closing", "this node closes")

    run(test)


def test_a_look_up_that_waits_is_answered_at_once_when_it_is_called_off() -> None:
    async def test() -> None:
        source = CountingSource({"a": 100})
        async with serving(source) as s:
            asker, other = s.asker(), s.asker()
            for one in (asker, other):
                await one.hello()
                await one.send(encode(Lookup(1000, 600_000, ("a", "x"))))
            await until(lambda: s.counts["waits_now"] == 2)
            # Of another number, and of no question at all.
            await asker.send(encode(Cancel(1001)))
            assert await asker.look_up("a") == (100,)
            assert s.counts["waits_now"] == 2
            await asker.send(encode(Cancel(1000)))
            assert (await asker.answer(1000, Found)).sizes == (100, 0)
            assert s.counts["waits_now"] == 1
            # Once it is answered, that is without effect.
            await asker.send(encode(Cancel(1000)))
            source.add("x", 50)
            assert (await other.answer(1000, Found)).sizes == (100, 50)
            assert await asker.look_up("x") == (50,)
            assert asker.unasked == other.unasked == []

    run(test)


def test_a_server_whose_closing_is_cancelled_has_given_all_loans_back() -> None:
    async def test() -> None:
        source = CountingSource(sizes(40, MIB))
        async with serving(source) as s:
            asker = s.asker()
            await asker.hello()
            await asker.look_up(*sizes(10, 0))
            await asker.send(encode(dataclasses.replace(asker.fetch_of(*sizes(40, MIB).items()), number=1001)))
            await until(lambda: s.counts["sending_now"])
            closing = asyncio.ensure_future(s.server.close())
            await asyncio.sleep(0)
            closing.cancel()
            await asyncio.wait({closing})
            assert source.out == []

    run(test)
