"""Backends that break the profile core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mutant import MemoryMutant

from kvstore_sdk.backend import Deadline, GetStatus, Mode, Region

Proceed = Callable[[Sequence[Any]], Any]


class FlipsABitOfLargeRecords(MemoryMutant):
    breaks = "KV-CORE-01"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        results = proceed(items)
        if op == "get":
            for get, result in zip(items, results, strict=True):
                if result.status is GetStatus.FOUND and get.size_bytes > 65536:
                    get.into[-1].view[-1] ^= 1
        return results


class AnswersInReverse(MemoryMutant):
    breaks = "KV-CORE-02"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        results = proceed(items)
        return results[::-1] if op == "exists" else results


class LosesTheLastResult(MemoryMutant):
    breaks = "KV-CORE-02"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        results = proceed(items)
        return results[:-1] if op == "get" and len(items) > 1 else results


class KeepsTheOldTail(MemoryMutant):
    """A shorter record leaves the end of the longer one behind it."""

    breaks = "KV-CORE-12"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op != "put":
            return proceed(items)
        results = []
        for put in items:
            record = b"".join(part.view for part in put.parts)
            old = self.inner._shelf.records.get(put.name, b"")
            if put.mode is Mode.REPLACE and len(old) > len(record):
                region = Region(len(old))
                whole = region.buffer(0, len(old))
                whole.view[:] = record + old[len(record) :]
                put = replace(put, parts=(whole,))
            results += proceed([put])
        return results


MUTANTS = (FlipsABitOfLargeRecords, AnswersInReverse, LosesTheLastResult, KeepsTheOldTail)
