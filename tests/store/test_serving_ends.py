"""After a reset, and when the store is closed, nothing of before is lent, and nothing that was is forgotten."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from serving_backend import ReadOnly, Serving, is_record, names
from store_bench import LIMIT_S, Stand, Wide, key, keys

from kvstore_sdk.testing import Fault, FaultyBackend, Hang, Raise
from kvstore_sdk_backends.memory import open_memory

NewStand = Callable[..., Stand]


@pytest.fixture
def serving() -> Serving:
    return Serving(Wide(open_memory("")))


def test_after_a_reset_nothing_of_before_is_served(new_stand: NewStand, serving: Serving) -> None:
    stand = new_stand(serving)
    stand.put(keys(2))
    stand.settle()
    before = names(stand, keys(2))
    old = stand.identity
    stand.store.reset("w1")
    now = stand.store.identity
    assert serving.heard == [("identity", old.namespace, old.layout), ("serve",), ("identity", now.namespace, now.layout)]
    assert serving.source.namespace == now.namespace
    stand.generation = 1
    stand.put(keys(2))
    assert serving.source.sizes(before) == [0, 0]
    assert serving.source.lend(before) == [None, None]
    loans = serving.lend(names(stand, keys(2)))
    assert all(loan is not None and loan.seal() for loan in loans)
    assert is_record(stand, loans[0], key(0))


def test_a_loan_from_before_a_reset_is_good_only_if_it_was_sealed(new_stand: NewStand) -> None:
    serving = ReadOnly(open_memory(""))
    stand = new_stand(serving, slots=8)
    stand.put(keys(2))
    sealed, unsealed = serving.lend(names(stand, keys(2)))
    assert sealed is not None
    assert unsealed is not None
    assert sealed.seal()
    old = stand.identity.namespace
    stand.store.reset("w1")
    assert sealed.seal()
    assert not unsealed.seal()
    # Its bytes are where they were, whatever is stored meanwhile.
    stand.put(keys(8, start=50))
    assert is_record(stand, sealed, key(0), old)
    serving.give_back([sealed, unsealed])
    assert stand.is_at_rest()
    assert stand.put(keys(8, start=70)) is not None


def test_while_a_reset_waits_for_a_tier_a_source_answers_and_has_nothing(new_stand: NewStand, serving: Serving) -> None:
    """The backend of the source may be the one that the reset waits for."""
    hung = FaultyBackend(Wide(open_memory("")), [Fault("put", Hang())])
    stand = new_stand({"hung": hung, "peers": serving}, tier_settings={"drain_timeout_s": LIMIT_S})
    stand.put(keys(2))
    loans: list[Any] = serving.lend(names(stand, keys(2)))
    assert hung.wait_hanging(timeout_s=LIMIT_S)
    before = names(stand, keys(2))
    answers: list[Any] = []
    thread = threading.Thread(target=stand.store.reset, args=("w1",))
    thread.start()
    try:
        until_s = time.monotonic() + LIMIT_S
        while serving.source.sizes(before) != [0, 0] and time.monotonic() < until_s:
            time.sleep(0.001)
        answers = [serving.source.sizes(before), serving.source.lend(before)]
        serving.give_back(loans)
        assert thread.is_alive(), "the reset was over before the source was asked"
    finally:
        hung.heal()
        thread.join(LIMIT_S)
    assert answers == [[0, 0], [None, None]]
    stand.settle()
    assert stand.is_at_rest()


def test_a_tier_that_could_not_be_reset_serves_no_more(new_stand: NewStand, serving: Serving, monkeypatch: Any) -> None:
    stand = new_stand(serving)

    def fails(*arguments: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(stand.tiers[0].tier, "reset", fails)
    stand.store.reset("w1")
    stand.generation = 1
    stand.put(keys(1))
    assert serving.source.sizes(names(stand, keys(1))) == [0]
    assert serving.source.lend(names(stand, keys(1))) == [None]


def test_a_backend_gives_back_at_close_and_nothing_is_pinned_then(new_stand: NewStand, serving: Serving) -> None:
    stand = new_stand(serving)
    stand.put(keys(4))
    stand.settle()
    serving.lend(names(stand, keys(4)))
    assert stand.store.close() is True
    assert stand.is_at_rest()
    assert serving.source.sizes(names(stand, keys(4))) == [0] * 4
    assert serving.source.lend(names(stand, keys(4))) == [None] * 4


def test_memory_that_is_still_lent_after_close_stays_mapped(new_stand: NewStand, serving: Serving, caplog: Any) -> None:
    stand = new_stand(serving)
    stand.put(keys(1))
    stand.settle()
    serving.gives_back = False
    serving.lend(names(stand, keys(1)))
    assert stand.store.close() is False
    assert "has to stay mapped" in caplog.text
    # Whoever is late with it hurts nobody.
    serving.give_back(list(serving.loans))


def test_a_backend_that_does_not_take_its_source_gets_nothing(new_stand: NewStand, caplog: Any) -> None:
    class Keeps(Serving):
        def serve(self, source: Any) -> None:
            super().serve(source)
            raise RuntimeError("not today")

    serving = Keeps(Wide(open_memory("")))
    stand = new_stand(serving)
    stand.put(keys(1))
    assert serving.source.sizes(names(stand, keys(1))) == [0]
    assert serving.source.lend(names(stand, keys(1))) == [None]
    assert "does not serve" in caplog.text


def test_a_source_passes_through_wrappers(new_stand: NewStand, serving: Serving) -> None:
    stand = new_stand(FaultyBackend(serving, [Fault("get", Raise())]))
    stand.put(keys(1))
    assert serving.source.sizes(names(stand, keys(1))) == [stand.record_bytes]
