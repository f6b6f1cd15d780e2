"""One side of the comparison with LMCache: `python peers_child.py native|aio|disk FOLDER direct|buffered`, in the environment `lmcache`.

It takes the questions of `fs_child.py` and gives its answers. None of the sides seals or verifies. Choosing names, filling memory and
looking whether a get moved anything are outside the timed part.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

# Before anything of it is imported: no word of it, and none to its makers.
os.environ.update(LMCACHE_LOG_LEVEL="ERROR", LMCACHE_DISABLE_BANNER="1", LMCACHE_TRACK_USAGE="false")

from child import serve

WAIT_S = 120.0
ALIGN_BYTES = 4096
STAGING_BYTES = 512 << 20


class L2:
    """An adapter of LMCache's second level over a folder: `fs_native`, C++ with threads of its own, or `fs`, Python with asyncio.

    A thread that we are asked for is one task under way, as in `lmcache bench l2`; `fs_native` has as many workers besides.
    """

    def __init__(self, kind: str, folder: Path, direct: bool) -> None:
        self._kind, self._folder, self._direct = kind, folder, direct
        self._adapters: dict[int, Any] = {}
        self._firsts: dict[str, int] = {}
        self._named = 0
        self._memory: Any = None

    def timed(self, op: str, tag: str, size: int, chunks: int, threads: int) -> float:
        from lmcache.cli.commands.bench.l2_adapter_bench.data import make_memory_objects, make_object_keys

        adapter = self._adapter(threads)
        if tag not in self._firsts:
            self._firsts[tag], self._named = self._named, self._named + chunks
        keys = make_object_keys(chunks, key_offset=self._firsts[tag])
        # What a get finds in memory is not what it has to bring.
        objects = make_memory_objects(self._room(size * chunks), chunks, size, 0, fill_offset=int(op == "get"))
        shares = [slice(at, at + -(-chunks // threads)) for at in range(0, chunks, -(-chunks // threads))]
        submit = adapter.submit_store_task if op == "put" else adapter.submit_load_task
        start_s = time.perf_counter()
        tasks = [submit(keys[share], objects[share]) for share in shares]
        moved = (self._stored if op == "put" else self._loaded)(adapter, tasks)
        seconds = time.perf_counter() - start_s
        if moved != (len(tasks) if op == "put" else chunks):
            raise RuntimeError(f"{op} of {chunks} chunks failed: {moved} came through")
        if any(view.raw_data[place] != i & 0xFF for i, view in enumerate(objects) for place in (0, -1)):
            raise RuntimeError(f"{op}: the memory does not hold what was stored")
        return seconds

    def _adapter(self, threads: int) -> Any:
        # Of asyncio's one there is nothing to choose.
        workers = threads if self._kind == "fs_native" else 0
        if workers not in self._adapters:
            from lmcache.v1.distributed.l2_adapters import create_l2_adapter
            from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2AdapterConfig
            from lmcache.v1.distributed.l2_adapters.fs_native_l2_adapter import FSNativeL2AdapterConfig

            options = {"base_path": str(self._folder), "use_odirect": self._direct}
            config = FSNativeL2AdapterConfig(**options, num_workers=workers) if workers else FSL2AdapterConfig(**options)
            self._adapters[workers] = create_l2_adapter(config)
        return self._adapters[workers]

    def _room(self, size: int) -> Any:
        from lmcache.cli.commands.bench.l2_adapter_bench.data import make_aligned_tensor

        if self._memory is None or len(self._memory) < size:
            self._memory = make_aligned_tensor(size, ALIGN_BYTES)
        return self._memory

    @staticmethod
    def _stored(adapter: Any, tasks: list[int]) -> int:
        from lmcache.cli.commands.bench.l2_adapter_bench.data import wait_eventfd

        done: dict[int, Any] = {}
        while len(done) < len(tasks) and wait_eventfd(adapter.get_store_event_fd(), WAIT_S):
            done.update(adapter.pop_completed_store_tasks())
        return sum(result.is_successful() for result in done.values())

    @staticmethod
    def _loaded(adapter: Any, tasks: list[int]) -> int:
        from lmcache.cli.commands.bench.l2_adapter_bench.data import wait_eventfd

        waiting, found = set(tasks), 0
        while waiting and wait_eventfd(adapter.get_load_event_fd(), WAIT_S):
            for task in list(waiting):
                if (loaded := adapter.query_load_result(task)) is not None:
                    waiting.remove(task)
                    found += loaded.popcount()
        return found

    def close(self) -> None:
        for adapter in self._adapters.values():
            adapter.close()


class Disk:
    """`LocalDiskBackend`, LMCache's disk path beside an engine: threads in Python, into memory that it takes from its pool."""

    def __init__(self, folder: Path, direct: bool) -> None:
        self._folder, self._direct = folder, direct
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._backends: dict[int, Any] = {}
        self._keys: dict[str, list[Any]] = {}
        self._memory: Any = None

    def timed(self, op: str, tag: str, size: int, chunks: int, threads: int) -> float:
        backend = self._backend(threads)
        return self._put(backend, tag, size, chunks) if op == "put" else self._get(backend, tag, chunks)

    def _put(self, backend: Any, tag: str, size: int, chunks: int) -> float:
        import torch
        from lmcache.utils import CacheEngineKey
        from lmcache.v1.memory_management import MemoryFormat

        first = sum(map(len, self._keys.values()))
        keys = self._keys[tag] = [CacheEngineKey("bench-model", 1, 0, first + i, torch.uint8) for i in range(chunks)]
        objects = [self._memory.allocate(torch.Size([size]), torch.uint8, MemoryFormat.KV_2LTD) for _ in keys]
        for i, view in enumerate(objects):
            view.raw_data.fill_(i & 0xFF)
        left, over = [chunks], threading.Event()
        lock = threading.Lock()

        def stored(key: Any) -> None:
            with lock:
                left[0] -= 1
                if not left[0]:
                    over.set()

        start_s = time.perf_counter()
        backend.batched_submit_put_task(keys, objects, on_complete_callback=stored)
        came = over.wait(WAIT_S)
        seconds = time.perf_counter() - start_s
        for view in objects:
            view.ref_count_down()
        if not came:
            raise RuntimeError(f"put of {chunks} chunks failed: {left[0]} are missing")
        return seconds

    def _get(self, backend: Any, tag: str, chunks: int) -> float:
        # Nor here: what an earlier call left in the pool is not what this one has to bring.
        self._memory.memory_allocator.buffer.fill_(0xFF)
        start_s = time.perf_counter()
        found = backend.batched_get_blocking(self._keys[tag])
        seconds = time.perf_counter() - start_s
        if len(found) != chunks or any(view is None for view in found):
            raise RuntimeError(f"get of {chunks} chunks failed")
        if any(view.raw_data.view(-1)[place] != i & 0xFF for i, view in enumerate(found) for place in (0, -1)):
            raise RuntimeError("get: the memory does not hold what was stored")
        for view in found:
            view.ref_count_down()
        return seconds

    def _backend(self, threads: int) -> Any:
        if threads not in self._backends:
            from lmcache.v1.config import LMCacheEngineConfig
            from lmcache.v1.memory_allocators.mixed_memory_allocator import MixedMemoryAllocator
            from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
            from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

            config = LMCacheEngineConfig.from_defaults(
                local_cpu=False,
                local_disk=str(self._folder),
                max_local_disk_size=1024.0,
                extra_config={"use_odirect": self._direct, "disk_io_threads": threads},
            )
            if self._memory is None:
                allocator = MixedMemoryAllocator(STAGING_BYTES, align_bytes=ALIGN_BYTES)
                self._memory = LocalCPUBackend(config, memory_allocator=allocator, dst_device="cpu")
            made = LocalDiskBackend(config, self._loop, self._memory, dst_device="cpu")
            # Of one folder each knows what it stored itself: they share what they know.
            for other in self._backends.values():
                made.dict = other.dict
            self._backends[threads] = made
        return self._backends[threads]

    def close(self) -> None:
        for backend in self._backends.values():
            backend.close()


def main() -> None:
    side, folder, mode = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    folder.mkdir(parents=True, exist_ok=True)
    # What it prints goes to the errors; answers have the output to themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    kinds = {"native": "fs_native", "aio": "fs"}
    store = Disk(folder, mode == "direct") if side == "disk" else L2(kinds[side], folder, mode == "direct")

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        shape = (question["op"], question["tag"], question["chunk_bytes"], question["chunks"], question["threads"])
        return {"seconds": store.timed(*shape)}

    try:
        serve(answer, answers)
    finally:
        store.close()


if __name__ == "__main__":
    main()
