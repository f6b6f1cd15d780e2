"""What follows from a call's failure: trying again, and what its breaker hears."""

from __future__ import annotations

import logging
import random
import time

from kvstore_sdk.backend import Advice, BackendError, ThrottledError, TimedOutError
from kvstore_sdk.errors import text_of
from kvstore_sdk.tier.batch import Batch
from kvstore_sdk.tier.breaker import Breaker, Breakers
from kvstore_sdk.tier.jobs import Item, Kind
from kvstore_sdk.tier.metrics import TierMetrics
from kvstore_sdk.tier.settings import TierSettings
from kvstore_sdk.tier.work import WorkQueue

__all__ = ["Verdict"]

logger = logging.getLogger(__name__)


class Verdict:
    """Thread-safe."""

    def __init__(self, name: str, work: WorkQueue, settings: TierSettings, metrics: TierMetrics, breakers: Breakers) -> None:
        self._name = name
        self._work = work
        self._settings = settings
        self._metrics = metrics
        self._breakers = breakers
        # Only for the jitter of retries; seeded from the system.
        self._random = random.Random()

    def retry(self, batch: Batch, item: Item, error: BackendError | None) -> bool:
        """Queue an item of a batch again if that may help and there is time. Returns whether it did. Those of one batch stay together."""
        if error is not None and error.advice is not Advice.RETRY:
            return False
        load = item.job.kind is Kind.LOAD
        breaker = self._breakers.get if load else self._breakers.put
        if item.attempts >= self._settings.retries or not item.job.open or breaker.is_open:
            return False
        # Full jitter around a doubling mean: repeats of many clients spread out.
        if batch.failed is None:
            batch.failed = (time.monotonic(), self._random.uniform(0, 2))
        failed_s, jitter = batch.failed
        wait_s = jitter * self._settings.retry_base_s * 2**item.attempts
        if isinstance(error, ThrottledError) and isinstance(error.retry_after_s, (int, float)):
            wait_s = max(wait_s, error.retry_after_s)
        due_s = failed_s + wait_s
        if not due_s < item.job.deadline_s:
            return False
        item.attempts += 1
        self._metrics.count("retries", "get" if load else "put")
        self._work.again(item, due_s)
        return True

    def late(self, batch: Batch) -> None:
        """The call of a batch outlived its deadline: that is a failure, whatever comes of it."""
        self._metrics.count("abandoned_calls", batch.operation)
        if batch.operation == "settle":
            return
        breakers = self._breakers
        breaker = breakers.exists if batch.probe is not None else breakers.get if batch.kind is Kind.LOAD else breakers.put
        if breaker.failed():
            side = "write" if breaker is breakers.put else "read"
            self._metrics.count("breaker_opened", side)
            logger.warning("%s: %s breaker opened: calls outlive their deadlines", self._name, side)

    def judge(self, batch: Batch, breaker: Breaker, side: str, failed: BackendError | None) -> None:
        """Tell the breaker how the call went: one answer that is no failure shows that the store works."""
        if batch.probe is not None and batch.probe.trial:
            batch.probe.answered = failed is None
        if batch.abandoned:
            # The call was late, and was counted as a failure when that was found.
            return
        if batch.hint is not None:
            # Whom a request names may be there or not, which is no news of the store.
            return
        if failed is None:
            breaker.succeeded()
        elif isinstance(failed, TimedOutError) and batch.deadline_s - batch.started_s < batch.timeout_s / 4:
            # It was begun with next to no time left. That it failed says that there is much to do, not that the store does not work.
            return
        elif breaker.failed():
            self._metrics.count("breaker_opened", side)
            logger.warning("%s: %s breaker opened after failures in a row, the last: %s", self._name, side, text_of(failed))
