"""What is tried again."""

from __future__ import annotations

from collections import deque
from typing import Any

from tier_bench import keys

from kvstore_sdk.backend import UnavailableError
from kvstore_sdk.tier import TierSettings
from kvstore_sdk.tier.batch import Batch
from kvstore_sdk.tier.breaker import Breaker, Breakers
from kvstore_sdk.tier.jobs import Item, Job, Kind
from kvstore_sdk.tier.metrics import TierMetrics
from kvstore_sdk.tier.verdict import Verdict


class Later:
    """In the place of a queue."""

    def __init__(self) -> None:
        self.due_s: deque[float] = deque()

    def again(self, item: Item, not_before_s: float) -> None:
        self.due_s.append(not_before_s)


def test_records_of_a_call_that_failed_come_back_in_one_call() -> None:
    """Each at a time of its own would be a call each. Those of other calls, and of other hosts, come at other times."""
    later: Any = Later()
    breakers = Breakers(*(Breaker(100, 1.0) for _ in range(3)))
    verdict = Verdict("t", later, TierSettings(retry_base_s=1.0), TierMetrics(), breakers)
    for _ in range(8):
        made = Job(1, Kind.LOAD, "n", keys(16), range(16))
        made.deadline_s += 1000.0
        batch = Batch(items=[Item(made, place, 100) for place in range(16)], kind=Kind.LOAD)
        assert all(verdict.retry(batch, item, UnavailableError("down")) for item in batch.items)
    due_s = [later.due_s[at] for at in range(0, 128, 16)]
    assert list(later.due_s) == [each for each in due_s for _ in range(16)]
    assert len(set(due_s)) == 8
