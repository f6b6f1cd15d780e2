"""Records of one byte value, what is in a folder, and whether something comes true."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from kvstore_sdk.backend import Deadline
from kvstore_sdk_backends.fs import FsBackend

PAGE = 4096


def later() -> Deadline:
    return Deadline.after(30.0)


def record(number: int, size: int = PAGE) -> bytes:
    return bytes([number % 251]) * size


def bytes_of(folder: Path) -> int:
    """Of all records. What goes while they are counted is none."""
    total = 0
    for above, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += 0 if "/.kvstore" in above else os.stat(f"{above}/{name}").st_size
    return total


def eventually(true: Callable[[], bool], limit_s: float = 20.0) -> bool:
    until_s = time.monotonic() + limit_s
    while not true() and time.monotonic() < until_s:
        time.sleep(0.005)
    return true()


def is_counted(store: FsBackend) -> bool:
    """Whether somebody evicts, and knows what is there."""
    assert store._space
    found = store._space._ledger.read()
    return bool(found.owner) and not found.counting
