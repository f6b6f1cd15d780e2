"""One-line calls, and waits for conditions with bounds that a busy machine does not reach."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvstore_sdk.backend import Deadline, Get, GetResult, Put, PutResult, Region
from kvstore_sdk.isolation import IsolatedBackend, IsolationLimits

LONG_S = 40.0
"""A deadline, or a wait, that only a hang reaches."""

Open = Callable[..., IsolatedBackend]
LIMITS = IsolationLimits.__dataclass_fields__.keys()


def exists(backend: IsolatedBackend, name: str, timeout_s: float = LONG_S) -> Any:
    [answer] = backend.exists([name], Deadline.after(timeout_s))
    return answer


def put(backend: IsolatedBackend, region: Region, name: str, data: bytes, timeout_s: float = LONG_S) -> PutResult:
    buffer = region.buffer(0, len(data))
    buffer.view[:] = data
    [answer] = backend.put([Put(name, (buffer,))], Deadline.after(timeout_s))
    return answer


def get(backend: IsolatedBackend, region: Region, name: str, size: int, timeout_s: float = LONG_S) -> tuple[GetResult, bytes]:
    buffer = region.buffer(64 << 10, size)
    buffer.view[:] = bytes(size)
    [answer] = backend.get([Get(name, (buffer,))], Deadline.after(timeout_s))
    return answer, bytes(buffer.view)


def until_in_doubt(ask: Callable[[float], Any]) -> Any:
    """What a call, or a batch, that hangs answers when it is given up. If its deadline passed before it was begun, it is asked again
    with more time."""
    timeout_s = 0.05
    while True:
        answer = ask(timeout_s)
        first = answer[0] if isinstance(answer, list) else answer
        if first.status.value != "timed_out":
            return answer
        assert timeout_s < LONG_S
        timeout_s *= 4


def wait_until(holds: Callable[[], object], what: str, timeout_s: float = LONG_S) -> None:
    until_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < until_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.01)


def wait_up(backend: IsolatedBackend, restarts: int) -> None:
    wait_until(lambda: backend.restarts >= restarts and backend.state == "up", f"restart {restarts} of {backend!r}")


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def answers(backend: IsolatedBackend, *numbers: int) -> dict[int, Any]:
    """What polled calls answer."""
    found: dict[int, Any] = {}
    until_s = time.monotonic() + LONG_S
    while not found.keys() >= set(numbers):
        assert time.monotonic() < until_s, f"no answers to {set(numbers) - found.keys()}"
        backend.wait_answers(time.monotonic() + 1.0)
        found.update(backend.take_answers())
    return found
