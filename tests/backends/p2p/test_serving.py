"""What a node serves does not wait for its engine, and stays lent no longer than somebody may want it; and a node ends."""

from __future__ import annotations

import os
import resource
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
from p2p_nodes import LATE_S, LIMIT_S, NodeProcess, loads_all, names, wait_for

SIZE = 1 << 20

Start = Callable[..., NodeProcess]


def test_look_ups_and_loads_are_answered_while_the_engine_computes(start_node: Start) -> None:
    """LIV-06: the step ends after the answers, not before."""
    owner, asker = start_node(), start_node()
    wanted = names("a", 8)
    owner.open(data="zmq", serve_bytes=64 << 20)
    owner.ask("put", names=wanted, size=SIZE)
    asker.open(data="zmq", peers=owner.address, answer_timeout_s=20.0)
    wait_for(lambda: loads_all(asker, wanted, SIZE))
    step = owner.begin("compute", most_s=100.0)
    tries = 0
    for number in range(20):
        # Names that were not asked for before, so that nothing is remembered of them. A session that a process has lost by standing still
        # is begun again.
        asked = [wanted[number % 8], f"v1/test/b-{number}"]
        for _ in range(20):
            tries += 1
            if asker.ask("exists", names=asked, timeout_s=20.0)["answers"] == [True, False]:
                break
            time.sleep(0.1)
        else:
            pytest.fail(f"{asked} were not answered")
    assert tries <= 25
    wait_for(lambda: loads_all(asker, wanted, SIZE))
    assert not step.done()
    owner.ask("stop")
    step.result(60.0)


def test_what_was_looked_up_and_never_loaded_is_not_kept(start_node: Start) -> None:
    """LEAK-02: after the lease its room is another record's."""
    owner, asker = start_node(), start_node()
    old, new = names("old", 8), names("new", 8)
    owner.open(data="zmq", serve_bytes=8 * SIZE + (64 << 10), lease_s=1.0, slots=16)
    assert owner.ask("put", names=old, size=SIZE) == ["STORED"] * 8
    asker.open(data="zmq", peers=owner.address)
    wait_for(lambda: asker.ask("exists", names=old)["answers"] == [True] * 8)
    wait_for(lambda: owner.lent() == 0)
    assert owner.ask("put", names=new, size=SIZE) == ["STORED"] * 8
    wait_for(lambda: asker.ask("exists", names=new)["answers"] == [True] * 8)


def test_what_a_dead_peer_had_looked_up_is_not_kept(start_node: Start) -> None:
    """LEAK-02: however long the lease."""
    owner, asker = start_node(), start_node()
    old = names("old", 8)
    owner.open(data="zmq", serve_bytes=16 * SIZE, lease_s=300.0)
    assert owner.ask("put", names=old, size=SIZE) == ["STORED"] * 8
    asker.open(data="zmq", peers=owner.address)
    # Both in one session.
    wait_for(lambda: asker.ask("exists", names=old)["answers"] == [True] * 8 and owner.lent() == 8)
    asker.kill()
    wait_for(lambda: owner.lent() == 0)


def test_loads_from_a_dead_peer_keep_neither_node_nor_process(start_node: Start) -> None:
    """LEAK-07"""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        node = start_node()
        node.open(data="zmq", peers=f"127.0.0.1:{silent.getsockname()[1]}", serve_bytes=8 << 20)
        waiting = [node.begin("get", names=names(f"a{number}", 1), size=SIZE, timeout_s=50.0) for number in range(10)]
        waiting += [node.begin("exists", names=names(f"b{number}", 1), timeout_s=50.0) for number in range(10)]
        assert node.ask("close") < LATE_S
        for one in waiting:
            assert one.result(LIMIT_S)
        assert node.end() == 0


def test_a_process_that_never_closed_its_node_ends(start_node: Start) -> None:
    """LEAK-07: with a peer that is paused, and messages to it that were not sent."""
    owner, node = start_node(), start_node()
    owner.open(data="zmq", serve_bytes=32 << 20)
    owner.ask("put", names=names("a", 16), size=SIZE)
    node.open(data="zmq", peers=owner.address)
    wait_for(lambda: loads_all(node, names("a", 16), SIZE))
    owner.pause()
    waiting = [node.begin("get", names=names("a", 16), size=SIZE, timeout_s=50.0) for _ in range(4)]
    node.ask("never_close")
    assert not any(one.done() for one in waiting)
    assert node.end() == 0


def test_a_node_that_is_short_of_descriptors_refuses_sessions_and_lives(start_node: Start) -> None:
    """And goes on serving those that it has."""
    owner, first, second = start_node(), start_node(), start_node()
    wanted = names("a", 4)
    owner.open(data="zmq", serve_bytes=8 << 20)
    owner.ask("put", names=wanted, size=SIZE)
    first.open(data="zmq", peers=owner.address)
    wait_for(lambda: loads_all(first, wanted, SIZE))
    limits = resource.prlimit(owner.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(owner.pid, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{owner.pid}/fd")) + 12, limits[1]))
    second.open(data="zmq", peers=owner.address)
    second.ask("exists", names=wanted)
    wait_for(lambda: owner.ask("stats")["served_refused"] >= 3)
    wait_for(lambda: loads_all(first, wanted, SIZE))
    resource.prlimit(owner.pid, resource.RLIMIT_NOFILE, limits)
    wait_for(lambda: loads_all(second, wanted, SIZE))
    wait_for(lambda: loads_all(first, wanted, SIZE))


def test_what_would_run_if_it_were_unpickled_does_not(start_node: Start, tmp_path: Path) -> None:
    """SEC-06: neither as it is, nor as a message, nor behind a length of 2 GiB. Whoever it serves is served on."""
    owner, asker = start_node(), start_node()
    wanted = names("a", 4)
    owner.open(data="zmq", serve_bytes=8 << 20)
    owner.ask("put", names=wanted, size=SIZE)
    asker.open(data="zmq", peers=owner.address)
    wait_for(lambda: loads_all(asker, wanted, SIZE))
    host, _, port = owner.address.rpartition(":")
    marker = tmp_path / "it-ran"
    evil = f"cos\nsystem\n(S'touch {marker}'\ntR.".encode()
    for sent in (evil, struct.pack(">I", 2 << 30) + evil, struct.pack("<Q", 2 << 30) + evil):
        with socket.create_connection((host, int(port)), LIMIT_S) as connection:
            connection.sendall(sent)
            wait_for(lambda: loads_all(asker, wanted, SIZE))
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(f"tcp://{owner.address}")
        for _ in range(20):
            stranger.send(evil)
        wait_for(lambda: owner.ask("stats")["served_bad_frames"] > 0)
    wait_for(lambda: loads_all(asker, wanted, SIZE))
    assert not marker.exists()
