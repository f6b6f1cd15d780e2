"""Over NIXL no loan goes back before the transfer is over, whatever becomes of the session; targets are what the peer may be written."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
from typing import Any

import pytest
from p2p_bench import PATIENCE_S, run, until
from p2p_fake_plane import FakePlane
from p2p_serving import Asker, Serving, serving
from p2p_sources import CountingSource, content

from kvstore_sdk.backend import UnavailableError
from kvstore_sdk_backends.p2p.messages import FAILED, FOUND, VERSIONS, Fetch, Hello, Lookup, Ready, Refused, Result, Target, encode

BASE = 1 << 20


async def begin(s: Serving) -> Asker:
    """A session with a target of two regions, whose number is 2."""
    asker = s.asker()
    assert (await asker.hello(paths=("nixl", "zmq"))).path == "nixl"
    await asker.ask(target(), Ready)
    return asker


def target(agent: bytes = b"agent") -> Target:
    return Target(0, agent, ((BASE, 1000), (2 * BASE, 5000)))


def fetch(*items: tuple[str, int, int, int], target: int = 2, deadline_s: float = 60.0) -> Fetch:
    return Fetch(0, target, round(deadline_s * 1000), items)


async def ask(asker: Asker, *items: tuple[str, int, int, int], **how: Any) -> tuple[tuple[int, int], ...]:
    return (await asker.ask(fetch(*items, **how), Result)).statuses


def test_records_are_written_where_the_asker_said() -> None:
    async def test() -> None:
        source, plane = CountingSource({"a": 100, "b": 200}), FakePlane()
        async with serving(source, plane=plane) as s:
            asker = await begin(s)
            [admitted] = plane.admitted.values()
            assert admitted == (b"agent", ((BASE, 1000), (2 * BASE, 5000)))
            assert await ask(asker, ("a", 100, 0, 900), ("b", 200, 1, 10)) == ((FOUND, 100), (FOUND, 200))
            assert plane.sent == [(content("a", 100), BASE + 900), (content("b", 200), 2 * BASE + 10)]

    run(test)


@pytest.mark.parametrize(
    ("item", "number"),
    [
        (("a", 100, 0, 901), 2),
        (("a", 100, 0, 2**64 - 50), 2),
        (("a", 100, 2, 0), 2),
        (("a", 100, 0, 0), 1),
        (("a", 100, 0, 0), 3),
        (("a", 100, 0, 0), 0),
    ],
)
def test_nothing_is_written_outside_of_the_target(item: tuple[str, int, int, int], number: int) -> None:
    async def test() -> None:
        source, plane = CountingSource({"a": 100}), FakePlane()
        async with serving(source, plane=plane) as s:
            asker = await begin(s)
            assert await ask(asker, item, target=number) == ((FAILED, 0),)
            assert plane.sent == []
            assert source.lent == 0

    run(test)


def test_nothing_is_written_before_there_is_a_target_or_after_one_that_cannot_be_read() -> None:
    async def test() -> None:
        source, plane = CountingSource({"a": 100}), FakePlane()
        async with serving(source, plane=plane) as s:
            asker = s.asker()
            await asker.hello(paths=("nixl",))
            # Questions are numbered from 1, and this is the second.
            assert await ask(asker, ("a", 100, 0, 0)) == ((FAILED, 0),)
            await asker.ask(target(), Ready)
            assert await ask(asker, ("a", 100, 0, 0), target=3) == ((FOUND, 100),)
            assert await asker.refused(target(b"bent")) == "path"
            for number in (3, 5):
                assert await ask(asker, ("a", 100, 0, 0), target=number) == ((FAILED, 0),)
            await asker.ask(target(), Ready)
            assert await ask(asker, ("a", 100, 0, 0), target=3) == ((FAILED, 0),)
            assert await ask(asker, ("a", 100, 0, 0), target=8) == ((FOUND, 100),)

    run(test)


def test_a_target_that_cannot_be_read_for_now_does_not_end_the_session() -> None:
    async def test() -> None:
        source, plane = CountingSource({"a": 100}), FakePlane()
        # So that the session is not ended for it meanwhile.
        async with serving(source, plane=plane, lease_s=600.0) as s:
            asker = s.asker()
            await asker.hello(paths=("nixl",))
            admit, plane.admit = plane.admit, _raising(UnavailableError("p2p: admit: the child ended meanwhile; try again"))  # type: ignore[method-assign]
            assert await asker.refused(target()) == "busy"
            assert await ask(asker, ("a", 100, 0, 0), target=2) == ((FAILED, 0),)
            plane.admit = admit  # type: ignore[method-assign]
            await asker.ask(target(), Ready)
            assert await ask(asker, ("a", 100, 0, 0), target=4) == ((FOUND, 100),)

    run(test)


def test_targets_that_cannot_be_read_are_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with serving(plane=FakePlane()) as s:
            asker = s.asker()
            await asker.hello(paths=("nixl",))
            for _ in range(40):
                assert await asker.refused(target(b"bent")) == "path"

    with caplog.at_level(logging.WARNING):
        run(test)
    assert len([record for record in caplog.records if "nixl does not reach" in record.getMessage()]) == 1


def test_while_the_data_plane_is_down_sessions_go_over_zmq() -> None:
    """A record that is found and cannot be loaded is worse than none."""

    async def test() -> None:
        source, plane = CountingSource({"a": 100}), FakePlane()
        async with serving(source, plane=plane, lease_s=0.5) as s:
            before, beside = await begin(s), s.asker()
            await beside.hello(paths=("zmq",))
            plane.up = False
            assert (await before.receive()).code == "path"
            other, strict = s.asker(), s.asker()
            assert (await other.hello(paths=("nixl", "zmq"))).path == "zmq"
            assert await other.fetch(("a", 100)) == ((FOUND, 100),)
            assert await strict.refused(Hello(0, VERSIONS, strict.node, "", "", ("nixl",))) == "busy"
            plane.up = True
            again = await begin(s)
            assert await ask(again, ("a", 100, 0, 0)) == ((FOUND, 100),)
            assert await beside.fetch(("a", 100)) == ((FOUND, 100),)
            assert s.counts["sessions_now"] == 3

    run(test)


def _raising(error: Exception) -> Any:
    def admit(*given: Any) -> None:
        raise error

    return admit


def test_loans_are_out_and_there_is_no_result_while_a_transfer_is_in_doubt() -> None:
    async def test() -> None:
        source, plane = CountingSource({"a": 100, "b": 200}), FakePlane()
        async with serving(source, plane=plane) as s:
            asker = await begin(s)
            plane.mode = "doubt"
            await asker.send(encode(dataclasses.replace(fetch(("a", 100, 0, 0), ("b", 200, 1, 0), deadline_s=1.0), number=1001)))
            await until(s.server._fetches.unfinished)
            # The session goes on, and answers other questions, long after the deadline of this one.
            await asyncio.sleep(1.1)
            assert await asker.look_up("a") == (100,)
            assert asker.unasked == []
            assert sorted(loan.name for loan in source.out) == ["a", "a", "b"]
            plane.end_doubts()
            await until(lambda: len(source.out) < 2)

    run(test)


def test_a_transfer_that_lands_late_has_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is what settles the doubts of an asker that waits no more."""
    monkeypatch.setattr("kvstore_sdk_backends.p2p.fetches._LATE_S", PATIENCE_S)

    async def test() -> None:
        source, plane = CountingSource({"a": 100}), FakePlane()
        async with serving(source, plane=plane) as s:
            asker = await begin(s)
            plane.mode = "hold"
            asking = asyncio.ensure_future(ask(asker, ("a", 100, 0, 0), deadline_s=2.0))
            await until(lambda: plane.sending)
            await asyncio.sleep(2.1)
            assert not asking.done()
            plane.free.set()
            assert await asking == ((FOUND, 100),)

    run(test)


