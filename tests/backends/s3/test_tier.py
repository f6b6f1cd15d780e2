"""A tier over an object store: what goes wrong there is a miss, counted, and never a wrong byte."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_proxy import FaultProxy
from proxy_faults import Fault, LongBody, ShortBody, Status, WrongBytes

sys.path.insert(0, str(Path(__file__).parents[2] / "tier"))

from tier_bench import Engine, Shop, key, keys


@pytest.fixture
def tier(store: Any) -> Iterator[Engine]:
    """With no patience with a store that is down."""
    made = Engine(store, retries=0, breaker_failures=3, breaker_probe_s=0.2)
    yield made
    made.close()


def test_what_is_no_record_is_never_loaded(tier: Engine, store: Any, proxy: FaultProxy) -> None:
    """LIV-12, INT-01: an error, a refusal, a body that is short, one that is long, and one with a byte that is another."""
    kinds = {
        Status(500): "failed",
        Status(403, "AccessDenied"): "failed",
        ShortBody(100, told=True): "corrupt",
        LongBody(1): "corrupt",
        WrongBytes(1): "corrupt",
    }
    some_keys = keys(6)
    assert tier.store(some_keys).success
    shop = Shop(store)
    for one, (kind, outcome) in zip(some_keys, kinds.items(), strict=False):
        before = tier.total("loads", outcome)
        proxy.script(Fault(kind, "GET" if outcome == "corrupt" else "*", shop.name(one)))
        result = tier.load([one, some_keys[5]], rows=[10, 11])
        assert (result.done, result.failed) == ((some_keys[5],), (one,)), kind
        assert tier.memory.spared(10)
        assert tier.total("loads", outcome) == before + 1, kind
    proxy.heal()
    # Where the answer was a record and a wrong one, the next store replaces it, although it creates what it stores.
    assert tier.store(some_keys).success
    assert tier.total("repairs") == 3
    assert tier.load(some_keys).success


def test_a_store_that_is_down_is_left_alone_and_used_again_when_it_is_back(tier: Engine, proxy: FaultProxy) -> None:
    """LIV-12: the breaker counts what HTTP says."""
    assert tier.store(keys(2)).success
    proxy.script(Fault(Status(500)))
    for _ in range(10):
        tier.load([key(0)])
        if tier.total("breaker_opened"):
            break
    assert tier.total("breaker_opened") == 1
    proxy.reset()
    proxy.script(Fault(Status(500)))
    tier.ask(keys(20, start=100))
    assert len(proxy.requests) < 20
    proxy.heal()
    tier.wait(lambda: tier.finds(key(0)) and tier.load([key(0)]).success, "a hit after the store is back")
