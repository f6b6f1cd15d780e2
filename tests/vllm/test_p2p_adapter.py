"""The peer that a request names reaches the backend, through both ways into vLLM; waiting for it keeps the request, not the engine."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from vllm_hinting import OPENED, hinting_entry
from vllm_stand import Stand

from kvstore_sdk.errors import ConfigError
from kvstore_sdk.vllm import compat
from kvstore_sdk.vllm.offloading.spec import KVStoreOffloadingSpec
from kvstore_sdk.vllm.spec import KVStoreTieringSpec

LIMIT_S = 30.0
Build = Callable[..., Stand]


@pytest.fixture(params=["tiering", "offloading"])
def build(request: pytest.FixtureRequest, stand: Build) -> Build:
    """Builds a stand over vLLM's host memory or over the SDK's."""

    def make(tiers: list[dict[str, Any]], **options: Any) -> Stand:
        if request.param == "tiering":
            return stand(tiers, spec_class=KVStoreTieringSpec, **options)
        return stand(tiers, spec_class=KVStoreOffloadingSpec, extra={"cpu_bytes_to_use": 1 << 20}, **options)

    return make


@pytest.fixture
def place() -> str:
    """A name of memory that nobody else has."""
    return f"p2p-{uuid.uuid4().hex}"


def ours(peer: str = "127.0.0.1:7777", **fields: Any) -> dict[str, Any]:
    return {"kvstore": {"peer": peer, **fields}}


def test_a_backend_is_told_of_the_peer_before_it_is_asked(build: Build, place: str) -> None:
    """Each name that it is asked for, and the wait is at most what the operator allows."""
    made = build([hinting_entry(place, peer_wait_s=60)])
    keys = made.keys("a", 2)
    request = made.request("reader", keys, kv_transfer_params=ours(wait_s=500))
    assert made.lookup(request, keys, LIMIT_S) == [False] * 4
    told: set[str] = set()
    asked = 0
    for names, hint in OPENED[place].heard:
        if hint is None:
            asked += len(names)
            assert set(names) <= told
        else:
            assert hint.peer == "127.0.0.1:7777"
            assert hint.wait_s <= 60
            told.update(names)
    assert asked == 4
    # Of the time some may be over.
    assert OPENED[place].hints[0].wait_s > 0


def test_requests_without_a_good_hint_are_asked_for_as_ever(build: Build, place: str, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing that a client writes reaches the engine as an exception, or changes what is found."""
    made = build([hinting_entry(place)])
    keys = made.keys("a", 2)
    garbage: list[Any] = [None, {}, {"other": 1}, {"kvstore": "x"}, {"remote_prefiller": 7}, ours(peer="x y:1"), {"kvstore": {"peer": []}}]
    with caplog.at_level(logging.WARNING):
        for number, params in enumerate(garbage):
            request = made.request(f"reader {number}", keys, kv_transfer_params=params)
            assert made.lookup(request, keys, LIMIT_S) == [False] * 4
            made.finish(request)
            made.settle()
    assert OPENED[place].hints == []
    assert len([text for text in caplog.messages if "kv_transfer_params" in text]) == 1


def test_of_no_interest_to_a_store_that_has_no_peers(build: Build, place: str, caplog: pytest.LogCaptureFixture) -> None:
    made = build([{"type": "kvstore", "backend": "memory", "location": place}])
    keys = made.keys("a", 2)
    with caplog.at_level(logging.WARNING):
        for params in ({"kvstore": "x"}, ours(wait_s=5)):
            request = made.request(str(params), keys, kv_transfer_params=params)
            assert made.lookup(request, keys, LIMIT_S) == [False] * 4
    assert not [text for text in caplog.messages if "kv_transfer_params" in text]


def test_who_names_a_peer_waits_for_it_beyond_the_limit_of_lookups_and_others_do_not(build: Build, place: str) -> None:
    """Decode asked first. The engine's calls return at once meanwhile, and another request has its answer."""
    made = build([hinting_entry(place, lookup_timeout_s=0.2, peer_wait_s=60)])
    backend = OPENED[place]
    backend.held = threading.Event()
    keys, others = made.keys("late", 2), made.keys("never", 2)
    request = made.request("decode", keys, kv_transfer_params={"remote_prefiller": {"remote_host": "::1", "remote_port": 7777}})
    other = made.request("other", others)
    until_s = time.monotonic() + 1.0
    while time.monotonic() < until_s:
        assert {made.manager.lookup(key, request) for key in keys} == {compat.RETRY}
        made.step()
        time.sleep(0.01)
    assert made.lookup(other, others, LIMIT_S) == [False] * 4
    assert {made.manager.lookup(key, request) for key in keys} == {compat.RETRY}
    assert backend.hints[0].peer == "[::1]:7777"
    assert 30 < backend.hints[0].wait_s <= 60
    backend.held.set()
    # Nobody stored them: the answer is the answer, whatever was waited for.
    assert made.lookup(request, keys, LIMIT_S) == [False] * 4


def test_a_request_that_ends_takes_its_hint_along(build: Build, place: str) -> None:
    """Engines use the name of a request again."""
    made = build([hinting_entry(place)])
    for number, params in enumerate((ours(), None)):
        keys = made.keys(f"chunks {number}", 2)
        request = made.request("the same", keys, kv_transfer_params=params)
        assert made.lookup(request, keys, LIMIT_S) == [False] * 4
        made.finish(request)
        made.settle()
    told = {name for names, hint in OPENED[place].heard if hint is not None for name in names}
    asked = {name for names, hint in OPENED[place].heard if hint is None for name in names}
    assert (len(told), len(asked)) == (4, 8)


def test_each_replica_tells_its_backend_which_one_it_is(build: Build, place: str) -> None:
    """Listening ports of data parallel replicas are counted from that of the first."""
    parallel = {"parallel_config__data_parallel_size": 2}
    for index in range(2):
        build([hinting_entry(place)], parallel_config__data_parallel_index=index, **parallel)
        assert OPENED[place].replica == index
    with pytest.raises(ConfigError, match="data_parallel_index: is set by the engine, for each replica its own; leave it out"):
        build([hinting_entry(place, data_parallel_index=1)])


def test_the_longest_wait_is_an_option_with_limits(build: Build, place: str) -> None:
    with pytest.raises(ConfigError, match="peer_wait_s: -1 is out of bounds"):
        build([hinting_entry(place, peer_wait_s=-1)])
