"""The p2p backend between two processes of one machine: `python benchmarks/p2p.py`.

Three parts, `--parts` chooses. *zmq*: loads over the ZMQ data path, every record verified, beside raw ZMQ (one request a record, frames
that are not copied on their way out) and beside plain sockets, which both check nothing; "in flight" is how many records are asked for at
once. *lookups*: round trips a second at 1, 16 and 256 names a message, beside bare ZMQ messages of the same size. *vllm*: from the first
look-up to the last record in host memory, against vLLM's own p2p tier over the same transports; both loops turn every ms, and ours is a
Tier, which verifies. vLLM's processes are stopped while they are not measured, since each of them burns a core. Cells from 256 KiB on are
judged. The last part needs vLLM and the extras p2p and nixl; all take 6 GiB of memory.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from child import Child
from fs import parse_size
from harness import Cell, CellResult, chart, geometric_mean, machine_facts, report, run_cell, save, verdict
from p2p_nixl import latencies
from targets import judge

HERE = Path(__file__).parent
MARGIN_BYTES = 1 << 20
JUDGED_FROM_BYTES = 256 << 10
# As many chunks as the measurements of vLLM's tier had.
CHUNKS = {64 << 10: 256, 256 << 10: 128, 1 << 20: 64, 4 << 20: 32, 16 << 20: 8}
IDLE_S = 5.0
LOAD_TIMEOUT_S = 5.0
TRANSPORTS = {"default": "", "tcp": "tcp"}


class Pair:
    """An owner and an asker, each in a process of its own."""

    def __init__(self, side: str, memory_bytes: int, fills: list[tuple[int, int]], data: str = "zmq", tls: str = "") -> None:
        script, memory = HERE / "p2p_child.py", str(memory_bytes)
        self._owner = Child(script, "owner", side, memory, "", data, tls)
        for size, count in fills:
            filled = self._owner.ask({"op": "fill", "bytes": size, "count": count})
        address, self._owners = filled["address"], filled.get("pids", [])
        self._asker = Child(script, "asker", side, memory, address, data, tls)
        self.each: list[float] = []

    def rate(self, op: str, size: int, count: int, seconds: float = 0.0) -> float:
        answer = self._asker.ask({"op": op, "bytes": size, "count": count, "seconds": seconds})
        self.each += answer.get("each", [])
        return float(answer["rate"])

    def idle(self, seconds: float) -> float:
        """Cores that a node takes."""
        return float(self._asker.ask({"op": "idle", "seconds": seconds})["cores"])

    def paused(self, size: int, count: int, timeout_s: float) -> float:
        """Seconds until a load ends whose owner is stopped."""
        question = {"op": "paused", "bytes": size, "count": count, "timeout_s": timeout_s, "pids": self._owners}
        return float(self._asker.ask(question)["seconds"])

    def close(self) -> None:
        self._asker.close()
        self._owner.close()


class Vllm:
    """vLLM's tier at both ends."""

    def __init__(self, size: int, count: int) -> None:
        script = HERE / "p2p_vllm_child.py"
        self._owner, self._asker = (Child(script, role, str(size), str(count)) for role in ("serve", "load"))
        owner = self._owner.ask({})
        self._port = owner["port"]
        self._pids = [owner["pid"], self._asker.ask({"port": self._port, "seconds": 0.0})["pid"]]
        self._signal(signal.SIGSTOP)

    def rate(self, seconds: float) -> float:
        self._signal(signal.SIGCONT)
        rate = float(self._asker.ask({"port": self._port, "seconds": seconds})["rate"])
        self._signal(signal.SIGSTOP)
        return rate

    def idle(self, seconds: float) -> float:
        self._signal(signal.SIGCONT)
        cores = float(self._asker.ask({"idle": seconds})["cores"])
        self._signal(signal.SIGSTOP)
        return cores

    def paused(self) -> float:
        self._signal(signal.SIGCONT)
        seconds = float(self._asker.ask({"paused": self._pids[0], "port": self._port})["seconds"])
        self._signal(signal.SIGSTOP)
        return seconds

    def _signal(self, number: int) -> None:
        for pid in self._pids:
            os.kill(pid, number)

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        self._asker.close()
        self._owner.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="zmq,lookups,vllm")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--slice-s", type=float, default=0.3, help="how long a side runs in a round")
    parser.add_argument("--sizes", default="256KiB,1MiB,4MiB,16MiB", help="of the part zmq")
    parser.add_argument("--in-flight", default="1,8,32")
    parser.add_argument("--chunks", default=",".join(f"{size >> 10}KiB" for size in CHUNKS), help="sizes of the part vllm")
    parser.add_argument("--transports", default=",".join(TRANSPORTS), help="of the part vllm")
    parser.add_argument("--json", type=Path, help="a folder: one file for each table")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--svg", type=Path, help="a folder: one file for each table")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    facts = machine_facts() | {"rounds": str(args.rounds)}
    sections = []
    parts = args.parts.split(",")
    tables: list[tuple[str, str, list[CellResult], str]] = []
    if "zmq" in parts:
        sizes, counts = [parse_size(text) for text in args.sizes.split(",")], [int(text) for text in args.in_flight.split(",")]
        tables += zmq_part(list(itertools.product(sizes, counts)), args.slice_s, args.rounds, rng)
    if "lookups" in parts:
        tables.append(lookups_part(args.slice_s, args.rounds, rng))
    if "vllm" in parts:
        sizes = [parse_size(text) for text in args.chunks.split(",")]
        tables += [vllm_part(transport, sizes, args.slice_s, args.rounds, rng) for transport in args.transports.split(",")]
    for title, unit, results, more in tables:
        judged = [result.ratio for result in results if result.judged]
        missed = verdict(results, 1.0, 0.0) if judged else []
        sections.append(report(title, unit, results, facts) + "\n" + more + "".join(f"- Missed: {miss}.\n" for miss in missed))
        file = title.replace(" ", "-").replace(",", "").replace("'", "")
        if args.json:
            args.json.mkdir(parents=True, exist_ok=True)
            found = [judge("p2p-vllm", not missed, f"{title}: {geometric_mean(judged):.2f}")] if judged else []
            save(args.json / f"{file}.json", title, unit, results, facts, found)
        if args.svg:
            args.svg.mkdir(parents=True, exist_ok=True)
            (args.svg / f"{file}.svg").write_text(chart(title, results))
    text = "\n".join(sections)
    print(text)
    if args.markdown:
        args.markdown.write_text(text)


