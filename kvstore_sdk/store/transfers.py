"""The engine's own copies between its device and host memory, from begin to end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from kvstore_sdk.host import HostTier, Pin, Purpose, Slot, SlotState
from kvstore_sdk.keys import GROUP_BYTES
from kvstore_sdk.store.cascades import Cascades
from kvstore_sdk.store.promotions import Promotions
from kvstore_sdk.store.requests import Holds, Request
from kvstore_sdk.tier.metrics import TierMetrics

__all__ = ["Transfers"]

_READY = SlotState.READY
_FUTILE_S = 0.1
"""While hits were found not to be what keeps stores out, this long they are not tried again: that costs time for each of them."""


class _Load(NamedTuple):
    """A load that the engine has not ended: its chunks that it has not, and the pin of all of them."""

    left: set[bytes]
    pin: Pin


class Transfers:
    """Stores and loads of the engine that are under way. Used under the store's lock.

    They belong to no request's life: either may end after its request did.
    """

    def __init__(
        self,
        host: HostTier,
        *,
        holds: Holds,
        promotions: Promotions,
        cascades: Cascades,
        metrics: TierMetrics,
        rest: Callable[[Request], None],
        evicted: Callable[[], None],
        came: Callable[[list[bytes]], None],
    ) -> None:
        self._host = host
        self._get = host.get
        self._holds = holds
        self._promotions = promotions
        self._cascades = cascades
        self._metrics = metrics
        self._rest = rest
        self._evicted = evicted
        self._came = came
        self._stores: dict[bytes, Slot] = {}
        self._loads: dict[str, list[_Load]] = {}
        # When taking hits back was last of no use.
        self._futile_s = 0.0

    def begin_store(self, request: Request | None, keys: Sequence[bytes]) -> list[Slot | None] | None:
        """Slots for what is not there; None: no room now."""
        get = self._get
        if len(self._promotions):
            comes = self._promotions.is_open
            fresh = self._fitting([key for key in keys if get(key) is None or comes(key)])
        else:
            fresh = self._fitting([key for key in keys if get(key) is None])
        if not fresh:
            return [None] * len(keys)
        self._holds.settle()
        if len(self._promotions):
            for key in fresh:
                self._promotions.supersede(key)
        slots = self._admit(fresh, frozenset(keys))
        self._evicted()
        if slots is None:
            # An engine asks again at every step.
            refused = request.refused if request is not None else set()
            self._metrics.count("no_room", "store", by=len(refused.union(fresh)) - len(refused))
            refused.update(fresh)
            return None
        if len(slots) == len(keys):
            self._stores.update(zip(keys, slots, strict=True))
            return list(slots)
        taken = {slot.key: slot for slot in slots}
        self._stores.update(taken)
        return [taken.pop(key, None) for key in keys]

    def end_store(self, keys: Collection[bytes], incomplete: Collection[bytes]) -> None:
        """All ranks wrote these chunks; of some not all of it."""
        pop = self._stores.pop
        slots = [slot for key in keys if (slot := pop(key, None)) is not None]
        if incomplete:
            lacking = frozenset(incomplete)
            dropped = [slot for slot in slots if slot.key in lacking]
            slots = [slot for slot in slots if slot.key not in lacking]
            for slot in dropped:
                self._host.discard(slot)
            self._metrics.count("incomplete_stores", by=len(dropped))
        if not slots:
            return
        self._metrics.count("engine_stores", by=len(slots))
        try:
            # Pinned for the tiers before anything could evict them.
            self._cascades.add(slots)
        finally:
            self._host.ready(slots)
        self._came([slot.key for slot in slots])

    def begin_load(self, request_id: str, request: Request | None, keys: Sequence[bytes]) -> list[Slot]:
        """Pin what the engine is about to copy from."""
        held = {} if request is None else request.held
        slots = []
        for key in keys:
            slot = held.get(key) or self._get(key)
            if slot is None or slot.state is not _READY:
                raise KeyError(f"store: begin_load: request {request_id}: chunk {key.hex()} is not in host memory; load only what was HIT")
            slots.append(slot)
        if slots:
            pin = self._host.pin(slots, False)
            self._loads.setdefault(request_id, []).append(_Load(set(keys), pin))
        return slots

    def end_load(self, request_id: str, keys: Collection[bytes]) -> None:
        """The engine copied these chunks, or gave up to. A second time is ignored and counted."""
        left = set(keys)
        told = len(left)
        loads = self._loads.get(request_id, [])
        for load in list(loads):
            ended = load.left & left
            left -= ended
            load.left.difference_update(ended)
            if not load.left:
                loads.remove(load)
                self._host.unpin(load.pin)
        if not loads:
            self._loads.pop(request_id, None)
        if len(left) < told:
            self._metrics.count("engine_loads", by=told - len(left))
        if left:
            self._metrics.count("double_releases", by=len(left))

    def reset(self) -> None:
        """The ends of what is under way will not be told. After `HostTier.reset`."""
        pins = [load.pin for loads in self._loads.values() for load in loads]
        self._host.forget([*self._stores.values(), *(slot for pin in pins for slot in pin.slots)])
        for pin in pins:
            self._host.unpin(pin)
        self._stores.clear()
        self._loads.clear()

    def _admit(self, keys: list[bytes], protected: frozenset[bytes]) -> list[Slot] | None:
        """Slots for these. The reserve is a promise to stores that are no larger than it: those get room once running transfers end, and
        are asked again until then. For a larger one it may never come, and the engine asks for more each time: of that, the head is taken.
        """
        slots = self._host.admit(keys, Purpose.STORE, protected)
        asked = len(keys)
        while slots is None and len(keys) > 1 and self._host.exceeds_reserve(keys):
            keys = keys[: len(keys) // 2]
            slots = self._host.admit(keys, Purpose.STORE, protected)
        if slots is None and self._host.several_sizes:
            slots = self._admit_before_hits(keys, protected)
        if slots is not None and len(keys) < asked:
            self._metrics.count("unfit_stores", by=asked - len(keys))
        return slots

    def _admit_before_hits(self, keys: list[bytes], protected: frozenset[bytes]) -> list[Slot] | None:
        """Hits that wait, few as they may be, can lie in every slab, and keep all of them from another size. Stores come first."""
        if self._holds.now_s - self._futile_s < _FUTILE_S:
            return None
        slots: list[Slot] | None = None

        def fits() -> bool:
            nonlocal slots
            slots = self._host.admit(keys, Purpose.STORE, protected)
            return slots is not None

        for request in self._holds.take_back(fits):
            self._rest(request)
        if slots is None:
            self._futile_s = self._holds.now_s
        return slots

    def _fitting(self, keys: list[bytes]) -> list[bytes]:
        """As many from the front as host memory could ever hold, of groups that it has."""
        if strange := {group for group in {key[-GROUP_BYTES:] for key in keys} if not self._is_group(group)}:
            keys = [key for key in keys if key[-GROUP_BYTES:] not in strange]
        count = self._host.could_admit(keys)
        if count < len(keys):
            self._metrics.count("unfit_stores", by=len(keys) - count)
            keys = keys[:count]
        return keys

    def _is_group(self, group: bytes) -> bool:
        return len(group) == GROUP_BYTES and self._host.payload_bytes(int.from_bytes(group, "big")) is not None
