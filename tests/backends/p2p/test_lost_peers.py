"""A peer that is silent, lost, or back as somebody else costs its own look-ups and loads some time, and nothing more."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from p2p_fake_peer import FakePeer
from p2p_nodes import LATE_S, NodeProcess, loads_all, names, wait_for

from kvstore_sdk.backend import BackendError, Deadline, Get, GetResult, GetStatus, Region
from kvstore_sdk.tier import Lookup as TierLookup
from kvstore_sdk_backends.p2p.messages import Fetch, Hello, Lookup

sys.path.insert(0, str(Path(__file__).parents[2] / "tier"))

from tier_bench import Engine, keys

SIZE = 16384


def found(backend: Any, asked: Sequence[str], timeout_s: float) -> list[bool]:
    """Which are there; what cannot be told is not."""
    try:
        return [answer is True for answer in backend.exists(asked, Deadline.after(timeout_s))]
    except BackendError:
        return [False] * len(asked)


def load(backend: Any, region: Region, asked: Sequence[str], timeout_s: float) -> list[GetResult]:
    gets = [Get(name, (region.buffer(place * SIZE, SIZE),)) for place, name in enumerate(asked)]
    try:
        results: list[GetResult] = backend.get(gets, Deadline.after(timeout_s))
    except BackendError as error:
        results = [GetResult.failed(error)] * len(gets)
    return results


@pytest.fixture(params=["no word", "no welcome", "no answer"])
def silent(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a peer that takes connections, and then says nothing; or that also talks ZMQ; or that also says it is one."""
    if request.param == "no word":
        with socket.create_server(("127.0.0.1", 0)) as listening:
            yield f"127.0.0.1:{listening.getsockname()[1]}"
    else:
        with closing(FakePeer((Hello,) if request.param == "no answer" else ())) as peer:
            yield peer.address


def test_a_silent_peer_has_nothing_by_the_deadline(silent: str, open_node: Callable[..., Any], region: Region) -> None:
    """LIV-03"""
    asker = open_node(silent, answer_timeout_s=0.3)
    asker.register_region(region)
    for _ in range(3):
        began_s = time.monotonic()
        assert found(asker, names("a", 3), timeout_s=1.0) == [False] * 3
        assert time.monotonic() - began_s < 1.0 + LATE_S
        began_s = time.monotonic()
        assert all(result.status is not GetStatus.FOUND for result in load(asker, region, names("a", 3), timeout_s=1.0))
        assert time.monotonic() - began_s < 1.0 + LATE_S


def test_through_a_tier_a_silent_peer_is_a_miss(silent: str, open_node: Callable[..., Any]) -> None:
    """LIV-03"""
    engine = Engine(open_node(silent, answer_timeout_s=0.3), lookup_timeout_s=1.0)
    try:
        began_s = time.monotonic()
        assert engine.ask(keys(3)) == [TierLookup.MISS] * 3
        assert time.monotonic() - began_s < 1.0 + LATE_S
    finally:
        engine.close()


def test_a_peer_that_never_sends_what_it_found_costs_a_load_its_time(open_node: Callable[..., Any], region: Region) -> None:
    """LIV-03: and not a byte of the buffers is written afterwards, so they are not in doubt."""
    with closing(FakePeer((Hello, Lookup), size=SIZE)) as peer:
        asker = open_node(peer.address)
        asker.register_region(region)
        assert found(asker, names("a", 4), timeout_s=20.0) == [True] * 4

        def given_up() -> bool:
            """Of a load that was begun, and whose loop did not have to wait for its turn when it was over."""
            began_s = time.monotonic()
            statuses = {result.status for result in load(asker, region, names("a", 4), timeout_s=1.0)}
            assert time.monotonic() - began_s < 1.0 + LATE_S
            assert GetStatus.FOUND not in statuses
            return peer.asked(Fetch) >= 1 and statuses <= {GetStatus.TIMED_OUT, GetStatus.FAILED}

        wait_for(given_up)


