"""What a node says of itself when it starts: where it listens, to whom, over which paths, and how much it keeps."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from kvstore_sdk_backends.p2p.backend import P2PBackend


@pytest.mark.parametrize(("serve_bytes", "kept"), [(0, ""), (1 << 20, ", keeps up to 1048576 bytes of records")])
def test_a_node_says_where_it_listens_and_what_it_keeps(
    serve_bytes: int, kept: str, open_node: Callable[..., P2PBackend], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        node = open_node(serve_bytes=serve_bytes)
    assert caplog.messages == [f"backend p2p: listens on {node.address}, open to whoever reaches it, data over zmq{kept}"]
