"""The p2p backend's data plane against raw NIXL: `python benchmarks/p2p_nixl.py --seconds 600`. It needs the extra `nixl` and 3 GiB.

Both WRITE batches of records from one process into the memory of another one on the same machine, with the same settings of UCX: within
the machine (CMA) and over TCP. "In flight" is how many records a batch has. Ours are driven from this process and done by two children,
the others are two children of this process: one agent at each end. All look every 20 us whether something has come, or is over. While one
side runs the other one idles. Each batch takes the next place in memory.

Integrity: what has landed is hashed as a tier does (XXH3-128), in two lanes where there are two records, so that one hashes what has come
while the other one moves: so does a tier with `io_threads` = 2. Those are the cells that are judged; `plain` ones hash nothing. Rates are
payload MB/s. It measures the data plane alone: what peers say to each other before and after a transfer is `p2p.py`'s to measure.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash
from child import Child
from fs import parse_size
from harness import Cell, CellResult, chart, geometric_mean, machine_facts, report, run_cell, save, verdict
from p2p_nixl_child import places_of
from targets import judge

from kvstore_sdk.backend import Deadline, PutStatus, Region
from kvstore_sdk_backends.p2p.plane import LOOPBACK_TLS, Plane

HERE = Path(__file__).parent
TRANSPORTS = {"shm": LOOPBACK_TLS, "tcp": "tcp"}
JUDGED_FROM_BYTES = 1 << 20
WANTED = 0.9
# One cell is never judged.
NO_LEAST = 0.0
PATTERN_BYTES = 1 << 20
LEAST_MEMORY_BYTES = 256 << 20
LIMIT_S = 60.0
EXPECT_S = 0.1


class Ours:
    """Two planes in this process."""

    def __init__(self, tls: str, memory_bytes: int) -> None:
        self._owner, self._asker = Plane(tls=tls, label="owner"), Plane(tls=tls, label="asker")
        self._memory_bytes = memory_bytes
        self._records, self._slots = Region(memory_bytes), Region(memory_bytes)
        # Both, as an engine's memory is used before: pages that a peer's write touches first lie so that each later write takes half as
        # long again.
        for region in (self._records, self._slots):
            region.view[:] = random.Random(1).randbytes(PATTERN_BYTES) * (memory_bytes // PATTERN_BYTES)
        self._owner.add_region(self._records)
        self._asker.add_region(self._slots)
        target = self._asker.target()
        assert target is not None
        _, agent, [(_, self._base, size_bytes)] = target
        self._owner.admit(b"it", agent, [(self._base, size_bytes)], Deadline.after(LIMIT_S))
        self._digests: dict[tuple[int, int], bytes] = {}
        self.each: list[float] = []

    def rate(self, size_bytes: int, count: int, slice_s: float, verify: bool) -> float:
        """MB/s of batches of `count` records for `slice_s`, and of one at least."""
        lanes = 2 if verify and count > 1 else 1
        share = count // lanes
        done: list[int] = []
        began_s = time.perf_counter()
        until_s = began_s + slice_s
        threads = [
            threading.Thread(target=lambda lane=lane: done.append(self._lane(lane, lanes, share, size_bytes, until_s, verify)))
            for lane in range(lanes)
        ]
        for thread in threads:
            thread.start()
        # As the backend does while a load is under way.
        for thread in threads:
            while thread.is_alive():
                self._asker.expect(time.monotonic() + EXPECT_S)
                thread.join(EXPECT_S / 2)
        took_s = time.perf_counter() - began_s
        assert len(done) == lanes, "a lane failed"
        # Until both children idle again.
        time.sleep(EXPECT_S)
        return sum(done) * size_bytes / 1e6 / took_s

    def _lane(self, lane: int, lanes: int, count: int, size_bytes: int, until_s: float, verify: bool) -> int:
        """How many records were moved."""
        span = self._memory_bytes // lanes
        records = 0
        for first in places_of(span, count * size_bytes):
            places = range(lane * span + first, lane * span + first + count * size_bytes, size_bytes)
            pieces = [(self._records.buffer(place, size_bytes), self._base + place) for place in places]
            at_s = time.perf_counter()
            results = self._owner.send(b"it", pieces, Deadline.after(LIMIT_S))
            assert all(result.status is PutStatus.STORED for result in results), results
            if verify:
                found = [xxhash.xxh3_128_digest(self._slots.buffer(place, size_bytes).view) for place in places]
                assert found == [self._digest(place % PATTERN_BYTES, size_bytes) for place in places], "other bytes have landed"
            now_s = time.perf_counter()
            self.each.append(now_s - at_s)
            records += count
            if now_s >= until_s:
                break
        return records

    def _digest(self, place: int, size_bytes: int) -> bytes:
        """Of a record there, worked out once: what the memory holds repeats itself."""
        if (place, size_bytes) not in self._digests:
            self._digests[place, size_bytes] = xxhash.xxh3_128_digest(self._records.buffer(place, size_bytes).view)
        return self._digests[place, size_bytes]

    def close(self) -> None:
        self._owner.close()
        self._asker.close()
        self._records.close()
        self._slots.close()


class Raw:
    """NIXL driven directly, in two processes."""

    def __init__(self, tls: str, memory_bytes: int) -> None:
        self._target = Child(HERE / "p2p_nixl_child.py", tls, str(memory_bytes))
        self._writer = Child(HERE / "p2p_nixl_child.py", tls, str(memory_bytes))
        self._writer.ask({"op": "load", **self._target.ask({"op": "target"})})
        self.each: list[float] = []

    def rate(self, size_bytes: int, count: int, slice_s: float) -> float:
        self._target.ask({"op": "look", "seconds": LIMIT_S})
        answer = self._writer.ask({"op": "write", "size_bytes": size_bytes, "count": count, "seconds": slice_s})
        self._target.ask({"op": "look", "seconds": 0.0})
        self.each += answer["each"]
        return float(answer["bytes"]) / 1e6 / float(answer["seconds"])

    def close(self) -> None:
        self._writer.close()
        self._target.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="for all cells together")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sizes", default="256KiB,1MiB,4MiB,16MiB")
    parser.add_argument("--in-flight", default="1,8,32")
    parser.add_argument("--transports", default=",".join(TRANSPORTS))
    parser.add_argument("--json", type=Path, help="a folder: one file for each transport")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--svg", type=Path, help="a folder: one file for each transport")
    args = parser.parse_args()
    sizes, counts = [parse_size(text) for text in args.sizes.split(",")], [int(text) for text in args.in_flight.split(",")]
    transports = args.transports.split(",")
    shapes = list(itertools.product(sizes, counts, (True, False)))
    slice_s = max(0.05, args.seconds / (len(transports) * len(shapes) * 3 * (args.rounds + 1)) - EXPECT_S)
    facts = machine_facts() | {"rounds": str(args.rounds), "slice": f"{slice_s:.2f} s"}
    sections, judged = [], []
    tables: dict[str, tuple[str, list[CellResult]]] = {}
    for transport in transports:
        title = f"p2p data plane against raw NIXL, {transport} (UCX_TLS={TRANSPORTS[transport]})"
        results, each = run_transport(TRANSPORTS[transport], shapes, slice_s, args.rounds, random.Random(args.seed))
        judged += [result for result in results if result.judged]
        tables[transport] = (title, results)
        sections.append(report(title, "MB/s", results, facts) + "\n" + latencies(each))
    missed = verdict(judged, WANTED, NO_LEAST) if judged else []
    for out in filter(None, (args.json, args.svg)):
        out.mkdir(parents=True, exist_ok=True)
    for transport, (title, results) in tables.items():
        if args.json:
            # Judged once, over all transports.
            first = judged and transport == transports[0]
            mean = geometric_mean([result.ratio for result in judged]) if first else 0.0
            found = [judge("p2p-nixl", not missed, f"{mean:.2f} over {', '.join(transports)}")] if first else []
            save(args.json / f"p2p-nixl-{transport}.json", title, "MB/s", results, facts, found)
        if args.svg:
            (args.svg / f"p2p-nixl-{transport}.svg").write_text(chart(title, results))
    text = "\n".join([*sections, *(f"- Missed: {miss}." for miss in missed)]) + "\n"
    print(text)
    if args.markdown:
        args.markdown.write_text(text)


def run_transport(
    tls: str, shapes: list[tuple[int, int, bool]], slice_s: float, rounds: int, rng: random.Random
) -> tuple[list[CellResult], dict[str, dict[str, list[float]]]]:
    """A result for each shape, and the seconds of each batch by cell and side."""
    # More than caches hold, whatever the batch.
    memory_bytes = max(LEAST_MEMORY_BYTES, *(size_bytes * count for size_bytes, count, _ in shapes))
    memory_bytes = -(-memory_bytes // (2 * PATTERN_BYTES)) * 2 * PATTERN_BYTES
    results: list[CellResult] = []
    each: dict[str, dict[str, list[float]]] = defaultdict(dict)
    sides: list[Any] = []
    try:
        ours, raw = Ours(tls, memory_bytes), Raw(tls, memory_bytes)
        sides += [ours, raw]
        for size_bytes, count, verify in shapes:
            name = f"{size_bytes >> 10} KiB, {count} in flight" + ("" if verify else ", plain")
            cell = Cell(
                name,
                _bound(ours.rate, size_bytes, count, slice_s, verify),
                _bound(raw.rate, size_bytes, count, slice_s),
                judged=verify and size_bytes >= JUDGED_FROM_BYTES,
            )
            results.append(run_cell(cell, rounds, rng))
            print(f"{tls}: {name}: {results[-1].ratio:.2f}", file=sys.stderr, flush=True)
            for side, rates in (("ours", ours), ("raw NIXL", raw)):
                each[name][side], rates.each = rates.each, []
    finally:
        for side in sides:
            side.close()
    return results, each


def _bound(rate: Callable[..., float], *arguments: Any) -> Callable[[], float]:
    return lambda: rate(*arguments)


def latencies(each: dict[str, dict[str, list[float]]]) -> str:
    """A table of milliseconds a batch, which is what its records take; p50 / p99."""
    lines = ["| milliseconds a batch, p50 / p99 | ours | raw NIXL |", "|---|---|---|"]
    lines += [f"| {name} | {_percentiles(sides['ours'])} | {_percentiles(sides['raw NIXL'])} |" for name, sides in each.items()]
    return "\n".join(lines) + "\n"


def _percentiles(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    return " / ".join(f"{ordered[min(len(ordered) - 1, int(len(ordered) * part))] * 1e3:,.2f}" for part in (0.5, 0.99))


if __name__ == "__main__":
    main()
