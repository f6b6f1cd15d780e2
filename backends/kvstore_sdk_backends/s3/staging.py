"""Memory of our own that records pass through, and that tells how long the object was that was read into it."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import sys
from contextlib import suppress

from kvstore_sdk.backend import Deadline

__all__ = ["PageMap", "Staging"]

_COPY_BYTES = 8 << 20
"""Of a copy between two looks at the deadline: some 2 ms, and 20 times as long where memory is touched for the first time."""
_PRESENT_OR_SWAPPED = 0b11 << 62
"""Of an entry of /proc/self/pagemap: https://docs.kernel.org/admin-guide/mm/pagemap.html"""


class PageMap:
    """Tells which pages of this process were ever touched."""

    def __init__(self) -> None:
        """
        Raises:
            OSError: this kernel, or its sandbox, does not tell.
        """
        self._fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)

    def touched(self, address: int) -> bool:
        """Whether the page at `address` of an anonymous mapping was read or written since it was mapped or dropped."""
        entry = os.pread(self._fd, 8, address // mmap.PAGESIZE * 8)
        return bool(int.from_bytes(entry, sys.byteorder) & _PRESENT_OR_SWAPPED)

    def close(self) -> None:
        """Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class Staging:
    """Room for one record, at its end, before a page that nobody touches: the guard.

    An object is read with one byte more than was asked for. Of an object that is longer that byte lands on the guard, whatever its
    value. Of one that is shorter the last byte stays what it was before. So one request tells whether the length is right.

    Attributes:
        capacity_bytes: The longest record; a multiple of the page size.
        address: Of the first byte.
        mapped_bytes: With the guard.
    """

    def __init__(self, capacity_bytes: int, pages: PageMap) -> None:
        """Map room for a record of `capacity_bytes`, rounded up to whole pages. Memory is committed where a record passes through."""
        self.capacity_bytes = -(-capacity_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.mapped_bytes = self.capacity_bytes + mmap.PAGESIZE
        self._pages = pages
        self._map = mmap.mmap(-1, self.mapped_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        anchor = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(anchor)
        del anchor
        self._guard = self.address + self.capacity_bytes
        self._untouched = -1
        # A huge page would cover the guard together with the record's end. Kernels without huge pages do not know the advice.
        with suppress(OSError):
            self._map.madvise(mmap.MADV_NOHUGEPAGE, self.capacity_bytes, mmap.PAGESIZE)

    def start(self, size_bytes: int) -> int:
        """Address of a record of `size_bytes`."""
        return self._guard - size_bytes

    def put_in(self, source: int, size_bytes: int, deadline: Deadline) -> bool:
        """Copy a record from the address `source`. Other threads run meanwhile. False: the deadline passed first."""
        return _copy(self.start(size_bytes), source, size_bytes, deadline)

    def take_out(self, target: int, size_bytes: int, deadline: Deadline) -> bool:
        """Copy the record to the address `target`. Other threads run meanwhile. False: the deadline passed first."""
        return _copy(target, self.start(size_bytes), size_bytes, deadline)

    def expect(self) -> None:
        """Make ready for a record that is read with one byte more than it should have."""
        self._untouched = random.randrange(256)
        self._map[self.capacity_bytes - 1] = self._untouched

    def is_exact(self) -> bool:
        """Whether it had the length it should have. False of one in 256 that had it, and of every other.

        What was read twice, the second time behind the part of an answer that came first, may have a length that fits by chance: the
        record's own checksum tells.

        Raises:
            OSError: memory was locked meanwhile, so that the guard stays touched.
        """
        if self._pages.touched(self._guard):
            # Dropped, it is untouched again.
            self._map.madvise(mmap.MADV_DONTNEED, self.capacity_bytes, mmap.PAGESIZE)
            return False
        return self._map[self.capacity_bytes - 1] != self._untouched

    def works(self) -> bool:
        """Whether this kernel tells exactly whether the guard was touched: it does not where all memory is locked."""
        before = self._pages.touched(self._guard)
        self._map[self.capacity_bytes] = 1
        after = self._pages.touched(self._guard)
        with suppress(OSError):
            self._map.madvise(mmap.MADV_DONTNEED, self.capacity_bytes, mmap.PAGESIZE)
        return after and not before and not self._pages.touched(self._guard)


def _copy(target: int, source: int, size_bytes: int, deadline: Deadline) -> bool:
    for at in range(0, size_bytes, _COPY_BYTES):
        if deadline.expired:
            return False
        ctypes.memmove(target + at, source + at, min(_COPY_BYTES, size_bytes - at))
    return True
