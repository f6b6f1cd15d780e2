"""A look-up that waits is answered once: when its records are there, or its time is up."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_sdk_backends.p2p.limits import Limits
from kvstore_sdk_backends.p2p.waits import Waits

ALICE, BOB = b"alice", b"bob"


class Records:
    """Names that are there, and every question about them."""

    def __init__(self, *names: str) -> None:
        self.there = set(names)
        self.asked: list[list[str]] = []

    def sizes(self, names: Sequence[str]) -> list[int]:
        self.asked.append(list(names))
        return [int(name in self.there) for name in names]


def waits_for(records: Records, **limits: int) -> Waits:
    return Waits(records.sizes, dataclasses.replace(Limits(), **limits))


def test_it_is_answered_when_the_last_record_has_come() -> None:
    records = Records("a")
    waits = waits_for(records)
    answers: list[str] = []
    assert waits.add(ALICE, 1, ["a", "b", "c"], 10.0, lambda: answers.append("alice"))
    waits.look(1.0)
    records.there.add("c")
    waits.look(2.0)
    assert answers == []
    records.there.add("b")
    waits.look(3.0)
    waits.look(4.0)
    assert answers == ["alice"]
    assert len(waits) == 0


def test_it_is_answered_when_its_time_is_up() -> None:
    waits = waits_for(Records("a"))
    answers: list[str] = []
    waits.add(ALICE, 1, ["a", "b"], 10.0, lambda: answers.append("alice"))
    waits.look(9.9)
    assert answers == []
    waits.look(10.0)
    assert answers == ["alice"]


def test_only_the_first_missing_record_of_each_is_looked_at() -> None:
    """Many waiting look-ups of many names cost one name each."""
    records = Records("a0", "a1")
    waits = waits_for(records)
    waits.add(ALICE, 1, [f"a{number}" for number in range(256)], 10.0, list)
    waits.add(BOB, 1, ["b0", "b1"], 10.0, list)
    waits.look(1.0)
    records.asked.clear()
    waits.look(2.0)
    assert records.asked == [["a2", "b0"]]


def test_a_record_that_is_gone_again_is_waited_for_again() -> None:
    records = Records("a")
    waits = waits_for(records)
    answers: list[str] = []
    waits.add(ALICE, 1, ["a", "b"], 10.0, lambda: answers.append("alice"))
    waits.look(1.0)
    records.there = {"b"}
    waits.look(2.0)
    assert answers == []
    records.there = {"a", "b"}
    waits.look(3.0)
    assert answers == ["alice"]


def test_nobody_is_answered_whose_session_ended() -> None:
    records = Records()
    waits = waits_for(records)
    answers: list[str] = []
    waits.add(ALICE, 1, ["a"], 10.0, lambda: answers.append("alice"))
    waits.add(BOB, 1, ["a"], 10.0, lambda: answers.append("bob"))
    waits.end(ALICE)
    waits.end(ALICE)
    records.there.add("a")
    waits.look(20.0)
    assert answers == ["bob"]
    assert (waits.waits_of(ALICE), waits.waits_of(BOB)) == (0, 0)


def test_one_too_many_is_not_taken() -> None:
    waits = waits_for(Records(), session_waits=2, max_waits=3)
    assert [waits.add(ALICE, 1, ["a"], 10.0, list) for _ in range(3)] == [True, True, False]
    assert [waits.add(BOB, 1, ["a"], 10.0, list) for _ in range(2)] == [True, False]
    waits.end(ALICE)
    assert waits.add(BOB, 1, ["a"], 10.0, list)


def test_one_name_too_many_is_not_taken() -> None:
    waits = waits_for(Records(), session_wait_names=5, max_wait_names=8)
    assert [waits.add(ALICE, 1, ["a", "b"], 10.0, list) for _ in range(3)] == [True, True, False]
    assert [waits.add(BOB, 1, list("abcd"), 10.0, list), waits.add(BOB, 1, list("efg"), 10.0, list)] == [True, False]
    waits.look(20.0)
    assert waits.add(BOB, 1, list("abcde"), 10.0, list)


@pytest.mark.parametrize("limits", [{"max_waits": 6}, {"max_wait_names": 12}], ids=["look-ups", "names"])
def test_who_waits_for_most_makes_room_for_the_others(limits: dict[str, int]) -> None:
    waits = waits_for(Records(), **limits)
    answers: list[str] = []
    for number in range(6):
        assert waits.add(ALICE, 1, ["a", "b"], 10.0, lambda number=number: answers.append(f"alice {number}"))  # type: ignore[misc]
    for _ in range(3):
        assert waits.add(BOB, 1, ["c", "d"], 10.0, lambda: answers.append("bob"))
    assert answers == ["alice 0", "alice 1", "alice 2"]
    # Now both have as many.
    assert not waits.add(BOB, 1, ["c", "d"], 10.0, list)
    assert not waits.add(ALICE, 1, ["c", "d"], 10.0, list)
    assert (waits.waits_of(ALICE), waits.waits_of(BOB)) == (3, 3)
    waits.look(20.0)
    assert sorted(answers) == [*(f"alice {number}" for number in range(6)), *["bob"] * 3]


def test_an_answer_may_begin_another_wait() -> None:
    records = Records("a")
    waits = waits_for(records, session_waits=1)
    taken: list[bool] = []
    waits.add(ALICE, 1, ["a"], 10.0, lambda: taken.append(waits.add(ALICE, 1, ["b"], 10.0, list)))
    waits.look(1.0)
    assert taken == [True]
    assert len(waits) == 1


@given(
    st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=4), min_size=1, max_size=6),
    st.permutations(range(8)),
)
def test_each_is_answered_at_the_first_look_at_which_all_are_there(wanted: list[list[int]], order: list[int]) -> None:
    records = Records()
    waits = waits_for(records)
    answered: dict[int, int] = {}
    here = 0
    for number, names in enumerate(wanted):
        waits.add(ALICE, 1, [str(name) for name in names], 1e9, lambda number=number: answered.__setitem__(number, here))  # type: ignore[misc]
    waits.look(0.0)
    for name in order:
        records.there.add(str(name))
        here = len(records.there) - 1
        waits.look(0.0)
    assert answered == {number: max(map(order.index, names)) for number, names in enumerate(wanted)}


def test_one_that_is_cut_short_is_answered_and_no_other() -> None:
    records, answers = Records(), []
    waits = waits_for(records)
    for session, number in ((ALICE, 1), (ALICE, 2), (BOB, 1)):
        waits.add(session, number, ["a"], 10.0, lambda said=(session, number): answers.append(said))  # type: ignore[misc]
    waits.cut_short(ALICE, 1)
    waits.cut_short(ALICE, 1)
    waits.cut_short(BOB, 2)
    assert answers == [(ALICE, 1)]
    assert (len(waits), waits.waits_of(ALICE), waits.waits_of(BOB)) == (2, 1, 1)
    waits.look(11.0)
    assert answers == [(ALICE, 1), (ALICE, 2), (BOB, 1)]
    assert len(waits) == 0
