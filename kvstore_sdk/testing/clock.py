"""A wall clock that was set while a call runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvstore_sdk.testing.faults import Action, Call, Proceed

__all__ = ["JumpClock"]

_lock = threading.Lock()
_jumps: list[float] = []
_real: tuple[Callable[[], float], Callable[[], int]] = (time.time, time.time_ns)


@dataclass(frozen=True, slots=True)
class JumpClock(Action):
    """While the call runs, the wall clock is `seconds` ahead, or behind: somebody set it.

    For all threads of this process, as far as they call `time.time` or `time.time_ns` by these names. `datetime`, C code and the times
    that a kernel gives to files go on as before, and so does `time.monotonic`, which nobody can set. Jumps of calls that run at the same
    time add up.
    """

    seconds: float

    def run(self, call: Call, proceed: Proceed) -> Any:
        with _jumped(self.seconds):
            return proceed(call.items)


@contextmanager
def _jumped(seconds: float) -> Iterator[None]:
    global _real
    with _lock:
        if not _jumps:
            _real = time.time, time.time_ns
            time.time, time.time_ns = _time, _time_ns
        _jumps.append(seconds)
    try:
        yield
    finally:
        with _lock:
            _jumps.remove(seconds)
            if not _jumps:
                time.time, time.time_ns = _real


def _time() -> float:
    return _real[0]() + sum(_jumps)


def _time_ns() -> int:
    return _real[1]() + int(sum(_jumps) * 1e9)
