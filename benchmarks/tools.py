"""`kvstore verify` against plain reading of the same files with as many threads: `python benchmarks/tools.py --folder /mnt/disk`.

Plain reading lists the folder and reads every file into memory that is used again, and looks at none of it: what no tool can beat. Rates
are MB/s of all that was read. Direct cells go past the page cache on both sides; buffered ones read files that are in it, so they say
what the tool costs beside memory and not beside a disk. It takes 1 GB below the folder, and removes it.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import mmap
import os
import random
import shutil
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness import Cell, CellResult, add_outputs, filesystem_of, machine_facts, publish, report, run_cell

from kvstore_sdk.backend import open_backend
from kvstore_sdk.format import HEADER_BYTES, record_bytes, seal
from kvstore_sdk.identity import GroupIdentity, KVIdentity
from kvstore_sdk.keys import ChunkKey, manifest_name
from kvstore_sdk.tools.retry import Retry
from kvstore_sdk.tools.verify import Verification

BYTES_PER_STORE = 256 << 20
MODES = {"direct": "always", "buffered": "never"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the filesystem to measure")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sizes", default="64KiB,1MiB,8MiB", help="of a payload")
    parser.add_argument("--threads", default="1,4")
    parser.add_argument("--modes", default="direct,buffered")
    add_outputs(parser)
    args = parser.parse_args()

    folder = Path(tempfile.mkdtemp(prefix="kvstore-bench-", dir=args.folder))
    results: list[CellResult] = []
    rng = random.Random(args.seed)
    try:
        for size in map(_size, args.sizes.split(",")):
            root = folder / f"kv-{size}"
            _fill(root, size)
            for mode, threads in itertools.product(args.modes.split(","), map(int, args.threads.split(","))):
                name = f"verify {size >> 10} KiB, {threads} thread{'s' * (threads > 1)}, {mode}"
                cell = Cell(name, lambda: _verify(root, mode, threads), lambda: _read(root, mode, threads), False)  # noqa: B023  # run at once
                results.append(run_cell(cell, args.rounds, rng))
                print("\n".join(report("so far", "MB/s", results, {}).splitlines()[6:]), flush=True)
            shutil.rmtree(root)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    facts = machine_facts() | {"filesystem": filesystem_of(args.folder), "rounds": str(args.rounds)}
    title = "kvstore verify against plain reading"
    publish(args, title, "MB/s", results, facts)


def _fill(root: Path, payload_bytes: int) -> None:
    """A namespace of good records, behind the back of the backend: that is faster."""
    open_backend(root.as_uri()).close()
    identity = KVIdentity(
        model="of the benchmark",
        weights="none",
        model_config="none",
        kv_dtype="bfloat16",
        layout="lbhnc",
        layout_version=1,
        block_tokens=16,
        hash_tokens=16,
        blocks_per_chunk=1,
        groups=(GroupIdentity(kind="full", layers=("0",), payload_bytes=payload_bytes),),
        hash_algorithm="sha256",
    )
    record = bytearray(record_bytes(payload_bytes))
    record[HEADER_BYTES : HEADER_BYTES + payload_bytes] = random.Random(1).randbytes(payload_bytes)
    for number in range(BYTES_PER_STORE // payload_bytes):
        key = ChunkKey(identity.namespace, hashlib.sha256(str(number).encode()).digest(), 0)
        seal(memoryview(record), key, identity.layout, payload_bytes)
        path = root / key.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(record)
    (root / manifest_name(identity.namespace)).write_bytes(identity.manifest())
    os.sync()


def _verify(root: Path, mode: str, threads: int) -> float:
    backend = open_backend(root.as_uri(), {"read_only": True, "direct_io": MODES[mode]})
    try:
        run = Verification(backend, Retry(), threads=threads)
        if list(run):
            raise SystemExit("tools: a good store is called bad")
        return run.read_bytes / 1e6 / run.elapsed_s
    finally:
        backend.close()


def _read(root: Path, mode: str, threads: int) -> float:
    flags = os.O_RDONLY | (os.O_DIRECT if mode == "direct" else 0)
    own = threading.local()
    began_s = time.perf_counter()
    with ThreadPoolExecutor(threads) as crew:
        paths = (os.path.join(folder, name) for folder, _, names in os.walk(root / "v1") for name in names)
        read_bytes = sum(crew.map(lambda path: _read_file(path, flags, own), paths))
    return read_bytes / 1e6 / (time.perf_counter() - began_s)


def _read_file(path: str, flags: int, own: threading.local) -> int:
    fd = os.open(path, flags)
    try:
        size_bytes = os.fstat(fd).st_size
        if getattr(own, "size_bytes", 0) < size_bytes:
            own.memory, own.size_bytes = mmap.mmap(-1, size_bytes), size_bytes
        done = 0
        with memoryview(own.memory) as memory:
            while done < size_bytes and (count := os.preadv(fd, [memory[done:size_bytes]], done)):
                done += count
        return done
    finally:
        os.close(fd)


def _size(text: str) -> int:
    for suffix, factor in (("KiB", 1 << 10), ("MiB", 1 << 20)):
        if text.endswith(suffix):
            return int(text.removesuffix(suffix)) * factor
    return int(text)


if __name__ == "__main__":
    main()
