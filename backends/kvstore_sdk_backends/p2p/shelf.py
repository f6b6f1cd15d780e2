"""The records a node keeps in memory of its own, for itself and for its peers."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections import OrderedDict
from collections.abc import Sequence

from kvstore_sdk.backend import (
    Buffer,
    ClosedError,
    Get,
    GetResult,
    GetStatus,
    InvalidError,
    Loan,
    Mode,
    NoSpaceError,
    Put,
    PutResult,
    PutStatus,
    Region,
    Usage,
)
from kvstore_sdk_backends.p2p.holes import Holes

__all__ = ["Shelf"]


class _Record:
    """One record's place. `users` are loans and running copies; while there is one the place stays as it is, also without its name."""

    __slots__ = ("extent_bytes", "named", "offset", "size_bytes", "users")

    def __init__(self, offset: int, extent_bytes: int, size_bytes: int) -> None:
        self.offset = offset
        self.extent_bytes = extent_bytes
        self.size_bytes = size_bytes
        # Who puts it is its first user.
        self.users = 1
        self.named = False


class _ShelfLoan:
    """One lent record. It was put whole, header and all, so there is nothing left to seal."""

    __slots__ = ("buffer", "name", "record")

    sealed = True

    def __init__(self, name: str, buffer: Buffer, record: _Record) -> None:
        self.name = name
        self.buffer = buffer
        self.record: _Record | None = record

    @property
    def replaced(self) -> bool:
        """Whether its name is another record's by now."""
        return self.record is not None and not self.record.named

    def seal(self) -> bool:
        return True