@pytest.mark.parametrize("mode", ["doubt", "unknown"])
def test_a_transfer_that_broke_off_ends_the_session_without_a_result(mode: str) -> None:
    """INT-07: bytes on their way land all the same, so the asker must not take its places for free."""

    async def test() -> None:
        source, plane = CountingSource({"a": 100}), FakePlane()
        async with serving(source, plane=plane) as s:
            asker = await begin(s)
            plane.mode = mode
            await asker.send(encode(dataclasses.replace(fetch(("a", 100, 0, 0)), number=1001)))
            if mode == "doubt":
                await until(s.server._fetches.unfinished)
                plane.end_doubts()
            assert (await asker.receive()).code == "failed"
            assert await asker.refused(Lookup(0, 0, ("a",))) == "unknown"
            await until(lambda: not source.out)

    run(test)


def test_a_transfer_that_fails_by_a_fault_of_this_node_ends_the_session_without_a_result(caplog: pytest.LogCaptureFixture) -> None:
    """INT-07: nobody knows whether it was begun, so nobody may say that nothing lands."""

    async def test() -> None:
        plane = FakePlane()
        async with serving(CountingSource({"a": 100}), plane=plane) as s:
            asker = await begin(s)
            plane.mode = ZeroDivisionError("a fault of ours")
            await asker.send(encode(dataclasses.replace(fetch(("a", 100, 0, 0)), number=1001)))
            assert (await asker.receive()).code == "failed"

    with caplog.at_level(logging.CRITICAL):
        run(test)


