"""The `fs` backend, integrity on, against LMCache's ways to a disk: `make bench-peers`, which builds the environment that it needs.

LMCache has three: *fs_native*, the second level's adapter in C++ with threads of its own; *fs*, the same in Python with asyncio; and
*LocalDiskBackend*, what it runs beside an engine by default. Each side is a process that stores and loads the same chunks with direct I/O
and as many threads, or as many tasks under way. None of theirs has a header or a checksum. A round runs all sides, ours twice, in random
order. Rates are payload MB/s.

The part `l2` runs LMCache's own `lmcache bench l2` over fs_native with the options that it has by default, but for direct I/O, and ours
in the same shape, with as many threads as that has workers. It says whether ours were fair to theirs above.

It takes some 7 GB at a time below the folder, and removes them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from child import Child
from fs import parse_size
from harness import CellResult, chart, filesystem_of, geometric_mean, machine_facts, report, save
from targets import judge

HERE = Path(__file__).parent
NAMES = {"native": "LMCache's fs_native", "aio": "LMCache's fs", "disk": "LMCache's LocalDiskBackend"}
BYTES_PER_ROUND = 64 << 20
NEEDED_BYTES = 8 << 30
# The defaults of `lmcache bench l2` and of its adapter.
L2_KEYS, L2_WORKERS, L2_ROUNDS = 32, 4, 3
L2_TIMEOUT_S = 120.0
MIB = 1 << 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lmcache", type=Path, required=True, help="its environment: `python3 tools/env.py lmcache` builds and prints it")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the filesystem to measure")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sizes", default="32KiB,256KiB,1MiB,4MiB,16MiB")
    parser.add_argument("--threads", default="1,8,16")
    parser.add_argument("--l2-sizes", default="256KiB,1MiB,4MiB", help="of the part l2; nothing leaves it out")
    parser.add_argument("--json", type=Path, help="a folder: one file for each comparison")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--svg", type=Path, help="a folder: one file for each comparison")
    args = parser.parse_args()
    python = args.lmcache / "bin" / "python"
    if not python.exists():
        parser.error(f"{python} is not there: `python3 tools/env.py lmcache` builds the environment and prints its folder")
    if (free := shutil.disk_usage(args.folder).free) < NEEDED_BYTES:
        parser.error(f"{args.folder} has {free / 1e9:.1f} GB, it takes {NEEDED_BYTES / 1e9:.1f}")

    folder = Path(tempfile.mkdtemp(prefix="kvstore-bench-", dir=args.folder))
    rng = random.Random(args.seed)
    comparisons: dict[str, list[CellResult]] = {rival: [] for rival in NAMES}
    try:
        for size in map(parse_size, args.sizes.split(",")):
            for rival, cells in compare(folder, str(python), size, [int(n) for n in args.threads.split(",")], args.rounds, rng).items():
                comparisons[rival] += cells
        comparisons["l2"] = []
        for size in map(parse_size, filter(None, args.l2_sizes.split(","))):
            comparisons["l2"] += compare_l2(folder, args.lmcache, size, args.rounds, rng)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    facts = machine_facts() | {"filesystem": filesystem_of(args.folder), "lmcache": version(python), "rounds": str(args.rounds)}
    publish(args, comparisons, facts)
    return 0


def publish(args: argparse.Namespace, comparisons: dict[str, list[CellResult]], facts: dict[str, str]) -> None:
    for out in (args.json, args.svg):
        if out:
            out.mkdir(parents=True, exist_ok=True)
    sections = []
    for rival, cells in comparisons.items():
        if not cells:
            continue
        title = f"fs backend against {NAMES[rival]}" if rival in NAMES else "fs backend against `lmcache bench l2` over fs_native"
        mean = geometric_mean([cell.ratio for cell in cells])
        sections.append(report(title, "MB/s", cells, facts))
        if args.json:
            found = [judge("fs-lmcache", mean > 1.0, f"{mean:.2f} of {NAMES[rival]}")] if rival in NAMES else []
            save(args.json / f"peers-{rival}.json", title, "MB/s", cells, facts, found)
        if args.svg:
            (args.svg / f"peers-{rival}.svg").write_text(chart(title, cells))
    text = "\n".join(sections)
    print(text)
    if args.markdown:
        args.markdown.write_text(text)


def compare(folder: Path, python: str, size: int, threads: list[int], rounds: int, rng: random.Random) -> dict[str, list[CellResult]]:
    """Put and get cells of one size, beside each rival."""
    where = folder / str(size)
    where.mkdir()
    sides = {"ours": Child(HERE / "fs_child.py", "ours", str(where / "ours"), "direct")}
    sides |= {rival: Child(HERE / "peers_child.py", rival, str(where / rival), "direct", python=python) for rival in NAMES}
    results: dict[str, list[CellResult]] = {rival: [] for rival in NAMES}
    try:
        for count, op in itertools.product(threads, ("put", "get")):
            chunks = max(count, BYTES_PER_ROUND // size)
            shape = {"op": op, "chunk_bytes": size, "threads": count, "chunks": chunks}
            tag = f"{size}-{count}"
            if op == "get":
                for child in sides.values():
                    child.ask(shape | {"op": "put", "tag": tag})
            rates: dict[str, list[float]] = defaultdict(list)
            for number in range(rounds + 1):
                for column in rng.sample([*sides, "again"], len(sides) + 1):
                    side = "ours" if column == "again" else column
                    question = shape | {"tag": tag if op == "get" else f"{tag}-{number}-{column}"}
                    seconds = sides[side].ask(question)["seconds"]
                    # The first round does not count.
                    if number:
                        rates[column].append(chunks * size / 1e6 / seconds)
            for rival, cells in results.items():
                name = f"{op} {size >> 10} KiB, {count} thread{'s' * (count > 1)}, direct"
                cells.append(CellResult(name, True, rates["ours"], rates[rival], rates["again"]))
                note(NAMES[rival], cells[-1])
    finally:
        for child in sides.values():
            child.close()
        shutil.rmtree(where, ignore_errors=True)
    return results


def compare_l2(folder: Path, lmcache: Path, size: int, rounds: int, rng: random.Random) -> list[CellResult]:
    """A put and a get cell. Each run of theirs is a process of its own, that warms up itself; so is ours."""
    where = folder / "l2"
    where.mkdir()
    child = Child(HERE / "fs_child.py", "ours", str(where / "ours"), "direct")
    rates: dict[str, dict[str, list[float]]] = {op: defaultdict(list) for op in ("put", "get")}
    try:
        for number in range(rounds):
            for column in rng.sample(["ours", "theirs", "again"], 3):
                if column == "theirs":
                    found = bench_l2(lmcache, where / f"theirs-{number}", size)
                else:
                    found = ours_l2(child, f"{number}-{column}", size)
                for op, rate in found.items():
                    rates[op][column].append(rate)
    finally:
        child.close()
        shutil.rmtree(where, ignore_errors=True)
    shape = f"{size >> 10} KiB, {L2_KEYS} at a time"
    results = [CellResult(f"{op} {shape}", True, of["ours"], of["theirs"], of["again"]) for op, of in rates.items()]
    for result in results:
        note("lmcache bench l2", result)
    return results


def ours_l2(child: Child, tag: str, size: int) -> dict[str, float]:
    """MB/s of a put and of a get, the mean over as many rounds as theirs, after one that is not counted."""
    found = {}
    for op in ("put", "get"):
        shape = {"op": op, "chunk_bytes": size, "threads": L2_WORKERS, "chunks": L2_KEYS}
        seconds = [child.ask(shape | {"tag": f"l2-{size}-{tag}-{n}"})["seconds"] for n in range(L2_ROUNDS + 1)]
        found[op] = sum(L2_KEYS * size / 1e6 / each for each in seconds[1:]) / L2_ROUNDS
    return found


def bench_l2(lmcache: Path, folder: Path, size: int) -> dict[str, float]:
    """MB/s of a put and of a get, as LMCache's own benchmark has them."""
    folder.mkdir(parents=True)
    output = folder / "result.json"
    adapter = {"type": "fs_native", "base_path": str(folder / "store"), "use_odirect": True}
    command = [str(lmcache / "bin" / "lmcache"), "bench", "l2", "--l2-adapter", json.dumps(adapter)]
    command += ["--num-keys", str(L2_KEYS), "--data-size-kb", str(size >> 10), "--l1-align-bytes", "4096", "--rounds", str(L2_ROUNDS)]
    command += ["--format", "json", "--output", str(output), "--quiet"]
    quiet = {"LMCACHE_LOG_LEVEL": "ERROR", "LMCACHE_DISABLE_BANNER": "1", "LMCACHE_TRACK_USAGE": "false"}
    subprocess.run(command, env=os.environ | quiet, stdout=subprocess.DEVNULL, timeout=L2_TIMEOUT_S, check=True)
    return l2_rates(json.loads(output.read_text()))


def l2_rates(result: dict[str, Any]) -> dict[str, float]:
    """The rates in the JSON of `lmcache bench l2`. Its MB/s are MiB/s.

    Raises:
        RuntimeError: an operation is missing, or chunks failed.
    """
    operations = [value for key, value in result["metrics"].items() if key.startswith("op_")]
    found = {}
    for op, name in (("put", "Store"), ("get", "Load")):
        said = next((value for value in operations if value["operation"] == name), None)
        if said is None or said["total_success"] != said["total_keys"] or said["rounds_timed_out"]:
            raise RuntimeError(f"lmcache bench l2: {name} failed: {said}")
        found[op] = said["throughput_avg_mbps"] * MIB / 1e6
    return found


def version(python: Path) -> str:
    command = [str(python), "-c", "from importlib.metadata import version; print(version('lmcache'))"]
    return subprocess.run(command, capture_output=True, text=True, timeout=L2_TIMEOUT_S, check=True).stdout.strip()


def note(rival: str, result: CellResult) -> None:
    print(f"{result.name}: ours / {rival} {result.ratio:.2f}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
