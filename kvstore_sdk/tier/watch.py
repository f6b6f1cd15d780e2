"""Jobs whose deadline has passed, and calls that are late: found by the engine's thread when it comes by."""

from __future__ import annotations

import logging

from kvstore_sdk.tier.breaker import Breakers
from kvstore_sdk.tier.crew import Crew
from kvstore_sdk.tier.desk import Desk
from kvstore_sdk.tier.lookups import LookupTable
from kvstore_sdk.tier.metrics import TierMetrics
from kvstore_sdk.tier.pipeline import Pipeline
from kvstore_sdk.tier.work import WorkQueue

__all__ = ["Watch"]

logger = logging.getLogger(__name__)


class Watch:
    """Used by one thread at a time.

    Attributes:
        at_s: Until then there is nothing to be found, so that a step pays one look at this.
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
    ) -> None:
        """`hold_s`: how long a store is left alone whose calls do not return."""
        self._name = name
        self._table = table
        self._desk = desk
        self._work = work
        self._crew = crew
        self._pipeline = pipeline
        self._breakers = breakers
        self._metrics = metrics
        self._hold_s = hold_s
        self.at_s = 0.0

    def by(self, deadline_s: float) -> None:
        """Something new has this deadline."""
        self.at_s = min(self.at_s, deadline_s)

    def look(self, now: float) -> None:
        """End what has no time left, and find what should have returned."""
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
        next_s = min(desk.next_deadline_s(), work.next_deadline_s(), now + 1.0)
        # Not sooner than a millisecond: a call that has no deadline yet gets one while we look away.
        self.at_s = max(next_s, now + 0.001)
