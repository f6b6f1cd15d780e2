"""Loads over NIXL: where peers may write, that they are told, and what is in doubt when they do not say that they are done."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from typing import Any, cast

import pytest
from p2p_bench import until
from p2p_scripted import FakeLink, numbers

from kvstore_sdk.backend import Get, Region, TimedOutError, UnavailableError
from kvstore_sdk_backends.p2p import doubts as doubts_module
from kvstore_sdk_backends.p2p import landing as landing_module
from kvstore_sdk_backends.p2p.doubts import Doubts, LandingDoubt
from kvstore_sdk_backends.p2p.landing import InDoubtError, Landing
from kvstore_sdk_backends.p2p.link import Link, PeerRefusedError
from kvstore_sdk_backends.p2p.messages import BUSY, FOUND, Fetch, Ready, Result, Target
from kvstore_sdk_backends.p2p.plane import Plane

LIMIT_S = 20.0
BASE = 1 << 40


class FakePlane:
    """A data plane without a child: generations, regions, and how often it was told to expect something.

    Attributes:
        gone: Whether the child is, though `generation` still names it.
        unmapped: The regions that the child was told to let go of, with its generation.
    """

    def __init__(self) -> None:
        self.generation = 1
        self.gone = False
        self.unmapped: list[tuple[Region, int]] = []
        self.regions: list[Region] = []
        self.fences = self.targets = self.expected = 0
        self.dies_after_s = 0.0

    def add_region(self, region: Region) -> None:
        self.regions.append(region)

    def withhold(self, region: Region) -> None:
        self.regions.remove(region)

    def remove_region(self, region: Region) -> None:
        self.unmapped.append((region, self.generation))

    def target(self) -> Any:
        self.targets += 1
        regions = [(region, BASE * (place + 1), region.size_bytes) for place, region in enumerate(self.regions)]
        return (self.generation, b"agent", regions) if self.child else None

    @property
    def child(self) -> int:
        return 0 if self.gone else self.generation

    def expect(self, until_s: float) -> None:
        self.expected += 1

    def fence(self) -> None:
        self.fences += 1
        if self.dies_after_s:
            threading.Timer(self.dies_after_s, self._die).start()
        else:
            self._die()

    def _die(self) -> None:
        self.generation += 1


class Asker:
    """A landing over a fake plane, with one region, and a peer that answers Targets, and Fetches as told."""

    def __init__(self, region: Region, fetched: Callable[[Fetch], Any]) -> None:
        self.region = region
        self.plane = FakePlane()
        self.doubts = Doubts(self.plane)
        self.landing = Landing(cast(Plane, self.plane), self.doubts)
        self.landing.add_region(region)
        self.opened: list[LandingDoubt] = []
        self.ready: Callable[[Target], Any] = lambda question: Ready(question.number)
        self.link = FakeLink(lambda question: self.ready(question) if isinstance(question, Target) else fetched(question))

    async def fetch(self, *names: str, limit_s: float = LIMIT_S, link: FakeLink | None = None) -> Result:
        gets = [Get(name, (self.region.buffer(4096 * place, 100),)) for place, name in enumerate(names)]
        return await self.landing.fetch(cast(Link, link or self.link), gets, time.monotonic() + limit_s, self.opened)

    async def in_doubt(self, *names: str) -> InDoubtError:
        """A load whose time is up as soon as it was sent: the peer knows by then where to write."""
        await self.landing._tell(cast(Link, self.link), time.monotonic() + LIMIT_S)
        with pytest.raises(InDoubtError) as caught:
            await self.fetch(*names, limit_s=0.1)
        return caught.value

    @property
    def targets(self) -> list[Target]:
        return [message for message in self.link.asked if isinstance(message, Target)]


@pytest.fixture
def region() -> Iterator[Region]:
    made = Region(1 << 16)
    yield made
    made.close()


def run(step: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(step, 60))


def found(fetch: Fetch) -> Result:
    return Result(fetch.number, ((FOUND, 100),) * len(fetch.items))


def test_a_peer_is_told_once_where_to_write_and_then_what(region: Region) -> None:
    async def steps() -> None:
        asker = Asker(region, found)
        for _ in range(3):
            assert (await asker.fetch("a", "b")).statuses == ((FOUND, 100), (FOUND, 100))
        [target] = asker.targets
        assert (target.agent, target.regions) == (b"agent", ((BASE, region.size_bytes),))
        fetch = asker.link.asked[-1]
        assert (fetch.target, fetch.items) == (target.number, (("a", 100, 0, 0), ("b", 100, 0, 4096)))
        assert asker.plane.targets == 1
        assert asker.plane.expected > 0
        assert all(doubt.over for doubt in asker.opened)

    run(steps())


def test_an_answer_that_comes_as_its_load_is_given_up_settles_it(region: Region) -> None:
    async def steps() -> None:
        asker = Asker(region, lambda fetch: None)
        loading = asyncio.ensure_future(asker.fetch("a"))
        await until(lambda: asker.opened and asker.link.waiting)
        [answer] = asker.link._waiting
        answer.set_result(found(asker.link.asked[-1]))
        loading.cancel()
        await asyncio.wait({loading})
        assert loading.cancelled()
        assert asker.opened[0].over

    run(steps())


def test_a_buffer_that_is_not_registered_is_said_and_nobody_is_told_anything(region: Region) -> None:
    """A Target without a region is none, and what is told of others is of no use to this load."""

    async def steps() -> None:
        asker = Asker(region, found)
        asker.landing.remove_region(region)
        for _ in range(2):
            with pytest.raises(UnavailableError, match="register_region"):
                await asker.fetch("a")
            other = Region(4096)
            asker.landing.add_region(other)
        assert asker.link.asked == []
        assert asker.plane.targets == 0
        asker.landing.add_region(region)
        await asker.fetch("a")
        assert [len(target.regions) for target in asker.targets] == [3]

    run(steps())


def test_it_is_told_anew_when_that_has_changed(region: Region) -> None:
    async def steps() -> None:
        asker = Asker(region, found)
        await asker.fetch("a")
        other = Region(4096)
        asker.landing.add_region(other)
        await asker.fetch("a")
        assert len(asker.targets[-1].regions) == 2
        assert asker.targets[-1].number == asker.link.asked[-1].target
        asker.landing.remove_region(other)
        await asker.fetch("a")
        assert len(asker.targets) == 3
        other.close()

    run(steps())


def test_places_are_named_by_the_target_that_was_told_and_by_no_other(region: Region) -> None:
    """INT-07: two sessions begin, and a region goes between what the child says to one and to the other."""

    async def steps() -> None:
        asker, other = Asker(region, found), Region(4096)
        asking = threading.Barrier(2)
        answers = [
            (1, b"agent", [(other, BASE, 4096), (region, 2 * BASE, region.size_bytes)]),
            (1, b"agent", [(region, 2 * BASE, region.size_bytes)]),
        ]

        def target() -> Any:
            answer = answers.pop(0) if len(answers) > 1 else answers[0]
            if not asking.broken:
                with suppress(threading.BrokenBarrierError):
                    asking.wait(0.5)
                asking.abort()
            return answer

        asker.plane.target = target  # type: ignore[method-assign]
        links = [asker.link, FakeLink(lambda question: Ready(question.number) if isinstance(question, Target) else found(question))]
        await asyncio.gather(*(asker.fetch("a", link=link) for link in links), return_exceptions=True)
        for link in links:
            await asker.fetch("a", link=link)
            told = {question.number: question.regions for question in link.asked if isinstance(question, Target)}
            for question in link.asked:
                if isinstance(question, Fetch):
                    assert told[question.target][question.items[0][2]] == (2 * BASE, region.size_bytes)
        other.close()

    run(steps())


def test_another_child_takes_another_session(region: Region) -> None:
    """What a peer writes late for the child before must not find this one under the same session."""

    async def steps() -> None:
        asker = Asker(region, found)
        await asker.fetch("a")
        asker.plane.generation = 5
        with pytest.raises(UnavailableError, match="was restarted"):
            await asker.fetch("a")
        assert asker.link.ended
        assert len(asker.targets) == 1
        assert all(doubt.over for doubt in asker.opened)
        other = FakeLink(lambda question: Ready(question.number) if isinstance(question, Target) else found(question))
        await asker.fetch("a", link=other)
        assert numbers(other.asked, Target) == 1

    run(steps())


def test_many_that_load_at_once_tell_it_once(region: Region) -> None:
    async def steps() -> None:
        asker = Asker(region, found)
        await asyncio.gather(*(asker.fetch("a") for _ in range(16)))
        assert len(asker.targets) == 1
        assert numbers(asker.link.asked, Fetch) == 16
        # Another session is told for itself.
        other = FakeLink(lambda question: Ready(question.number) if isinstance(question, Target) else found(question))
        await asker.fetch("a", link=other)
        assert numbers(other.asked, Target) == 1

    run(steps())


def test_a_peer_that_is_slow_to_take_it_is_waited_for_until_the_deadline_and_not_told_twice(region: Region) -> None:
    async def steps() -> None:
        asker = Asker(region, found)
        asker.ready = lambda question: None
        with pytest.raises(TimedOutError, match="does not know in time where to write"):
            await asker.fetch("a", limit_s=0.05)
        asker.link._waiting[0].set_result(Ready(1))
        await asker.fetch("a")
        assert len(asker.targets) == 1
        assert numbers(asker.link.asked, Fetch) == 1
        assert asker.doubts.late_bytes == 0

    run(steps())


def test_without_an_answer_by_the_deadline_it_is_in_doubt_until_there_is_one(region: Region) -> None:
    async def steps() -> None:
        asker = Asker(region, lambda fetch: None)
        began_s = time.monotonic()
        error = await asker.in_doubt("a")
        assert "has not finished a load in time" in str(error)
        assert time.monotonic() - began_s < LIMIT_S
        doubt = error.doubt
        assert not doubt.over
        assert asker.doubts.late_bytes == 100
        assert asker.plane.fences == 0
        fetch = asker.link.asked[-1]
        asker.link.late[fetch.number](found(fetch))
        assert doubt.over
        assert asker.doubts.late_bytes == 0

    run(steps())


def test_the_end_of_the_session_leaves_it_in_doubt_until_the_child_is_gone(region: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    """LIV-04: at once, and not at the deadline."""
    monkeypatch.setattr(doubts_module, "FENCE_AFTER_S", 0.3)

    async def steps() -> None:
        asker = Asker(region, lambda fetch: None)
        loading = asyncio.ensure_future(asker.fetch("a", limit_s=3600))
        await until(lambda: numbers(asker.link.asked, Fetch))
        asker.link.end("the connection is lost")
        with pytest.raises(InDoubtError, match="the connection is lost") as caught:
            await asyncio.wait_for(loading, LIMIT_S)
        assert not caught.value.doubt.over
        assert asker.plane.fences == 0
        await until(lambda: caught.value.doubt.over)
        assert asker.plane.fences == 1

    run(steps())


def test_what_was_under_way_when_the_child_ended_is_a_failure_and_not_in_doubt(region: Region) -> None:
    async def steps() -> None:
        asker = Asker(region, lambda fetch: None)
        loading = asyncio.ensure_future(asker.fetch("a", limit_s=3600))
        await until(lambda: numbers(asker.link.asked, Fetch))
        asker.plane.generation = 0
        with pytest.raises(UnavailableError) as caught:
            await asyncio.wait_for(loading, LIMIT_S)
        assert not isinstance(caught.value, InDoubtError)
        with pytest.raises(UnavailableError, match="is being restarted"):
            await asker.fetch("a")

    run(steps())


def test_what_the_peer_did_not_begin_is_not_in_doubt(region: Region) -> None:
    async def steps() -> None:
        asker = Asker(region, lambda fetch: PeerRefusedError("p2p peer x: refuses (busy): too much", "busy"))
        with pytest.raises(UnavailableError, match="too much") as caught:
            await asker.fetch("a")
        assert not isinstance(caught.value, InDoubtError)
        assert all(doubt.over for doubt in asker.opened)

    run(steps())


def test_what_was_never_sent_is_not_in_doubt(region: Region) -> None:
    async def steps() -> None:
        asker = Asker(region, lambda fetch: None)

        def ready(question: Target) -> Ready:
            asker.link.end("lost")
            return Ready(question.number)

        asker.ready = ready
        with pytest.raises(UnavailableError, match="lost") as caught:
            await asker.fetch("a")
        assert not isinstance(caught.value, InDoubtError)
        assert numbers(asker.link.asked, Fetch) == 0
        assert [doubt.over for doubt in asker.opened] == [True]
        assert asker.plane.fences == 0

    run(steps())


def test_a_call_that_is_broken_off_leaves_its_doubt(region: Region) -> None:
    async def steps() -> None:
        asker = Asker(region, lambda fetch: None)
        loading = asyncio.ensure_future(asker.fetch("a", limit_s=3600))
        await until(lambda: numbers(asker.link.asked, Fetch))
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        [doubt] = asker.opened
        assert not doubt.over
        assert asker.doubts.late_bytes == 100

    run(steps())


def test_some_failing_of_a_load_does_not_leave_it_in_doubt(region: Region) -> None:
    async def steps() -> None:
        asker = Asker(region, lambda fetch: Result(fetch.number, ((FOUND, 100), (BUSY, 0))))
        assert (await asker.fetch("a", "b")).statuses == ((FOUND, 100), (BUSY, 0))
        assert all(doubt.over for doubt in asker.opened)

    run(steps())


def test_a_region_that_is_taken_back_while_something_may_land_there_costs_the_child_its_life(region: Region) -> None:
    async def steps() -> None:
        asker = Asker(region, lambda fetch: None)
        doubt = (await asker.in_doubt("a")).doubt
        other = Region(4096)
        asker.landing.add_region(other)
        asker.landing.remove_region(other)
        assert asker.plane.fences == 0
        # It is killed at once, and gone only then.
        asker.plane.dies_after_s = 0.2
        asker.landing.remove_region(region)
        assert asker.plane.fences == 1
        assert doubt.over
        # Nothing else may have been mapped at its address before that.
        assert asker.plane.unmapped == [(other, 1), (region, 2)]
        other.close()

    run(steps())


def test_a_region_is_not_free_while_a_child_that_cannot_be_ended_may_write_there(region: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    async def steps() -> None:
        asker = Asker(region, lambda fetch: None)
        await asker.in_doubt("a")
        monkeypatch.setattr(asker.plane, "_die", lambda: None)
        monkeypatch.setattr("kvstore_sdk_backends.p2p.landing._GONE_S", 0.1)
        with pytest.raises(TimedOutError, match="keep it"):
            asker.landing.remove_region(region)
        assert not asker.plane.unmapped

    run(steps())


def test_nobody_is_told_to_write_into_a_child_that_is_gone(region: Region) -> None:
    """Also in the moment for which its generation is still the last one, since copies into it may go on."""

    async def steps() -> None:
        asker = Asker(region, found)
        await asker.fetch("a")
        asked = len(asker.link.asked)
        asker.plane.gone = True
        with pytest.raises(UnavailableError, match="is being restarted"):
            await asker.fetch("a")
        assert len(asker.link.asked) == asked
        assert all(doubt.over for doubt in asker.opened)

    run(steps())


def test_nothing_is_asked_for_a_region_that_is_taken_back_at_the_last_moment(region: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another region may lie at its address by then, and nobody would look there."""

    async def steps() -> None:
        asker = Asker(region, lambda fetch: None)
        real = asker.doubts.landing

        def landing(*what: Any) -> LandingDoubt:
            # On another thread, where it finds no doubt yet.
            taking = threading.Thread(target=asker.landing.remove_region, args=(region,))
            taking.start()
            taking.join()
            return real(*what)

        monkeypatch.setattr(asker.doubts, "landing", landing)
        with pytest.raises(UnavailableError, match="has just changed"):
            await asker.fetch("a")
        assert not any(isinstance(message, Fetch) for message in asker.link.asked)
        assert all(doubt.over for doubt in asker.opened)
        assert asker.plane.fences == 0

    run(steps())


def test_memory_that_is_not_registered_is_refused_before_anything_is_asked(region: Region) -> None:
    async def steps() -> None:
        asker = Asker(region, found)
        other = Region(4096)
        with pytest.raises(UnavailableError, match="is not registered"):
            await asker.landing.fetch(cast(Link, asker.link), [Get("a", (other.buffer(0, 10),))], time.monotonic() + 1, asker.opened)
        assert numbers(asker.link.asked, Fetch) == 0
        other.close()

    run(steps())


def test_the_child_is_driven_as_long_as_something_may_land(region: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landing_module, "_LOOK_S", 0.005)

    async def steps() -> None:
        asker = Asker(region, lambda fetch: None)
        doubt = (await asker.in_doubt("a")).doubt
        seen = asker.plane.expected
        await until(lambda: asker.plane.expected > seen + 3)
        doubt.close()
        await until(lambda: asker.landing._looking is not None and asker.landing._looking.done())
        assert asker.doubts.landings == 0

    run(steps())
