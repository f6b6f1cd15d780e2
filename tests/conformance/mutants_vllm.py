"""Backends that break the profile vllm, and pass the profile core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mutants_tier
from mutant import MemoryMutant

from kvstore_sdk.backend import Backend, Deadline, PutStatus

Proceed = Callable[[Sequence[Any]], Any]
LARGE_BYTES = 200_000


class DropsLargeRecordsWhenItCloses(MemoryMutant):
    """Uploads them behind the caller's back, and leaves what is not done when it closes: an engine that stops takes its KV along."""

    breaks = "KV-VLLM-01"

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self._pending: set[str] = set()

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if op == "close":
            for name in self._pending:
                self.inner._shelf.records.pop(name, None)
        results = proceed(items)
        if op == "put":
            stored = [put for put, result in zip(items, results, strict=True) if result.status is PutStatus.STORED]
            self._pending |= {put.name for put in stored if put.size_bytes > LARGE_BYTES}
        return results


class SkipsARecordThatBeginsAlike(mutants_tier.SkipsARecordThatBeginsAlike):
    """What it does to a Tier it does to an engine."""

    breaks = "KV-VLLM-02"


MUTANTS = (DropsLargeRecordsWhenItCloses, SkipsARecordThatBeginsAlike)
