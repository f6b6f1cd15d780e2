"""A job of the engine, and the exactly-once rule of its result."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum
from typing import NamedTuple

from kvstore_sdk.tier.types import JobResult

__all__ = ["Ending", "Item", "Job", "Kind", "Outcome"]


class Kind(Enum):
    LOAD = "load"
    STORE = "store"


class Outcome(Enum):
    """How one key of a job ended."""

    DONE = "done"
    FAILED = "failed"
    SKIPPED = "skipped"


class Item:
    """One key of a job that a backend is needed for.

    Attributes:
        place: Of the key in its job.
        row: Of the engine's memory.
        replace: The record that is there is no good.
        trial: It was let through an open breaker, to find out whether the store works again.
        attempts: Calls that it was in before, and failed.
    """

    __slots__ = ("attempts", "job", "key", "payload_bytes", "place", "replace", "row", "trial")

    def __init__(self, job: Job, place: int, payload_bytes: int, *, replace: bool = False, trial: bool = False) -> None:
        self.job = job
        self.place = place
        self.key = job.keys[place]
        self.row = job.rows[place]
        self.payload_bytes = payload_bytes
        self.replace = replace
        self.trial = trial
        self.attempts = 0

    def ended(self, outcome: Outcome, result: str, moved_bytes: int = 0) -> Ending:
        return Ending(self.job, self.place, outcome, result, moved_bytes)


class Job:
    """What the engine submitted. Open until its result is made, which happens once. Thread-safe.

    Only while it is open may a copy touch the engine's rows, or a call begin to: whoever copies holds `lock` and looks at `open` first,
    whoever makes a call asks `touch`; whoever closes the job holds `lock` too.

    Attributes:
        refused: Places of keys whose rows it may not use.
        room: How many of its keys there is room for; the rest is shed.
        claimed: The rows that it keeps others out of.
        touched: Places whose rows a call may touch. Once the job is closed it only shrinks.
        result: How it ended, from then on.
    """

    __slots__ = (
        *("claimed", "deadline_s", "job_id", "keys", "kind", "lock", "namespace", "open", "refused", "result", "room", "rows"),
        *("submitted_s", "timeout_s", "touched", "_left", "_moved_bytes", "_outcomes", "_reported"),
    )

    result: JobResult

    def __init__(self, job_id: int, kind: Kind, namespace: str, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        self.job_id = job_id
        self.kind = kind
        self.namespace = namespace
        # Copied: the engine may go on with its lists.
        self.keys = tuple(keys)
        self.rows = tuple(rows)
        self.refused: Collection[int] = ()
        self.room = len(keys)
        self.claimed: tuple[int, ...] = ()
        self.touched: set[int] = set()
        self.submitted_s = time.monotonic()
        self.deadline_s = self.submitted_s
        self.timeout_s = 0.0
        self.lock = threading.Lock()
        self.open = True
        self._outcomes: list[Outcome | None] = [None] * len(self.keys)
        self._left = len(self.keys)
        self._moved_bytes = 0
        self._reported = False

    def settle(self, endings: Iterable[Ending]) -> list[Ending]:
        """Record how keys of this job ended. Returns those that count, which they do not when the key or the job had ended before."""
        with self.lock:
            if not self.open:
                return []
            outcomes = self._outcomes
            counted = []
            for ending in endings:
                if outcomes[ending.place] is None:
                    outcomes[ending.place] = ending.outcome
                    self._moved_bytes += ending.moved_bytes
                    counted.append(ending)
            self._left -= len(counted)
            return counted

    def close(self, give: Callable[[Job], None]) -> None:
        """Close the job if all its keys have ended. `give` gets it with its result, before anybody can see that it is closed."""
        with self.lock:
            if self.open and not self._left:
                self._close(give)

    def end(self, outcome: Outcome, give: Callable[[Job], None]) -> list[bytes]:
        """Close the job: what is not settled ends like this. `give` gets it with its result. Returns the keys that were not settled."""
        with self.lock:
            if not self.open:
                return []
            rest = [key for key, found in zip(self.keys, self._outcomes, strict=True) if found is None]
            self._outcomes = [found or outcome for found in self._outcomes]
            self._close(give)
            return rest

    def touch(self, place: int) -> bool:
        """A call is about to touch the row of a key. False: the job is closed, and it must not."""
        with self.lock:
            if self.open:
                self.touched.add(place)
            return self.open

    def let_go(self, place: int) -> bool:
        """No call touches this row any more. Returns whether it was reported as held, which is so once for a row that was."""
        with self.lock:
            if place not in self.touched:
                return False
            self.touched.discard(place)
            return self._reported

    def report(self) -> tuple[int, ...]:
        """The result is given to the engine now. Returns the rows that are held."""
        with self.lock:
            self._reported = True
            return tuple(self.rows[place] for place in sorted(self.touched))

    def _close(self, give: Callable[[Job], None]) -> None:
        elapsed_s = time.monotonic() - self.submitted_s
        whole = self._outcomes.count(Outcome.DONE) == len(self.keys)
        done = self.keys if whole else self._ended_as(Outcome.DONE)
        failed = () if whole else self._ended_as(Outcome.FAILED)
        skipped = () if whole else self._ended_as(Outcome.SKIPPED)
        self.result = JobResult(self.job_id, done, failed, skipped, self._moved_bytes, elapsed_s)
        give(self)
        self.open = False

    def _ended_as(self, outcome: Outcome) -> tuple[bytes, ...]:
        return tuple(key for key, found in zip(self.keys, self._outcomes, strict=True) if found is outcome)


class Ending(NamedTuple):
    """How one key of a job ended. `result` is the label under which its chunk is counted."""

    job: Job
    place: int
    outcome: Outcome
    result: str
    moved_bytes: int = 0
