"""Which chunks leave host memory, and in which order tiers are asked."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from store_bench import Stand, Wide, key, keys

from kvstore_sdk.store import HOST
from kvstore_sdk.testing import Fault, FaultyBackend, Hang, Raise, RecordingBackend, WrongBytes
from kvstore_sdk.tier import Lookup
from kvstore_sdk_backends.memory import open_memory

NewStand = Callable[..., Stand]


def resident(stand: Stand, chain: list[bytes]) -> list[int]:
    return [place for place, one in enumerate(chain) if stand.host.get(one) is not None]


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_the_tail_of_a_chain_goes_before_its_head(policy: str, new_stand: NewStand) -> None:
    """CAP-05: stored in two batches, the first used again, three evictions: what is left is a prefix."""
    stand = new_stand({}, slots=10, policy=policy)
    chain = keys(10)
    name = stand.request()
    stand.put(chain[:5], name)
    stand.put(chain[5:], name)
    stand.store.end_request(name)
    assert stand.hits(chain[:5]) == 5
    other = stand.request()
    stand.put(keys(3, 100), other)
    assert resident(stand, chain) == [0, 1, 2, 3, 4, 5, 6]


def test_chunks_of_one_piece_of_text_stay_or_go_together(new_stand: NewStand) -> None:
    """CAP-06: parts of ranks share a slot; parts of groups go one after another."""
    stand = new_stand({}, slots=80, sizes=(5000, 5000, 5000, 5000))
    name = stand.request()
    chain = [key(number, group) for group in range(4) for number in range(20)]
    stand.put(chain, name)
    stand.store.end_request(name)
    stand.put([key(1000 + number, 0) for number in range(20)])
    parts = [sum(stand.host.get(key(number, group)) is not None for group in range(4)) for number in range(20)]
    assert parts == [4] * 15 + [0] * 5


def test_tiers_are_asked_and_loaded_from_in_the_order_of_the_list(new_stand: NewStand) -> None:
    """CFG-07."""
    for order in (("redis", "s3"), ("s3", "redis")):
        stand = new_stand({name: open_memory("") for name in order})
        stand.put(keys(3))
        stand.settle()
        stand.evict_all()
        assert stand.hits(keys(3)) == 3
        assert {name: stand.total("hits", name) for name in order} == {order[0]: 3, order[1]: 0}


def test_the_first_tier_of_the_list_is_waited_for_though_the_second_answers_sooner(new_stand: NewStand) -> None:
    """CFG-07: the list says what is cheaper, not who is quicker with a word."""
    slow = FaultyBackend(open_memory(""))
    stand = new_stand({"slow": slow, "quick": open_memory("")})
    stand.put(keys(3))
    stand.settle()
    stand.evict_all()
    for below in stand.tiers:
        below.tier._table.clear()
    slow.arm(Fault("exists", Hang(0.1)))
    assert stand.hits(keys(3)) == 3
    assert stand.total("hits", "slow") == 3


def test_hits_are_counted_by_the_tier_that_had_them(new_stand: NewStand) -> None:
    """OBS-02: thirty gets over three tiers, with misses between them."""
    shops = {"near": open_memory(""), "middle": open_memory(""), "far": open_memory("")}
    for place, (name, backend) in enumerate(shops.items()):
        with_one = new_stand({name: Wide(backend)}, slots=32)
        with_one.put(keys(8, 100 * place))
        with_one.settle()
    stand = new_stand({name: Wide(backend) for name, backend in shops.items()}, slots=64)
    stand.put(keys(6, 900))
    wanted = [*keys(8), *keys(8, 100), *keys(8, 200), *keys(6, 900), *keys(5, 5000)]
    answers = stand.ask(wanted, stand.request())
    assert answers == [Lookup.HIT] * 30 + [Lookup.MISS] * 5
    found = {name: stand.total("hits", name) for name in ("near", "middle", "far", HOST)}
    assert found == {"near": 8, "middle": 8, "far": 8, HOST: 6}
    assert stand.total("hits") == 30
    assert stand.total("misses") == 5


def test_a_request_loads_from_the_tiers_that_it_names_alone(new_stand: NewStand) -> None:
    """CFG-13: and from host memory always."""
    first, second = RecordingBackend(open_memory("")), RecordingBackend(open_memory(""))
    stand = new_stand({"first": first, "second": second})
    stand.put(keys(3))
    stand.settle()
    stand.evict_all()
    asked = len(first.calls)
    assert stand.hits(keys(3), stand.request(["second"])) == 3
    assert len(first.calls) == asked
    assert stand.total("hits", "second") == 3
    stand.evict_all()
    assert stand.hits(keys(3), stand.request([])) == 0
    stand.put([key(0)])
    assert stand.hits(keys(1), stand.request([])) == 1


@pytest.mark.parametrize("fault", [WrongBytes(), Raise(RuntimeError)])
def test_a_promotion_that_fails_is_tried_at_the_next_tier(fault: Raise | WrongBytes, new_stand: NewStand) -> None:
    bad = FaultyBackend(open_memory(""), [Fault("get", fault)])
    stand = new_stand({"bad": bad, "good": open_memory("")})
    stand.put(keys(4))
    stand.settle()
    stand.evict_all()
    assert stand.hits(keys(4)) == 4
    assert stand.total("hits", "good") == 4
    assert stand.total("promotions", "bad", "failed") == 4
    assert stand.is_at_rest()


def test_all_that_waited_for_a_promotion_ask_the_next_tier_when_it_fails(new_stand: NewStand) -> None:
    """Also those whose time for an answer was spent while they waited."""
    bad = FaultyBackend(open_memory(""))
    stand = new_stand({"bad": bad, "good": open_memory("")}, lookup_timeout_s=3.0)
    stand.put(keys(2))
    stand.settle()
    stand.evict_all()
    bad.arm(Fault("get", Hang(), times=1), Fault("get", WrongBytes()))
    first, second = stand.request(), stand.request()
    stand.wait(lambda: [stand.store.lookup(name, one) for name in (first, second) for one in keys(2)] and bad.hanging)
    stand.tiers[1].tier._table.clear()
    end_s = time.monotonic() + 3.2
    stand.wait(lambda: time.monotonic() > end_s)
    bad.release()
    assert stand.hits(keys(2), first) == 2
    assert stand.hits(keys(2), second) == 2
    assert stand.total("hits", "good") >= 2


def test_a_first_tier_that_does_not_answer_costs_its_time_and_not_the_hit(new_stand: NewStand) -> None:
    hung = FaultyBackend(open_memory(""), [Fault("exists", Hang())])
    stand = new_stand({"hung": hung, "good": open_memory("")}, lookup_timeout_s=3.0, tier_settings={"lookup_timeout_s": 60.0})
    stand.put(keys(3))
    stand.settle()
    stand.evict_all()
    hung.arm(Fault("exists", Hang()))
    stand.tiers[0].tier._table.clear()
    assert stand.hits(keys(3)) == 3
    assert stand.total("hits", "good") == 3


def test_a_look_up_that_no_tier_answers_is_a_miss_in_time(new_stand: NewStand) -> None:
    """LIV-02."""
    hung = FaultyBackend(open_memory(""), [Fault("exists", Hang())])
    stand = new_stand(hung, lookup_timeout_s=0.2, tier_settings={"lookup_timeout_s": 60.0})
    name = stand.request()
    assert stand.ask([key(0)], name) == [Lookup.MISS]
    assert stand.total("lookup_timeouts") == 1


def test_another_requests_store_is_waited_for_so_long_and_no_longer(new_stand: NewStand) -> None:
    stand = new_stand(lookup_timeout_s=0.2)
    assert stand.store.begin_store(stand.request(), [key(0)]) is not None
    name = stand.request()
    assert stand.ask([key(0)], name) == [Lookup.MISS]
    assert stand.total("lookup_timeouts") == 1
