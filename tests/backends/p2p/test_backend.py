"""Two nodes: what one keeps the other finds and loads, by the contract of a backend."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from p2p_pairs import LIMIT_S, keep, soon, wait_for
from p2p_scripted import having, numbers, scripted_peer
from scripted_client import Calling

from kvstore_sdk.backend import (
    Deadline,
    Failure,
    Get,
    GetStatus,
    InvalidError,
    Mode,
    Put,
    PutStatus,
    ReadOnlyError,
    Region,
    SupportsSettle,
    SupportsUsage,
    TimedOutError,
    UnavailableError,
)
from kvstore_sdk_backends.p2p import peer as peer_module
from kvstore_sdk_backends.p2p.backend import P2PBackend
from kvstore_sdk_backends.p2p.messages import VERSION, Fetch, Lookup, Result

# What is where


@pytest.mark.parametrize("size", [1, 4096, 4097, 3 << 20])
def test_what_one_keeps_the_other_loads(size: int, owner: P2PBackend, asker: P2PBackend, region: Region) -> None:
    record = random.Random(size).randbytes(size)
    keep(owner, a=record)
    assert asker.exists(["v1/a", "v1/b"], soon()) == [True, False]
    region.view[: size + 64] = b"\xee" * (size + 64)
    [a, b] = asker.get([Get("v1/a", (region.buffer(32, size),)), Get("v1/b", (region.buffer(8 << 20, size),))], soon())
    assert (a.status, b.status) == (GetStatus.FOUND, GetStatus.MISSING)
    assert bytes(region.view[32 : 32 + size]) == record
    assert bytes(region.view[:32]) == bytes(region.view[32 + size : size + 64]) == b"\xee" * 32


def test_a_load_needs_no_look_up_before_it(owner: P2PBackend, asker: P2PBackend, region: Region) -> None:
    keep(owner, a=b"record")
    [result] = asker.get([Get("v1/a", (region.buffer(0, 6),))], soon())
    assert result.status is GetStatus.FOUND
    assert bytes(region.view[:6]) == b"record"


def test_answers_come_in_the_order_of_the_questions(owner: P2PBackend, asker: P2PBackend, region: Region) -> None:
    rng = random.Random(7)
    records = {f"r{number}": rng.randbytes(rng.randrange(1, 9000)) for number in range(100)}
    keep(owner, **records)
    names = [*records, *(f"x{number}" for number in range(100))]
    rng.shuffle(names)
    assert asker.exists([f"v1/{name}" for name in names], soon()) == [name in records for name in names]
    gets = [Get(f"v1/{name}", (region.buffer(16384 * place, len(records.get(name, b"x"))),)) for place, name in enumerate(names)]
    results = asker.get(gets, soon())
    for name, get, result in zip(names, gets, results, strict=True):
        assert result.status is (GetStatus.FOUND if name in records else GetStatus.MISSING)
        if name in records:
            assert bytes(get.into[0].view) == records[name]


def test_one_name_twice_in_a_call_fills_both_buffers(owner: P2PBackend, asker: P2PBackend, region: Region) -> None:
    keep(owner, a=b"abc", b=b"xyz")
    asked = {0: "a", 16: "b", 32: "a", 48: "c", 64: "a", 80: "c"}
    results = asker.get([Get(f"v1/{name}", (region.buffer(offset, 3),)) for offset, name in asked.items()], soon())
    assert [result.status for result in results] == [GetStatus.MISSING if name == "c" else GetStatus.FOUND for name in asked.values()]
    assert [bytes(region.view[offset : offset + 3]) for offset in asked] == [b"abc", b"xyz", b"abc", bytes(3), b"abc", bytes(3)]


def test_of_another_length_both_are_said(owner: P2PBackend, asker: P2PBackend, region: Region) -> None:
    keep(owner, a=b"x" * 100)
    gets = [Get("v1/a", (region.buffer(0, size),)) for size in (99, 101)]
    for get in [*gets, Get("v1/a", ())]:
        [result] = asker.get([get], soon())
        assert (result.status, result.size_bytes, result.asked_bytes) == (GetStatus.WRONG_SIZE, 100, get.size_bytes)


def test_what_a_node_keeps_itself_it_asks_nobody_for(open_node: Callable[..., P2PBackend], region: Region) -> None:
    with scripted_peer(having(b=5)) as peer:
        node = open_node(peer.address, serve_bytes=1 << 20)
        keep(node, a=b"mine!")
        assert node.exists(["v1/a"], soon()) == [True]
        assert node.get([Get("v1/a", (region.buffer(0, 5),))], soon())[0].status is GetStatus.FOUND
        assert numbers(peer.asked, Lookup) == 0
        assert node.exists(["v1/a", "v1/b"], soon()) == [True, True]
        assert [message.names for message in peer.asked if isinstance(message, Lookup)] == [("v1/b",)]


def test_a_record_that_is_replaced_is_the_new_one_or_the_old_one_and_never_a_mix(
    owner: P2PBackend, asker: P2PBackend, region: Region
) -> None:
    size = 1 << 20
    keep(owner, a=b"\0" * size)
    stop = threading.Event()

    def replace() -> None:
        mine = Region(size)
        value = 0
        while not stop.is_set():
            value = (value + 1) % 251
            mine.view[:] = bytes([value]) * mine.size_bytes
            assert owner.put([Put("v1/a", (mine.buffer(0, size),), Mode.REPLACE)], soon())[0].status is PutStatus.STORED
        mine.close()

    writing = Calling(replace)
    for _ in range(30):
        [result] = asker.get([Get("v1/a", (region.buffer(0, size),))], soon())
        assert result.status is GetStatus.FOUND
        assert len(set(bytes(region.view[:size]))) == 1
    stop.set()
    writing.answer()


def test_a_record_that_leaves_its_peer_is_a_miss(open_node: Callable[..., P2PBackend], region: Region) -> None:
    owner = open_node(serve_bytes=64 << 10)
    asker = open_node(owner.address)
    keep(owner, a=b"x" * 4096)
    assert asker.get([Get("v1/a", (region.buffer(0, 4096),))], soon())[0].status is GetStatus.FOUND
    # The asker has it some time before the owner knows that nothing reads it any more.
    wait_for(lambda: not owner.counters()["served_sending_now"])
    keep(owner, **{f"n{number}": b"y" * 4096 for number in range(32)})
    assert asker.get([Get("v1/a", (region.buffer(0, 4096),))], soon())[0].status is GetStatus.MISSING
    assert asker.exists(["v1/a"], soon()) == [False]


# What is refused


def test_without_room_for_records_puts_are_refused_and_nothing_is_said_of_usage(asker: P2PBackend, owner: P2PBackend) -> None:
    region = Region(4096)
    [result] = asker.put([Put("v1/a", (region.buffer(0, 1),))], soon())
    assert result.status is PutStatus.FAILED
    assert isinstance(result.error, ReadOnlyError)
    assert (asker.capabilities.read_only, owner.capabilities.read_only) == (True, False)
    assert not isinstance(asker, SupportsUsage)
    keep(owner, a=b"x" * 100)
    assert isinstance(owner, SupportsUsage)
    usage = owner.usage(soon())
    assert (usage.records, usage.used_bytes, usage.capacity_bytes) == (1, 100, 32 << 20)
    region.close()


def test_bad_names_and_buffers_are_refused_and_the_others_done(owner: P2PBackend, asker: P2PBackend, region: Region) -> None:
    keep(owner, a=b"abc")
    bad = ["../a", "", "a//b", "é", "x" * 1025]
    answers = asker.exists([*bad, "v1/a"], soon())
    assert answers[-1] is True
    assert all(isinstance(answer, Failure) and isinstance(answer.error, InvalidError) for answer in answers[:-1])
    two_parts = Get("v1/a", (region.buffer(0, 1), region.buffer(1, 2)))
    for node in (owner, asker):
        [one, other, good] = node.get([Get("../a", (region.buffer(100, 3),)), two_parts, Get("v1/a", (region.buffer(200, 3),))], soon())
        assert isinstance(one.error, InvalidError)
        assert isinstance(other.error, InvalidError)
        assert good.status is GetStatus.FOUND
    [bad_put] = owner.put([Put("../a", (region.buffer(0, 1),))], soon())
    assert isinstance(bad_put.error, InvalidError)


def test_without_peers_nothing_is_anywhere(open_node: Callable[..., P2PBackend], region: Region) -> None:
    node = open_node()
    assert node.exists(["v1/a"], soon()) == [False]
    assert node.get([Get("v1/a", (region.buffer(0, 1),))], soon())[0].status is GetStatus.MISSING


def test_where_no_peer_is_there_it_cannot_be_said_what_is(open_node: Callable[..., P2PBackend], region: Region) -> None:
    with scripted_peer(having()) as peer:
        gone = peer.address
    node = open_node(gone)
    [answer] = node.exists(["v1/a"], soon())
    assert isinstance(answer, Failure)
    assert isinstance(answer.error, UnavailableError)
    assert str(gone) in str(answer.error)
    [result] = node.get([Get("v1/a", (region.buffer(0, 1),))], soon())
    assert result.status is GetStatus.FAILED
    assert isinstance(result.error, UnavailableError)


def test_alone_in_its_own_list_a_node_has_no_peers(open_node: Callable[..., P2PBackend]) -> None:
    node = open_node(serve_bytes=1 << 20)
    # As behind a name of all nodes, of which there is one.
    node._peers.listed = (node.address,)
    node._settings = type(node._settings)(listen=node.address, peers=(node.address,))
    wait_for(lambda: node.exists(["v1/a"], soon()) == [False])
    wait_for(lambda: node.counters()["peers_now"] == 0)


# Deadlines


def test_calls_end_by_their_deadline(open_node: Callable[..., P2PBackend], region: Region) -> None:
    """LIV-03"""
    with scripted_peer(lambda message: None) as silent:
        node = open_node(silent.address, answer_timeout_s=60)
        # It is connected to as soon as it is asked.
        node.exists(["v1/a"], Deadline.after(0.05))
        wait_for(lambda: node.counters()["peers_up_now"])
        began_s = time.monotonic()
        [answer] = node.exists(["v1/a"], Deadline.after(0.2))
        assert isinstance(answer, Failure)
        assert isinstance(answer.error, TimedOutError)
        [result] = node.get([Get("v1/a", (region.buffer(0, 1),))], Deadline.after(0.2))
        assert result.status in (GetStatus.TIMED_OUT, GetStatus.FAILED, GetStatus.IN_DOUBT)
        if (ticket := result.ticket) is not None:
            # The loop itself had to wait for its turn.
            wait_for(lambda: node.settle([ticket], soon())[0])
        assert time.monotonic() - began_s < LIMIT_S
        assert isinstance(node.exists(["v1/a"], Deadline.after(-1))[0], Failure)


def test_what_comes_after_the_deadline_is_written_nowhere(open_node: Callable[..., P2PBackend], region: Region) -> None:
    later: list[Callable[[], None]] = []

    def answer(message: Any) -> Any:
        if isinstance(message, Fetch) and message.items[0][0] == "v1/a":
            later.append(lambda: peer.send_record(message.number, 0, b"late"))
            return None
        if isinstance(message, Lookup) and message.names == ("v1/send",):
            later[0]()
        return having(a=4, send=4)(message)

    def given_up() -> bool:
        [result] = node.get([Get("v1/a", (region.buffer(0, 4),))], Deadline.after(0.3))
        if (ticket := result.ticket) is not None:
            # The loop itself had to wait for its turn.
            wait_for(lambda: node.settle([ticket], soon())[0])
        return result.status in (GetStatus.TIMED_OUT, GetStatus.IN_DOUBT)

    with scripted_peer(answer) as peer:
        node = open_node(peer.address)
        assert node.exists(["v1/a"], soon()) == [True]
        wait_for(lambda: given_up() and later)
        region.view[:4] = b"mine"
        assert node.exists(["v1/send"], soon()) == [True]
        # The connection of the data is another one.
        time.sleep(0.2)
        assert bytes(region.view[:4]) == b"mine"


def test_a_loop_that_stands_still_delays_nobody_and_what_it_may_still_write_is_in_doubt(
    owner: P2PBackend, asker: P2PBackend, region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(owner, a=b"x" * 100)
    assert asker.exists(["v1/a"], soon()) == [True]
    held, go = threading.Event(), threading.Event()
    move = asker._asking._over_zmq

    async def stand_still(*arguments: Any) -> Any:
        held.set()
        assert go.wait(LIMIT_S)
        return await move(*arguments)

    monkeypatch.setattr(asker._asking, "_over_zmq", stand_still)
    began_s = time.monotonic()
    while not held.is_set():
        # One that the loop does not begin in time it never begins.
        [result] = asker.get([Get("v1/a", (region.buffer(0, 100),))], Deadline.after(0.1))
        assert time.monotonic() - began_s < LIMIT_S
    assert result.status is GetStatus.IN_DOUBT
    assert isinstance(asker, SupportsSettle)
    assert asker.settle([result.ticket], Deadline.after(0.05)) == [False]
    # A call that the loop did not even begin is definite.
    [other] = asker.get([Get("v1/a", (region.buffer(0, 100),))], Deadline.after(0.1))
    assert other.status is GetStatus.TIMED_OUT
    go.set()
    assert asker.settle([result.ticket], soon()) == [True]
    region.view[:100] = b"y" * 100
    monkeypatch.undo()
    assert asker.exists(["v1/a"], soon()) == [True]
    assert bytes(region.view[:100]) == b"y" * 100


# What peers say


FAULTS: dict[str, Callable[[Any, Any], Any]] = {
    "a shorter record": lambda peer, fetch: peer.send_record(fetch.number, 0, b"x" * 99),
    "a longer record": lambda peer, fetch: peer.send_record(fetch.number, 0, b"x" * 101),
    "a record under a wrong size": lambda peer, fetch: peer.send_record(fetch.number, 0, b"x" * 101, size=100),
    "found of another size": lambda peer, fetch: _result(fetch, (0, 99)),
    "wrong size that is right": lambda peer, fetch: _result(fetch, (2, 100)),
    "wrong size of nothing": lambda peer, fetch: _result(fetch, (2, 0)),
    "more statuses": lambda peer, fetch: _result(fetch, (0, 100), (0, 100)),
    "garbage": lambda peer, fetch: b"\x93\x00",
    "an unknown status": lambda peer, fetch: bytes([0x94, VERSION, Result.KIND, fetch.number, 0x91, 0x92, 99, 100]),
}


def _result(fetch: Any, *statuses: tuple[int, int]) -> Result:
    return Result(fetch.number, statuses)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_peer_that_lies_ends_its_own_session_and_hurts_nobody_else(
    fault: str, open_node: Callable[..., P2PBackend], owner: P2PBackend, region: Region, caplog: pytest.LogCaptureFixture
) -> None:
    keep(owner, a=b"g" * 100, b=b"g" * 100)

    def answer(message: Any) -> Any:
        return FAULTS[fault](peer, message) if isinstance(message, Fetch) else having(bad=100)(message)

    with scripted_peer(answer) as peer:
        node = open_node(peer.address, owner.address)
        wait_for(lambda: node.exists(["v1/bad", "v1/a"], soon()) == [True, True])
        region.view[:] = b"\xee" * region.size_bytes
        gets = [Get(f"v1/{name}", (region.buffer(1000 * place + 64, 100),)) for place, name in enumerate(("bad", "a", "b"))]
        with caplog.at_level(logging.WARNING):
            bad, *good = node.get(gets, soon())
        assert bad.status is not GetStatus.FOUND
        assert [result.status for result in good] == [GetStatus.FOUND] * 2
        assert bytes(region.view[164:1064]) == b"\xee" * 900
        wait_for(lambda: [line for line in caplog.messages if line.startswith(f"p2p peer {peer.address}: is lost: ")])


def test_a_peer_that_never_gives_what_it_has_hides_nothing_that_another_has(
    open_node: Callable[..., P2PBackend], owner: P2PBackend, region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LIV-20"""
    # It is not asked again because this test took its time.
    monkeypatch.setattr(peer_module, "SHUN_S", 3600.0)
    monkeypatch.setattr(peer_module, "LONGEST_SHUN_S", 3600.0)
    keep(owner, **{f"r{number}": b"x" * 100 for number in range(20)})

    def answer(message: Any) -> Any:
        if isinstance(message, Fetch):
            return _result(message, *[(4, 100)] * len(message.items))
        return having(**{f"r{number}": 100 for number in range(20)})(message)

    with scripted_peer(answer) as peer:
        node = open_node(peer.address, owner.address)
        wait_for(lambda: node.exists(["v1/r0"], soon()) == [True])
        for number in range(20):
            [result] = node.get([Get(f"v1/r{number}", (region.buffer(0, 100),))], soon())
            assert result.status is GetStatus.FOUND
        assert numbers(peer.asked, Fetch) <= 5


