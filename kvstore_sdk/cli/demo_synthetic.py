"""The demo without an engine: made-up KV takes the way of real KV, from one process's memory through a store into another's."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvstore_sdk.backend import BackendError
from kvstore_sdk.cli.store import Store
from kvstore_sdk.cli.table import columns, human_bytes
from kvstore_sdk.identity import GroupIdentity, KVIdentity
from kvstore_sdk.tier import JobResult, Lookup, Tier

__all__ = ["read", "run"]

BLOCK_TOKENS = 16
LAYERS, HEADS, HEAD_SIZE, BYTES_OF_BF16 = 8, 4, 64, 2
CHUNK_BYTES = LAYERS * BLOCK_TOKENS * HEADS * 2 * HEAD_SIZE * BYTES_OF_BF16
"""K and V of 16 tokens: 128 KiB, as a small model has."""

MAX_WARNINGS = 5

WAIT_S = 60.0
"""Every job has a deadline well below this: it only bounds a fault of the demo itself."""


def identity() -> KVIdentity:
    """What the made-up bytes mean. Both processes arrive at the same namespace, because they describe the same thing."""
    layers = tuple(f"layers.{number}" for number in range(LAYERS))
    group = GroupIdentity(kind="full", layers=layers, payload_bytes=CHUNK_BYTES, heads=HEADS, head_size=HEAD_SIZE)
    return KVIdentity(
        model="kvstore-demo",
        weights="made-up",
        model_config="made-up",
        kv_dtype="bfloat16",
        layout="demo",
        layout_version=1,
        block_tokens=BLOCK_TOKENS,
        hash_tokens=BLOCK_TOKENS,
        blocks_per_chunk=1,
        groups=(group,),
        hash_algorithm="sha256",
    )


def prompts(number: int) -> list[list[int]]:
    """Prompts of 500 to 1,000 tokens, the same ones in every process."""
    chance = random.Random(0)
    return [[chance.randrange(32_000) for _ in range(chance.randrange(500, 1000))] for _ in range(number)]


def keys_of(tokens: Sequence[int]) -> list[bytes]:
    """An engine's keys: each chunk's hash covers all tokens before it, so equal keys mean equal KV."""
    keys = []
    chain = b""
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = b"".join(token.to_bytes(4, "big") for token in tokens[start : start + BLOCK_TOKENS])
        chain = hashlib.sha256(chain + block).digest()
        keys.append(chain + bytes(4))
    return keys


def kv_of(key: bytes) -> bytes:
    """Stands for computing a chunk: bytes that depend on every token up to it and on nothing else."""
    return hashlib.shake_128(key).digest(CHUNK_BYTES)


class PagedMemory:
    """The engine's memory: rows that hold one chunk each."""

    def __init__(self, rows: int) -> None:
        # As an engine has them: more than are in use at one time.
        self.row_count = 2 * rows
        self._bytes = memoryview(bytearray(self.row_count * CHUNK_BYTES))

    def row(self, number: int) -> memoryview:
        return self._bytes[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]

    def payload_bytes(self, group: int) -> int | None:
        return CHUNK_BYTES if group == 0 else None

    def copy_out(self, row: int, group: int, payload: memoryview) -> None:
        payload[:] = self.row(row)

    def copy_in(self, row: int, group: int, payload: memoryview) -> None:
        self.row(row)[:] = payload


@dataclasses.dataclass(frozen=True)
class Reading:
    """What the second engine saw of one prompt."""

    found: int
    right: int
    lookup_ms: float
    load_ms: float


def run(store: Store, number: int) -> int:
    """Store, start the second engine, print what came back. Returns the exit code."""
    # A backend that cannot serve is said before anything else.
    store.open().close()
    with _step(f"Engine A computes {number} prompt{'s' if number > 1 else ''} and stores what comes of it"):
        stored_ms, stores = _store(store, number)
    with _step("Engine B, another process, finds and loads it"):
        readings, counted, said = _start_reader(store, number)
    rows: list[Sequence[object]] = [("prompt", "tokens", "chunks", "bytes", "store ms", "found", "look-up ms", "load ms", "right")]
    whole = True
    for name, (tokens, ms, reading) in enumerate(zip(prompts(number), stored_ms, readings, strict=True), 1):
        chunks = len(tokens) // BLOCK_TOKENS
        whole = whole and reading.found == reading.right == chunks
        right = f"{reading.right} of {chunks}"
        size = human_bytes(chunks * CHUNK_BYTES)
        times = (f"{ms:.1f}", reading.found, f"{reading.lookup_ms:.1f}", f"{reading.load_ms:.1f}")
        rows.append((name, len(tokens), chunks, size, *times, right))
    print()
    print(columns(rows, numbers=True))
    namespace = identity().namespace
    new, replaced, there = (stores[result] for result in ("stored", "replaced", "exists"))
    print(f"\nEngine A's chunks: {new} new, {replaced} replaced, {there} there before; in {store} under v1/{namespace}.")
    print(store.how_to_delete([namespace]))
    if not whole:
        print("\nFAILED: not every chunk came back as it was stored.")
        print(why("engine B", counted, said))
    return 0 if whole else 1


def why(engine: str, counted: Sequence[Sequence[object]], said: str) -> str:
    """What an engine counted (rows of name, labels, value) and the first lines of its log, for whoever has to find the cause."""
    lines = [line[:400] for line in said.splitlines() if line.strip()]
    shown = [f"What {engine} counted:", columns(counted, indent="  ") if counted else "  nothing"]
    shown += [f"The first warnings of {engine}:", *(f"  {line}" for line in lines[:MAX_WARNINGS])] if lines else []
    return "\n".join(shown)


