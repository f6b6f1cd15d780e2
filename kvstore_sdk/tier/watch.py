"""Jobs whose deadline has passed, and calls that are late: found by the engine's thread when it comes by, and is told that it is time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from kvstore_sdk.tier.breaker import Breakers
from kvstore_sdk.tier.crew import Crew
from kvstore_sdk.tier.desk import Desk
from kvstore_sdk.tier.lookups import LookupTable
from kvstore_sdk.tier.metrics import TierMetrics
from kvstore_sdk.tier.pipeline import Pipeline
from kvstore_sdk.tier.work import WorkQueue

__all__ = ["Watch"]

logger = logging.getLogger(__name__)


_LONGEST_S = 1.0
"""At least so often it is looked for what ends at no time that is known before."""


class Watch:
    """Used by one thread at a time, but for a thread of its own, which looks at the clock so that the engine's need not in each step.

    Attributes:
        at_s: Until then there is nothing to be found.
    """

    def __init__(
        self,
        *,
        name: str,
        table: LookupTable,
        desk: Desk,
        work: WorkQueue,
        crew: Crew,
        pipeline: Pipeline,
        breakers: Breakers,
        metrics: TierMetrics,
        hold_s: float,
        least_s: float,
        ring: Callable[[], None],
    ) -> None:
        """
        Args:
            name: For logs and the thread.
            table: Of the look-ups.
            desk: Of the jobs.
            work: Of the calls.
            crew: Who makes them.
            pipeline: What becomes of them.
            breakers: Of the tier.
            metrics: Of the tier.
            hold_s: How long a store is left alone whose calls do not return.
            least_s: What is new has at least so much time, and at most this is how long the thread sleeps: so nobody has to wake it.
            ring: Called when it is time to `look`, once for each time that it is.
        """
        self._name = name
        self._table = table
        self._desk = desk
        self._work = work
        self._crew = crew
        self._pipeline = pipeline
        self._breakers = breakers
        self._metrics = metrics
        self._hold_s = hold_s
        self._sleep_s = min(least_s, _LONGEST_S)
        self._ring = ring
        self._looked = threading.Event()
        self._rung = self._stopped = False
        self.at_s = 0.0
        self.threads: list[threading.Thread] = []
        """The one that looks at the clock, once it was started."""

    def start(self) -> bool:
        """Begin to look at the clock. Returns whether the system gave it a thread."""
        thread = threading.Thread(target=self._run, name=f"{self._name}-watch", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return False
        self.threads.append(thread)
        return True

    def stop(self) -> None:
        """End the thread, soon."""
        self._stopped = True
        self._looked.set()

    def by(self, deadline_s: float) -> None:
        """Something new has this deadline."""
        self.at_s = min(self.at_s, deadline_s)

    def look(self, now: float) -> None:
        """End what has no time left, and find what should have returned."""
        if self._rung:
            # Before all else: the thread may have rung for what was seen to already, and must not wait for it.
            self._rung = False
            self._looked.set()
        if now < self.at_s:
            return
        desk, work = self._desk, self._work
        expired = desk.expire(now)
        late = work.late(now)
        for batch in late:
            if batch.probe is not None:
                self._table.give_up(batch.probe, batch.keys)
            self._pipeline.verdict.late(batch)
        if late:
            # The threads of late calls may never come back. Others take their places, as far as the backend allows more calls.
            self._crew.grow()
        if expired or late:
            work.forget_ended()
        self._pipeline.check_quarantine()
        if work.is_stuck and self._breakers.hold(self._metrics, self._hold_s):
            logger.warning("%s: breakers opened: every thread is in a call that outlived its deadline", self._name)
        next_s = min(desk.next_deadline_s(), work.next_deadline_s(), now + _LONGEST_S)
        # Not sooner than a millisecond: a call that has no deadline yet gets one while we look away.
        self.at_s = max(next_s, now + 0.001)

    def _run(self) -> None:
        while not self._stopped:
            left_s = self.at_s - time.monotonic()
            if left_s > 0.0:
                self._looked.wait(min(left_s, self._sleep_s))
                continue
            self._rung = True
            self._ring()
            # An engine that does not come by is told once.
            self._looked.wait()
            if not self._stopped:
                self._looked.clear()
