"""Records of one byte value, what is in a folder, and whether something comes true."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from kvstore_sdk.backend import Deadline, Put, PutResult, PutStatus
from kvstore_sdk_backends.fs import FsBackend

PAGE = 4096
LIMIT_S = 30.0


def later() -> Deadline:
    return Deadline.after(LIMIT_S)


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


def eventually(true: Callable[[], bool], limit_s: float = LIMIT_S) -> bool:
    until_s = time.monotonic() + limit_s
    while not true() and time.monotonic() < until_s:
        time.sleep(0.005)
    return true()


def ask_in_vain(store: FsBackend, item: Put, timeout_s: float = 1.5) -> PutResult:
    """The answer to a put for which no room comes. One that the machine kept from saying so before its deadline is asked again."""
    until_s = time.monotonic() + LIMIT_S
    while True:
        [result] = store.put([item], Deadline.after(timeout_s))
        if result.status is not PutStatus.TIMED_OUT or time.monotonic() > until_s:
            return result


def is_counted(store: FsBackend) -> bool:
    """Whether somebody evicts, and knows what is there."""
    assert store._space
    found = store._space._ledger.read()
    return bool(found.owner) and not found.counting
