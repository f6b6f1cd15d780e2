"""Requests that name a peer: whom the backend hears of, how long their look-ups wait, and that nobody else does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from asked_peer import AskedPeer
from tier_bench import LIMIT_S, PATIENT, Engine, identity, key, keys

from kvstore_sdk.backend import ConfigError, Hint, UnavailableError
from kvstore_sdk.identity import GroupIdentity
from kvstore_sdk.keys import ChunkKey
from kvstore_sdk.testing import BackendWrapper, Fault, FaultyBackend, Hang, Raise
from kvstore_sdk.tier import Lookup
from kvstore_sdk.tier.hints import Waits
from kvstore_sdk.tier.lookups import LookupTable, Probe
from kvstore_sdk_backends.memory import open_memory

NewEngine = Callable[..., Engine]

HIT, MISS, PENDING = Lookup.HIT, Lookup.MISS, Lookup.PENDING


# What a hint may be.


@pytest.mark.parametrize("peer", ["", "x" * 1025, None, 7])
def test_a_hint_without_an_address_is_refused(peer: Any) -> None:
    with pytest.raises(ConfigError, match=r"hint: peer: must be an address"):
        Hint(peer)


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

    def send(self) -> list[list[Probe]]:
        return self.take_unsent()


@pytest.fixture
def table() -> Table:
    made = Table()
    made.begin("hinted", Hint("peer:1", 5.0))
    return made


def test_the_answer_to_others_is_not_the_answer_to_a_request_that_waits(table: Table) -> None:
    assert table.lookup("plain", b"a") is PENDING
    assert table.lookup("hinted", b"a") is PENDING
    [[plain], [hinted]] = table.send()
    assert (plain.asker, hinted.asker is None) == (None, False)
    table.answer(plain, False)
    assert (table.lookup("plain", b"a"), table.lookup("hinted", b"a")) == (MISS, PENDING)
    table.answer(hinted, True)
    assert (table.lookup("plain", b"a"), table.lookup("hinted", b"a")) == (MISS, HIT)
    assert table.pending == 0


def test_two_that_wait_share_no_question(table: Table) -> None:
    table.begin("later", Hint("peer:1", 5.0))
    table.lookup("hinted", b"a")
    table.turn(4.0)
    table.lookup("later", b"a")
    [[first], [second]] = table.send()
    table.answer(first, False)
    assert (table.lookup("hinted", b"a"), table.lookup("later", b"a")) == (MISS, PENDING)
    table.answer(second, True)
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
    [[probe]] = table.send()
    table.stored([b"a"])
    table.answer(probe, False)
    assert table.lookup("hinted", b"a") is HIT
    assert table.is_present(b"a"), "an older answer took what is known to be there for gone"


def test_what_others_lost_does_not_end_the_wait(table: Table) -> None:
    """It is asked elsewhere, and what it waits for may have come since."""
    table.lookup("hinted", b"a")
    [[probe]] = table.send()
    table.lost(b"a", gone=True)
    table.answer(probe, True)
    assert table.lookup("hinted", b"a") is HIT


def test_a_request_that_ends_leaves_nothing_behind(table: Table) -> None:
    table.lookup("hinted", b"a")
    [[sent]] = table.send()
    table.lookup("hinted", b"b")
    table.end_request("hinted")
    assert sent.over
    assert table.pending == 0
    assert table.take_unsent() == []
    assert table.answer(sent, True) is False
    # Whoever has the same id later has no hint.
    table.lookup("hinted", b"a")
    assert table.send()[0][0].asker is None


def test_the_first_hint_of_a_request_holds(table: Table) -> None:
    table.begin("hinted", Hint("peer:2"))
    table.lookup("hinted", b"a")
    asker = table.send()[0][0].asker
    assert asker is not None
    assert asker.hint == Hint("peer:1", 5.0)


def test_what_was_asked_before_the_hint_is_sent_without_it(table: Table) -> None:
    table.lookup("late", b"a")
    table.begin("late", Hint("peer:1", 1.0))
    table.lookup("late", b"b")
    assert [[(probe.key, probe.asker is None) for probe in probes] for probes in table.send()] == [[(b"a", True)], [(b"b", False)]]


def test_after_a_reset_nobody_waits(table: Table) -> None:
    table.lookup("hinted", b"a")
    [[probe]] = table.send()
    table.clear()
    assert table.lookup("hinted", b"a") is MISS
    assert table.answer(probe, True) is False
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


def asked(table: Table, some: list[bytes]) -> list[Probe]:
    for one in some:
        table.lookup("hinted", one)
    return table.send()[0]


@pytest.mark.parametrize(
    ("of", "order", "last"),
    [
        (groups(0), keys(3), key(2)),
        # Of a group with a window only the end may ever be there, and it is asked for first.
        (groups(0, 512), keys(3) + keys(3, group=1)[::-1], key(2)),
        (groups(512, 0), keys(3, group=1) + keys(3)[::-1], key(2, 1)),
        (groups(0, 0), keys(3) + keys(2, group=1), key(2)),
        (groups(512), keys(3)[::-1], key(2)),
        (groups(0, state=0), keys(3)[::-1], key(2)),
    ],
)
def test_a_wait_ends_with_what_comes_last_of_a_chain(of: tuple[GroupIdentity, ...], order: list[bytes], last: bytes, table: Table) -> None:
    meaning = identity(groups=of)
    hint = Waits(meaning).hint(meaning.namespace, asked(table, order), table.clock_s)
    assert hint == Hint("peer:1", 5.0, ChunkKey.from_engine(meaning.namespace, last).name)


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


# What a tier does.

ELSEWHERE = "test-hints"


@pytest.fixture
def shelf() -> str:
    return f"{ELSEWHERE}-{time.monotonic_ns()}"


@pytest.fixture
def peer(shelf: str) -> AskedPeer:
    return AskedPeer(open_memory(shelf))


@pytest.fixture
def new_patient(new_engine: NewEngine, peer: AskedPeer) -> Callable[..., Engine]:
    """An engine over the peer, with time for everything but look-ups that nobody answers."""

    def make(backend: Any = None, **settings: Any) -> Engine:
        return new_engine(backend or peer, **(PATIENT | settings))

    return make


def fill(new_engine: NewEngine, shelf: str, some: list[bytes], peer: AskedPeer | None = None) -> None:
    """Somebody else stores chunks in the peer's store."""
    writer = new_engine(open_memory(shelf), **PATIENT)
    assert writer.store(some).done == tuple(some)
    if peer is not None:
        with peer._changed:
            peer._changed.notify_all()


