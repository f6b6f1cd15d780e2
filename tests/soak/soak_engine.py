"""An engine that is nothing but requests and payloads, and looks at every byte that it is given."""

from __future__ import annotations

import hashlib
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from soak_plan import SIZES, Plan
from soak_store import SoakStore

from kvstore_sdk.host import Slot
from kvstore_sdk.tier import Lookup

__all__ = ["SoakEngine", "chunk_key", "payload"]

WEIGHTS = 3
"""Versions of the weights that the engines change between: what was stored under one must not be served under another."""

_PERIOD = 4099
"""Bytes after which a payload repeats itself: a prime, so that a record that is shifted by whole pages differs from itself."""

_MAX_TOLD = 20


def chunk_key(document: int, place: int) -> bytes:
    return hashlib.sha256(f"{document}/{place}".encode()).digest() + (place % len(SIZES)).to_bytes(4, "big")


def payload(key: bytes, size: int, weights: str) -> bytes:
    """What a chunk holds: decided by its key, and by the engine's weights."""
    piece = hashlib.shake_128(key + weights.encode()).digest(_PERIOD)
    return (piece * (size // _PERIOD + 1))[:size]


class Phase(Enum):
    """What a request waits for."""

    LOOK = "look"
    LOAD = "load"
    ROOM = "room"
    WRITE = "write"
    OVER = "over"


@dataclass(slots=True, eq=False)
class Request:
    """One request: a document from its beginning, looked up, loaded as far as it is there, computed and stored from there on."""

    name: str
    keys: list[bytes]
    phase: Phase = Phase.LOOK
    since_s: float = field(default_factory=time.monotonic)
    steps: int = 0
    found: int = 0
    loaded: list[Slot] = field(default_factory=list)
    written: list[Slot | None] = field(default_factory=list)

    def go(self, phase: Phase, steps: int = 0) -> None:
        self.phase, self.steps, self.since_s = phase, steps, time.monotonic()
        if phase is Phase.LOOK:
            self.found = 0


class SoakEngine:
    """Drives a store as an engine does, in steps, from one thread.

    Attributes:
        counts: `hits <tier>`, `verified_bytes`, `wrong`, `stored`, `requests`, `resets`.
        told: About the first wrong bytes.
        weights: That it uses now.
    """

    def __init__(self, plan: Plan, store: SoakStore, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.told: list[str] = []
        self.weights = "w0"
        self._plan = plan
        self._stand = store
        self._store = store.store
        self._random = random.Random(seed)
        self._requests: list[Request] = []
        self._number = 0

    @property
    def open_requests(self) -> int:
        return len(self._requests)

    def oldest_wait_s(self) -> float:
        """How long the request waits that has waited longest for one thing."""
        now_s = time.monotonic()
        return max((now_s - request.since_s for request in self._requests), default=0.0)

    def stuck(self) -> list[str]:
        """The requests that wait for longer than anything takes."""
        now_s = time.monotonic()
        return [
            f"{request.name} waits for {request.phase.value} since {now_s - request.since_s:.1f} s"
            for request in self._requests
            if now_s - request.since_s > self._plan.stuck_s
        ]

    def step(self, *, admit: bool) -> None:
        """One step of the engine. `admit`: new requests may begin."""
        self._store.poll()
        if admit and len(self._requests) < self._plan.requests:
            self._requests.append(self._new())
        for request in self._requests:
            self._advance(request)
        self._requests = [request for request in self._requests if request.phase is not Phase.OVER]
        self._store.flush()
        self._store.take_events()

    def reset(self) -> None:
        """The weights change. Transfers under way are forgotten; requests start over."""
        self.weights = f"w{self._random.randrange(WEIGHTS)}"
        self._store.reset(self.weights)
        self.counts["resets"] += 1
        for request in self._requests:
            self._store.restart_request(request.name)
            request.loaded, request.written = [], []
            request.go(Phase.LOOK)

    def check_all(self) -> None:
        """Look every chunk up and look at what is there, until all is answered. At most 120 s."""
        until_s = time.monotonic() + 120.0
        for document in range(self._plan.documents):
            self._requests.append(self._begin(document, self._plan.chunks))
            while self._requests and time.monotonic() < until_s:
                self.step(admit=False)
                time.sleep(0.001)

    def _new(self) -> Request:
        # The first documents are asked for often, the last ones seldom.
        document = int(self._plan.documents * self._random.random() ** 2)
        return self._begin(document, self._random.randint(1, self._plan.chunks))

    def _begin(self, document: int, chunks: int) -> Request:
        self._number += 1
        self.counts["requests"] += 1
        request = Request(f"request-{self._number}", [chunk_key(document, place) for place in range(chunks)])
        self._store.begin_request(request.name)
        return request

    def _advance(self, request: Request) -> None:
        if request.steps:
            request.steps -= 1
            return
        if request.phase is Phase.LOOK:
            self._look(request)
        elif request.phase is Phase.LOAD:
            self._end_load(request)
        elif request.phase is Phase.ROOM:
            self._begin_store(request)
        elif request.phase is Phase.WRITE:
            self._end_store(request)

    def _look(self, request: Request) -> None:
        found = 0
        for key in request.keys:
            answer = self._store.lookup(request.name, key)
            if answer is Lookup.PENDING:
                if found > request.found:
                    request.found, request.since_s = found, time.monotonic()
                return
            if answer is Lookup.MISS:
                break
            found += 1
        chance = self._random.random()
        if chance < 0.03:
            self._over(request)
            return
        if chance < 0.06:
            self._store.let_go([request.name])
            request.go(Phase.LOOK, 5)
            return
        request.found = found
        hits = request.keys[:found]
        sources = [self._store.source(request.name, key) for key in hits]
        request.loaded = self._store.begin_load(request.name, hits)
        self.counts.update(f"hits {source}" for source in sources)
        self._check(request, sources)
        request.go(Phase.LOAD, self._random.randrange(8))

    def _end_load(self, request: Request) -> None:
        # Pinned all the while: nothing may have written there.
        self._check(request, ["pinned"] * request.found)
        self._store.end_load(request.name, request.keys[: request.found])
        request.loaded = []
        if self._random.random() < 0.03:
            self._store.restart_request(request.name)
            request.go(Phase.LOOK)
            return
        request.go(Phase.ROOM, self._random.randrange(20))

    def _begin_store(self, request: Request) -> None:
        keys = request.keys[request.found :]
        slots = self._store.begin_store(request.name, keys) if keys else []
        if slots is None:
            return
        request.written = slots
        for slot in slots:
            if slot is not None:
                # The first half: the second one comes some steps later.
                half = slot.payload_bytes // 2
                self._stand.payload(slot)[:half] = payload(slot.key, slot.payload_bytes, self.weights)[:half]
        request.go(Phase.WRITE, self._random.randrange(6))

    def _end_store(self, request: Request) -> None:
        written = [slot for slot in request.written if slot is not None]
        for slot in written:
            self._stand.payload(slot)[:] = payload(slot.key, slot.payload_bytes, self.weights)
        keys = [slot.key for slot in written]
        incomplete = keys[-1:] if keys and self._random.random() < 0.05 else []
        self._store.end_store(keys, incomplete)
        self.counts["stored"] += len(keys) - len(incomplete)
        self._over(request)

    def _over(self, request: Request) -> None:
        self._store.end_request(request.name)
        request.go(Phase.OVER)

    def _check(self, request: Request, sources: list[str | None]) -> None:
        for key, slot, source in zip(request.keys, request.loaded, sources, strict=False):
            seen, right = self._stand.payload(slot), payload(key, slot.payload_bytes, self.weights)
            self.counts["verified_bytes"] += slot.payload_bytes
            if slot.key != key or seen != right:
                self.counts["wrong"] += 1
                if len(self.told) < _MAX_TOLD:
                    at = next((at for at, (one, other) in enumerate(zip(seen, right, strict=True)) if one != other), -1)
                    where = f"slot {slot.number} at byte {at}" if slot.key == key else f"slot {slot.number} is another chunk's"
                    self.told.append(f"{request.name}: {key.hex()} of {source}, {where}, weights {self.weights}")
