"""Backends that break the profile core: what buffers may be and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from core_mutant import CoreMutant
from mutant import flipped

from kvstore_sdk.backend import (
    Deadline,
    Get,
    GetResult,
    GetStatus,
    InvalidError,
    Mode,
    Put,
    PutResult,
    PutStatus,
)

# 7 and 8: buffers.


class SortsParts(CoreMutant):
    """By address, for its vectored write."""

    breaks = "KV-CORE-07"

    def one_put(self, put: Put, proceed: Callable[[Put], PutResult]) -> PutResult:
        return proceed(replace(put, parts=sorted(put.parts, key=lambda part: (part.region.id, part.offset))))


class FillsBuffersInReverse(CoreMutant):
    breaks = "KV-CORE-07"

    def one_get(self, get: Get, proceed: Callable[[Get], GetResult]) -> GetResult:
        ordered = sorted(get.into, key=lambda part: (part.region.id, part.offset))
        return proceed(replace(get, into=ordered))


class WritesTwoPartsAtMost(CoreMutant):
    breaks = "KV-CORE-07"

    def one_put(self, put: Put, proceed: Callable[[Put], PutResult]) -> PutResult:
        return proceed(put if len(put.parts) < 3 else replace(put, parts=put.parts[:2]))


class WantsSectors(CoreMutant):
    """O_DIRECT, and align_bytes forgotten."""

    breaks = "KV-CORE-08"

    def one_put(self, put: Put, proceed: Callable[[Put], PutResult]) -> PutResult:
        if any(part.offset % 512 for part in put.parts):
            return PutResult.failed(InvalidError(f"put {put.name}: Invalid argument"))
        return proceed(put)


class WantsPagesToReadInto(CoreMutant):
    breaks = "KV-CORE-08"

    def one_get(self, get: Get, proceed: Callable[[Get], GetResult]) -> GetResult:
        if any(part.offset % 4096 for part in get.into):
            return GetResult.failed(InvalidError(f"get {get.name}: Bad address"))
        return proceed(get)


class KnowsOneRegion(CoreMutant):
    """Takes the offsets of all parts in the region of the first."""

    breaks = "KV-CORE-08"

    def one_put(self, put: Put, proceed: Callable[[Put], PutResult]) -> PutResult:
        region = put.parts[0].region
        return proceed(replace(put, parts=[region.buffer(part.offset, part.length) for part in put.parts]))


# 14 to 16: memory.


class EncryptsInPlace(CoreMutant):
    breaks = "KV-CORE-14"

    def one_put(self, put: Put, proceed: Callable[[Put], PutResult]) -> PutResult:
        result = proceed(put)
        put.parts[-1].view[:] = flipped(bytes(put.parts[-1].view))
        return result


class PadsInPlace(CoreMutant):
    """Fills the rest of the page behind the buffers with zeros, to write whole pages."""

    breaks = "KV-CORE-14"

    def one_put(self, put: Put, proceed: Callable[[Put], PutResult]) -> PutResult:
        last = put.parts[-1]
        end = last.offset + last.length
        put.parts[-1].region.view[end : end + 16] = bytes(len(last.region.view[end : end + 16]))
        return proceed(put)


class ReadsWholePages(CoreMutant):
    breaks = "KV-CORE-15"

    def one_get(self, get: Get, proceed: Callable[[Get], GetResult]) -> GetResult:
        result = proceed(get)
        last = get.into[-1]
        end = last.offset + last.length
        if result.status is GetStatus.FOUND:
            last.region.view[end : end + 16] = bytes(len(last.region.view[end : end + 16]))
        return result


class ReadsFirstAndMeasuresAfterwards(CoreMutant):
    """A record that is longer than the buffers is written over what follows them."""

    breaks = "KV-CORE-15"

    def one_get(self, get: Get, proceed: Callable[[Get], GetResult]) -> GetResult:
        result = proceed(get)
        if result.status is GetStatus.WRONG_SIZE and (result.size_bytes or 0) > get.size_bytes:
            last = get.into[-1]
            end = last.offset + last.length
            last.region.view[end : end + 1] = b"\0"
        return result


class CopiesWhenItIsRead(CoreMutant):
    """Keeps the buffers of large records, and takes the bytes when somebody asks for them."""

    breaks = "KV-CORE-16"

    def one_put(self, put: Put, proceed: Callable[[Put], PutResult]) -> PutResult:
        result = proceed(put)
        if result.status is PutStatus.STORED:
            self.__dict__.setdefault("kept", {})[put.name] = put
        return result

    def one_get(self, get: Get, proceed: Callable[[Get], GetResult]) -> GetResult:
        put = self.__dict__.get("kept", {}).pop(get.name, None)
        if put is not None and self.record(get.name) is not None:
            self.inner.put([replace(put, mode=Mode.REPLACE)], Deadline.after(1.0))
        return proceed(get)


MUTANTS = (
    SortsParts,
    FillsBuffersInReverse,
    WritesTwoPartsAtMost,
    WantsSectors,
    WantsPagesToReadInto,
    KnowsOneRegion,
    EncryptsInPlace,
    PadsInPlace,
    ReadsWholePages,
    ReadsFirstAndMeasuresAfterwards,
    CopiesWhenItIsRead,
)
