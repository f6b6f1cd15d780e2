"""Backends that break the profile core: the form of answers and batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from core_mutant import Proceed
from mutant import MemoryMutant

from kvstore_sdk.backend import (
    Deadline,
    GetResult,
    GetStatus,
    InvalidError,
    PutResult,
    PutStatus,
    UnavailableError,
)

# 2: the form of answers.


class AnswersInReverse(MemoryMutant):
    breaks = "KV-CORE-02"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        results = proceed(items)
        return results[::-1] if op == "exists" else results


class AnswersGetsInTheirOwnOrder(MemoryMutant):
    """As they are completed: what is there first."""

    breaks = "KV-CORE-02"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        results = proceed(items)
        return sorted(results, key=lambda result: result.status is GetStatus.MISSING) if op == "get" else results


class AnswersPutsInTheirOwnOrder(MemoryMutant):
    breaks = "KV-CORE-02"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        results = proceed(items)
        return sorted(results, key=lambda result: result.status is PutStatus.STORED) if op == "put" else results


class LosesTheLastResult(MemoryMutant):
    breaks = "KV-CORE-02"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        results = proceed(items)
        return results[:-1] if op == "get" and len(items) > 1 else results


class AnswersNumbers(MemoryMutant):
    """The answer of a database: 1 and 0."""

    breaks = "KV-CORE-02"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        results = proceed(items)
        return [int(result) for result in results] if op == "exists" else results


class AnswersAGenerator(MemoryMutant):
    breaks = "KV-CORE-02"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        results = proceed(items)
        return (result for result in results) if op == "put" else results


# 6: batches.


class TakesAHundredItems(MemoryMutant):
    """What its server takes, and not what it declares."""

    breaks = "KV-CORE-06"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        if len(items) > 100:
            raise InvalidError(f"{op}: {len(items)} items")
        return proceed(items)


class ForgetsWhatFollowsOnTheNextPage(MemoryMutant):
    """Asks a server that answers in pages, and looks at the first."""

    breaks = "KV-CORE-06"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        results = proceed(items)
        return results[:100] + [False] * (len(items) - 100) if op == "exists" and len(items) > 100 else results


# 17: items of one call.


class StopsAtTheFirstMiss(MemoryMutant):
    breaks = "KV-CORE-17"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        results = proceed(items)
        if op == "get":
            missing = next((index for index, result in enumerate(results) if result.status is GetStatus.MISSING), len(items))
            return results[: missing + 1] + [GetResult(GetStatus.MISSING)] * (len(items) - missing - 1)
        return results


class RaisesForAMissAmongOthers(MemoryMutant):
    breaks = "KV-CORE-17"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        results = proceed(items)
        if op == "exists" and len(set(results)) > 1:
            raise UnavailableError(f"exists of {len(items)} names: some of them are not there")
        return results


class StoresNothingBehindWhatIsThere(MemoryMutant):
    """A pipeline that stops at the first item that was not stored."""

    breaks = "KV-CORE-17"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        results: list[PutResult] = []
        if op != "put":
            return proceed(items)
        for put in items:
            stopped = any(result.status is PutStatus.EXISTS for result in results)
            skipped = PutResult.failed(UnavailableError(f"put {put.name}: the pipeline was stopped"))
            results += [skipped] if stopped else proceed([put])
        return results


class FailsTheCallForAnotherSize(MemoryMutant):
    breaks = "KV-CORE-17"

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Proceed) -> Any:
        results = proceed(items)
        if op == "get" and len(items) > 1 and any(result.status is GetStatus.WRONG_SIZE for result in results):
            return [GetResult.failed(UnavailableError("get: short read"))] * len(items)
        return results


MUTANTS = (
    AnswersInReverse,
    AnswersGetsInTheirOwnOrder,
    AnswersPutsInTheirOwnOrder,
    LosesTheLastResult,
    AnswersNumbers,
    AnswersAGenerator,
    TakesAHundredItems,
    ForgetsWhatFollowsOnTheNextPage,
    StopsAtTheFirstMiss,
    RaisesForAMissAmongOthers,
    StoresNothingBehindWhatIsThere,
    FailsTheCallForAnotherSize,
)
