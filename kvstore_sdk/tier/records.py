"""Where the record of a row lies while a backend moves it. One of two ways, chosen once: through staging memory, or in place."""

from __future__ import annotations

import logging
from typing import Protocol

from kvstore_sdk.backend import Backend, Buffer, Region, SupportsRegions
from kvstore_sdk.format import Flaw
from kvstore_sdk.keys import ChunkKey
from kvstore_sdk.tier.jobs import Item

__all__ = ["NotMovedError", "Records", "announce", "keep_mapped", "take_back"]

logger = logging.getLogger(__name__)

_kept_regions: list[Region] = []
"""Regions that something may still touch after their tier was closed. A region that nobody refers to would be unmapped."""


class NotMovedError(Exception):
    """An item cannot be moved, and the store is not to blame. `result` is the label under which its chunk is counted."""

    def __init__(self, result: str) -> None:
        super().__init__(result)
        self.result = result


class Records(Protocol):
    """The bytes of items, from `buffer` until `let_go`. Called by a Tier's threads, for one item by one at a time."""

    @property
    def regions(self) -> tuple[Region, ...]:
        """What the backend has to know before the first call."""
        ...

    def buffer(self, item: Item, slot: int) -> Buffer | None:
        """Where the record of an item lies while it is in `slot` of the queue; None when its job is over.

        Raises:
            NotMovedError: there is no such place.
        """
        ...

    def fill(self, item: Item, key: ChunkKey, buffer: Buffer) -> bool:
        """Have the sealed record of the item's row in `buffer`. False when its job is over, and nothing may be stored.

        Raises:
            NotMovedError: the row does not hold the chunk.
        """
        ...

    def flaw(self, item: Item, key: ChunkKey, buffer: Buffer) -> Flaw | None:
        """Verify what was loaded into `buffer`."""
        ...

    def deliver(self, item: Item, key: ChunkKey, buffer: Buffer) -> None:
        """The payload is good, or is not to be verified: have it in the item's row, unless its job is over.

        Raises:
            NotMovedError: the engine's memory did not take it.
        """
        ...

    def let_go(self, item: Item) -> None:
        """No call touches the item's record any more, and nobody looks at it. May be said more than once."""
        ...

    def borrow(self, slot: int, length: int) -> Buffer | None:
        """Memory for something else than a row, for whoever has `slot`; None while there is none."""
        ...

    def give_back(self) -> None:
        """No call touches what was borrowed last."""
        ...

    def close(self, untouched: bool) -> None:
        """Unmap what is ours; what may still be touched stays mapped until the process ends."""
        ...


def announce(backend: Backend, regions: tuple[Region, ...]) -> None:
    """Register regions with a backend that wants to know them: all, or, when it raises, none."""
    if not isinstance(backend, SupportsRegions):
        return
    known: list[Region] = []
    try:
        for region in regions:
            backend.register_region(region)
            known.append(region)
    except BaseException:
        take_back(backend, tuple(known))
        raise


def take_back(backend: Backend, regions: tuple[Region, ...]) -> None:
    """Unregister regions, whatever the backend does about one of them."""
    for region in regions:
        try:
            if isinstance(backend, SupportsRegions):
                backend.unregister_region(region)
        except BaseException:  # vendor code may raise anything
            logger.exception("unregistering %r failed", region)


def keep_mapped(region: Region) -> None:
    """Hold on to a region until the process ends."""
    _kept_regions.append(region)
