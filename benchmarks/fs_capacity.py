"""What a bound costs: the first count, an eviction, and a put, with 10^4, 10^5 and 10^6 records in the folder.

`python benchmarks/fs_capacity.py --folder /mnt/disk`. The records are of one byte, so that files are what is measured: names, look-ups,
removals. They are made below the folder, which takes minutes for a million, and removed. What was just made is in the system's caches.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import tempfile
import time
from pathlib import Path

import harness

from kvstore_sdk.backend import Deadline, Put, PutStatus, Region
from kvstore_sdk_backends.fs import FsBackend, open_fs

PUTS = 5_000
WAIT_S = 600.0


def make(root: Path, count: int) -> None:
    open_fs(str(root)).close()
    above = root / "v1" / ("0" * 32)
    above.mkdir(parents=True)
    for shard in range(256):
        folder = above / f"{shard:02x}"
        folder.mkdir()
        for number in range(shard, count, 256):
            with open(f"{folder}/{number:064x}-g0", "wb", buffering=0) as record:
                record.write(b"x")


def put(backend: FsBackend, region: Region, series: str, size: int) -> float:
    """Store `PUTS` records, one after another: microseconds for each."""
    part = region.buffer(0, size)
    began_s = time.perf_counter()
    for number in range(PUTS):
        [result] = backend.put([Put(f"v1/{'0' * 32}/{number % 256:02x}/{series}-{number}", (part,))], Deadline.after(60))
        if result.status is not PutStatus.STORED:
            raise SystemExit(f"put {number}: {result}")
    return (time.perf_counter() - began_s) / PUTS * 1e6


def wait_until_counted(backend: FsBackend, name: str) -> float:
    """Until a put is granted room: seconds."""
    began_s = time.perf_counter()
    region = Region(4096)
    [result] = backend.put([Put(f"counted-{name}", (region.buffer(0, 1),))], Deadline.after(WAIT_S))
    took_s = time.perf_counter() - began_s
    region.close()
    if result.status is not PutStatus.STORED:
        raise SystemExit(f"after {took_s:.0f} s: {result}")
    return took_s


def run(root: Path, count: int) -> str:
    make(root, count)
    region = Region(4096)
    plain = open_fs(str(root))
    unbounded_us = put(plain, region, "plain", 1)
    plain.close()
    count += PUTS

    began_s = time.perf_counter()
    backend = open_fs(str(root), max_bytes=2 * count)
    open_s = time.perf_counter() - began_s
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    count_s = open_s + wait_until_counted(backend, "room")
    room_us = put(backend, region, "room", 1)
    backend.close()
    count += PUTS + 1

    backend = open_fs(str(root), max_bytes=count)
    wait_until_counted(backend, "full")
    full_us = put(backend, region, "full", 1)
    backend.close()

    began_s = time.perf_counter()
    backend = open_fs(str(root), max_bytes=count // 2)
    wait_until_counted(backend, "down")
    down_s = time.perf_counter() - began_s - count_s
    evicted = backend.evicted_records
    backend.close()
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) / 1024
    region.close()
    return (
        f"| {count - 2 * PUTS - 1:,} | {open_s * 1e3:.1f} | {count_s:.2f} | {count_s / count * 1e6:.1f} | {unbounded_us:.0f} "
        f"| {room_us:.0f} | {full_us:.0f} | {down_s / evicted * 1e6:.0f} | {grown_mib:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where to make them")
    parser.add_argument("--records", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    given = parser.parse_args()
    facts = harness.machine_facts() | {"filesystem": harness.filesystem_of(given.folder)}
    print(", ".join(f"{name} {value}" for name, value in facts.items()) + ".\n")
    print(
        "| records | open, ms | counted after, s | count, us a record | put without a bound, us | put with room, us "
        "| put into a full folder, us | evict, us a record | memory grew by, MiB |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for count in given.records:
        above = Path(tempfile.mkdtemp(prefix="kvstore-capacity-", dir=given.folder))
        try:
            print(run(above / "kv", count), flush=True)
        finally:
            shutil.rmtree(above)


if __name__ == "__main__":
    main()
