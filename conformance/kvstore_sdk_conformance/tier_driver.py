"""An engine that is nothing but rows of memory: it drives a Tier over the backend under test, and looks at every byte that it loads."""

from __future__ import annotations

import functools
import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

from kvstore_sdk.backend import Backend, Capabilities, ConfigError, Deadline, GetStatus, Mode, Put, PutStatus, TimedOutError
from kvstore_sdk.format import record_bytes
from kvstore_sdk.identity import GroupIdentity, KVIdentity
from kvstore_sdk.testing import BackendWrapper
from kvstore_sdk.tier import JobResult, Lookup, Tier, TierSettings
from kvstore_sdk_conformance.failure import CallRaised, ConformanceFailure, require, show, show_difference
from kvstore_sdk_conformance.view import Got, View

__all__ = ["TRIES", "Borrowed", "Engine", "identity", "overwrite", "payload_sizes", "read"]

PAYLOAD_BYTES = (900, 5000, 70_000, 300_000)
"""Of one chunk of each group: no whole number of pages, so that every record ends in padding."""
PATIENT = {"lookup_timeout_s": 20.0, "load_timeout_s": 30.0, "retries": 5, "breaker_probe_s": 0.1, "staging_bytes": 8 << 20}
"""A slow store that answers one name after another needs its time, and no check but one is about time."""
LIMIT_S = 60.0
"""Longest that anything here waits for: every job and every look-up has a deadline below it."""
ROWS = 64
TRIES = 8
"""Of what a store may answer with UNKNOWN or IN_DOUBT now and then."""


def payload_sizes(capabilities: Capabilities, largest: int = 300_000) -> tuple[int, ...]:
    """Lengths of the chunks of each group, as far as the backend takes their records; never none."""
    fit = [size for size in PAYLOAD_BYTES if size <= largest and record_bytes(size) <= capabilities.max_record_bytes]
    return tuple(fit) or PAYLOAD_BYTES[:1]


def identity(sizes: Sequence[int]) -> KVIdentity:
    """What the made-up bytes mean: the same in every process, so the same namespace."""
    groups = [
        GroupIdentity(kind="full", layers=(f"layers.{group}",), payload_bytes=size, heads=1, head_size=1)
        for group, size in enumerate(sizes)
    ]
    return KVIdentity(
        model="kvstore-conformance",
        weights="made-up",
        model_config="made-up",
        kv_dtype="bfloat16",
        layout="conformance",
        layout_version=1,
        block_tokens=16,
        hash_tokens=16,
        blocks_per_chunk=1,
        groups=tuple(groups),
        hash_algorithm="sha256",
    )


@functools.lru_cache(maxsize=512)
def _payload(key: bytes, size: int) -> bytes:
    """Stands for computing a chunk: bytes that its key decides."""
    return hashlib.shake_128(key).digest(size)


def read(view: View, name: str, size: int) -> Got:
    """What is there, past any Tier; again while the store cannot say."""
    for _ in range(TRIES):
        got = view.get(name, size)
        if got.result.status in (GetStatus.FOUND, GetStatus.MISSING, GetStatus.WRONG_SIZE):
            break
    return got


def overwrite(view: View, name: str, record: bytes, what: str) -> None:
    """Put a record in the place of another, past any Tier; `what` says how the two differ.

    Raises:
        ConformanceFailure: it is not there afterwards.
    """
    with view.lend([len(record)]) as arena:
        arena.buffers[0].view[:] = record
        for _ in range(TRIES):
            [result] = view.raw("put", [Put(name, tuple(arena.buffers), Mode.REPLACE)])
            if result.status is PutStatus.STORED:
                break
    require(result.status is PutStatus.STORED, f"STORED for a REPLACE of {name}", result, breaks="KV-CORE-12")
    now = read(view, name, len(record))
    if now.bytes != record and view.capabilities.read_after_write:
        seen = show_difference(record, now.bytes) if now.result.status is GetStatus.FOUND else show(now.result)
        raise ConformanceFailure(f"the record that a REPLACE of {name} STORED, which {what}", seen)


