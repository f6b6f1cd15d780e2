"""The processes that the tests of this folder drive see wrong bytes and late ones, and are gone when they are ended."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from p2p_node import Node, Slots, record
from p2p_nodes import NodeProcess, names
from soak_watch import is_alive

SIZE = 10_000


@pytest.fixture
def node() -> Node:
    made = Node()
    made.open("memory:", {}, slots=4, slot_bytes=16384)
    return made


def test_what_was_put_is_got_and_compared(start_node: Callable[..., NodeProcess]) -> None:
    node = start_node()
    node.open("memory:", slots=8, slot_bytes=16384)
    assert node.ask("put", names=names("a", 8), size=SIZE) == ["STORED"] * 8
    assert node.ask("exists", names=[*names("a", 1), "other"])["answers"] == [True, False]
    got = node.ask("get", names=[*names("a", 2), "other"], size=SIZE)
    assert (got["statuses"], got["wrong"]) == (["FOUND", "FOUND", "MISSING"], 0)
    going = node.begin("traffic", names=names("a", 8), size=SIZE, batch=2, timeout_s=5.0)
    node.ask("stop")
    assert not going.result(20.0)["counts"].get("wrong")
    assert node.end() == 0


def test_a_wrong_byte_is_seen(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.put(["a", "b"], SIZE)
    assert node.get(["a", "b"], SIZE)["wrong"] == 0
    monkeypatch.setattr("p2p_node.record", lambda name, size: record("a", size))
    assert node.get(["b"], SIZE)["wrong"] > SIZE / 2
    node.close()


def test_a_late_write_is_seen_in_free_slots_and_not_in_doubtful_ones() -> None:
    slots = Slots(4, 4096)
    [doubtful] = slots.take(1)
    slots.doubt("ticket", doubtful)
    assert slots.fill() == 3
    slots.buffer(doubtful, 4096).view[5] = 1
    assert slots.changed() == 0
    slots.buffer((doubtful + 1) % 4, 4096).view[5] = 1
    assert slots.changed() == 1
    slots.region.close()


def test_a_node_is_paused_goes_on_and_is_killed(start_node: Callable[..., NodeProcess]) -> None:
    node = start_node()
    node.open("memory:", slots=1, slot_bytes=4096)
    node.pause()
    asked = node.begin("stats")
    with pytest.raises(TimeoutError):
        asked.result(0.3)
    node.go_on()
    assert asked.result(20.0)["doubts"] == 0
    node.kill()
    assert not is_alive(node.pid)
    with pytest.raises(ProcessLookupError):
        node.ask("stats")


def test_a_record_is_told_by_its_name_and_place() -> None:
    assert record("a", 100_000)[4096:] != record("a", 100_000 - 4096)
    assert record("a", 5000) != record("b", 5000)
