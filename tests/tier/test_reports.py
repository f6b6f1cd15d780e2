"""A backend that wants to know hears which of the records that it gave were corrupt, and may have the next one from elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tier_bench import Engine, Shop, key, keys

from kvstore_sdk.backend import Deadline, Get, GetResult, GetStatus, SupportsReports
from kvstore_sdk.testing import BackendWrapper
from kvstore_sdk_backends.memory import open_memory

NewEngine = Callable[..., Engine]


@pytest.fixture(params=["staged", "direct", "polled"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class TwoPlaces(BackendWrapper):
    """One of whose two places spoils some records. What is corrupt from there is had from the other one, which spoils others.

    Attributes:
        told: Each name that was reported, in order.
        refuses: Whether it raises when it is told.
        lone: What nobody has any more once it was reported.
    """

    def __init__(self) -> None:
        super().__init__(open_memory(""))
        self.told: list[str] = []
        self.refuses = False
        self.spoilt: list[set[str]] = [set(), set()]
        self.wrong_size: set[str] = set()
        self.lone: set[str] = set()

    def get(self, gets: Sequence[Get], deadline: Deadline) -> list[GetResult]:
        results = super().get(gets, deadline)
        for index, get in enumerate(gets):
            place = min(self.told.count(get.name), 1)
            if results[index].status is GetStatus.FOUND and get.name in self.spoilt[place]:
                get.into[0].view[5000] ^= 0x10
            if get.name in self.wrong_size:
                results[index] = GetResult.wrong_size(get.size_bytes + 1, get.size_bytes)
        return results

    def report_corrupt(self, names: Sequence[str]) -> None:
        self.told += names
        self.inner.delete([name for name in names if name in self.lone], Deadline.after(1.0))
        if self.refuses:
            raise SystemExit("it does not want to know")


def engine_over(backend: TwoPlaces, new_engine: NewEngine, **options: Any) -> tuple[Engine, Callable[[int], str]]:
    assert isinstance(backend, SupportsReports)
    engine = new_engine(backend, retries=0, **options)
    assert engine.store(keys(4)).success
    shop = Shop(backend.inner)
    return engine, lambda number: shop.name(key(number))


def test_what_came_corrupt_is_told_and_may_come_from_elsewhere(new_engine: NewEngine) -> None:
    backend = TwoPlaces()
    engine, name = engine_over(backend, new_engine)
    backend.spoilt[0] = {name(1), name(2)}
    result = engine.load(keys(4), rows=range(10, 14))
    assert result.success
    assert all(engine.memory.holds(row, key(row - 10)) for row in range(10, 14))
    assert sorted(backend.told) == sorted(backend.spoilt[0])
    assert engine.total("corrupt") == 0


def test_what_comes_corrupt_from_both_is_told_twice_and_is_a_miss(new_engine: NewEngine) -> None:
    backend = TwoPlaces()
    engine, name = engine_over(backend, new_engine)
    backend.spoilt = [{name(1)}, {name(1)}]
    assert engine.load(keys(4), rows=range(10, 14)).failed == (key(1),)
    assert engine.memory.spared(11)
    assert backend.told == [name(1)] * 2
    assert engine.total("corrupt", "payload") == 1


def test_what_comes_corrupt_and_is_nowhere_else_counts_as_corrupt(new_engine: NewEngine, caplog: pytest.LogCaptureFixture) -> None:
    """A miss, but not one that nobody hears of; and nothing is there that would have to be replaced."""
    backend = TwoPlaces()
    engine, name = engine_over(backend, new_engine)
    backend.spoilt[0] = backend.lone = {name(1)}
    assert engine.load(keys(4), rows=range(10, 14)).failed == (key(1),)
    assert engine.memory.spared(11)
    assert backend.told == [name(1)]
    assert engine.total("corrupt", "payload") == engine.total("loads", "corrupt") == 1
    assert engine.total("loads", "missing") == engine.total("removals") == 0
    assert f"record {name(1)} is corrupt (payload)" in caplog.text
    assert not engine.finds(key(1))
    backend.spoilt[0] = set()
    assert engine.store([key(1)]).success
    assert engine.load([key(1)]).success
    assert engine.total("stores", "replaced") == 0


def test_of_what_is_whole_or_of_another_length_nothing_is_told(new_engine: NewEngine) -> None:
    backend = TwoPlaces()
    engine, name = engine_over(backend, new_engine)
    backend.wrong_size = {name(1)}
    assert engine.load(keys(4)).failed == (key(1),)
    assert backend.told == []


def test_a_backend_that_raises_when_it_is_told_costs_nothing_else(new_engine: NewEngine, caplog: pytest.LogCaptureFixture) -> None:
    backend = TwoPlaces()
    backend.refuses = True
    engine, name = engine_over(backend, new_engine)
    backend.spoilt[0] = {name(1)}
    with caplog.at_level(logging.WARNING):
        assert engine.load(keys(4)).success
    assert backend.told == [name(1)]
    assert engine.total("call_failures", "report_corrupt", "UnavailableError") == 1
    assert f"report_corrupt of {name(1)} failed" in caplog.text


def test_what_is_not_verified_is_not_called_corrupt(new_engine: NewEngine) -> None:
    backend = TwoPlaces()
    engine, name = engine_over(backend, new_engine, verify=False)
    backend.spoilt[0] = {name(1)}
    assert engine.load(keys(4)).success
    assert backend.told == []