def test_where_no_more_threads_can_be_begun_no_result_comes_before_the_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """INT-07: an asker that was told that nothing lands uses its memory for something else."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def test() -> None:
        source, plane = CountingSource({"a": 100, "b": 200}), FakePlane()
        async with serving(source, plane=plane) as s:
            stuck, other = await begin(s), await begin(s)
            plane.mode = "hold"
            asking = [asyncio.ensure_future(ask(stuck, ("a", 100, 0, 0)))]
            await until(lambda: plane.sending == 1)
            monkeypatch.setattr(threading.Thread, "start", refuse)
            asking.append(asyncio.ensure_future(ask(other, ("b", 200, 1, 0))))
            await until(lambda: len(source.out) == 2)
            await asyncio.sleep(0.1)
            assert not any(one.done() for one in asking)
            monkeypatch.undo()
            plane.free.set()
            assert await asyncio.gather(*asking) == [((FOUND, 100),), ((FOUND, 200),)]
            assert len(plane.sent) == 2
            await until(lambda: not source.out)

    run(test)


def test_a_session_that_ends_leaves_its_loans_out_until_its_transfers_are_over() -> None:
    async def test() -> None:
        source, plane = CountingSource({"a": 100}), FakePlane()
        async with serving(source, plane=plane) as s:
            asker = await begin(s)
            plane.mode = "hold"
            await asker.send(encode(dataclasses.replace(fetch(("a", 100, 0, 0)), number=1001)))
            await until(lambda: plane.sending)
            asker.close()
            await until(lambda: plane.dropped)
            assert s.counts["sessions_now"] == 0
            assert [loan.name for loan in source.out] == ["a"]
            plane.free.set()
            await until(lambda: not source.out)
            assert plane.fenced == 0

    run(test)


def test_transfers_that_do_not_end_after_their_session_are_fenced() -> None:
    """A peer that is stopped in the middle keeps memory of this node for a while, and not for good."""

    async def test() -> None:
        source, plane = CountingSource({"a": 100}), FakePlane()
        async with serving(source, plane=plane, fence_after_s=0.3) as s:
            asker = await begin(s)
            plane.mode = "doubt"
            await asker.send(encode(dataclasses.replace(fetch(("a", 100, 0, 0)), number=1001)))
            await until(s.server._fetches.unfinished)
            asker.close()
            await until(lambda: not source.out)
            assert plane.fenced == s.counts["fences"] == 1

    run(test)


def test_transfers_of_a_session_whose_last_target_was_refused_are_fenced_too() -> None:
    async def test() -> None:
        source, plane = CountingSource({"a": 100}), FakePlane()
        async with serving(source, plane=plane, fence_after_s=0.3) as s:
            asker = await begin(s)
            plane.mode = "doubt"
            await asker.send(encode(dataclasses.replace(fetch(("a", 100, 0, 0)), number=1001)))
            await until(s.server._fetches.unfinished)
            plane.up = False
            assert await asker.refused(target()) == "busy"
            asker.close()
            await until(lambda: not source.out)
            assert plane.fenced == s.counts["fences"] == 1

    run(test)


def test_what_took_its_time_to_be_sealed_is_not_written_once_there_is_another_target(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        source, plane = CountingSource({"a": 100, "b": 200}), FakePlane()
        sealing, going_on = threading.Event(), threading.Event()

        def seal(lent: Any) -> Any:
            sealing.set()
            going_on.wait(PATIENCE_S)
            return dict(lent)

        async with serving(source, plane=plane) as s:
            asker = await begin(s)
            monkeypatch.setattr("kvstore_sdk_backends.p2p.fetches._sealed", seal)
            asking = asyncio.ensure_future(ask(asker, ("a", 100, 0, 0)))
            await until(sealing.is_set)
            await asker.ask(dataclasses.replace(target(), regions=((5 * BASE, 1000),)), Ready)
            going_on.set()
            assert await asking == ((FAILED, 0),)
            assert plane.sent == []
            await until(lambda: not source.out)

    run(test)


def test_one_session_occupies_so_many_threads_and_the_next_one_is_served() -> None:
    async def test() -> None:
        source, plane = CountingSource({"a": 100}), FakePlane()
        async with serving(source, plane=plane) as s:
            stuck, other = await begin(s), await begin(s)
            plane.mode = "hold"
            for number in range(1001, 1041):
                await stuck.send(encode(dataclasses.replace(fetch(("a", 100, 0, 0)), number=number)))
            await until(lambda: plane.sending == 2)
            plane.mode = "land"
            assert await ask(other, ("a", 100, 0, 0)) == ((FOUND, 100),)
            plane.free.set()
            for number in range(1001, 1041):
                assert (await stuck.answer(number, Result)).statuses == ((FOUND, 100),)
            assert plane.most_sending <= 3

    run(test)


def test_a_session_that_the_data_plane_does_not_know_any_more_ends() -> None:
    async def test() -> None:
        source, plane = CountingSource({"a": 100}), FakePlane()
        async with serving(source, plane=plane) as s:
            asker = await begin(s)
            plane.mode = UnavailableError("p2p: send: the session is not admitted any more")
            await asker.send(encode(dataclasses.replace(fetch(("a", 100, 0, 0)), number=1001)))
            assert (await asker.receive()).code == "failed"
            assert await asker.refused(Lookup(0, 0, ("a",))) == "unknown"
            await until(lambda: not source.out)

    run(test)


def test_more_targets_than_can_be_read_are_refused() -> None:
    async def test() -> None:
        plane = FakePlane()
        async with serving(plane=plane) as s:
            asker = s.asker()
            await asker.hello(paths=("nixl",))
            admit, plane.admit = plane.admit, lambda *given: (plane.free.wait(30.0), admit(*given))[1]  # type: ignore[method-assign]
            for number in range(1001, 1006):
                await asker.send(encode(dataclasses.replace(target(), number=number)))
            assert [(await asker.answer(number, Refused)).code for number in (1003, 1004, 1005)] == ["busy"] * 3
            plane.free.set()
            for number in (1001, 1002):
                await asker.answer(number, Ready)

    run(test)


def test_a_session_that_ends_while_its_target_is_read_is_forgotten_by_the_data_plane() -> None:
    async def test() -> None:
        plane = FakePlane()
        async with serving(plane=plane) as s:
            asker = s.asker()
            await asker.hello(paths=("nixl",))
            admit, plane.admit = plane.admit, lambda *given: (plane.free.wait(30.0), admit(*given))[1]  # type: ignore[method-assign]
            await asker.send(encode(dataclasses.replace(target(), number=1001)))
            await until(lambda: any(session.targets_pending for session in s.server._sessions))
            asker.close()
            await until(lambda: not s.counts["sessions_now"])
            plane.free.set()
            await until(lambda: plane.dropped)
            assert plane.admitted == {}

    run(test)


@pytest.mark.parametrize("regions", [((2 * BASE, 5000), (3 * BASE, 5000)), ((2 * BASE, 5000),)], ids=["others", "fewer"])
def test_what_waited_for_its_turn_is_not_written_by_the_regions_of_a_later_target(regions: tuple[tuple[int, int], ...]) -> None:
    async def test() -> None:
        source, plane = CountingSource({"a": 100, "b": 200}), FakePlane()
        async with serving(source, plane=plane, session_bytes=150) as s:
            asker = await begin(s)
            plane.mode = "hold"
            for number, item in ((1001, ("a", 100, 0, 0)), (1002, ("b", 200, 1, 64))):
                await asker.send(encode(dataclasses.replace(fetch(item), number=number)))
            await until(lambda: plane.sending == 1 and s.counts["fetches"] == 2)
            await asker.ask(dataclasses.replace(target(), regions=regions), Ready)
            plane.free.set()
            assert (await asker.answer(1001, Result)).statuses == ((FOUND, 100),)
            assert (await asker.answer(1002, Result)).statuses == ((FAILED, 0),)
            assert plane.sent == [(content("a", 100), BASE)]
            assert source.out == []
            # Nor what names the earlier one as it comes. What names the later one is.
            assert await ask(asker, ("b", 200, 0, 64)) == ((FAILED, 0),)
            assert await ask(asker, ("b", 200, 0, 64), target=3) == ((FOUND, 200),)
            assert plane.sent[1] == (content("b", 200), 2 * BASE + 64)

    run(test)


def test_a_target_ends_what_its_node_had_in_another_session() -> None:
    """One agent is written to in one session: that of a connection which was lost unnoticed is not in the way of the next one."""

    async def test() -> None:
        source, plane = CountingSource({"a": 100}), FakePlane()
        async with serving(source, plane=plane) as s:
            old, beside = await begin(s), await begin(s)
            [kept] = [session for session in plane.admitted if session not in list(plane.admitted)[:1]]
            taken: list[bytes] = []

            def admit(session: bytes, *given: Any) -> None:
                # As a real one does, which takes an agent once.
                assert list(plane.admitted) == [kept]
                taken.append(session)
                FakePlane.admit(plane, session, *given)

            plane.admit = admit  # type: ignore[method-assign]
            new = s.asker(old.node)
            await new.hello(paths=("nixl",))
            assert s.counts["sessions_now"] == 3
            await new.ask(target(), Ready)
            assert (await old.receive()).code == "target"
            assert sorted(plane.admitted) == sorted([kept, *taken])
            assert await ask(new, ("a", 100, 0, 0)) == ((FOUND, 100),)
            assert await ask(beside, ("a", 100, 0, 0)) == ((FOUND, 100),)

    run(test)


def test_closing_fences_what_does_not_end() -> None:
    async def test() -> None:
        source, plane = CountingSource({"a": 100}), FakePlane()
        async with serving(source, plane=plane, close_s=0.5) as s:
            asker = await begin(s)
            plane.mode = "doubt"
            await asker.send(encode(dataclasses.replace(fetch(("a", 100, 0, 0)), number=1001)))
            await until(s.server._fetches.unfinished)
            await s.server.close()
            assert plane.fenced == 1
            assert source.out == []

    run(test)
