"""That nobody else is there says nothing of whom a request names, and the other way round."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tier_bench import PATIENT, Engine, keys

from kvstore_sdk.backend import Deadline, Failure, Hint, UnavailableError
from kvstore_sdk.testing import BackendWrapper
from kvstore_sdk.tier import Lookup
from kvstore_sdk_backends.memory import open_memory

NewEngine = Callable[..., Engine]


class NamedAlone(BackendWrapper):
    """Has all of its records where a hint says so; nobody else can be asked."""

    def __init__(self) -> None:
        super().__init__(open_memory(""))
        self.hinted: set[str] = set()
        self.asked = 0

    def hint(self, names: Sequence[str], hint: Hint) -> None:
        self.hinted |= set(names)

    def exists(self, names: Sequence[str], deadline: Deadline) -> list[bool | Failure]:
        self.asked += 1
        nobody = Failure(UnavailableError("nobody is there"))
        found = super().exists(names, deadline)
        return [answer if name in self.hinted else nobody for name, answer in zip(names, found, strict=True)]


def hinted(engine: Engine, some: list[bytes]) -> list[Lookup]:
    request = engine.request()
    engine.tier.begin_request(request, Hint("peer:1"))
    answers = engine.ask(some, request)
    engine.tier.end_request(request)
    return answers


def opened(new_engine: NewEngine) -> tuple[Engine, NamedAlone]:
    """An engine whose breaker for look-ups is open."""
    backend = NamedAlone()
    engine = new_engine(backend, **PATIENT, breaker_failures=2, breaker_probe_s=600.0, hit_ttl_s=0.0)
    assert engine.store(keys(8)).success
    for number in range(2):
        engine.ask(keys(1, start=100 + number))
    engine.wait(lambda: engine.tier.metrics.gauge_value("breaker_open", "read") == 1)
    return engine, backend


def test_whom_a_request_names_is_asked_though_nobody_else_can_be(new_engine: NewEngine) -> None:
    engine, backend = opened(new_engine)
    before = backend.asked
    assert engine.ask(keys(1)) == [Lookup.MISS]
    assert backend.asked == before
    for number in range(8):
        assert hinted(engine, keys(1, start=number)) == [Lookup.HIT]
    assert hinted(engine, keys(1, start=50)) == [Lookup.MISS]


def test_that_a_named_one_answers_lets_nobody_else_be_asked(new_engine: NewEngine) -> None:
    engine, backend = opened(new_engine)
    assert hinted(engine, keys(4)) == [Lookup.HIT] * 4
    assert engine.tier.metrics.gauge_value("breaker_open", "read") == 1
    before = backend.asked
    assert engine.ask(keys(1, start=7)) == [Lookup.MISS]
    assert backend.asked == before


def test_while_the_store_is_left_alone_nobody_is_asked(new_engine: NewEngine) -> None:
    """For too much memory in late calls, or for records that are mostly corrupt: that is no matter of whom a request names."""
    backend = NamedAlone()
    engine = new_engine(backend, **PATIENT, hit_ttl_s=0.0)
    assert engine.store(keys(2)).success
    engine.tier._breakers.hold(engine.tier.metrics, 600.0)
    before = backend.asked
    assert hinted(engine, keys(2)) == [Lookup.MISS] * 2
    assert backend.asked == before
