"""Requests that name a peer: whom the backend hears of, how long their look-ups wait, and that nobody else does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from asked_peer import AskedPeer
from tier_bench import LIMIT_S, PATIENT, Engine, key, keys

from kvstore_sdk.backend import Hint, UnavailableError
from kvstore_sdk.testing import BackendWrapper, Fault, FaultyBackend, Hang, Raise
from kvstore_sdk.tier import Lookup
from kvstore_sdk_backends.memory import open_memory

NewEngine = Callable[..., Engine]

HIT, MISS, PENDING = Lookup.HIT, Lookup.MISS, Lookup.PENDING


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
    engine.tier.begin_request("r", Hint("peer:1", 10 * LIMIT_S))
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
    assert (hint.peer, hint.until) == ("peer:1", tuple(names))
    assert 9 * LIMIT_S < hint.wait_s <= 10 * LIMIT_S
    assert hint.wait_s < left_s < 10 * LIMIT_S + 1


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
    engine.wait(lambda: all(engine.tier.lookup(f"w{number}", key(number)) is MISS for number in range(6)), "all misses")
    assert peer.most_waiting == 1, "one call more than twice the threads is all there is"


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
    engine = new_patient(faulty, breaker_failures=1)
    engine.tier.begin_request("r", Hint("peer:1", 0.1))
    assert engine.tier.lookup("r", key(0)) is PENDING
    engine.step()
    assert faulty.wait_hanging()
    engine.time_is_up()
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
