"""The direct way: a row of the engine's memory is a record, and a backend moves it from or into its place."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvstore_sdk.backend import Buffer, Region
from kvstore_sdk.format import HEADER_BYTES, Flaw, is_header, read_header, record_bytes, verify
from kvstore_sdk.keys import ChunkKey
from kvstore_sdk.tier.jobs import Item
from kvstore_sdk.tier.records import NotMovedError, keep_mapped
from kvstore_sdk.tier.types import RecordMemory

__all__ = ["DirectRecords"]

logger = logging.getLogger(__name__)

_PAGE_BYTES = 4096


class DirectRecords:
    """Nothing is copied, and a slot of the queue only says that there is room for one more record in calls.

    A row is touched from `buffer` to `let_go`, which may come after its job was reported: then the row was reported as held, and
    `released` hears of it once it is not touched any more.
    """

    def __init__(self, name: str, memory: RecordMemory, layout: str, *, spare_bytes: int, released: Callable[[Item], None]) -> None:
        """`spare_bytes`: length of the memory that `borrow` lends, one borrower at a time."""
        self._name = name
        self._memory = memory
        self._layout = layout
        self._released = released
        self._spare = Region(spare_bytes, "kvstore-spare")
        self._lent = threading.Lock()

    @property
    def regions(self) -> tuple[Region, ...]:
        return (self._memory.region, self._spare)

    def buffer(self, item: Item, slot: int) -> Buffer | None:
        if not item.job.touch(item.place):
            return None
        try:
            buffer = self._memory.record(item.row)
            if problem := self._problem_of(buffer, record_bytes(item.payload_bytes)):
                logger.error("%s: row %d is not the place of a record: %s", self._name, item.row, problem)
                raise NotMovedError("refused")
        except NotMovedError:
            self.let_go(item)
            raise
        except Exception:
            logger.exception("%s: finding the record of row %d of the engine's memory failed", self._name, item.row)
            self.let_go(item)
            raise NotMovedError("failed") from None
        return buffer

    def fill(self, item: Item, key: ChunkKey, buffer: Buffer) -> bool:
        page = bytes(buffer.view[:HEADER_BYTES])
        if not is_header(page, key, self._layout, item.payload_bytes):
            header = read_header(page)
            found = "no sealed record" if header is None else f"{header.key.name} of layout {header.layout}, {header.payload_bytes} bytes"
            logger.error("%s: row %d was to be stored as %s and holds %s: it is not stored", self._name, item.row, key.name, found)
            self.let_go(item)
            raise NotMovedError("refused")
        return True

    def flaw(self, item: Item, key: ChunkKey, buffer: Buffer) -> Flaw | None:
        return verify(buffer.view, key, self._layout, item.payload_bytes)

    def deliver(self, item: Item, key: ChunkKey, buffer: Buffer) -> None:
        """It is there."""

    def let_go(self, item: Item) -> None:
        if item.job.let_go(item.place):
            self._released(item)

    def borrow(self, slot: int, length: int) -> Buffer | None:
        if length > self._spare.size_bytes or not self._lent.acquire(blocking=False):
            return None
        return self._spare.buffer(0, length)

    def give_back(self) -> None:
        self._lent.release()

    def close(self, untouched: bool) -> None:
        if untouched:
            self._spare.close()
            return
        # Not ours to close, nor to let go: whoever drops it unmaps it.
        for region in self.regions:
            keep_mapped(region)

    def _problem_of(self, buffer: Buffer, length: int) -> str | None:
        if buffer.region is not self._memory.region:
            return "it lies outside the memory's region"
        if buffer.length != length:
            return f"it has {buffer.length} bytes, a record of this group has {length}"
        if buffer.offset % _PAGE_BYTES:
            return f"it begins at byte {buffer.offset} of its region, which is no multiple of {_PAGE_BYTES}"
        return None
