"""What a look-up found is kept for a while; every loan goes back once."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from p2p_sources import CountingSource

from kvstore_sdk.backend import Mode, Put, PutStatus, Region
from kvstore_sdk_backends.p2p.leases import Borrowed, Leases
from kvstore_sdk_backends.p2p.limits import Limits
from kvstore_sdk_backends.p2p.shelf import Shelf

LIMITS = Limits(lease_s=10.0)
ALICE, BOB, CAROL = b"alice", b"bob", b"carol"


def leases_over(*sources: CountingSource, **limits: int) -> Leases:
    return Leases(list(sources), dataclasses.replace(LIMITS, **limits))


def take(leases: Leases, session: bytes, name: str) -> Borrowed:
    [borrowed] = leases.take(session, [name])
    assert borrowed is not None
    return borrowed


def names_out(source: CountingSource) -> list[str]:
    return sorted(loan.name for loan in source.out)


def test_a_look_up_keeps_what_it_finds_until_its_time_is_up() -> None:
    """LEAK-02"""
    source = CountingSource({"a": 100, "b": 200})
    leases = leases_over(source)
    assert leases.lease(ALICE, ["a", "x", "b"], 0.0) == [100, 0, 200]
    assert names_out(source) == ["a", "b"]
    leases.expire(9.9)
    assert names_out(source) == ["a", "b"]
    leases.expire(10.0)
    assert source.out == []
    assert (leases.leased, leases.leased_bytes) == (0, 0)


def test_a_later_look_up_lets_the_lease_last_longer() -> None:
    source = CountingSource({"a": 100, "b": 200})
    leases = leases_over(source)
    leases.lease(ALICE, ["a", "b"], 0.0)
    assert leases.lease(ALICE, ["a"], 6.0) == [100]
    leases.expire(12.0)
    assert names_out(source) == ["a"]
    leases.expire(16.0)
    assert source.out == []
    assert source.lent == 2


def test_a_name_that_is_asked_for_twice_in_one_question_is_lent_once() -> None:
    source = CountingSource({"a": 100})
    leases = leases_over(source)
    assert leases.lease(ALICE, ["a", "a", "a"], 0.0) == [100, 100, 100]
    assert source.lent == 1
    leases.end(ALICE)
    assert source.out == []


def test_a_transfer_uses_the_lease_and_ends_it() -> None:
    source = CountingSource({"a": 100})
    leases = leases_over(source)
    leases.lease(ALICE, ["a"], 0.0)
    borrowed = take(leases, ALICE, "a")
    assert (source.lent, leases.leased, leases.taken) == (1, 0, 1)
    leases.expire(1000.0)
    leases.end(ALICE)
    assert names_out(source) == ["a"]
    leases.give_back([borrowed])
    leases.give_back([borrowed, borrowed])
    assert (source.out, leases.taken) == ([], 0)


def test_a_transfer_has_what_replaced_the_record_since_it_was_leased() -> None:
    shelf, desk = Shelf(1 << 16), Region(1 << 16)
    leases = Leases([shelf], LIMITS)
    buffer = desk.buffer(0, 4096)
    buffer.view[:] = b"o" * 4096
    assert shelf.put(Put("a", (buffer,))).status is PutStatus.STORED
    assert leases.lease(ALICE, ["a"], 0.0) == [4096]
    buffer.view[:] = b"n" * 4096
    assert shelf.put(Put("a", (buffer,), Mode.REPLACE)).status is PutStatus.STORED
    [borrowed] = leases.take(ALICE, ["a"])
    assert borrowed is not None
    assert bytes(borrowed.buffer.view) == b"n" * 4096
    leases.give_back([borrowed])
    assert (leases.leased, leases.taken, shelf.lent_bytes) == (0, 0, 0)
    # And a look-up says how long the new one is, and keeps that.
    leases.lease(ALICE, ["a"], 0.0)
    assert shelf.put(Put("a", (desk.buffer(0, 8192),), Mode.REPLACE)).status is PutStatus.STORED
    assert leases.lease(ALICE, ["a"], 1.0) == [8192]
    assert shelf.lent_bytes == 8192
    leases.end(ALICE)
    shelf.close()
    desk.close()


def test_a_transfer_needs_no_lease() -> None:
    source = CountingSource({"a": 100})
    leases = leases_over(source)
    assert leases.take(ALICE, ["x"]) == [None]
    first, second = leases.take(ALICE, ["a", "a"])
    assert first is not None
    assert second is not None
    leases.give_back([first, second])
    assert source.out == []


def test_the_lease_of_one_session_is_nothing_to_another() -> None:
    source = CountingSource({"a": 100})
    leases = leases_over(source)
    leases.lease(ALICE, ["a"], 0.0)
    leases.release(BOB, ["a"])
    leases.end(BOB)
    assert names_out(source) == ["a"]
    leases.release(ALICE, ["a", "x", "a"])
    assert source.out == []


def test_the_first_source_that_has_a_record_lends_it() -> None:
    first, second = CountingSource({"a": 100}), CountingSource({"a": 300, "b": 400})
    leases = leases_over(first, second)
    assert leases.sizes(["b", "a", "x"]) == [400, 100, 0]
    assert leases.lease(ALICE, ["b", "a", "x"], 0.0) == [400, 100, 0]
    assert (names_out(first), names_out(second)) == (["a"], ["b"])


def test_a_source_that_comes_later_is_asked_too() -> None:
    sources: list[CountingSource] = []
    leases = Leases(sources, LIMITS)
    assert leases.lease(ALICE, ["a"], 0.0) == [0]
    sources.append(CountingSource({"a": 100}))
    assert leases.lease(ALICE, ["a"], 0.0) == [100]


def test_a_look_up_answers_the_same_without_room_for_leases() -> None:
    source = CountingSource({"a": 100, "b": 100, "c": 1000}, most_loans=5)
    leases = leases_over(source, max_leased_bytes=150)
    assert leases.lease(ALICE, ["a", "b", "c"], 0.0) == [100, 100, 1000]
    assert names_out(source) == ["a"]


@pytest.mark.parametrize("limits", [{"max_leased_bytes": 400}, {"max_leases": 4}])
def test_who_holds_most_makes_room_for_the_others(limits: dict[str, int]) -> None:
    """One session cannot keep the others from having leases, and the others can not take all of its own."""
    source = CountingSource({f"n{number}": 100 for number in range(20)})
    leases = leases_over(source, **limits)
    leases.lease(ALICE, [f"n{number}" for number in range(8)], 0.0)
    assert leases.leases_of(ALICE) == 4
    leases.lease(BOB, [f"n{number}" for number in range(8, 16)], 0.0)
    assert (leases.leases_of(ALICE), leases.leases_of(BOB)) == (2, 2)
    leases.lease(CAROL, ["n16"], 0.0)
    assert sorted(map(leases.leases_of, (ALICE, BOB, CAROL))) == [1, 1, 2]


def test_a_transfer_takes_the_room_of_a_lease() -> None:
    source = CountingSource({"a": 100, "b": 100, "c": 100}, most_loans=2)
    leases = leases_over(source)
    leases.lease(ALICE, ["a", "b"], 0.0)
    first = take(leases, BOB, "c")
    assert names_out(source) == ["b", "c"]
    second = take(leases, BOB, "c")
    assert leases.take(CAROL, ["a"]) == [None]
    leases.give_back([first, second])
    assert source.out == []


def test_only_leases_of_the_source_that_is_asked_make_room() -> None:
    full, other = CountingSource({"a": 100, "b": 100}, most_loans=1), CountingSource({"x": 100})
    leases = leases_over(full, other)
    leases.lease(ALICE, ["x"], 0.0)
    leases.lease(BOB, ["a"], 0.0)
    first = take(leases, CAROL, "b")
    assert leases.take(CAROL, ["a", "b", "y"]) == [None, None, None]
    assert (names_out(full), names_out(other)) == (["b"], ["x"])
    leases.give_back([first])


def test_closing_gives_back_leases_and_what_transfers_hold() -> None:
    source = CountingSource({"a": 100, "b": 100})
    leases = leases_over(source)
    leases.lease(ALICE, ["a"], 0.0)
    borrowed = take(leases, BOB, "b")
    leases.close()
    leases.give_back([borrowed])
    leases.close()
    assert source.out == []


class LeaseMachine(RuleBasedStateMachine):
    """Against a dictionary of who leased what until when. The source counts what comes back."""

    sessions = st.sampled_from([ALICE, BOB, CAROL])
    names = st.lists(st.sampled_from([f"n{number}" for number in range(6)]), min_size=1, max_size=6)

    @initialize(most_loans=st.integers(1, 8), max_leases=st.integers(1, 6))
    def begin(self, most_loans: int, max_leases: int) -> None:
        self.now_s = 0.0
        self.source = CountingSource({f"n{number}": 10 for number in range(4)}, most_loans=most_loans)
        self.later = CountingSource({f"n{number}": 20 for number in range(2, 6)})
        self.leases = leases_over(self.source, self.later, max_leases=max_leases, max_leased_bytes=90)
        self.max_leases = max_leases
        self.until_s: dict[tuple[bytes, str], float] = {}
        self.taken: list[Borrowed] = []

    @rule(session=sessions, names=names)
    def look_up(self, session: bytes, names: list[str]) -> None:
        sizes = [10 if name < "n4" else 20 for name in names]
        assert self.leases.lease(session, names, self.now_s) == sizes
        self.until_s |= {(session, name): self.now_s + LIMITS.lease_s for name in names}

    @rule(session=sessions, names=names)
    def take(self, session: bytes, names: list[str]) -> None:
        for name, borrowed in zip(names, self.leases.take(session, names), strict=True):
            self.until_s.pop((session, name), None)
            if borrowed is None:
                # It is there, and all that may be lent is on its way.
                assert len(self.source.out) == self.source.most_loans
                assert self.leases.leased == 0 or name < "n4"
            else:
                assert borrowed.name == name
                self.taken.append(borrowed)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        borrowed = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        self.leases.give_back([borrowed])
        assert borrowed.loan not in [*self.source.out, *self.later.out]

    @rule(session=sessions, names=names)
    def release(self, session: bytes, names: list[str]) -> None:
        self.leases.release(session, names)
        for name in names:
            self.until_s.pop((session, name), None)

    @rule(session=sessions)
    def end(self, session: bytes) -> None:
        self.leases.end(session)
        self.until_s = {key: until_s for key, until_s in self.until_s.items() if key[0] != session}
        assert self.leases.leases_of(session) == 0

    @rule(seconds=st.sampled_from([1.0, 4.0, 11.0]))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.leases.expire(self.now_s)
        self.until_s = {key: until_s for key, until_s in self.until_s.items() if until_s > self.now_s}

    @invariant()
    def holds_no_more_than_it_may(self) -> None:
        if not hasattr(self, "leases"):
            return
        out = [*self.source.out, *self.later.out]
        assert len(out) == self.leases.leased + self.leases.taken
        assert self.leases.taken == len(self.taken)
        assert all(borrowed.loan in out for borrowed in self.taken)
        # Every lease is one that somebody may still have; who gave way to another has fewer.
        assert self.leases.leased <= min(self.max_leases, len(self.until_s))
        assert self.leases.leased_bytes <= 90
        for session in (ALICE, BOB, CAROL):
            assert self.leases.leases_of(session) <= sum(key[0] == session for key in self.until_s)

    def teardown(self) -> None:
        if hasattr(self, "leases"):
            self.leases.close()
            assert [*self.source.out, *self.later.out] == []
            assert (self.leases.leased, self.leases.leased_bytes, self.leases.taken) == (0, 0, 0)


LeaseMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestLeaseMachine = LeaseMachine.TestCase
