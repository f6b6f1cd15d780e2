"""An engine that is nothing but rows of memory, driven as vLLM drives a tier."""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from polled_backend import Polled

from kvstore_sdk.backend import Backend, Deadline, Get, GetStatus, Mode, Put, PutStatus, Region
from kvstore_sdk.format import record_bytes
from kvstore_sdk.identity import GroupIdentity, KVIdentity
from kvstore_sdk.keys import ChunkKey
from kvstore_sdk.testing import FaultyBackend
from kvstore_sdk.tier import JobResult, Lookup, Tier, TierSettings
from kvstore_sdk.tier.fit import fit

__all__ = [
    "FAST",
    "HOLE",
    "LIMIT_S",
    "PATIENT",
    "PAYLOAD_BYTES",
    "SLOT_BYTES",
    "Engine",
    "Memory",
    "Shop",
    "identity",
    "key",
    "keys",
    "payload",
]

PAYLOAD_BYTES = {0: 5000, 1: 900}
"""Of each group: neither is a multiple of a page."""
SLOT_BYTES = 12288
"""A staging slot for these groups: a record of the first."""
LIMIT_S = 20.0
"""Longest that a test waits for what must come; machines of CI stall."""

FAST = {
    "io_threads": 4,
    "lookup_timeout_s": LIMIT_S,
    "load_timeout_s": LIMIT_S,
    "store_timeout_s": LIMIT_S,
    "drain_timeout_s": LIMIT_S,
    "close_timeout_s": LIMIT_S,
    "retry_base_s": 0.002,
    "breaker_probe_s": 0.1,
    "health_probe_s": 0.0,
    "staging_bytes": 64 * SLOT_BYTES,
    "max_quarantined_bytes": 48 * SLOT_BYTES,
}
"""Settings with which what goes wrong does so within a test, but for what ends by its time: see `Engine.set_timeouts`."""

PATIENT = {name: LIMIT_S for name in FAST if name.endswith("_timeout_s")}
"""Settings with which nothing ends by its time alone, however long the machine stands still."""

HOLE = 0xC3
"""What rows hold where nothing was loaded."""


