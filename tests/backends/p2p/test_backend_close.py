"""Closing a node ends all of it, also where the process may have no more threads, or something of it fails."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
from p2p_pairs import keep, soon, wait_for

from kvstore_sdk.backend import Region
from kvstore_sdk_backends.p2p.backend import P2PBackend


class Ended:
    """What a data plane is to whoever closes it."""

    def __init__(self) -> None:
        self.fenced = self.closed = 0
        self.fails = False

    def fence(self) -> None:
        self.fenced += 1
        if self.fails:
            raise OSError("the child cannot be killed")

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def plane(owner: P2PBackend) -> Ended:
    made: Any = Ended()
    owner._node.plane = made
    return made  # type: ignore[no-any-return]


def all_ended(node: P2PBackend, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0 and not node._loop._thread.is_alive()


def test_it_ends_where_no_thread_can_be_begun(
    owner: P2PBackend, plane: Ended, open_node: Callable[..., P2PBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(owner, a=b"x" * 4096)
    asker = open_node(owner.address)
    wait_for(lambda: asker.exists(["v1/a"], soon()) == [True])
    assert owner.counters()["served_leases_now"] == 1
    begin = threading.Thread.start

    def none(thread: threading.Thread) -> None:
        if thread.name == "kvstore-p2p-close":
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", none)
    owner.close()
    assert (plane.fenced, plane.closed) == (1, 1)
    assert all_ended(owner, owner.address.port)
    assert owner._shelf is not None
    assert owner._shelf.lent_bytes == 0


def test_it_ends_where_its_data_plane_cannot_be_ended(owner: P2PBackend, plane: Ended) -> None:
    plane.fails = True
    with pytest.raises(OSError, match="cannot be killed"):
        owner.close()
    assert all_ended(owner, owner.address.port)
    plane.fails = False


def test_counting_never_meets_a_session_that_ends_meanwhile(
    owner: P2PBackend, asker: P2PBackend, region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for(lambda: asker.exists(["v1/a"], soon()) == [False])
    [peer] = asker._peers.all()
    links = iter([peer.link, None])
    monkeypatch.setattr(type(peer), "link", property(lambda self: next(links)))
    assert asker.counters()["peers_up_now"] == 1
    monkeypatch.undo()
