"""What the connector's scheduler drives: vLLM's `OffloadingManager` over a TieredStore."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from vllm.v1.kv_offload.base import OffloadingManager

from kvstore_sdk.host import Slot
from kvstore_sdk.store import HOST, StoreTier, TieredStore
from kvstore_sdk.tier import Lookup
from kvstore_sdk.vllm import compat, metrics
from kvstore_sdk.vllm.guard import NeverRaises, never_raises
from kvstore_sdk.vllm.hints import HintReader
from kvstore_sdk.vllm.offloading.marks import MAX_SEQUENCE, Marks
from kvstore_sdk.vllm.offloading.transfers import SlotSpec
from kvstore_sdk.vllm.opening import NOBODY_READS
from kvstore_sdk.vllm.tails import PartialTails

__all__ = ["KVStoreOffloadingManager", "OpenStore"]

logger = logging.getLogger(__name__)

_HIT, _MISS = Lookup.HIT, Lookup.MISS


class OpenStore(NamedTuple):
    """A store that is open, and what belongs to it.

    Attributes:
        store: Over the region's host tier.
        tiers: Below it.
        marks: Of the region's slots.
        release: Unmaps the region. Not called while a call may still touch it.
        localities: Name of each tier -> where it is, as the engine calls it, or None.
        hints: Reads where a request says that its chunks are; None: no tier wants to know.
        outlives_us: Some tier keeps records after the end of this process.
    """

    store: TieredStore
    tiers: Sequence[StoreTier]
    marks: Marks
    release: Callable[[], None]
    localities: Mapping[str, Any]
    hints: HintReader | None
    outlives_us: bool


class _Writing(NamedTuple):
    """A chunk on its way from the device: the number of the store that marks it, its place in that store, the number of its slot."""

    sequence: int
    place: int
    number: int


class KVStoreOffloadingManager(OffloadingManager, NeverRaises):
    """vLLM's view of host memory and the tiers below it.

    No method raises but `prepare_load`, and none waits but `reset_cache` and `shutdown`, which are bounded. `prepare_load` raises where
    vLLM asks for a chunk that it was not told is there: a transfer cannot fail, so anything else would be wrong KV.
    """

    def __init__(self, opened: OpenStore | None, known: compat.SpecFacts, *, none_hash: bytes | None = None) -> None:
        """Args:
        opened: What is stored to; None stores nothing and finds nothing.
        known: Of the engine.
        none_hash: What the engine must hash from for its keys to be shared, checked with the first request.
        """
        self.shown_as = "kvstore offloading"
        self._open = opened
        self._store = opened.store if opened is not None else None
        self._tails = PartialTails(known)
        self._hash_unconfirmed = none_hash
        self._events = known.events
        self._host_groups = metrics.HostGroups()
        self._writing: dict[bytes, _Writing] = {}
        self._sequence = 0
        self._polled = self._told_of_epoch = False

    # Requests and look-ups.

    @never_raises(compat.request_context)
    def on_new_request(self, req_context: Any) -> Any:
        """Ask for nothing special. The first request confirms that the engine hashes as the identity says; any may name a peer."""
        if self._store is not None and self._hash_unconfirmed is not None:
            # May switch the store off.
            self._confirm_hash(self._hash_unconfirmed)
        if self._store is not None and self._open is not None:
            hints = self._open.hints
            hint = hints.read(compat.transfer_params(req_context)) if hints is not None else None
            self._store.begin_request(req_context.req_id, compat.allowed_tiers(req_context, self._open.localities), hint)
        return compat.request_context()

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """From memory. A hit stays one until the end of the step at least; what is pending ends within `lookup_timeout_s`, or a load's."""
        # Guarded here and not by the decorator: the engine calls this for every chunk of every request that waits.
        try:
            store = self._store
            if store is None or (self._tails.possible and self._tails.is_one(key, req_context)):
                return compat.MISS
            if not self._polled:
                # What arrived since the last step may answer this one.
                self._polled = True
                store.poll()
            answer = store.lookup(req_context.req_id, key)
            if answer is _HIT:
                return compat.HIT
            if answer is _MISS:
                return compat.MISS
            return compat.PENDING if store.is_filling(key) else compat.RETRY
        except Exception:  # noqa: BLE001  logged by `_complain`
            self._complain("lookup")
            return compat.MISS

    @never_raises(lambda: None)
    def on_request_finished(self, req_context: Any) -> None:
        """Forget what the request was told. Its transfers may still end, and in some versions begin, after this."""
        if self._store is not None:
            self._store.end_request(req_context.req_id)

    @never_raises(lambda: None)
    def on_schedule_end(self, *context: Any) -> None:
        """Let go of the hits that were not loaded, send this step's look-ups and promotions, and hear what ended."""
        self._polled = False
        if self._store is None:
            return
        begun, preempted = compat.scheduled_requests(context)
        self._store.begin_computing(begun)
        for request_id in preempted:
            # What it stored itself in the meantime it may find, though it was a miss when it began. After a reset it stores again.
            self._store.restart_request(request_id)
        self._store.flush()
        self._store.poll()

    def get_load_source(self, key: bytes, req_context: Any) -> Any:
        """Where a hit came from (vLLM 0.32): host memory, or the tier it was promoted from."""
        name = None
        try:
            if self._store is not None:
                name = self._store.source(req_context.req_id, key)
        except Exception:  # noqa: BLE001  logged by `_complain`
            self._complain("get_load_source")
        if name is None or name == HOST or self._open is None:
            return compat.load_source(False, None)
        return compat.load_source(True, self._open.localities.get(name))

    # Transfers.

    def prepare_load(self, keys: Collection[bytes], req_context: Any) -> Any:
        """Pin chunks that are hits, until `complete_load`.

        Raises:
            KeyError: one is not there, which no look-up of this request can have said.
        """
        if not keys:
            return SlotSpec((), ())
        if self._store is None:
            raise KeyError(f"kvstore offloading: request {req_context.req_id} loads {len(keys)} chunks, but nothing is stored")
        return _spec(self._store.begin_load(req_context.req_id, list(keys)))

    @never_raises(lambda: None)
    def complete_load(self, keys: Collection[bytes], req_context: Any) -> None:
        """Every rank has read them."""
        if self._store is not None:
            self._store.end_load(req_context.req_id, list(keys))

    def prepare_store(self, keys: Collection[bytes], req_context: Any) -> Any:
        """Take slots for the chunks that are not there yet, in the order of `keys`. None: no room now, to be asked again."""
        try:
            return self._prepare_store(keys, req_context)
        except Exception:  # noqa: BLE001  logged by `_complain`
            self._complain("prepare_store")
            return compat.prepared_store((), SlotSpec((), ()))

    def _prepare_store(self, keys: Collection[bytes], req_context: Any) -> Any:
        whole = [key for key in keys if not self._tails.is_one(key, req_context)]
        if self._store is None or not whole:
            return compat.prepared_store((), SlotSpec((), ()))
        slots = self._store.begin_store(req_context.req_id, whole)
        if slots is None:
            return None
        wanted = [(key, slot) for key, slot in zip(whole, slots, strict=True) if slot is not None]
        if not wanted:
            return compat.prepared_store((), SlotSpec((), ()))
        self._sequence = self._sequence % MAX_SEQUENCE + 1
        self._writing.update((key, _Writing(self._sequence, place, slot.number)) for place, (key, slot) in enumerate(wanted))
        return compat.prepared_store([key for key, _ in wanted], _spec([slot for _, slot in wanted], self._sequence))

    @never_raises(lambda: None)
    def complete_store(self, keys: Collection[bytes], req_context: Any, success: bool = True) -> None:
        """Every rank reported the store: chunks that all of them wrote whole, as their marks say, may be read."""
        if self._store is None or self._open is None:
            return
        # The engine gives a set, the store wants the order of the chain.
        found = sorted((writing, key) for key in keys if (writing := self._writing.pop(key, None)) is not None)
        for sequence, part in groupby(found, key=lambda pair: pair[0].sequence):
            written = {writing.number: key for writing, key in part}
            whole = list(written.values())
            self._store.end_store(whole, self._not_whole(self._open.marks, sequence, written) if success else frozenset(whole))

    def _not_whole(self, marks: Marks, sequence: int, written: Mapping[int, bytes]) -> Collection[bytes]:
        """The chunks of a store that some rank did not write, or not all of; all of them when that cannot be told."""
        try:
            missing, lacking = marks.read(list(written), sequence)
        except Exception:  # noqa: BLE001  logged by `_complain`
            self._complain("complete_store")
            return frozenset(written.values())
        if missing:
            logger.error(
                "%s: %d chunks were reported as stored, but not all ranks wrote them; they are dropped", self.shown_as, len(missing)
            )
        return {written[number] for number in missing | lacking}

    # What the engine may ask now and then.

    @never_raises(lambda: False)
    def has_pending_work(self) -> bool:
        """Whether something ends by a deadline of its own and wants to be heard of."""
        return self._store is not None and self._store.busy

    @never_raises(tuple)
    def take_events(self) -> Iterable[Any]:
        """What came to host memory and to tiers, and went from them, where KV events are switched on."""
        if self._store is None or self._open is None or not self._events:
            return ()
        return tuple(
            compat.offloading_event(
                event.keys,
                removed=event.removed,
                where=self._open.localities.get(event.tier),
                owner=None if event.tier == HOST else event.tier,
                host=event.tier == HOST,
            )
            for event in self._store.take_events()
        )

    @never_raises(lambda: None)
    def get_stats(self) -> Any:
        """What was counted since the last call, by the store, in host memory and by each tier."""
        if self._open is None:
            return None
        store = self._open.store
        # Nothing but numbers, which another thread may just be changing.
        host = self._host_groups.take(store.host.stats())
        return metrics.store_stats(store.metrics.take(), host, {below.name: below.tier.metrics.take() for below in self._open.tiers})

    # The end of things.

    def reset_cache(self) -> None:
        """The engine's weights may change: never serve again what was stored before. Takes the store's `drain_timeout_s` at most."""
        self._writing.clear()
        if self._reset():
            self._tell_of_epoch()

    def shutdown(self) -> None:
        """Close the tiers, in the store's `close_timeout_s` and theirs, and let go of the region unless a call may still touch it."""
        opened, self._open, self._store = self._open, None, None
        if opened is None:
            return
        try:
            untouched = opened.store.close()
            opened.marks.close()
            if untouched:
                opened.release()
        except Exception:  # noqa: BLE001  logged by `_complain`
            self._complain("shutdown")

    # Inside.

    def _tell_of_epoch(self) -> None:
        """Say once that what is stored after a reset is this engine's alone."""
        if self._open is not None and self._open.outlives_us and not self._told_of_epoch:
            self._told_of_epoch = True
            where = f"v1/{self._open.store.identity.namespace}"
            logger.warning("%s: after a reset its chunks are private to this process" + NOBODY_READS, self.shown_as, where)

    def _confirm_hash(self, expected: bytes) -> None:
        """The engine draws its seed after the manager is built, so what was assumed is checked before anything is stored."""
        if not compat.is_none_hash(expected):
            logger.warning("%s: the engine hashes from another seed than expected: its chunks are private", self.shown_as)
            self._reset()
        self._hash_unconfirmed = None

    def _reset(self) -> bool:
        """Forget everything. False: there is nothing, or it could not be done, and nothing is stored or found from now on."""
        try:
            if self._store is not None:
                self._store.reset()
                return True
        except Exception:  # noqa: BLE001  logged by `_complain`
            self._complain("reset_cache")
            logger.error("%s: switched off after an error of its own", self.shown_as)
            self.shutdown()
        return False


def _spec(slots: Sequence[Slot], sequence: int = 0) -> SlotSpec:
    return SlotSpec([slot.offset for slot in slots], [slot.number for slot in slots], sequence)
