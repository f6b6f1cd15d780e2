"""What is in host memory is lent to others: only what is whole, sealed first, for as long as they read it, and beside everything else."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from serving_backend import ReadOnly, Serving, is_record, names
from store_bench import LIMIT_S, Stand, Wide, key, keys

from kvstore_sdk.backend import Loan
from kvstore_sdk.keys import ChunkKey
from kvstore_sdk.store import serving as module
from kvstore_sdk.tier import Lookup
from kvstore_sdk_backends.memory import open_memory

NewStand = Callable[..., Stand]


@pytest.fixture
def serving() -> Serving:
    return Serving(Wide(open_memory("")))


# What there is.


def test_what_is_ready_is_told_and_lent_and_nothing_else(new_stand: NewStand, serving: Serving) -> None:
    stand = new_stand(serving)
    stand.put(keys(2))
    slots = stand.store.begin_store("r", keys(1, start=2))
    assert slots is not None
    there, filling, nowhere = names(stand, keys(2)), names(stand, keys(1, start=2)), names(stand, keys(1, start=3))
    other = ChunkKey.from_engine("0" * 32, key(0)).name
    strange = ["", "v1", "manifest.json", f"v1/{stand.identity.namespace}/manifest.json", "../x", there[0] + "0"]
    asked = [*there, *filling, *nowhere, other, *strange]
    size = stand.record_bytes
    assert serving.source.sizes(asked) == [size, size] + [0] * (len(asked) - 2)
    loans = serving.lend(asked)
    assert [loan is not None for loan in loans] == [True, True] + [False] * (len(asked) - 2)
    assert [loan.name for loan in loans if loan is not None] == there
    assert (serving.source.namespace, serving.source.layout) == (stand.identity.namespace, stand.identity.layout)
    serving.give_back(loans)
    stand.write(slots)
    stand.store.end_store(keys(1, start=2))
    assert serving.source.sizes(filling) == [size]


def test_what_is_lent_is_the_sealed_record(new_stand: NewStand, serving: Serving) -> None:
    stand = new_stand(serving, sizes=(5000, 900))
    some = keys(3) + keys(2, group=1)
    stand.put(some)
    loans = serving.lend(names(stand, some))
    assert all(loan is not None and loan.seal() and loan.sealed and loan.seal() for loan in loans)
    assert all(is_record(stand, loan, one) for loan, one in zip(loans, some, strict=True))


def test_without_a_tier_that_stores_nothing_is_sealed_before_somebody_asks(new_stand: NewStand) -> None:
    serving = ReadOnly(open_memory(""))
    stand = new_stand(serving)
    stand.put(keys(2))
    stand.settle()
    assert not any(thread.name.startswith("test-seal") for thread in threading.enumerate())
    slots = [stand.host.get(one) for one in keys(2)]
    assert [slot is not None and slot.sealed for slot in slots] == [False, False]
    loans = serving.lend(names(stand, keys(2)))
    assert all(loan is not None and loan.seal() for loan in loans)
    assert is_record(stand, loans[0], key(0))
    assert not stand.total("cascades")


def test_what_a_tier_brought_is_lent_as_it_is(new_stand: NewStand, serving: Serving) -> None:
    stand = new_stand({"below": open_memory(""), "peers": serving})
    stand.put(keys(2))
    stand.evict_all()
    assert serving.source.sizes(names(stand, keys(2))) == [0, 0]
    assert stand.hits(keys(2)) == 2
    loans = serving.lend(names(stand, keys(2)))
    assert all(loan is not None and loan.seal() for loan in loans)
    assert is_record(stand, loans[1], key(1))


def test_two_that_seal_one_slot_do_no_harm(new_stand: NewStand, serving: Serving) -> None:
    """The thread that seals for tiers, and any number of loans of one record: all write the same bytes."""
    stand = new_stand(serving, sizes=(300_000,), slots=16)
    for turn in range(5):
        some = keys(8, start=100 * turn)
        stand.put(some)
        loans = [loan for _ in range(3) for loan in serving.lend(names(stand, some))]
        sealed: list[bool] = []
        parts = ((sealed, loans[:12]), (sealed, loans[12:]))
        threads = [threading.Thread(target=lambda into, part: into.extend(loan.seal() for loan in part), args=part) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        assert sealed == [True] * len(loans)
        assert all(is_record(stand, loan, one) for loan, one in zip(loans, some * 3, strict=True))
        serving.give_back(loans)
        stand.settle()
        assert all(stand.has("below", one) for one in some)
    stand.evict_all()
    # What the tier was given was whole, too.
    assert stand.hits(keys(8, start=400)) == 8


def test_a_chunk_that_cannot_be_sealed_is_not_to_be_sent(new_stand: NewStand, monkeypatch: Any, caplog: Any) -> None:
    serving = ReadOnly(open_memory(""))
    stand = new_stand(serving)
    stand.put(keys(1))

    def fails(*arguments: object) -> None:
        raise ValueError("no")

    monkeypatch.setattr(module, "seal", fails)
    [loan] = serving.lend(names(stand, keys(1)))
    assert loan is not None
    assert not loan.seal()
    assert stand.total("faults", "seal") == 1
    assert "could not be sealed" in caplog.text


# For how long.


def test_what_is_lent_stays_and_what_is_given_back_may_go(new_stand: NewStand) -> None:
    """LEAK-02"""
    serving = ReadOnly(open_memory(""))
    stand = new_stand(serving, slots=8)
    stand.put(keys(4))
    loans = serving.lend(names(stand, keys(2)))
    assert stand.store.metrics.gauge_value("lent_chunks") == 2
    stand.put(keys(6, start=50))
    assert [stand.host.get(one) is not None for one in keys(4)] == [True, True, False, False]
    assert all(loan is not None and loan.seal() for loan in loans)
    assert is_record(stand, loans[0], key(0))
    serving.give_back(loans)
    assert stand.is_at_rest()
    stand.put(keys(8, start=70))
    assert [stand.host.get(one) for one in keys(2)] == [None, None]


def test_a_loan_ends_once(new_stand: NewStand, serving: Serving) -> None:
    """Given back twice, at the same time as well; the second time changes nothing."""
    stand = new_stand(serving)
    stand.put(keys(1))
    stand.settle()
    first, second = [loan for _ in range(2) for loan in serving.lend(names(stand, keys(1)))]
    assert first is not None
    assert second is not None
    threads = [threading.Thread(target=serving.source.give_back, args=([first, first],)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert stand.store.metrics.gauge_value("lent_chunks") == 1
    assert not first.seal()
    assert second.seal()
    serving.source.give_back([second])
    assert stand.is_at_rest()
    assert stand.host.stats().double_releases == 7


def test_loans_of_others_are_not_taken(new_stand: NewStand, serving: Serving) -> None:
    stand = new_stand({"one": serving, "other": (other := Serving(Wide(open_memory(""))))})
    stand.put(keys(1))
    stand.settle()
    [loan] = serving.lend(names(stand, keys(1)))
    foreign: Any = object()
    other.source.give_back([loan, foreign])  # type: ignore[list-item]
    assert stand.pinned() == 1


# How much.


def test_lending_leaves_the_reserve_and_a_share_to_others(new_stand: NewStand) -> None:
    serving = ReadOnly(open_memory(""))
    stand = new_stand(serving, slots=16, cascade_fraction=0.5)
    stand.put(keys(16))
    loans = serving.lend(names(stand, keys(16)))
    lent = [loan for loan in loans if loan is not None]
    assert len(lent) == 8
    assert (stand.total("loans", "below", "lent"), stand.total("loans", "below", "refused")) == (8, 8)
    # The rest goes on: hits are held, and stores find room.
    assert stand.ask(keys(4), stand.request()) == [Lookup.HIT] * 4
    assert stand.put(keys(4, start=50)) is not None
    serving.give_back(lent[:3])
    # Five more loans of what is lent already, and three of others.
    again = serving.lend(names(stand, keys(16)))
    assert sum(loan is not None for loan in again) == 8
    assert stand.store.metrics.gauge_value("lent_chunks") == 8


def test_where_the_reserve_is_all_that_is_left_nothing_is_lent(new_stand: NewStand) -> None:
    serving = ReadOnly(open_memory(""))
    stand = new_stand(serving, slots=8, reserve=6, cascade_fraction=1.0)
    stand.put(keys(8))
    loans = serving.lend(names(stand, keys(8)))
    assert sum(loan is not None for loan in loans) == 2
    # Many loans of one record take its place once.
    for _ in range(3):
        assert all(loan is not None for loan in serving.lend(names(stand, keys(2))))
    assert stand.store.metrics.gauge_value("lent_chunks") == 2


def test_what_a_request_was_told_is_there_is_not_lent_away(new_stand: NewStand) -> None:
    """Its hits are pinned before anything else takes the room for them."""
    serving = ReadOnly(open_memory(""))
    stand = new_stand(serving, slots=8, reserve=2, cascade_fraction=1.0)
    stand.put(keys(8))
    request = stand.request()
    assert [stand.store.lookup(request, one) for one in keys(4)] == [Lookup.HIT] * 4
    assert sum(loan is not None for loan in serving.lend(names(stand, keys(4, start=4)))) == 2
    stand.put(keys(2, start=50))
    stand.load(request, keys(4))


def test_what_is_lent_counts_with_what_the_tier_stores(new_stand: NewStand, serving: Serving) -> None:
    """A tier whose peers hold its share waits its turn with stores, and the other tiers do not."""
    stand = new_stand({"files": open_memory(""), "peers": serving}, slots=16, cascade_fraction=0.5)
    stand.put(keys(4))
    stand.settle()
    loans = serving.lend(names(stand, keys(4)))
    assert all(loan is not None for loan in loans)
    stand.put(keys(2, start=50))
    stand.wait(lambda: all(stand.has("files", one) for one in keys(2, start=50)), "the stores to files")
    assert not any(stand.has("peers", one) for one in keys(2, start=50))
    serving.give_back(loans)
    stand.wait(lambda: all(stand.has("peers", one) for one in keys(2, start=50)), "the stores to peers")


# Beside the engine.


def test_a_source_answers_while_the_engine_does_something_else(new_stand: NewStand, serving: Serving) -> None:
    """LIV-06: no step is needed, from whatever thread it is asked."""
    stand = new_stand(serving, slots=32)
    stand.put(keys(8))
    stand.settle()
    done: list[bool] = []

    def ask() -> None:
        for _ in range(50):
            loans: list[Loan | None] = [None]
            until_s = time.monotonic() + LIMIT_S
            # A machine that stands still may keep one of the others in the middle of it.
            while not any(loans) and time.monotonic() < until_s:
                loans = serving.source.lend(names(stand, keys(8)))
            done.append(all(loan is not None and loan.seal() for loan in loans))
            serving.source.give_back([loan for loan in loans if loan is not None])

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        # The engine is away: nothing polls or flushes.
        thread.join(LIMIT_S)
    assert done == [True] * 200
    assert stand.is_at_rest()


def test_sizes_are_told_whoever_holds_the_store(new_stand: NewStand, serving: Serving) -> None:
    stand = new_stand(serving)
    stand.put(keys(1))
    answers: list[Any] = []

    def ask() -> None:
        answers.append(serving.source.sizes(names(stand, keys(1))))
        answers.append(serving.source.lend(names(stand, keys(1))))

    with stand.store._lock:
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join(LIMIT_S)
        assert not thread.is_alive(), "a call waited for the store"
    assert answers == [[stand.record_bytes], [None]]


def test_what_is_given_back_while_the_store_is_busy_is_taken_in_later(new_stand: NewStand, serving: Serving) -> None:
    stand = new_stand(serving)
    stand.put(keys(2))
    stand.settle()
    loans = serving.lend(names(stand, keys(2)))
    with stand.store._lock:
        thread = threading.Thread(target=serving.give_back, args=(loans,))
        thread.start()
        thread.join(LIMIT_S)
        assert not thread.is_alive(), "a call waited for the store"
    assert stand.pinned() == 2
    stand.step()
    assert stand.is_at_rest()


def test_whatever_a_request_does_meanwhile_no_byte_that_is_lent_changes(new_stand: NewStand, serving: Serving) -> None:
    stand = new_stand({"files": open_memory(""), "peers": serving}, slots=24, tier_settings={"breaker_failures": 1000})
    chance = random.Random(7)
    stop = threading.Event()
    wrong: list[str] = []
    lent = 0

    def read() -> None:
        nonlocal lent
        draw = random.Random(11)
        while not stop.is_set():
            some = [key(draw.randrange(40)) for _ in range(3)]
            loans = serving.source.lend(names(stand, some))
            for loan, one in zip(loans, some, strict=True):
                if loan is not None:
                    lent += 1
                    if not (loan.seal() and is_record(stand, loan, one)):
                        wrong.append(loan.name)
            time.sleep(0.0005)
            if not all(loan is None or is_record(stand, loan, one) for loan, one in zip(loans, some, strict=True)):
                wrong.append("changed while it was lent")
            serving.source.give_back([loan for loan in loans if loan is not None])

    thread = threading.Thread(target=read)
    thread.start()
    try:
        until_s = time.monotonic() + LIMIT_S
        for turn in range(300):
            start = chance.randrange(36)
            if chance.random() < 0.5:
                stand.put(keys(chance.randrange(1, 5), start=start))
            else:
                stand.hits(keys(4, start=start))
            stand.step()
            if turn >= 100 and lent > 100:
                break
            assert time.monotonic() < until_s + 60
    finally:
        stop.set()
        thread.join(LIMIT_S)
    assert wrong == []
    assert lent
    stand.settle()
    assert stand.is_at_rest()
