"""A node has sockets for as many peers as it may have, and refuses those for whom it has none."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgpack")

import zmq
from p2p_pairs import LIMIT_S

from kvstore_sdk_backends.p2p import node as node_module
from kvstore_sdk_backends.p2p.backend import P2PBackend
from kvstore_sdk_backends.p2p.decoding import decode
from kvstore_sdk_backends.p2p.messages import VERSIONS, Hello, Refused, Welcome, encode

SOCKETS_OF_A_PEER = 9
"""Three where it asks and six where it is asked."""
ASKERS = 20


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


def greet(context: zmq.Context[zmq.Socket[bytes]], node: P2PBackend) -> tuple[zmq.Socket[bytes], Any]:
    """A connection to it, and what it answers to a Hello."""
    asker = context.socket(zmq.DEALER)
    asker.linger = 0
    asker.connect(node.address.endpoint)
    asker.send(encode(Hello(1, VERSIONS, os.urandom(16), "", "", ("zmq",))))
    assert asker.poll(round(1000 * LIMIT_S))
    return asker, decode(asker.recv())


@pytest.mark.parametrize("max_peers", [64, 1024])
def test_there_are_sockets_for_all_peers(open_node: Callable[..., P2PBackend], max_peers: int) -> None:
    node = open_node(max_peers=max_peers)
    assert node._node.context.get(zmq.MAX_SOCKETS) >= SOCKETS_OF_A_PEER * max_peers


# pyzmq says of a socket that it could not make that nobody has closed it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:Unclosed socket:ResourceWarning")
def test_a_node_without_sockets_refuses_whoever_comes_until_one_leaves(
    open_node: Callable[..., P2PBackend],
    context: zmq.Context[zmq.Socket[bytes]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(node_module, "_most_sockets", lambda max_peers: 32)
        node = open_node(serve_bytes=1 << 20)
    with caplog.at_level(logging.DEBUG):
        greeted = [greet(context, node) for _ in range(ASKERS)]
        refused = [answer for _, answer in greeted if isinstance(answer, Refused)]
        welcome = [asker for asker, answer in greeted if isinstance(answer, Welcome)]
        assert welcome
        assert len(welcome) + len(refused) == ASKERS
        assert {answer.code for answer in refused} == {"full"}
        welcome[0].close()
        end_s = time.monotonic() + LIMIT_S
        while not isinstance(greet(context, node)[1], Welcome):
            assert time.monotonic() < end_s
            time.sleep(0.2)
    assert not [record for record in caplog.records if record.exc_info]
