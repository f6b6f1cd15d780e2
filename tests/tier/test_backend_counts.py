"""What a backend counts of itself is among its tier's metrics, whatever it says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tier_bench import PATIENT, Engine, keys

from kvstore_sdk.testing import BackendWrapper
from kvstore_sdk.tier import backend_counts as module
from kvstore_sdk_backends.memory import open_memory

NewEngine = Callable[..., Engine]


class Counting(BackendWrapper):
    """Counts as a test says."""

    def __init__(self, counts: Any) -> None:
        super().__init__(open_memory(""))
        self.counts = counts

    def counters(self) -> Any:
        if isinstance(self.counts, BaseException):
            raise self.counts
        return self.counts


@pytest.fixture(autouse=True)
def always_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FRESH_S", -1.0)


def test_totals_are_counters_and_what_is_so_now_is_a_gauge(new_engine: NewEngine) -> None:
    backend = Counting({"connects": 2, "peers_now": 3})
    metrics = new_engine(backend, **PATIENT).tier.metrics
    assert metrics.take().counters["backend_counts", ("connects",)] == 2
    backend.counts = {"connects": 7, "peers_now": 1}
    delta = metrics.take()
    assert delta.counters["backend_counts", ("connects",)] == 5
    assert delta.gauges["backend_now", ("peers",)] == 1
    assert metrics.total("backend_counts", "connects") == 7


def test_one_look_serves_all_that_are_read_together(new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    class Looked(Counting):
        def counters(self) -> Any:
            nonlocal looks
            looks += 1
            return super().counters()

    metrics = new_engine(Looked({f"count_{number}": number for number in range(30)}), **PATIENT).tier.metrics
    monkeypatch.setattr(module, "_FRESH_S", 1000.0)
    looks = 0
    assert len(metrics.take().counters) == 29
    assert looks == 0


@pytest.mark.parametrize("answer", [RuntimeError("no"), SystemExit("no"), None, [1], {"count": "many"}, {7: 1}])
def test_a_backend_that_cannot_say_it_is_used_all_the_same(answer: Any, new_engine: NewEngine, caplog: pytest.LogCaptureFixture) -> None:
    backend = Counting({"count": 1})
    engine = new_engine(backend, **PATIENT)
    backend.counts = answer
    for _ in range(3):
        assert engine.tier.metrics.total("backend_counts", "count") == 1
    assert caplog.text.count("counters cannot be read") == 1
    assert engine.store(keys(1)).done == tuple(keys(1))
    assert new_engine(Counting(answer), **PATIENT).tier.metrics.total("backend_counts") == 0


def test_names_that_come_later_or_are_no_names_are_not_shown(new_engine: NewEngine) -> None:
    backend = Counting({"good": 1, "": 1, "Bad": 1, "b ad": 1, "x" * 65: 1, "endless": float("inf")})
    metrics = new_engine(backend, **PATIENT).tier.metrics
    backend.counts = {"late": 5, "good": 2}
    assert metrics.take().counters == {("backend_counts", ("good",)): 2}


def test_no_more_than_64_names_are_shown(new_engine: NewEngine) -> None:
    metrics = new_engine(Counting({f"count_{number}": 1 for number in range(100)}), **PATIENT).tier.metrics
    assert metrics.total("backend_counts") == 64
