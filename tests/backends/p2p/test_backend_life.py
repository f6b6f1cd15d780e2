"""Whom a node asks as it goes, and what becomes of it: hints, sessions, closing, forks."""

from __future__ import annotations

import dataclasses
import logging
import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from forking import in_child
from p2p_pairs import LIMIT_S, keep, soon, wait_for
from p2p_scripted import having, numbers, scripted_peer
from p2p_sources import CountingSource
from scripted_client import Calling

from kvstore_sdk.backend import (
    ClosedError,
    ConfigError,
    Deadline,
    Failure,
    Get,
    GetStatus,
    Hint,
    Put,
    Region,
    SupportsHints,
    SupportsIdentity,
    SupportsRegions,
    SupportsServe,
    SupportsSettle,
    UnavailableError,
    open_backend,
)
from kvstore_sdk_backends.p2p.backend import P2PBackend
from kvstore_sdk_backends.p2p.messages import Fetch, Hello, Lookup

# Hints


def test_whom_a_request_names_is_asked(open_node: Callable[..., P2PBackend], owner: P2PBackend, region: Region) -> None:
    keep(owner, a=b"abc")
    node = open_node()
    assert node.exists(["v1/a"], soon()) == [False]
    node.hint(["v1/a", "v1/b"], Hint(str(owner.address)))
    assert node.exists(["v1/a", "v1/b"], soon()) == [True, False]
    assert node.get([Get("v1/a", (region.buffer(0, 3),))], soon())[0].status is GetStatus.FOUND


def test_a_request_may_wait_for_what_is_not_there_yet(open_node: Callable[..., P2PBackend], owner: P2PBackend) -> None:
    node = open_node()
    node.hint(["v1/a", "v1/z"], Hint(str(owner.address), 15.0, until=("v1/a",)))
    asking = Calling(lambda: node.exists(["v1/a", "v1/z"], Deadline.after(60)))
    wait_for(lambda: owner.counters()["served_waits_now"])
    keep(owner, a=b"abc")
    assert asking.answer() == [True, False]


def test_what_is_not_there_in_time_is_not_there(open_node: Callable[..., P2PBackend], owner: P2PBackend) -> None:
    node = open_node()
    node.hint(["v1/a"], Hint(str(owner.address), 0.2))
    assert node.exists(["v1/a"], soon()) == [False]


@pytest.mark.parametrize("peer", ["10.255.255.1:7400", "not an address", "host:0", "[::]:x"])
def test_a_request_cannot_have_a_node_connect_anywhere(peer: str, open_node: Callable[..., P2PBackend]) -> None:
    node = open_node()
    node.hint(["v1/a"], Hint(peer, 5.0))
    began_s = time.monotonic()
    assert node.exists(["v1/a"], soon()) == [False]
    assert time.monotonic() - began_s < LIMIT_S
    assert node.counters()["peers_now"] == 0


# Sessions


def test_peers_of_another_namespace_refuse_each_other_until_they_have_the_same(
    open_node: Callable[..., P2PBackend], owner: P2PBackend, caplog: pytest.LogCaptureFixture
) -> None:
    keep(owner, a=b"abc")
    owner.use_identity("0" * 32, "layout")
    node = open_node(owner.address)
    with caplog.at_level(logging.WARNING):
        node.use_identity("1" * 32, "layout")
        wait_for(lambda: isinstance(node.exists(["v1/a"], soon())[0], Failure))
        wait_for(lambda: [line for line in caplog.messages if "refuses (namespace)" in line])
    node.use_identity("0" * 32, "layout")
    wait_for(lambda: node.exists(["v1/a"], soon()) == [True])


def test_a_node_that_is_known_by_two_addresses_is_one_peer(region: Region, open_node: Callable[..., P2PBackend]) -> None:
    owner: Any = open_backend("p2p://0.0.0.0:0", {"serve_bytes": 1 << 20, "data": "zmq", "insecure": True})
    try:
        keep(owner, a=b"abc")
        first, second = (f"127.0.0.{number}:{owner.address.port}" for number in (1, 2))
        listing, hinted = open_node(first, second), open_node(first)
        hinted.hint(["v1/b"], Hint(second, LIMIT_S))
        waiting = Calling(lambda: hinted.exists(["v1/b"], Deadline.after(2 * LIMIT_S)))
        wait_for(lambda: owner.counters()["served_waits_now"])
        for node in (listing, hinted):
            for _ in range(20):
                assert node.exists(["v1/a"], soon()) == [True]
                assert node.get([Get("v1/a", (region.buffer(0, 3),))], soon())[0].status is GetStatus.FOUND
            wait_for(lambda node=node: (node.counters()["peers_now"], node.counters()["peers_up_now"]) == (2, 1))
            assert node.counters()["peer_connects"] == 2
        keep(owner, b=b"abc")
        assert waiting.answer() == [True]
        wait_for(lambda: owner.counters()["served_sessions_now"] == 2)
        assert owner.counters()["served_sessions"] <= 4
    finally:
        owner.close()


