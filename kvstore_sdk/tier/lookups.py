"""The table behind `Tier.lookup`: which chunks are known, and what each request was told."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence, Sized
from itertools import islice

from kvstore_sdk.backend import Hint
from kvstore_sdk.keys import GROUP_BYTES
from kvstore_sdk.tier.hints import Asker, patience_s
from kvstore_sdk.tier.probe import Probe
from kvstore_sdk.tier.types import Lookup

__all__ = ["LookupTable"]

_MAX_REQUESTS = 65_536
"""Requests whose end is never told are forgotten beyond this, oldest first."""
_SHARE_TOO_MANY = 128
"""Of a table that is full, this part is forgotten at once."""

_HIT, _MISS, _PENDING = Lookup.HIT, Lookup.MISS, Lookup.PENDING


class LookupTable:
    """Answers from memory; used by one thread at a time.

    - A MISS holds for the request that asked; a HIT for `ttl_s`, or until the key is `lost`.
    - A request is told HIT at most `max_hits` times for one key, then MISS: a prefix larger than the host tier, or a load that always
      fails, ends in a recomputation, never in a request that waits for ever.
    - Every question is answered or becomes a MISS `timeout_s` after its key was first asked for, at the next `expire`, or when a request
      that waits for it looks it up. What a request asks for between two steps counts as asked with the first of it. A request whose hint
      says that it waits has its own questions, and a second more than that for them.
    - An answer to a question that was asked before newer news of the key does not overwrite them.

    The way of a key is kept short: it is on the engine's own thread, for every chunk of every request that waits. So what a request asks
    for in one step is one `Probe`, and its answers are taken in together.
    """

    def __init__(
        self,
        *,
        timeout_s: float,
        ttl_s: float,
        max_keys: int,
        max_hits: int,
        is_key: Callable[[bytes], object] = bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`is_key` says whether a chunk can have this key; what cannot is a MISS."""
        self._timeout_s = timeout_s
        self._ttl_s = ttl_s
        self._max_keys = max_keys
        self.max_hits = max_hits
        self._is_key = is_key
        self._clock = clock
        self.now_s = clock()
        """Set by the owner at least once a step: what is known ages by it, so that a look-up need not look at the clock."""
        self.wary = False
        """Set, by any thread, when the store stops working, or is too slow: from then on the engine's questions go through a `Gate`."""
        self.present: dict[bytes, float] = {}
        """Keys that are there, until when that is believed. In the order in which they were first learned."""
        self.fresh = False
        """Set by the owner between two steps: the next key that is not known may find news. Not those after it: what comes in the middle
        of a request's keys would make the end of its prefix a hit before the beginning."""
        self._unheard: Sized = ()
        self._hear: Callable[[], None] = lambda: None
        # The record is there and no good: a MISS until it is replaced.
        self._bad: dict[bytes, None] = {}
        # Found gone, so that it is found once.
        self._gone: dict[bytes, None] = {}
        # The open probe of a key, in the order in which they were asked for; those of requests with a hint are with the request.
        self._probes: dict[bytes, Probe] = {}
        self._askers: dict[str, Asker] = {}
        self._unsent: dict[str, list[Probe]] = {}
        # Of those, the one that a request's next question is added to.
        self._asking: dict[str, Probe] = {}
        # What each request was told: how often it may still hear HIT for a key. 0 is MISS, and a key that is not in it was not answered.
        self._told: dict[str, dict[bytes, int]] = {}
        self._closed = False
        self.hits = self.misses = self.timeouts = 0
        """Requests and keys that were told HIT and MISS, and keys that got no answer in time, so far."""

    def __len__(self) -> int:
        return len(self.present)

    @property
    def pending(self) -> int:
        """Keys that wait for an answer."""
        return len(self._probes) + sum(len(asker.probes) for asker in self._askers.values())

    def listen(self, unheard: Sized, hear: Callable[[], None]) -> None:
        """The first time that the table has no answer after it was made `fresh`, it has to `hear` the news, if any are `unheard`."""
        self._unheard = unheard
        self._hear = hear

    def be_wary(self) -> None:
        """The store does not work, or is too slow. From any thread."""
        self.wary = True

    def told(self, request_id: str) -> dict[bytes, int]:
        """What the request was told: how often it may still hear HIT for a key; 0 is MISS.

        For a caller who looks up so often that a call costs too much, while the table is not `wary`. A key that is not in here and is
        `present` until after `now_s` is a HIT; the caller then enters `max_hits - 1` for it, and adds one to `hits`. One that is not in
        here and not so present is one to `ask` about. One that is `present` at all and may hear HIT here is one, and may do so once less.
        """
        told = self._told.get(request_id)
        return self._open(request_id) if told is None else told

    def begin(self, request_id: str, hint: Hint) -> None:
        """What this request asks from now on is asked with a hint, until its end. A second one is without effect."""
        if request_id not in self._told:
            self._open(request_id)
        self._askers.setdefault(request_id, Asker(hint))
        self._asking.pop(request_id, None)

    def is_hinted(self, request_id: str) -> bool:
        """Whether what this request asks is asked with a hint."""
        return request_id in self._askers

    def lookup(self, request_id: str, key: bytes) -> Lookup:
        """Answer from what is known; a key that is not known is asked about."""
        told = self._told.get(request_id)
        if told is None:
            told = self._open(request_id)
        left = told.get(key)
        if left is None and self.fresh:
            self.fresh = False
            if self._unheard:
                self._hear()
                left = told.get(key)
        if left is None:
            if self.present.get(key, 0.0) > self.now_s:
                told[key] = self.max_hits - 1
                self.hits += 1
                return _HIT
            if self._ask(request_id, told, key):
                return _PENDING
            left = told[key]
        if left and key in self.present:
            told[key] = left - 1
            return _HIT
        told[key] = 0
        return _MISS

    def ask(self, request_id: str, key: bytes) -> Lookup:
        """As `lookup`, of a key that the request was not told of and that is not known to be there. The short way to one more question."""
        probe = self._asking.get(request_id)
        if probe is None or key in probe.table or len(key) != probe.key_bytes or key[-GROUP_BYTES:] != probe.group:
            return self.lookup(request_id, key)
        if self.fresh or key in self._bad:
            return self.lookup(request_id, key)
        probe.keys.append(key)
        probe.table[key] = probe
        return _PENDING

    def ask_again(self, request_id: str, key: bytes) -> Lookup:
        """As `lookup`, but what is known to be there is not believed: the question is the trial of a store that did not work."""
        self.present.pop(key, None)
        # A probe of its own, so that nothing else is asked with it.
        self._asking.pop(request_id, None)
        answer = self.lookup(request_id, key)
        asker = self._askers.get(request_id)
        if (probe := (self._probes if asker is None else asker.probes).get(key)) is not None:
            probe.trial = True
        return answer

    def refuse(self, request_id: str, key: bytes) -> Lookup:
        """MISS, and it holds for this request, whatever is known or on its way."""
        told = self._told.get(request_id)
        if told is None:
            told = self._open(request_id)
        if key not in told:
            self.misses += 1
        told[key] = 0
        return _MISS

    def is_answered(self, request_id: str, key: bytes) -> bool:
        """Whether the request was told HIT or MISS for this key."""
        return key in self._told.get(request_id, ())

    def expire(self) -> None:
        """Give up the probes that have waited too long, so that those nobody looks up again do not pile up."""
        # What is asked from now on has the time from now on.
        self._asking.clear()
        self.fresh = True
        if self._probes:
            self._expire(self._probes, self._timeout_s)
        if self._askers:
            for asker in self._askers.values():
                if asker.probes:
                    self._expire(asker.probes, patience_s(self._timeout_s, asker.hint))

    def take_unsent(self) -> list[Probe]:
        """The probes that nobody was asked about yet: one for each request, and one more if it asked without a hint before."""
        if not self._unsent:
            return []
        unsent, self._unsent = self._unsent, {}
        self._asking.clear()
        return [probe for probes in unsent.values() for probe in probes if probe.is_wanted]

    def answer(self, probe: Probe, keys: Sequence[bytes], present: bool | None) -> list[bytes]:
        """The backend's answer to keys of a probe; None when there is none, which those who wait hear as MISS.

        Returns:
            Those of which we learn like this that a record is gone: they were known to be there.
        """
        table = probe.table
        told = self._told.get(probe.request_id) if probe.request_id is not None else None
        if told is None or probe.others or probe.overruled:
            return [key for key in keys if table.get(key) is probe and self._answer_one(probe, key, present)]
        # The request alone waits, and nothing else became known: what follows for one follows for all.
        left = self.max_hits if present else 0
        before = len(told)
        closed = []
        for key in keys:
            if table.get(key) is probe:
                del table[key]
                closed.append(key)
                if key not in told:
                    told[key] = left
        if present:
            self.hits += len(told) - before
            self._remember(closed)
            return []
        self.misses += len(told) - before
        known = self.present
        if known.keys().isdisjoint(closed):
            return []
        return [key for key in closed if known.pop(key, None) is not None and present is False and self._found_gone(key)]

    def give_up(self, probe: Probe, keys: Iterable[bytes]) -> None:
        """These keys of a probe get no answer in time."""
        late = [key for key in keys if probe.table.get(key) is probe]
        self.timeouts += len(late)
        probe.over.update(late)
        self.answer(probe, late, None)

    def is_present(self, key: bytes) -> bool:
        """Whether the key is known to be there, fresh enough not to be stored again."""
        return self.present.get(key, 0.0) > self.now_s

    def is_bad(self, key: bytes) -> bool:
        """Whether the record of this key was found bad and not replaced yet."""
        return key in self._bad

    def stored(self, keys: Sequence[bytes]) -> None:
        """Records of these keys were written."""
        if self._bad:
            for key in keys:
                self._bad.pop(key, None)
        self._remember(keys)

    def seen(self, keys: Sequence[bytes]) -> None:
        """A store found that records of these keys are there, which does not make a bad one good."""
        self._remember([key for key in keys if key not in self._bad])

    def lost(self, key: bytes, *, bad: bool = False, gone: bool = False) -> bool:
        """A load of this key failed.

        Args:
            key: The engine's.
            bad: The record is there and no good, so it is a MISS until it is replaced.
            gone: Nobody can load it: it is bad, or not there. Without it, why the load failed says nothing about the record.

        Returns:
            Whether it is news that the key is gone.
        """
        self.present.pop(key, None)
        # Not of those with a hint: they are asked elsewhere, and what they wait for may have come since.
        if (probe := self._probes.get(key)) is not None:
            probe.overruled[key] = False
        if not gone:
            return False
        self._bad.pop(key, None)
        if bad:
            self._bad[key] = None
            _keep_newest(self._bad, self._max_keys)
        return self._found_gone(key)

    def end_request(self, request_id: str) -> None:
        """Forget what the request was told, and what it asked and nobody else waits for, if no call was made for it yet."""
        self._told.pop(request_id, None)
        self._asking.pop(request_id, None)
        if (asker := self._askers.pop(request_id, None)) is not None:
            for key, probe in asker.probes.items():
                probe.over.add(key)
            asker.probes.clear()
        for probe in self._unsent.pop(request_id, ()):
            self._hand_over(probe)

    def clear(self) -> None:
        """Forget everything that is known. Requests that wait hear MISS, and those that were told HIT too."""
        for probes in (self._probes, *(asker.probes for asker in self._askers.values())):
            for key, probe in list(probes.items()):
                probe.over.add(key)
                self.answer(probe, (key,), None)
        self.present.clear()
        self._bad.clear()
        self._gone.clear()
        self._unsent.clear()
        self._asking.clear()
        for told in self._told.values():
            for key in told:
                told[key] = 0

    def close(self) -> None:
        """From now on everything is a MISS."""
        self._closed = True
        self.clear()

    def _ask(self, request_id: str, told: dict[bytes, int], key: bytes) -> bool:
        """Make the request wait for an answer. False: it was told one instead."""
        if key in self._bad or self._closed or not self._is_key(key):
            told[key] = 0
            self.misses += 1
            return False
        now = self._clock()
        probes, timeout_s, asker = self._probes, self._timeout_s, None
        if self._askers and (asker := self._askers.get(request_id)) is not None:
            probes, timeout_s = asker.probes, patience_s(timeout_s, asker.hint)
            asker.since_s = min(asker.since_s, now)
        probe = probes.get(key)
        if probe is None:
            probe = self._asking.get(request_id)
            if probe is not None:
                probe.keys.append(key)
            else:
                probe = self._asking[request_id] = Probe(probes, key, now, request_id, asker)
                self._unsent.setdefault(request_id, []).append(probe)
            probes[key] = probe
            return True
        if probe.request_id != request_id:
            probe.others.setdefault(key, set()).add(request_id)
        if now - probe.asked_s <= timeout_s:
            return True
        if self._unheard:
            # Who looks up without a step between hears what came, rather than that nothing came.
            self._hear()
            if key in told:
                return False
        self.give_up(probe, (key,))
        return False

    def _answer_one(self, probe: Probe, key: bytes, present: bool | None) -> bool:
        """Close a probe's key. Returns whether this is how we learn that its record is gone."""
        del probe.table[key]
        gone = False
        if key in probe.overruled:
            present = probe.overruled[key]
        elif present:
            self._remember((key,))
        elif self.present.pop(key, None) is not None and present is False:
            gone = self._found_gone(key)
        waiting = probe.others.pop(key, set())
        if probe.request_id is not None:
            waiting.add(probe.request_id)
        for request_id in waiting:
            told = self._told.get(request_id)
            if told is not None and key not in told:
                told[key] = self.max_hits if present else 0
                self.hits += bool(present)
                self.misses += not present
        return gone

    def _hand_over(self, probe: Probe) -> None:
        """Its request has ended before it was sent: leave it to whoever else waits for a key of it, or close it."""
        probe.request_id = heir = None
        for key in probe.keys:
            if probe.table.get(key) is not probe:
                continue
            waiting = probe.others[key] = {request_id for request_id in probe.others.get(key, ()) if request_id in self._told}
            if waiting:
                heir = min(waiting)
            else:
                del probe.table[key]
                probe.over.add(key)
        if heir is not None:
            self._unsent.setdefault(heir, []).append(probe)

    def _expire(self, probes: dict[bytes, Probe], timeout_s: float) -> None:
        while probes and self.now_s - (oldest := next(iter(probes.values()))).asked_s > timeout_s:
            self.give_up(oldest, oldest.keys)

    def _open(self, request_id: str) -> dict[bytes, int]:
        if len(self._told) >= _MAX_REQUESTS:
            self.end_request(next(iter(self._told)))
        told = self._told[request_id] = {}
        return told

    def _remember(self, keys: Sequence[bytes]) -> None:
        until_s = self._clock() + self._ttl_s
        if self._gone:
            for key in keys:
                self._gone.pop(key, None)
        present = self.present
        for key in keys:
            present[key] = until_s
        _keep_newest(self.present, self._max_keys)
        for probes in (self._probes, *(asker.probes for asker in self._askers.values())):
            if probes and not probes.keys().isdisjoint(keys):
                for key in keys:
                    if (probe := probes.get(key)) is not None:
                        probe.overruled[key] = True

    def _found_gone(self, key: bytes) -> bool:
        if key in self._gone:
            return False
        self._gone[key] = None
        _keep_newest(self._gone, self._max_keys)
        return True


def _keep_newest(table: dict[bytes, float] | dict[bytes, None], number: int) -> None:
    """Leave at most so many. Some more go than have to: to find the first of a table costs what was taken from its front before."""
    if (excess := len(table) - number) > 0:
        for key in list(islice(table, excess + number // _SHARE_TOO_MANY)):
            del table[key]
