"""Stores that go wrong, for the tests of the Tier."""

from __future__ import annotations

from collections.abc import Callable

from tier_bench import Engine, Shop, key

from kvstore_sdk.backend import (
    Backend,
    Capabilities,
)
from kvstore_sdk.testing import (
    BackendWrapper,
    Fault,
    FaultyBackend,
)
from kvstore_sdk_backends.memory import open_memory


class Wide(BackendWrapper):
    """Takes as many calls at a time as is said."""

    def __init__(self, inner: Backend, calls: int) -> None:
        super().__init__(inner)
        self._calls = calls

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(max_record_bytes=1 << 20, max_batch=256, max_concurrency=self._calls)


def faulty(*script: Fault, calls: int = 8, seed: int = 0) -> FaultyBackend:
    return FaultyBackend(Wide(open_memory(""), calls), script, seed=seed)


def only(*numbers: int) -> Callable[[str], bool]:
    """Chooses the records of these chunks."""
    shop = Shop(open_memory(""))
    names = {shop.name(key(number)) for number in numbers}
    return names.__contains__


def in_rest(engine: Engine) -> bool:
    """Whether nothing runs, and nothing is held."""
    return engine.in_rest()
