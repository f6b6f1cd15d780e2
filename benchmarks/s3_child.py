"""One side of the comparison of object stores: `python s3_child.py SIDE ENDPOINT BUCKET`, SIDE one of `SIDES`.

A question is {"op": "put"|"get", "payload_bytes", "concurrency", "records", "tag"}; the answer {"seconds", "each": [seconds of a record]}.
`tag` names a set of records: a get reads what the put with that tag stored. Opening, filling memory and removing objects are outside the
timed part. *Ours* seals before each put and verifies after each get, as the Tier does; the others move as many bytes without.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from typing import Any, Protocol

from child import serve
from s3_drive import WAIT_S, Round, Rows, Sampled, Times, by_threads
from s3_rivals import REGION_NAME, SECRETS, Boto3, Nixl, S3fs, Vllm

from kvstore_sdk.format import record_bytes
from kvstore_sdk.keys import ChunkKey

IO_THREADS = 8
LAYOUT = "opaque-benchmark"
NAMESPACE = "ab" * 16


class Side(Protocol):
    sampled: Sampled

    def prepare(self, round_: Round) -> None: ...
    def put(self, round_: Round) -> Times: ...
    def get(self, round_: Round) -> Times: ...
    def close(self) -> None: ...


class Ours:
    """The `s3` backend together with `seal` and `verify`, called as the Tier calls it."""

    def __init__(self, engine: str, endpoint: str, bucket: str, prefix: str) -> None:
        self._engine, self._endpoint, self._location = engine, endpoint, f"{bucket}/{prefix}"
        self._rows: Rows | None = None

    def prepare(self, round_: Round) -> None:
        from kvstore_sdk.backend import SupportsRegions, open_backend

        self.close()
        options = {
            "engine": self._engine,
            "endpoint": self._endpoint,
            "region": REGION_NAME,
            "addressing": "path",
            "access_key_id": SECRETS[0],
            "secret_access_key": SECRETS[1],
            "checksums": "when_required",
            "concurrency": round_.concurrency,
        }
        self._backend: Any = open_backend("s3", options, location=self._location)
        self._rows = Rows(len(round_.keys), round_.record_bytes)
        if isinstance(self._backend, SupportsRegions):
            self._backend.register_region(self._rows.region)
        self._buffers = [self._rows.region.buffer(row * round_.record_bytes, round_.record_bytes) for row in range(len(round_.keys))]
        self.sampled = Sampled(self._rows.region.view)

    def put(self, round_: Round) -> Times:
        from kvstore_sdk.backend import Deadline, Put, PutStatus
        from kvstore_sdk.format import HEADER_BYTES, seal

        def work(rows: range) -> None:
            for row in rows:
                seal(self._buffers[row].view, keys[row], LAYOUT, round_.record_bytes - HEADER_BYTES)
            results = self._backend.put([Put(names[row], (self._buffers[row],)) for row in rows], Deadline.after(WAIT_S))
            if any(result.status is not PutStatus.STORED for result in results):
                raise RuntimeError(f"put failed: {results}")

        keys, names = chunk_keys(round_)
        times = as_a_tier(work, len(keys), round_.concurrency)
        assert self._rows
        self.sampled = Sampled(self._rows.region.view)
        return times

    def get(self, round_: Round) -> Times:
        from kvstore_sdk.backend import Deadline, Get, GetStatus
        from kvstore_sdk.format import HEADER_BYTES, verify

        def work(rows: range) -> None:
            results = self._backend.get([Get(names[row], (self._buffers[row],)) for row in rows], Deadline.after(WAIT_S))
            if any(result.status is not GetStatus.FOUND for result in results):
                raise RuntimeError(f"get failed: {results}")
            if any(verify(self._buffers[row].view, keys[row], LAYOUT, round_.record_bytes - HEADER_BYTES) for row in rows):
                raise RuntimeError("a record did not verify")

        keys, names = chunk_keys(round_)
        return as_a_tier(work, len(keys), round_.concurrency)

    def close(self) -> None:
        if self._rows:
            from kvstore_sdk.backend import SupportsRegions

            if isinstance(self._backend, SupportsRegions):
                self._backend.unregister_region(self._rows.region)
            self._backend.close()
            self._buffers = []
            self.sampled = None  # type: ignore[assignment]
            self._rows.close()
            self._rows = None


def chunk_keys(round_: Round) -> tuple[list[ChunkKey], list[str]]:
    keys = [ChunkKey(NAMESPACE, hashlib.sha256(key.encode()).digest(), 0) for key in round_.keys]
    return keys, [key.name for key in keys]


def as_a_tier(work: Callable[[range], None], records: int, concurrency: int) -> Times:
    """Calls as the Tier makes them: from `IO_THREADS` threads at most, each with its part of the records that are under way.

    A record takes as long as its call.
    """
    threads = min(concurrency, IO_THREADS)
    batch = concurrency // threads
    batches = [range(start, min(start + batch, records)) for start in range(0, records, batch)]
    times = by_threads(lambda index: work(batches[index]), len(batches), threads)
    return Times(times.seconds, [seconds for rows, seconds in zip(batches, times.each, strict=True) for _ in rows])


SIDES = ("ours-nixl", "ours-s3fs", "nixl", "vllm", "boto3", "s3fs")


def open_side(name: str, endpoint: str, bucket: str) -> Side:
    """The side; all its objects lie below `<name>/`."""
    if name.startswith("ours-"):
        return Ours(name.removeprefix("ours-"), endpoint, bucket, name)
    if name == "vllm":
        return Vllm(endpoint, bucket, name)
    return {"nixl": Nixl, "boto3": Boto3, "s3fs": S3fs}[name](endpoint, bucket)


def main() -> None:
    name, endpoint, bucket = sys.argv[1:4]
    # NIXL and vLLM print to the standard output, C++ and all; answers go where nothing else does.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ |= {"VLLM_LOGGING_LEVEL": "CRITICAL", "NIXL_LOG_LEVEL": "ERROR"}
    side = open_side(name, endpoint, bucket)
    shape: list[Any] = []

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        keys = [f"{name}/{question['tag']}-{row}" for row in range(question["records"])]
        round_ = Round(keys, record_bytes(question["payload_bytes"]), question["concurrency"])
        if shape != [round_.record_bytes, round_.concurrency, len(keys)]:
            side.prepare(round_)
            shape[:] = [round_.record_bytes, round_.concurrency, len(keys)]
        if question["op"] == "put":
            times = side.put(round_)
        else:
            side.sampled.spoil()
            times = side.get(round_)
            side.sampled.check()
        return {"seconds": times.seconds, "each": list(times.each)}

    serve(answer, answers)
    side.close()


if __name__ == "__main__":
    main()