class Borrowed(BackendWrapper):
    """The backend of a view, lent to a Tier. Whatever faults are put around it, the backend is asked for no more than it declares.

    Attributes:
        names: Takes the names of what is put, for whoever removes it.
    """

    def __init__(self, view: View, *, names: set[str] | None = None, closes: bool = False, deletes: bool = True) -> None:
        super().__init__(view.backend)
        self.names = view.names if names is None else names
        self._closes = closes
        self._calls = threading.BoundedSemaphore(view.capabilities.max_concurrency)
        if not deletes and hasattr(self, "delete"):
            del self.delete

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Callable[[Sequence[Any]], Any]) -> Any:
        if op == "close" and not self._closes:
            return None
        if op == "put":
            self.names.update(item.name for item in items)
        if deadline is None:
            return proceed(items)
        if not self._calls.acquire(timeout=max(0.0, deadline.remaining_s())):
            raise TimedOutError(f"conformance: {op}: as many calls as the backend declares are running")
        try:
            if len({getattr(item, "name", item) for item in items}) < len(items):
                return [result for item in items for result in proceed([item])]
            return proceed(items)
        finally:
            self._calls.release()


class _Rows:
    """The engine's memory: each row has room for a chunk of any group."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        # Four times what is used: stores may not have all rows.
        self.row_count = 4 * ROWS
        self.free = list(range(ROWS))
        self._stride = max(sizes)
        self._bytes = memoryview(bytearray(ROWS * self._stride))

    def payload_bytes(self, group: int) -> int | None:
        return self.sizes[group] if group < len(self.sizes) else None

    def copy_out(self, row: int, group: int, payload: memoryview) -> None:
        payload[:] = self.view(row, group)

    def copy_in(self, row: int, group: int, payload: memoryview) -> None:
        self.view(row, group)[:] = payload

    def view(self, row: int, group: int) -> memoryview:
        return self._bytes[row * self._stride :][: self.sizes[group]]


class Engine:
    """A Tier, and the engine that drives it. Every job has to end once; every chunk that is loaded has to be right.

    Raises:
        ConformanceFailure: from any method: what a requirement of this profile asks for does not hold.
    """

    def __init__(self, view: View, sizes: Sequence[int], name: str, *, backend: Backend | None = None, **settings: Any) -> None:
        self.memory = _Rows(sizes)
        self.name = f"kvstore-{name}"
        self.open: dict[int, tuple[bool, tuple[bytes, ...], list[int]]] = {}
        self.results: dict[int, JobResult] = {}
        self.submitted: Counter[str] = Counter()
        self._counted: Counter[str] = Counter()
        self._requests = 0
        about = identity(sizes)
        try:
            chosen = TierSettings(**(PATIENT | settings))
            self.tier = Tier(backend or Borrowed(view), self.memory, identity=about, settings=chosen, name=self.name)
        except ConfigError as error:
            raise ConformanceFailure("capabilities that the SDK's Tier can use", error.problem, breaks="KV-TIER-01") from error
        except Exception as error:
            raise CallRaised("register_region", error) from error

    # Steps.

    def step(self) -> None:
        """One step of the engine: take what ended, send what was asked."""
        for result in self.tier.poll():
            self._ended(result)
        self.tier.flush()

    def wait(self, until: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> None:
        give_up_at_s = time.monotonic() + limit_s
        while not until():
            if time.monotonic() > give_up_at_s:
                raise ConformanceFailure(f"{what} within {limit_s:g} s", "none", note=self.counted())
            time.sleep(0.0005)
            self.step()

    def find(self, keys: Sequence[bytes]) -> list[Lookup]:
        """Look up as an engine does: all chunks of a request, step after step, until none is pending."""
        self._requests += 1
        request = f"request-{self._requests}"
        answers = dict.fromkeys(keys, Lookup.PENDING)

        def settled() -> bool:
            for key in (key for key, answer in answers.items() if answer is Lookup.PENDING):
                answers[key] = self.tier.lookup(request, key)
            self.tier.flush()
            return Lookup.PENDING not in answers.values()

        self.wait(settled, "an answer to each look-up")
        self.tier.end_request(request)
        self.submitted["lookups"] += len(answers)
        return list(answers.values())

    def submit(self, keys: Sequence[bytes], *, load: bool) -> int:
        """Submit a load, or a store of chunks that were just computed."""
        rows = [self.memory.free.pop() for _ in keys]
        for row, key in zip(rows, keys, strict=True):
            view = self.memory.view(row, _group(key))
            view[:] = bytes(len(view)) if load else _payload(key, len(view))
        job_id = sum(self.submitted[kind] for kind in ("load jobs", "store jobs")) + 1
        kind = "load" if load else "store"
        self.submitted[f"{kind} jobs"] += 1
        self.submitted[f"{kind}s"] += len(keys)
        self.open[job_id] = load, tuple(keys), rows
        (self.tier.submit_load if load else self.tier.submit_store)(job_id, keys, rows)
        return job_id

    def run(self, keys: Sequence[bytes], *, load: bool) -> JobResult:
        """Submit a job and wait for its end."""
        job_id = self.submit(keys, load=load)
        self.wait(lambda: job_id in self.results, f"the end of a {'load' if load else 'store'} job")
        return self.results[job_id]

    def store(self, keys: Iterable[bytes]) -> None:
        """Store all of these chunks, again what failed."""
        left = list(keys)
        for tries in range(TRIES):
            left = [key for start in range(0, len(left), ROWS) for key in self.run(left[start : start + ROWS], load=False).failed]
            if not left:
                return
            time.sleep(0.05 * tries)
        raise ConformanceFailure("every chunk to be stored", f"{len(left)} that are not, after {TRIES} tries", note=self.counted())

    def load(self, keys: Iterable[bytes], visible_s: float = 0.0) -> list[bytes]:
        """Look up and load these chunks, again what was not found or failed. Returns those that are not there in the end."""
        left = list(keys)
        until_s = time.monotonic() + visible_s
        tries = 0
        while left and (tries < TRIES or time.monotonic() < until_s):
            tries += 1
            found = [key for key, answer in zip(left, self.find(left), strict=True) if answer is Lookup.HIT]
            done = {key for start in range(0, len(found), ROWS) for key in self.run(found[start : start + ROWS], load=True).done}
            left = [key for key in left if key not in done]
            # What failed is due to be tried again, and a breaker that has opened asks again, after some tenths of a second.
            time.sleep(0.05 * tries if left else 0.0)
        return left

    def finish(self, limit_s: float = LIMIT_S) -> None:
        """Step until no job is open."""
        self.wait(lambda: not self.open, "the end of every job", limit_s)

    def close(self) -> None:
        self.tier.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def counted(self) -> str:
        """What the Tier counted so far, for whoever has to find the cause."""
        for (metric, labels), value in self.tier.metrics.take().counters.items():
            self._counted[" ".join([metric, *labels])] += int(value)
        return "the Tier counted: " + (", ".join(f"{name}: {value}" for name, value in sorted(self._counted.items())) or "nothing")

    def _ended(self, result: JobResult) -> None:
        require(result.job_id in self.open, "every job to end once", f"a second end of job {result.job_id}", note=self.counted())
        load, keys, rows = self.open.pop(result.job_id)
        self.results[result.job_id] = result
        ended = sorted([*result.done, *result.failed, *result.skipped])
        require(ended == sorted(keys), "a result for each chunk of a job", f"{len(ended)} for {len(keys)}", note=self.counted())
        if load:
            for key, row in zip(keys, rows, strict=True):
                view = self.memory.view(row, _group(key))
                if key in result.done and view != (right := _payload(key, len(view))):
                    raise ConformanceFailure("the bytes of the chunk", show_difference(right, bytes(view)), note=self.counted())
        self.memory.free += rows


def _group(key: bytes) -> int:
    return int.from_bytes(key[-4:], "big")
