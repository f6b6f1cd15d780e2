"""Chunks on their way from host memory to the tiers below: sealed once, then stored by each."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from kvstore_sdk.errors import ConfigError
from kvstore_sdk.format import seal
from kvstore_sdk.host import HostTier, Pin, Slot, SlotState
from kvstore_sdk.keys import ChunkKey
from kvstore_sdk.store.requests import Holds
from kvstore_sdk.store.shares import Shares
from kvstore_sdk.store.touches import Touches
from kvstore_sdk.store.types import StoreTier
from kvstore_sdk.tier import JobResult
from kvstore_sdk.tier.metrics import TierMetrics

__all__ = ["Cascades"]

logger = logging.getLogger(__name__)

_WORK_CHUNKS = 32
"""Chunks that are pinned, sealed and submitted together: two calls of a tier's default size. More would keep the first ones waiting."""


class _Work:
    """Some chunks of one store.

    Attributes:
        namespace: That they are sealed for.
        places: The tiers that they are for.
        left: Parts that are not over: sealing, and one job for each tier.
    """

    __slots__ = ("bytes", "left", "namespace", "pin", "places", "slots")

    def __init__(self, slots: Sequence[Slot], pin: Pin, namespace: str, places: frozenset[int]) -> None:
        self.slots = slots
        self.pin = pin
        self.namespace = namespace
        self.places = places
        self.bytes = sum(slot.record_bytes for slot in slots)
        self.left = 1


