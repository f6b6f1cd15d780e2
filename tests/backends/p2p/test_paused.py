"""A peer that stands still costs the loads that wait for it their time. What it goes on to write when it wakes up changes no byte that is
used for anything else."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from p2p_network import Link, need
from p2p_nodes import LATE_S, NodeProcess, loads_all, names, wait_for

pytestmark = pytest.mark.timeout(400)

SIZE = 1 << 20
WANTED = names("a", 64)
PAUSES = [3.0, pytest.param(30.0, marks=pytest.mark.long)]

Start = Callable[..., NodeProcess]


@pytest.fixture(params=["zmq", "nixl"])
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def open_pair(start_node: Start, path: str, link: Link | None = None) -> tuple[NodeProcess, NodeProcess]:
    owner, asker = (start_node(machine) for machine in (link.machines if link is not None else (None, None)))
    common = {"data": path, "ucx_tls": "tcp", "lease_s": 2.0}
    if link is not None:
        common |= {"insecure": True, "data_path_trusted": True, "ucx_devices": "veth0"}
    at = [machine.address for machine in link.machines] if link is not None else ["127.0.0.1"] * 2
    owner.open(f"p2p://{at[0]}:0", serve_bytes=160 << 20, slots=64, **common)
    assert owner.ask("put", names=WANTED, size=SIZE) == ["STORED"] * len(WANTED)
    asker.open(f"p2p://{at[1]}:0", peers=owner.address, slots=96, **common)
    wait_for(lambda: loads_all(asker, WANTED, SIZE), 40.0)
    return owner, asker


@pytest.mark.parametrize("seconds", PAUSES)
@pytest.mark.parametrize("paused", ["owner", "asker"])
def test_a_pause_costs_its_time_and_hits_resume(start_node: Start, path: str, paused: str, seconds: float) -> None:
    owner, asker = open_pair(start_node, path)
    sent = owner.ask("stats")["served_bytes_sent"]
    going = asker.begin("traffic", names=WANTED, size=SIZE, batch=8, timeout_s=1.0)
    # More than its threads can be about: something has come.
    wait_for(lambda: owner.ask("stats")["served_bytes_sent"] > sent + 3 * 8 * SIZE)
    node = owner if paused == "owner" else asker
    node.pause()
    time.sleep(seconds)
    node.go_on()
    wait_for(lambda: loads_all(asker, WANTED, SIZE), 40.0)
    asker.ask("stop")
    done = going.result(60.0)
    assert done["counts"]["wrong"] == 0
    assert done["counts"]["FOUND"] > 0
    assert done["longest_s"] < 1.0 + LATE_S + (seconds if paused == "asker" else 0.0)
    assert asker.ask("settle", timeout_s=20.0) == 0
    wait_for(lambda: owner.lent() == 0)


def test_an_owner_that_stands_still_is_noticed_long_before_the_deadline(start_node: Start, path: str) -> None:
    """After 1.5 s of silence, and one more try at a session."""
    owner, asker = open_pair(start_node, path)
    owner.pause()
    try:
        done = asker.ask("get", names=WANTED[:8], size=SIZE, timeout_s=50.0)
    finally:
        owner.go_on()
    assert "FOUND" not in done["statuses"]
    assert done["took_s"] < 30.0
    wait_for(lambda: loads_all(asker, WANTED, SIZE), 40.0)


@pytest.mark.parametrize("seconds", [0.0, *PAUSES])
def test_no_byte_that_is_used_again_is_written_late(start_node: Start, path: str, link: Link, seconds: float) -> None:
    """The owner stands still in the middle of a load, until it has timed out, or so much longer that the session is lost. What is in
    doubt is out of use until it is settled, and comes back."""
    need("bandwidth")
    owner, asker = open_pair(start_node, path, link)
    # The load would take 5.4 s.
    link.narrow(100)
    seen = link.right.received_bytes()
    going = asker.begin("get", names=WANTED, size=SIZE, timeout_s=2.0)
    wait_for(lambda: link.right.received_bytes() > seen + 2 * SIZE)
    owner.pause()
    # A pause must not be about the way for what comes afterwards.
    link.narrow(200)
    done = going.result(60.0)
    assert (done["wrong"], done["took_s"] < 2.0 + LATE_S) == (0, True)
    in_doubt = done["statuses"].count("IN_DOUBT")
    # Over NIXL nobody can say whether the owner's write goes on. Over ZMQ the asker itself writes, and stops: at its deadline, or, where it
    # had to wait for a core then, soon after, whatever the owner does.
    assert set(done["statuses"]) & ({"IN_DOUBT"} if path == "nixl" else {"TIMED_OUT", "FAILED", "IN_DOUBT"})
    if path == "zmq":
        assert asker.ask("settle", timeout_s=20.0) == 0
    for wait_s in sorted({0.0, seconds}):
        # What is said to be settled is filled too.
        time.sleep(wait_s)
        assert asker.ask("changed")["bytes"] == 0
        left = asker.ask("settle", timeout_s=0.0)
        assert asker.ask("fill") == 96 - left
    owner.go_on()
    # All that was sent and not taken arrives now, if anything takes it.
    time.sleep(3.0)
    assert asker.ask("changed")["bytes"] == 0
    assert asker.ask("settle", timeout_s=30.0) == 0
    assert asker.ask("fill") == 96
    time.sleep(1.0)
    assert asker.ask("changed") == {"bytes": 0, "doubted": in_doubt}
    wait_for(lambda: loads_all(asker, WANTED, SIZE), 40.0)
