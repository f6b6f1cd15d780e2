"""Nodes in this process, and records for them."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvstore_sdk.backend import Deadline, Put, PutStatus, Region
from kvstore_sdk_backends.p2p.backend import P2PBackend

__all__ = ["LIMIT_S", "keep", "soon", "wait_for"]

LIMIT_S = 20.0


def soon() -> Deadline:
    return Deadline.after(LIMIT_S)


def wait_for(condition: Callable[[], object]) -> None:
    """Until it is true. A data plane takes many seconds to come up where others do the same."""
    end_s = time.monotonic() + 3 * LIMIT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def keep(node: P2PBackend, **records: bytes) -> None:
    region = Region(sum(map(len, records.values())))
    start = 0
    puts = []
    for name, record in records.items():
        buffer = region.buffer(start, len(record))
        buffer.view[:] = record
        start += len(record)
        puts.append(Put(f"v1/{name}", (buffer,)))
    assert [result.status for result in node.put(puts, soon())] == [PutStatus.STORED] * len(puts)
    region.close()