def test_each_peer_knows_a_node_by_another_name(open_node: Callable[..., P2PBackend]) -> None:
    """By which it could be taken for the node at a third one: not even those know it that the node welcomed."""
    with scripted_peer(having()) as one, scripted_peer(having()) as other:
        node = open_node(one.address, other.address, serve_bytes=1 << 20)
        wait_for(lambda: node.exists(["v1/a"], soon()) == [False] and numbers(one.asked, Hello) and numbers(other.asked, Hello))
        node.use_identity("0" * 32, "layout")
        wait_for(lambda: numbers(one.asked, Hello) == numbers(other.asked, Hello) == 2)
        said = [{message.node for message in peer.asked if isinstance(message, Hello)} for peer in (one, other)]
        [[first], [second]] = said
        assert len({first, second, node._node.id}) == 3
        assert node._node.is_own(first)
        assert node._node.is_own(second)
        assert not node._node.is_own(node._node.id)


def test_a_shelf_beside_host_memory_that_is_served_is_warned_of(
    open_node: Callable[..., P2PBackend], caplog: pytest.LogCaptureFixture
) -> None:
    with_shelf, without = open_node(serve_bytes=1 << 20), open_node()
    for node, lines in ((without, 0), (with_shelf, 1)):
        node.serve(CountingSource({"v1/a": 100}))
        assert len([text for text in caplog.messages if "serve_bytes: keeps a second copy of host memory" in text]) == lines


def test_no_record_larger_than_the_shelf_is_promised(open_node: Callable[..., P2PBackend]) -> None:
    assert open_node(serve_bytes=1 << 20).capabilities.max_record_bytes == 1 << 20
    assert open_node(serve_bytes=1 << 20, max_record_bytes=8192).capabilities.max_record_bytes == 8192
    assert open_node().capabilities.max_record_bytes == 1 << 30


def test_options_that_have_no_effect_are_named_at_the_start(open_node: Callable[..., P2PBackend], caplog: pytest.LogCaptureFixture) -> None:
    open_node()
    assert "without effect" not in caplog.text
    open_node(ucx_tls="tcp", data_path_trusted=True, data_ports="21000-21001", max_peers=4)
    assert "backend p2p: data_path_trusted, ucx_tls: without effect, since data goes over zmq" in caplog.text
    assert "backend p2p: data_ports: only 2 of max_peers 4 find a port at one time" in caplog.text


def test_after_a_reset_nobody_finds_what_was_there_before(open_node: Callable[..., P2PBackend], region: Region) -> None:
    """Neither by a lease from before, which ends; also where the identity is the same again."""
    source = CountingSource({"v1/a": 100}, namespace="0" * 32, layout="layout")
    owner = open_node(serve_bytes=1 << 20)
    owner.use_identity("0" * 32, "layout")
    owner.serve(source)
    node = open_node(owner.address)
    for namespace in ("0" * 32, "1" * 32):
        assert node.exists(["v1/a"], soon()) == [True]
        assert [loan.name for loan in source.out] == ["v1/a"]
        record = source.buffers.pop("v1/a")
        owner.use_identity(namespace, "layout")
        wait_for(lambda: node.exists(["v1/a"], soon()) == [False])
        assert source.out == []
        source.buffers["v1/a"] = record


def test_a_peer_that_restarts_on_its_address_is_a_new_session(open_node: Callable[..., P2PBackend], region: Region) -> None:
    """LIV-16, LIV-17"""
    first = open_node(serve_bytes=1 << 20)
    keep(first, a=b"abc")
    node = open_node(first.address)
    assert node.exists(["v1/a"], soon()) == [True]
    first.close()
    wait_for(lambda: node.counters()["peers_up_now"] == 0)
    [result] = node.get([Get("v1/a", (region.buffer(0, 3),))], soon())
    assert result.status is GetStatus.FAILED
    again: list[Any] = []

    def restart() -> bool:
        try:
            again.append(open_backend(f"p2p://{first.address}", {"serve_bytes": 1 << 20, "data": "zmq"}))
        except ConfigError:
            # libzmq lets go of a port some time after it was asked to.
            return False
        return True

    wait_for(restart)
    try:
        keep(again[0], b=b"xyz")
        wait_for(lambda: node.exists(["v1/a", "v1/b"], soon()) == [False, True])
        [a, b] = node.get([Get("v1/a", (region.buffer(0, 3),)), Get("v1/b", (region.buffer(100, 3),))], soon())
        assert (a.status, b.status) == (GetStatus.MISSING, GetStatus.FOUND)
    finally:
        again[0].close()


