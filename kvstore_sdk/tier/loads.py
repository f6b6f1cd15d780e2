"""A batch of loads: get, verify, read again what is bad, deliver."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from kvstore_sdk.backend import BackendError, Deadline, DeleteStatus, Failure, Get, GetResult, GetStatus, InvalidError
from kvstore_sdk.format import Flaw
from kvstore_sdk.keys import ChunkKey
from kvstore_sdk.tier.batch import Batch, Doubt
from kvstore_sdk.tier.breaker import Breakers
from kvstore_sdk.tier.calls import Asking, Calls
from kvstore_sdk.tier.floor import Floor
from kvstore_sdk.tier.jobs import Ending, Item, Outcome
from kvstore_sdk.tier.metrics import TierMetrics
from kvstore_sdk.tier.news import Lost, News
from kvstore_sdk.tier.records import NotMovedError, Records
from kvstore_sdk.tier.settings import TierSettings
from kvstore_sdk.tier.trust import Trust
from kvstore_sdk.tier.verdict import Verdict

__all__ = ["Loads"]

logger = logging.getLogger(__name__)

_SUSPECT_MEMORY_S = 60.0
"""How long a process that fails to verify most of what it reads leaves the store alone: long enough to be seen, then it tries again."""
_REMOVE_FOR_S = 1.0


class _Bad:
    """A record that failed verification, or, without a flaw, that cannot be read at all."""

    __slots__ = ("flaw",)

    def __init__(self, flaw: Flaw | None) -> None:
        self.flaw = flaw


class Loads:
    """What is delivered was verified. A record that is bad twice is removed, or replaced by the next store, if this host can be trusted."""

    def __init__(
        self,
        *,
        name: str,
        calls: Calls,
        records: Records,
        settings: TierSettings,
        metrics: TierMetrics,
        breakers: Breakers,
        floor: Floor,
        verdict: Verdict,
        tell: Callable[[News], None],
        settle: Callable[[Iterable[Ending]], None],
    ) -> None:
        self._name = name
        self._calls = calls
        self._records = records
        self._settings = settings
        self._metrics = metrics
        self._breakers = breakers
        self._floor = floor
        self._verdict = verdict
        self._tell = tell
        self._settle = settle
        self._trust = Trust()

    def run(self, batch: Batch, doubts: list[Doubt]) -> Asking[None]:
        """Do a batch to its end. Adds to `doubts` what the backend may still write into."""
        breaker = self._breakers.get
        items: list[tuple[Item, int, ChunkKey, Get]] = []
        for item, slot in zip(batch.items, batch.slots, strict=True):
            if breaker.is_open and not item.trial:
                self._fail(batch, item, "refused")
                continue
            try:
                buffer = self._records.buffer(item, slot)
            except NotMovedError as error:
                self._fail(batch, item, error.result)
                continue
            if buffer is not None:
                key = ChunkKey.from_engine(batch.namespace, item.key)
                items.append((item, slot, key, Get(key.name, (buffer,))))
        if not items:
            return
        batch.timeout_s = min(item.job.timeout_s for item, _, _, _ in items)
        batch.deadline_s = min(item.job.deadline_s for item, _, _, _ in items)
        deadline = Deadline(batch.deadline_s)
        began_s = time.monotonic()
        answers: list[GetResult] = yield self._calls.get([get for _, _, _, get in items], deadline)
        # All of them first: whatever happens later, what is in doubt stays out of use.
        for (item, slot, _, _), answer in zip(items, answers, strict=True):
            if answer.status is GetStatus.IN_DOUBT:
                doubts.append(Doubt(answer.ticket, slot, item))
            elif not _is_there(answer):
                self._records.let_go(item)
        came_bytes = sum(item.payload_bytes for (item, *_), answer in zip(items, answers, strict=True) if answer.status is GetStatus.FOUND)
        if came_bytes and not batch.abandoned:
            self._measure(came_bytes, began_s, min(time.monotonic(), batch.unanswered_s))
        failed: BackendError | None = None
        answered = False
        # One after the other of a job, as settling costs a job and not a key.
        loaded: list[Ending] = []
        flawed: list[tuple[Item, int, ChunkKey, Get, _Bad]] = []
        good = 0
        for (item, slot, key, get), answer in zip(items, answers, strict=True):
            if _is_there(answer):
                answered = True
                if (flaw := self._flaw(item, key, get, answer)) is not None:
                    flawed.append((item, slot, key, get, flaw))
                    continue
                good += 1
                if self._deliver(batch, item, key, get):
                    if loaded and loaded[0].job is not item.job:
                        self._settle(loaded)
                        loaded = []
                    loaded.append(item.ended(Outcome.DONE, "loaded", item.payload_bytes))
            elif answer.status is GetStatus.MISSING:
                answered = True
                self._fail(batch, item, "missing", gone=True)
            else:
                failed = answer.error or failed or BackendError(answer.status.value)
                may_help = answer.status not in (GetStatus.IN_DOUBT, GetStatus.CLOSED)
                if not (may_help and self._verdict.retry(batch, item, answer.error)):
                    self._fail(batch, item, "timeout" if answer.status in (GetStatus.TIMED_OUT, GetStatus.IN_DOUBT) else "failed")
        self._settle(loaded)
        self._trust_in(good)
        # Whatever was good does not wait for a second look at these.
        for item, slot, key, get, flaw in flawed:
            yield from self._look_again(batch, item, key, get, flaw, deadline, slot, doubts)
        self._verdict.judge(batch, breaker, "read", None if answered else failed)

    def _measure(self, came_bytes: int, began_s: float, ended_s: float) -> None:
        """A call brought something. What it failed to bring took its time as well."""
        if self._floor.loaded(came_bytes, began_s, ended_s):
            text = "%s: loads come with %.1f MB/s, less than min_load_mb_per_s: look-ups are misses until it is faster again"
            logger.warning(text, self._name, self._floor.mb_per_s)

    def _look_again(
        self, batch: Batch, item: Item, key: ChunkKey, get: Get, first: _Bad, deadline: Deadline, slot: int, doubts: list[Doubt]
    ) -> Asking[None]:
        """Read once more what is bad, and hand it to the engine if it is good then."""
        seconds: list[GetResult] = yield self._calls.get([get], deadline)
        again = seconds[0]
        if again.status is GetStatus.IN_DOUBT:
            doubts.append(Doubt(again.ticket, slot, item))
            self._fail(batch, item, "failed")
        elif again.status is GetStatus.MISSING:
            # Somebody else has removed it, or whoever had it is not asked any more.
            self._records.let_go(item)
            yield from self._condemn(batch, item, key, first.flaw, deadline, gone=True)
        elif not _is_there(again):
            self._records.let_go(item)
            self._fail(batch, item, "failed")
        elif (second := self._flaw(item, key, get, again)) is None:
            self._metrics.count("unstable_reads")
            self._trust_in(1)
            if self._deliver(batch, item, key, get):
                self._settle((item.ended(Outcome.DONE, "loaded", item.payload_bytes),))
        else:
            self._records.let_go(item)
            yield from self._condemn(batch, item, key, second.flaw, deadline, gone=False)

    def _flaw(self, item: Item, key: ChunkKey, get: Get, answer: GetResult) -> _Bad | None:
        if answer.status is GetStatus.WRONG_SIZE:
            return _Bad(Flaw.LENGTH)
        if answer.status is not GetStatus.FOUND:
            return _Bad(None)
        if not self._settings.verify:
            return None
        flaw = self._records.flaw(item, key, get.into[0])
        if flaw is None:
            return None
        self._calls.report_corrupt(key.name)
        return _Bad(flaw)

    def _trust_in(self, good: int) -> None:
        """So many records were found to be good."""
        if self._settings.verify:
            self._trust.verified(True, good)

    def _deliver(self, batch: Batch, item: Item, key: ChunkKey, get: Get) -> bool:
        """Have the record in the engine's row. Returns whether it is; if not, the item has failed."""
        try:
            self._records.deliver(item, key, get.into[0])
        except NotMovedError as error:
            self._records.let_go(item)
            self._fail(batch, item, error.result)
            return False
        self._records.let_go(item)
        return True

    def _condemn(self, batch: Batch, item: Item, key: ChunkKey, flaw: Flaw | None, deadline: Deadline, *, gone: bool) -> Asking[None]:
        if flaw is None:
            # Not a record at all, and said so by the store: nothing to suspect, and not ours to remove.
            self._fail(batch, item, "missing" if gone else "failed", bad=not gone, gone=True)
            return
        self._metrics.count("corrupt", flaw.value)
        logger.warning("%s: record %s is corrupt (%s): it is a miss until it is stored again", self._name, key.name, flaw.value)
        removed = gone
        # A length is the store's own word, so a wrong one says nothing about this host's memory.
        if flaw is not Flaw.LENGTH and self._trust.verified(False):
            if self._breakers.hold(self._metrics, _SUSPECT_MEMORY_S):
                logger.error(
                    "%s: most records read here fail verification, by this host's memory or by the store: leaving it alone for %.0f s",
                    self._name,
                    _SUSPECT_MEMORY_S,
                )
        elif not gone and self._trust.may_remove():
            until = Deadline(min(deadline.at_s, time.monotonic() + _REMOVE_FOR_S))
            answers: list[DeleteStatus | Failure] = yield self._calls.delete([key.name], until)
            removed = not isinstance(answers[0], Failure)
            if removed:
                self._metrics.count("removals")
        # Removed, the next store may create it. Not removed, it has to replace it.
        self._fail(batch, item, "corrupt", bad=not removed, gone=True)

    def _fail(self, batch: Batch, item: Item, result: str, *, bad: bool = False, gone: bool = False) -> None:
        self._tell(Lost(batch.namespace, item.key, bad, gone))
        self._settle((item.ended(Outcome.FAILED, result),))


def _is_there(answer: GetResult) -> bool:
    """Whether the record's place holds something: to be verified, or no record at all, a directory for example. A store repairs that."""
    if answer.status is GetStatus.FAILED:
        return isinstance(answer.error, InvalidError)
    return answer.status in (GetStatus.FOUND, GetStatus.WRONG_SIZE)
