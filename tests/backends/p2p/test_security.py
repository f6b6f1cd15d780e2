"""What the sockets of a node have in common: where they may be connected, which ports they take, and that a key hides what they say."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgpack")

import zmq
from p2p_tcp_relay import Relay, free_ports

from kvstore_sdk.backend import Buffer, Deadline, Get, GetStatus, Put, PutStatus, Region, UnavailableError, open_backend
from kvstore_sdk_backends.p2p.addresses import Address
from kvstore_sdk_backends.p2p.keys import CurveKey, write_key
from kvstore_sdk_backends.p2p.security import Security

WAIT_S = 30.0
SIZE = 256 << 10
NAME = "v1/a/name-that-can-be-recognised"
PAYLOAD = b"payload that can be recognised! " * (SIZE // 32)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


def test_without_a_key_a_socket_leads_to_loopback_alone() -> None:
    key = CurveKey(*zmq.curve_keypair())
    near, far = Address("127.0.0.1", 1), Address("192.0.2.1", 1)
    assert Security("127.0.0.1").may_connect(near)
    assert not Security("127.0.0.1").may_connect(far)
    assert not Security("0.0.0.0").may_connect(far)
    assert Security("127.0.0.1", key=key).may_connect(far)
    assert Security("127.0.0.1", insecure=True).may_connect(far)


def test_data_sockets_take_a_free_port_of_the_range_and_say_when_there_is_none(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with ExitStack() as closing:
        taken = closing.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = taken.getsockname()[1]
        full = Security("127.0.0.1", data_ports=range(port, port + 1))
        made = closing.enter_context(context.socket(zmq.ROUTER))
        full.secure_server(made, "data")
        with pytest.raises(UnavailableError, match="all 1 ports of data_ports are in use"):
            full.bind_data(made)
        roomy = Security("127.0.0.1", data_ports=range(port, min(port + 64, 65536)))
        assert roomy.bind_data(made) in range(port + 1, port + 64)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("secured", [False, True], ids=["plain", "with a key"])
def test_a_key_hides_names_and_records_from_whoever_is_on_the_way(secured: bool, tmp_path: Path) -> None:
    """Without a key both are seen, so what is not seen with one would have been."""
    options: dict[str, object] = {"data": "zmq", "answer_timeout_s": WAIT_S}
    if secured:
        write_key("a test", str(tmp_path / "group.key"))
        options["key_file"] = str(tmp_path / "group.key")
    control, data = free_ports(2)
    with ExitStack() as closing:
        relay = Relay([control, data])
        closing.callback(relay.close)
        owner = open_backend("p2p", {"serve_bytes": 1 << 20, "data_ports": f"{data}-{data}"} | options, location=f"127.0.0.2:{control}")
        closing.callback(owner.close)
        asker = open_backend("p2p", {"peers": f"127.0.0.1:{control}"} | options, location="127.0.0.1:0")
        closing.callback(asker.close)
        regions = [Region(SIZE), Region(SIZE)]
        for region in regions:
            closing.callback(region.close)
        regions[0].view[:] = PAYLOAD
        [stored] = owner.put([Put(NAME, (Buffer(regions[0], 0, SIZE),))], Deadline.after(WAIT_S))
        assert stored.status is PutStatus.STORED
        late = time.monotonic() + WAIT_S
        while asker.exists([NAME], Deadline.after(WAIT_S)) != [True]:
            assert time.monotonic() < late
        [found] = asker.get([Get(NAME, (Buffer(regions[1], 0, SIZE),))], Deadline.after(WAIT_S))
        assert found.status is GetStatus.FOUND
        assert regions[1].view == regions[0].view
        seen = bytes(relay.seen)
    assert len(seen) > SIZE
    assert (NAME.encode() in seen, PAYLOAD[:64] in seen) == (not secured, not secured)