def test_where_nixl_does_not_take_memory_records_come_over_zmq(
    open_node: Callable[..., P2PBackend], region: Region, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing:
        def add_region(self, region: Region) -> None:
            raise UnavailableError("no more memory may be locked")

    with scripted_peer(having()) as peer:
        node = open_node(peer.address)
        monkeypatch.setattr(node, "_landing", Refusing())
        monkeypatch.setattr(node, "_settings", dataclasses.replace(node._settings, data="auto"))
        monkeypatch.setattr(node._ways, "_usual", lambda address: ("nixl", "zmq"))
        assert node.exists(["v1/a"], soon()) == [False]
        node.register_region(region)
        wait_for(lambda: numbers(peer.asked, Hello) == 2)
        offered = [message.paths for message in peer.asked if isinstance(message, Hello)]
        assert offered == [("nixl", "zmq"), ("zmq",)]
        assert "no more memory may be locked" in caplog.text
        monkeypatch.setattr(node, "_settings", dataclasses.replace(node._settings, data="nixl"))
        with pytest.raises(UnavailableError, match="no more memory"):
            node.register_region(region)


def test_it_offers_what_a_tier_may_ask_for(asker: P2PBackend) -> None:
    for surface in (SupportsRegions, SupportsSettle, SupportsServe, SupportsIdentity, SupportsHints):
        assert isinstance(asker, surface)
    assert asker.capabilities.in_doubt


def test_what_was_done_is_counted(owner: P2PBackend, asker: P2PBackend, region: Region) -> None:
    keep(owner, a=b"x" * 1000)
    asker.exists(["v1/a", "v1/b"], soon())
    asker.get([Get("v1/a", (region.buffer(0, 1000),))], soon())
    counts = asker.counters()
    assert (counts["asked_lookups"], counts["asked_found"], counts["asked_loaded"], counts["asked_loaded_bytes"]) == (1, 1, 1, 1000)
    assert (counts["peers_now"], counts["peers_up_now"], counts["peers_nixl_now"], counts["doubt_bytes_now"]) == (1, 1, 0, 0)
    wait_for(lambda: owner.counters()["served_records_sent"] == 1)


def test_nothing_secret_is_shown(asker: P2PBackend) -> None:
    assert repr(asker) == f"P2PBackend('{asker.address}')"
    assert "Hello" not in repr(asker)


# The end


def check_closed(node: P2PBackend, region: Region) -> None:
    for verb in ("exists", "get", "put"):
        item = Get("v1/a", (region.buffer(0, 1),)) if verb == "get" else Put("v1/a", (region.buffer(0, 1),))
        if verb == "exists":
            [answer] = node.exists(["v1/a"], soon())
            assert isinstance(answer, Failure)
            assert isinstance(answer.error, ClosedError)
        else:
            [result] = getattr(node, verb)([item], soon())
            assert result.status.value == "closed"
    node.hint(["v1/a"], Hint("127.0.0.1:1"))
    node.unregister_region(region)


def test_after_closing_every_call_is_refused(owner: P2PBackend, asker: P2PBackend, region: Region) -> None:
    for node in (asker, owner):
        node.close()
        node.close()
        check_closed(node, region)
        node.register_region(region)
    with pytest.raises(ClosedError):
        owner.usage(soon())  # type: ignore[attr-defined]


def test_closing_ends_what_runs(open_node: Callable[..., P2PBackend], region: Region) -> None:
    with scripted_peer(lambda message: having(a=4)(message)) as peer:
        node = open_node(peer.address, answer_timeout_s=60)
        assert node.exists(["v1/a"], soon()) == [True]
        node.hint(["v1/b"], Hint(str(peer.address)))
        get = Calling(lambda: node.get([Get("v1/a", (region.buffer(0, 4),))], Deadline.after(600)))
        wait_for(lambda: numbers(peer.asked, Fetch))
        peer.answer = lambda message: [] if isinstance(message, Lookup) else None
        exists = Calling(lambda: node.exists(["v1/x"], Deadline.after(600)))
        wait_for(lambda: numbers(peer.asked, Lookup) == 2)
        closers = [Calling(node.close) for _ in range(4)]
        for closer in closers:
            closer.answer()
        assert [result.status for result in get.answer()] == [GetStatus.CLOSED]
        [answer] = exists.answer()
        assert isinstance(answer, Failure)
        assert isinstance(answer.error, ClosedError)


def test_a_load_that_was_given_up_before_it_began_asks_nobody(owner: P2PBackend, asker: P2PBackend, region: Region) -> None:
    """INT-07: it was told that nothing is in doubt, and its memory is used for something else."""
    keep(owner, a=b"a" * 100)
    wait_for(lambda: asker.exists(["v1/a"], soon()) == [True])
    load = [Get("v1/a", (region.buffer(0, 100),))]
    standing, going_on = threading.Event(), threading.Event()

    def stand() -> None:
        standing.set()
        going_on.wait(LIMIT_S)

    # The loop stands still between the making of the call's task and its first turn: the step that makes it is queued before this one.
    asker._loop.call_soon(threading.Event().wait, 0.2)
    asker._loop.call_soon(lambda: asker._loop._loop.call_soon(stand))
    fetches = owner.counters()["served_fetches"]
    [answer] = asker.get(load, Deadline.after(0.3))
    assert standing.wait(LIMIT_S)
    assert answer.status is GetStatus.TIMED_OUT
    going_on.set()
    assert asker.exists(["v1/a"], soon()) == [True]
    assert owner.counters()["served_fetches"] == fetches
    assert asker.counters()["asked_loads"] == 0


def test_a_life_leaves_no_thread_and_no_descriptor(open_node: Callable[..., P2PBackend], region: Region) -> None:
    """LEAK-07"""

    def life(number: int) -> None:
        owner = open_node(serve_bytes=1 << 20)
        asker = open_node(owner.address, "127.0.0.1:9")
        keep(owner, a=b"abc")
        wait_for(lambda: asker.exists(["v1/a"], soon()) == [True])
        assert asker.get([Get("v1/a", (region.buffer(0, 3),))], soon())[0].status is GetStatus.FOUND
        for node in (owner, asker) if number % 2 else (asker, owner):
            node.close()

    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    life(0)
    before = held()
    for number in range(1, 6):
        life(number)
    wait_for(lambda: held() <= before)


def test_a_forked_child_is_refused_and_its_parent_goes_on(owner: P2PBackend, asker: P2PBackend, region: Region) -> None:
    """RACE-06"""
    keep(owner, a=b"abc")
    assert asker.exists(["v1/a"], soon()) == [True]

    def child() -> None:
        for node in (asker, owner):
            check_closed(node, region)
            for step in (lambda node=node: node.settle([], soon()), lambda node=node: node.register_region(region)):
                with pytest.raises(ClosedError):
                    step()
            node.close()

    for _ in range(3):
        in_child(child)
    assert asker.exists(["v1/a"], soon()) == [True]
    assert asker.get([Get("v1/a", (region.buffer(0, 3),))], soon())[0].status is GetStatus.FOUND
    assert asker.counters()["peer_connects"] == 1


def test_many_threads_at_once(owner: P2PBackend, asker: P2PBackend, region: Region) -> None:
    rng = random.Random(3)
    records = {f"r{number}": rng.randbytes(20_000) for number in range(40)}
    keep(owner, **records)

    def load(seed: int) -> None:
        mine = random.Random(seed)
        for _ in range(20):
            names = mine.sample(sorted(records), 5)
            assert asker.exists([f"v1/{name}" for name in names], soon()) == [True] * 5
            buffers = [region.buffer((seed * 5 + place) << 15, 20_000) for place in range(5)]
            results = asker.get([Get(f"v1/{name}", (buffer,)) for name, buffer in zip(names, buffers, strict=True)], soon())
            assert [result.status for result in results] == [GetStatus.FOUND] * 5
            assert [bytes(buffer.view) for buffer in buffers] == [records[name] for name in names]

    for call in [Calling(lambda seed=seed: load(seed)) for seed in range(16)]:  # type: ignore[misc]
        call.answer()
    assert asker.counters()["peer_connects"] == 1


def test_a_hello_says_what_this_node_is(open_node: Callable[..., P2PBackend]) -> None:
    with scripted_peer(having()) as peer:
        node = open_node(peer.address)
        node.use_identity("0" * 32, "layout-1")
        wait_for(lambda: numbers(peer.asked, Hello))
        hello = next(message for message in peer.asked if isinstance(message, Hello))
        assert (hello.namespace, hello.layout, hello.paths) == ("0" * 32, "layout-1", ("zmq",))
