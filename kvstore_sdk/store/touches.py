"""Chunks in host memory that a tier does not want before they are used again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence

from kvstore_sdk.host import HostTier, Slot, SlotState
from kvstore_sdk.store.requests import Request
from kvstore_sdk.store.types import StoreTier
from kvstore_sdk.tier.metrics import TierMetrics

__all__ = ["Touches"]

logger = logging.getLogger(__name__)


class Touches:
    """Asks each tier which chunks it wants, once they are stored and again when a request hits them. Used under the store's lock.

    A request that finds what it stored itself, because it was preempted, is no second use.
    """

    def __init__(self, host: HostTier, tiers: Sequence[StoreTier], metrics: TierMetrics, fault: Callable[[str], None]) -> None:
        self._host = host
        self._tiers = tiers
        self._metrics = metrics
        self._fault = fault
        self.storing = tuple(place for place, below in enumerate(tiers) if below.tier.stores)
        """Places of the tiers that store anything."""
        # By chunk, the tiers that do not have it because they did not want it.
        self._kept_out: dict[bytes, set[int]] = {}
        # Those of them that were hit since they were last asked for.
        self._hit: dict[bytes, None] = {}

    def stored(self, slots: Sequence[Slot]) -> dict[frozenset[int], Sequence[Slot]]:
        """These chunks are new. Returns which of them go to which tiers: those for the same tiers together."""
        keys = [slot.key for slot in slots]
        everything: set[int] = set()
        parts: dict[frozenset[int], Sequence[Slot]] = {}
        for place in self.storing:
            wanted = self._wanted(place, keys)
            if len(wanted) == len(keys):
                everything.add(place)
                continue
            self._metrics.count("cascades", self._tiers[place].name, "not_admitted", by=len(keys) - len(wanted))
            self._keep_out(place, (key for key in keys if key not in wanted))
            parts[frozenset((place,))] = [slot for slot in slots if slot.key in wanted]
        if everything:
            parts[frozenset(everything)] = slots
        return parts

    def hit(self, request: Request, keys: Collection[bytes]) -> None:
        """A request found these chunks in host memory."""
        if self._kept_out:
            mine = (request.chain, request.earlier)
            self._hit.update((key, None) for key in keys if key in self._kept_out and not any(key in some for some in mine))

    def take_hit(self) -> dict[int, list[Slot]]:
        """What a tier wants now, by its place."""
        if not self._hit:
            return {}
        hit, self._hit = self._hit, {}
        found: dict[int, list[Slot]] = {}
        for key in hit:
            places = self._kept_out.pop(key, set())
            slot = self._host.get(key)
            if slot is None or slot.state is not SlotState.READY:
                # It left before its turn: its next store is its next use.
                continue
            for place in places:
                if self._wanted(place, (key,)):
                    found.setdefault(place, []).append(slot)
                else:
                    self._keep_out(place, (key,))
        return found

    def clear(self) -> None:
        """What is in host memory goes to no tier any more."""
        self._kept_out.clear()
        self._hit.clear()

    def _wanted(self, place: int, keys: Sequence[bytes]) -> Collection[bytes]:
        try:
            return frozenset(self._tiers[place].tier.admit(keys))
        except Exception:
            logger.exception("%s: could not say which chunks it wants", self._tiers[place].name)
            self._fault("tier")
            return keys

    def _keep_out(self, place: int, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._kept_out.setdefault(key, set()).add(place)
        if len(self._kept_out) > 2 * self._host.row_count:
            # At least half of them were evicted, so that this is rare.
            self._kept_out = {key: places for key, places in self._kept_out.items() if self._host.get(key) is not None}