def test_a_look_up_waits_for_what_the_named_peer_is_about_to_have(
    new_engine: NewEngine, new_patient: Callable[..., Engine], peer: AskedPeer, shelf: str
) -> None:
    engine = new_patient(lookup_timeout_s=0.05)
    some = keys(3)
    engine.tier.begin_request("r", Hint("peer:1", LIMIT_S))
    assert [engine.tier.lookup("r", one) for one in some] == [PENDING] * 3
    engine.wait(lambda: peer.waiting == 1, "the wait")
    # Far longer than others wait.
    engine.steps(0.3)
    assert [engine.tier.lookup("r", one) for one in some] == [PENDING] * 3
    fill(new_engine, shelf, some, peer)
    assert engine.ask(some, "r") == [HIT] * 3
    assert engine.load(some).done == tuple(some)
    [(thread, names, hint)] = peer.told
    [(asker, asked_names, left_s)] = peer.asked
    assert (thread, names) == (asker, asked_names)
    assert (hint.peer, hint.until) == ("peer:1", names[-1])
    assert LIMIT_S - 5 < hint.wait_s <= LIMIT_S
    assert hint.wait_s < left_s < LIMIT_S + 1


def test_a_wait_that_ends_without_it_is_a_miss_and_no_failure(new_patient: Callable[..., Engine], peer: AskedPeer) -> None:
    engine = new_patient(breaker_failures=1)
    engine.tier.begin_request("r", Hint("peer:1", 0.2))
    assert engine.ask(keys(2), "r") == [MISS] * 2
    assert not engine.tier._exists.is_open
    assert not engine.total("call_failures")
    assert not engine.total("lookup_timeouts")
    assert not engine.total("abandoned_calls")