def test_a_silent_peer_does_not_hide_what_another_has(silent: str, open_node: Callable[..., Any]) -> None:
    """LIV-03"""
    with closing(FakePeer(size=SIZE)) as peer:
        asker = open_node(silent, peer.address, answer_timeout_s=1.0)
        wait_for(lambda: found(asker, names("a", 1), timeout_s=5.0) == [True])
        began_s = time.monotonic()
        assert all(found(asker, [name], timeout_s=20.0) == [True] for name in names("b", 5))
        assert time.monotonic() - began_s < 5 * 1.0 + LATE_S


def test_threads_that_meet_a_lost_peer_make_one_connection(open_node: Callable[..., Any]) -> None:
    """RACE-08"""
    with closing(FakePeer(size=SIZE)) as peer:
        asker = open_node(peer.address, answer_timeout_s=20.0)
        wait_for(lambda: found(asker, ["first"], timeout_s=20.0) == [True])
        assert peer.asked(Hello) == 1
        for life in range(2, 5):
            peer.restart()
            barrier = threading.Barrier(16)
            answers: list[bool] = []

            def meet(number: int, life: int = life, barrier: threading.Barrier = barrier, answers: list[bool] = answers) -> None:
                barrier.wait(20.0)
                until_s = time.monotonic() + 20.0
                while not (there := found(asker, [f"{life}-{number}"], timeout_s=20.0)[0]) and time.monotonic() < until_s:
                    time.sleep(0.01)
                answers.append(there)

            threads = [threading.Thread(target=meet, args=(number,)) for number in range(16)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60.0)
            assert answers == [True] * 16
            assert peer.asked(Hello) == life


def test_a_peer_that_is_back_as_somebody_else_is_asked_anew(open_node: Callable[..., Any], region: Region) -> None:
    """LIV-17: what was known of the one before it is forgotten, and the next call is answered."""
    with closing(FakePeer(size=SIZE)) as peer:
        asker = open_node(peer.address)
        asker.register_region(region)
        wait_for(lambda: found(asker, names("a", 4), timeout_s=5.0) == [True] * 4)
        peer.die()
        began_s = time.monotonic()
        assert all(result.status is not GetStatus.FOUND for result in load(asker, region, names("a", 4), timeout_s=5.0))
        assert time.monotonic() - began_s < 5.0 + LATE_S
        before = peer.asked(Lookup)
        peer.restart()
        wait_for(lambda: found(asker, names("a", 4), timeout_s=5.0) == [True] * 4)
        assert peer.asked(Lookup) > before
        assert peer.asked(Hello) == 2
        assert [result.status for result in load(asker, region, names("a", 4), timeout_s=5.0)] == [GetStatus.MISSING] * 4


@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", ["zmq", "nixl"])
def test_one_of_several_peers_that_dies_costs_its_own_loads_and_those_little(start_node: Callable[..., NodeProcess], path: str) -> None:
    """LIV-04: what it had is loaded from the others, long before the deadline of the loads that it took down."""
    ranks = [start_node() for _ in range(3)]
    wanted = names("a", 16)
    for rank in ranks:
        rank.open(serve_bytes=64 << 20, data=path)
        assert rank.ask("put", names=wanted, size=1 << 20) == ["STORED"] * 16
    asker = start_node()
    asker.open(peers=",".join(rank.address for rank in ranks), data=path)
    wait_for(lambda: asker.ask("exists", names=wanted, timeout_s=5.0)["answers"] == [True] * 16)
    going = asker.begin("traffic", names=wanted, size=1 << 20, batch=8, timeout_s=50.0)
    sent: list[int] = []

    def sends() -> bool:
        sent[:] = [rank.ask("stats")["served_bytes_sent"] for rank in ranks]
        return any(sent)

    wait_for(sends)
    ranks[sent.index(max(sent))].kill()
    for _ in range(5):
        wait_for(lambda: loads_all(asker, wanted, 1 << 20, timeout_s=50.0))
    asker.ask("stop")
    done = going.result(60.0)
    assert (done["counts"]["wrong"], done["longest_s"] < 40.0) == (0, True)
    assert asker.ask("settle", timeout_s=20.0) == 0
