"""Backends that break the profile performance: right, and too slow in some shape."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from mutant import MemoryMutant

from kvstore_sdk.backend import Deadline

Proceed = Callable[[Sequence[Any]], Any]


class ReadsTheRecordToSeeWhetherItExists(MemoryMutant):
    """As a client without a HEAD request does. The link moves 25 MB/s."""

    breaks = "KV-PERF-01"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "exists":
            time.sleep(sum(len(self.inner._shelf.records.get(name, b"")) for name in items) / 25e6)
        return proceed(items)


class ComparesEachItemWithAllOthers(MemoryMutant):
    """Looks for names that come twice, in the straightforward way."""

    breaks = "KV-PERF-02"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op in ("exists", "put", "get") and len(items) > 1:
            time.sleep(min(64, len(items)) ** 2 * 5e-5)
        return proceed(items)


class ScansAllNames(MemoryMutant):
    """Has a list and no index."""

    breaks = "KV-PERF-03"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "exists":
            time.sleep(len(items) * len(self.inner._shelf.records) * 20e-6)
        return proceed(items)


class WritesItsIndexWithEveryPut(MemoryMutant):
    """The whole of it, to be safe."""

    breaks = "KV-PERF-03"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "put":
            time.sleep(len(self.inner._shelf.records) * 10e-6)
        return proceed(items)


MUTANTS = (ReadsTheRecordToSeeWhetherItExists, ComparesEachItemWithAllOthers, ScansAllNames, WritesItsIndexWithEveryPut)
