"""What is let through to a store that does not work, or is too slow: a trial now and then."""

from __future__ import annotations

from kvstore_sdk.tier.breaker import Breakers
from kvstore_sdk.tier.floor import Floor
from kvstore_sdk.tier.lookups import LookupTable
from kvstore_sdk.tier.types import Lookup

__all__ = ["Gate"]


class Gate:
    """Stands between the engine's questions and a Tier's table and queues; used by one thread at a time.

    While the breakers are closed everything passes. While one is open, its operation is tried by one item each `probe_s`: a look-up that is
    asked although the table may know the answer, one chunk of a load, one chunk of a store. A look-up is told HIT only if its load is
    going to pass too. While the store is slower than the floor, look-ups are misses, but those of one request each `probe_s`.
    """

    def __init__(self, breakers: Breakers, floor: Floor, table: LookupTable) -> None:
        self._breakers = breakers
        self._floor = floor
        self.too_slow = 0
        """Requests and keys that were told MISS for the floor, so far."""
        self._table = table
        self._trial_lookup: tuple[str, bytes] | None = None
        self._trial_load: bytes | None = None

    def lookup(self, request_id: str, key: bytes) -> Lookup:
        """Answer from the table, or MISS at once."""
        exists, get, table = self._breakers.exists, self._breakers.get, self._table
        if get.is_open and not get.is_due():
            return table.refuse(request_id, key)
        if self._floor.is_slow and not table.is_answered(request_id, key) and not self._floor.passes(request_id):
            self.too_slow += 1
            return table.refuse(request_id, key)
        # Whom a request names may well be there where the others are not.
        if exists.is_open and not table.is_hinted(request_id) and self._trial_lookup != (request_id, key):
            if table.is_answered(request_id, key) or table.is_bad(key) or not exists.allows():
                return table.refuse(request_id, key)
            self._trial_lookup = (request_id, key)
            answer = table.ask_again(request_id, key)
        else:
            answer = table.lookup(request_id, key)
        if answer is Lookup.HIT and get.is_open and get.allows():
            # The load that follows is the trial of `get`.
            self._trial_load = key
        return answer

    def look(self) -> None:
        """Stand aside when everything works again."""
        table = self._table
        # In this order: what stops working meanwhile makes it wary once more.
        table.wary = False
        if self._breakers.exists.is_open or self._breakers.get.is_open or self._floor.is_slow:
            table.be_wary()

    @property
    def loads_warily(self) -> bool:
        """Whether loads have to ask `may_load`."""
        return self._breakers.get.is_open

    @property
    def stores_warily(self) -> bool:
        """Whether stores have to ask `may_store`."""
        return self._breakers.put.is_open

    def may_load(self, key: bytes) -> bool:
        """Whether this chunk may be loaded; while `get` does not work it is the trial."""
        if key != self._trial_load and not self._breakers.get.allows():
            return False
        self._trial_load = None
        return True

    def may_store(self) -> bool:
        """Whether a chunk may be stored; while `put` does not work it is the trial."""
        return self._breakers.put.allows()
