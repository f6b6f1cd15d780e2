"""What becomes of a batch: its calls, and what follows from their answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from kvstore_sdk.backend import Deadline, Failure, Ticket
from kvstore_sdk.keys import ChunkKey
from kvstore_sdk.tier.batch import Batch, Doubt
from kvstore_sdk.tier.breaker import Breakers
from kvstore_sdk.tier.calls import Asking, Calls
from kvstore_sdk.tier.floor import Floor
from kvstore_sdk.tier.hints import call_s, patience_s
from kvstore_sdk.tier.jobs import Ending, Kind
from kvstore_sdk.tier.loads import Loads
from kvstore_sdk.tier.metrics import TierMetrics
from kvstore_sdk.tier.news import Answered, News
from kvstore_sdk.tier.probe import Probe
from kvstore_sdk.tier.records import Records
from kvstore_sdk.tier.settings import TierSettings
from kvstore_sdk.tier.stores import Stores
from kvstore_sdk.tier.verdict import Verdict
from kvstore_sdk.tier.work import WorkQueue

__all__ = ["Pipeline"]

logger = logging.getLogger(__name__)

_SETTLE_FOR_S = 0.05
"""Longest that a thread waits for transfers in doubt before it looks for other work: it may be the only thread."""


class Pipeline:
    """Runs batches. What the engine's side has to know goes out through `tell`, in the order it became true, and through `settle`.

    A key's news are told before its item is settled, so that whoever hears of the end of a job can hear of its keys.

    Attributes:
        verdict: What calls that failed, or are late, mean for the breakers.
    """

    def __init__(
        self,
        *,
        name: str,
        calls: Calls,
        work: WorkQueue,
        records: Records,
        settings: TierSettings,
        metrics: TierMetrics,
        breakers: Breakers,
        floor: Floor,
        tell: Callable[[News], None],
        settle: Callable[[Iterable[Ending]], None],
        first_store: Callable[[Batch, int], Asking[Ticket | None]],
    ) -> None:
        self._name = name
        self._calls = calls
        self._work = work
        self._records = records
        self._settings = settings
        self._metrics = metrics
        self._breakers = breakers
        self._tell = tell
        self.verdict = Verdict(name, work, settings, metrics, breakers)
        self._loads = Loads(
            name=name,
            calls=calls,
            records=records,
            settings=settings,
            metrics=metrics,
            breakers=breakers,
            floor=floor,
            verdict=self.verdict,
            tell=tell,
            settle=settle,
        )
        self._stores = Stores(
            calls=calls,
            records=records,
            metrics=metrics,
            breakers=breakers,
            verdict=self.verdict,
            tell=tell,
            settle=settle,
            first_store=first_store,
        )

    def run(self, batch: Batch) -> Asking[None]:
        """Do a batch to its end. Never raises for what a backend or the engine's memory does."""
        doubts: list[Doubt] = []
        over: list[Doubt] = []
        try:
            if batch.probe is not None:
                yield from self._probe(batch, batch.probe)
            elif batch.doubts:
                over = yield from self._ask_about(batch)
            elif batch.kind is Kind.LOAD:
                yield from self._loads.run(batch, doubts)
            else:
                yield from self._stores.run(batch, doubts)
        except BaseException:
            in_doubt = {doubt.item for doubt in doubts}
            for item in batch.items:
                if item not in in_doubt:
                    self._records.let_go(item)
            raise
        finally:
            self._work.finish(batch, doubts, over)
        if doubts:
            self.check_quarantine()

    def check_quarantine(self) -> None:
        """Leave the store alone while calls that outlived their deadlines hold too much memory."""
        held = self._work.quarantined_bytes
        if held and held >= self._settings.max_quarantined_bytes and self._breakers.hold(self._metrics, self._settings.breaker_probe_s):
            logger.warning("%s: breakers opened: calls that outlived their deadlines hold %d bytes", self._name, held)

    def _ask_about(self, batch: Batch) -> Asking[list[Doubt]]:
        batch.deadline_s = time.monotonic() + _SETTLE_FOR_S
        done = yield from self._calls.settle([doubt.ticket for doubt in batch.doubts], Deadline(batch.deadline_s))
        over = [doubt for doubt, settled in zip(batch.doubts, done, strict=True) if settled]
        for doubt in over:
            if doubt.item is not None:
                self._records.let_go(doubt.item)
            else:
                self._records.give_back()
        return over

    def _probe(self, batch: Batch, probe: Probe) -> Asking[None]:
        breaker = self._breakers.exists
        if breaker.is_open and batch.hint is None and not probe.trial:
            # Asked before the breaker opened: nobody should wait for the same failure once more.
            self._tell(Answered(probe, unknown=batch.keys))
            return
        # From when the first of them was asked for; a little time even if that was long ago.
        batch.timeout_s = patience_s(self._settings.lookup_timeout_s, batch.hint)
        batch.deadline_s = max(probe.asked_s + call_s(batch.timeout_s), time.monotonic() + 0.01)
        names = [ChunkKey.from_engine(batch.namespace, key).name for key in batch.keys]
        if batch.hint is not None:
            self._calls.hint(names, batch.hint)
        answers: list[bool | Failure] = yield self._calls.exists(names, Deadline(batch.deadline_s))
        failures = [answer.error for answer in answers if isinstance(answer, Failure)]
        # Sorted here, so that the engine's thread takes them in as a whole.
        said = list(zip(batch.keys, answers, strict=True))
        self._tell(
            Answered(
                probe,
                [key for key, answer in said if answer is True],
                [key for key, answer in said if answer is False],
                [key for key, answer in said if isinstance(answer, Failure)] if failures else (),
            )
        )
        if probe.request_id is not None or probe.others:
            self._metrics.observe("lookup_seconds", time.monotonic() - probe.asked_s, times=len(batch.keys))
        self.verdict.judge(batch, breaker, "read", failures[-1] if len(failures) == len(answers) else None)
