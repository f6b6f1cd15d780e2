"""An engine that is nothing but requests and payloads, driven as vLLM drives a store, in steps."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvstore_sdk.backend import Backend, Capabilities, Deadline, Region
from kvstore_sdk.format import HEADER_BYTES, record_bytes
from kvstore_sdk.host import HostTier, Slot
from kvstore_sdk.identity import GroupIdentity, KVIdentity
from kvstore_sdk.keys import ChunkKey
from kvstore_sdk.store import StoreEvent, StoreSettings, StoreTier, TieredStore
from kvstore_sdk.testing import BackendWrapper, FaultyBackend
from kvstore_sdk.tier import Lookup, Tier, TierSettings

__all__ = ["LIMIT_S", "Kept", "Stand", "Wide", "identity", "key", "keys", "payload"]

LIMIT_S = 20.0
"""Longest that a test waits for what must come; machines of CI stall."""

SIZES = (5000,)
"""Payload of each group: no multiple of a page."""

FAST = {
    "io_threads": 4,
    "lookup_timeout_s": 10.0,
    "load_timeout_s": 10.0,
    "store_timeout_s": 10.0,
    "drain_timeout_s": 10.0,
    "close_timeout_s": 10.0,
    "retry_base_s": 0.002,
    "breaker_probe_s": 0.1,
    "health_probe_s": 0.0,
    "staging_bytes": 4 << 20,
}
"""Settings of tiers: patient, because a machine of CI may stand still for a second, but where a test is about time."""

STORE_FAST = {"lookup_timeout_s": 15.0, "hold_timeout_s": 30.0, "drain_timeout_s": 10.0, "close_timeout_s": 10.0, "cascade_fraction": 1.0}


def identity(sizes: Sequence[int] = SIZES, **changes: Any) -> KVIdentity:
    groups = tuple(
        GroupIdentity(kind="full", layers=(f"layers.{group}",), payload_bytes=size, heads=1, head_size=1)
        for group, size in enumerate(sizes)
    )
    facts: dict[str, Any] = {
        "model": "test",
        "weights": "w0",
        "model_config": "c0",
        "kv_dtype": "float16",
        "layout": "test-layout",
        "layout_version": 1,
        "block_tokens": 16,
        "hash_tokens": 16,
        "blocks_per_chunk": 1,
        "groups": groups,
        "hash_algorithm": "sha256",
    }
    return KVIdentity(**(facts | changes))


def key(number: int, group: int = 0) -> bytes:
    return hashlib.sha256(f"chunk {number}".encode()).digest() + group.to_bytes(4, "big")


def keys(count: int, start: int = 0, group: int = 0) -> list[bytes]:
    return [key(number, group) for number in range(start, start + count)]


def payload(of: bytes, size: int, generation: int = 0) -> bytes:
    """What a chunk holds: decided by its key, and by what the engine's weights are."""
    return hashlib.shake_128(of + bytes([generation])).digest(size)


class Wide(BackendWrapper):
    """Takes as many calls at a time as is said."""

    def __init__(self, inner: Backend, calls: int = 8) -> None:
        super().__init__(inner)
        self._calls = calls

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(max_record_bytes=1 << 20, max_batch=256, max_concurrency=self._calls)


class Kept(Wide):
    """Stays open when the tier that uses it is closed: others look at it afterwards, or calls still hang in it."""

    def close(self) -> None:
        """Does nothing."""