def zmq_part(
    shapes: list[tuple[int, int]], slice_s: float, rounds: int, rng: random.Random
) -> list[tuple[str, str, list[CellResult], str]]:
    """Ours beside raw ZMQ, and beside plain sockets."""
    memory = max((size + 8192) * count for size, count in shapes) + MARGIN_BYTES
    memory = -(-memory >> 20) << 20
    # Each record is as long as a raw one: the page of the header is inside of it.
    fills = [(size - 4096, max(count for other, count in shapes if other == size)) for size in dict.fromkeys(size for size, _ in shapes)]
    tables = []
    for theirs in ("zmq", "sockets"):
        results: list[CellResult] = []
        each: dict[str, dict[str, list[float]]] = {}
        # One size at a time: the owner has to hold all that it was filled with.
        for fill in fills:
            ours = Pair("ours", 2 * memory, [fill])
            other = Pair(theirs, memory, [(0, 0)])
            try:
                for size, count in shapes:
                    if size - 4096 != fill[0]:
                        continue
                    name = f"{size >> 10} KiB, {count} in flight"
                    cell = Cell(
                        name, bound(ours.rate, "get", *(fill[0], count), slice_s), bound(other.rate, "get", size, count, slice_s), False
                    )
                    results.append(run_cell(cell, rounds, rng))
                    note(theirs, results)
                    each[name] = {"ours": ours.each, "raw NIXL": other.each}
                    ours.each, other.each = [], []
            finally:
                ours.close()
                other.close()
        table = latencies(each).replace("raw NIXL", theirs)
        tables.append((f"p2p over ZMQ, beside {'raw ZMQ' if theirs == 'zmq' else 'plain sockets'}", "MB/s", results, table))
    return tables


def lookups_part(slice_s: float, rounds: int, rng: random.Random) -> tuple[str, str, list[CellResult], str]:
    ours, other = Pair("ours", 16 << 20, [(4096, 256)]), Pair("zmq", 1 << 20, [(0, 0)])
    results: list[CellResult] = []
    each: dict[str, dict[str, list[float]]] = {}
    try:
        for count in (1, 16, 256):
            name = f"{count} name{'s' * (count > 1)}"
            ask = bound(ours.rate, "ask", 4096, count, slice_s)
            results.append(run_cell(Cell(name, ask, bound(other.rate, "ask", 0, count, slice_s), False), rounds, rng))
            note("lookups", results)
            each[name] = {"ours": ours.each, "raw NIXL": other.each}
            ours.each, other.each = [], []
    finally:
        ours.close()
        other.close()
    table = latencies(each).replace("raw NIXL", "bare messages")
    return "p2p look-ups, beside bare messages", "round trips/s", results, table


def vllm_part(transport: str, sizes: list[int], slice_s: float, rounds: int, rng: random.Random) -> tuple[str, str, list[CellResult], str]:
    tls = TRANSPORTS[transport]
    # Peers of vLLM's compare a seed that comes from it.
    os.environ["PYTHONHASHSEED"] = "0"
    if tls:
        os.environ["UCX_TLS"] = tls
    results: list[CellResult] = []
    try:
        for size in sizes:
            count = CHUNKS[size]
            sides: list[Any] = []
            try:
                sides.append(ours := Pair("ours", (size + 8192) * count + MARGIN_BYTES, [(size, count)], "nixl", tls))
                sides.append(theirs := Vllm(size, count))
                name = f"{size >> 10} KiB x {count}"
                cell = Cell(
                    name, bound(ours.rate, "hit", size, count, slice_s), bound(theirs.rate, slice_s), judged=size >= JUDGED_FROM_BYTES
                )
                results.append(run_cell(cell, rounds, rng))
                note(transport, results)
                if size == sizes[-1]:
                    # While the other side is stopped, or does as good as nothing.
                    idle = f"{ours.idle(IDLE_S):.3f} | {theirs.idle(IDLE_S):.3f}"
                    paused = f"{ours.paused(size, count, LOAD_TIMEOUT_S):.1f} | {theirs.paused():.1f}"
            finally:
                for side in sides:
                    side.close()
    finally:
        os.environ.pop("UCX_TLS", None)
    more = (
        "| | ours | theirs |\n|---|---|---|\n"
        f"| cores that an idle node takes, its data plane included | {idle} |\n"
        f"| seconds until a load fails whose owner is stopped; ours has a deadline of {LOAD_TIMEOUT_S:g} s | {paused} |\n"
    )
    return f"p2p against vLLM's p2p tier, {transport} transports", "MB/s", results, more


def bound(rate: Callable[..., float], *arguments: Any) -> Callable[[], float]:
    return lambda: rate(*arguments)


def note(part: str, results: list[CellResult]) -> None:
    print(f"{part}: {results[-1].name}: {results[-1].ratio:.2f}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
