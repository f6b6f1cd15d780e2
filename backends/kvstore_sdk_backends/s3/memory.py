"""The caller's memory, lent to an item for as long as its call runs."""

from __future__ import annotations

import threading

__all__ = ["COPY_BYTES", "ItemMemory", "ReturnedError"]

COPY_BYTES = 256 * 1024
"""Most that is copied without looking whether the memory was given back: some 20 us, which is what `give_back` may wait for."""


class ReturnedError(Exception):
    """The memory was given back: its call is over."""


class ItemMemory:
    """The buffer of one item. After `give_back` returned, nothing done through this object reads or writes a byte of it.

    Everything is copied. An asyncio transport keeps references to what it was given to send, and a parser to what it was given to
    fill, for as long as they like: neither may be the caller's memory.
    """

    __slots__ = ("_lock", "_view", "size_bytes")

    def __init__(self, view: memoryview) -> None:
        """`view`: of format `B`, writable for a get. It is released by `give_back`; a slice of its own is best."""
        self.size_bytes = len(view)
        self._view: memoryview | None = view
        self._lock = threading.Lock()

    def read(self, start: int, length: int) -> bytes:
        """A copy of `[start, start + length)`. Up to `COPY_BYTES` it is copied once, beyond that twice.

        Raises:
            ReturnedError: the memory was given back.
            ValueError: the range does not lie within it.
        """
        self._check(start, length)
        if length <= COPY_BYTES:
            return self._read(start, start + length)
        end = start + length
        return b"".join(self._read(at, min(at + COPY_BYTES, end)) for at in range(start, end, COPY_BYTES))

    def write(self, start: int, data: bytes | bytearray | memoryview) -> None:
        """Copy `data` to `[start, start + len(data))`.

        Raises:
            ReturnedError: the memory was given back; a part of `data` may have been written before that.
            ValueError: the range does not lie within it; nothing was written.
        """
        length = len(data)
        self._check(start, length)
        if length <= COPY_BYTES:
            self._write(start, data)
            return
        with memoryview(data) as source:
            for at in range(0, length, COPY_BYTES):
                with source[at : at + COPY_BYTES] as piece:
                    self._write(start + at, piece)

    def give_back(self) -> None:
        """End all access, waiting for a copy that is being made. Idempotent, from any thread."""
        with self._lock:
            if self._view is not None:
                self._view.release()
                self._view = None

    def _check(self, start: int, length: int) -> None:
        if start < 0 or length < 0 or start + length > self.size_bytes:
            raise ValueError(f"ItemMemory: [{start}, {start + length}) is outside its {self.size_bytes} bytes")

    def _read(self, start: int, end: int) -> bytes:
        with self._lock:
            if self._view is None:
                raise ReturnedError("the call that lent this memory is over")
            return bytes(self._view[start:end])

    def _write(self, start: int, piece: bytes | bytearray | memoryview) -> None:
        with self._lock:
            if self._view is None:
                raise ReturnedError("the call that lent this memory is over")
            self._view[start : start + len(piece)] = piece