def test_waits_keep_no_thread_from_look_ups_loads_and_stores(
    new_engine: NewEngine, new_patient: Callable[..., Engine], peer: AskedPeer, shelf: str
) -> None:
    fill(new_engine, shelf, keys(4))
    engine = new_patient(io_threads=2)
    for number in range(12):
        engine.tier.begin_request(f"w{number}", Hint("peer:1", 10 * LIMIT_S))
        assert engine.tier.lookup(f"w{number}", key(100 + number)) is PENDING
        engine.step()
    engine.wait(lambda: peer.waiting == 12, "twelve waits")
    assert engine.ask(keys(4)) == [HIT] * 4
    assert engine.load(keys(4)).done == tuple(keys(4))
    assert engine.store(keys(4, start=50)).done == tuple(keys(4, start=50))
    assert peer.waiting == 12
    # The threads are let go with the waits.
    for number in range(12):
        engine.tier.end_request(f"w{number}")
    fill(new_engine, shelf, [key(100 + number) for number in range(12)], peer)
    engine.wait(lambda: peer.waiting == 0 and len([one for one in engine.tier._crew.threads if one.is_alive()]) == 2, "two threads")


def test_more_waits_than_the_backend_allows_calls_take_turns(new_patient: Callable[..., Engine], shelf: str) -> None:
    peer = AskedPeer(open_memory(shelf), max_concurrency=5)
    engine = new_patient(peer, io_threads=2)
    for number in range(6):
        engine.tier.begin_request(f"w{number}", Hint("peer:1", 0.1))
        engine.tier.lookup(f"w{number}", key(number))
        engine.step()
    most = 0

    def answered() -> bool:
        nonlocal most
        most = max(most, peer.waiting)
        return all(engine.tier.lookup(f"w{number}", key(number)) is MISS for number in range(6))

    engine.wait(answered, "all misses")
    assert most == 1, "one call more than twice the threads is all there is"


def test_where_no_thread_can_be_spared_nothing_waits(new_patient: Callable[..., Engine], shelf: str) -> None:
    peer = AskedPeer(open_memory(shelf), max_concurrency=4)
    engine = new_patient(peer, io_threads=2)
    engine.tier.begin_request("r", Hint("peer:1", 10 * LIMIT_S))
    assert engine.ask(keys(1), "r") == [MISS]
    assert [hint for _, _, hint in peer.told] == [Hint("peer:1")]


def test_a_request_that_names_nobody_who_is_there_opens_no_breaker(new_patient: Callable[..., Engine], peer: AskedPeer) -> None:
    """Else one request could take the peers of all others away."""
    faulty = FaultyBackend(peer, [Fault("exists", Raise(lambda: UnavailableError("no such peer")))])
    engine = new_patient(faulty, breaker_failures=1)
    for number in range(5):
        engine.tier.begin_request(f"r{number}", Hint("nobody:1", 1.0))
        assert engine.ask([key(number)], f"r{number}") == [MISS]
    assert engine.total("call_failures", "exists") == 5
    assert not engine.tier._exists.is_open
    assert engine.ask([key(9)]) == [MISS]
    assert engine.tier._exists.is_open


def test_a_wait_that_outlives_its_deadline_is_late_as_any_call(new_patient: Callable[..., Engine], peer: AskedPeer) -> None:
    faulty = FaultyBackend(peer, [Fault("exists", Hang())])
    engine = new_patient(faulty, breaker_failures=1, lookup_timeout_s=0.3)
    engine.tier.begin_request("r", Hint("peer:1", 0.1))
    assert engine.ask([key(0)], "r") == [MISS]
    engine.wait(lambda: engine.total("abandoned_calls", "exists") == 1, "the late call")
    assert engine.tier._exists.is_open


def test_a_hint_that_raises_is_survived(new_patient: Callable[..., Engine], peer: AskedPeer, caplog: Any) -> None:
    faulty = FaultyBackend(peer, [Fault("hint", Raise(lambda: SystemExit("no hints today")))])
    engine = new_patient(faulty)
    engine.store(keys(1))
    engine.tier._table.clear()
    engine.tier.begin_request("r", Hint("peer:1", 1.0))
    assert engine.ask(keys(1), "r") == [HIT]
    assert engine.total("call_failures", "hint") == 1
    assert "hint: raised SystemExit: no hints today" in caplog.text