class Stand:
    """A store, its host tier, and who drives them."""

    def __init__(
        self,
        backends: Mapping[str, Backend],
        *,
        slots: int = 16,
        sizes: Sequence[int] = SIZES,
        policy: str = "lru",
        reserve: int | None = None,
        tier_settings: Mapping[str, Any] | None = None,
        localities: Mapping[str, str] | None = None,
        of: KVIdentity | None = None,
        **settings: Any,
    ) -> None:
        self.sizes = tuple(sizes)
        self.backends = dict(backends)
        self.identity = of or identity(sizes)
        self.record_bytes = max(record_bytes(size) for size in sizes)
        self.region = Region(slots * self.record_bytes, "kvstore-test")
        reserve_bytes = None if reserve is None else reserve * self.record_bytes
        self.host = HostTier(self.region, dict(enumerate(sizes)), policy=policy, reserve_bytes=reserve_bytes)
        self.tiers = [
            StoreTier(
                name,
                Tier(
                    backend,
                    self.host,
                    identity=self.identity,
                    settings=TierSettings(**(FAST | dict(tier_settings or {}))),
                    name=name,
                    events=True,
                ),
                (localities or {}).get(name, ""),
            )
            for name, backend in self.backends.items()
        ]
        self.store = TieredStore(
            self.host, self.tiers, identity=self.identity, settings=StoreSettings(**(STORE_FAST | settings)), name="test", events=True
        )
        self.generation = 0
        self.free_bytes = self.host.stats().free_bytes
        self._requests = itertools.count(1)
        self._written: dict[bytes, None] = {}

    # Steps.

    def step(self) -> None:
        self.store.poll()
        self.store.flush()

    def wait(self, until: Callable[[], Any], what: str = "what was waited for", limit_s: float = LIMIT_S) -> None:
        end_s = time.monotonic() + limit_s
        while True:
            self.step()
            if until():
                return
            assert time.monotonic() < end_s, f"{what} did not come within {limit_s} s"
            time.sleep(0.0005)

    def settle(self) -> None:
        """Until nothing goes on."""
        self.wait(lambda: not self.store.busy, "the end of what goes on")

    def set_timeouts(self, **seconds: float) -> None:
        """Change time-outs of the store from now on. What ends by its time in a test begins after this, and what must not before it."""
        for name, value in seconds.items():
            object.__setattr__(self.store._settings, name, value)

    def time_is_up(self) -> None:
        """What tiers have under way has no time left, as if all of it had gone by."""
        for tier in self.tiers:
            tier.tier._watch.look(time.monotonic() + 1000.0)
            tier.tier._watch.at_s = 0.0

    # Requests.

    def request(self, tiers: Sequence[str] | None = None) -> str:
        name = f"request-{next(self._requests)}"
        self.store.begin_request(name, tiers)
        return name

    def ask(self, some_keys: Sequence[bytes], request: str) -> list[Lookup]:
        """Look up, step by step, until nothing is pending."""
        answers = dict.fromkeys(some_keys, Lookup.PENDING)

        def settled() -> bool:
            for one in (one for one, answer in answers.items() if answer is Lookup.PENDING):
                answers[one] = self.store.lookup(request, one)
            return Lookup.PENDING not in answers.values()

        self.wait(settled, "answers to look-ups")
        return [answers[one] for one in some_keys]

    def hits(self, some_keys: Sequence[bytes], request: str | None = None) -> int:
        """How many of a chain, from its head, a new request finds and reads right."""
        name = request or self.request()
        answers = self.ask(some_keys, name)
        count = answers.index(Lookup.MISS) if Lookup.MISS in answers else len(answers)
        self.load(name, some_keys[:count])
        if request is None:
            self.store.end_request(name)
        return count

    # Transfers.

    def put(self, some_keys: Sequence[bytes], request: str | None = None) -> list[Slot | None] | None:
        """Store as a running request does; None where there is no room now."""
        name = request or self.request()
        slots = self.store.begin_store(name, some_keys)
        if slots is not None:
            self.write(slots)
            self.store.end_store(some_keys)
        if request is None:
            self.store.end_request(name)
        return slots

    def write(self, slots: Sequence[Slot | None]) -> None:
        for slot in slots:
            if slot is not None:
                self._written[slot.key] = None
                self.payload_of(slot)[:] = payload(slot.key, slot.payload_bytes, self.generation)

    def payload_of(self, slot: Slot) -> memoryview:
        return self.region.view[slot.offset + HEADER_BYTES : slot.offset + HEADER_BYTES + slot.payload_bytes]

    def is_right(self, slot: Slot, one_key: bytes) -> bool:
        """Whether the slot holds what was stored under the key."""
        return slot.key == one_key and bytes(self.payload_of(slot)) == payload(one_key, slot.payload_bytes, self.generation)

    def load(self, request: str, some_keys: Sequence[bytes]) -> None:
        """Load as the engine does, and look at every byte."""
        slots = self.store.begin_load(request, some_keys)
        try:
            assert all(self.is_right(slot, one) for slot, one in zip(slots, some_keys, strict=True)), "a hit had wrong bytes"
        finally:
            self.store.end_load(request, some_keys)

    # What can be seen.

    def total(self, name: str, *labels: str) -> float:
        self.store.flush()
        return self.store.metrics.total(name, *labels)

    def events(self) -> list[tuple[str, bytes, bool]]:
        """(tier, key, removed) of every event since the last call."""
        return [(event.tier, one, event.removed) for event in self.raw_events() for one in event.keys]

    def raw_events(self) -> list[StoreEvent]:
        return self.store.take_events()

    def has(self, tier: str, one_key: bytes, of: KVIdentity | None = None) -> bool:
        """Whether a backend has the chunk, asked past the store."""
        name = ChunkKey.from_engine((of or self.store.identity).namespace, one_key).name
        [answer] = self.backends[tier].exists([name], Deadline.after(LIMIT_S))
        return answer is True

    def evict_all(self) -> None:
        """Empty host memory of all that was put, as other requests' stores would."""
        self.settle()
        self.squeeze()
        assert not any(map(self.host.get, self._written))

    def squeeze(self) -> None:
        """Take everything out of host memory that may leave it, as many stores would."""
        with self.store._lock:
            self.store._holds.settle()
            for one in self._written:
                self.host.remove(one)

    def pinned(self) -> int:
        return sum(group.pinned for group in self.host.stats().groups.values())

    def is_at_rest(self) -> bool:
        """Whether nothing is pinned, filling or quarantined."""
        return all(
            not (group.pinned or group.filling or group.quarantined) for group in self.host.stats().groups.values()
        ) and not self.store.metrics.gauge_value("held_slots")

    def close(self) -> None:
        for backend in self.backends.values():
            if isinstance(backend, FaultyBackend):
                backend.heal()
        self.store.close()
