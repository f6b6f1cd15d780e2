"""What is free of a region."""

from __future__ import annotations

from bisect import bisect_left, insort

__all__ = ["Holes"]


class Holes:
    """Parts of a region that nobody uses, no two of them adjacent. Finding one costs the same however many there are."""

    def __init__(self, size_bytes: int) -> None:
        """All of a region of that size."""
        self._size_at = {0: size_bytes}
        self._start_before = {size_bytes: 0}
        # (bytes, offset), the smallest first.
        self._by_size = [(size_bytes, 0)]

    def __len__(self) -> int:
        return len(self._by_size)

    def parts(self) -> dict[int, int]:
        """Bytes of each by its offset."""
        return dict(self._size_at)

    def take(self, size_bytes: int) -> int | None:
        """The offset of so many bytes, from the smallest hole that has them; they are none of its any more. None: there is no such hole."""
        at = bisect_left(self._by_size, (size_bytes, 0))
        if at == len(self._by_size):
            return None
        found_bytes, offset = self._by_size[at]
        self._remove(offset)
        if found_bytes > size_bytes:
            self._insert(offset + size_bytes, found_bytes - size_bytes)
        return offset

    def add(self, offset: int, size_bytes: int) -> None:
        """These bytes are free, one hole with the holes beside them."""
        end = offset + size_bytes
        if end in self._size_at:
            size_bytes += self._remove(end)
        if offset in self._start_before:
            start = self._start_before[offset]
            self._remove(start)
            offset, size_bytes = start, offset - start + size_bytes
        self._insert(offset, size_bytes)

    def _insert(self, offset: int, size_bytes: int) -> None:
        self._size_at[offset] = size_bytes
        self._start_before[offset + size_bytes] = offset
        insort(self._by_size, (size_bytes, offset))

    def _remove(self, offset: int) -> int:
        size_bytes = self._size_at.pop(offset)
        del self._start_before[offset + size_bytes]
        del self._by_size[bisect_left(self._by_size, (size_bytes, offset))]
        return size_bytes
