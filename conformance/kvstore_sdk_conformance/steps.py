"""What checks of several profiles do, beyond the calls of a `View`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvstore_sdk.backend import Advice, DeleteStatus, Failure, GetStatus, PutResult, PutStatus
from kvstore_sdk_conformance.data import Record, which
from kvstore_sdk_conformance.failure import ConformanceFailure, require, show_difference
from kvstore_sdk_conformance.view import View

__all__ = ["create", "is_lost", "look", "remove", "until"]

TRIES = 5
_PAUSE_S = 0.02
_LOST_PUTS = (PutStatus.UNKNOWN, PutStatus.IN_DOUBT, PutStatus.TIMED_OUT)
_LOST_GETS = (GetStatus.IN_DOUBT, GetStatus.TIMED_OUT)


def is_lost(result: PutResult) -> bool:
    """Whether the answer to a put says neither that it is stored nor that it is not."""
    return result.status in _LOST_PUTS


def create(view: View, names: Sequence[str], size: int, tag: int, batch: int) -> list[PutResult]:
    """Put `Record(size, tag)` under each name, in calls of `batch`. What is lost is put again, as the SDK does; what fails is not."""
    results: dict[str, PutResult] = {}
    for start in range(0, len(names), batch):
        left = list(names[start : start + batch])
        for _ in range(TRIES):
            results |= zip(left, view.put_all([(name, Record(size, tag)) for name in left]), strict=True)
            left = [name for name in left if is_lost(results[name])]
            if not left:
                break
    return [results[name] for name in names]


def remove(view: View, *names: str) -> list[DeleteStatus | Failure]:
    """Delete each. What may be tried again is, and is then DELETED also if the lost call had removed it."""
    found: dict[str, DeleteStatus | Failure] = {}
    for batch in view.batches(names):
        left = list(batch)
        for turn in range(TRIES):
            for name, answer in zip(left, view.delete(*left), strict=True):
                found[name] = DeleteStatus.DELETED if turn and answer is DeleteStatus.ABSENT else answer
            left = [name for name in left if _may_try_again(found[name])]
            if not left:
                break
    return [found[name] for name in names]


def look(view: View, name: str, records: Sequence[Record], *, breaks: str | None = None, note: str = "") -> Record | None:
    """Which of these records is there, whole; None: there is none of that name.

    Raises:
        ConformanceFailure: something else is there, or `exists` says that a record is there and `get` does not find it.
    """
    [there] = view.exists(name)
    size = records[0].size
    tried: set[int] = set()
    for _ in range(TRIES + len(records)):
        got = view.get(name, size)
        result = got.result
        if result.status is GetStatus.FOUND:
            tag = which(got.bytes, [record.tag for record in records if record.size == size])
            if tag is None:
                wanted = next(record for record in records if record.size == size)
                raise ConformanceFailure(f"{name} whole", show_difference(wanted.bytes, got.bytes), note=note, breaks=breaks)
            return Record(size, tag)
        if result.status is GetStatus.MISSING:
            seen_late = not view.capabilities.read_after_write
            require(there is not True or seen_late, f"FOUND for {name}, of which exists said True", result, note=note, breaks=breaks)
            return None
        tried.add(size)
        other = next((record.size for record in records if record.size == result.size_bytes and record.size not in tried), None)
        again = result.status in _LOST_GETS or (result.error is not None and result.error.advice is Advice.RETRY)
        sizes = " or ".join(str(size) for size in sorted({record.size for record in records}))
        require(other is not None or again, f"{name} whole ({sizes} bytes), or MISSING", result, note=note, breaks=breaks)
        size = other or size
    raise ConformanceFailure(f"an answer for {name} after {TRIES} tries", "none", note=note, breaks="KV-CORE-01")


def until(holds: Callable[[], bool], limit_s: float) -> bool:
    """Whether it holds, or comes to hold within the time."""
    end_s = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() >= end_s:
            return False
        time.sleep(_PAUSE_S)
    return True


def _may_try_again(answer: DeleteStatus | Failure) -> bool:
    return isinstance(answer, Failure) and answer.error.advice is Advice.RETRY
