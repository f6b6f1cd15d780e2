"""The memory that a tool moves records through: announced to the backend, and out of use while the backend may touch it."""

from __future__ import annotations

from kvstore_sdk.backend import Backend, Buffer, Deadline, Region, SupportsRegions, SupportsSettle, Ticket
from kvstore_sdk.errors import BackendError, UnavailableError

__all__ = ["ToolMemory"]

_SETTLE_S = 5.0
_SETTLE_NOW_S = 1.0
"""The deadline of the call that is in doubt has passed by then."""
_MOST_DOUBTFUL = 8
"""Regions out of use, each as long as the largest record: beyond that the store does not work."""


class ToolMemory:
    """One buffer, as long as it has to be; its region grows to the largest. For one thread."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._region: Region | None = None
        self._doubtful: list[tuple[Region, Ticket]] = []

    def fit(self, size_bytes: int) -> Buffer:
        """A buffer of this length, whose bytes are what was there before, if anything. The one before it is no buffer any more.

        Raises:
            UnavailableError: too much is out of use, because the backend may still touch it.
        """
        self._take_back(Deadline.after(0.0))
        if len(self._doubtful) >= _MOST_DOUBTFUL:
            raise UnavailableError(f"{len(self._doubtful)} calls are in doubt, and the store does not say that they are over")
        if self._region is None or self._region.size_bytes < size_bytes:
            if self._region is not None:
                self._release(self._region)
                self._region = None
            region = Region(size_bytes, "kvstore-tool")
            if isinstance(self._backend, SupportsRegions):
                self._backend.register_region(region)
            self._region = region
        return self._region.buffer(0, size_bytes)

    def doubt(self, ticket: Ticket) -> None:
        """A call that used the buffer is IN_DOUBT. Unless it is over in a moment the buffer is out of use, and `fit` finds another."""
        if self._region is not None and not self._is_settled(ticket, Deadline.after(_SETTLE_NOW_S)):
            self._doubtful.append((self._region, ticket))
            self._region = None

    def close(self) -> None:
        """Give it back. What a backend may still touch stays mapped until the process ends."""
        self._take_back(Deadline.after(_SETTLE_S))
        _kept.extend(region for region, _ in self._doubtful)
        self._doubtful = []
        if self._region is not None:
            self._release(self._region)
            self._region = None

    def _take_back(self, deadline: Deadline) -> None:
        """What is over by the deadline is free again."""
        doubtful, self._doubtful = self._doubtful, []
        for region, ticket in doubtful:
            if self._is_settled(ticket, deadline):
                self._release(region)
            else:
                self._doubtful.append((region, ticket))

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
