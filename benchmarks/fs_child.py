"""One side of the filesystem comparison: `python fs_child.py ours|vllm FOLDER direct|buffered`.

A question is {"op": "put"|"get", "chunk_bytes", "threads", "chunks", "tag"}; the answer {"seconds": ...}. `tag` names a set of
chunks: a get reads what the put with that tag stored. Creating the payload, choosing names and removing files are outside the timed part.
*Ours* seals on put and verifies on get, as the Tier does: header, checksum and all.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from child import serve

BATCH = 16
REGION_BYTES = 64 << 20


class Ours:
    """The `fs` backend together with `seal` and `verify`."""

    def __init__(self, folder: Path, direct: bool) -> None:
        from kvstore_sdk.backend import Region, open_backend

        self._backend = open_backend("fs", {"direct_io": "always" if direct else "never"}, location=str(folder))
        self._region = Region(REGION_BYTES + (REGION_BYTES // (128 << 10)) * 4096)
        self._region.view[:] = os.urandom(1 << 20) * (self._region.size_bytes >> 20) + bytes(self._region.size_bytes % (1 << 20))

    def scribble(self) -> None:
        for at in range(0, self._region.size_bytes, 4096):
            self._region.view[at] ^= 0xFF

    def prepare(self, tag: str, size: int, chunks: int) -> list[list[Any]]:
        from kvstore_sdk.format import record_bytes
        from kvstore_sdk.keys import ChunkKey

        stride = record_bytes(size)
        fit = self._region.size_bytes // stride
        keys = [ChunkKey("ab" * 16, bytes.fromhex(name), 0) for name in names(tag, chunks)]
        found = [(key, self._region.buffer((i % fit) * stride, stride)) for i, key in enumerate(keys)]
        return [found[i : i + BATCH] for i in range(0, chunks, BATCH)]

    def put(self, size: int, batch: list[Any]) -> None:
        from kvstore_sdk.backend import Deadline, Put, PutStatus
        from kvstore_sdk.format import seal

        for key, buffer in batch:
            seal(buffer.view, key, "opaque-benchmark", size)
        results = self._backend.put([Put(key.name, (buffer,)) for key, buffer in batch], Deadline.after(60))
        if any(result.status is not PutStatus.STORED for result in results):
            raise RuntimeError(f"put failed: {results}")

    def get(self, size: int, batch: list[Any]) -> None:
        from kvstore_sdk.backend import Deadline, Get, GetStatus
        from kvstore_sdk.format import verify

        results = self._backend.get([Get(key.name, (buffer,)) for key, buffer in batch], Deadline.after(60))
        if any(result.status is not GetStatus.FOUND for result in results):
            raise RuntimeError(f"get failed: {results}")
        if any(verify(buffer.view, key, "opaque-benchmark", size) for key, buffer in batch):
            raise RuntimeError("a record did not verify")


class Vllm:
    """`batch_store_block` and `batch_load_block` of vLLM's fs tier; in C where its extension is built. No header, no checksum."""

    def __init__(self, folder: Path, direct: bool) -> None:
        self._folder, self._direct = folder, direct
        self._map = mmap.mmap(-1, REGION_BYTES)
        self._view = memoryview(self._map)
        self._view[:] = os.urandom(1 << 20) * (REGION_BYTES >> 20)

    def scribble(self) -> None:
        for at in range(0, REGION_BYTES, 4096):
            self._view[at] ^= 0xFF

    def prepare(self, tag: str, size: int, chunks: int) -> list[list[Any]]:
        fit = REGION_BYTES // size
        # The layout of vLLM's FileMapper: three hex digits, two hex digits and the group, the hash.
        paths = [str(self._folder / f"{name[:3]}/{name[3:5]}_g0/{name}.bin") for name in names(tag, chunks)]
        found = [(path, (i % fit) * size) for i, path in enumerate(paths)]
        return [found[i : i + BATCH] for i in range(0, chunks, BATCH)]

    def put(self, size: int, batch: list[Any]) -> None:
        from vllm.v1.kv_offload.tiering.fs.io import batch_store_block

        batch_store_block([path for path, _ in batch], self._view, [offset for _, offset in batch], size, self._direct)

    def get(self, size: int, batch: list[Any]) -> None:
        from vllm.v1.kv_offload.tiering.fs.io import batch_load_block

        batch_load_block([path for path, _ in batch], self._view, [offset for _, offset in batch], size, self._direct)


def names(tag: str, chunks: int) -> list[str]:
    """64 hex digits for each chunk. The first 8, which choose the folder, are the same for every tag: a store in use has its folders."""
    return [hashlib.sha256(f"{i}".encode()).hexdigest()[:8] + hashlib.sha256(f"{tag} {i}".encode()).hexdigest()[8:] for i in range(chunks)]


def timed(work: Callable[[list[Any]], None], batches: list[list[Any]], threads: int) -> float:
    """Seconds until `threads` threads have done all batches."""
    waiting = list(reversed(batches))
    failed: list[BaseException] = []

    def run() -> None:
        try:
            while True:
                try:
                    batch = waiting.pop()
                except IndexError:
                    return
                work(batch)
        except BaseException as error:  # noqa: BLE001  # handed to the thread that waits
            failed.append(error)

    workers = [threading.Thread(target=run) for _ in range(threads)]
    start_s = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - start_s
    if failed:
        raise failed[0]
    return seconds


def main() -> None:
    side, folder, mode = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    folder.mkdir(parents=True, exist_ok=True)
    store = (Ours if side == "ours" else Vllm)(folder, mode == "direct")

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        size, chunks = question["chunk_bytes"], question["chunks"]
        work = store.put if question["op"] == "put" else store.get
        batches = store.prepare(question["tag"], size, chunks)
        if question["op"] == "get":
            # What a get does not read must not look as if it had.
            store.scribble()
        if question["threads"] > len(batches):
            # As many batches as threads at least, or some threads would have nothing to do.
            flat = [pair for batch in batches for pair in batch]
            step = -(-len(flat) // question["threads"])
            batches = [flat[i : i + step] for i in range(0, len(flat), step)]
        return {"seconds": timed(lambda batch: work(size, batch), batches, question["threads"])}

    serve(answer)


if __name__ == "__main__":
    main()
