"""A queue of work that one thread asks, and what is put into it."""

from __future__ import annotations

import threading

from tier_bench import key

from kvstore_sdk.tier.batch import Batch
from kvstore_sdk.tier.jobs import Item, Job, Kind
from kvstore_sdk.tier.probe import Probe
from kvstore_sdk.tier.work import WorkQueue

__all__ = ["BYTES", "FOREVER_S", "NothingToDoError", "Queue", "all_items", "job", "probe_of"]


BYTES = 100


FOREVER_S = 1e9


class NothingToDoError(Exception):
    """`next` would wait."""


def all_items(job: Job, queued_store_bytes: int) -> list[Item]:
    return [Item(job, place, BYTES) for place in range(len(job.keys))] if job.open else []


def probe_of(*chunks: int) -> Probe:
    return Probe.of(*map(key, chunks), asked_s=0.0)


class Queue(WorkQueue):
    """A queue that is asked by one thread, which never waits."""

    def __init__(
        self, *, slots: int = 8, threads: int = 4, max_threads: int = 6, batch: int = 4, max_batch: int = 3, batch_bytes: int = 0
    ) -> None:
        super().__init__(
            slots=slots,
            slot_bytes=4096,
            threads=threads,
            max_threads=max_threads,
            batch=batch,
            max_batch=max_batch,
            batch_bytes=batch_bytes,
            unfold=all_items,
        )
        self.started = 0
        self.start_threads()

    def _wait(self, bell: threading.Lock, sleep_s: float) -> None:
        self._idle.remove(bell)
        raise NothingToDoError

    def start_threads(self) -> None:
        while self.wants_thread():
            self.started += 1

    def take(self) -> Batch | None:
        """The next batch; None when there is nothing to do."""
        try:
            return self.next()
        except NothingToDoError:
            return None


def job(number: int, kind: Kind, chunks: list[int], namespace: str = "n", *, timeout_s: float = FOREVER_S) -> Job:
    made = Job(number, kind, namespace, [key(chunk) for chunk in chunks], range(len(chunks)))
    made.deadline_s += timeout_s
    return made
