"""With data=auto a node whose NIXL is lost goes on over ZMQ, and is back on NIXL later."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from p2p_pairs import keep, soon, wait_for

from kvstore_sdk.backend import Deadline, Get, GetStatus, Region
from kvstore_sdk_backends.p2p import ways
from kvstore_sdk_backends.p2p.backend import P2PBackend

pytestmark = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")

SIZE = 1 << 20
RECORD = b"r" * SIZE


def path(node: P2PBackend) -> str:
    [peer] = node._peers.all()
    return peer.link.welcome.path if peer.link is not None else ""


@pytest.mark.parametrize("whose", ["asker", "owner"])
def test_records_come_over_zmq_while_a_data_plane_is_down(
    open_node: Callable[..., P2PBackend], region: Region, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    options: dict[str, Any] = {"data": "auto", "ucx_tls": "tcp,self"}
    owner = open_node(serve_bytes=32 << 20, **options)
    keep(owner, a=RECORD)
    asker = open_node(owner.address, **options)
    asker.register_region(region)

    def loads() -> bool:
        region.view[:SIZE] = bytes(SIZE)
        [result] = asker.get([Get("v1/a", (region.buffer(0, SIZE),))], soon())
        if result.ticket is not None:
            ticket = result.ticket
            wait_for(lambda: asker.settle([ticket], Deadline.after(0.1))[0])
        return result.status is GetStatus.FOUND and bytes(region.view[:SIZE]) == RECORD

    wait_for(loads)
    assert path(asker) == "nixl"
    plane = (asker if whose == "asker" else owner)._node.plane
    assert plane is not None
    assert plane.pid is not None
    # As if no other child came up.
    monkeypatch.setattr(type(plane), "up", property(lambda self: self is not plane))
    os.kill(plane.pid, signal.SIGKILL)
    wait_for(lambda: path(asker) == "zmq")
    wait_for(loads)
    assert asker.exists(["v1/a"], soon()) == [True]
    monkeypatch.undo()
    monkeypatch.setattr(ways, "AGAIN_S", 0.5)
    wait_for(lambda: path(asker) == "nixl" and loads())
    assert asker.counters()["doubt_bytes_now"] == 0
