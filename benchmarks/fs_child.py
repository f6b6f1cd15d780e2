"""One side of a filesystem comparison: `python fs_child.py ours|vllm [FOLDER direct|buffered]`.

A question is {"op": "put"|"get", "chunk_bytes", "threads", "chunks", "tag"}; with "folder" and "direct" where the command has not said
them, "checks": false for ours without seal and verify, "drop": true for a get whose files leave the page cache before. The answer is
{"seconds": ...}. `tag` names a set of chunks: a get reads what the put with that tag stored. Creating the payload, choosing names and
removing files are outside the timed part. *Ours* seals on put and verifies on get, as the Tier does: header, checksum and all.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from child import serve

BATCH = 16
LAYOUT = "opaque-benchmark"


class Ours:
    """The `fs` backend together with `seal` and `verify`."""

    def __init__(self, folder: Path, direct: bool, region_bytes: int) -> None:
        from kvstore_sdk.backend import Region, open_backend

        self._folder = folder
        self._backend = open_backend("fs", {"direct_io": "always" if direct else "never"}, location=str(folder))
        self._region = Region(region_bytes)
        fill(self._region.view)
        self.checks = True

    def close(self) -> None:
        self._backend.close()
        self._region.close()

    def scribble(self) -> None:
        scribble(self._region.view)

    def prepare(self, tag: str, size: int, chunks: int) -> list[Any]:
        from kvstore_sdk.format import record_bytes
        from kvstore_sdk.keys import ChunkKey

        stride = record_bytes(size)
        fit = self._region.size_bytes // stride
        keys = [ChunkKey("ab" * 16, bytes.fromhex(name), 0) for name in names(tag, chunks)]
        return [(key, self._region.buffer((i % fit) * stride, stride)) for i, key in enumerate(keys)]

    def paths(self, found: Sequence[Any]) -> list[str]:
        return [f"{self._folder}/{key.name}" for key, _ in found]

    def put(self, size: int, batch: Sequence[Any]) -> None:
        from kvstore_sdk.backend import Deadline, Put, PutStatus
        from kvstore_sdk.format import seal

        if self.checks:
            for key, buffer in batch:
                seal(buffer.view, key, LAYOUT, size)
        results = self._backend.put([Put(key.name, (buffer,)) for key, buffer in batch], Deadline.after(60))
        if any(result.status is not PutStatus.STORED for result in results):
            raise RuntimeError(f"put failed: {results}")

    def get(self, size: int, batch: Sequence[Any]) -> None:
        from kvstore_sdk.backend import Deadline, Get, GetStatus
        from kvstore_sdk.format import verify

        results = self._backend.get([Get(key.name, (buffer,)) for key, buffer in batch], Deadline.after(60))
        if any(result.status is not GetStatus.FOUND for result in results):
            raise RuntimeError(f"get failed: {results}")
        if self.checks and any(verify(buffer.view, key, LAYOUT, size) for key, buffer in batch):
            raise RuntimeError("a record did not verify")


class Vllm:
    """`batch_store_block` and `batch_load_block` of vLLM's fs tier; in C where its extension is built. No header, no checksum."""

    def __init__(self, folder: Path, direct: bool, region_bytes: int) -> None:
        self._folder, self._direct = folder, direct
        self._map = mmap.mmap(-1, region_bytes)
        self._view = memoryview(self._map)
        fill(self._view)
        folder.mkdir(parents=True, exist_ok=True)

    def close(self) -> None:
        self._view.release()
        self._map.close()

    def scribble(self) -> None:
        scribble(self._view)

    def prepare(self, tag: str, size: int, chunks: int) -> list[Any]:
        fit = len(self._view) // size
        # The layout of vLLM's FileMapper: three hex digits, two hex digits and the group, the hash.
        paths = [str(self._folder / f"{name[:3]}/{name[3:5]}_g0/{name}.bin") for name in names(tag, chunks)]
        return [(path, (i % fit) * size) for i, path in enumerate(paths)]

    def paths(self, found: Sequence[Any]) -> list[str]:
        return [path for path, _ in found]

    def put(self, size: int, batch: Sequence[Any]) -> None:
        from vllm.v1.kv_offload.tiering.fs.io import batch_store_block

        batch_store_block([path for path, _ in batch], self._view, [offset for _, offset in batch], size, self._direct)

    def get(self, size: int, batch: Sequence[Any]) -> None:
        from vllm.v1.kv_offload.tiering.fs.io import batch_load_block

        batch_load_block([path for path, _ in batch], self._view, [offset for _, offset in batch], size, self._direct)


def fill(view: memoryview) -> None:
    piece = os.urandom(1 << 20)
    for at in range(0, len(view), len(piece)):
        view[at : at + len(piece)] = piece[: len(view) - at]


def scribble(view: memoryview) -> None:
    for at in range(0, len(view), 4096):
        view[at] ^= 0xFF


def names(tag: str, chunks: int) -> list[str]:
    """64 hex digits for each chunk. The first 8, which choose the folder, are the same for every tag: a store in use has its folders."""
    return [hashlib.sha256(f"{i}".encode()).hexdigest()[:8] + hashlib.sha256(f"{tag} {i}".encode()).hexdigest()[8:] for i in range(chunks)]


def batches_of(found: Sequence[Any], threads: int) -> list[Sequence[Any]]:
    """As a Tier cuts a job: 16 records a call, fewer when some threads would have nothing to do."""
    step = min(BATCH, -(-len(found) // threads))
    return [found[i : i + step] for i in range(0, len(found), step)]


def drop(paths: Sequence[str]) -> None:
    """Let the page cache forget these files, which were written out before."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def timed(work: Callable[[Sequence[Any]], None], batches: Sequence[Sequence[Any]], threads: int) -> float:
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


class Side:
    """Answers questions about one store after another: one is open at a time."""

    def __init__(self, make: Callable[[Path, bool, int], Any]) -> None:
        self._make = make
        self._of: tuple[str, bool, int] | None = None
        self._store: Any = None

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        size, chunks, threads = question["chunk_bytes"], question["chunks"], question["threads"]
        # Memory for all chunks, so that no two threads fill the same; ours has a header page beside each.
        store = self._open(question["folder"], question["direct"], chunks * (size + 4096))
        store.checks = question.get("checks", True)
        found = store.prepare(question["tag"], size, chunks)
        if question["op"] == "get":
            # What a get does not read must not look as if it had.
            store.scribble()
        if question.get("drop"):
            drop(store.paths(found))
        work = store.put if question["op"] == "put" else store.get
        return {"seconds": timed(lambda batch: work(size, batch), batches_of(found, threads), threads)}

    def _open(self, folder: str, direct: bool, region_bytes: int) -> Any:
        of = folder, direct, region_bytes
        if of != self._of:
            if self._store is not None:
                self._store.close()
            self._store, self._of = self._make(Path(folder), direct, region_bytes), of
        return self._store


def main() -> None:
    side = Side(Ours if sys.argv[1] == "ours" else Vllm)
    place = {"folder": sys.argv[2], "direct": sys.argv[3] == "direct"} if sys.argv[2:] else {}
    serve(lambda question: side.answer(place | question))


if __name__ == "__main__":
    main()
