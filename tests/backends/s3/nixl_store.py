"""One record through a store with the engine NIXL."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from kvstore_sdk.backend import Buffer, Deadline, Get, Mode, Put, Region
from kvstore_sdk_backends.s3.nixl_backend import NixlS3Backend

__all__ = ["RECORD", "SIZE", "WAIT_S", "filled", "get", "put", "soon", "until"]

SIZE = 300_001
RECORD = random.Random(7).randbytes(SIZE)
WAIT_S = 30.0


def soon(seconds: float = 20.0) -> Deadline:
    return Deadline.after(seconds)


def filled(region: Region, content: bytes = RECORD, row: int = 0) -> Buffer:
    buffer = region.buffer(row * SIZE, len(content))
    buffer.view[:] = content
    return buffer


def put(backend: NixlS3Backend, region: Region, name: str = "a", seconds: float = 20.0, mode: Mode = Mode.CREATE) -> Any:
    [result] = backend.put([Put(name, [filled(region)], mode)], soon(seconds))
    return result


def get(backend: NixlS3Backend, region: Region, name: str = "a", seconds: float = 20.0) -> Any:
    filled(region, bytes(SIZE))
    [result] = backend.get([Get(name, [region.buffer(0, SIZE)])], soon(seconds))
    return result


def until(done: Callable[[], bool]) -> None:
    limit_s = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < limit_s, "it does not come to that"
        time.sleep(0.01)
