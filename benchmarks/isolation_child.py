"""One side of the comparison of isolation: `python isolation_child.py threads|isolated|polled staged|direct FOLDER`.

A Tier over the `fs` backend: called in this process by threads (threads), in a child process by threads that wait for it (isolated), or in
a child whose answers this thread takes when it comes by (polled). A question is {"op": "put"|"get", "bytes", "chunks", "busy_s",
"sleep_s", "round"}: submit jobs of 16 chunks each and poll until all are done; between two polls this thread does in pure Python what takes
it `busy_s` alone, and sleeps for `sleep_s`. The answer is {"rate": bytes/s, "cpu_us": this thread's CPU time in the tier for each chunk,
"kept": the share of the time that what it did between polls would have taken alone}.
"""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path
from typing import Any

from child import serve

from kvstore_sdk.backend import Backend, Buffer, Deadline, Region
from kvstore_sdk.format import HEADER_BYTES, record_bytes, seal
from kvstore_sdk.identity import GroupIdentity, KVIdentity
from kvstore_sdk.isolation import PolledBackend, open_isolated
from kvstore_sdk.keys import ChunkKey
from kvstore_sdk.testing import BackendWrapper
from kvstore_sdk.tier import Tier, TierSettings, tier
from kvstore_sdk_backends.fs import open_fs

JOB_CHUNKS = 16
WAIT_S = 60.0
TURNS = 20_000


class Rows:
    """An engine's rows, each with room for a chunk: as plain bytes, or, for the direct way, as records in a region."""

    def __init__(self, size: int, chunks: int) -> None:
        self._size = size
        self._stride = record_bytes(size)
        self.region = Region(chunks * self._stride, "kvstore-bench")
        self.region.view[:] = hashlib.shake_128(b"chunk").digest(4096) * (self.region.size_bytes // 4096)
        # Stores are given at most three quarters.
        self.row_count = 2 * chunks

    def payload_bytes(self, group: int) -> int | None:
        return self._size if group == 0 else None

    def payload(self, row: int) -> memoryview:
        start = row * self._stride + HEADER_BYTES
        return self.region.view[start : start + self._size]


class PlainRows(Rows):
    def copy_out(self, row: int, group: int, payload: memoryview) -> None:
        payload[:] = self.payload(row)

    def copy_in(self, row: int, group: int, payload: memoryview) -> None:
        self.payload(row)[:] = payload


class RecordRows(Rows):
    def record(self, row: int) -> Buffer:
        return self.region.buffer(row * self._stride, self._stride)


class Bench:
    """A Tier for chunks of one size."""

    def __init__(self, side: str, way: str, folder: Path, size: int, chunks: int, turns_per_s: float) -> None:
        self._size, self._chunks, self._turns_per_s = size, chunks, turns_per_s
        group = GroupIdentity(kind="full", layers=("l0",), payload_bytes=size, heads=1, head_size=1)
        self._identity = KVIdentity(
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
        location = str(folder / f"{side}-{way}-{size}")
        # Removes what was written, past the tier and not timed.
        self._store = open_fs(location)
        backend: Backend = open_fs(location) if side == "threads" else open_isolated("fs", location=location)
        self._rows = RecordRows(size, chunks) if way == "direct" else PlainRows(size, chunks)
        if side == "isolated":
            # Passes on what any backend offers, and so not what would make the Tier poll.
            backend = BackendWrapper(backend)
        self.tier = Tier(backend, self._rows, identity=self._identity, settings=TierSettings(store_timeout_s=WAIT_S, load_timeout_s=WAIT_S))
        self._jobs = 0
        self._known = self._keys("known")
        self._move("put", self._known, 0.0, 0.0005)

    def rate(self, op: str, tag: str, busy_s: float, sleep_s: float) -> tuple[float, float, float]:
        if op == "get":
            return self._move("get", self._known, busy_s, sleep_s)
        keys = self._keys(tag)
        found = self._move("put", keys, busy_s, sleep_s)
        names = [ChunkKey.from_engine(self._identity.namespace, key).name for key in keys]
        for at in range(0, len(names), 16):
            self._store.delete(names[at : at + 16], Deadline.after(WAIT_S))
        return found

    def _keys(self, tag: str) -> list[bytes]:
        return [hashlib.sha256(f"{tag} {number}".encode()).digest() + bytes(4) for number in range(self._chunks)]

    def _move(self, op: str, keys: list[bytes], busy_s: float, sleep_s: float) -> tuple[float, float, float]:
        if op == "put" and isinstance(self._rows, RecordRows):
            for row, key in enumerate(keys):
                seal(self._rows.record(row).view, ChunkKey.from_engine(self._identity.namespace, key), "bench", self._size)
        submit = self.tier.submit_store if op == "put" else self.tier.submit_load
        waiting, steps, cpu_s = 0, 0, 0.0
        began_s = time.perf_counter()
        cpu_began_s = time.thread_time()
        for start in range(0, len(keys), JOB_CHUNKS):
            self._jobs += 1
            waiting += 1
            submit(self._jobs, keys[start : start + JOB_CHUNKS], range(start, min(start + JOB_CHUNKS, len(keys))))
        while waiting:
            cpu_s += time.thread_time() - cpu_began_s
            work(int(busy_s * self._turns_per_s))
            steps += 1
            if sleep_s:
                time.sleep(sleep_s)
            cpu_began_s = time.thread_time()
            for result in self.tier.poll():
                if not result.success:
                    raise RuntimeError(f"a {op} failed: {len(result.failed)} of {len(keys)}")
                waiting -= 1
            self.tier.flush()
            if time.perf_counter() - began_s > WAIT_S:
                raise RuntimeError(f"a {op} did not end")
        seconds = time.perf_counter() - began_s
        cpu_s += time.thread_time() - cpu_began_s
        return len(keys) * self._size / seconds, steps * busy_s / seconds, cpu_s / len(keys) * 1e6


def work(turns: int) -> None:
    """Run pure Python: never waits, and gives the interpreter away only when it is asked to."""
    for _ in range(turns):
        pass


def speed() -> float:
    """Turns of `work` in a second, with nobody else on the processor: the best of some tries."""
    found = []
    for _ in range(50):
        began_s = time.perf_counter()
        work(TURNS)
        found.append(TURNS / (time.perf_counter() - began_s))
    return max(found)


def main() -> None:
    side, way, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    folder.mkdir(parents=True, exist_ok=True)
    if side == "polled":
        # Also where the Tier would have threads wait.
        tier.polled_by = lambda backend, memory: backend if isinstance(backend, PolledBackend) else None
    turns_per_s = speed()
    benches: dict[int, Bench] = {}

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        size = question["bytes"]
        if size not in benches:
            benches[size] = Bench(side, way, folder, size, question["chunks"], turns_per_s)
        rate, kept, cpu_us = benches[size].rate(question["op"], question["round"], question["busy_s"], question["sleep_s"])
        return {"rate": rate, "cpu_us": cpu_us, "kept": kept}

    serve(answer)
    for bench in benches.values():
        bench.tier.close()


if __name__ == "__main__":
    main()
