"""A job of the engine, and the exactly-once rule of its result."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
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
    """One key of a job that goes through a backend: place in the job, key, row, and how it is done."""

    __slots__ = ("attempts", "job", "key", "payload_bytes", "place", "replace", "row")

    def __init__(self, job: Job, place: int, payload_bytes: int, *, replace: bool = False) -> None:
        self.job = job
        self.place = place
        self.key = job.keys[place]
        self.row = job.rows[place]
        self.payload_bytes = payload_bytes
        self.replace = replace
        self.attempts = 0


class Job:
    """What the engine submitted. Open until its result is made, which happens once.

    While it is open, and only then, the engine's rows may be touched: whoever copies holds `lock` and looks at `open` first; whoever
    closes the job holds it too.
    """

    def __init__(self, job_id: int, kind: Kind, namespace: str, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        self.job_id = job_id
        self.kind = kind
        self.namespace = namespace
        self.keys = keys
        self.rows = rows
        self.refused: Collection[int] = ()
        """Places of keys whose row another open job uses."""
        self.submitted_s = time.monotonic()
        self.deadline_s = self.submitted_s
        self.lock = threading.Lock()
        self.open = True
        self.fresh: list[bytes] = []
        """Keys that went to the backend through this job, as far as it was open."""
        self._outcomes: list[Outcome | None] = [None] * len(keys)
        self._left = len(keys)
        self._moved_bytes = 0

    def settle(self, place: int, outcome: Outcome, moved_bytes: int = 0) -> JobResult | None:
        """Record how a key ended. Returns the job's result when that was the last one; ignored once the job is closed."""
        with self.lock:
            if not self.open or self._outcomes[place] is not None:
                return None
            self._outcomes[place] = outcome
            self._moved_bytes += moved_bytes
            if moved_bytes:
                self.fresh.append(self.keys[place])
            self._left -= 1
            return None if self._left else self._close()

    def settle_rest(self, outcome: Outcome) -> tuple[JobResult, list[bytes]] | None:
        """Close the job: what is not settled ends like this. Returns the result and those keys; None when it is closed already."""
        with self.lock:
            if not self.open:
                return None
            rest = [key for key, found in zip(self.keys, self._outcomes, strict=True) if found is None]
            self._outcomes = [found or outcome for found in self._outcomes]
            return self._close(), rest

    def _close(self) -> JobResult:
        self.open = False
        done, failed, skipped = map(self._ended_as, (Outcome.DONE, Outcome.FAILED, Outcome.SKIPPED))
        return JobResult(self.job_id, done, failed, skipped, self._moved_bytes, time.monotonic() - self.submitted_s)

    def _ended_as(self, outcome: Outcome) -> tuple[bytes, ...]:
        return tuple(key for key, found in zip(self.keys, self._outcomes, strict=True) if found is outcome)
