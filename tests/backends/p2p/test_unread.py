"""What comes over a connection and is no whole message takes a bounded part of the engine's memory, and no queue that is full ends it.

The other end here is a plain socket that speaks just enough of ZMTP: libzmq sends no message before it is whole.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgpack")

from p2p_nodes import NodeProcess, loads_all, names, wait_for

from kvstore_sdk_backends.p2p.data_path import routing_id
from kvstore_sdk_backends.p2p.decoding import decode
from kvstore_sdk_backends.p2p.messages import VERSION, VERSIONS, Hello, Lookup, Welcome, encode
from kvstore_sdk_backends.p2p.unread import Unread

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
PING, PONG = b"\x04\x07\x04PING\x00\x0f", b"\x04\x05\x04PONG"
MIB = 1 << 20
PACE_MIB = 2
PACE_S = 0.1
"""Slow enough for a node on a busy machine to see it in time."""
MOST_MIB = 640
NODE = bytes(range(16))


def frame(said: bytes, more: bool = False) -> bytes:
    return bytes([2 | more]) + struct.pack(">Q", len(said)) + said


class Wire:
    """One end of a connection of ZMTP 3, after its handshake."""

    def __init__(self, connection: socket.socket, kind: bytes, identity: bytes = b"") -> None:
        self.socket = connection
        connection.settimeout(20)
        connection.sendall(GREETING)
        self._read(len(GREETING))
        said = b"\x05READY"
        for name, value in ((b"Socket-Type", kind), (b"Identity", identity)):
            said += bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
        connection.sendall(b"\x04" + bytes([len(said)]) + said)
        self.receive()

    def receive(self) -> bytes:
        """A frame that is a message; the first one of all is the handshake's."""
        while True:
            flags = self._read(1)[0]
            (size,) = struct.unpack(">Q", self._read(8)) if flags & 2 else self._read(1)
            said = self._read(size)
            if not flags & 4 or said.startswith(b"\x05READY"):
                return said

    def _read(self, size: int) -> bytes:
        said = b""
        while len(said) < size:
            if not (more := self.socket.recv(size - len(said))):
                raise ConnectionError("it hung up")
            said += more
        return said


def dial(address: str, identity: bytes = b"") -> Wire:
    host, _, port = address.rpartition(":")
    return Wire(socket.create_connection((host, int(port)), timeout=20), b"DEALER", identity)


def stranger(address: str) -> tuple[Wire, list[Wire]]:
    return dial(address), []


def member(address: str) -> tuple[Wire, list[Wire]]:
    wire = dial(address)
    wire.socket.sendall(frame(encode(Hello(1, VERSIONS, NODE, "", "", ("zmq",)))))
    assert isinstance(decode(wire.receive()), Welcome)
    return wire, []


def data_of_a_member(address: str) -> tuple[Wire, list[Wire]]:
    control = dial(address)
    control.socket.sendall(frame(encode(Hello(1, VERSIONS, NODE, "", "", ("zmq",)))))
    welcome = decode(control.receive())
    assert isinstance(welcome, Welcome)
    wire = dial(f"127.0.0.1:{welcome.data_port}", routing_id(NODE))
    wire.socket.sendall(frame(b""))
    return wire, [control]