def test_a_backend_that_takes_no_hints_is_asked_as_ever(new_engine: NewEngine) -> None:
    engine = new_engine(BackendWrapper(open_memory("")), **PATIENT)
    engine.tier.begin_request("r", Hint("peer:1", 10 * LIMIT_S))
    assert engine.ask(keys(2), "r") == [MISS] * 2


def test_a_reset_ends_waits_at_once(new_patient: Callable[..., Engine], peer: AskedPeer) -> None:
    engine = new_patient()
    engine.tier.begin_request("r", Hint("peer:1", 10 * LIMIT_S))
    engine.tier.lookup("r", key(0))
    engine.wait(lambda: peer.waiting == 1, "the wait")
    engine.tier.reset("w1")
    assert engine.tier.lookup("r", key(0)) is MISS


def test_close_waits_for_no_wait(new_patient: Callable[..., Engine], peer: AskedPeer) -> None:
    """The backend ends it, and nothing counts as touched for it."""
    engine = new_patient(close_timeout_s=10 * LIMIT_S)
    engine.tier.begin_request("r", Hint("peer:1", 100 * LIMIT_S))
    engine.tier.lookup("r", key(0))
    engine.wait(lambda: peer.waiting == 1, "the wait")
    engine.tier.close()
    assert peer.waiting == 0
    assert not engine.tier.touches_memory


def test_the_end_of_a_request_drops_what_it_did_not_ask_yet(new_engine: NewEngine, new_patient: Callable[..., Engine], shelf: str) -> None:
    peer = AskedPeer(open_memory(shelf), max_concurrency=5)
    engine = new_patient(peer, io_threads=2)
    for number, wait_s in enumerate((10 * LIMIT_S, 10 * LIMIT_S, 0.2)):
        engine.tier.begin_request(f"w{number}", Hint("peer:1", wait_s))
        engine.tier.lookup(f"w{number}", key(number))
        engine.step()
    engine.wait(lambda: peer.waiting == 1, "the wait")
    engine.tier.end_request("w1")
    fill(new_engine, shelf, [key(0)], peer)
    engine.wait(lambda: engine.tier.lookup("w2", key(2)) is MISS, "the end of the last wait")
    assert len(peer.told) == 2


# Whose records they are.


def test_the_identity_is_told_before_anything_else_and_after_a_reset_before_the_next(
    new_patient: Callable[..., Engine], peer: AskedPeer
) -> None:
    engine = new_patient()
    before = engine.tier.identity
    assert peer.identities == [(before.namespace, before.layout, 0)]
    engine.ask(keys(2))
    asked_before = len(peer.asked)
    engine.tier.reset("w1")
    after = engine.tier.identity
    assert after.namespace != before.namespace
    engine.ask(keys(2))
    assert peer.identities[1:] == [(after.namespace, after.layout, asked_before)]
    assert all(name.split("/")[1] == after.namespace for _, names, _ in peer.asked[asked_before:] for name in names)


def test_a_backend_that_does_not_take_the_identity_is_used_all_the_same(new_engine: NewEngine, peer: AskedPeer, caplog: Any) -> None:
    faulty = FaultyBackend(peer, [Fault("use_identity", Raise(lambda: SystemExit("no")))])
    engine = new_engine(faulty, **PATIENT)
    assert engine.store(keys(1)).done == tuple(keys(1))
    engine.tier.reset("w1")
    assert engine.store(keys(1)).done == tuple(keys(1))
    assert "the backend did not take the identity" in caplog.text


def test_only_a_backend_that_serves_is_given_a_source(new_engine: NewEngine, peer: AskedPeer) -> None:
    class Serves(BackendWrapper):
        sources: list[Any]

        def __init__(self, inner: Any) -> None:
            super().__init__(inner)
            self.sources = []

        def serve(self, source: Any) -> None:
            self.sources.append(source)

    source: Any = object()
    serves = Serves(open_memory(""))
    assert new_engine(serves, **PATIENT).tier.serve(source) is True
    assert serves.sources == [source]
    assert new_engine(peer, **PATIENT).tier.serve(source) is False
    faulty = FaultyBackend(Serves(open_memory("")), [Fault("serve", Raise(lambda: SystemExit("no")))])
    assert new_engine(faulty, **PATIENT).tier.serve(source) is False
