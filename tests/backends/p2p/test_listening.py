"""What of a node can be reached from other machines: nothing, unless it was told to."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgpack")

from p2p_network import Link
from p2p_nodes import NodeProcess, loads_all, names, wait_for

from kvstore_sdk.backend import Buffer, ConfigError, Deadline, Get, GetStatus, Put, PutStatus, Region, open_backend
from kvstore_sdk_backends.p2p.keys import write_key

WAIT_S = 30.0
SIZE = 64 << 10
NAME = "v1/a/record"
LISTENS = "0A"


def family(root: int) -> set[int]:
    """A process, and all that it started."""
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def sockets_of(pid: int) -> set[str]:
    found = set()
    try:
        descriptors = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return found
    for name in descriptors:
        try:
            link = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue
        if link.startswith("socket:["):
            found.add(link[len("socket:[") : -1])
    return found


def number_of(text: str) -> str:
    """An address as the kernel prints it: words of 32 bits in the machine's own order."""
    raw = b"".join(bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, len(text), 8))
    return str(ipaddress.ip_address(raw))


def listening(root: int | None = None) -> set[tuple[str, str, int]]:
    """(kind, address, port) of all sockets of a process and its children that take what comes from others."""
    found = set()
    for pid in family(root or os.getpid()):
        own = sockets_of(pid)
        for table in ("tcp", "tcp6", "udp", "udp6"):
            try:
                lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
            except OSError:
                continue
            for line in lines:
                words = line.split()
                connected = set(words[2].split(":")[0]) != {"0"}
                if words[9] in own and (words[3] == LISTENS if table.startswith("tcp") else not connected):
                    host, port = words[1].split(":")
                    found.add((table, number_of(host), int(port, 16)))
    return found


@pytest.fixture
def open_node(patient: None) -> Iterator[Callable[..., Any]]:
    with ExitStack() as closing:

        def open_one(location: str, **options: object) -> Any:
            node = open_backend("p2p", {"answer_timeout_s": WAIT_S} | options, location=location)
            closing.callback(node.close)
            return node

        yield open_one


def move_a_record(owner: Any, asker: Any) -> None:
    """So that whatever is opened when it is needed is open."""
    regions = [Region(SIZE), Region(SIZE)]
    for node, region in zip((owner, asker), regions, strict=True):
        node.register_region(region)
    [stored] = owner.put([Put(NAME, (Buffer(regions[0], 0, SIZE),))], Deadline.after(WAIT_S))
    assert stored.status is PutStatus.STORED
    assert asker.exists([NAME], Deadline.after(WAIT_S)) == [True]
    [found] = asker.get([Get(NAME, (Buffer(regions[1], 0, SIZE),))], Deadline.after(WAIT_S))
    assert found.status is GetStatus.FOUND
    for node, region in zip((owner, asker), regions, strict=True):
        node.unregister_region(region)
        region.close()


@pytest.mark.parametrize("data", ["zmq", "nixl"])
def test_a_node_and_its_child_listen_on_loopback_alone(open_node: Callable[..., Any], data: str) -> None:
    """UCX, left to itself, listens on every interface."""
    if data == "nixl" and importlib.util.find_spec("nixl") is None:
        pytest.skip("nixl is not installed")
    before = listening()
    owner = open_node("127.0.0.1:0", serve_bytes=1 << 20, data=data)
    asker = open_node("127.0.0.1:0", peers=str(owner.address), data=data)
    move_a_record(owner, asker)
    opened = listening() - before
    assert {("tcp", "127.0.0.1", owner.address.port), ("tcp", "127.0.0.1", asker.address.port)} <= opened
    if data == "nixl":
        # Else the child's sockets would not have been seen at all.
        assert len(opened) > 2
    assert {host for _, host, _ in opened} <= {"127.0.0.1", "::1"}
    assert {kind for kind, *_ in opened} == {"tcp"}


def test_nothing_listens_after_the_close(open_node: Callable[..., Any]) -> None:
    before = listening()
    owner = open_node("127.0.0.1:0", serve_bytes=1 << 20, data="zmq")
    asker = open_node("127.0.0.1:0", peers=str(owner.address), data="zmq")
    move_a_record(owner, asker)
    asker.close()
    owner.close()
    # libzmq closes sockets in a thread of its own.
    wait_for(lambda: listening() - before == set())


