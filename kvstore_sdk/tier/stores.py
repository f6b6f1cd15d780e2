"""A batch of stores: have the records ready, put."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvstore_sdk.backend import BackendError, Deadline, InvalidError, Mode, Put, PutResult, PutStatus, Ticket, UnsupportedError
from kvstore_sdk.keys import ChunkKey
from kvstore_sdk.tier.batch import Batch, Doubt
from kvstore_sdk.tier.breaker import Breakers
from kvstore_sdk.tier.calls import Asking, Calls
from kvstore_sdk.tier.jobs import Ending, Item, Outcome
from kvstore_sdk.tier.metrics import TierMetrics
from kvstore_sdk.tier.news import News, Stored
from kvstore_sdk.tier.records import NotMovedError, Records
from kvstore_sdk.tier.verdict import Verdict

__all__ = ["Stores"]


class Stores:
    """What was stored is told before its job can end."""

    def __init__(
        self,
        *,
        calls: Calls,
        records: Records,
        metrics: TierMetrics,
        breakers: Breakers,
        verdict: Verdict,
        tell: Callable[[News], None],
        settle: Callable[[Iterable[Ending]], None],
        first_store: Callable[[Batch, int], Asking[Ticket | None]],
    ) -> None:
        """`first_store` is called after each batch that stored a record, with a slot of it."""
        self._calls = calls
        self._records = records
        self._metrics = metrics
        self._breakers = breakers
        self._verdict = verdict
        self._tell = tell
        self._settle = settle
        self._first_store = first_store

    def run(self, batch: Batch, doubts: list[Doubt]) -> Asking[None]:
        """Do a batch to its end. Adds to `doubts` what the backend may still read."""
        breaker = self._breakers.put
        items: list[tuple[Item, int]] = []
        puts: list[Put] = []
        for item, slot in zip(batch.items, batch.slots, strict=True):
            if breaker.is_open and not item.trial:
                self._settle((item.ended(Outcome.FAILED, "shed"),))
            elif (put := self._put_of(batch, item, slot)) is not None:
                items.append((item, slot))
                puts.append(put)
        if not puts:
            return
        batch.timeout_s = min(item.job.timeout_s for item, _ in items)
        batch.deadline_s = min(item.job.deadline_s for item, _ in items)
        answers: list[PutResult] = yield self._calls.put(puts, Deadline(batch.deadline_s))
        for (item, slot), answer in zip(items, answers, strict=True):
            if answer.status is PutStatus.IN_DOUBT:
                doubts.append(Doubt(answer.ticket, slot, item))
            else:
                self._records.let_go(item)
        failed: BackendError | None = None
        answered = False
        written: list[tuple[Item, int]] = []
        there: list[Item] = []
        endings: list[Ending] = []
        for (item, slot), answer in zip(items, answers, strict=True):
            if answer.status is PutStatus.STORED:
                written.append((item, slot))
                endings.append(item.ended(Outcome.DONE, "replaced" if item.replace else "stored", item.payload_bytes))
            elif answer.status is PutStatus.EXISTS and not item.replace:
                there.append(item)
                endings.append(item.ended(Outcome.DONE, "exists"))
            else:
                if isinstance(answer.error, (InvalidError, UnsupportedError)):
                    # Speaks against this record, not against the store.
                    answered = True
                else:
                    failed = answer.error or failed or BackendError(answer.status.value)
                may_help = answer.status not in (PutStatus.IN_DOUBT, PutStatus.CLOSED)
                if not (may_help and self._verdict.retry(batch, item, answer.error)):
                    timeout = answer.status in (PutStatus.TIMED_OUT, PutStatus.IN_DOUBT)
                    endings.append(item.ended(Outcome.FAILED, "timeout" if timeout else "failed"))
        if written or there:
            answered = True
            self._tell(Stored(batch.namespace, tuple(item.key for item, _ in written), tuple(item.key for item in there)))
            if repairs := sum(item.replace for item, _ in written):
                self._metrics.count("repairs", by=repairs)
        self._settle(endings)
        self._verdict.judge(batch, breaker, "write", None if answered else failed)
        if written and not batch.abandoned:
            # The batch is done, and this slot is still ours: the manifest goes through it.
            slot = written[0][1]
            ticket = yield from self._first_store(batch, slot)
            if ticket is not None:
                doubts.append(Doubt(ticket, slot))

    def _put_of(self, batch: Batch, item: Item, slot: int) -> Put | None:
        """The put of an item, its record in place. None when there is nothing to be stored any more."""
        key = ChunkKey.from_engine(batch.namespace, item.key)
        try:
            buffer = self._records.buffer(item, slot)
            if buffer is None or not self._records.fill(item, key, buffer):
                return None
        except NotMovedError as error:
            self._settle((item.ended(Outcome.FAILED, error.result),))
            return None
        return Put(key.name, (buffer,), Mode.REPLACE if item.replace else Mode.CREATE)