class Shelf:
    """Whole records, one after another in one region, the least recently used evicted for a new one.

    A record that is lent or being copied stays where it is: one that replaces it gets a place of its own, and the old place is used again
    when the last reader is done. Safe to use from any number of threads; no lock is held while bytes are copied.

    Attributes:
        region: Where the records are. It is unmapped by `close`, or by the end of the last loan and copy after it.
        namespace: Of the records, as far as it is known: for the handshake alone, the names of records carry it too.
        layout: Of their payloads, likewise.
    """

    def __init__(self, serve_bytes: int, max_record_bytes: int = 1 << 30) -> None:
        """Map `serve_bytes`, rounded up to whole pages; memory is used as records come.

        Raises:
            ValueError: `serve_bytes` is not positive.
            OSError: the kernel refused the memory.
        """
        self.region = Region(serve_bytes, "kvstore-p2p-shelf")
        self.namespace = ""
        self.layout = ""
        self._max_record_bytes = min(max_record_bytes, self.region.size_bytes)
        self._lock = threading.Lock()
        # By name, the least recently used first.
        self._records: OrderedDict[str, _Record] = OrderedDict()
        # Places with users, by offset: they divide the region into what can be made free.
        self._busy: dict[int, _Record] = {}
        self._holes = Holes(self.region.size_bytes)
        self._used_bytes = 0
        self._lent_bytes = 0
        self._closed = False

    def use_identity(self, namespace: str, layout: str) -> None:
        """What the records mean from now on. Those of another namespace are not found any more, and leave as the least recently used."""
        self.namespace, self.layout = namespace, layout

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Whether each is there, whole."""
        with self._lock:
            return [name in self._records for name in names]

    def put(self, put: Put) -> PutResult:
        """Copy a record in. It is seen once it is whole; a REPLACE is seen at once in the place of the old one."""
        size_bytes = put.size_bytes
        if size_bytes > self._max_record_bytes:
            return PutResult.failed(InvalidError(f"p2p put {put.name}: {size_bytes} bytes, the largest record is {self._max_record_bytes}"))
        with self._lock:
            if self._closed:
                return _put_closed(put)
            old = self._records.get(put.name)
            if old is not None and put.mode is Mode.CREATE:
                self._records.move_to_end(put.name)
                return PutResult(PutStatus.EXISTS)
            record = self._place(size_bytes, put.name)
        if record is None:
            message = f"p2p put {put.name}: no room for {size_bytes} bytes beside what is lent out; raise serve_bytes"
            return PutResult.failed(NoSpaceError(message))
        target = self.region.address + record.offset
        for part in put.parts:
            ctypes.memmove(target, part.address, part.length)
            target += part.length
        with self._lock:
            try:
                if self._closed:
                    return _put_closed(put)
                old = self._records.get(put.name)
                if old is not None:
                    if put.mode is Mode.CREATE:
                        return PutResult(PutStatus.EXISTS)
                    self._unname(put.name)
                self._records[put.name] = record
                self._used_bytes += size_bytes
                record.named = True
            finally:
                self._leave(record)
        return PutResult(PutStatus.STORED)

    def get(self, get: Get) -> GetResult:
        """Copy a record out."""
        asked_bytes = get.size_bytes
        with self._lock:
            if self._closed:
                return GetResult(GetStatus.CLOSED, ClosedError(f"p2p get {get.name}: the backend is closed"))
            record = self._records.get(get.name)
            if record is None:
                return GetResult(GetStatus.MISSING)
            if record.size_bytes != asked_bytes:
                return GetResult.wrong_size(record.size_bytes, asked_bytes)
            self._use(get.name, record)
        source = self.region.address + record.offset
        for part in get.into:
            ctypes.memmove(part.address, source, part.length)
            source += part.length
        with self._lock:
            self._leave(record)
        return GetResult(GetStatus.FOUND)

    def sizes(self, names: Sequence[str]) -> list[int]:
        """Bytes of each record, 0 for what is not there."""
        with self._lock:
            return [record.size_bytes if (record := self._records.get(name)) is not None else 0 for name in names]

    def lend(self, names: Sequence[str]) -> list[Loan | None]:
        """Pin records; None for what is not there, and beyond half of the region, so that there is always room for new ones."""
        loans: list[Loan | None] = []
        with self._lock:
            for name in names:
                record = self._records.get(name)
                if record is None or not record.size_bytes or not self._may_lend(record.extent_bytes):
                    loans.append(None)
                    continue
                self._use(name, record)
                self._lent_bytes += record.extent_bytes
                loans.append(_ShelfLoan(name, self.region.buffer(record.offset, record.size_bytes), record))
        return loans

    def give_back(self, loans: Sequence[Loan]) -> None:
        """End loans of this shelf. One that was given back before is left alone."""
        with self._lock:
            for loan in loans:
                if isinstance(loan, _ShelfLoan) and (record := loan.record) is not None:
                    loan.record = None
                    self._lent_bytes -= record.extent_bytes
                    self._leave(record)

    def usage(self) -> Usage:
        """What is kept under a name."""
        with self._lock:
            return Usage(len(self._records), self._used_bytes, self.region.size_bytes)

    @property
    def lent_bytes(self) -> int:
        """Memory that loans keep from being evicted."""
        return self._lent_bytes

    def close(self) -> None:
        """Forget all records. Idempotent. Loans and copies that run keep their bytes until they end."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for name in list(self._records):
                    self._unname(name)
                self._unmap_when_idle()

    def _may_lend(self, extent_bytes: int) -> bool:
        return not self._lent_bytes or self._lent_bytes + extent_bytes <= self.region.size_bytes // 2

    def _use(self, name: str, record: _Record) -> None:
        record.users += 1
        self._busy[record.offset] = record
        self._records.move_to_end(name)

    def _leave(self, record: _Record) -> None:
        record.users -= 1
        if not record.users:
            del self._busy[record.offset]
            if not record.named:
                self._holes.add(record.offset, record.extent_bytes)
        if self._closed:
            self._unmap_when_idle()

    def _unname(self, name: str) -> None:
        record = self._records.pop(name)
        record.named = False
        self._used_bytes -= record.size_bytes
        if not record.users:
            self._holes.add(record.offset, record.extent_bytes)

    def _unmap_when_idle(self) -> None:
        if not self._busy:
            self.region.close()

    def _place(self, size_bytes: int, replaced: str) -> _Record | None:
        """A place of that size for a new record, which it keeps busy. `replaced`: the record to evict last."""
        extent_bytes = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE or mmap.PAGESIZE
        offset = self._holes.take(extent_bytes)
        fits = False
        while offset is None:
            idle = next((name for name, record in self._records.items() if not record.users and name != replaced), replaced)
            # Nothing is evicted for a record that fits nowhere. Mostly all are of one size, and any that leaves makes room.
            fits = fits or (idle != replaced and self._records[idle].extent_bytes >= extent_bytes) or self._could_fit(extent_bytes)
            if not fits:
                return None
            self._unname(idle)
            offset = self._holes.take(extent_bytes)
        record = _Record(offset, extent_bytes, size_bytes)
        self._busy[offset] = record
        return record

    def _could_fit(self, extent_bytes: int) -> bool:
        """Whether a place of that size were free if all records were evicted that nobody uses."""
        end = 0
        for offset in sorted(self._busy):
            if offset - end >= extent_bytes:
                return True
            end = offset + self._busy[offset].extent_bytes
        return self.region.size_bytes - end >= extent_bytes


def _put_closed(put: Put) -> PutResult:
    return PutResult(PutStatus.CLOSED, ClosedError(f"p2p put {put.name}: the backend is closed"))
