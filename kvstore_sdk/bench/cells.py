"""What is measured: cells of interleaved rounds, and how long single records take.

In a round every side stores a set of records, reads, asks for and removes it, one side after the other in a random order. So each round
gives a ratio of rates that were taken next to each other, and one of the target with itself, which shows what noise alone does.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Concatenate, ParamSpec, TypeAlias, TypeVar

from kvstore_sdk.backend import BackendError, NoSpaceError
from kvstore_sdk.bench.crew import Done
from kvstore_sdk.bench.drive import Driver, Shape, shape_of
from kvstore_sdk.bench.limits import copy_rate, drop_pages, fio_rates
from kvstore_sdk.bench.statistics import Ratio, percentile, ratio_of
from kvstore_sdk.errors import text_of

__all__ = [
    "AGAIN",
    "AGAINST",
    "FIO",
    "MEMCPY",
    "PLAIN",
    "TARGET",
    "UNSEALED",
    "Budget",
    "Cell",
    "Latency",
    "Side",
    "check_room",
    "measure",
    "measure_latency",
]

TARGET, AGAIN, UNSEALED, AGAINST = "target", "again", "integrity off", "against"
PLAIN, FIO, MEMCPY = "plain files", "fio", "memcpy"
_P = ParamSpec("_P")
_T = TypeVar("_T")
_Place: TypeAlias = tuple[str, str]
"""An operation and its place, as a cell has them."""
_EVERYWHERE = ("", "")
_SAMPLES = 500
_MOST_RECORDS = 16384
"""In a set. Small records need no more to fill their time."""


@dataclass(frozen=True, slots=True)
class Side:
    """What takes part in rounds.

    Attributes:
        name: `target`, `again`, `plain files`, or what else it is called.
        driver: That makes its calls; sides may share one.
        sealed: Records are sealed and verified within the time.
        deletes: Its records are removed again.
        path: Of the file of a record by its name, if it has one; then its pages can be dropped.
    """

    name: str
    driver: Driver
    sealed: bool
    deletes: bool = True
    path: Callable[[str], str] | None = None


@dataclass(slots=True)
class Cell:
    """One operation in one place, and its rates.

    Attributes:
        operation: `put`, `get`, `exists` or `delete`.
        place: How the store was opened, `direct` or `buffered`, and for gets of what is buffered whether it is `warm` or `cold`: in the
            page cache or not. Empty where all that is the store's own affair.
        payload_bytes: Of a record.
        threads: That make calls.
        rates: Records a second by round, by side.
    """

    operation: str
    place: str
    payload_bytes: int
    threads: int
    rates: dict[str, list[float]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.operation} {self.place}".rstrip()

    def ratio(self, side: str, other: str) -> Ratio | None:
        """Between two sides; None where one of them has no such cell."""
        ours, theirs = self.rates.get(side), self.rates.get(other)
        return ratio_of(ours, theirs) if ours and theirs and len(ours) == len(theirs) else None


@dataclass(frozen=True, slots=True)
class Latency:
    """How long one record takes from one thread, sealing and verifying included: seconds that half, and 99 of 100, did not exceed."""

    side: str
    operation: str
    place: str
    payload_bytes: int
    samples: int
    p50_s: float
    p99_s: float


@dataclass(slots=True)
class Budget:
    """What a cell may take.

    Attributes:
        seconds: For all its rounds together. A round that has begun is ended, so it may take somewhat more.
        rounds: At most so many, after one that is not counted.
        set_bytes: In one set of records, unless one batch for each thread is more.
    """

    seconds: float
    rounds: int
    set_bytes: int


def _named(measured: Callable[Concatenate[Side, _P], _T]) -> Callable[Concatenate[Side, _P], _T]:
    """Errors of what is beside the target say so."""

    @wraps(measured)
    def run(side: Side, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return measured(side, *args, **kwargs)
        except BackendError as error:
            if side.name in (TARGET, AGAIN, UNSEALED):
                raise
            raise BackendError(f"{side.name}: {text_of(error)}") from error

    return run


def measure(
    sides: Sequence[Side], place: str, payload_bytes: int, threads: int, budget: Budget, notes: set[str], fio_folder: str | None = None
) -> list[Cell]:
    """The cells of one record size and one number of threads.

    Args:
        sides: All of them take part in each round.
        place: `direct`, `buffered`, or empty.
        payload_bytes: Of a record.
        threads: That make calls, where the store allows so many.
        budget: As it says.
        notes: What a reader has to know is put into it.
        fio_folder: Where `fio` takes part in each round, past the page cache.

    Raises:
        BackendError: a side failed, or has given bytes that were not stored.
    """
    # Put, two gets, half of one to ask, and removing, which takes as long as it takes.
    slice_s = budget.seconds / (budget.rounds + 1) / (5 * len(sides) + 1)
    turns: list[tuple[str, Callable[[], dict[_Place, float]]]] = [
        (side.name, partial(_turn, side, place, payload_bytes, threads, slice_s, budget, notes)) for side in sides
    ]
    turns.append((MEMCPY, lambda: {_EVERYWHERE: copy_rate(payload_bytes, threads, slice_s / 4)}))
    if fio_folder is not None:
        rates = partial(fio_rates, fio_folder, payload_bytes, threads, budget.set_bytes)
        turns.append((FIO, lambda: {(operation, place): rate for operation, rate in rates().items()}))
    cells: dict[_Place, Cell] = {}
    end_s = time.monotonic() + budget.seconds
    for number in range(budget.rounds + 1):
        random.shuffle(turns)
        for name, turn in turns:
            for key, rate in turn().items():
                if number:
                    cells.setdefault(key, Cell(*key, payload_bytes, threads)).rates.setdefault(name, []).append(rate)
        if number and time.monotonic() > end_s:
            break
    copies = cells.pop(_EVERYWHERE)
    for cell in cells.values():
        if cell.operation in ("put", "get"):
            cell.rates |= copies.rates
    return list(cells.values())


@_named
def measure_latency(side: Side, place: str, payload_bytes: int, budget: Budget) -> list[Latency]:
    """Of single records, one after another.

    Raises:
        BackendError: as `measure`.
    """
    driver, shape, limit_s = side.driver, Shape(payload_bytes, 1, 1), budget.seconds / 4
    keys = driver.keys(max(1, min(_SAMPLES, budget.set_bytes // shape.record_bytes)))
    put, stored = driver.put(shape, keys, sealed=side.sealed, limit_s=limit_s)
    driver.wait_visible(shape, stored)
    get = driver.get(shape, stored, sealed=side.sealed, limit_s=limit_s, repeat=True)
    exists = driver.exists(shape, stored, limit_s=limit_s / 2)
    if side.deletes:
        driver.delete(shape_of(driver.backend, payload_bytes, 8), stored)
    reads = "warm" if place == "buffered" else place

    def of(operation: str, where: str, done: Done) -> Latency:
        calls_s = done.calls_s
        return Latency(side.name, operation, where, payload_bytes, len(calls_s), percentile(calls_s, 0.5), percentile(calls_s, 0.99))

    return [of("put", place, put), of("get", reads, get), of("exists", place, exists)]


@_named
def _turn(side: Side, place: str, payload_bytes: int, threads: int, slice_s: float, budget: Budget, notes: set[str]) -> dict[_Place, float]:
    """Store a set, read it, ask for it, remove it."""
    driver = side.driver
    shape = shape_of(driver.backend, payload_bytes, threads)
    if shape.threads < threads:
        notes.add(f"{side.name} takes {shape.threads} calls at a time, so no more threads call it (max_concurrency)")
    keys = driver.keys(max(shape.threads * shape.batch, min(budget.set_bytes // shape.record_bytes, _MOST_RECORDS)))
    put, stored = driver.put(shape, keys, sealed=side.sealed, limit_s=slice_s)
    driver.wait_visible(shape, stored)
    reads = "warm" if place == "buffered" else place
    found = {("put", place): put.rate}
    found["get", reads] = driver.get(shape, stored, sealed=side.sealed, limit_s=slice_s, repeat=True).rate
    if place != "direct" and side.path is not None and os.path.isfile(side.path(stored[0].name)):
        if drop_pages(side.path(key.name) for key in stored):
            found["get", "cold"] = driver.get(shape, stored, sealed=side.sealed, limit_s=math.inf, repeat=False).rate
        else:
            notes.add(f"{side.name}: the page cache could not be dropped (posix_fadvise) in each round, so not all was read cold")
    found["exists", place] = driver.exists(shape, stored, limit_s=slice_s / 4).rate
    if side.deletes:
        found["delete", place] = driver.delete(shape, stored).rate
    return found


def check_room(room_bytes: int | None, needed_bytes: int, what: str) -> None:
    """Before anything is written.

    Raises:
        NoSpaceError: there is less room than a measurement takes.
    """
    if room_bytes is not None and room_bytes < needed_bytes:
        there = f"{what} has room for {max(0, room_bytes)} bytes more"
        raise NoSpaceError(f"bench: {there}, and this takes {needed_bytes}; fewer --threads or smaller --sizes need less")
