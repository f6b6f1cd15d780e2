"""What host memory costs the engine's own thread, against vLLM's CPU offloading manager: `python benchmarks/host.py`.

For a host tier that is full, with 10^3, 10^4 and 10^5 chunks: how many chunks a second the calling thread gets through. Both sides keep the
books only, so no memory is touched: a region of 10^5 chunks costs nothing.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from harness import Cell, CellResult, add_outputs, machine_facts, publish, run_cell, verdict

from kvstore_sdk.backend import Region
from kvstore_sdk.format import record_bytes
from kvstore_sdk.host import HostTier
from kvstore_sdk.identity import GroupIdentity, KVIdentity
from kvstore_sdk.store import TieredStore

SIZES = (1_000, 10_000, 100_000)
PAYLOAD_BYTES = 4096
CHAIN = 64
REPEATS = 8
OPERATIONS = {
    "lookup": "look up, a resident chunk",
    "again": "look up once more, as a request that waits does in every step, a chunk",
    "load": "begin and end a load, a chunk",
    "store": "begin and end a store, a chunk evicted for each",
    "request": "a whole request: a chain looked up, loaded, half as much stored, ended; a chunk",
}


def key(number: int) -> bytes:
    return number.to_bytes(32, "big") + bytes(4)


class Ours:
    """A TieredStore of host memory alone."""

    def __init__(self, chunks: int, policy: str) -> None:
        self.region = Region(chunks * record_bytes(PAYLOAD_BYTES), "kvstore-bench")
        group = GroupIdentity(kind="full", layers=("l0",), payload_bytes=PAYLOAD_BYTES, heads=1, head_size=1)
        identity = KVIdentity(
            model="m",
            weights="w",
            model_config="c",
            kv_dtype="bfloat16",
            layout="bench",
            layout_version=1,
            block_tokens=16,
            hash_tokens=16,
            blocks_per_chunk=1,
            groups=(group,),
            hash_algorithm="sha256",
        )
        self.store = TieredStore(HostTier(self.region, {0: PAYLOAD_BYTES}, policy=policy), (), identity=identity)

    def begin(self, number: int) -> str:
        request = f"r{number}"
        self.store.begin_request(request)
        return request

    def lookup(self, request: str, keys: list[bytes]) -> None:
        lookup = self.store.lookup
        for one in keys:
            lookup(request, one)

    def load(self, request: str, keys: list[bytes]) -> None:
        self.store.begin_load(request, keys)
        self.store.end_load(request, keys)

    def put(self, request: str, keys: list[bytes]) -> None:
        if self.store.begin_store(request, keys) is None:
            raise RuntimeError("no room")
        self.store.end_store(keys)

    def has(self, one: bytes) -> bool:
        return self.store.host.get(one) is not None

    def end(self, request: str) -> None:
        self.store.end_request(request)
        self.store.poll()
        self.store.flush()


class Theirs:
    """vLLM's CPUOffloadingManager."""

    def __init__(self, chunks: int, policy: str) -> None:
        from vllm.v1.kv_offload.base import ReqContext
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        self._context = ReqContext
        self.manager = CPUOffloadingManager(chunks, cache_policy=policy)

    def begin(self, number: int) -> Any:
        request = self._context(req_id=f"r{number}")
        self.manager.on_new_request(request)
        return request

    def lookup(self, request: Any, keys: list[Any]) -> None:
        lookup = self.manager.lookup
        for one in keys:
            lookup(one, request)

    def load(self, request: Any, keys: list[Any]) -> None:
        self.manager.prepare_load(keys, request)
        self.manager.complete_load(keys, request)

    def put(self, request: Any, keys: list[Any]) -> None:
        if self.manager.prepare_store(keys, request) is None:
            raise RuntimeError("no room")
        self.manager.complete_store(keys, request)

    def has(self, one: Any) -> bool:
        return self.manager._policy.get(one) is not None

    def end(self, request: Any) -> None:
        self.manager.on_request_finished(request)


