"""The table behind `Tier.lookup`: which chunks are known, and what each request was told."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

from kvstore_sdk.tier.types import Lookup

__all__ = ["LookupTable", "Probe"]

_MAX_REQUESTS = 65_536
"""Requests whose end is never told are forgotten beyond this, oldest first."""


class Probe:
    """One key that the backend is asked about, and the requests that wait for the answer."""

    __slots__ = ("asked_s", "key", "news", "waiting")

    def __init__(self, key: bytes, asked_s: float, news: int) -> None:
        self.key = key
        self.asked_s = asked_s
        self.news = news
        self.waiting: set[str] = set()


class _Known:
    """The last news of a key: that it is there, or that it was found gone or bad."""

    __slots__ = ("bad", "expires_s", "news", "present")

    def __init__(self, news: int, present: bool, expires_s: float, bad: bool) -> None:
        self.news = news
        self.present = present
        self.expires_s = expires_s
        self.bad = bad


class LookupTable:
    """Answers from memory; used by one thread at a time.

    - A MISS holds for the request that asked; a HIT for `ttl_s`, or until the key is `lost`.
    - A request is told HIT at most `max_hits` times for one key, then MISS: a prefix larger than the host tier, or a load that always
      fails, ends in a recomputation, never in a request that waits for ever.
    - Every probe is answered or becomes a MISS `timeout_s` after its key was first asked for.
    - News are numbered: an answer to a question that was asked before the news arrived does not overwrite them.
    """

    def __init__(
        self, *, timeout_s: float, ttl_s: float, max_keys: int, max_hits: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._timeout_s = timeout_s
        self._ttl_s = ttl_s
        self._max_keys = max_keys
        self._max_hits = max_hits
        self._clock = clock
        self._news = 0
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._probes: dict[bytes, Probe] = {}
        self._unsent: dict[str, list[Probe]] = {}
        # What each request was told: how often it may still hear HIT for a key. 0 is MISS, and a key that is not in it was not answered.
        self._told: dict[str, dict[bytes, int]] = {}
        self.hits = self.misses = self.timeouts = 0
        """Requests and keys that were told HIT and MISS, and probes that got no answer in time. The owner reads them and sets them back."""

    def __len__(self) -> int:
        return len(self._known)

    def lookup(self, request_id: str, key: bytes) -> Lookup:
        """Answer from what is known; a key that is not known becomes a probe."""
        told = self._told.get(request_id)
        if told is None:
            told = self._open(request_id)
        left = told.get(key)
        known = self._known.get(key)
        if left is not None:
            if left and known is not None and known.present:
                told[key] = left - 1
                return Lookup.HIT
            told[key] = 0
            return Lookup.MISS
        now = self._clock()
        if known is not None:
            if known.bad:
                told[key] = 0
                self.misses += 1
                return Lookup.MISS
            if known.present and now < known.expires_s:
                told[key] = self._max_hits - 1
                self.hits += 1
                return Lookup.HIT
        probe = self._probes.get(key)
        if probe is None:
            probe = self._probes[key] = Probe(key, now, self._news)
            self._unsent.setdefault(request_id, []).append(probe)
        elif now - probe.asked_s > self._timeout_s:
            self.timeouts += 1
            self.answer(probe, None)
            told[key] = 0
            self.misses += 1
            return Lookup.MISS
        probe.waiting.add(request_id)
        return Lookup.PENDING

    def take_unsent(self) -> list[list[Probe]]:
        """The probes that nobody was asked about yet, one list a request."""
        if not self._unsent:
            return []
        unsent, self._unsent = list(self._unsent.values()), {}
        return unsent

    def answer(self, probe: Probe, present: bool | None) -> None:
        """The backend's answer to a probe; None when there is none, which those who wait hear as MISS."""
        if self._probes.get(probe.key) is not probe:
            return
        del self._probes[probe.key]
        known = self._known.get(probe.key)
        if known is not None and known.news > probe.news:
            present = known.present
        elif present:
            self._learn(probe.key, present=True, bad=False)
        elif known is not None and known.present:
            del self._known[probe.key]
        for request_id in probe.waiting:
            told = self._told.get(request_id)
            if told is not None and probe.key not in told:
                told[probe.key] = self._max_hits if present else 0
                self.hits += bool(present)
                self.misses += not present

    def is_present(self, key: bytes) -> bool:
        """Whether the key is known to be there, fresh enough not to be stored again."""
        known = self._known.get(key)
        return known is not None and known.present and self._clock() < known.expires_s

    def is_bad(self, key: bytes) -> bool:
        """Whether the record of this key was found bad and not replaced yet."""
        known = self._known.get(key)
        return known is not None and known.bad

    def stored(self, key: bytes) -> None:
        """A record of this key was stored, or seen to be there by a store."""
        self._learn(key, present=True, bad=False)

    def lost(self, key: bytes, *, bad: bool) -> None:
        """A load of this key failed. `bad`: the record is there and no good, so it is a MISS until it is replaced."""
        self._learn(key, present=False, bad=bad)

    def distrust(self, key: bytes) -> None:
        """Ask the backend about this key once more, although it is known to be there."""
        known = self._known.get(key)
        if known is not None and known.present:
            del self._known[key]

    def end_request(self, request_id: str) -> None:
        self._told.pop(request_id, None)
        for probe in self._unsent.pop(request_id, ()):
            probe.waiting.discard(request_id)
            if probe.waiting:
                # Somebody else waits for it too: it is sent on their behalf.
                self._unsent.setdefault(next(iter(probe.waiting)), []).append(probe)
            else:
                self._probes.pop(probe.key, None)

    def fail_waiting(self, probes: Iterable[Probe]) -> None:
        """These probes will never be answered."""
        for probe in probes:
            self.answer(probe, None)

    def clear(self) -> None:
        """Forget everything that is known. Requests that wait hear MISS."""
        self.fail_waiting(list(self._probes.values()))
        self._known.clear()
        self._unsent.clear()
        for told in self._told.values():
            for key in told:
                told[key] = 0

    def _open(self, request_id: str) -> dict[bytes, int]:
        if len(self._told) >= _MAX_REQUESTS:
            self.end_request(next(iter(self._told)))
        told = self._told[request_id] = {}
        return told

    def _learn(self, key: bytes, *, present: bool, bad: bool) -> None:
        self._news += 1
        self._known[key] = _Known(self._news, present, self._clock() + self._ttl_s, bad)
        self._known.move_to_end(key)
        if len(self._known) > self._max_keys:
            self._known.popitem(last=False)
