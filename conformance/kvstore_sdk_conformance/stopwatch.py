"""Times calls of a backend: the call itself and nothing around it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from kvstore_sdk.backend import Buffer, Deadline, Get, GetStatus, Put, PutStatus
from kvstore_sdk_conformance.data import Record
from kvstore_sdk_conformance.failure import ConformanceFailure
from kvstore_sdk_conformance.view import View
from kvstore_sdk_conformance.watched import CALL_S

__all__ = ["Pace", "Stopwatch", "best", "fill", "quantile_ms"]

_IN_DOUBT = (PutStatus.IN_DOUBT, GetStatus.IN_DOUBT)
_COUNT = (PutStatus.STORED, PutStatus.EXISTS, PutStatus.UNKNOWN, GetStatus.FOUND, *_IN_DOUBT)
"""What took the time that it takes; a failure may be quicker than what it failed to do."""
_FEWEST = 5


@dataclass(frozen=True)
class Pace:
    """Calls of one record each, by one or several threads.

    Attributes:
        took_s: Of each call that succeeded, sorted.
        wall_s: From the first call to the end of the last.
    """

    took_s: Sequence[float]
    wall_s: float


class Stopwatch:
    """Calls a view's backend directly. A thread that watches each call would be in the figures of a fast one.

    Use it inside `View.watched`, which bounds a whole series of calls.
    """

    def __init__(self, view: View) -> None:
        self._view = view

    def exists(self, names: Sequence[str]) -> float:
        """Seconds of one call; infinity if any item failed."""
        return self._time("exists", names, lambda answer: isinstance(answer, bool))

    def put(self, names: Sequence[str], buffers: Sequence[Buffer]) -> float:
        """Likewise."""
        return self._time("put", [Put(name, (buffer,)) for name, buffer in zip(names, buffers, strict=True)], _counts)

    def get(self, names: Sequence[str], buffers: Sequence[Buffer]) -> float:
        """Likewise."""
        return self._time("get", [Get(name, (buffer,)) for name, buffer in zip(names, buffers, strict=True)], _counts)

    def pace(self, op: str, names: Sequence[Sequence[str]], buffers: Sequence[Buffer], limit_s: float) -> Pace:
        """Put or get these records one by one, each list by a thread of its own with a buffer of its own, for `limit_s` at most."""
        call = self.put if op == "put" else self.get
        began_s = time.perf_counter()

        def work(some: Sequence[str], buffer: Buffer) -> list[float]:
            took: list[float] = []
            for name in some:
                took.append(call([name], [buffer]))
                if time.perf_counter() > began_s + limit_s:
                    break
            return took

        with ThreadPoolExecutor(len(names), "kvstore-conformance-pace") as pool:
            found = [took for took_s in pool.map(work, names, buffers) for took in took_s if math.isfinite(took)]
            wall_s = time.perf_counter() - began_s
        return Pace(sorted(found), wall_s)

    def _time(self, op: str, items: Sequence[Any], counts: Callable[[Any], bool]) -> float:
        method = getattr(self._view.backend, op)
        if op == "put":
            self._view.names.update(item.name for item in items)
        deadline = Deadline.after(CALL_S)
        began_s = time.perf_counter()
        results = method(items, deadline)
        took_s = time.perf_counter() - began_s
        if tickets := [result.ticket for result in results if getattr(result, "status", None) in _IN_DOUBT]:
            self._view.settle(tickets)
        return took_s if all(map(counts, results)) else math.inf


def best(*series: Callable[[], float], rounds: int, limit_s: float) -> list[float]:
    """The shortest time of each, over some rounds in which they take turns, so that a busy moment hits all of them alike.

    There are `_FEWEST` rounds, or as many as there are to be, also where the time is over before: nothing is judged by one alone.

    Raises:
        ConformanceFailure: one of them never succeeded.
    """
    shortest = [math.inf] * len(series)
    until_s = time.perf_counter() + limit_s
    for number in range(rounds):
        if number >= _FEWEST and time.perf_counter() > until_s:
            break
        shortest = [min(found, run()) for found, run in zip(shortest, series, strict=True)]
    if not all(map(math.isfinite, shortest)):
        raise ConformanceFailure("calls that succeed", f"none in {rounds} rounds", breaks="KV-CORE-01")
    return shortest


def quantile_ms(pace: Pace, share: float) -> float:
    """Milliseconds within which this share of the calls was done."""
    return pace.took_s[min(len(pace.took_s) - 1, int(share * len(pace.took_s)))] * 1e3


def fill(buffers: Sequence[Buffer], tag: int) -> None:
    """Give each buffer a record of its own."""
    for number, buffer in enumerate(buffers):
        buffer.view[:] = Record(buffer.length, tag + number).bytes


def _counts(result: Any) -> bool:
    return result.status in _COUNT
