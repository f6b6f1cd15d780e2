"""Memory that a backend reads from and writes into."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
from dataclasses import dataclass

__all__ = ["Buffer", "Region"]

_ids = itertools.count(1)


class Region:
    """One page-aligned shared mapping, announced to a backend before any buffer of it is used.

    The memory is a `memfd`: it has no name in any filesystem, so the kernel takes it back when the last process that maps it is
    gone, however it went. Another process maps it from `fd` with `from_fd`, which also maps memory that has a name.

    Attributes:
        id: Number of this region in this process; never used twice.
        size_bytes: A multiple of the page size.
        fd: File descriptor of the memory, close-on-exec, owned by the region.
        address: Of the first byte, for RDMA and C libraries.
        view: All of it, writable, format `B`.
    """

    def __init__(self, size_bytes: int, label: str = "kvstore") -> None:
        """Allocate `size_bytes`, rounded up to whole pages and zero-filled. Pages are committed on first touch.

        Raises:
            ValueError: `size_bytes` is not positive.
            OSError: the kernel refused the memory.
        """
        if size_bytes <= 0:
            raise ValueError(f"Region: size_bytes: {size_bytes} is not positive")
        size_bytes = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        fd = os.memfd_create(label, os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size_bytes)
        except BaseException:
            os.close(fd)
            raise
        self._take(fd, size_bytes)

    @classmethod
    def from_fd(cls, fd: int, size_bytes: int, label: str = "") -> Region:
        """Map memory that exists: a file in `/dev/shm`, or the `fd` of a region of another process.

        The region owns `fd` from now on, also when this fails: then it is closed.

        Args:
            fd: Open for reading and writing.
            size_bytes: A multiple of the page size, and no more than there is behind `fd`: what lies beyond the end of a file would end
                the process at its first touch.
            label: What the memory is called in an error.

        Raises:
            ValueError: `size_bytes` is not as above.
            OSError: the kernel refused to map it.
        """
        try:
            there = os.fstat(fd).st_size
            if size_bytes <= 0 or size_bytes % mmap.PAGESIZE or size_bytes > there:
                name = label or f"fd {fd}"
                raise ValueError(f"Region: size_bytes: {size_bytes} must be whole pages of the {there} bytes that {name} has")
            os.set_inheritable(fd, False)
        except BaseException:
            os.close(fd)
            raise
        region = cls.__new__(cls)
        region._take(fd, size_bytes)
        return region

    def _take(self, fd: int, size_bytes: int) -> None:
        """Map `fd`, and own it. It is closed when this fails."""
        self.id = next(_ids)
        self.size_bytes = size_bytes
        self.fd = fd
        try:
            self._map = mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED)
        except BaseException:
            os.close(fd)
            raise
        self.view = memoryview(self._map)
        anchor = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(anchor)
        del anchor
        self._closed = False

    def buffer(self, offset: int, length: int) -> Buffer:
        """The part `[offset, offset + length)`.

        Raises:
            ValueError: the part does not lie within the region.
        """
        if offset < 0 or length < 0 or offset + length > self.size_bytes:
            raise ValueError(f"Region {self.id}: [{offset}, {offset + length}) is outside its {self.size_bytes} bytes")
        return Buffer(self, offset, length)

    def close(self) -> None:
        """Unmap the memory. Idempotent.

        A view that somebody still holds keeps the mapping alive until it is released: closing never pulls memory from under a
        running call.
        """
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(BufferError):
            self.view.release()
        with contextlib.suppress(BufferError):
            self._map.close()
        os.close(self.fd)

    def __repr__(self) -> str:
        return f"Region(id={self.id}, size_bytes={self.size_bytes})"


@dataclass(frozen=True, slots=True)
class Buffer:
    """A part of a region: what a backend reads a record from, or writes it into."""

    region: Region
    offset: int
    length: int

    @property
    def view(self) -> memoryview:
        """The bytes themselves, writable. Do not keep it after the call returned."""
        return self.region.view[self.offset : self.offset + self.length]

    @property
    def address(self) -> int:
        """Address of the first byte in this process."""
        return self.region.address + self.offset
