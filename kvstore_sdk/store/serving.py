"""What is in host memory, for others who read it through a backend, while the engine does something else."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

from kvstore_sdk.backend import Buffer, Loan
from kvstore_sdk.format import seal
from kvstore_sdk.host import HostTier, Pin, Slot, SlotState
from kvstore_sdk.identity import KVIdentity
from kvstore_sdk.keys import ChunkKey, parse_name
from kvstore_sdk.store.requests import Holds
from kvstore_sdk.store.shares import Shares
from kvstore_sdk.store.types import StoreTier
from kvstore_sdk.tier.metrics import TierMetrics

__all__ = ["HostSource", "Serving"]

logger = logging.getLogger(__name__)

_READY = SlotState.READY
_LOCK_S = 0.2
"""Longest that a call waits for the store's lock. Where machine and engine are that busy, nothing is to be had."""


class _HostLoan:
    """A slot that stays READY and where it is until the loan is given back."""

    __slots__ = ("_source", "age", "buffer", "key", "name", "pin", "slot")

    def __init__(self, source: HostSource, name: str, key: ChunkKey, slot: Slot, buffer: Buffer, pin: Pin, age: int) -> None:
        self._source = source
        self.name = name
        self.key = key
        self.slot = slot
        self.buffer = buffer
        self.pin = pin
        self.age = age

    @property
    def sealed(self) -> bool:
        """Whether `seal` says True without any work."""
        return self.slot.sealed and not self.pin.released

    def seal(self) -> bool:
        return self._source.seal(self)

    def __repr__(self) -> str:
        return f"Loan({self.name!r}, released={self.pin.released})"


