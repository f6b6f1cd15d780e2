"""Deadlines that pass before a call, when it begins, and in the middle of it; and what happens after it returned."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from kvstore_sdk.backend import SupportsList, SupportsUsage
from kvstore_sdk_conformance.failure import CallRaised
from kvstore_sdk_conformance.memory import INSIDE, Arena
from kvstore_sdk_conformance.view import View

__all__ = ["LARGE_BYTES", "LATE_S", "TRIES", "Running", "changed", "listing", "pressing", "took_s", "watched_s", "whatever_it_answers"]

LATE_S = 0.5
"""After its deadline: so late a call may return that is in the middle of a write, or waits for the processor on a busy machine."""

TRIES = 3
"""Of what is timed: a busy machine makes one of them long."""

LARGE_BYTES = 4 << 20
"""Takes any store long enough for a deadline to pass in the middle."""
_FRACTIONS = (0.1, 0.3, 0.5, 0.7, 0.9)
_SHORTEST_S = 0.0002
_WATCHED_S = (0.3, 3.0)


def took_s(call: Callable[[], object], tries: int = TRIES) -> float:
    """Seconds that a call takes: the shortest of `tries`."""
    found_s = math.inf
    for _ in range(tries):
        began_s = time.monotonic()
        call()
        found_s = min(found_s, time.monotonic() - began_s)
    return found_s


def watched_s(seconds: float) -> float:
    """How long to watch memory after calls that take so long when left alone: what goes on after a deadline goes on for about that time."""
    least, most = _WATCHED_S
    return min(most, least + 3 * seconds)


def pressing(seconds: float) -> list[float]:
    """Deadlines from now, for a call that takes so long when it is left alone."""
    return [-1.0, 0.0, *(max(_SHORTEST_S, fraction * seconds) for fraction in _FRACTIONS)]


@contextlib.contextmanager
def whatever_it_answers() -> Iterator[None]:
    """A call that raises is judged by other checks."""
    with contextlib.suppress(CallRaised):
        yield


def listing(view: View, timeout_s: float) -> list[tuple[str, Callable[[], Any]]]:
    """Calls of `list` and `usage`, as far as there are such."""
    calls: list[tuple[str, Callable[[], Any]]] = []
    if isinstance(view.backend, SupportsList):
        calls.append(("list", lambda: view.page(timeout_s=timeout_s)))
    if isinstance(view.backend, SupportsUsage):
        calls.append(("usage", lambda: view.usage(timeout_s=timeout_s)))
    return calls


def changed(arena: Arena) -> int | None:
    """Offset in the region of the first byte, in the buffers or beside them, that lost its paint."""
    for buffer in arena.buffers:
        seen = bytes(buffer.view)
        if seen.count(INSIDE) != len(seen):
            return buffer.offset + next(index for index, byte in enumerate(seen) if byte != INSIDE)
    return arena.changed_around()


class Running:
    """A call on a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._done = threading.Event()
        self._failure: BaseException | None = None
        threading.Thread(target=self._run, name="kvstore-conformance-running", daemon=True).start()

    def ended(self, within_s: float) -> bool:
        """Wait for its end. False: it goes on.

        Raises:
            ConformanceFailure: what it failed with.
        """
        if not self._done.wait(max(0.0, within_s)):
            return False
        if self._failure is not None:
            raise self._failure
        return True

    def _run(self) -> None:
        try:
            self._call()
        except CallRaised:
            # Judged by whoever looks at the answers.
            pass
        except BaseException as failure:  # noqa: BLE001  # raised where it is waited for
            self._failure = failure
        finally:
            self._done.set()
