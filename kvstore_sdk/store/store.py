"""TieredStore: host memory first, and the tiers below it."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Collection, Sequence

from kvstore_sdk.backend import Hint
from kvstore_sdk.format import record_bytes
from kvstore_sdk.host import HostTier, Slot, SlotState
from kvstore_sdk.identity import KVIdentity, fresh_epoch
from kvstore_sdk.store.cascades import Cascades
from kvstore_sdk.store.events import Events
from kvstore_sdk.store.gauges import declare_gauges
from kvstore_sdk.store.lookups import Lookups
from kvstore_sdk.store.lower_tiers import LowerTiers, check_tiers
from kvstore_sdk.store.metrics import COUNTERS, GAUGES, HISTOGRAMS
from kvstore_sdk.store.promotions import Promotions
from kvstore_sdk.store.requests import Holds
from kvstore_sdk.store.serving import Serving
from kvstore_sdk.store.settings import StoreSettings
from kvstore_sdk.store.shares import Shares
from kvstore_sdk.store.transfers import Transfers
from kvstore_sdk.store.types import StoreEvent, StoreTier
from kvstore_sdk.tier import Lookup
from kvstore_sdk.tier.metrics import TierMetrics

__all__ = ["TieredStore"]

logger = logging.getLogger(__name__)

_HIT, _READY = Lookup.HIT, SlotState.READY
_POLL_EVERY_S = 0.001
_SEAL_S = 10.0
"""Longest that `close` waits for the thread that seals; what it does at a time is some ten milliseconds of work in memory."""


class TieredStore:
    """A cache of chunks in host memory, and below it tiers that chunks are stored to and loaded from.

    Thread-safe; calls the engine never; waits only in `reset`, `drain` and `close`, which are bounded. Keys are the engine's: chain hash,
    then the group as 4 bytes, big-endian.

    The life of a request: `begin_request`, any number of `lookup`, then `begin_load` for what was a HIT and `end_load` when it was copied,
    `begin_store` and `end_store` for what it computed, `end_request`. A step of the engine ends with `flush` and begins with `poll`.

    - HIT is a promise: it is there, verified, until loaded or let go, for `hold_timeout_s`, or until a store of another size lacks room.
    - PENDING ends by itself, in HIT or MISS, as long as the engine goes on with `poll` and `flush`.
    - No request waits for room while it holds some, so none waits for another that waits for it.
    - Promotions, hits that wait and stores to tiers never take the host tier's reserve from stores of running requests.
    - What is stored goes to every tier, in its turn where `cascade_fraction` of host memory, or all but the reserve, is on its way already.
      What is evicted before its turn is shed; `metrics` counts it.

    Attributes:
        metrics: What the store counts: `total("cascades", tier, "shed")`, say. `kvstore_sdk.store.COUNTERS` has the names and labels.
    """

    def __init__(
        self,
        host: HostTier,
        tiers: Sequence[StoreTier],
        *,
        identity: KVIdentity,
        settings: StoreSettings | None = None,
        name: str = "kvstore",
        events: bool = False,
    ) -> None:
        """Take over the tiers: `close` closes them. The host tier is used by nobody else from now on; its region stays the caller's.

        Args:
            host: Empty.
            tiers: In direct mode over `host`, in the order in which they are asked.
            identity: What the chunks mean; the same for all tiers.
            settings: How they are driven.
            name: For logs and threads.
            events: Keep events for `take_events`.

        Raises:
            ConfigError: two tiers have one name, a tier is of another identity, or the system starts no thread. Nothing was written, and
                the tiers stay the caller's.
        """
        self.name = name
        self.identity = identity
        self.host = host
        self.metrics = TierMetrics(counters=COUNTERS, gauges=GAUGES, histograms=HISTOGRAMS)
        self._settings = settings = settings or StoreSettings()
        self._tiers = tuple(tiers)
        check_tiers(f"store {name}", tiers, identity)
        # A plain lock: whoever holds it calls no public method.
        self._lock = threading.Lock()
        job_ids = itertools.count(1)
        self._events = Events(self._tiers, wanted=events)
        self._holds = Holds(host, max(record_bytes(group.payload_bytes) for group in identity.groups))
        shares = Shares(int(host.capacity_bytes * settings.cascade_fraction), len(self._tiers))
        self._promotions = Promotions(
            host,
            self._tiers,
            holds=self._holds,
            settings=settings,
            metrics=self.metrics,
            job_ids=job_ids,
            miss=lambda request, key: self._lookups.miss(request, key),
            evicted=self._hear_evicted,
            came=self._events.came,
            fault=self._fault,
        )
        self._cascades = Cascades(
            host,
            self._tiers,
            name=name,
            lock=self._lock,
            holds=self._holds,
            namespace=identity.namespace,
            layout=identity.layout,
            shares=shares,
            metrics=self.metrics,
            job_ids=job_ids,
            off=self._promotions.off,
            fault=self._fault,
        )
        self._lookups = Lookups(
            host,
            self._tiers,
            holds=self._holds,
            promotions=self._promotions,
            settings=settings,
            metrics=self.metrics,
            fault=self._fault,
        )
        self._transfers = Transfers(
            host,
            holds=self._holds,
            promotions=self._promotions,
            cascades=self._cascades,
            metrics=self.metrics,
            rest=self._lookups.rest,
            evicted=self._hear_evicted,
            came=self._events.came,
        )
        self._lower_tiers = LowerTiers(name, self._tiers, self._promotions, self._cascades, self._fault)
        self._requests = self._lookups.requests
        self._acquire, self._release = self._lock.acquire, self._lock.release
        self._look = self._lookups.lookup
        self._get = host.get
        self._closed, self._is_free = False, True
        self._serving = Serving()
        declare_gauges(self.metrics, host, self._holds, self._promotions, self._cascades, self._serving)
        self._holds.now_s = time.monotonic()
        self._cascades.start()
        books = {"holds": self._holds, "shares": shares, "metrics": self.metrics}
        self._serving.start(host, self._tiers, identity=identity, lock=self._lock, **books, fault=self._fault)

    # Requests.

    def begin_request(self, request_id: str, tiers: Collection[str] | None = None, hint: Hint | None = None) -> None:
        """A request began. Without this its first look-up begins it, with all tiers.

        Args:
            request_id: The engine's.
            tiers: Names of the tiers that it may load from; None for all. What is in host memory it may always load.
            hint: Whom it names, for tiers that want to know. They may wait, and its look-ups stay PENDING, as `Tier.begin_request` says.
        """
        with self._lock:
            self._lookups.begin(request_id, tiers, hint)

    def lookup(self, request_id: str, key: bytes) -> Lookup:
        """Say whether a chunk is there, from memory. MISS holds for the request; a key that no chunk can have is a MISS."""
        # The way of a chunk that is there is kept short: it is on the engine's own thread, for every chunk of every request that waits.
        request = self._requests.get(request_id)
        if request is not None and key in request.held:
            return _HIT
        # Half the price of a `with`, which is a third of the whole.
        self._acquire()
        try:
            if request is not None and request.quota and (slot := self._get(key)) is not None and slot.state is _READY:
                # As `Holds.hold` does, with what it granted.
                request.quota -= 1
                request.held[key] = slot
                return _HIT
            return self._look(request_id, key)
        finally:
            self._release()

    def let_go(self, request_ids: Collection[str]) -> None:
        """These requests look up no more for now: what is held for them is released. Ids that are not known are passed over."""
        with self._lock:
            for request_id in request_ids:
                if (request := self._lookups.get(request_id)) is not None:
                    self._lookups.let_go(request)

    def begin_computing(self, request_ids: Collection[str]) -> None:
        """These requests have their first step: as `let_go`, and those open at a `reset` store again, unless they had loaded before it."""
        with self._lock:
            for request_id in request_ids:
                self._lookups.begin_computing(request_id)

    def restart_request(self, request_id: str) -> None:
        """The request was preempted and starts over: it holds nothing, and what it was told does not hold any more. It may load from the
        same tiers as before, and counts as one use at its end."""
        with self._lock:
            self._lookups.restart(request_id)

    def end_request(self, request_id: str) -> None:
        """The request is over. Its chain counts as used once: from now on its tail goes before its head. Transfers of it may go on."""
        with self._lock:
            self._lookups.end(request_id)

    def flush(self) -> None:
        """The end of a step: send the loads that look-ups asked for, one job for each tier and request, and the questions."""
        with self._lock:
            if self._closed:
                return
            self._lookups.wake()
            self._lookups.expire(time.monotonic())
            self._lower_tiers.flush()
            self._lookups.count()

    def source(self, request_id: str, key: bytes) -> str | None:
        """Where a hit of a request came from: `host`, or the name of the tier that was asked for it. None: it was no hit."""
        with self._lock:
            request = self._lookups.get(request_id)
            return None if request is None else self._lookups.source(request, key)

    def is_filling(self, key: bytes) -> bool:
        """Whether a chunk is on its way into host memory, from a tier or from the engine."""
        with self._lock:
            slot = self.host.get(key)
            return slot is not None and slot.state is SlotState.FILLING

    # Transfers of the engine.

    def begin_store(self, request_id: str, keys: Sequence[bytes]) -> list[Slot | None] | None:
        """Take slots for chunks that the engine is about to write.

        Args:
            request_id: For the order of its chain; it may be over.
            keys: In chain order.

        Returns:
            For each key the slot to write, or None where nothing is to be written: the chunk is there, or on its way from the engine, or
            the keys are more than host memory could ever hold and this one is of the tail; or the request may have computed it before a
            `reset`. None as a whole: no room now, ask again after `poll`.
        """
        with self._lock:
            if self._closed or self._lookups.is_stale(request_id):
                return [None] * len(keys)
            if (request := self._lookups.begun(request_id)) is not None:
                request.chain.update(dict.fromkeys(keys))
            return self._transfers.begin_store(request, keys)

    def end_store(self, keys: Collection[bytes], incomplete: Collection[bytes] = ()) -> None:
        """All ranks wrote these chunks: they may be loaded, and go to every tier. Keys of no store under way are passed over.

        Args:
            keys: In chain order.
            incomplete: Those of them that lack something; they are dropped.
        """
        with self._lock:
            self._transfers.end_store(keys, incomplete)

    def begin_load(self, request_id: str, keys: Sequence[bytes]) -> list[Slot]:
        """Pin chunks that the engine is about to copy, until `end_load`. The request's other hits are released.

        Args:
            request_id: The engine's.
            keys: In chain order; each was a HIT of this request.

        Raises:
            KeyError: one is not there: it was no HIT, or was let go. Nothing was pinned.
        """
        with self._lock:
            request = self._lookups.begun(request_id)
            slots = self._transfers.begin_load(request_id, request, keys)
            if request is not None:
                self._lookups.let_go(request)
                request.chain.update(dict.fromkeys(keys))
            return slots

    def end_load(self, request_id: str, keys: Collection[bytes]) -> None:
        """The engine is done with these chunks of a load. Each is ended once; a second time is ignored and counted."""
        with self._lock:
            self._transfers.end_load(request_id, keys)

    # Progress.

    def poll(self) -> None:
        """Take in what tiers have done since the last call, and let go what was held too long."""
        with self._lock:
            self._poll()

    @property
    def busy(self) -> bool:
        """Whether something goes on that `poll` will hear the end of. Everything has a deadline, so this ends."""
        with self._lock:
            return self._lower_tiers.busy

    def take_events(self) -> list[StoreEvent]:
        """What came and went since the last call, if the store keeps events."""
        with self._lock:
            return self._events.take()

    # The end of things.

    def drain(self) -> bool:
        """Wait, at most `drain_timeout_s`, until nothing is on its way to or from a tier. False: something is.

        That does not mean that every tier has everything: what was shed, or failed, is counted by `cascades`.
        """
        return self._drain(time.monotonic() + self._settings.drain_timeout_s)

    def reset(self, weights_version: str = "") -> None:
        """The engine's cache was reset: nothing that was stored before is served again, by host memory or by any tier.

        Transfers of the engine that are under way are forgotten: their ends are passed over. Requests go on, and hold nothing. Those that
        are open store nothing before `restart_request`, or `begin_computing`: the engine may offload again what it computed for them with
        the weights of before. Takes as long as the slowest tier's `drain_timeout_s`.

        Events tell that host memory is empty. Of tiers they tell nothing: the records stay where they are, for whoever has the identity of
        before, and nobody keeps a list of them. Whoever follows the events has to take the reset itself as the end of them.

        Args:
            weights_version: Names the weights that the engine uses from now on, so that engines with the same ones share again. Without
                it only this engine knows the new namespace.
        """
        with self._lock:
            if self._closed:
                return
            if weights_version:
                identity = dataclasses.replace(self.identity, weights=weights_version, epoch="")
            else:
                identity = dataclasses.replace(self.identity, epoch=fresh_epoch())
            # First, so that whatever fails below, nothing of before is found.
            self._serving.pause()
            self.host.reset()
            self._cascades.reset(identity.namespace)
            self._lookups.forget()
            self._promotions.reset()
            self._transfers.reset()
            self._hear_evicted()
            self.identity = identity
            self._lower_tiers.reset(weights_version, identity)
            self._poll()
            self._events.forget()
            self._serving.resume(identity.namespace, self._promotions.off)

    def close(self) -> bool:
        """Let stores to tiers end, for `close_timeout_s` at most, then close every tier, whatever another one does. Idempotent.

        Returns:
            Whether nothing touches the host tier's region any more. If not, a call that does not return may, or others who read it: keep
            it mapped, and do not write to it, until the process ends.
        """
        until_s = time.monotonic() + self._settings.close_timeout_s
        with self._lock:
            if self._closed:
                return self._is_free
            self._closed = True
            self._serving.pause()
            self._lookups.close()
        self._drain(until_s)
        with self._lock:
            self._cascades.stop()
        # What it does is in memory alone.
        ended = self._cascades.join(_SEAL_S)
        with self._lock:
            closed = self._lower_tiers.close()
            self._serving.take_in()
            self._is_free = closed and ended and not self._serving.lent
            if not self._is_free:
                logger.warning("%s: closed, while a tier may still touch or lend host memory: it has to stay mapped", self.name)
            return self._is_free

    # Inside.

    def _poll(self) -> None:
        if self._serving.sources:
            self._serving.take_in()
        self._lookups.expire(time.monotonic())
        self._lower_tiers.poll()

    def _drain(self, until_s: float) -> bool:
        while True:
            with self._lock:
                self._poll()
                if not (self._lower_tiers.busy or self._cascades.waits):
                    return True
            if time.monotonic() >= until_s:
                return False
            time.sleep(_POLL_EVERY_S)

    def _hear_evicted(self) -> None:
        """Before anything else is told of the same chunks."""
        self._events.went(self.host.take_evicted())

    def _fault(self, part: str) -> None:
        self.metrics.count("faults", part)