class Side:
    """One of them, full; asked for rates."""

    def __init__(self, made: Ours | Theirs, chunks: int, seed: int) -> None:
        self._made = made
        self._rng = random.Random(seed)
        self._requests = itertools.count()
        self._fresh = itertools.count(1 << 40, CHAIN)
        self._chains = [[key(start + place) for place in range(CHAIN)] for start in range(0, chunks - CHAIN + 1, CHAIN)]
        for chain in self._chains:
            self._whole("put", chain)
        # As many again, so that something is evicted for everything that comes.
        for _ in range(2):
            self.rate("store")

    def _new(self, count: int) -> list[bytes]:
        start = next(self._fresh)
        return [key(start + place) for place in range(count)]

    def _resident(self) -> list[bytes]:
        """A chain that is there, to its end."""
        while True:
            place = self._rng.randrange(len(self._chains))
            if all(map(self._made.has, self._chains[place])):
                return self._chains[place]
            self._chains[place] = self._chains[-1]
            self._chains.pop()

    def _whole(self, op: str, chain: list[bytes]) -> float:
        """One request that does one thing; returns the seconds that the thing took."""
        made: Any = self._made
        request = made.begin(next(self._requests))
        if op in ("load", "again"):
            made.lookup(request, chain)
        begun = time.thread_time()
        getattr(made, "lookup" if op == "again" else op)(request, chain)
        spent = time.thread_time() - begun
        made.end(request)
        return spent

    def _life(self, head: list[bytes], tail: list[bytes]) -> float:
        made: Any = self._made
        number = next(self._requests)
        begun = time.thread_time()
        request = made.begin(number)
        made.lookup(request, head)
        made.load(request, head)
        made.put(request, tail)
        made.end(request)
        return time.thread_time() - begun

    def rate(self, op: str) -> float:
        """Chunks a second."""
        spent = 0.0
        chunks = REPEATS * CHAIN
        for _ in range(REPEATS):
            if op == "store":
                chain = self._new(CHAIN)
                spent += self._whole("put", chain)
                self._chains.append(chain)
            elif op == "request":
                spent += self._life(self._resident(), self._new(CHAIN // 2))
            else:
                spent += self._whole(op, self._resident())
        return (chunks + chunks // 2 if op == "request" else chunks) / spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--policy", choices=("lru", "arc"), default="lru")
    parser.add_argument("--seed", type=int, default=1)
    add_outputs(parser)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    results: list[CellResult] = []
    by_size: dict[str, list[CellResult]] = {op: [] for op in OPERATIONS}
    for chunks in SIZES:
        ours = Side(Ours(chunks, args.policy), chunks, args.seed)
        theirs = Side(Theirs(chunks, args.policy), chunks, args.seed)

        def ask(side: Side, op: str) -> Callable[[], float]:
            return lambda: side.rate(op)

        for op, name in OPERATIONS.items():
            found = run_cell(Cell(f"{name}, {chunks:,}", ask(ours, op), ask(theirs, op)), args.rounds, rng)
            results.append(found)
            by_size[op].append(found)
    import vllm

    facts = machine_facts() | {"vllm": vllm.__version__, "rounds": str(args.rounds), "policy": args.policy}
    title = "Time on the calling thread against vLLM's CPU offloading manager"
    misses = [f"- Missed: {miss}." for miss in verdict(results, 1.0, 1.0)]
    publish(args, title, "1/s", results, facts, [_table(by_size), *(misses or ["Nothing missed."])])


def _table(by_size: dict[str, list[CellResult]]) -> str:
    """Microseconds a chunk, and how they grow with the number of chunks."""
    lines = [
        "| microseconds a chunk | "
        + " | ".join(f"ours, {size:,} | theirs, {size:,}" for size in SIZES)
        + " | ours, growth | theirs, growth |",
        "|---|" + "---|" * (2 * len(SIZES) + 2),
    ]
    for op, found in by_size.items():
        cost = [(1e6 / statistics.median(r.ours), 1e6 / statistics.median(r.theirs)) for r in found]
        cells = " | ".join(f"{a:.2f} | {b:.2f}" for a, b in cost)
        lines.append(f"| {OPERATIONS[op]} | {cells} | {cost[-1][0] / cost[0][0]:.2f} | {cost[-1][1] / cost[0][1]:.2f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