def pour(wire: Wire, beside: list[Wire], frame_bytes: int) -> float:
    """Send a message that does not end, until the connection is cut. Returns the MiB of it."""
    part = frame(bytes(frame_bytes - 9), more=True) * (PACE_MIB * MIB // frame_bytes)
    sent_mib = 0.0
    # A kernel whose side is closed may also just take nothing more.
    wire.socket.settimeout(5)
    try:
        while sent_mib < MOST_MIB:
            wire.socket.sendall(part)
            sent_mib += len(part) / MIB
            for other in beside:
                other.socket.sendall(PONG)
            time.sleep(PACE_S)
    except OSError:
        pass
    finally:
        for one in (wire, *beside):
            one.socket.close()
    return sent_mib


def most_resident_mib(node: NodeProcess) -> float:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{node.pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


@pytest.mark.parametrize(
    ("begin", "frame_bytes", "most_mib"),
    [(stranger, 256 << 10, 128), (member, 256 << 10, 256), (member, 9, 512), (data_of_a_member, 4000, 128)],
    ids=["before a Hello", "in a session", "in a session, of empty parts", "on the data port"],
)
def test_a_message_to_an_owner_that_does_not_end_ends_its_connection(
    begin: Callable[[str], tuple[Wire, list[Wire]]], frame_bytes: int, most_mib: int, start_node: Callable[..., NodeProcess]
) -> None:
    owner = start_node()
    owner.open(serve_bytes=1 << 20, data="zmq")
    before_mib = most_resident_mib(owner)
    wire, beside = begin(owner.address)
    assert pour(wire, beside, frame_bytes) < most_mib
    assert most_resident_mib(owner) - before_mib < most_mib
    # And whoever comes next is served.
    member(owner.address)[0].socket.close()


@contextmanager
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(20)
        yield server


def session(control: socket.socket, data: socket.socket) -> tuple[Wire, Wire] | None:
    """What an asker connects to in its next session; None where it gave up waiting."""
    with suppress(ConnectionError, TimeoutError):
        wire = Wire(control.accept()[0], b"ROUTER")
        hello = decode(wire.receive())
        assert isinstance(hello, Hello)
        wire.socket.sendall(frame(encode(Welcome(hello.number, VERSION, NODE, "zmq", data.getsockname()[1], 256, 256))))
        return wire, Wire(data.accept()[0], b"ROUTER")
    return None


@pytest.fixture
def asked(start_node: Callable[..., NodeProcess]) -> Iterator[tuple[NodeProcess, Callable[[], tuple[Wire, Wire]]]]:
    """An asker, and what makes its next session: control and data, of an owner that says nothing after its Welcome."""
    with ExitStack() as open_now:
        control, data = (open_now.enter_context(listening()) for _ in range(2))
        asker = start_node()
        asker.open(peers=f"127.0.0.1:{control.getsockname()[1]}", data="zmq")

        def accept() -> tuple[Wire, Wire]:
            question: Any = asker.begin("exists", names=["v1/x"], timeout_s=1.0)
            late_s = time.monotonic() + 120
            # One that this test was too slow for comes again.
            while (wires := session(control, data)) is None:
                assert time.monotonic() < late_s
            question.exception(60)
            return wires

        yield asker, accept


@pytest.mark.parametrize("over", ["control", "data"])
def test_a_message_to_an_asker_that_does_not_end_ends_the_session(
    over: str, asked: tuple[NodeProcess, Callable[[], tuple[Wire, Wire]]]
) -> None:
    asker, accept = asked
    before_mib = most_resident_mib(asker)
    control, data = accept()
    assert (pour(control, [data], 256 << 10) if over == "control" else pour(data, [control], 256 << 10)) < 256
    assert most_resident_mib(asker) - before_mib < 256


@pytest.mark.parametrize("identity", [b"", b"the same"], ids=["anybody", "of one name"])
def test_an_owner_survives_connections_that_ask_faster_than_it_reads_and_are_reset(
    identity: bytes, start_node: Callable[..., NodeProcess]
) -> None:
    """libzmq ends the process when a connection that is lost has a full queue and something is to be sent to it."""
    owner = start_node()
    owner.open(serve_bytes=1 << 20, data="zmq")
    quiet = len(os.listdir(f"/proc/{owner.pid}/fd"))
    question = frame(encode(Lookup(2, 0, tuple(f"v1/{number}" for number in range(64))))) + PING
    for _ in range(3):
        wires = [dial(owner.address, identity) for _ in range(20)]
        for wire in wires:
            wire.socket.setblocking(False)
            with suppress(BlockingIOError, ConnectionError):
                while True:
                    wire.socket.send(question * 8)
        reset(wires)
    member(owner.address)[0].socket.close()
    wait_for(lambda: len(os.listdir(f"/proc/{owner.pid}/fd")) <= quiet)


def test_an_asker_survives_an_owner_that_sends_what_nobody_asked_for_and_resets(
    asked: tuple[NodeProcess, Callable[[], tuple[Wire, Wire]]],
) -> None:
    _asker, accept = asked
    for _ in range(3):
        wires = accept()
        for wire in wires:
            wire.socket.sendall((frame(b"x") + PING) * 2000)
        reset(list(wires))
    # It asks on.
    reset(list(accept()))


def test_a_session_may_load_more_than_may_wait_to_be_read(start_node: Callable[..., NodeProcess]) -> None:
    owner, asker = start_node(), start_node()
    owner.open(serve_bytes=64 << 20, data="zmq")
    asker.open(peers=owner.address, data="zmq")
    wanted = names("much", 32)
    owner.ask("put", names=wanted, size=MIB)
    wait_for(lambda: loads_all(asker, wanted, MIB))
    for _ in range(6):
        wait_for(lambda: loads_all(asker, wanted, MIB))
        time.sleep(0.2)  # it is looked at meanwhile
    assert "more came" not in asker.log(1 << 20)


def test_what_was_read_is_not_unread_and_a_descriptor_that_is_something_else_counts_nothing(tmp_path: Path) -> None:
    with listening() as server, socket.create_connection(server.getsockname()) as sender, server.accept()[0] as receiver:
        unread = Unread(receiver.fileno())
        sender.sendall(bytes(20_000))
        wait_for(lambda: unread.look() > 15_000)
        unread.read(15_000)
        assert 1_000 < unread.look() <= 5_000
        unread.read(10_000)
        assert unread.look() == 0
        sender.sendall(bytes(20_000))  # too much taken for read is not kept for later
        wait_for(lambda: unread.look() > 15_000)
        unread.forget()
        assert unread.look() == 0
    with (tmp_path / "file").open("w") as file:
        assert Unread(file.fileno()).look() == 0


def reset(wires: list[Wire]) -> None:
    for wire in wires:
        wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        wire.socket.close()
