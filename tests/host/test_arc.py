"""ARC: the paper's algorithm for single keys, and what is added for chains and pins."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_models import PaperARC, traces

from kvstore_sdk.host.arc import ARC

# Skewed, so that ghosts of both lists are met; runs of neighbours are scans.
NUMBERS = st.one_of(st.integers(0, 5), st.integers(0, 15), st.integers(0, 40))
RUNS = st.tuples(st.integers(0, 60), st.integers(1, 12)).map(lambda run: list(range(run[0], run[0] + run[1])))


def same_as_the_paper(capacity: int, numbers: list[int]) -> PaperARC:
    paper = PaperARC(capacity)
    requests = [(b"%d" % number,) for number in numbers]
    steps = traces.replay(ARC(capacity), capacity, requests)
    for at, ((key,), (hits, evicted)) in enumerate(zip(requests, steps, strict=True)):
        assert (bool(hits), evicted) == paper.request(key), f"request {at} of {key!r}"
    return paper


@settings(max_examples=300)
@given(st.integers(1, 12), st.lists(st.one_of(NUMBERS.map(lambda number: [number]), RUNS), max_size=150))
def test_single_keys_hit_and_go_as_in_the_paper(capacity: int, runs: list[list[int]]) -> None:
    same_as_the_paper(capacity, [number for run in runs for number in run])


@pytest.mark.parametrize("capacity", [10, 50, 200])
def test_long_traces_hit_and_go_as_in_the_paper(capacity: int) -> None:
    """Long enough for the shares to move both ways, which they must have done for the comparison to mean anything."""
    chains = traces.zipf(6000, 400, 0.8, seed=1) + traces.hot_and_scans(6000, 40, 100, seed=2) + traces.drifting(6000, 300, 0.2, seed=3)
    index = {key: number for number, key in enumerate(dict.fromkeys(key for (key,) in chains))}
    paper = same_as_the_paper(capacity, [index[key] for (key,) in chains])
    assert paper.p > 0
    assert paper.b1
    assert paper.b2


def stored(arc: ARC, keys: list[bytes]) -> None:
    for key in keys:
        arc.miss(key)
        arc.insert(key)
    arc.unpin(keys)


def drained(arc: ARC) -> list[bytes]:
    gone = []
    while (key := arc.victim()) is not None:
        arc.evict(key)
        gone.append(key)
    return gone


def test_one_request_is_one_use_however_often_its_chunks_are_pinned() -> None:
    """A store, its copies to two lower tiers and the end of its request are not a second use: a chunk that really had two outlives it."""
    arc = ARC(4)
    stored(arc, [b"once", b"twice"])
    arc.used([b"twice"])
    arc.used([b"twice"])
    for _ in range(2):
        arc.pin(b"once")
        arc.unpin([b"once"])
    arc.used([b"once"])
    assert drained(arc) == [b"once", b"twice"]


@pytest.mark.parametrize("uses", [1, 2])
def test_a_second_use_takes_the_keys_before_it_along(uses: int) -> None:
    """The head of a chain is worth what its tail is worth, even where it came in later."""
    arc = ARC(4)
    stored(arc, [b"tail"])
    for _ in range(uses):
        arc.used([b"tail"])
    stored(arc, [b"head"])
    arc.used([b"head", b"tail"])
    stored(arc, [b"new"])
    arc.used([b"new"])
    assert drained(arc) == [b"new", b"tail", b"head"]


def with_ghosts(once: int, again: int) -> tuple[ARC, list[bytes], list[bytes]]:
    """Eight keys used once and eight used twice, of which so many went; with the names of what went."""
    arc = ARC(16)
    keys = [b"%02d" % number for number in range(16)]
    stored(arc, keys)
    arc.used(keys)
    arc.used(keys[:8])
    for key in keys[16 - once :] + keys[8 - again : 8]:
        arc.evict(key)
    return arc, keys[16 - once :], keys[8 - again : 8]


@pytest.mark.parametrize("repeats", [1, 30])
def test_a_ghost_teaches_once_however_often_it_misses(repeats: int) -> None:
    """A store that finds no room asks again each step."""
    arc, once, again = with_ghosts(once=4, again=1)
    for _ in range(repeats):
        arc.miss(once[0])
    # One more key used once is worth having: of the four that are left, one is spared.
    first = drained(arc)
    assert [key >= b"08" for key in first[:4]] == [True, True, True, False]

    arc, once, again = with_ghosts(once=1, again=4)
    arc.miss(once[0])
    for _ in range(repeats):
        arc.miss(again[0])
    # Four for the one, for there were four of the other; one less for the other; and a tie is decided against the first list.
    assert [key >= b"08" for key in drained(arc)[:6]] == [True] * 5 + [False]


def test_a_pinned_key_is_promoted_and_stays_pinned() -> None:
    arc = ARC(4)
    stored(arc, [b"a", b"b"])
    arc.pin(b"a")
    arc.used([b"a"])
    arc.used([b"a"])
    assert drained(arc) == [b"b"]
    arc.unpin([b"a"])
    assert drained(arc) == [b"a"]


def test_a_removed_key_leaves_no_ghost() -> None:
    """What was thrown away because its bytes were bad says nothing about the right share: its return is that of a new key."""
    arc = ARC(2)
    stored(arc, [b"bad", b"other"])
    arc.used([b"other"])
    arc.used([b"other"])
    arc.remove(b"bad")
    stored(arc, [b"bad"])
    assert drained(arc) == [b"bad", b"other"]


def test_clear_forgets_ghosts_and_shares() -> None:
    arc, once, again = with_ghosts(once=4, again=1)
    for key in once:
        arc.miss(key)
    arc.clear()
    assert arc.victim() is None
    trace = [(key,) for key in once + again] + traces.drifting(500, 30, 0.3, seed=5)
    assert list(traces.replay(arc, 16, trace)) == list(traces.replay(ARC(16), 16, trace))