def _start_reader(store: Store, number: int) -> tuple[list[Reading], list[list[object]], str]:
    """Run the second engine. Returns its readings, what it counted, and its log."""
    command = [sys.executable, "-m", "kvstore_sdk", "demo", "--as-reader", "--prompts", str(number)]
    # The store's URL may hold what every user of this machine would read in a command line.
    told = json.dumps(dataclasses.asdict(store))
    try:
        done = subprocess.run(command, input=told, capture_output=True, text=True, timeout=WAIT_S * (number + 1))
    except subprocess.TimeoutExpired as cause:
        raise BackendError(f"demo: the second engine did not end within {cause.timeout:.0f} s") from None
    if done.returncode:
        raise BackendError(f"demo: the second engine failed with exit code {done.returncode}: {done.stderr.strip()[-500:]}")
    # The last line: a backend may print as well.
    answer = json.loads(done.stdout.splitlines()[-1])
    return [Reading(**reading) for reading in answer["readings"]], answer["counted"], done.stderr


def read(store: Store, number: int) -> int:
    """The second engine: look up, load and check every prompt; write the readings to standard output as JSON."""
    readings = []
    counted: Counter[tuple[str, str]] = Counter()
    for tokens in prompts(number):
        # One tier a prompt would do as well; one memory a prompt makes sure that nothing is left over from the last one.
        keys = keys_of(tokens)
        memory = PagedMemory(len(keys))
        with _tier(store, memory, "engine-b") as tier:
            began = time.monotonic()
            answers = _look_up(tier, keys)
            looked_up = time.monotonic()
            found = [key for key, answer in zip(keys, answers, strict=True) if answer is Lookup.HIT]
            tier.submit_load(1, found, range(len(found)))
            result = _finish(tier)
            loaded = time.monotonic()
            for (metric, labels), value in tier.metrics.take().counters.items():
                counted[metric, " ".join(labels)] += int(value)
        done = set(result.done)
        right = sum(memory.row(row) == kv_of(key) for row, key in enumerate(found) if key in done)
        readings.append(Reading(len(found), right, (looked_up - began) * 1e3, (loaded - looked_up) * 1e3))
    rows = [(metric, labels, value) for (metric, labels), value in sorted(counted.items())]
    print(json.dumps({"readings": [dataclasses.asdict(reading) for reading in readings], "counted": rows}))
    return 0


def _store(store: Store, number: int) -> tuple[list[float], Counter[str]]:
    """Compute every prompt and store it. Returns the milliseconds of each store, and how many chunks ended with which result."""
    took_ms = []
    stores: Counter[str] = Counter()
    keys = [keys_of(tokens) for tokens in prompts(number)]
    memory = PagedMemory(max(map(len, keys)))
    with _tier(store, memory, "engine-a") as tier:
        for job, prompt_keys in enumerate(keys):
            for row, key in enumerate(prompt_keys):
                memory.row(row)[:] = kv_of(key)
            began = time.monotonic()
            tier.submit_store(job, prompt_keys, range(len(prompt_keys)))
            result = _finish(tier)
            took_ms.append((time.monotonic() - began) * 1e3)
            counters = tier.metrics.take().counters
            if result.failed:
                failures = {labels for (metric, labels) in counters if metric in ("call_failures", "breaches")}
                why = ", ".join(sorted(" ".join(labels) for labels in failures)) or "no answer"
                raise BackendError(f"demo: {len(result.failed)} of {len(prompt_keys)} chunks could not be stored: {why}")
            for (metric, labels), value in counters.items():
                if metric == "stores":
                    stores[labels[0]] += int(value)
        return took_ms, stores


@contextmanager
def _step(what: str) -> Iterator[None]:
    """Say what takes its time, and how long it took."""
    print(f"{what} ... ", end="", flush=True)
    began = time.monotonic()
    ended = "failed"
    try:
        yield
        ended = f"{time.monotonic() - began:.1f} s"
    finally:
        print(ended, flush=True)


@contextmanager
def _tier(store: Store, memory: PagedMemory, name: str) -> Iterator[Tier]:
    backend = store.open()
    try:
        tier = Tier(backend, memory, identity=identity(), name=name)
    except BaseException:
        backend.close()
        raise
    try:
        yield tier
    finally:
        tier.close()


def _look_up(tier: Tier, keys: Sequence[bytes]) -> list[Lookup]:
    """Ask as an engine does: every chunk, step after step, until none is pending."""
    answers = dict.fromkeys(keys, Lookup.PENDING)

    def settled() -> bool:
        # Not those that were answered: a HIT is given once to each request, so that none can wait for a chunk for ever.
        for key in (key for key, answer in answers.items() if answer is Lookup.PENDING):
            answers[key] = tier.lookup("request", key)
        tier.flush()
        return Lookup.PENDING not in answers.values()

    _wait(settled)
    tier.end_request("request")
    return list(answers.values())


def _finish(tier: Tier) -> JobResult:
    results: list[JobResult] = []

    def ended() -> bool:
        results.extend(tier.poll())
        return bool(results)

    _wait(ended)
    return results[0]


def _wait(until: Callable[[], Any]) -> None:
    give_up_at = time.monotonic() + WAIT_S
    while not until():
        if time.monotonic() > give_up_at:
            raise BackendError(f"demo: no answer within {WAIT_S:.0f} s")
        # A fraction of an engine's step.
        time.sleep(0.0005)
