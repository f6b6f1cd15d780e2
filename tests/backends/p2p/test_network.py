"""The faults of the network are there, and end: seen with plain sockets, so that what nodes make of them means something."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest
from p2p_network import Link, Machine, Relay, missing, need

LIMIT_S = 20.0


def stream(server: Machine, client: Machine, address: str) -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection: the client's first."""
    with closing(server.do(lambda: socket.create_server((address, 0)))) as listening:
        here = client.do(lambda: socket.create_connection(listening.getsockname(), LIMIT_S))
        there, _ = listening.accept()
    for end in (here, there):
        end.settimeout(LIMIT_S)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return here, there


def datagrams_that_arrive(server: Machine, client: Machine, address: str, count: int) -> int:
    """Of so many. Those that say the end come after them, and are sent until one arrives."""
    receiving, sending = (machine.do(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) for machine in (server, client))
    with closing(receiving), closing(sending):
        receiving.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        receiving.bind((address, 0))
        for _ in range(count):
            sending.sendto(b"x", receiving.getsockname())
            time.sleep(0.0005)
        receiving.settimeout(0.05)
        arrived, until_s = 0, time.monotonic() + LIMIT_S
        while time.monotonic() < until_s:
            sending.sendto(b"e", receiving.getsockname())
            with suppress(TimeoutError):
                while receiving.recv(1) == b"x":
                    arrived += 1
                return arrived
        raise TimeoutError("nothing arrives")


@pytest.fixture
def connected(link: Link) -> Iterator[tuple[socket.socket, socket.socket]]:
    ends = stream(link.right, link.left, link.right.address)
    yield ends
    for end in ends:
        end.close()


def arrives_in(there: socket.socket, seconds: float) -> bytes:
    there.settimeout(seconds)
    try:
        return there.recv(1)
    except TimeoutError:
        return b""


@pytest.mark.parametrize("end", ["left", "right"])
def test_a_cut_link_carries_nothing_until_it_is_mended(link: Link, connected: tuple[socket.socket, socket.socket], end: str) -> None:
    here, there = connected
    here.sendall(b"a")
    assert arrives_in(there, LIMIT_S) == b"a"
    link.cut(getattr(link, end))
    here.sendall(b"b")
    assert arrives_in(there, 0.5) == b""
    link.mend(getattr(link, end))
    assert arrives_in(there, LIMIT_S) == b"b"


def test_a_link_that_swallows_carries_nothing_and_keeps_its_carrier(link: Link, connected: tuple[socket.socket, socket.socket]) -> None:
    here, there = connected
    here.sendall(b"a")
    assert arrives_in(there, LIMIT_S) == b"a"
    link.swallow()
    here.sendall(b"b")
    assert arrives_in(there, 0.5) == b""
    assert all("LOWER_UP" in machine.run("ip", "link", "show", "veth0") for machine in link.machines)
    link.spit_out()
    assert arrives_in(there, LIMIT_S) == b"b"


def test_a_lossy_link_loses_its_part(link: Link) -> None:
    need("loss")
    link.lose(30)
    assert 100 < datagrams_that_arrive(link.right, link.left, link.right.address, 300) < 280
    link.lose(0)
    assert datagrams_that_arrive(link.right, link.left, link.right.address, 100) == 100


def test_a_narrow_link_takes_its_time(link: Link, connected: tuple[socket.socket, socket.socket]) -> None:
    need("bandwidth")
    link.narrow(50)
    here, there = connected
    size = 4 << 20
    sender = threading.Thread(target=here.sendall, args=(bytes(size),))
    began_s = time.monotonic()
    sender.start()
    left = size
    while left:
        left -= len(there.recv(1 << 16))
    sender.join()
    # 0.67 s, less what the bucket and the queue take at once.
    assert time.monotonic() - began_s > 0.5


def test_a_relay_is_late_and_loses_its_part(link: Link) -> None:
    need("relay")
    with closing(Relay(link, delay_s=0.1, loss=0.0)) as relay:
        here, there = stream(link.right, link.left, relay.right)
        with closing(here), closing(there):
            began_s = time.monotonic()
            here.sendall(b"?")
            there.sendall(there.recv(1))
            assert here.recv(1) == b"?"
            assert time.monotonic() - began_s > 0.2
    with closing(Relay(link, delay_s=0.0, loss=0.3)) as relay:
        assert 100 < datagrams_that_arrive(link.right, link.left, relay.right, 300) < 280


def test_nothing_is_left_of_a_link_that_was_closed() -> None:
    need("namespaces")
    with closing(Link()) as link:
        pids = [machine.pid for machine in link.machines]
    assert [pid for pid in pids if os.path.exists(f"/proc/{pid}")] == []


def test_what_a_machine_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    missing.cache_clear()
    monkeypatch.setenv("PATH", "/nowhere")
    assert missing("loss") == "nft is not installed"
    with pytest.raises(pytest.skip.Exception, match="relay: unshare is not installed"):
        need("relay")
    missing.cache_clear()
