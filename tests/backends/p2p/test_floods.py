"""Whoever reaches a node's port costs it a bounded number of descriptors and little memory, and its peers go on loading."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgpack")

import zmq
from p2p_nodes import LIMIT_S, NodeProcess, loads_all, names, wait_for

from kvstore_sdk_backends.p2p.keys import write_key
from kvstore_sdk_backends.p2p.messages import VERSIONS, Hello, Lookup, encode

SIZE = 64 << 10
RECORDS = 8
ROUNDS = 15
MAX_PEERS = 16
CONNECTIONS = 64
"""What a node with so few peers holds at most."""
A_SESSION = 6
"""Descriptors of a session: its data socket, who watches it, and what they wake the loop with."""
SLACK = 24
"""Connections that are being ended."""
GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = bytes.fromhex("0419055245414459") + b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"

Attack = Callable[[tuple[str, int], threading.Event], None]


def connect(address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address, timeout=2)


def open_and_wait(address: tuple[str, int], over: threading.Event) -> None:
    """Half-open: nothing is ever said. Each is opened anew when it is cut off."""
    held: list[socket.socket] = []
    while not over.wait(0.002):
        with suppress(OSError):
            held.append(connect(address))
        if len(held) > 300:
            held.pop(0).close()
    for connection in held:
        connection.close()


def say_rubbish(address: tuple[str, int], over: threading.Event) -> None:
    number = 0
    while not over.wait(0.001):
        number += 1
        with suppress(OSError), connect(address) as connection:
            connection.sendall([b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", os.urandom(2000), GREETING + os.urandom(500), bytes(70)][number % 4])
            connection.settimeout(0.01)
            connection.recv(64)


def say_it_slowly(address: tuple[str, int], over: threading.Event) -> None:
    """A byte at a time, on many connections, for as long as anybody listens."""
    held: dict[socket.socket, int] = {}
    while not over.wait(0.05):
        while len(held) < 60:
            try:
                held[connect(address)] = 0
            except OSError:
                break
        for connection, said in list(held.items()):
            try:
                connection.send(GREETING[said % len(GREETING) :][:1])
                held[connection] += 1
            except OSError:
                connection.close()
                del held[connection]
    for connection in held:
        connection.close()


def announce_too_much(address: tuple[str, int], over: threading.Event) -> None:
    """A frame of many GiB, of which some come."""
    while not over.wait(0.01):
        with suppress(OSError), connect(address) as connection:
            connection.sendall(GREETING + READY + b"\x02" + struct.pack(">Q", 40 << 30) + bytes(64 << 10))
            connection.recv(4096)


def speak_the_transport_alone(address: tuple[str, int], over: threading.Event) -> None:
    """Frames that are no messages, and messages of nobody, as fast as they are taken."""
    context = zmq.Context()
    try:
        while not over.is_set():
            with context.socket(zmq.DEALER) as client:
                client.linger = 0
                client.connect(f"tcp://{address[0]}:{address[1]}")
                for number in range(200):
                    frame = os.urandom(100) if number % 2 else encode(Lookup(number + 1, 60_000, ("v1/x",)))
                    with suppress(zmq.Again):
                        client.send(frame, zmq.DONTWAIT)
                    if over.wait(0.0005):
                        break
    finally:
        context.destroy(linger=0)


def say_hello_under_many_names(address: tuple[str, int], over: threading.Event) -> None:
    """Sessions that ask for nothing."""
    context = zmq.Context()
    held: list[zmq.Socket[bytes]] = []
    try:
        while not over.wait(0.02):
            client = context.socket(zmq.DEALER)
            client.linger = 0
            client.connect(f"tcp://{address[0]}:{address[1]}")
            client.send(encode(Hello(1, VERSIONS, os.urandom(16), "", "", ("zmq",))))
            held.append(client)
            if len(held) > 100:
                held.pop(0).close()
    finally:
        context.destroy(linger=0)


@contextmanager
def under(attack: Attack, address: str) -> Iterator[None]:
    host, _, port = address.rpartition(":")
    over = threading.Event()
    thread = threading.Thread(target=attack, args=((host, int(port)), over), name=attack.__name__)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


ATTACKS = [open_and_wait, say_rubbish, say_it_slowly, announce_too_much, speak_the_transport_alone, say_hello_under_many_names]


@pytest.mark.parametrize("secured", [False, True], ids=["plain", "with a key"])
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__.replace("_", " "))
def test_a_flood_hurts_nobody(attack: Attack, secured: bool, start_node: Callable[..., NodeProcess], tmp_path: Path) -> None:
    options: dict[str, object] = {"data": "zmq", "max_peers": MAX_PEERS}
    if secured:
        write_key("a test", str(tmp_path / "group.key"))
        options["key_file"] = str(tmp_path / "group.key")
    owner, asker = start_node(), start_node()
    owner.open(serve_bytes=8 << 20, **options)
    asker.open(peers=owner.address, **options)
    wanted = names("flooded", RECORDS)
    owner.ask("put", names=wanted, size=SIZE)
    wait_for(lambda: loads_all(asker, wanted, SIZE))
    quiet, quiet_bytes = descriptors(owner.pid), resident_bytes(owner.pid)
    most = missed = 0
    with under(attack, owner.address):
        for _ in range(ROUNDS):
            # A session of a process that stood still, or that was idle for long, may have had to make room, and is begun again.
            missed += not loads_all(asker, wanted, SIZE)
            wait_for(lambda: loads_all(asker, wanted, SIZE))
            most = max(most, descriptors(owner.pid))
            time.sleep(0.1)
    assert missed <= ROUNDS // 4
    assert most - quiet <= CONNECTIONS + A_SESSION * MAX_PEERS + SLACK
    late = time.monotonic() + 3 * LIMIT_S
    while descriptors(owner.pid) > quiet + A_SESSION * MAX_PEERS or not loads_all(asker, wanted, SIZE):
        assert time.monotonic() < late
        time.sleep(0.2)
    assert resident_bytes(owner.pid) - quiet_bytes < 64 << 20