def test_off_loopback_it_listens_where_it_was_told_to(open_node: Callable[..., Any], tmp_path: Path) -> None:
    """127.0.0.2 stands for another address of the machine: nothing is at 127.0.0.1 then."""
    write_key("a test", str(tmp_path / "group.key"))
    options = {"data": "zmq", "key_file": str(tmp_path / "group.key")}
    before = listening()
    owner = open_node("127.0.0.2:0", serve_bytes=1 << 20, **options)
    asker = open_node("127.0.0.2:0", peers=str(owner.address), **options)
    move_a_record(owner, asker)
    opened = listening() - before
    assert {host for _, host, _ in opened} == {"127.0.0.2"}


def test_over_ipv6_it_listens_and_serves_on_loopback_alone(open_node: Callable[..., Any]) -> None:
    if not Path("/proc/net/if_inet6").exists():
        pytest.skip("this kernel has no IPv6")
    before = listening()
    owner = open_node("[::1]:0", serve_bytes=1 << 20, data="zmq")
    asker = open_node("[::1]:0", peers=str(owner.address), data="zmq")
    move_a_record(owner, asker)
    assert {host for _, host, _ in listening() - before} == {"::1"}


def test_data_sockets_keep_to_the_ports_they_were_given(open_node: Callable[..., Any]) -> None:
    first = 20_000 + os.getpid() % 20_000
    ports = range(first, first + 64)
    owner = open_node("127.0.0.1:0", serve_bytes=1 << 20, data="zmq", data_ports=f"{ports[0]}-{ports[-1]}")
    asker = open_node("127.0.0.1:0", peers=str(owner.address), data="zmq")
    own = sockets_of(os.getpid())
    move_a_record(owner, asker)
    lines = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    new = {int(words[1].split(":")[1], 16) for words in lines if words[9] in sockets_of(os.getpid()) - own}
    assert new & set(ports)


def test_where_it_cannot_listen_the_opening_says_so_and_leaves_nothing_behind(open_node: Callable[..., Any]) -> None:
    owner = open_node("127.0.0.1:0", data="zmq")

    def left() -> tuple[int, list[str]]:
        return len(os.listdir("/proc/self/fd")), sorted(thread.name for thread in threading.enumerate())

    before = left()
    for location, options, problem in (
        (str(owner.address), {}, "Address already in use"),
        ("192.0.2.1:0", {"insecure": True}, "Cannot assign requested address"),
    ):
        with pytest.raises(ConfigError, match=rf"^backend p2p: location: cannot listen on {re.escape(location)}: {problem}"):
            open_node(location, data="zmq", serve_bytes=1 << 20, **options)
    late = time.monotonic() + WAIT_S
    while left() != before:
        assert time.monotonic() < late, (before, left())
        time.sleep(0.05)


@pytest.mark.parametrize("data", ["zmq", "nixl"])
def test_between_machines_the_data_path_listens_on_the_devices_that_were_named(
    link: Link, start_node: Callable[..., NodeProcess], tmp_path: Path, data: str
) -> None:
    """Each machine has `lo` besides: nothing but the control socket, which was told to, is bound there or to all."""
    if data == "nixl" and importlib.util.find_spec("nixl") is None:
        pytest.skip("nixl is not installed")
    write_key("a test", str(tmp_path / "group.key"))
    options: dict[str, Any] = {"data": data, "key_file": str(tmp_path / "group.key")}
    if data == "nixl":
        options |= {"data_path_trusted": True, "ucx_devices": "veth0"}
    owner, asker = start_node(link.left), start_node(link.right)
    port = owner.open("p2p://0.0.0.0:0", serve_bytes=8 << 20, **options).rpartition(":")[2]
    asker.open(f"p2p://{link.right.address}:0", peers=f"{link.left.address}:{port}", **options)
    wanted = names("listening", 4)
    owner.ask("put", names=wanted, size=SIZE)
    wait_for(lambda: loads_all(asker, wanted, SIZE, timeout_s=WAIT_S))
    owners, askers = listening(owner.pid), listening(asker.pid)
    assert ("tcp", "0.0.0.0", int(port)) in owners
    assert {host for _, host, number in owners if number != int(port)} <= ({"0.0.0.0"} if data == "zmq" else {link.left.address})
    assert {host for _, host, _ in askers} == {link.right.address}
    if data == "nixl":
        assert len(askers) > 1
