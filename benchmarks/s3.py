"""The `s3` backend, integrity on, against what moves objects without it: `python benchmarks/s3.py`. One server, a process of its own.

Our engine over NIXL runs beside NIXL driven directly and vLLM's own `obj` tier, the one over s3fs beside boto3 and s3fs driven directly;
each side is a process. Rates are payload MB/s. A round runs every side of a group, ours twice, in random order; what a put stored is
deleted after it. It needs the extras `s3` and `nixl`, vLLM, moto's server, and some 4 GiB of memory.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from child import Child
from fs import parse_size
from harness import CellResult, chart, geometric_mean, machine_facts, report, save, verdict
from targets import judge

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "tests" / "backends" / "s3"))

# Each of our engines, and what it has to keep up with.
GROUPS = {"ours-nixl": ("nixl", "vllm"), "ours-s3fs": ("boto3", "s3fs")}
NAMES = {
    "ours-nixl": "s3 backend over NIXL",
    "ours-s3fs": "s3 backend over s3fs",
    "nixl": "raw NIXL",
    "vllm": "vLLM's obj tier",
    "boto3": "boto3",
    "s3fs": "raw s3fs",
}
BUCKET = "benchmark"
BYTES_PER_ROUND = 16 << 20
LEAST_RECORDS = 4
# Several times as many records as are under way, or most of a round is its beginning and its end. Of 16 MiB 32 are enough.
WAVES, MOST_BYTES_FOR_WAVES = 2, 256 << 20
WANTED = 0.95
# One cell is never judged.
NO_LEAST = 0.0


class Bench:
    """The server, the children, and what they answered."""

    def __init__(self, server: Any, group: str, rounds: int, seed: int) -> None:
        self._server, self._rounds, self._rng = server, rounds, random.Random(seed)
        self._children = {side: Child(HERE / "s3_child.py", side, server.endpoint, BUCKET) for side in (group, *GROUPS[group])}
        self._group, self._tags = group, itertools.count()
        # Seconds of each record, by cell and side.
        self.each: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def cell(self, op: str, payload_bytes: int, concurrency: int) -> list[CellResult]:
        """One result for each rival, in the order of `GROUPS`."""
        name = f"{op} {payload_bytes >> 10} KiB, {concurrency} at a time"
        waves = WAVES if WAVES * concurrency * payload_bytes <= MOST_BYTES_FOR_WAVES else 1
        records = max(LEAST_RECORDS, waves * concurrency, BYTES_PER_ROUND // payload_bytes)
        shape = {"payload_bytes": payload_bytes, "concurrency": concurrency, "records": records}
        stored = f"stored-{next(self._tags)}"
        if op == "get":
            for child in self._children.values():
                child.ask(shape | {"op": "put", "tag": stored})
        rates: dict[str, list[float]] = defaultdict(list)
        for number in range(self._rounds + 1):
            order = [*self._children, "again"]
            self._rng.shuffle(order)
            for column in order:
                side = self._group if column == "again" else column
                tag = stored if op == "get" else f"{number}-{next(self._tags)}"
                answer = self._children[side].ask(shape | {"op": op, "tag": tag})
                if op == "put":
                    self._delete(f"{side}/")
                # The first round does not count.
                if number:
                    rates[column].append(records * payload_bytes / 1e6 / answer["seconds"])
                    self.each[name][side] += answer["each"]
        self._delete("")
        return [CellResult(name, True, rates[self._group], rates[rival], rates["again"]) for rival in GROUPS[self._group]]

    def _delete(self, prefix: str) -> None:
        client = self._server.client()
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix):
            if found := [{"Key": entry["Key"]} for entry in page.get("Contents", ())]:
                client.delete_objects(Bucket=BUCKET, Delete={"Objects": found})

    def close(self) -> None:
        for child in self._children.values():
            child.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sizes", default="256KiB,1MiB,4MiB,16MiB")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--groups", default=",".join(GROUPS), help="which of our engines to run")
    parser.add_argument("--json", type=Path, help="a folder: one file for each comparison, and one with the seconds of each record")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--svg", type=Path, help="a folder: one file for each comparison")
    args = parser.parse_args()

    # The server keeps every object in memory: its disk would be what is measured.
    os.environ["MOTO_S3_DEFAULT_KEY_BUFFER_SIZE"] = str(1 << 30)
    from s3_server import S3Server

    server = S3Server()
    sections, means = [], []
    facts = machine_facts() | {"rounds": str(args.rounds)}
    try:
        server.make_bucket(BUCKET)
        for group in args.groups.split(","):
            bench = Bench(server, group, args.rounds, args.seed)
            results: dict[str, list[CellResult]] = {rival: [] for rival in GROUPS[group]}
            try:
                for size, concurrency in itertools.product(map(parse_size, args.sizes.split(",")), map(int, args.concurrency.split(","))):
                    for op in ("put", "get"):
                        for rival, result in zip(results, bench.cell(op, size, concurrency), strict=True):
                            results[rival].append(result)
                            print(f"{result.name}: {NAMES[group]} / {NAMES[rival]} {result.ratio:.2f}", file=sys.stderr, flush=True)
            finally:
                bench.close()
            for rival, cells in results.items():
                title = f"{NAMES[group]} against {NAMES[rival]}"
                sections.append(report(title, "MB/s", cells, facts) + "\n" + "".join(f"- Missed: {miss}.\n" for miss in missed(cells)))
                mean = geometric_mean([cell.ratio for cell in cells])
                means.append(f"{title}: {mean:.2f}")
                if args.json:
                    args.json.mkdir(parents=True, exist_ok=True)
                    found = judge("s3", not missed(cells), f"{mean:.2f} of {NAMES[rival]}")
                    save(args.json / f"s3-{group}-{rival}.json", title, "MB/s", cells, facts, [found])
                if args.svg:
                    args.svg.mkdir(parents=True, exist_ok=True)
                    (args.svg / f"s3-{group}-{rival}.svg").write_text(chart(title, cells))
            sections.append(latencies(bench.each))
            if args.json:
                (args.json / f"s3-{group}-records.json").write_text(json.dumps(bench.each, indent=1) + "\n")
    finally:
        server.stop()
    text = "\n".join([*sections, "Geometric means: " + "; ".join(means) + "."]) + "\n"
    print(text)
    if args.markdown:
        args.markdown.write_text(text)


def missed(cells: list[CellResult]) -> list[str]:
    return verdict(cells, WANTED, NO_LEAST)


def latencies(each: dict[str, dict[str, list[float]]]) -> str:
    """A table of milliseconds a record, middle and 99th percentile."""
    sides = list(next(iter(each.values())))
    order = sorted(sides, key=list(NAMES).index)
    lines = [
        "| milliseconds a record, p50 / p99 | " + " | ".join(NAMES[side] for side in order) + " |",
        "|---" * (len(order) + 1) + "|",
    ]
    for name, seconds in each.items():
        lines.append(f"| {name} | " + " | ".join(percentiles(seconds[side]) for side in order) + " |")
    return "\n".join(lines) + "\n"


def percentiles(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    return " / ".join(f"{ordered[min(len(ordered) - 1, int(len(ordered) * part))] * 1e3:,.1f}" for part in (0.5, 0.99))


if __name__ == "__main__":
    main()
