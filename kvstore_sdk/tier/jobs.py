"""A job of the engine, and the exactly-once rule of its result."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from enum import Enum

from kvstore_sdk.tier.types import JobResult

__all__ = ["Item", "Job", "Kind", "Outcome"]


class Kind(Enum):
    LOAD = "load"
    STORE = "store"


class Outcome(Enum):
    """How one key of a job ended."""

    DONE = "done"
    FAILED = "failed"
    SKIPPED = "skipped"


class Item:
    """One key of a job, on its way."""

    __slots__ = ("attempts", "job", "key", "not_before_s", "outcome", "payload_bytes", "replace", "row")

    def __init__(self, job: Job, key: bytes, row: int, payload_bytes: int) -> None:
        self.job = job
        self.key = key
        self.row = row
        self.payload_bytes = payload_bytes
        self.replace = False
        self.attempts = 0
        self.not_before_s = 0.0
        self.outcome: Outcome | None = None


class Job:
    """What the engine submitted. Open until its result is made, which happens once.

    While it is open, and only then, the engine's rows may be touched: whoever copies holds `lock` and looks at `open` first; whoever
    closes the job holds it too.
    """

    def __init__(self, job_id: int, kind: Kind, namespace: str, deadline_s: float) -> None:
        self.job_id = job_id
        self.kind = kind
        self.namespace = namespace
        self.deadline_s = deadline_s
        self.submitted_s = time.monotonic()
        self.lock = threading.Lock()
        self.open = True
        self.items: list[Item] = []
        self.rows: Sequence[int] = ()
        self._left = 0
        self.moved_bytes = 0

    def seal(self) -> None:
        """All items are added: from now on they may be settled."""
        self._left = sum(item.outcome is None for item in self.items)

    def settle(self, item: Item, outcome: Outcome, moved_bytes: int = 0) -> JobResult | None:
        """Record how an item ended. Returns the job's result when that was the last one; ignored once the job is closed."""
        with self.lock:
            if not self.open or item.outcome is not None:
                return None
            item.outcome = outcome
            self.moved_bytes += moved_bytes
            self._left -= 1
            return None if self._left else self._close()

    def expire(self) -> JobResult | None:
        """Close the job as it is: what is not settled has failed. None when it is closed already."""
        with self.lock:
            if not self.open:
                return None
            for item in self.items:
                item.outcome = item.outcome or Outcome.FAILED
            return self._close()

    def _close(self) -> JobResult:
        self.open = False
        by: dict[Outcome, list[bytes]] = {outcome: [] for outcome in Outcome}
        for item in self.items:
            by[item.outcome or Outcome.FAILED].append(item.key)
        return JobResult(
            self.job_id,
            tuple(by[Outcome.DONE]),
            tuple(by[Outcome.FAILED]),
            tuple(by[Outcome.SKIPPED]),
            self.moved_bytes,
            time.monotonic() - self.submitted_s,
        )
