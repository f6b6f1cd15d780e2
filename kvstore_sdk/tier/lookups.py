"""The table behind `Tier.lookup`: which chunks are known, and what each request was told."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from kvstore_sdk.tier.breaker import Breaker
from kvstore_sdk.tier.types import Lookup

__all__ = ["LookupTable", "Probe"]

_MAX_REQUESTS = 65_536
"""Requests whose end is never told are forgotten beyond this, oldest first."""

_HIT, _MISS, _PENDING = Lookup.HIT, Lookup.MISS, Lookup.PENDING


class Probe:
    """One key that the backend is asked about, and the requests that wait for the answer."""

    __slots__ = ("asked_s", "key", "overruled", "waiting")

    def __init__(self, key: bytes, asked_s: float) -> None:
        self.key = key
        self.asked_s = asked_s
        self.overruled: bool | None = None
        """Whether the key is there, when that became known otherwise after the question: it stands, whatever the late answer says."""
        self.waiting: set[str] = set()


class LookupTable:
    """Answers from memory; used by one thread at a time.

    - A MISS holds for the request that asked; a HIT for `ttl_s`, or until the key is `lost`.
    - A request is told HIT at most `max_hits` times for one key, then MISS: a prefix larger than the host tier, or a load that always
      fails, ends in a recomputation, never in a request that waits for ever.
    - Every probe is answered or becomes a MISS `timeout_s` after its key was first asked for.
    - An answer to a question that was asked before newer news of the key does not overwrite them.
    - While `breaker` is open everything is a MISS, except its trials, which reach the backend whatever is remembered.

    The way of a known key is kept short: it is on the engine's own thread, for every chunk of every request that waits.
    """

    def __init__(
        self,
        *,
        timeout_s: float,
        ttl_s: float,
        max_keys: int,
        max_hits: int,
        breaker: Breaker,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timeout_s = timeout_s
        self._ttl_s = ttl_s
        self._max_keys = max_keys
        self._max_hits = max_hits
        self._breaker = breaker
        self._clock = clock
        self._now_s = clock()
        # Present, until when that is believed. Oldest first.
        self._present: dict[bytes, float] = {}
        # The record is there and no good: a MISS until it is replaced.
        self._bad: dict[bytes, None] = {}
        self._probes: dict[bytes, Probe] = {}
        self._unsent: dict[str, list[Probe]] = {}
        # What each request was told: how often it may still hear HIT for a key. 0 is MISS, and a key that is not in it was not answered.
        self._told: dict[str, dict[bytes, int]] = {}
        self.hits = self.misses = self.timeouts = 0
        """Requests and keys that were told HIT and MISS, and probes that got no answer in time. The owner reads them and sets them back."""

    def __len__(self) -> int:
        return len(self._present)

    def lookup(self, request_id: str, key: bytes) -> Lookup:
        """Answer from what is known; a key that is not known becomes a probe."""
        if self._breaker.is_open:
            if not self._breaker.allows():
                return _MISS
            self._present.pop(key, None)
        told = self._told.get(request_id)
        if told is None:
            told = self._open(request_id)
        left = told.get(key)
        if left is None:
            if self._present.get(key, 0.0) > self._now_s:
                told[key] = self._max_hits - 1
                self.hits += 1
                return _HIT
            return self._ask(request_id, told, key)
        if left and key in self._present:
            told[key] = left - 1
            return _HIT
        told[key] = 0
        return _MISS

    def tick(self) -> None:
        """Look at the clock: what is known ages from step to step."""
        self._now_s = self._clock()

    def take_unsent(self) -> list[list[Probe]]:
        """The probes that nobody was asked about yet, one list a request."""
        if not self._unsent:
            return []
        unsent, self._unsent = list(self._unsent.values()), {}
        return unsent

    def answer(self, probe: Probe, present: bool | None) -> None:
        """The backend's answer to a probe; None when there is none, which those who wait hear as MISS."""
        key = probe.key
        if self._probes.get(key) is not probe:
            return
        del self._probes[key]
        if probe.overruled is not None:
            present = probe.overruled
        elif present:
            self._remember((key,))
        else:
            self._present.pop(key, None)
        for request_id in probe.waiting:
            told = self._told.get(request_id)
            if told is not None and key not in told:
                told[key] = self._max_hits if present else 0
                self.hits += bool(present)
                self.misses += not present

    def is_present(self, key: bytes) -> bool:
        """Whether the key is known to be there, fresh enough not to be stored again."""
        return self._present.get(key, 0.0) > self._now_s

    def is_bad(self, key: bytes) -> bool:
        """Whether the record of this key was found bad and not replaced yet."""
        return key in self._bad

    def stored(self, keys: Sequence[bytes]) -> None:
        """Records of these keys were stored, or seen to be there by a store."""
        self._remember(keys)
        if self._bad:
            for key in keys:
                self._bad.pop(key, None)
        if self._probes:
            self._overrule(keys, True)

    def lost(self, key: bytes, *, bad: bool) -> None:
        """A load of this key failed. `bad`: the record is there and no good, so it is a MISS until it is replaced."""
        self._present.pop(key, None)
        self._bad.pop(key, None)
        if bad:
            self._bad[key] = None
            if len(self._bad) > self._max_keys:
                del self._bad[next(iter(self._bad))]
        self._overrule((key,), False)

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
        """Forget everything that is known. Requests that wait hear MISS, and those that were told HIT too."""
        self.fail_waiting(list(self._probes.values()))
        self._present.clear()
        self._bad.clear()
        self._unsent.clear()
        for told in self._told.values():
            for key in told:
                told[key] = 0

    def _ask(self, request_id: str, told: dict[bytes, int], key: bytes) -> Lookup:
        if key in self._bad:
            told[key] = 0
            self.misses += 1
            return _MISS
        now = self._clock()
        probe = self._probes.get(key)
        if probe is None:
            probe = self._probes[key] = Probe(key, now)
            self._unsent.setdefault(request_id, []).append(probe)
        elif now - probe.asked_s > self._timeout_s:
            self.timeouts += 1
            probe.waiting.add(request_id)
            self.answer(probe, None)
            return self.lookup(request_id, key)
        probe.waiting.add(request_id)
        return _PENDING

    def _open(self, request_id: str) -> dict[bytes, int]:
        if len(self._told) >= _MAX_REQUESTS:
            self.end_request(next(iter(self._told)))
        told = self._told[request_id] = {}
        return told

    def _remember(self, keys: Iterable[bytes]) -> None:
        self._present.update(dict.fromkeys(keys, self._clock() + self._ttl_s))
        excess = len(self._present) - self._max_keys
        if excess > 0:
            for key in list(islice(self._present, excess)):
                del self._present[key]

    def _overrule(self, keys: Iterable[bytes], present: bool) -> None:
        for key in keys:
            if (probe := self._probes.get(key)) is not None:
                probe.overruled = present