def identity(**changes: Any) -> KVIdentity:
    """Two groups, as one engine of the tests has them."""
    groups = tuple(
        GroupIdentity(kind="full", layers=(f"layers.{group}",), payload_bytes=size, heads=1, head_size=1)
        for group, size in PAYLOAD_BYTES.items()
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
    """The engine's key of chunk `number`."""
    return hashlib.sha256(f"chunk {number}".encode()).digest() + group.to_bytes(4, "big")


def keys(count: int, start: int = 0, group: int = 0) -> list[bytes]:
    return [key(number, group) for number in range(start, start + count)]


def payload(of: bytes, generation: int = 0) -> bytes:
    """What a chunk holds: decided by its key, and by how often it was computed differently."""
    group = int.from_bytes(of[-4:], "big")
    return hashlib.shake_128(of + bytes([generation])).digest(PAYLOAD_BYTES[group])


class Memory:
    """Rows of an engine. Each is guarded on both sides, so that a copy that reaches further is seen.

    Attributes:
        copied: (in or out, row, group) of every copy.
        on_copy: Called before each, outside any lock of ours.
    """

    GUARD = 64

    def __init__(self, rows: int) -> None:
        self.rows = rows
        # More than are used in a test, but where a test says less: stores may not have all rows.
        self.row_count = 4 * rows
        self._stride = max(PAYLOAD_BYTES.values()) + 2 * self.GUARD
        self._bytes = bytearray([HOLE]) * (rows * self._stride)
        self.copied: list[tuple[str, int, int]] = []
        self.on_copy: Callable[[str, int], None] = lambda way, row: None

    def payload_bytes(self, group: int) -> int | None:
        return PAYLOAD_BYTES.get(group)

    def copy_out(self, row: int, group: int, payload: memoryview) -> None:
        self.on_copy("out", row)
        self.copied.append(("out", row, group))
        assert len(payload) == PAYLOAD_BYTES[group]
        payload[:] = self.view(row)[: len(payload)]

    def copy_in(self, row: int, group: int, payload: memoryview) -> None:
        self.on_copy("in", row)
        self.copied.append(("in", row, group))
        assert len(payload) == PAYLOAD_BYTES[group]
        self.view(row)[: len(payload)] = payload

    def expect(self, row: int, of: bytes) -> None:
        """Any chunk fits into any row."""

    def spared(self, row: int) -> bool:
        """Whether a load that failed left the row, which was painted before, as it may: untouched."""
        return self.is_painted(row)

    def view(self, row: int) -> memoryview:
        """The row without its guards."""
        start = row * self._stride + self.GUARD
        return memoryview(self._bytes)[start : start + self._stride - 2 * self.GUARD]

    def write(self, row: int, of: bytes, generation: int = 0) -> None:
        """Compute the chunk into the row."""
        bytes_of = payload(of, generation)
        self.view(row)[: len(bytes_of)] = bytes_of

    def paint(self, row: int, fill: int = HOLE) -> None:
        view = self.view(row)
        view[:] = bytes([fill]) * len(view)

    def holds(self, row: int, of: bytes, generation: int = 0) -> bool:
        """Whether the row has exactly this chunk, and nothing beside it was touched."""
        bytes_of = payload(of, generation)
        view = self.view(row)
        return bytes(view[: len(bytes_of)]) == bytes_of and set(view[len(bytes_of) :]) <= {HOLE} and self.guarded(row)

    def is_painted(self, row: int, fill: int = HOLE) -> bool:
        view = self.view(row)
        return bytes(view) == bytes([fill]) * len(view) and self.guarded(row)

    def guarded(self, row: int) -> bool:
        start = row * self._stride
        guard = bytes([HOLE]) * self.GUARD
        end = start + self._stride
        return bytes(self._bytes[start : start + self.GUARD]) == guard and bytes(self._bytes[end - self.GUARD : end]) == guard


class Engine:
    """A tier and the engine that drives it, in steps.

    Attributes:
        held: How often each row is held by results so far, and was not released.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        rows: int = 64,
        memory: Any = None,
        may_store: bool = True,
        name: str = "test",
        of: KVIdentity | None = None,
        polled: bool = False,
        **settings: Any,
    ) -> None:
        """`polled`: the tier's calls are begun, and their answers taken, by the thread that steps."""
        self.backend = backend
        self.memory = Memory(rows) if memory is None else memory
        self.tier = Tier(
            Polled(backend) if polled else backend,
            self.memory,
            identity=of or identity(),
            settings=TierSettings(**(FAST | settings)),
            name=name,
            may_store=may_store,
            events=True,
        )
        self.results: dict[int, JobResult] = {}
        self.held: Counter[int] = Counter()
        self._jobs = itertools.count(1)
        self._requests = itertools.count(1)

    # Steps.

    def step(self) -> None:
        """One step of the engine: take what ended, send what was asked."""
        for result in self.tier.poll():
            assert result.job_id not in self.results, f"job {result.job_id} was reported twice"
            self.results[result.job_id] = result
            self.held.update(result.held)
        for row in self.tier.take_released():
            assert self.held[row], f"row {row} was released more often than it was held"
            self.held[row] -= 1
        self.tier.flush()

    def wait(self, until: Callable[[], Any], what: str = "what was waited for", limit_s: float = LIMIT_S) -> float:
        """Step until something is so; fails after `limit_s`. Returns the seconds it took."""
        began_s = time.monotonic()
        while True:
            self.step()
            if until():
                return time.monotonic() - began_s
            assert time.monotonic() < began_s + limit_s, f"{what} did not come within {limit_s} s"
            time.sleep(0.0005)

    def result(self, job_id: int) -> JobResult:
        self.wait(lambda: job_id in self.results, f"job {job_id}")
        return self.results[job_id]

    def steps(self, seconds: float) -> None:
        """Go on stepping for so long."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            self.step()
            time.sleep(0.0005)

    # Look-ups.

    def request(self) -> str:
        return f"request-{next(self._requests)}"

    def ask(self, some_keys: Sequence[bytes], request: str | None = None) -> list[Lookup]:
        """Look up until nothing is pending; each key is asked again only while it is."""
        name = request or self.request()
        answers = dict.fromkeys(some_keys, Lookup.PENDING)

        def settled() -> bool:
            for one in (one for one, answer in answers.items() if answer is Lookup.PENDING):
                answers[one] = self.tier.lookup(name, one)
            return Lookup.PENDING not in answers.values()

        self.wait(settled, "answers to look-ups")
        if request is None:
            self.tier.end_request(name)
        return [answers[one] for one in some_keys]

    def finds(self, one_key: bytes) -> bool:
        """Whether a new request is told HIT."""
        return self.ask([one_key])[0] is Lookup.HIT

    # Jobs.

    def rows_for(self, some_keys: Sequence[bytes]) -> list[int]:
        """The first rows that are not held, one for each key."""
        return list(itertools.islice((row for row in itertools.count() if not self.held[row]), len(some_keys)))

    def submit_store(self, some_keys: Sequence[bytes], rows: Iterable[int] | None = None, generation: int | None = 0) -> int:
        """Compute the chunks into rows (unless `generation` is None), and submit a store of them."""
        in_rows = self.rows_for(some_keys) if rows is None else list(rows)
        if generation is not None:
            self.memory.identity = self.tier.identity
            for row, one in zip(in_rows, some_keys, strict=True):
                self.memory.paint(row)
                self.memory.write(row, one, generation)
        job_id = next(self._jobs)
        self.tier.submit_store(job_id, some_keys, in_rows)
        return job_id

    def submit_load(self, some_keys: Sequence[bytes], rows: Iterable[int] | None = None) -> int:
        """Paint rows, and submit a load into them."""
        in_rows = self.rows_for(some_keys) if rows is None else list(rows)
        for row in in_rows:
            self.memory.paint(row)
        self.memory.identity = self.tier.identity
        for row, one in zip(in_rows, some_keys, strict=False):
            self.memory.expect(row, one)
        job_id = next(self._jobs)
        self.tier.submit_load(job_id, some_keys, in_rows)
        return job_id

    def store(self, some_keys: Sequence[bytes], rows: Iterable[int] | None = None, generation: int = 0) -> JobResult:
        return self.result(self.submit_store(some_keys, rows, generation))

    def load(self, some_keys: Sequence[bytes], rows: Iterable[int] | None = None) -> JobResult:
        return self.result(self.submit_load(some_keys, rows))

    def set_timeouts(self, **seconds: float) -> None:
        """Change time-outs from now on. What ends by its time in a test begins after this, and what must not end so before it: no machine
        is so quick that a tenth of a second is enough for anything."""
        for name, value in seconds.items():
            object.__setattr__(self.tier._settings, name, value)
        self.tier._table._timeout_s = self.tier._settings.lookup_timeout_s

    def time_is_up(self) -> None:
        """What is under way has no time left, as if all of it had gone by."""
        self.tier._watch.look(time.monotonic() + 10 * LIMIT_S)
        self.tier._watch.at_s = 0.0

    def period_passes(self) -> None:
        """Breakers that are open let one through, as if `breaker_probe_s` had gone by."""
        for breaker in (self.tier._exists, self.tier._get, self.tier._put):
            breaker._next_trial_s = breaker._held_until_s = 0.0

    # What can be seen.

    def total(self, name: str, *labels: str) -> float:
        return self.tier.metrics.total(name, *labels)

    def events(self) -> list[tuple[bytes, bool]]:
        """(key, removed) of every event since the last call."""
        return [(one, event.removed) for event in self.tier.take_events() for one in event.keys]

    @property
    def region(self) -> Region:
        """The first of those that the backend was told of: of staging memory, or of the engine's records."""
        return self.tier._records.regions[0]

    @property
    def most_calls(self) -> int:
        """How many calls may be under way, none of which is late."""
        return self.tier._work._threads * self.tier._work._depth

    def free_slots(self) -> int:
        return len(self.tier._work._free)

    def in_rest(self) -> bool:
        """Whether nothing runs, and nothing is held."""
        return self.tier._work.is_untouched and self.all_slots_free() and not self.held.total()

    def all_slots_free(self) -> bool:
        """Whether every staging slot is free, and none is there twice."""
        free = self.tier._work._free
        return len(free) == len(set(free)) == fit("test", self.backend, self.tier.identity, self.tier._settings).slots

    def io_threads(self) -> list[threading.Thread]:
        return [thread for thread in self.tier._crew.threads if thread.is_alive()]

    def close(self) -> None:
        """Let what hangs go on, and close."""
        if isinstance(self.backend, FaultyBackend):
            self.backend.heal()
        self.tier.close()
        for thread in self.io_threads():
            thread.join(LIMIT_S)


class Shop:
    """Direct access to what a backend holds, past any tier."""

    def __init__(self, backend: Backend, of: KVIdentity | None = None) -> None:
        self.backend = backend
        self.identity = of or identity()
        self._region = Region(1 << 20)

    def name(self, one_key: bytes) -> str:
        return ChunkKey.from_engine(self.identity.namespace, one_key).name

    def has(self, one_key: bytes) -> bool:
        [answer] = self.backend.exists([self.name(one_key)], Deadline.after(LIMIT_S))
        return answer is True

    def read(self, name: str, size: int) -> bytes | None:
        buffer = self._region.buffer(0, size)
        [result] = self.backend.get([Get(name, (buffer,))], Deadline.after(LIMIT_S))
        return bytes(buffer.view) if result.status is GetStatus.FOUND else None

    def record(self, one_key: bytes) -> bytes:
        record = self.read(self.name(one_key), record_bytes(PAYLOAD_BYTES[int.from_bytes(one_key[-4:], "big")]))
        assert record is not None
        return record

    def write(self, name: str, record: bytes) -> None:
        buffer = self._region.buffer(0, len(record))
        buffer.view[:] = record
        [result] = self.backend.put([Put(name, (buffer,), Mode.REPLACE)], Deadline.after(LIMIT_S))
        assert result.status is PutStatus.STORED

    def replace(self, one_key: bytes, record: bytes) -> None:
        self.write(self.name(one_key), record)
