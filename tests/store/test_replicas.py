"""Two tiers with the same chunks: while one of them fails, the other serves all of them, and the broken one is left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from store_bench import Kept, Stand, keys

from kvstore_sdk.backend import Failure, GetResult, UnavailableError
from kvstore_sdk.testing import Fault, FaultyBackend, Raise, Say
from kvstore_sdk_backends.memory import open_memory

NewStand = Callable[..., Stand]

BROKEN: dict[str, list[Fault]] = {
    "answers errors to everything": [
        Fault("get", Say(GetResult.failed(UnavailableError("no quorum")))),
        Fault("exists", Say(Failure(UnavailableError("no quorum")))),
    ],
    "says that it has all and brings nothing": [Fault("get", Raise(UnavailableError))],
    "raises": [Fault("*", Raise(ConnectionResetError))],
}


@pytest.mark.parametrize("faults", BROKEN.values(), ids=BROKEN)
def test_a_broken_replica_costs_no_hit_and_is_not_asked_again_and_again(faults: list[Fault], new_stand: NewStand) -> None:
    """LIV-20: every chunk is a hit, from the first on; once its breaker is open the broken one is asked for nothing."""
    shops = {"broken": Kept(open_memory("")), "good": Kept(open_memory(""))}
    filling = new_stand(shops, slots=64)
    filling.put(keys(40))
    filling.settle()
    broken = FaultyBackend(shops["broken"], faults)
    stand = new_stand(
        {"broken": broken, "good": shops["good"]},
        slots=64,
        # No trial within the test: what is asked after the breaker opened is asked in spite of it.
        tier_settings={"breaker_probe_s": 600.0, "retries": 0, "breaker_failures": 3},
    )
    first = stand.tiers[0].tier.metrics
    for chunk in keys(20):
        assert stand.hits([chunk]) == 1
    stand.wait(lambda: first.total("breaker_opened", "read") == 1, "the breaker")
    stand.settle()
    asked = len(broken.log)
    for chunk in keys(20, 20):
        assert stand.hits([chunk]) == 1
    assert len(broken.log) == asked
    assert stand.total("hits", "good") == 40
