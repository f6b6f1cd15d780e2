"""A peer that gave a record which was corrupt is asked after all others, and what it gave is had from them."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from p2p_group import Group, missing, run
from p2p_pairs import keep, soon, wait_for
from p2p_scripted import having

from kvstore_sdk.backend import Buffer, Get, GetStatus, Hint, Mode, Put, PutStatus, Region, SupportsReports
from kvstore_sdk.testing import Fault, FaultyBackend, WrongBytes
from kvstore_sdk.tier import Lookup as TierLookup
from kvstore_sdk_backends.p2p import suspects as suspects_module
from kvstore_sdk_backends.p2p.backend import P2PBackend

sys.path.insert(0, str(Path(__file__).parents[2] / "tier"))

from tier_bench import PATIENT, Engine, Shop, key, keys

SIZE = 4096


def load(node: P2PBackend, region: Region, name: str) -> bytes | None:
    buffer = region.buffer(0, SIZE)
    [result] = node.get([Get(f"v1/{name}", (buffer,))], soon())
    return bytes(buffer.view) if result.status is GetStatus.FOUND else None


@pytest.fixture
def bad(open_node: Callable[..., P2PBackend]) -> P2PBackend:
    """Keeps records, the bytes of which are wrong."""
    return open_node(serve_bytes=32 << 20)


def find_at(node: P2PBackend, peer: P2PBackend, *names: str) -> None:
    """Of all that have them this peer was found first."""

    async def note() -> None:
        [one] = [one for one in node._peers.all() if one.address == peer.address]
        for name in names:
            node._lookups._places.note(f"v1/{name}", one, await one.ready(time.monotonic() + 20), SIZE)

    node._loop.run("note", note, 20)


def test_what_was_corrupt_from_one_is_had_from_another(
    open_node: Callable[..., P2PBackend], owner: P2PBackend, bad: P2PBackend, region: Region, caplog: pytest.LogCaptureFixture
) -> None:
    names = [f"r{number}" for number in range(8)]
    keep(owner, **{name: name.encode() * (SIZE // 2) for name in names})
    keep(bad, **dict.fromkeys(names, b"\0" * SIZE))
    node = open_node(bad.address, owner.address)
    assert isinstance(node, SupportsReports)
    wait_for(lambda: node.exists(["v1/none"], soon()) == [False] and node.counters()["peers_up_now"] == 2)
    find_at(node, bad, *names)
    assert load(node, region, "r0") == b"\0" * SIZE
    node.report_corrupt(["v1/r0"])
    assert load(node, region, "r0") == b"r0" * (SIZE // 2)
    # For the others, too, as soon as they are looked up.
    node._loop.run("forget", forget(node), 20)
    for name in names[1:]:
        assert load(node, region, name) == name.encode() * (SIZE // 2)
    assert bad.counters()["served_records_sent"] == 1
    assert node.counters()["asked_corrupt"] == 1
    assert [line for line in caplog.messages if line.startswith(f"p2p peer {bad.address}: gave a record that is corrupt")]


def forget(node: P2PBackend) -> Callable[[], Any]:
    async def step() -> None:
        node._asking.forget()

    return step


def test_who_is_suspect_is_asked_for_what_nobody_else_has() -> None:
    async def steps() -> None:
        group = Group(having(a=1, b=1), having(a=1), fan_out=1)
        assert missing(await group.find("a")) == []
        assert group.place("a") == 1
        group.lookups.suspect(["v1/a"])
        assert group.place("a") is None
        assert missing(await group.find("a")) == []
        assert group.place("a") == 2
        assert len(group.asked(1)) == 1
        assert missing(await group.find("b", "c")) == ["c"]
        assert group.place("b") == 1
        assert group.asked(2)[-1] == ("b", "c")
        assert group.asked(1)[-1] == ("b", "c")

    run(steps())


def test_nobody_is_suspect_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    async def steps() -> None:
        group = Group(having(a=1), having(a=1), fan_out=1)
        await group.find("a")
        monkeypatch.setattr(suspects_module, "SUSPECT_S", 0.05)
        group.lookups.suspect(["v1/a"])
        await asyncio.sleep(0.1)
        await group.find("a")
        # The one that had it last comes first; neither had anything, so it is the first of the list.
        assert group.place("a") == 1

    run(steps())


def test_all_being_suspect_everybody_is_asked() -> None:
    async def steps() -> None:
        group = Group(having(a=1, b=1), having(b=1))
        for _ in range(2):
            await group.find("a")
            group.lookups.suspect(["v1/a"])
        assert missing(await group.find("b")) == []

    run(steps())


def test_what_a_named_one_gave_and_is_corrupt_is_asked_of_the_listed() -> None:
    async def steps() -> None:
        group = Group(having(a=1), having(a=1), named=1)
        group.hints.note(["v1/a"], Hint("127.0.0.1:2"))
        assert missing(await group.find("a")) == []
        assert group.place("a") == 2
        group.lookups.suspect(["v1/a"])
        assert missing(await group.find("a")) == []
        assert group.place("a") == 1

    run(steps())


def test_what_nobody_else_has_is_asked_again_of_the_one_that_was_named() -> None:
    async def steps() -> None:
        group = Group(having(a=1, b=1), named=1)
        group.hints.note(["v1/a", "v1/b"], Hint("127.0.0.1:1"))
        for name in ("a", "a", "b"):
            assert missing(await group.find(name, wait=True)) == []
            assert group.place(name) == 1
            group.lookups.suspect([f"v1/{name}"])
        assert group.lookups.counts["corrupt"] == 3
        assert missing(await group.find("b", avoid=group.peers.all())) == ["b"]

    run(steps())


def test_a_named_one_that_is_suspect_comes_after_the_listed() -> None:
    async def steps() -> None:
        group = Group(having(b=1), having(a=1, b=1), named=1)
        group.hints.note(["v1/a", "v1/b"], Hint("127.0.0.1:2", wait_s=20.0))
        assert missing(await group.find("a")) == []
        group.lookups.suspect(["v1/a"])
        assert missing(await group.find("a", "b")) == []
        assert (group.place("a"), group.place("b")) == (2, 1)
        assert (group.asked(1), group.asked(2)) == ([("a", "b")], [("a",), ("a",)])

    run(steps())


def test_what_a_named_one_gave_and_is_corrupt_is_read_a_second_time(
    open_node: Callable[..., P2PBackend], owner: P2PBackend, region: Region
) -> None:
    """Also where no peers are listed, as where a request names who computed its prompt."""
    keep(owner, a=b"g" * SIZE)
    node = open_node()
    node.hint(["v1/a"], Hint(str(owner.address)))
    for number in (1, 2, 3):
        assert load(node, region, "a") == b"g" * SIZE
        node.report_corrupt(["v1/a"])
        wait_for(lambda number=number: node.counters()["asked_corrupt"] == number)


def test_a_report_of_what_was_never_loaded_says_nothing_of_anybody() -> None:
    async def steps() -> None:
        group = Group(having(a=1))
        group.lookups.suspect(["v1/a", "v1/b", "no name at all\n"])
        assert group.lookups.counts["corrupt"] == 0

    run(steps())


def test_what_is_corrupt_on_the_own_shelf_stays_until_it_is_replaced(
    open_node: Callable[..., P2PBackend], owner: P2PBackend, region: Region
) -> None:
    keep(owner, a=b"g" * SIZE, b=b"g" * SIZE)
    node = open_node(owner.address, serve_bytes=1 << 20)
    keep(node, a=b"\0" * SIZE)
    assert load(node, region, "b") == b"g" * SIZE
    for _ in range(2):
        assert load(node, region, "a") == b"\0" * SIZE
        node.report_corrupt(["v1/a"])
    node.report_corrupt(["v1/b"])
    wait_for(lambda: node.counters()["asked_corrupt"] == 1)
    region.view[:SIZE] = b"n" * SIZE
    assert [result.status for result in node.put([Put("v1/a", (Buffer(region, 0, SIZE),), Mode.REPLACE)], soon())] == [PutStatus.STORED]
    assert load(node, region, "a") == b"n" * SIZE


def test_a_host_that_reads_nothing_right_keeps_what_is_on_its_own_shelf(open_node: Callable[..., P2PBackend]) -> None:
    """As it leaves a shared folder alone: others may read it well."""
    node = open_node(serve_bytes=1 << 20)
    backend = FaultyBackend(node)
    assert isinstance(backend, SupportsReports)
    engine = Engine(backend, retries=0, **PATIENT)
    try:
        assert engine.store(keys(12)).success
        # One that is bad is a miss until it is stored again.
        backend.arm(Fault("get", WrongBytes(offset=4200), times=2))
        assert not engine.load([key(0)]).success
        assert engine.store([key(0)]).success
        assert engine.total("stores", "replaced") == 1
        assert engine.load([key(0)]).success
        backend.arm(Fault("get", WrongBytes(offset=4200)))
        assert engine.load(keys(12)).failed == tuple(keys(12))
        assert all(Shop(node).has(key(number)) for number in range(12))
    finally:
        engine.close()


def test_a_node_that_is_closed_hears_nothing_any_more(open_node: Callable[..., P2PBackend]) -> None:
    node = open_node()
    node.close()
    node.report_corrupt(["v1/a"])


def test_through_a_tier_a_peer_with_bad_memory_costs_one_load(
    open_node: Callable[..., P2PBackend], owner: P2PBackend, bad: P2PBackend
) -> None:
    """Two peers have all chunks, one of them spoilt: none is lost, and after the first loads that one is asked for none."""
    writer = Engine(owner, **PATIENT)
    writer.store(keys(24))
    spoilt = Engine(bad, **PATIENT)
    spoilt.store(keys(24))
    assert bad._shelf is not None
    for record in bad._shelf._records.values():
        bad._shelf.region.view[record.offset + 5000 : record.offset + 5001] = b"\xff"
    names = [Shop(owner).name(key).removeprefix("v1/") for key in keys(4)]
    node = open_node(bad.address, owner.address)
    engine = Engine(node, may_store=False, **PATIENT)
    try:
        wait_for(lambda: node.exists(["v1/none"], soon()) == [False] and node.counters()["peers_up_now"] == 2)
        find_at(node, bad, *names)
        assert engine.load(keys(4)).success
        assert all(engine.memory.holds(row, key) for row, key in enumerate(keys(4)))
        for start in range(4, 24, 4):
            assert engine.ask(keys(4, start=start)) == [TierLookup.HIT] * 4
            assert engine.load(keys(4, start=start)).success
        assert bad.counters()["served_records_sent"] == node.counters()["asked_corrupt"] == 4
        assert engine.total("corrupt") == 0
    finally:
        for one in (engine, writer, spoilt):
            one.close()