class HostSource:
    """The `RecordSource` of one tier's backend. Every method is for any thread, and none raises.

    The store's lock, which is held for some ms at most, is never waited for long: not for `sizes`, which takes none, nor for what is given
    back, which whoever holds the lock takes in.
    """

    def __init__(
        self,
        host: HostTier,
        place: int,
        name: str,
        *,
        identity: KVIdentity,
        lock: threading.Lock,
        holds: Holds,
        shares: Shares,
        metrics: TierMetrics,
        fault: Callable[[str], None],
    ) -> None:
        self.namespace = identity.namespace
        self.layout = identity.layout
        self.place = place
        self.lent: dict[Slot, int] = {}
        """Slots that were not given back, or whose return was not taken in yet, and how many loans each has."""
        self.returned: deque[_HostLoan] = deque()
        """Loans that were given back; whoever has the lock takes them in."""
        self._host = host
        self._name = name
        self._get = host.get
        self._lock = lock
        self._holds = holds
        self._shares = shares
        self._metrics = metrics
        self._fault = fault
        self._open = False
        # Loans of an earlier age are from before a reset.
        self._age = 0

    def sizes(self, names: Sequence[str]) -> list[int]:
        # Without the lock: reading a dict and a slot is atomic, and the answer is a hint.
        return [0 if (slot := self._ready(key)) is None else slot.record_bytes for key in self._keys(names)]

    def lend(self, names: Sequence[str]) -> list[Loan | None]:
        loans: list[Loan | None] = [None] * len(names)
        age, keys = self._age, self._keys(names)
        if not any(keys) or not self._take_lock():
            return loans
        try:
            self._take_in()
            if self._open and age == self._age:
                self._holds.settle()
                self._lend(names, keys, loans)
        except Exception:
            logger.exception("%s: records could not be lent", self._name)
            self._fault("serve")
        finally:
            self._lock.release()
        return loans

    def give_back(self, loans: Sequence[Loan]) -> None:
        self.returned.extend(loan for loan in loans if isinstance(loan, _HostLoan) and loan._source is self)
        if self._open and self._take_lock():
            try:
                self._take_in()
            finally:
                self._lock.release()

    def seal(self, loan: _HostLoan) -> bool:
        """As `Loan.seal`. The thread that seals for tiers may do the same at the same time: both write the same bytes."""
        if loan.sealed:
            return True
        if loan.pin.released or loan.age != self._age:
            return False
        slot = loan.slot
        try:
            seal(loan.buffer.view, loan.key, self.layout, slot.payload_bytes)
        except Exception:
            logger.exception("%s: the chunk in slot %d could not be sealed", self._name, slot.number)
            self._fault("seal")
            return False
        slot.sealed = True
        return True

    # Under the store's lock.

    def pause(self) -> None:
        """Nothing is to be had until `resume`; what was lent may still be sent if it was sealed."""
        self._open = False
        self._age += 1

    def resume(self, namespace: str) -> None:
        """Begin, or go on, with another namespace perhaps."""
        self.namespace = namespace
        self._open = True
        self.take_in()

    def take_in(self) -> None:
        """Let go what was given back."""
        if self.returned:
            self._take_in()

    # Inside.

    def _take_lock(self) -> bool:
        return self._lock.acquire(timeout=_LOCK_S)

    def _keys(self, names: Sequence[str]) -> list[ChunkKey | None]:
        """What is asked for, by name; None for what cannot be here."""
        namespace = self.namespace if self._open else ""
        return [key if (key := parse_name(name)) is not None and key.namespace == namespace else None for name in names]

    def _ready(self, key: ChunkKey | None) -> Slot | None:
        if key is None:
            return None
        slot = self._get(key.to_engine())
        return slot if slot is not None and slot.state is _READY else None

    def _lend(self, names: Sequence[str], keys: Sequence[ChunkKey | None], loans: list[Loan | None]) -> None:
        lent = refused = 0
        for at, key in enumerate(keys):
            slot = self._ready(key)
            if key is None or slot is None:
                continue
            loans_of = self.lent.get(slot, 0)
            pin = self._host.pin((slot,), True) if loans_of or self._shares.has_room(self.place, slot.record_bytes) else None
            if pin is None:
                refused += 1
                continue
            if not loans_of:
                self._shares.use(self.place, slot.record_bytes)
            self.lent[slot] = loans_of + 1
            lent += 1
            loans[at] = _HostLoan(self, names[at], key, slot, self._host.record(slot.number), pin, self._age)
        for result, count in (("lent", lent), ("refused", refused)):
            if count:
                self._metrics.count("loans", self._name, result, by=count)

    def _take_in(self) -> None:
        while self.returned:
            loan = self.returned.popleft()
            # False for what was given back before, which the host tier counts.
            if not self._host.unpin(loan.pin):
                continue
            slot = loan.slot
            self.lent[slot] -= 1
            if not self.lent[slot]:
                del self.lent[slot]
                self._shares.use(self.place, -slot.record_bytes)


class Serving:
    """The sources of a store: one for each tier whose backend serves. Used under the store's lock, but for `start`."""

    def __init__(self) -> None:
        self.sources: list[HostSource] = []

    def start(self, host: HostTier, tiers: Sequence[StoreTier], **parts: Any) -> None:
        """Give every backend that wants one its source. Without the lock: the backend may use it at once.

        Args:
            host: Whose slots are lent.
            tiers: Of the store.
            parts: As `HostSource` takes them.
        """
        for place, below in enumerate(tiers):
            source = HostSource(host, place, below.name, **parts)
            # One that was not taken may be kept all the same: it has nothing.
            if below.tier.serve(source):
                self.sources.append(source)
                source.resume(source.namespace)

    @property
    def lent(self) -> int:
        """Records that others may read now, for each tier through which they do."""
        return sum(len(source.lent) for source in self.sources)

    def pause(self) -> None:
        for source in self.sources:
            source.pause()

    def resume(self, namespace: str, off: Collection[int]) -> None:
        """Go on, but for the tiers that are `off`: their backends have not heard of the namespace."""
        for source in self.sources:
            if source.place not in off:
                source.resume(namespace)

    def take_in(self) -> None:
        """Let go what was given back."""
        for source in self.sources:
            source.take_in()
