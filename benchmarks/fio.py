"""The `fs` backend, integrity on, against fio, a program that does nothing else: `python benchmarks/fio.py --folder /mnt/disk`.

Both sides write new files of one record's size past the page cache, and read them again: fio one write or read a file, from as many
threads (`psync`) or with as many in flight from one thread (`io_uring`). fio makes its files in one folder, opens, moves and closes each;
it neither renames nor checks anything, and moves all of them from or into one buffer of each job. Rates are payload MB/s; fio's are its
own count of the time between its first and last transfer. It takes some 6 GB at one time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from child import Child
from fs import SETTLE_S, mean, name_of, parse_numbers, parse_sizes, told
from harness import Cell, CellResult, add_outputs, filesystem_of, machine_facts, publish, report, run_cell
from targets import judge

HERE = Path(__file__).parent
BYTES_PER_ROUND = 128 << 20
"""fio counts milliseconds; this takes a hundred of them."""
TIMEOUT_S = 120.0
LEAST = 0.9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the filesystem to measure")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sizes", type=parse_sizes, default="1MiB,4MiB,16MiB")
    parser.add_argument("--threads", type=parse_numbers, default="1,8,16")
    parser.add_argument("--engines", type=lambda text: text.split(","), default="psync,io_uring")
    add_outputs(parser)
    args = parser.parse_args()

    folder = Path(tempfile.mkdtemp(prefix="kvstore-bench-", dir=args.folder))
    results: list[CellResult] = []
    rng = random.Random(args.seed)
    child = Child(HERE / "fs_child.py", "ours")
    try:
        for size, threads, engine in itertools.product(args.sizes, args.threads, args.engines):
            place = folder / f"{engine}-{size}-{threads}"
            place.mkdir()
            found = compare(child, place, engine, size, threads, args.rounds, rng)
            print("\n".join(report("", "MB/s", found, {}).splitlines()[6:-2]), flush=True)
            results += found
            shutil.rmtree(place)
            os.sync()
            time.sleep(SETTLE_S)
    finally:
        child.close()
        shutil.rmtree(folder, ignore_errors=True)
    facts = machine_facts() | {"filesystem": filesystem_of(args.folder), "fio": version(), "rounds": str(args.rounds)}
    notes = [f"- Beside {engine}: {told([r for r in results if r.name.endswith(engine)])}." for engine in args.engines]
    targets = [judge("fs-fio", mean(results) >= LEAST, told(results))]
    publish(args, "fs backend against fio", "MB/s", results, facts, notes, targets)


def compare(child: Child, folder: Path, engine: str, size: int, threads: int, rounds: int, rng: random.Random) -> list[CellResult]:
    """A put cell and a get cell."""
    files = max(1, BYTES_PER_ROUND // size // threads)
    megabytes = files * threads * size / 1e6
    numbers = itertools.count()

    def ours(op: str, tag: str) -> float:
        place = {"folder": str(folder / "ours"), "direct": True}
        question = {"op": op, "chunk_bytes": size, "threads": threads, "chunks": files * threads, "tag": tag} | place
        return megabytes / child.ask(question)["seconds"]

    def fio(op: str, name: str) -> float:
        (folder / name).mkdir(exist_ok=True)
        done = subprocess.run(
            command(folder / name, engine, op, size, threads, files), capture_output=True, text=True, check=True, timeout=TIMEOUT_S
        )
        return rate_of(done.stdout, op, files * threads * size)

    def put(side: Callable[[str, str], float]) -> Callable[[], float]:
        return lambda: side("put", f"put-{next(numbers)}")

    def get(side: Callable[[str, str], float]) -> Callable[[], float]:
        return lambda: side("get", "get")

    name = f"{name_of(size)}, {threads} thread{'s' if threads > 1 else ''}, beside {engine}"
    stored = run_cell(Cell(f"put {name}", put(ours), put(fio)), rounds, rng)
    ours("put", "get")
    fio("put", "get")
    loaded = run_cell(Cell(f"get {name}", get(ours), get(fio)), rounds, rng)
    return [stored, loaded]


def command(folder: Path, engine: str, op: str, size: int, threads: int, files: int) -> list[str]:
    """A call of fio that writes `files * threads` new files below `folder`, or reads those that an equal call wrote."""
    jobs, depth = (1, threads) if engine == "io_uring" else (threads, 1)
    each = files * threads // jobs
    return [
        "fio",
        "--name=records",
        f"--directory={folder}",
        f"--ioengine={engine}",
        f"--rw={'write' if op == 'put' else 'read'}",
        "--direct=1",
        "--thread",
        f"--numjobs={jobs}",
        f"--iodepth={depth}",
        f"--bs={size}",
        f"--filesize={size}",
        f"--nrfiles={each}",
        # One whole file after the other; as many are open as are in flight.
        "--file_service_type=sequential",
        f"--openfiles={max(1, depth)}",
        f"--size={each * size}",
        "--fallocate=none",
        "--create_on_open=1",
        "--invalidate=0",
        # The kind of memory that an engine's is, because processes share it: its pages are small ones on most machines.
        "--iomem=mmapshared",
        "--group_reporting",
        "--output-format=json",
    ]


def rate_of(said: str, op: str, expected_bytes: int) -> float:
    """Payload MB/s out of fio's JSON.

    Raises:
        RuntimeError: it did not move `expected_bytes`.
    """
    found: dict[str, Any] = json.loads(said[said.index("{") :])["jobs"][0]["write" if op == "put" else "read"]
    if found["io_bytes"] != expected_bytes:
        raise RuntimeError(f"fio moved {found['io_bytes']} bytes instead of {expected_bytes}")
    return float(found["bw_bytes"]) / 1e6


def version() -> str:
    return subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip().removeprefix("fio-")


if __name__ == "__main__":
    main()
