"""The staged way: records pass through memory of the Tier, and are copied from and to the engine's rows."""

from __future__ import annotations

import logging
import threading

from kvstore_sdk.backend import Buffer, ConfigError, Region
from kvstore_sdk.format import HEADER_BYTES, Flaw, record_bytes, seal, verify
from kvstore_sdk.keys import ChunkKey
from kvstore_sdk.tier.jobs import Item
from kvstore_sdk.tier.records import NotMovedError, keep_mapped
from kvstore_sdk.tier.types import EngineMemory, IncompleteChunkError

__all__ = ["StagedRecords"]

logger = logging.getLogger(__name__)


class StagedRecords:
    """A slot of the queue is a stretch of staging memory, which is all that a backend ever sees.

    The engine's rows are touched only while their job is open, and only under its lock: nothing of theirs outlives a job.
    """

    def __init__(self, name: str, memory: EngineMemory, layout: str, *, slots: int, slot_bytes: int, verifies: bool) -> None:
        self._name = name
        self._memory = memory
        self._layout = layout
        self._slot_bytes = slot_bytes
        self._verifies = verifies
        try:
            self._region = Region(slots * slot_bytes, "kvstore-staging")
        except OSError as cause:
            problem = f"{slots * slot_bytes} bytes of staging memory cannot be had: {cause.strerror}; give less"
            raise ConfigError(f"tier {name}", "staging_bytes", problem) from cause
        self._private = threading.local()

    @property
    def regions(self) -> tuple[Region, ...]:
        return (self._region,)

    def buffer(self, item: Item, slot: int) -> Buffer | None:
        if not item.job.open:
            return None
        return self._region.buffer(slot * self._slot_bytes, record_bytes(item.payload_bytes))

    def fill(self, item: Item, key: ChunkKey, buffer: Buffer) -> bool:
        record = self._private_record(item)
        try:
            # Under the job's lock: once the job is closed the row may hold something else, and that must never be stored under this key.
            with item.job.lock:
                if not item.job.open:
                    return False
                self._memory.copy_out(item.row, key.group, record[HEADER_BYTES : HEADER_BYTES + item.payload_bytes])
        except IncompleteChunkError:
            raise NotMovedError("refused") from None
        except Exception:
            logger.exception("%s: copying a chunk out of row %d of the engine's memory failed", self._name, item.row)
            raise NotMovedError("failed") from None
        seal(record, key, self._layout, item.payload_bytes)
        buffer.view[:] = record
        return True

    def flaw(self, item: Item, key: ChunkKey, buffer: Buffer) -> Flaw | None:
        record = self._private_record(item)
        record[:] = buffer.view
        return verify(record, key, self._layout, item.payload_bytes)

    def deliver(self, item: Item, key: ChunkKey, buffer: Buffer) -> None:
        # What `flaw` verified on this thread, byte for byte, and not what the slot holds by now.
        record = self._private_record(item) if self._verifies else buffer.view
        try:
            # Under the job's lock: once the job is closed the engine may use the row for something else.
            with item.job.lock:
                if item.job.open:
                    self._memory.copy_in(item.row, key.group, record[HEADER_BYTES : HEADER_BYTES + item.payload_bytes])
        except Exception:
            logger.exception("%s: copying a chunk into row %d of the engine's memory failed", self._name, item.row)
            raise NotMovedError("failed") from None

    def let_go(self, item: Item) -> None:
        """A slot is the queue's to free."""

    def borrow(self, slot: int, length: int) -> Buffer | None:
        return self._region.buffer(slot * self._slot_bytes, length) if length <= self._slot_bytes else None

    def give_back(self) -> None:
        """Likewise."""

    def close(self, untouched: bool) -> None:
        if untouched:
            self._region.close()
        else:
            keep_mapped(self._region)

    def _private_record(self, item: Item) -> memoryview:
        """Memory of this thread for one record, known to no backend.

        Checksums are taken here, and only here: a backend that touches a slot after its call has returned can spoil a record, which is
        found, but it can neither slip in between a check and a copy nor have its bytes sealed.
        """
        memory = getattr(self._private, "memory", None)
        if memory is None:
            memory = self._private.memory = memoryview(bytearray(self._slot_bytes))
        return memory[: record_bytes(item.payload_bytes)]
