"""Nodes in processes of their own, and networks between them; whatever a test leaves open is ended."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "soak"))
sys.path.insert(0, str(Path(__file__).parent))

from p2p_network import Link, need
from p2p_nodes import NodeProcess

from kvstore_sdk.backend import Region, open_backend
from kvstore_sdk_backends.p2p import link as link_module
from kvstore_sdk_backends.p2p import security as security_module
from kvstore_sdk_backends.p2p.backend import P2PBackend


@pytest.fixture
def link() -> Iterator[Link]:
    need("namespaces")
    made = Link()
    yield made
    made.close()


@pytest.fixture
def start_node() -> Iterator[Callable[..., NodeProcess]]:
    """Starts a process for a node, by the arguments of `NodeProcess`; all are ended, whatever became of them."""
    started: list[NodeProcess] = []

    def start(*arguments: Any, **options: Any) -> NodeProcess:
        started.append(NodeProcess(*arguments, **options))
        return started[-1]

    yield start
    for number, node in enumerate(started):
        # Shown with a test that failed.
        sys.stdout.write(f"--- log of node {number}, pid {node.pid}\n{node.log()}\n")
        node.end()


@pytest.fixture
def patient() -> Iterator[None]:
    """No session of this process is lost because the process stood still for seconds, both ends of it at once, as on a busy machine."""
    # One of its own: what a test undoes are its own changes.
    with pytest.MonkeyPatch.context() as patch:
        for limit in ("_SILENCE_MS", "_STUCK_MS", "_CONNECT_MS"):
            patch.setattr(security_module, limit, 60_000)
        patch.setattr(link_module, "CONNECT_S", 60.0)
        yield


@pytest.fixture
def open_node(patient: None) -> Iterator[Callable[..., P2PBackend]]:
    """Opens a node in this process, over ZMQ, that asks these peers. All are closed."""
    opened: list[Any] = []

    def open_it(*peers: object, **options: Any) -> Any:
        # A peer that is alive and has to wait for a core is not taken for one that is not.
        chosen = {"peers": ",".join(map(str, peers)), "data": "zmq", "answer_timeout_s": 10.0} | options
        opened.append(open_backend("p2p://127.0.0.1:0", chosen))
        return opened[-1]

    yield open_it
    for node in opened:
        node.close()


@pytest.fixture
def owner(open_node: Callable[..., P2PBackend]) -> P2PBackend:
    """Keeps records."""
    return open_node(serve_bytes=32 << 20)


@pytest.fixture
def asker(open_node: Callable[..., P2PBackend], owner: P2PBackend) -> P2PBackend:
    """Asks `owner`, and keeps none."""
    return open_node(owner.address)


@pytest.fixture
def region() -> Iterator[Region]:
    """Memory to load into."""
    made = Region(16 << 20)
    yield made
    made.close()
