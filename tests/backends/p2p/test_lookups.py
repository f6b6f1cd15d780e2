"""Several peers are asked at once, a few at a time; the first that has a record wins, and the others need not keep it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest
from p2p_bench import until
from p2p_group import LIMIT_S, Group, missing, run
from p2p_scripted import FakeLink, having

from kvstore_sdk.backend import Hint, TimedOutError, UnavailableError
from kvstore_sdk_backends.p2p import lookups as lookups_module
from kvstore_sdk_backends.p2p.addresses import Address
from kvstore_sdk_backends.p2p.messages import Found, Lookup


class Held:
    """Answers when it is let go."""

    def __init__(self, **sizes: int) -> None:
        self.has = having(**sizes)
        self.waiting: list[tuple[Any, FakeLink]] = []

    def __call__(self, question: Any) -> Any:
        return None

    def answer_all(self, link: FakeLink) -> None:
        """To whoever waits, or to what is called when nobody does."""
        questions = [question for question in link.asked if isinstance(question, Lookup)]
        waiting, link._waiting = link._waiting, []
        for question, future in zip(questions, waiting, strict=True):
            if future.done():
                link.late[question.number](self.has(question))
            else:
                future.set_result(self.has(question))


def test_each_name_is_found_where_it_is() -> None:
    async def steps() -> None:
        group = Group(having(a=1), having(b=2), having(c=3))
        hunt = await group.find("a", "b", "c", "d")
        assert missing(hunt) == ["d"]
        assert hunt.failure() is None
        assert [group.place(name) for name in "abcd"] == [1, 2, 3, None]

    run(steps())


def test_of_several_that_wait_those_are_called_off_that_another_was_before() -> None:
    """A name in a request stands for several nodes, one of which is to compute what is asked for."""

    async def steps() -> None:
        first, other = Held(a=1), Held(a=1)
        group = Group(first, other, named=2)
        both = [Address("127.0.0.1", port) for port in group.links]
        group.peers._lookup = lambda address: both
        group.hints.note(["v1/a"], Hint("engines:7400", 10.0))
        finding = asyncio.ensure_future(group.find("a", wait=True))
        await until(lambda: group.asked(1) == group.asked(2) == [("a",)])
        first.answer_all(group.links[1])
        assert missing(await finding) == []
        assert group.place("a") == 1
        assert group.links[2].cancelled == group.links[2].asked
        assert group.links[1].cancelled == []
        # It had it, too, as it was called off.
        other.answer_all(group.links[2])
        assert group.released(2) == ["a"]

    run(steps())


def test_of_several_the_first_wins_and_the_others_let_go() -> None:
    async def steps() -> None:
        slow = Held(a=1, b=1)
        group = Group(having(a=1), slow)
        assert missing(await group.find("a")) == []
        assert group.place("a") == 1
        assert group.released(1) == []
        slow.answer_all(group.links[2])
        await until(lambda: group.released(2) == ["a"])
        assert group.place("a") == 1

    run(steps())


def test_no_more_than_so_many_are_asked_at_a_time_and_all_in_the_end() -> None:
    async def steps() -> None:
        running = most = 0
        links: list[FakeLink] = []

        async def answer_later(link: FakeLink) -> None:
            nonlocal running
            await asyncio.sleep(0.01)
            running -= 1
            question = link.asked[-1]
            link._waiting[-1].set_result(having(z=1)(question) if link.address.port == 9 else having()(question))

        def asked(question: Any) -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            link = next(link for link in links if link.asked and link.asked[-1] is question)
            tasks.append(asyncio.ensure_future(answer_later(link)))

        tasks: list[asyncio.Task[None]] = []
        group = Group(*[asked] * 9, fan_out=3)
        links = list(group.links.values())
        assert missing(await group.find("z")) == []
        assert most == 3
        assert [len(link.asked) for link in links] == [1] * 9
        await asyncio.gather(*tasks)

    run(steps())


def test_what_was_found_is_not_asked_for_again() -> None:
    async def steps() -> None:
        group = Group(having(a=1, b=1), having(c=1), fan_out=1)
        await group.find("a", "b", "c")
        assert group.asked(1) == [("a", "b", "c")]
        assert group.asked(2) == [("c",)]

    run(steps())


def test_no_peer_is_asked_for_more_names_at_once_than_it_takes() -> None:
    async def steps() -> None:
        group = Group(having(**{f"n{number}": 1 for number in range(7)}), max_names=3)
        hunt = await group.find(*(f"n{number}" for number in range(7)), "x")
        assert missing(hunt) == ["x"]
        assert [len(names) for names in group.asked(1)] == [3, 3, 2]

    run(steps())


def test_a_peer_that_does_not_answer_has_nothing_and_counts_against_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """LIV-03"""
    monkeypatch.setattr(lookups_module, "STRIKE_AFTER_S", 0.0)

    async def steps() -> None:
        group = Group(lambda question: None, having(a=1), answer_timeout_s=0.05)
        await group.up()
        for _ in range(3):
            hunt = await group.find("a", "b")
            assert missing(hunt) == ["b"]
            assert hunt.failure() is None
        assert group.links[1].ended
        assert "did not answer in time, 3 times in a row" in group.links[1].cause
        assert group.lookups.counts["lookup_timeouts"] == 3
        began_s = time.monotonic()
        assert missing(await group.find("b")) == ["b"]
        assert len(group.asked(1)) == 3
        assert time.monotonic() - began_s < LIMIT_S

    run(steps())


def test_where_nobody_answers_it_is_not_said_that_nothing_is_there() -> None:
    async def steps() -> None:
        group = Group(lambda question: None, answer_timeout_s=0.05)
        await group.up()
        assert isinstance((await group.find("a")).failure(), TimedOutError)
        group.links[1].end("lost")
        await until(lambda: not group.peers.all()[0].live)
        failure = (await group.find("a")).failure()
        assert isinstance(failure, UnavailableError)
        assert "no peer can be asked now: 127.0.0.1:1: " in str(failure)

    run(steps())


def test_the_deadline_ends_it_whatever_the_peers_do() -> None:
    async def steps() -> None:
        group = Group(lambda question: None, lambda question: None, fan_out=1)
        await group.up()
        began_s = time.monotonic()
        hunt = await group.find("a", limit_s=0.05)
        assert missing(hunt) == ["a"]
        assert isinstance(hunt.failure(), TimedOutError)
        assert time.monotonic() - began_s < LIMIT_S

    run(steps())


def test_an_answer_that_comes_too_late_is_let_go() -> None:
    async def steps() -> None:
        late = Held(a=1)
        group = Group(late, answer_timeout_s=0.05)
        await group.up()
        assert missing(await group.find("a")) == ["a"]
        for future in group.links[1]._waiting:
            future.cancel()
        late.answer_all(group.links[1])
        assert group.released(1) == ["a"]
        assert group.place("a") is None

    run(steps())


def test_who_was_named_is_asked_first_and_the_others_for_the_rest() -> None:
    async def steps() -> None:
        group = Group(having(a=1, b=1), having(b=1), named=1)
        group.hints.note(["v1/b"], Hint("127.0.0.1:2"))
        hunt = await group.find("a", "b")
        assert missing(hunt) == []
        assert group.asked(2) == [("b",)]
        assert group.asked(1) == [("a",)]
        assert group.place("b") == 2

    run(steps())


def test_who_was_named_and_is_not_there_is_no_failure() -> None:
    async def steps() -> None:
        group = Group(having(), named=1)
        group.links[1].end("lost")
        group.hints.note(["v1/a"], Hint("127.0.0.1:1", 5.0))
        hunt = await group.find("a", wait=True)
        assert missing(hunt) == ["a"]
        assert hunt.failure() is None

    run(steps())


@pytest.mark.parametrize("named_is_there", [True, False])
def test_what_the_named_one_has_not_by_its_time_is_asked_of_those_that_are_listed(named_is_there: bool) -> None:
    async def steps() -> None:
        group = Group(having(a=1), having(), named=1)
        if not named_is_there:
            group.links[2].end("lost")
        group.hints.note(["v1/a"], Hint("127.0.0.1:2", 5.0))
        assert missing(await group.find("a", wait=True)) == []
        assert group.place("a") == 1
        # Who was not named is not waited for.
        assert waits(group.links[1]) == [(0, ("v1/a",))]

    run(steps())


def waits(link: FakeLink) -> Sequence[tuple[int, tuple[str, ...]]]:
    return [(one.wait_ms, one.names) for one in link.asked if isinstance(one, Lookup)]


def test_waiting_is_for_the_one_record_that_comes_last_and_the_rest_is_then_asked_for() -> None:
    async def steps() -> None:
        group = Group(having(a=1, c=1), named=1)
        group.hints.note(["v1/a", "v1/b", "v1/c"], Hint("127.0.0.1:1", 5.0, until=("v1/c",)))
        hunt = await group.find("a", "b", "c", wait=True)
        assert missing(hunt) == ["b"]
        assert waits(group.links[1]) == [(5000, ("v1/c",)), (0, ("v1/a", "v1/b"))]

    run(steps())


def test_when_the_last_is_there_those_before_it_are_waited_for_a_little() -> None:
    """Threads of the owner store them side by side, and the last may be done first."""

    async def steps() -> None:
        group = Group(having(a=1, c=1, d=1), named=1)
        group.hints.note(["v1/a", "v1/b", "v1/c", "v1/d"], Hint("127.0.0.1:1", 5.0, until=("v1/a", "v1/b", "v1/c")))
        hunt = await group.find("a", "b", "c", "d", wait=True)
        assert missing(hunt) == ["b"]
        (last, last_names), (rest, rest_names), others = waits(group.links[1])
        assert (last, last_names, rest_names) == (5000, ("v1/c",), ("v1/a", "v1/b"))
        assert 0 < rest <= lookups_module.STRAGGLERS_S * 1000
        assert others == (0, ("v1/b", "v1/d"))

    run(steps())


def test_where_the_last_is_not_there_in_time_nothing_else_is_waited_for() -> None:
    async def steps() -> None:
        group = Group(having(a=1), named=1)
        group.hints.note(["v1/a", "v1/c"], Hint("127.0.0.1:1", 5.0, until=("v1/a", "v1/c")))
        assert missing(await group.find("a", "c", wait=True)) == ["c"]
        assert waits(group.links[1]) == [(5000, ("v1/c",)), (0, ("v1/a", "v1/c"))]

    run(steps())


def test_waiting_for_all_is_one_question() -> None:
    async def steps() -> None:
        group = Group(having(a=1), named=1)
        group.hints.note(["v1/a", "v1/b"], Hint("127.0.0.1:1", 5.0))
        await group.find("a", "b", wait=True)
        [(wait_ms, names)] = waits(group.links[1])
        assert names == ("v1/a", "v1/b")
        assert 1000 < wait_ms <= 5000

    run(steps())


def test_waiting_leaves_the_call_some_time_and_a_load_waits_for_nothing() -> None:
    async def steps() -> None:
        group = Group(having(), named=1)
        group.hints.note(["v1/a"], Hint("127.0.0.1:1", 3600.0))
        await group.find("a")
        await group.find("a", wait=True, limit_s=10.0)
        [(no_wait, _), (wait_ms, _)] = waits(group.links[1])
        assert no_wait == 0
        assert 1000 < wait_ms <= 10_000 - lookups_module.LEFT_S * 1000

    run(steps())


def test_peers_from_which_loads_have_just_failed_are_passed_over() -> None:
    async def steps() -> None:
        group = Group(having(a=1), having(a=1), fan_out=1)
        await group.find("a")
        first = group.place("a")
        assert first is not None
        place = group.places.of("v1/a")
        assert place is not None
        group.places.forget("v1/a")
        assert missing(await group.find("a", avoid=[place.peer])) == []
        assert group.place("a") not in (None, first)

    run(steps())


def test_found_of_nothing_releases_nothing() -> None:
    async def steps() -> None:
        group = Group(lambda question: Found(question.number, (0,) * len(question.names)))
        await group.find("a", "b")
        assert group.links[1].told == []

    run(steps())
