"""What becomes of a look-up."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Sequence

from kvstore_sdk.backend import Hint
from kvstore_sdk.host import HostTier, SlotState
from kvstore_sdk.keys import GROUP_BYTES
from kvstore_sdk.store.chains import Chains
from kvstore_sdk.store.promotions import Promotions
from kvstore_sdk.store.requests import Holds, PendingLookup, Request
from kvstore_sdk.store.settings import StoreSettings
from kvstore_sdk.store.types import HOST, StoreTier
from kvstore_sdk.tier import Lookup
from kvstore_sdk.tier.hints import patience_s
from kvstore_sdk.tier.metrics import TierMetrics

__all__ = ["Lookups"]

logger = logging.getLogger(__name__)

_MAX_REQUESTS = 65_536
"""Requests that looked something up, stored or loaded. Beyond this the oldest is taken to be over: its end was never told."""

_HIT, _MISS, _PENDING = Lookup.HIT, Lookup.MISS, Lookup.PENDING
_READY = SlotState.READY


class Lookups:
    """Answers from memory; used under the store's lock.

    Attributes:
        requests: Those that did something since they began.

    - HIT: the chunk is READY in host memory, and stays there until the request loads it or lets go.
    - MISS holds for the request for good.
    - PENDING ends: tiers have `lookup_timeout_s` to answer, a load has the tier's own time, room and another request's store are waited for
      `lookup_timeout_s` as well. A request with a hint gives tiers a second longer than its wait, if that is more, and takes what another
      tier has meanwhile. A request that already holds something waits for no room. One whose hits were let go, because it did not
      load them for `hold_timeout_s`, is told no more of them in that step: stores that they kept from room come first.
    """

    def __init__(
        self,
        host: HostTier,
        tiers: Sequence[StoreTier],
        *,
        holds: Holds,
        promotions: Promotions,
        settings: StoreSettings,
        metrics: TierMetrics,
        fault: Callable[[str], None],
    ) -> None:
        self._host = host
        self._tiers = tiers
        self._holds = holds
        self._promotions = promotions
        self._settings = settings
        self._metrics = metrics
        self._fault = fault
        self._get = host.get
        self._chains = Chains(max(1024, host.row_count))
        self.requests: dict[str, Request] = {}
        # The tiers of each request that began. Kept until its end, whatever becomes of the rest that is known of it.
        self._places: dict[str, tuple[int, ...]] = {}
        # Likewise of those that have one.
        self._hints: dict[str, Hint] = {}
        # Requests that were open at the last reset, and whether they had loaded or stored something. Also of those that ended since: an
        # engine may store for a request after its end.
        self._stale: dict[str, bool] = {}
        self._every = tuple(range(len(tiers)))
        self._resting: list[Request] = []
        self._closed = False
        self._misses = 0

    def begin(self, request_id: str, names: Collection[str] | None, hint: Hint | None) -> None:
        """A request began. `names`: the tiers that it may load from; None for all. It costs little until it does something: an engine
        may have any number of them in its queue."""
        if request_id not in self._places and request_id not in self.requests:
            self._stale.pop(request_id, None)
            every = self._every
            self._places[request_id] = every if names is None else tuple(place for place in every if self._tiers[place].name in names)
            if hint is not None:
                self._hints[request_id] = hint

    def begun(self, request_id: str) -> Request | None:
        """What is known of a request that began and did not end."""
        return self.open(request_id) if request_id in self._places else self.requests.get(request_id)

    def open(self, request_id: str) -> Request:
        """What is known of a request, which begins now if it did not before."""
        if (known := self.requests.get(request_id)) is not None:
            return known
        if len(self.requests) >= _MAX_REQUESTS:
            oldest = next(iter(self.requests))
            self._metrics.count("forgotten_requests")
            logger.warning("request %s is forgotten: %d others came, and its end was never told", oldest, _MAX_REQUESTS)
            self._end(oldest)
        if request_id not in self._places:
            self._stale.pop(request_id, None)
        request = self.requests[request_id] = Request(request_id, self._places.get(request_id, self._every), self._hints.get(request_id))
        return request

    def get(self, request_id: str) -> Request | None:
        return self.requests.get(request_id)

    def is_stale(self, request_id: str) -> bool:
        """Whether the engine may hold KV of the request that was computed before the last reset."""
        return request_id in self._stale

    def begin_computing(self, request_id: str) -> None:
        """The request has its first step. What it computes is stale only if it had loaded something before the reset."""
        if not self._stale.get(request_id, True):
            del self._stale[request_id]
        if (request := self.requests.get(request_id)) is not None:
            self.let_go(request)

    def lookup(self, request_id: str, key: bytes) -> Lookup:
        """The answer, for whatever `TieredStore.lookup` does not answer by itself."""
        request = self.requests.get(request_id)
        if request is None:
            request = self.open(request_id)
        slot = self._get(key)
        if slot is None or slot.state is not _READY or key in request.missed or self._closed:
            return self._pend(request, key)
        if request.rests:
            return _PENDING
        if not self._holds.hold(request, slot):
            return self._no_room(request, key)
        if (want := request.wants.pop(key, None)) is not None:
            self._waited(want)
        return _HIT

    def source(self, request: Request, key: bytes) -> str | None:
        """Where a hit came from; None: it is none."""
        return request.told.get(key) or (HOST if key in request.held else None)

    def let_go(self, request: Request) -> None:
        """Its look-ups are over: what it holds is released, and what it waits for goes on without it."""
        self._holds.release(request)
        if request.wants:
            self._promotions.forget(request)
            request.wants.clear()

    def restart(self, request_id: str) -> None:
        """The request starts over, and may be told something else. It is still the same one, and will have used what it used once."""
        self._stale.pop(request_id, None)
        request = self.requests.get(request_id)
        if request is None:
            return
        self.let_go(request)
        self._forget_in_tiers(request)
        if request.hint is not None:
            # It waited.
            request.hint = dataclasses.replace(request.hint, wait_s=0.0)
        request.told.clear()
        request.missed.clear()
        # It loads what it stored itself, so that the order in which it goes on is no longer that of the chain.
        self._chains.learn(request.chain)
        request.earlier.update(request.chain)
        request.chain.clear()

    def end(self, request_id: str) -> None:
        """The request is over."""
        self._places.pop(request_id, None)
        self._hints.pop(request_id, None)
        self._end(request_id)

    def _end(self, request_id: str) -> None:
        request = self.requests.pop(request_id, None)
        if request is None:
            return
        self.let_go(request)
        self._forget_in_tiers(request)
        if request.chain or request.earlier:
            self._host.used(self._chains.used(request.chain, request.earlier))

    def expire(self, now: float) -> None:
        """Let go what nobody loaded in time."""
        self._holds.now_s = now
        for request in self._holds.overdue(now - self._settings.hold_timeout_s):
            self._holds.release(request)
            self.rest(request)

    def rest(self, request: Request) -> None:
        """What the request held was taken from it: others come first, until the step is over."""
        request.rests = True
        self._resting.append(request)
        self._metrics.count("expired_holds")

    def wake(self) -> None:
        """A step is over: whose hits were let go may look them up again."""
        for request in self._resting:
            request.rests = False
        self._resting.clear()

    def forget(self) -> None:
        """Nothing that any request was told holds any more: what was not a miss is one now. What they computed is stale."""
        stale = dict.fromkeys(self._places, False)
        stale.update((name, bool(request.chain or request.earlier)) for name, request in self.requests.items())
        # Chains were cleared by the last reset; what was loaded before that one is no better now.
        stale.update((name, True) for name, loaded in self._stale.items() if loaded and name in stale)
        self._stale = stale
        for request in self.requests.values():
            self._misses += len(request.wants)
            request.missed.update(request.wants)
            self.let_go(request)
            request.missed.update(request.told)
            request.chain.clear()
            request.earlier.clear()
        self._chains.clear()

    def close(self) -> None:
        """From now on everything is a MISS."""
        self._closed = True
        self.forget()

    def miss(self, request: Request, key: bytes) -> Lookup:
        """MISS, for good."""
        if key not in request.missed:
            request.missed.add(key)
            request.quota = 0
            self._misses += 1
        if (want := request.wants.pop(key, None)) is not None:
            self._waited(want)
        return _MISS

    def count(self) -> None:
        """Count what look-ups did not."""
        if self._holds.hits:
            self._metrics.count("hits", HOST, by=self._holds.hits)
            self._holds.hits = 0
        if self._misses:
            self._metrics.count("misses", by=self._misses)
            self._misses = 0

    def _pend(self, request: Request, key: bytes) -> Lookup:
        if key in request.missed:
            return _MISS
        if self._closed or self._host.payload_bytes(int.from_bytes(key[-GROUP_BYTES:], "big")) is None:
            return self.miss(request, key)
        want = request.wants.get(key)
        if want is None:
            want = request.wants[key] = PendingLookup(key, self._holds.now_s)
            request.quota = 0
        if self._promotions.joins(request, key):
            return _PENDING
        if self._get(key) is not None:
            # Another request's store.
            return self._timed_out(request, want, self._settings.lookup_timeout_s) or _PENDING
        if want.place >= 0:
            # Every `flush` finds room for it, or says MISS after `lookup_timeout_s`. Whatever keeps it from that, this ends.
            over = self._holds.now_s - want.placed_s > 2 * self._settings.lookup_timeout_s
            return self.miss(request, key) if over else _PENDING
        return self._ask(request, want)

    def _ask(self, request: Request, want: PendingLookup) -> Lookup:
        """Ask every tier at once; the first in the list that has the chunk counts."""
        late = self._holds.now_s - want.asked_s > self._settings.lookup_timeout_s
        answers = want.answers
        pending = False
        if not request.asked:
            request.asked = True
            self._name_peer(request)
        for place in request.places:
            answer = answers.get(place, _PENDING)
            if answer is _PENDING:
                answer = answers[place] = self._answer_of(place, request.id, want.key)
            if answer is _PENDING:
                pending = True
            elif answer is _HIT and want.place < 0 and (not pending or late or request.waits):
                want.place = place
        if want.place >= 0:
            want.placed_s = self._holds.now_s
            self._promotions.want(request, want)
            return _PENDING
        if not pending:
            return self.miss(request, want.key)
        return self._timed_out(request, want, patience_s(self._settings.lookup_timeout_s, request.hint)) or _PENDING

    def _name_peer(self, request: Request) -> None:
        if request.hint is None:
            return
        for place in request.places:
            try:
                self._tiers[place].tier.begin_request(request.id, request.hint)
            except Exception:
                logger.exception("%s: whom a request names could not be told", self._tiers[place].name)
                self._fault("tier")

    def _forget_in_tiers(self, request: Request) -> None:
        if not request.asked:
            return
        request.asked = False
        for below in self._tiers:
            try:
                below.tier.end_request(request.id)
            except Exception:
                logger.exception("%s: the end of a request could not be told", below.name)
                self._fault("tier")

    def _answer_of(self, place: int, request_id: str, key: bytes) -> Lookup:
        if not self._promotions.may_ask(place):
            return _MISS
        try:
            return self._tiers[place].tier.lookup(request_id, key)
        except Exception:
            logger.exception("%s: a look-up failed", self._tiers[place].name)
            self._fault("tier")
            return _MISS

    def _timed_out(self, request: Request, want: PendingLookup, timeout_s: float) -> Lookup | None:
        if self._holds.now_s - want.asked_s <= timeout_s:
            return None
        self._metrics.count("lookup_timeouts")
        return self.miss(request, want.key)

    def _no_room(self, request: Request, key: bytes) -> Lookup:
        """It is there, and cannot be held: others hold too much."""
        if self._closed:
            return self.miss(request, key)
        want = request.wants.get(key)
        if want is None:
            want = request.wants[key] = PendingLookup(key, self._holds.now_s)
            request.quota = 0
        if self._promotions.may_wait(request, want):
            return _PENDING
        return self.miss(request, key)

    def _waited(self, want: PendingLookup) -> None:
        self._metrics.observe("pending_seconds", self._holds.now_s - want.asked_s)
