"""Something that holds `n` keys: `python scale_child.py dict|tier|host-lru|host-arc|vllm-lru|vllm-arc N`.

A question is {"op"}; the answer {"us": microseconds of this thread's CPU time for each chunk}, or for the op "memory" {"bytes": that the
process grew by for each key that is held, without the key}, for "gc" {"us": of one full collection}. Keys that are asked for are equal to
those that are held, not the same objects, as an engine's are.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from child import serve
from host import CHAIN, Ours, Side, Theirs, key
from isolation_child import RecordRows

from kvstore_sdk.format import seal
from kvstore_sdk.identity import GroupIdentity, KVIdentity
from kvstore_sdk.keys import ChunkKey
from kvstore_sdk.tier import Lookup, Tier, TierSettings
from kvstore_sdk_backends.memory import open_memory

STEP_LOOKUPS = 100_000
JOBS, JOB_CHUNKS = 256, 16
PAYLOAD_BYTES = 512
SAMPLE = 16 * CHAIN
WAIT_S = 60.0


class Dict:
    """What no table of keys can do without: a dict, asked for chains of keys at random places."""

    ops = ("lookup",)

    def __init__(self, n: int) -> None:
        self._n = n
        self._rng = random.Random(1)

    def fill(self) -> None:
        """Take in all keys."""
        self._table = dict.fromkeys(map(key, range(self._n)), 0.0)

    def chains(self, chunks: int) -> Iterator[list[bytes]]:
        for _ in range(chunks // CHAIN):
            start = self._rng.randrange(max(1, self._n - CHAIN))
            yield [key(start + place) for place in range(CHAIN)]

    def us(self, op: str) -> float:
        table, spent = self._table, 0.0
        for chain in list(self.chains(SAMPLE)):
            begun_s = time.thread_time()
            for one in chain:
                table.get(one)
            spent += time.thread_time() - begun_s
        return spent / SAMPLE * 1e6


class Known(Dict):
    """A Tier that knows of `n` chunks, over the backend that keeps records in memory; jobs are of chunks that hardly have bytes."""

    ops = ("known", "repeated", "missing", "new", "step", "submit load", "submit store", "jobs", "idle poll")

    def __init__(self, n: int) -> None:
        super().__init__(n)
        group = GroupIdentity(kind="full", layers=("l0",), payload_bytes=PAYLOAD_BYTES, heads=1, head_size=1)
        identity = KVIdentity(
            model="m",
            weights="w",
            model_config="c",
            kv_dtype="bfloat16",
            layout="bench",
            layout_version=1,
            block_tokens=16,
            hash_tokens=16,
            blocks_per_chunk=1,
            groups=(group,),
            hash_algorithm="sha256",
        )
        settings = TierSettings(
            max_known_keys=max(self._n, JOBS * JOB_CHUNKS), hit_ttl_s=86400.0, store_timeout_s=WAIT_S, load_timeout_s=WAIT_S
        )
        # What is stored, and loaded again: beside it, the tier knows of `n` more that it was told of.
        self._rows = RecordRows(PAYLOAD_BYTES, JOBS * JOB_CHUNKS)
        self._rows.row_count *= 2
        self._namespace = identity.namespace
        self.tier = Tier(open_memory(""), self._rows, identity=identity, settings=settings)
        self._numbers, self._fresh, self._requests = itertools.count(), itertools.count(1 << 40), itertools.count()
        self._stored: list[bytes] = []

    def fill(self) -> None:
        for start in range(0, self._n, 4096):
            self.tier._table.stored([key(number) for number in range(start, min(start + 4096, self._n))])
        self.tier.flush()

    def us(self, op: str) -> float:
        if op == "idle poll":
            begun_s = time.thread_time()
            for _ in range(1000):
                self.tier.poll()
            return (time.thread_time() - begun_s) * 1e3
        if op in ("submit load", "submit store", "jobs"):
            return self._jobs_us(op)
        if op == "step":
            return self._step_us()
        spent = 0.0
        for chain in list(self.chains(SAMPLE)):
            spent += self._request_s(op, chain)
        return spent / SAMPLE * 1e6

    def _request_s(self, op: str, chain: list[bytes]) -> float:
        """A request that looks up one chain; seconds of the last time it does, and of the flush that sends what is new."""
        lookup, request = self.tier.lookup, f"r{next(self._requests)}"
        wanted = Lookup.HIT
        if op in ("missing", "new"):
            chain = [key(next(self._fresh)) for _ in chain]
            wanted = Lookup.PENDING
        if op in ("missing", "repeated"):
            for one in chain:
                lookup(request, one)
            if op == "missing":
                self._answered(request, chain)
                wanted = Lookup.MISS
        begun_s = time.thread_time()
        if op == "repeated":
            # Told HIT as often as it may be: what it hears now is what it was told.
            wanted = Lookup.MISS
        for one in chain:
            answer = lookup(request, one)
        if op == "new":
            self.tier.flush()
        spent = time.thread_time() - begun_s
        if answer is not wanted:
            raise RuntimeError(f"{op}: {answer}, not {wanted}")
        if op == "new":
            self._answered(request, chain)
        self.tier.end_request(request)
        return spent

    def _answered(self, request: str, chain: list[bytes]) -> None:
        until_s = time.monotonic() + WAIT_S
        while any(self.tier.lookup(request, one) is Lookup.PENDING for one in chain):
            self.tier.flush()
            time.sleep(0.0005)
            if time.monotonic() > until_s:
                raise RuntimeError("a look-up had no answer")

    def _step_us(self) -> float:
        """All look-ups of one step, of as many requests as there are chains, and its end."""
        chains = list(self.chains(STEP_LOOKUPS))
        lookup = self.tier.lookup
        names = [f"r{next(self._requests)}" for _ in chains]
        begun_s = time.thread_time()
        for name, chain in zip(names, chains, strict=True):
            for one in chain:
                lookup(name, one)
        self.tier.poll()
        self.tier.flush()
        spent = time.thread_time() - begun_s
        for name in names:
            self.tier.end_request(name)
        return spent / len(chains) / CHAIN * 1e6

    def _jobs_us(self, op: str) -> float:
        """All jobs at once: submitted, and for "jobs" polled until the last one is back."""
        load = op == "submit load"
        if load and not self._stored:
            self._jobs_us("submit store")
        if not load:
            self._stored = [key(next(self._fresh)) for _ in range(JOBS * JOB_CHUNKS)]
            for row, one in enumerate(self._stored):
                seal(self._rows.record(row).view, ChunkKey.from_engine(self._namespace, one), "bench", PAYLOAD_BYTES)
        submit: Callable[..., None] = self.tier.submit_load if load else self.tier.submit_store
        parts = [(self._stored[at : at + JOB_CHUNKS], range(at, at + JOB_CHUNKS)) for at in range(0, len(self._stored), JOB_CHUNKS)]
        begun_s = time.thread_time()
        for chunks, rows in parts:
            submit(next(self._numbers), chunks, rows)
        spent = time.thread_time() - begun_s
        left, until_s = len(parts), time.monotonic() + WAIT_S
        while left:
            begun_s = time.thread_time()
            results = self.tier.poll()
            self.tier.flush()
            if op == "jobs":
                spent += time.thread_time() - begun_s
            if any(not result.success for result in results):
                raise RuntimeError("a job failed")
            left -= len(results)
            time.sleep(0.002)
            if time.monotonic() > until_s:
                raise RuntimeError("a job did not end")
        return spent / len(self._stored) * 1e6


class Full:
    """A full host tier of `n` chunks, ours or vLLM's: its books only, no memory of it is touched."""

    ops = ("lookup", "again", "load", "store", "request")

    def __init__(self, made: type[Ours | Theirs], n: int, policy: str) -> None:
        self._made, self._n, self._policy = made, n, policy

    def fill(self) -> None:
        self._side = Side(self._made(self._n, self._policy), self._n, 1)

    def us(self, op: str) -> float:
        return 1e6 / self._side.rate(op)


