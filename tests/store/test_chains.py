"""What a request used, from the head of its prefix: though the engine asks only for what its own cache lacks."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_bench import Stand, key, keys

from kvstore_sdk.store.chains import Chains

NewStand = Callable[..., Stand]


def left(stand: Stand, chain: list[bytes]) -> list[int]:
    return [place for place, one in enumerate(chain) if stand.host.get(one) is not None]


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_the_head_that_the_engine_has_itself_outlives_the_tail(policy: str, new_stand: NewStand) -> None:
    """CAP-05: two requests load the tail alone, because the engine's own cache has the head."""
    stand = new_stand({}, slots=12, policy=policy)
    chain = keys(10)
    stand.put(chain)
    for _ in range(2):
        assert stand.hits(chain[5:]) == 5
    # One short chain after another, as much as it takes to drive something out.
    for number in range(12):
        stand.put([key(500 + number)])
        there = left(stand, chain)
        assert there == list(range(len(there)))


def test_a_tail_that_a_tier_brings_back_still_knows_its_head(new_stand: NewStand) -> None:
    stand = new_stand(slots=12)
    chain = keys(6)
    stand.put(chain)
    stand.settle()
    stand.evict_all()
    # The head alone, then the tail alone; others in between.
    assert stand.hits(chain[:3]) == 3
    stand.put(keys(4, 100))
    stand.settle()
    assert stand.hits(chain[3:]) == 3
    stand.settle()
    for number in range(8):
        stand.put([key(500 + number)])
        there = left(stand, chain)
        assert there == list(range(len(there)))
    assert stand.store.host.get(chain[0]) is not None


def test_a_request_that_starts_over_is_one_use(new_stand: NewStand) -> None:
    """Under pressure, which is when requests are preempted, what was used once must not look as if it was used again."""
    stand = new_stand({}, slots=8, policy="arc")
    stand.put(keys(4))
    assert stand.hits(keys(4)) == 4
    stand.store.begin_request("once")
    stand.put(keys(4, 10), "once")
    stand.store.restart_request("once")
    assert stand.hits(keys(4, 10), "once") == 4
    stand.store.end_request("once")
    # A scan drives out what was used once, and nothing else.
    for number in range(20):
        stand.put([key(500 + number)])
    assert left(stand, keys(4)) == [0, 1, 2, 3]
    assert left(stand, keys(4, 10)) == []


def test_a_request_that_starts_over_may_find_what_it_missed_and_keeps_its_tiers(new_stand: NewStand) -> None:
    stand = new_stand()
    stand.put([key(5)])
    stand.settle()
    stand.evict_all()
    name = stand.request(tiers=[])
    assert stand.hits(keys(2), name) == 0
    stand.put(keys(2), name)
    assert stand.hits(keys(2), name) == 0
    stand.store.restart_request(name)
    assert stand.hits(keys(2), name) == 2
    assert stand.hits([key(5)], name) == 0
    stand.store.restart_request("nobody")


def test_a_request_that_starts_over_confuses_no_chain() -> None:
    """After its preemption it loads from an earlier chunk on than before."""
    chains = Chains(100)
    chain = keys(8)
    chains.learn(chain[4:8])
    assert chains.used(chain[:6], chain[4:8]) == chain
    assert chains.used(chain[2:4]) == chain[:4]
    assert chains.used(chain[7:]) == chain


def test_groups_of_one_prefix_stay_together() -> None:
    chains = Chains(100)
    full, window = keys(4), keys(2, 2, group=1)
    mixed = [full[0], full[1], full[2], window[0], full[3], window[1]]
    assert chains.used([*full, *window]) == mixed
    # The head of one group is known, of the other not.
    assert chains.used([*full[3:], *window[1:]]) == mixed


@given(st.lists(st.lists(st.integers(0, 12), min_size=1, unique=True), max_size=12), st.integers(0, 8))
def test_whatever_was_learned_a_chain_is_finite_whole_and_has_each_chunk_once(lists: list[list[int]], bound: int) -> None:
    """Also where what was learned contradicts itself, which no engine's keys do."""
    chains = Chains(bound)
    for numbers in lists:
        asked = [key(number) for number in numbers]
        told = chains.used(asked)
        assert len(told) == len(set(told))
        assert told[-len(asked) :] == asked


def test_what_is_known_is_bounded() -> None:
    """And what is used again and again is not forgotten, however much is learned beside it."""
    chains = Chains(50)
    chains.learn(keys(10, 5000))
    for start in itertools.islice(itertools.count(0, 10), 100):
        chains.learn(keys(10, start))
        assert chains.used([key(5009)]) == keys(10, 5000)
        assert len(chains._before) + len(chains._older) <= 2 * (50 + 10)
    assert chains.used([key(999)]) == keys(10, 990)
    assert chains.used([key(9)]) == [key(9)]


def test_nothing_is_known_after_a_reset(new_stand: NewStand) -> None:
    stand = new_stand({})
    stand.put(keys(4))
    stand.store.reset()
    assert stand.store._lookups._chains.used([key(3)]) == [key(3)]
