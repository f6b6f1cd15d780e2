"""Backends that break the profile regions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mutant import Mutant
from references import Mapped, MappedPart, Regions

from kvstore_sdk.backend import Backend, Buffer, Get, Put, Region
from kvstore_sdk_backends.memory import open_memory

__all__ = ["MUTANTS"]


class RegionsMutant(Regions, Mutant):
    """Over the backend that is strict about its memory: the fault is in how it keeps the regions."""

    @staticmethod
    def good(location: str) -> Backend:
        return open_memory(location.strip("/"))


class TakesTheRegionOfTheFirstItemForAll(RegionsMutant):
    """Makes one request of a batch, and puts one region into it."""

    breaks = "KV-REG-01"

    def around(self, op: str, items: Sequence[Any], deadline: Any, proceed: Any) -> Any:
        if op in ("put", "get"):
            self.first = items[0]
        return super().around(op, items, deadline, proceed)

    def find(self, item: Put | Get, part: Buffer) -> Any:
        if item is self.first:
            return super().find(item, part)
        region = (self.first.parts if isinstance(self.first, Put) else self.first.into)[0].region
        return MappedPart(self.known[region.id], part.offset, part.length)


class KeepsThreeRegions(RegionsMutant):
    """Has a table of so many, as its author saw no more."""

    breaks = "KV-REG-01"

    def register_region(self, region: Region) -> None:
        super().register_region(region)
        while len(self.known) > 3:
            del self.known[min(self.known)]


class RaisesForARegionThatIsGone(RegionsMutant):
    breaks = "KV-REG-02"

    def unregister_region(self, region: Region) -> None:
        del self.known[region.id]


class GivesUpAllThatWereAnnouncedBefore(RegionsMutant):
    breaks = "KV-REG-02"

    def unregister_region(self, region: Region) -> None:
        self.known = {id_: mapped for id_, mapped in self.known.items() if id_ > region.id}


class FindsRegionsByTheirAddress(RegionsMutant):
    """And keeps a registration, since it was expensive, for when the address is used again."""

    breaks = "KV-REG-03"

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.by_address: dict[int, Mapped] = {}

    def register_region(self, region: Region) -> None:
        super().register_region(region)
        kept = self.by_address.get(region.address)
        if kept is None or len(kept.view) < region.size_bytes:
            self.by_address[region.address] = self.known[region.id]

    def find(self, item: Put | Get, part: Buffer) -> Any:
        super().find(item, part)
        return MappedPart(self.by_address[part.region.address], part.offset, part.length)


MUTANTS = (
    TakesTheRegionOfTheFirstItemForAll,
    KeepsThreeRegions,
    RaisesForARegionThatIsGone,
    GivesUpAllThatWereAnnouncedBefore,
    FindsRegionsByTheirAddress,
)