def held_of(subject: str, n: int) -> Dict | Full:
    if subject in ("dict", "tier"):
        return (Dict if subject == "dict" else Known)(n)
    whose, policy = subject.split("-")
    return Full(Ours if whose == "host" else Theirs, n, policy)


def load(subject: str) -> None:
    """Import what a subject imports when it is made."""
    held_of(subject, 2 * CHAIN)


def resident_bytes() -> int:
    """Memory of this process. What a region maps and nobody touches is not in it."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def collection_us() -> float:
    """One collection of everything that can be in cycles. The interpreter makes one when a quarter more is there than at the last."""
    begun_s = time.thread_time()
    gc.collect()
    return (time.thread_time() - begun_s) * 1e6


def main() -> None:
    subject, n = sys.argv[1], int(sys.argv[2])
    # What is imported with the first one is not for keys; and, as vLLM does once it has started, what is there is looked at no more.
    held_of(subject, 2 * CHAIN).fill()
    held = held_of(subject, n)
    gc.collect()
    gc.freeze()
    before = resident_bytes()
    held.fill()
    gc.collect()
    bytes_a_key = (resident_bytes() - before) / n - sys.getsizeof(key(0))

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        op = question["op"]
        if op == "memory":
            return {"bytes": bytes_a_key}
        return {"us": collection_us() if op == "gc" else held.us(op)}

    serve(answer)
    if isinstance(held, Known):
        held.tier.close()


if __name__ == "__main__":
    main()