@pytest.mark.parametrize("status", [(1, 0), (2, 99)], ids=["missing", "of another size"])
def test_what_a_peer_says_it_has_and_has_not_is_loaded_from_another(
    status: tuple[int, int], open_node: Callable[..., P2PBackend], owner: P2PBackend, region: Region
) -> None:
    names = [f"r{number}" for number in range(12)]
    keep(owner, **{name: name.encode() * 50 for name in names})

    def answer(message: Any) -> Any:
        return (
            _result(message, *[status] * len(message.items)) if isinstance(message, Fetch) else having(**dict.fromkeys(names, 100))(message)
        )

    with scripted_peer(answer) as peer:
        node = open_node(peer.address, owner.address)
        wait_for(lambda: node.exists(["v1/x"], soon()) == [False] and node.counters()["peers_up_now"] == 2)
        liar = next(one for one in node._peers.all() if one.address == peer.address)
        for name in names:
            # Of the two that have it this one was found first.
            size = len(name) * 50
            node._loop.run("note", lambda name=name, size=size: _found_by(node, liar, f"v1/{name}", size), LIMIT_S)
            [result] = node.get([Get(f"v1/{name}", (region.buffer(0, size),))], soon())
            assert result.status is GetStatus.FOUND
            assert bytes(region.view[:size]) == name.encode() * 50
        assert numbers(peer.asked, Fetch) == len(names)


async def _found_by(node: P2PBackend, peer: Any, name: str, size_bytes: int) -> None:
    node._asking._places.note(name, peer, peer.link, size_bytes)


def test_what_a_peer_does_not_have_is_missing_also_where_it_is_lost_before_the_rest_came(
    open_node: Callable[..., P2PBackend], region: Region
) -> None:
    def answer(message: Any) -> Any:
        if isinstance(message, Fetch):
            peer.send_record(message.number, 0, b"here")
            return [_result(message, (0, 4), (1, 0), (0, 4)), b"\xc1"]
        return having(a=4, b=4, c=4)(message) if len(message.names) == 3 else having()(message)

    with scripted_peer(lambda message: answer(message) if isinstance(message, (Fetch, Lookup)) else None) as peer:
        node = open_node(peer.address)
        assert node.exists(["v1/a", "v1/b", "v1/c"], soon()) == [True] * 3
        results = node.get([Get(f"v1/{name}", (region.buffer(100 * place, 4),)) for place, name in enumerate("abc")], soon())
        assert results[1].status is not GetStatus.FOUND
        assert results[2].status is not GetStatus.FOUND
