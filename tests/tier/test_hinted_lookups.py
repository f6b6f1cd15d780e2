"""What a request that names a peer is told, and what the backend is: for which record to wait, and how long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tier_bench import Engine, identity, key, keys

from kvstore_sdk.backend import ConfigError, Hint
from kvstore_sdk.identity import GroupIdentity
from kvstore_sdk.keys import ChunkKey
from kvstore_sdk.tier import Lookup
from kvstore_sdk.tier.hints import Waits
from kvstore_sdk.tier.lookups import LookupTable
from kvstore_sdk.tier.probe import Probe

NewEngine = Callable[..., Engine]

HIT, MISS, PENDING = Lookup.HIT, Lookup.MISS, Lookup.PENDING


# What a hint may be.


@pytest.mark.parametrize("peer", ["", "x" * 1025, None, 7])
def test_a_hint_without_an_address_is_refused(peer: Any) -> None:
    with pytest.raises(ConfigError, match=r"hint: peer: must be an address"):
        Hint(peer)


@pytest.mark.parametrize("until", ["v1/a", ["v1/a"], (b"v1/a",), None])
def test_a_hint_whose_chain_is_no_tuple_of_names_is_refused(until: Any) -> None:
    with pytest.raises(ConfigError, match=r"hint: until: must be a tuple of names"):
        Hint("peer:1", 5.0, until)


@pytest.mark.parametrize("wait_s", [-0.1, float("nan"), float("inf"), 86_401, True, "5", None])
def test_a_hint_with_an_impossible_wait_is_refused(wait_s: Any) -> None:
    with pytest.raises(ConfigError, match=r"hint: wait_s: must be a number of seconds from 0 to 86400"):
        Hint("peer:1", wait_s)


# What the table answers.


class Table(LookupTable):
    """A table with a clock that a test turns."""

    def __init__(self) -> None:
        self.clock_s = 1000.0
        super().__init__(timeout_s=2.0, ttl_s=60.0, max_keys=1000, max_hits=1, clock=lambda: self.clock_s)

    def turn(self, seconds: float) -> None:
        self.clock_s += seconds
        self.now_s = self.clock_s
        self.expire()

    def send(self) -> list[Probe]:
        return self.take_unsent()

    def answer_all(self, probe: Probe, present: bool) -> list[bytes]:
        return self.answer(probe, probe.keys, present)


@pytest.fixture
def table() -> Table:
    made = Table()
    made.begin("hinted", Hint("peer:1", 5.0))
    return made


def test_the_answer_to_others_is_not_the_answer_to_a_request_that_waits(table: Table) -> None:
    assert table.lookup("plain", b"a") is PENDING
    assert table.lookup("hinted", b"a") is PENDING
    [plain, hinted] = table.send()
    assert (plain.asker, hinted.asker is None) == (None, False)
    table.answer_all(plain, False)
    assert (table.lookup("plain", b"a"), table.lookup("hinted", b"a")) == (MISS, PENDING)
    table.answer_all(hinted, True)
    assert (table.lookup("plain", b"a"), table.lookup("hinted", b"a")) == (MISS, HIT)
    assert table.pending == 0


def test_two_that_wait_share_no_question(table: Table) -> None:
    table.begin("later", Hint("peer:1", 5.0))
    table.lookup("hinted", b"a")
    table.turn(4.0)
    table.lookup("later", b"a")
    [first, second] = table.send()
    table.answer_all(first, False)
    assert (table.lookup("hinted", b"a"), table.lookup("later", b"a")) == (MISS, PENDING)
    table.answer_all(second, True)
    assert table.lookup("later", b"a") is HIT


def test_a_question_that_waits_has_a_second_more_and_holds_up_no_other(table: Table) -> None:
    table.lookup("hinted", b"a")
    for number in range(10):
        table.turn(0.5)
        table.lookup(f"plain-{number}", bytes([number]))
    # Those that were asked more than two seconds ago are given up, though the oldest of all is not.
    assert table.pending == 1 + 5
    assert table.lookup("plain-0", bytes([0])) is MISS
    assert table.lookup("hinted", b"a") is PENDING
    table.turn(1.1)
    assert table.lookup("hinted", b"a") is MISS
    table.turn(2.1)
    assert table.pending == 0
    assert table.timeouts == 11


def test_who_waits_longer_holds_up_nobody_who_waits_less(table: Table) -> None:
    table.begin("patient", Hint("peer:2", 500.0))
    table.lookup("patient", b"a")
    table.lookup("hinted", b"a")
    table.turn(6.1)
    assert table.pending == 1, "a question that nobody looks up again was not given up"
    assert (table.lookup("hinted", b"a"), table.lookup("patient", b"a")) == (MISS, PENDING)


def test_what_is_stored_while_a_request_waits_is_a_hit_whatever_the_answer(table: Table) -> None:
    table.lookup("hinted", b"a")
    [probe] = table.send()
    table.stored([b"a"])
    table.answer_all(probe, False)
    assert table.lookup("hinted", b"a") is HIT
    assert table.is_present(b"a"), "an older answer took what is known to be there for gone"


def test_what_others_lost_does_not_end_the_wait(table: Table) -> None:
    """It is asked elsewhere, and what it waits for may have come since."""
    table.lookup("hinted", b"a")
    [probe] = table.send()
    table.lost(b"a", gone=True)
    table.answer_all(probe, True)
    assert table.lookup("hinted", b"a") is HIT


def test_a_request_that_ends_leaves_nothing_behind(table: Table) -> None:
    table.lookup("hinted", b"a")
    [sent] = table.send()
    table.lookup("hinted", b"b")
    table.end_request("hinted")
    assert sent.over
    assert table.pending == 0
    assert table.take_unsent() == []
    assert table.answer_all(sent, True) == []
    # Whoever has the same id later has no hint.
    table.lookup("hinted", b"a")
    assert table.send()[0].asker is None


def test_the_first_hint_of_a_request_holds(table: Table) -> None:
    table.begin("hinted", Hint("peer:2"))
    table.lookup("hinted", b"a")
    asker = table.send()[0].asker
    assert asker is not None
    assert asker.hint == Hint("peer:1", 5.0)


def test_what_was_asked_before_the_hint_is_sent_without_it(table: Table) -> None:
    table.lookup("late", b"a")
    table.begin("late", Hint("peer:1", 1.0))
    table.lookup("late", b"b")
    assert [(probe.keys, probe.asker is None) for probe in table.send()] == [([b"a"], True), ([b"b"], False)]


def test_after_a_reset_nobody_waits(table: Table) -> None:
    table.lookup("hinted", b"a")
    [probe] = table.send()
    table.clear()
    assert table.lookup("hinted", b"a") is MISS
    assert table.answer_all(probe, True) == []
    assert table.pending == 0


# What is told to the backend.


def groups(*windows: int, state: int | None = None) -> tuple[GroupIdentity, ...]:
    return tuple(
        GroupIdentity(
            kind="full",
            layers=(f"l{number}",),
            payload_bytes=100,
            heads=1,
            head_size=1,
            window=window,
            state_shapes=("float32[1]",) if number == state else (),
        )
        for number, window in enumerate(windows)
    )


def asked(table: Table, some: list[bytes]) -> Probe:
    for one in some:
        table.lookup("hinted", one)
    return table.send()[0]


@pytest.mark.parametrize(
    ("of", "order", "chain"),
    [
        (groups(0), keys(3), keys(3)),
        # Of a group with a window only the end may ever be there, and it is asked for first.
        (groups(0, 512), keys(3) + keys(3, group=1)[::-1], keys(3)),
        (groups(512, 0), keys(3, group=1) + keys(3)[::-1], keys(3, group=1)),
        (groups(0, 0), keys(3) + keys(2, group=1), keys(3)),
        (groups(512), keys(3)[::-1], [key(2)]),
        (groups(0, state=0), keys(3)[::-1], [key(2)]),
    ],
)
def test_a_wait_is_for_a_chain_that_can_be_whole(
    of: tuple[GroupIdentity, ...], order: list[bytes], chain: list[bytes], table: Table
) -> None:
    meaning = identity(groups=of)
    hint = Waits(meaning).hint(meaning.namespace, asked(table, order), table.clock_s)
    assert hint == Hint("peer:1", 5.0, tuple(ChunkKey.from_engine(meaning.namespace, one).name for one in chain))


def test_a_request_waits_once_however_often_it_asks(table: Table) -> None:
    meaning = identity()
    waits = Waits(meaning)

    def wait_s(one: bytes) -> float:
        hint = waits.hint(meaning.namespace, asked(table, [one]), table.clock_s)
        assert hint is not None
        return hint.wait_s

    assert wait_s(key(0)) == 5.0
    table.turn(3.0)
    assert wait_s(key(1)) == pytest.approx(2.0)
    table.turn(3.0)
    assert wait_s(key(2)) == 0.0


def test_without_a_hint_nothing_is_told(table: Table) -> None:
    table.lookup("plain", key(0))
    assert Waits(identity()).hint(identity().namespace, table.send()[0], table.clock_s) is None