class Cascades:
    """Pins what was stored, seals it on one thread, and gives it to every tier. Used under the store's lock, which that thread takes too.

    What waits to be sealed, and what each tier is storing, are bounded; more waits its turn without a pin, in the order in which it came.
    What is evicted before its turn is shed and counted. A slot that a call may still read when its job ended stays pinned, and readable,
    until the tier releases it, and counts as long against the tier's share.
    """

    def __init__(
        self,
        host: HostTier,
        tiers: Sequence[StoreTier],
        *,
        name: str,
        lock: threading.Lock,
        holds: Holds,
        namespace: str,
        layout: str,
        shares: Shares,
        metrics: TierMetrics,
        job_ids: Iterator[int],
        off: set[int],
        fault: Callable[[str], None],
    ) -> None:
        self.namespace = namespace
        self._host = host
        self._tiers = tiers
        self._holds = holds
        self._layout = layout
        self._shares = shares
        self._metrics = metrics
        self._job_ids = job_ids
        self._off = off
        self._fault = fault
        self._touches = Touches(host, tiers, metrics, fault)
        holds.on_hits = self._touches.hit
        self._wake = threading.Condition(lock)
        self._queue: deque[_Work] = deque()
        self._queued_bytes = 0
        self._sealing: _Work | None = None
        self._jobs: list[dict[int, _Work]] = [{} for _ in tiers]
        # By tier, the chunks that wait their turn.
        self._backlogs: list[dict[bytes, None]] = [{} for _ in tiers]
        self._told_of_shed = False
        self._name = name
        # A row can be held by several calls of one tier.
        self._held: dict[tuple[int, int], list[Pin]] = {}
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=f"{name}-seal", daemon=True)

    @property
    def busy(self) -> bool:
        """Whether something waits to be sealed, or a tier is storing."""
        return bool(self._queue) or self._sealing is not None or any(self._jobs)

    @property
    def waits(self) -> bool:
        """Whether chunks wait their turn."""
        return any(self._backlogs)

    @property
    def bytes(self) -> int:
        """Host memory that is in use for tiers, counted for each of them."""
        return self._queued_bytes + sum(self._shares.used_bytes)

    @property
    def held(self) -> int:
        """Slots that calls which outlived their jobs may still read."""
        return len(self._held)

    def open_jobs(self, place: int) -> bool:
        """Whether a tier is storing."""
        return bool(self._jobs[place])

    def start(self) -> None:
        """Start the thread, if a tier stores.

        Raises:
            ConfigError: the system starts no more threads.
        """
        if not self._touches.storing:
            return
        try:
            self._thread.start()
        except RuntimeError:
            problem = "the system starts no thread for this process; raise its limit of processes"
            raise ConfigError(self._thread.name, "thread", problem) from None

    def add(self, slots: Sequence[Slot]) -> None:
        """These slots are complete, and about to be READY: store them in every tier that wants them."""
        if not self._touches.storing or self._stopped:
            return
        self._holds.settle()
        for places, wanted in self._touches.stored(slots).items():
            self._give(wanted, places)

    def advance(self) -> None:
        """Send what waited its turn, as far as there is room, and what a tier wants now that it was used. Called at every poll."""
        for place, used in self._touches.take_hit().items():
            self._holds.settle()
            self._give(used, frozenset((place,)))
        # What is about to be sealed is on its way to the tiers' shares.
        sealing = bool(self._queue) or self._sealing is not None
        for place, backlog in enumerate(self._backlogs):
            if place in self._off:
                self._count_shed(len(backlog), place)
                backlog.clear()
            if not backlog or sealing:
                continue
            used_bytes = self._shares.used_bytes[place]
            room_bytes = self._shares.share_bytes - used_bytes
            part: list[Slot] = []
            gone: list[bytes] = []
            for key in backlog:
                slot = self._host.get(key)
                if slot is None or slot.state is not SlotState.READY:
                    gone.append(key)
                    continue
                room_bytes -= slot.record_bytes
                if len(part) == _WORK_CHUNKS or (room_bytes < 0 and (part or used_bytes)):
                    break
                part.append(slot)
            for key in gone:
                del backlog[key]
            self._count_shed(len(gone), place)
            if part:
                self._holds.settle()
                for slot in part[: self._add(part, frozenset((place,)))]:
                    del backlog[slot.key]
                self._wake.notify()

    def ended(self, place: int, result: JobResult) -> bool:
        """A job of a tier ended. False: it is none of ours."""
        work = self._jobs[place].pop(result.job_id, None)
        if work is None:
            return False
        self._shares.use(place, -work.bytes)
        try:
            if result.held:
                held = frozenset(result.held)
                for slot in work.slots:
                    if slot.number in held:
                        # As the work's own pin, which is still there: so it costs nothing more, and goes on to leave the reserve alone.
                        pin = self._host.pin((slot,), True)
                        if pin is None:
                            raise RuntimeError(f"slot {slot.number} could not be pinned once more")
                        self._shares.use(place, slot.record_bytes)
                        self._held.setdefault((place, slot.number), []).append(pin)
        finally:
            self._end_part(work)
        name = self._tiers[place].name
        for outcome, keys in (("stored", result.done), ("failed", result.failed), ("skipped", result.skipped)):
            if keys:
                self._metrics.count("cascades", name, outcome, by=len(keys))
        return True

    def released(self, place: int, row: int) -> bool:
        """Nothing touches a row any more. False: it is none of ours."""
        pins = self._held.get((place, row))
        if pins is None:
            return False
        pin = pins.pop()
        self._shares.use(place, -pin.slots[0].record_bytes)
        self._host.unpin(pin)
        if not pins:
            del self._held[place, row]
        return True

    def lost(self, place: int) -> list[JobResult]:
        """Results for the jobs that a tier does not know any more."""
        return [JobResult(job_id, (), tuple(slot.key for slot in work.slots), (), 0, 0.0) for job_id, work in self._jobs[place].items()]

    def reset(self, namespace: str) -> None:
        """What was stored until now is not given to tiers any more; what is stored from now on goes to this namespace."""
        self.namespace = namespace
        self._touches.clear()
        for backlog in self._backlogs:
            backlog.clear()
        queue, self._queue = self._queue, deque()
        for work in queue:
            self._queued_bytes -= work.bytes
            self._end_part(work)

    def stop(self) -> None:
        """No more is taken in; what waits is dropped."""
        self._stopped = True
        for place, backlog in enumerate(self._backlogs):
            self._count_shed(len(backlog), place)
        self.reset(self.namespace)
        self._wake.notify()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread, without the lock. False: it did not end."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _give(self, slots: Sequence[Slot], places: frozenset[int]) -> None:
        """Store these in these tiers, where others wait already after them."""
        behind = {place for place in places if self._backlogs[place]}
        for place in behind:
            self._wait_turn(slots, place)
        if slots and behind != places:
            self._queue_up(slots, places - behind)

    def _queue_up(self, slots: Sequence[Slot], places: frozenset[int]) -> None:
        for start in range(0, len(slots), _WORK_CHUNKS):
            part = slots[start : start + _WORK_CHUNKS]
            if (fit := self._add(part, places)) < len(part):
                # The tail goes with it: without its head it is of little use.
                for place in places:
                    self._wait_turn(slots[start + fit :], place)
                break
        self._wake.notify()

    def _wait_turn(self, slots: Sequence[Slot], place: int) -> None:
        """There is no room for these now."""
        if place in self._off:
            self._count_shed(len(slots), place)
            return
        backlog = self._backlogs[place]
        backlog.update((slot.key, None) for slot in slots)
        if len(backlog) > 2 * self._host.row_count:
            # At least half of them were evicted, so that this is rare.
            there = {key: None for key in backlog if self._host.get(key) is not None}
            self._count_shed(len(backlog) - len(there), place)
            self._backlogs[place] = there

    def _count_shed(self, count: int, place: int) -> None:
        """A tier does not get so many chunks."""
        if not count:
            return
        if not self._told_of_shed and place not in self._off:
            self._told_of_shed = True
            logger.warning(
                "%s: tier %s does not get %d chunks: too much is on its way to tiers already. A larger host tier or cascade_fraction, or a "
                "faster store, would help; from now on such chunks are only counted (cascades, shed)",
                self._name,
                self._tiers[place].name,
                count,
            )
        self._metrics.count("cascades", self._tiers[place].name, "shed", by=count)

    def _add(self, slots: Sequence[Slot], places: frozenset[int]) -> int:
        """Queue as many from the front as there is room for. Returns how many."""
        room_bytes = self._shares.max_bytes - self._queued_bytes
        fit = 0
        for slot in slots:
            room_bytes -= slot.record_bytes
            if room_bytes < 0:
                break
            fit += 1
        pin = self._host.pin(slots[:fit], True) if fit else None
        while fit and pin is None:
            fit //= 2
            pin = self._host.pin(slots[:fit], True) if fit else None
        if pin is not None:
            work = _Work(tuple(slots[:fit]), pin, self.namespace, places)
            self._queued_bytes += work.bytes
            self._queue.append(work)
        return fit

    def _end_part(self, work: _Work) -> None:
        work.left -= 1
        if not work.left:
            self._host.unpin(work.pin)

    # The thread.

    def _run(self) -> None:
        while (work := self._next()) is not None:
            sealed: list[Slot] = []
            try:
                sealed = self._seal(work)
            except BaseException:  # the thread must go on, whatever one chunk does
                logger.exception("chunks could not be sealed")
            try:
                self._sealed(work, sealed)
            except BaseException:  # as above; what could be given back was
                logger.exception("chunks could not be given to tiers")

    def _next(self) -> _Work | None:
        with self._wake:
            while not self._queue:
                if self._stopped:
                    return None
                self._wake.wait()
            self._sealing = work = self._queue.popleft()
            return work

    def _seal(self, work: _Work) -> list[Slot]:
        """Seal each slot in its place. Others may read its payload meanwhile: only the header page and the padding change."""
        sealed = []
        for slot in work.slots:
            if slot.sealed:
                # It was for other tiers, in this namespace: after a reset no slot is resident.
                sealed.append(slot)
                continue
            try:
                key = ChunkKey.from_engine(work.namespace, slot.key)
                seal(self._host.record(slot.number).view, key, self._layout, slot.payload_bytes)
            except Exception:
                logger.exception("the chunk in slot %d could not be sealed", slot.number)
                with self._wake:
                    self._fault("seal")
                continue
            sealed.append(slot)
        return sealed

    def _sealed(self, work: _Work, sealed: list[Slot]) -> None:
        with self._wake:
            self._sealing = None
            self._queued_bytes -= work.bytes
            try:
                if sealed and work.namespace == self.namespace and not self._stopped:
                    for slot in sealed:
                        slot.sealed = True
                    work.slots = sealed
                    work.bytes = sum(slot.record_bytes for slot in sealed)
                    for place in sorted(work.places):
                        self._submit(place, work)
            finally:
                self._end_part(work)

    def _submit(self, place: int, work: _Work) -> None:
        below = self._tiers[place]
        if place in self._off or not self._shares.has_room(place, work.bytes):
            self._wait_turn(work.slots, place)
            return
        job_id = next(self._job_ids)
        self._jobs[place][job_id] = work
        self._shares.use(place, work.bytes)
        work.left += 1
        try:
            below.tier.submit_store(job_id, [slot.key for slot in work.slots], [slot.number for slot in work.slots])
        except Exception:
            # Nobody knows whether it was queued. It ends with its result, or when the tier says that it has no job.
            logger.exception("%s: a store could not be submitted", below.name)
            self._fault("tier")
