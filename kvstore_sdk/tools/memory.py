"""The memory that a tool moves records through: announced to the backend, and out of use while the backend may touch it."""

from __future__ import annotations

from kvstore_sdk.backend import Backend, Buffer, Deadline, Region, SupportsRegions, SupportsSettle, Ticket
from kvstore_sdk.errors import BackendError

__all__ = ["ToolMemory"]

_SETTLE_S = 5.0


class ToolMemory:
    """One buffer, as long as it has to be; its region grows to the largest. For one thread."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._region: Region | None = None
        self._doubtful: list[tuple[Region, Ticket]] = []

    def fit(self, size_bytes: int) -> Buffer:
        """A buffer of this length, whose bytes are what was there before, if anything. The one before it is no buffer any more."""
        if self._region is None or self._region.size_bytes < size_bytes:
            if self._region is not None:
                self._release(self._region)
                self._region = None
            region = Region(size_bytes, "kvstore-tool")
            if isinstance(self._backend, SupportsRegions):
                self._backend.register_region(region)
            self._region = region
        return self._region.buffer(0, size_bytes)

    def doubt(self, ticket: Ticket, deadline: Deadline) -> None:
        """A call that used the buffer is IN_DOUBT. Unless it settles by the deadline, the buffer is out of use, and `fit` finds another."""
        if self._region is not None and not self._is_settled(ticket, deadline):
            self._doubtful.append((self._region, ticket))
            self._region = None

    def close(self) -> None:
        """Give it back. What a backend may still touch stays mapped until the process ends."""
        deadline = Deadline.after(_SETTLE_S)
        for region, ticket in self._doubtful:
            if self._is_settled(ticket, deadline):
                self._release(region)
            else:
                _kept.append(region)
        self._doubtful = []
        if self._region is not None:
            self._release(self._region)
            self._region = None

    def _is_settled(self, ticket: Ticket, deadline: Deadline) -> bool:
        if not isinstance(self._backend, SupportsSettle):
            return False
        try:
            return self._backend.settle([ticket], deadline) == [True]
        except BackendError:
            return False

    def _release(self, region: Region) -> None:
        if isinstance(self._backend, SupportsRegions):
            self._backend.unregister_region(region)
        region.close()


_kept: list[Region] = []
"""A region that nobody refers to would be unmapped."""
