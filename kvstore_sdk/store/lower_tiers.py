"""The tiers below host memory, driven together: whatever one of them does, the others have their turn."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvstore_sdk.errors import ConfigError
from kvstore_sdk.identity import KVIdentity
from kvstore_sdk.store.cascades import Cascades
from kvstore_sdk.store.promotions import Promotions
from kvstore_sdk.store.types import StoreTier
from kvstore_sdk.tier import JobResult, Tier

__all__ = ["LowerTiers", "check_tiers"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_CALL_S = 60.0
"""Longest that a tier's `reset` or `close` is waited for. They are bounded by its own settings; this is for one that breaks its promise."""


def check_tiers(where: str, tiers: Sequence[StoreTier], identity: KVIdentity) -> None:
    """Raise ConfigError unless all have names of their own and the identity."""
    if twice := [name for name, count in Counter(below.name for below in tiers).items() if count > 1]:
        raise ConfigError(where, "tiers", f"{twice[0]!r} is there twice; give each tier a name of its own")
    for below in tiers:
        if below.tier.identity.namespace != identity.namespace:
            raise ConfigError(where, "tiers", f"{below.name!r} has another identity than the store; open it with the same")


class LowerTiers:
    """Sends to tiers and hears from them. Used under the store's lock."""

    def __init__(
        self, name: str, tiers: Sequence[StoreTier], promotions: Promotions, cascades: Cascades, fault: Callable[[str], None]
    ) -> None:
        self._name = name
        self._tiers = tiers
        self._promotions = promotions
        self._cascades = cascades
        self._fault = fault

    @property
    def busy(self) -> bool:
        """Whether a tier has a job, or is about to get one."""
        return self._cascades.busy or self._promotions.busy

    @property
    def holds_slots(self) -> bool:
        """Whether calls may touch slots though their jobs ended."""
        return bool(self._promotions.quarantined or self._cascades.held)

    def flush(self) -> None:
        """Send loads and questions."""
        self._promotions.send()
        for place, below in enumerate(self._tiers):
            if place not in self._promotions.off:
                self._try(below, below.tier.flush)

    def poll(self) -> None:
        """Take in what ended."""
        for place, below in enumerate(self._tiers):
            results = self._try(below, below.tier.poll)
            if results is None:
                self._promotions.give_up(place)
                continue
            for result in results:
                self._hear(place, result)
            if self.holds_slots:
                for row in self._try(below, below.tier.take_released) or ():
                    if not self._promotions.released(place, row):
                        self._cascades.released(place, row)
            if (self._promotions.open_jobs(place) or self._cascades.open_jobs(place)) and not below.tier.busy:
                # Submitting them failed.
                for result in [*self._promotions.lost(place), *self._cascades.lost(place)]:
                    self._hear(place, result)
        self._cascades.advance()

    def reset(self, weights_version: str, identity: KVIdentity) -> None:
        """Give all tiers the identity's namespace. One that does not take it is not used any more."""
        self._at_once("reset", lambda tier: tier.reset(weights_version, identity.epoch))
        for place, below in enumerate(self._tiers):
            if place not in self._promotions.off and below.tier.identity.namespace != identity.namespace:
                self._promotions.off.add(place)
                logger.error("%s: tier %s could not be reset and is not used any more", self._name, below.name)

    def close(self) -> bool:
        """Close all tiers. Returns whether nothing touches host memory any more."""
        ended = self._at_once("close", lambda tier: tier.close())
        self.poll()
        return ended and not self.holds_slots and not any(below.tier.touches_memory for below in self._tiers)

    def _hear(self, place: int, result: JobResult) -> None:
        """One job's end must not keep the others from theirs."""
        try:
            if not self._promotions.ended(place, result) and not self._cascades.ended(place, result):
                logger.error("%s: tier %s reported job %d, which is none of ours", self._name, self._tiers[place].name, result.job_id)
        except Exception:
            logger.exception("%s: the end of a job of tier %s could not be taken in", self._name, self._tiers[place].name)
            self._fault("host")

    def _at_once(self, what: str, call: Callable[[Tier], None]) -> bool:
        """Do something that waits at all tiers at once, so that it takes as long as the slowest. Returns whether all ended well."""
        ended: list[StoreTier] = []

        def run(below: StoreTier) -> None:
            try:
                call(below.tier)
            except BaseException:  # whatever one tier does, the others have their turn
                logger.exception("%s: %s of tier %s failed", self._name, what, below.name)
            else:
                ended.append(below)

        threads = []
        for below in self._tiers:
            thread = threading.Thread(target=run, args=(below,), name=f"{self._name}-{what}-{below.name}", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                run(below)
                continue
            threads.append(thread)
        until_s = time.monotonic() + _CALL_S
        for thread in threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        return len(ended) == len(self._tiers)

    def _try(self, below: StoreTier, call: Callable[[], _T]) -> _T | None:
        try:
            return call()
        except Exception:
            logger.exception("%s: a call of tier %s failed", self._name, below.name)
            self._fault("tier")
            return None
