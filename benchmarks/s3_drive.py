"""Records for a comparison of object stores, and three ways to keep so many of them under way.

Whichever it is, the seconds of each record run from its beginning to its end.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore_sdk.backend import Region

POLL_S = 0.0001
WAIT_S = 300.0


@dataclass(frozen=True)
class Round:
    """Which records a side moves, and how. `keys` are made before the clock starts."""

    keys: Sequence[str]
    record_bytes: int
    concurrency: int


@dataclass(frozen=True)
class Times:
    """Seconds from the first record's beginning to the last one's end, and of each record."""

    seconds: float
    each: Sequence[float]


class Rows:
    """Memory for `records` records of `record_bytes`, mapped as the SDK maps it. The pattern is another for each record."""

    def __init__(self, records: int, record_bytes: int) -> None:
        self.records, self.record_bytes = records, record_bytes
        self.region = Region(records * record_bytes)
        pattern = os.urandom(1 << 20)
        for row in range(records):
            view, at = self.view(row), (row * 4099) % (1 << 19)
            for start in range(0, record_bytes, 1 << 19):
                length = min(1 << 19, record_bytes - start)
                view[start : start + length] = pattern[at : at + length]

    def view(self, row: int) -> memoryview:
        return self.region.view[row * self.record_bytes : (row + 1) * self.record_bytes]

    def close(self) -> None:
        self.region.close()


class Sampled:
    """A word of each page of some memory: what a get has to bring back, and what is spoilt before it."""

    def __init__(self, view: memoryview) -> None:
        self._view = view.cast("B")
        self._kept = bytes(self._view[::4096])

    def spoil(self) -> None:
        self._view[::4096] = bytes(255 - byte for byte in self._kept)

    def check(self) -> None:
        if self._view[::4096] != self._kept:
            raise RuntimeError("a get said that it was done, and brought other bytes")


def by_threads(work: Callable[[int], None], records: int, concurrency: int) -> Times:
    """`concurrency` threads, each with one record at a time."""
    each = [0.0] * records
    waiting = iter(range(records))
    lock, ready, failed = threading.Lock(), threading.Barrier(concurrency + 1), []

    def run() -> None:
        try:
            ready.wait(WAIT_S)
            while True:
                with lock:
                    row = next(waiting, None)
                if row is None:
                    return
                begun = time.perf_counter()
                work(row)
                each[row] = time.perf_counter() - begun
        except BaseException as error:  # noqa: BLE001  # handed to the thread that waits
            failed.append(error)

    workers = [threading.Thread(target=run) for _ in range(concurrency)]
    for worker in workers:
        worker.start()
    ready.wait(WAIT_S)
    start_s = time.perf_counter()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - start_s
    if failed:
        raise failed[0]
    return Times(seconds, each)


async def by_tasks(work: Callable[[int], Awaitable[None]], records: int, concurrency: int) -> Times:
    """`concurrency` tasks of one event loop, each with one record at a time."""
    each = [0.0] * records
    waiting = iter(range(records))

    async def run() -> None:
        for row in waiting:
            begun = time.perf_counter()
            await work(row)
            each[row] = time.perf_counter() - begun

    start_s = time.perf_counter()
    await asyncio.gather(*(run() for _ in range(concurrency)))
    return Times(time.perf_counter() - start_s, each)


def by_polling(begin: Callable[[int], Any], done: Callable[[dict[int, Any]], list[int]], records: int, concurrency: int) -> Times:
    """One thread that begins records and asks which are done. `done` is given what `begin` answered, for each row under way."""
    each = [0.0] * records
    begun: dict[int, float] = {}
    under_way: dict[int, Any] = {}
    waiting: Iterator[int] = iter(range(records))
    start_s = time.perf_counter()
    until_s = start_s + WAIT_S
    row = next(waiting, None)
    while row is not None or under_way:
        while row is not None and len(under_way) < concurrency:
            begun[row] = time.perf_counter()
            under_way[row] = begin(row)
            row = next(waiting, None)
        finished = done(under_way)
        for other in finished:
            each[other] = time.perf_counter() - begun[other]
            del under_way[other]
        if not finished:
            if time.perf_counter() > until_s:
                raise RuntimeError("records stay under way")
            time.sleep(POLL_S)
    return Times(time.perf_counter() - start_s, each)
