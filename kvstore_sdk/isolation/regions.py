"""The memory that a child may map: descriptors of it, kept for as long as a child may have to be told of them again."""

from __future__ import annotations

import os
from dataclasses import dataclass

from kvstore_sdk.backend import Region

__all__ = ["Descriptor", "KnownRegion", "KnownRegions"]


class Descriptor:
    """A descriptor of our own, closed with the last reference to it: whoever has yet to send it holds one, so that its number is never
    that of another file."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        """
        Raises:
            OSError: there is no such descriptor, or there are no more.
        """
        self.fd = -1
        self.fd = os.dup(fd)

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class KnownRegion:
    """One announced region. Its owner may close it whenever it likes."""

    id: int
    descriptor: Descriptor
    size_bytes: int

    def announcement(self) -> list[int]:
        """What a child is told of it beside the descriptor: also which file it is, so that it maps no other one."""
        found = os.fstat(self.descriptor.fd)
        return [self.id, self.size_bytes, found.st_dev, found.st_ino]


class KnownRegions:
    """The announced regions by their number. Whoever uses it holds one lock."""

    def __init__(self) -> None:
        self._known: dict[int, KnownRegion] = {}
        self._closed = False

    def __contains__(self, region_id: int) -> bool:
        return region_id in self._known

    def add(self, region: Region) -> KnownRegion | None:
        """Know a region from now on; None when no child will ever be told of it.

        Raises:
            OSError: the region is closed, or there are no more descriptors.
        """
        if self._closed:
            return None
        known = KnownRegion(region.id, Descriptor(region.fd), region.size_bytes)
        self._known[region.id] = known
        return known

    def drop(self, region_id: int) -> bool:
        """Forget a region; whether it was known."""
        return self._known.pop(region_id, None) is not None

    def all(self) -> dict[int, KnownRegion]:
        return dict(self._known)

    def close(self) -> None:
        """Forget all, and take no more."""
        self._closed = True
        self._known.clear()

    def forget(self) -> None:
        """In a forked process: close its copies."""
        for known in list(self._known.values()):
            known.descriptor.close()
