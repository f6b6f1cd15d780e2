"""Chunks on their way from a tier into host memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

from kvstore_sdk.format import record_bytes
from kvstore_sdk.host import HostTier, Purpose, Slot, SlotState
from kvstore_sdk.keys import GROUP_BYTES
from kvstore_sdk.store.requests import Holds, PendingLookup, Request
from kvstore_sdk.store.settings import StoreSettings
from kvstore_sdk.store.types import StoreTier
from kvstore_sdk.tier import JobResult, Lookup
from kvstore_sdk.tier.metrics import TierMetrics

__all__ = ["Promotions"]

logger = logging.getLogger(__name__)

_FILLING = SlotState.FILLING
_FRACTION = 0.125
"""Part of host memory that may be on its way from all tiers, or in quarantine for their late calls. With the defaults half of what the
reserve and stores to tiers leave: the other half is for hits, whatever hangs or is never settled."""


class _Promotion:
    """One chunk that a tier loads into a slot.

    Attributes:
        place: Of the tier in the list.
        waiting: The requests that are told HIT when it is there.
        wanted: False when nobody may read what comes: the cache was reset, or the engine stores the chunk by itself meanwhile.
    """

    __slots__ = ("key", "place", "slot", "waiting", "wanted")

    def __init__(self, key: bytes, slot: Slot, place: int) -> None:
        self.key = key
        self.slot = slot
        self.place = place
        self.waiting: dict[str, Request] = {}
        self.wanted = True


class Promotions:
    """One promotion a chunk, however many requests want it; one job for each request and tier at each `send`. Used under the store's lock.

    Each tier has its share of host memory for what is on its way and for what late calls may still write: one that hangs leaves room for
    the others and for hits. Who finds it in use waits for the tier, and for no other request: so it may, whatever it holds.

    Every slot that is taken here is given back once: as a READY chunk, as a free one, or, where a late call may still write into it, out of
    quarantine when the tier says so.

    Attributes:
        off: Places of tiers that are not used any more.
    """

    def __init__(
        self,
        host: HostTier,
        tiers: Sequence[StoreTier],
        *,
        holds: Holds,
        settings: StoreSettings,
        metrics: TierMetrics,
        job_ids: Iterator[int],
        miss: Callable[[Request, bytes], object],
        evicted: Callable[[], None],
        came: Callable[[list[bytes]], None],
        fault: Callable[[str], None],
    ) -> None:
        self._host = host
        self._tiers = tiers
        self._holds = holds
        self._settings = settings
        self._metrics = metrics
        self._job_ids = job_ids
        self._miss = miss
        self._evicted = evicted
        self._came = came
        self._fault = fault
        self.off: set[int] = set()
        self._open: dict[bytes, _Promotion] = {}
        # Requests with chunks that a tier has, the first that came first.
        self._queue: dict[str, tuple[Request, list[PendingLookup]]] = {}
        self._jobs: list[dict[int, list[_Promotion]]] = [{} for _ in tiers]
        self._quarantined: dict[tuple[int, int], Slot] = {}
        self._quarantined_bytes = [0] * len(tiers)
        # With what is in quarantine.
        self._tier_bytes = [0] * len(tiers)
        self._largest_record = holds.largest_record
        self._share_bytes = max(self._largest_record, int(host.capacity_bytes * _FRACTION) // max(1, len(tiers)))
        # When a tier last brought something.
        self._came_s = [0.0] * len(tiers)

    def __len__(self) -> int:
        """Chunks on their way."""
        return len(self._open)

    @property
    def quarantined(self) -> int:
        """Slots that calls which outlived their jobs may still write into."""
        return len(self._quarantined)

    @property
    def busy(self) -> bool:
        """Whether a tier is loading."""
        return any(self._jobs)

    def may_ask(self, place: int) -> bool:
        """Whether a tier may be asked for chunks: it is in use, and its late calls leave room in its share of host memory."""
        return place not in self.off and self._quarantined_bytes[place] + self._largest_record <= self._share_bytes

    def open_jobs(self, place: int) -> bool:
        """Whether a tier is loading."""
        return bool(self._jobs[place])

    def is_open(self, key: bytes) -> bool:
        """Whether the chunk is on its way."""
        return key in self._open

    def joins(self, request: Request, key: bytes) -> bool:
        """Whether the chunk is on its way; then the request waits for it, wherever it comes from."""
        promotion = self._open.get(key)
        if promotion is None:
            return False
        if request.id not in promotion.waiting:
            promotion.waiting[request.id] = request
            request.promoting += 1
        return True

    def want(self, request: Request, want: PendingLookup) -> None:
        """A tier has the chunk: load it at the next `send`."""
        entry = self._queue.get(request.id)
        if entry is None:
            entry = self._queue[request.id] = (request, [])
        entry[1].append(want)

    def may_wait(self, request: Request, want: PendingLookup) -> bool:
        """There is no room for a chunk. True: the request may wait for it. Otherwise it is a miss, which is counted here as what it is."""
        now = self._holds.now_s
        if request.may_wait_for_room:
            want.no_room_s = want.no_room_s or now
            if now - want.no_room_s <= self._settings.lookup_timeout_s:
                return True
        self._metrics.count("no_room", "lookup")
        return False

    def forget(self, request: Request) -> None:
        """The request waits for nothing any more. What is on its way comes all the same."""
        self._queue.pop(request.id, None)
        if request.promoting:
            for key in request.wants:
                if (promotion := self._open.get(key)) is not None:
                    promotion.waiting.pop(request.id, None)
            request.promoting = 0

    def send(self) -> None:
        """Find room for what requests want, the first request first and the head of its chain first, and submit the loads."""
        if not self._queue:
            return
        self._holds.settle()
        queue, self._queue = self._queue, {}
        for request, wants in queue.values():
            todo = [want for want in wants if self._is_needed(request, want)]
            fit = self._within_shares(todo)
            slots = self._admit([want.key for want in todo[:fit]])
            loads: dict[int, list[_Promotion]] = {}
            for want, slot in zip(todo, slots, strict=False):
                promotion = self._open[want.key] = _Promotion(want.key, slot, want.place)
                slot.source = self._tiers[want.place].name
                self._tier_bytes[want.place] += slot.record_bytes
                want.place = -1
                self.joins(request, want.key)
                loads.setdefault(promotion.place, []).append(promotion)
            for place, promotions in loads.items():
                self._submit(place, promotions)
            blocking = todo[fit].place if fit < len(todo) else -1
            for want in todo[len(slots) :]:
                if len(slots) == fit and self._waits_for_tier(want, blocking):
                    if want.place >= 0:
                        self.want(request, want)
                elif self.may_wait(request, want):
                    self.want(request, want)
                else:
                    self._miss(request, want.key)

    def ended(self, place: int, result: JobResult) -> bool:
        """A job of a tier ended. False: it is none of ours."""
        promotions = self._jobs[place].pop(result.job_id, None)
        if promotions is None:
            return False
        done, held = frozenset(result.done), frozenset(result.held)
        came: list[_Promotion] = []
        for promotion in promotions:
            slot, key = promotion.slot, promotion.key
            if slot.number not in held:
                self._tier_bytes[place] -= slot.record_bytes
            if self._open.get(key) is promotion:
                del self._open[key]
            if slot.number in held:
                # Whatever the result says: what may still be written into is not read.
                self._quarantined[place, slot.number] = slot
                self._quarantined_bytes[place] += slot.record_bytes
                self._safely(self._host.quarantine, slot)
                self._failed(promotion, "late")
            elif key in done and promotion.wanted:
                came.append(promotion)
            else:
                self._safely(self._host.discard if slot.state is _FILLING else self._host.release, slot)
                self._failed(promotion, "unwanted" if key in done else "failed")
        if came:
            self._bring(place, came)
        return True

    def released(self, place: int, row: int) -> bool:
        """Nothing touches a row any more. False: it is none of ours."""
        slot = self._quarantined.pop((place, row), None)
        if slot is None:
            return False
        self._quarantined_bytes[place] -= slot.record_bytes
        self._tier_bytes[place] -= slot.record_bytes
        self._host.release(slot)
        return True

    def supersede(self, key: bytes) -> None:
        """The engine has the chunk itself, and is about to store it: what comes from the tier is not wanted any more."""
        promotion = self._open.pop(key, None)
        if promotion is None:
            return
        promotion.wanted = False
        self._host.quarantine(promotion.slot)
        self._failed(promotion, "")

    def give_up(self, place: int) -> None:
        """Nobody hears what a tier does: no request waits for it. Its slots come back when it is heard again."""
        for promotion in [promotion for promotion in self._open.values() if promotion.place == place]:
            self.supersede(promotion.key)

    def lost(self, place: int) -> list[JobResult]:
        """Results for the jobs that a tier does not know any more."""
        return [JobResult(job_id, (), tuple(p.key for p in promotions), (), 0, 0.0) for job_id, promotions in self._jobs[place].items()]

    def reset(self) -> None:
        """What is on its way belongs to what was before."""
        for promotion in self._open.values():
            promotion.wanted = False
            promotion.waiting.clear()
        self._open.clear()
        self._queue.clear()

    def _is_needed(self, request: Request, want: PendingLookup) -> bool:
        if request.wants.get(want.key) is not want:
            return False
        if self.joins(request, want.key) or self._host.get(want.key) is not None:
            # It comes, or came, in another way. If that fails the request asks again.
            want.place = -1
            return False
        return True

    def _within_shares(self, wants: list[PendingLookup]) -> int:
        """How many of these, from the front, fit in what is left of their tiers' shares."""
        left = [self._share_bytes - used_bytes for used_bytes in self._tier_bytes]
        for count, want in enumerate(wants):
            payload_bytes = self._host.payload_bytes(int.from_bytes(want.key[-GROUP_BYTES:], "big"))
            left[want.place] -= self._largest_record if payload_bytes is None else record_bytes(payload_bytes)
            if left[want.place] < 0:
                return count
        return len(wants)

    def _waits_for_tier(self, want: PendingLookup, place: int) -> bool:
        """The share of a tier is in use, which is the chunk's own or that of one before it. Wait as long as the tier goes on bringing
        chunks, then ask the next one. False: there is none."""
        now = self._holds.now_s
        want.placed_s = now
        if want.place != place:
            return True
        want.no_room_s = max(want.no_room_s or now, self._came_s[place])
        if now - want.no_room_s <= self._settings.lookup_timeout_s:
            return True
        if all(answer is Lookup.MISS for other, answer in want.answers.items() if other != place):
            return False
        want.answers[place] = Lookup.MISS
        want.place = -1
        want.asked_s = now
        want.no_room_s = 0.0
        return True

    def _admit(self, keys: list[bytes]) -> list[Slot]:
        """Slots for as many keys from the front as there is room for."""
        slots: list[Slot] = []
        count = len(keys)
        while count:
            part = keys[len(slots) : len(slots) + count]
            try:
                admitted = self._host.admit(part, Purpose.PROMOTION) if part else None
            except Exception:
                logger.exception("no room could be made for a promotion")
                self._fault("host")
                admitted = None
            if admitted is None:
                count //= 2
            else:
                slots += admitted
        self._evicted()
        return slots

    def _submit(self, place: int, promotions: list[_Promotion]) -> None:
        job_id = next(self._job_ids)
        self._jobs[place][job_id] = promotions
        try:
            self._tiers[place].tier.submit_load(job_id, [p.key for p in promotions], [p.slot.number for p in promotions])
        except Exception:
            # Nobody knows whether it was queued. Its slots come back with its result, or when the tier says that it has no job.
            logger.exception("%s: a load could not be submitted", self._tiers[place].name)
            self._fault("tier")

    def _bring(self, place: int, came: list[_Promotion]) -> None:
        """What was verified is readable now, and kept for those that waited for it."""
        name = self._tiers[place].name
        self._came_s[place] = self._holds.now_s
        requests: dict[str, tuple[Request, list[Slot]]] = {}
        for promotion in came:
            promotion.slot.sealed = True
            for request_id, request in promotion.waiting.items():
                requests.setdefault(request_id, (request, []))[1].append(promotion.slot)
        self._holds.settle()
        try:
            for request, slots in requests.values():
                request.promoting -= len(slots)
                brought = self._holds.bring(request, slots)
                for slot in slots:
                    if brought:
                        self._deliver(request, slot.key, name)
                    elif (want := request.wants.get(slot.key)) is not None:
                        # One load for each request and tier, so that a chunk that is evicted again and again ends as a miss.
                        want.answers[place] = Lookup.MISS
        finally:
            self._host.ready([promotion.slot for promotion in came])
        self._metrics.count("promotions", name, "loaded", by=len(came))
        self._came([promotion.key for promotion in came])

    def _deliver(self, request: Request, key: bytes, name: str) -> None:
        if (want := request.wants.pop(key, None)) is not None:
            self._metrics.observe("pending_seconds", self._holds.now_s - want.asked_s)
        if key not in request.told:
            request.told[key] = name
            self._metrics.count("hits", name)

    def _safely(self, give_back: Callable[[Slot], None], slot: Slot) -> None:
        """One slot's trouble must not keep the others."""
        try:
            give_back(slot)
        except Exception:
            logger.exception("slot %d could not be given back", slot.number)
            self._fault("host")

    def _failed(self, promotion: _Promotion, result: str) -> None:
        """Those that waited ask the next tier when they look the chunk up again."""
        if result:
            self._metrics.count("promotions", self._tiers[promotion.place].name, result)
        for request in promotion.waiting.values():
            request.promoting -= 1
            if (want := request.wants.get(promotion.key)) is not None:
                want.answers[promotion.place] = Lookup.MISS
                # The others have their time, too.
                want.asked_s = self._holds.now_s
        promotion.waiting.clear()
