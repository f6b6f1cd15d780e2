"""The memory that a child may map: descriptors of it, kept for as long as a child may have to be told of them again."""

from __future__ import annotations

import os
from dataclasses import dataclass

from kvstore_sdk.backend import Region

__all__ = ["KnownRegion", "KnownRegions"]


@dataclass(frozen=True, slots=True)
class KnownRegion:
    """One announced region. `fd` is a descriptor of our own: its owner may close the region whenever it likes."""

    id: int
    fd: int
    size_bytes: int


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
        known = KnownRegion(region.id, os.dup(region.fd), region.size_bytes)
        self._known[region.id] = known
        return known

    def drop(self, region_id: int) -> bool:
        """Forget a region; whether it was known."""
        known = self._known.pop(region_id, None)
        if known is not None:
            os.close(known.fd)
        return known is not None

    def all(self) -> dict[int, KnownRegion]:
        return dict(self._known)

    def close(self) -> None:
        """Forget all, and take no more."""
        self._closed = True
        for region_id in list(self._known):
            self.drop(region_id)
