"""Agents of the data plane that copy at the same time.

Over CMA a batch is copied by the thread that begins it, on one core, while its agent can do nothing else. So a large batch is cut in two,
and a second agent copies one half where it is free; what is small takes whichever agent is. The second one writes, and is never written to.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from kvstore_sdk.backend import Region
from kvstore_sdk_backends.p2p.nixl_driver import Driver, Piece, Transfer

__all__ = ["CUT_BYTES", "Lanes", "Sent"]

logger = logging.getLogger(__name__)

CUT_BYTES = 2 << 20
"""From here on half of the copy takes longer than the way to another thread."""
_PAGE_BYTES = 4096

Remote = tuple[bytes, Sequence[tuple[int, int]]]
"""Metadata and regions of a peer's agent."""


class Sent:
    """What was to be written of some pieces, in one transfer or in two.

    Attributes:
        transfers: Those that were begun.
        error: Why one was not.
    """

    __slots__ = ("error", "transfers")

    def __init__(self, *begun: Transfer | Exception) -> None:
        self.transfers = [transfer for transfer in begun if isinstance(transfer, Transfer)]
        self.error = next((error for error in begun if isinstance(error, Exception)), None)


class Lanes:
    """What one `Driver` does, done by two where that is faster. Of any thread; a batch waits until one of them is free."""

    def __init__(self, first: Driver, make: Callable[[], Driver] | None) -> None:
        """`make`: makes the second one, when it is first of use; None where it never is."""
        self._first = first
        self._make = make
        self._second: Driver | None = None
        # Held while the second one is told what the first one knows. Taken before each driver's own lock.
        self._telling = threading.Lock()
        self._regions: dict[int, tuple[Region, list[tuple[Driver, object]]]] = {}
        self._peers: dict[str, Remote] = {}
        # Peers that the second one was told of, and whether it took them.
        self._told: dict[str, bool] = {}
        self._freed = threading.Condition(threading.Lock())
        self._free = [first]
        # What the second one is to begin, on a thread of its own.
        self._halves: SimpleQueue[tuple[Driver, Transfer]] = SimpleQueue()

    @property
    def regions(self) -> list[Region]:
        with self._telling:
            return [region for region, _ in self._regions.values()]

    @property
    def _drivers(self) -> list[Driver]:
        return [self._first] if self._second is None else [self._first, self._second]

    def metadata(self) -> bytes:
        """As `Driver.metadata`."""
        return self._first.metadata()

    def expect(self, until_s: float) -> None:
        """As `Driver.expect`."""
        self._first.expect(until_s)

    def register(self, region: Region) -> None:
        """Let peers write there, and write from there."""
        with self._telling:
            held: list[tuple[Driver, object]] = []
            try:
                # One after the other: those before one that raises are in the list.
                held.extend((each, each.register(region.address, region.size_bytes)) for each in self._drivers)
            except BaseException:
                _deregister(held)
                raise
            self._regions[region.id] = (region, held)

    def deregister(self, region: Region) -> None:
        """Stops nothing that is on its way."""
        with self._telling:
            if (known := self._regions.pop(region.id, None)) is not None:
                _deregister(known[1])

    def load(self, name: str, metadata: bytes, regions: Sequence[tuple[int, int]]) -> None:
        """As `Driver.load`."""
        self._first.load(name, metadata, regions)
        with self._telling:
            self._peers[name] = (metadata, regions)

    def unload(self, name: str) -> None:
        """As `Driver.unload`."""
        with self._telling:
            self._peers.pop(name, None)
            if self._told.pop(name, False) and self._second is not None:
                self._second.unload(name)
        self._first.unload(name)

    def write(self, peer: str, pieces: Sequence[Piece]) -> list[tuple[Sent, list[int]]]:
        """Begin to write. Returns what becomes of which pieces, by their index. Over CMA they are copied when it does."""
        is_large = sum(size for _, _, size in pieces) >= CUT_BYTES
        second = self._second_for(peer) if is_large else self._second if self._told.get(peer) else None
        drivers = self._take(second, 2 if is_large else 1)
        if len(drivers) == 1:
            whole = self._prepare(drivers[0], peer, pieces)
            if isinstance(whole, Transfer):
                self._post(drivers[0], whole)
            return [(Sent(whole), list(range(len(pieces))))]
        mine, others = _halves(pieces)
        # Both are made ready before one is begun: two threads that need Python's lock by turns cost more than what they do.
        own = self._prepare(drivers[0], peer, list(mine.values()))
        other = self._prepare(drivers[1], peer, list(others.values()))
        if isinstance(other, Transfer):
            self._halves.put((drivers[1], other))
        if isinstance(own, Transfer):
            self._post(drivers[0], own)
        return [
            (Sent(own), [index for index in mine if index not in others]),
            (Sent(own, other), [index for index in mine if index in others]),
            (Sent(other), [index for index in others if index not in mine]),
        ]

    def _prepare(self, driver: Driver, peer: str, pieces: Sequence[Piece]) -> Transfer | Exception:
        try:
            return driver.prepare(peer, pieces)
        except Exception as cause:  # noqa: BLE001  # NIXL raises classes of its own, one for each status
            self._give_back(driver)
            return cause

    def _post(self, driver: Driver, transfer: Transfer) -> None:
        try:
            driver.post(transfer)
        finally:
            self._give_back(driver)

    def _post_halves(self) -> None:
        while True:
            self._post(*self._halves.get())

    def _second_for(self, peer: str) -> Driver | None:
        """The second driver, if there is one that knows this peer, or can be made to."""
        if self._told.get(peer):
            return self._second
        if self._make is None:
            return None
        with self._telling:
            if peer in self._told or (remote := self._peers.get(peer)) is None:
                return self._second if self._told.get(peer) else None
            try:
                if self._second is None:
                    self._begin_second()
                assert self._second is not None
                self._second.load(peer, *remote)
            except Exception as cause:  # noqa: BLE001  # likewise
                logger.warning("p2p: a second agent is not to be had (%s): large records are copied by one core", type(cause).__name__)
                if self._second is None:
                    self._make = None
                self._told[peer] = False
                return None
            self._told[peer] = True
            return self._second

    def _begin_second(self) -> None:
        assert self._make is not None
        second = self._make()
        threading.Thread(target=self._post_halves, name="kvstore-nixl-half", daemon=True).start()
        held = [(second, second.register(region.address, region.size_bytes)) for region, _ in self._regions.values()]
        for (_, known), one in zip(self._regions.values(), held, strict=True):
            known.append(one)
        self._second = second
        with self._freed:
            self._free.append(second)

    def _take(self, second: Driver | None, most: int) -> list[Driver]:
        """So many of the first driver and this one at most, whichever are free; waits for one."""
        with self._freed:
            while not (taken := [driver for driver in (self._first, second) if driver in self._free][:most]):
                self._freed.wait()
            self._free = [driver for driver in self._free if driver not in taken]
            return taken

    def _give_back(self, driver: Driver) -> None:
        with self._freed:
            self._free.append(driver)
            self._freed.notify_all()


def _halves(pieces: Sequence[Piece]) -> tuple[dict[int, Piece], dict[int, Piece]]:
    """Two parts of as many bytes, but for a page; by the index of the pieces. One piece may be in both."""
    left = sum(size for _, _, size in pieces) // 2 // _PAGE_BYTES * _PAGE_BYTES
    halves: tuple[dict[int, Piece], dict[int, Piece]] = ({}, {})
    for index, (local, remote, size) in enumerate(pieces):
        here = min(size, left)
        left -= here
        if here:
            halves[0][index] = (local, remote, here)
        if here < size:
            halves[1][index] = (local + here, remote + here, size - here)
    return halves


def _deregister(held: Sequence[tuple[Driver, object]]) -> None:
    for driver, memory in held:
        driver.deregister(memory)
