"""What a bad store costs the engine that uses it: `python benchmarks/survive.py`.

1. A store that is dead: time of a look-up while it is left alone, and of an engine's step.
2. A store that comes back: how long until it is used again, in probe intervals, with requests that try it and without any.
3. A slow store that is flooded with stores: the 99th percentile of loads, against that of the same loads when nothing is stored. Blocks of
   both alternate, in a random order.

Needs no vLLM and no disk. A slow store is one that sleeps: so much a call, and so much a byte, on each connection by itself.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import logging
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness import RESAMPLES, machine_facts
from targets import judge

from kvstore_sdk.backend import Backend, Capabilities, Region
from kvstore_sdk.format import record_bytes, seal
from kvstore_sdk.host import HostTier
from kvstore_sdk.identity import GroupIdentity, KVIdentity
from kvstore_sdk.keys import ChunkKey
from kvstore_sdk.testing import BackendWrapper, Fault, FaultyBackend, Hang, Raise
from kvstore_sdk.tier import Lookup, Tier, TierSettings
from kvstore_sdk_backends.memory import open_memory

LIMIT_S = 60.0
LOOK_UPS = 10_000
PAYLOAD_BYTES = 256 * 1024 - 4096
STEP_S = 0.0005
CALL_S, BYTES_PER_S = 0.030, 20e6
"""Of each of the slow store's connections: an object store far away, and so slow that a machine which others use as well adds little."""
SIZES = (1, 4, 16)
FLOOD_CHUNKS = 64
WANTED_US, WANTED_INTERVALS, WANTED_TIMES = 20.0, 2.0, 3.0
DEATHS: dict[str, list[Fault]] = {"raises": [Fault("*", Raise())], "never returns": [Fault("*", Hang())]}


def key(number: int) -> bytes:
    return hashlib.sha256(f"chunk {number}".encode()).digest() + bytes(4)


class Slow(BackendWrapper):
    """Sleeps `CALL_S` and the time of the bytes."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(max_record_bytes=1 << 20, max_batch=256, max_concurrency=32)

    def around(self, op: str, items: Sequence[Any], deadline: Any, proceed: Callable[[Sequence[Any]], Any]) -> Any:
        moved_bytes = sum(len(buffer.view) for item in items for buffer in getattr(item, "into", None) or getattr(item, "parts", ()))
        time.sleep(CALL_S + moved_bytes / BYTES_PER_S)
        return proceed(items)


class Engine:
    """A tier over slots of host memory, and its steps."""

    def __init__(self, backend: Backend, slots: int, **settings: Any) -> None:
        group = GroupIdentity(kind="full", layers=("l0",), payload_bytes=PAYLOAD_BYTES, heads=1, head_size=1)
        self.identity = KVIdentity(
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
        self.region = Region(slots * record_bytes(PAYLOAD_BYTES), "kvstore-bench")
        self.memory = HostTier(self.region, {0: PAYLOAD_BYTES})
        self.tier = Tier(backend, self.memory, identity=self.identity, settings=TierSettings(**settings))
        self.results: dict[int, Any] = {}
        self._jobs = itertools.count(1)
        self._requests = itertools.count(1)

    def write(self, rows: Sequence[int], keys: Sequence[bytes]) -> None:
        """Have sealed records in rows."""
        for row, one in zip(rows, keys, strict=True):
            view = self.memory.record(row).view
            view[:64] = hashlib.sha512(one).digest()
            seal(view, ChunkKey.from_engine(self.identity.namespace, one), self.identity.layout, PAYLOAD_BYTES)

    def step(self) -> None:
        self.results.update((result.job_id, result) for result in self.tier.poll())
        self.tier.flush()

    def wait(self, until: Callable[[], bool]) -> None:
        end_s = time.monotonic() + LIMIT_S
        while not until():
            if time.monotonic() > end_s:
                raise RuntimeError("what was waited for did not come")
            self.step()
            time.sleep(STEP_S)

    def request(self) -> str:
        return f"r{next(self._requests)}"

    def store(self, keys: Sequence[bytes], rows: Sequence[int]) -> int:
        self.tier.submit_store(job := next(self._jobs), keys, rows)
        return job

    def load(self, keys: Sequence[bytes], rows: Sequence[int]) -> Any:
        self.tier.submit_load(job := next(self._jobs), keys, rows)
        self.wait(lambda: job in self.results)
        return self.results.pop(job)

    def finds(self, keys: Sequence[bytes]) -> bool:
        """Whether a new request is told that all of these are there."""
        request = self.request()
        told = dict.fromkeys(keys, Lookup.PENDING)

        def settled() -> bool:
            for one in keys:
                if told[one] is Lookup.PENDING:
                    told[one] = self.tier.lookup(request, one)
            return Lookup.PENDING not in told.values()

        self.wait(settled)
        self.tier.end_request(request)
        return all(answer is Lookup.HIT for answer in told.values())

    def gauge(self, name: str, *labels: str) -> float:
        return self.tier.metrics.gauge_value(name, *labels)


def dead(how: str) -> dict[str, float]:
    """Microseconds of a look-up, and of a step, while the store is left alone."""
    backend = FaultyBackend(open_memory(""), DEATHS[how])
    engine = Engine(backend, 8, lookup_timeout_s=0.05, breaker_failures=3)
    try:
        engine.wait(lambda: not engine.finds([key(0)]) and engine.gauge("breaker_open", "read") == 1)
        lookup, clock, taken, steps = engine.tier.lookup, time.perf_counter_ns, [], []
        for number in range(LOOK_UPS):
            if number % 16 == 0:
                request = engine.request()
                began = clock()
                engine.step()
                steps.append(clock() - began)
            one = key(number)
            began = clock()
            lookup(request, one)
            taken.append(clock() - began)
        if engine.gauge("breaker_open", "read") != 1:
            raise RuntimeError("the breaker closed")
        return {
            "median_us": statistics.median(taken) / 1e3,
            "p99_us": quantile(taken, 0.99) / 1e3,
            "step_us": statistics.median(steps) / 1e3,
        }
    finally:
        backend.heal()
        engine.tier.close()


def recoveries(rounds: int, rng: random.Random, *, tried: bool) -> list[float]:
    """Intervals from the instant at which the store works again to that at which a request gets all that it had stored.

    Tried: a request each 20 ms, and no probes. Otherwise nobody uses the tier until its gauge says that the store is healthy.
    """
    probe_s = 0.5
    backend = FaultyBackend(open_memory(""))
    settings = {"breaker_probe_s": probe_s, "health_probe_s": 0.0 if tried else probe_s, "breaker_failures": 3, "hit_ttl_s": 0.0}
    engine = Engine(backend, 32, lookup_timeout_s=0.1, retries=0, **settings)
    keys = [key(number) for number in range(16)]
    engine.write(range(16), keys)
    job = engine.store(keys, range(16))
    engine.wait(lambda: job in engine.results)
    taken = []
    try:
        for _ in range(rounds):
            backend.arm(Fault("*", Raise()))
            while tried or engine.gauge("breaker_open", "read") == 0:
                engine.finds(keys)
                if engine.gauge("breaker_open", "read"):
                    break
            end_s = time.monotonic() + rng.uniform(2, 4) * probe_s
            while time.monotonic() < end_s:
                if tried:
                    engine.finds(keys)
                time.sleep(0.02)
            backend.heal()
            began_s = time.monotonic()
            while not tried and not engine.gauge("healthy"):
                time.sleep(0.002)
            while not engine.finds(keys):
                if time.monotonic() > began_s + LIMIT_S:
                    raise RuntimeError("it did not come back")
                time.sleep(0.02)
            taken.append((time.monotonic() - began_s) / probe_s)
            if not engine.load(keys, range(16, 32)).success:
                raise RuntimeError("a load failed")
    finally:
        backend.heal()
        engine.tier.close()
    return taken


def flooded(size: int, loads: int, rng: random.Random) -> dict[str, list[float]]:
    """Seconds of loads of so many chunks, when nothing is stored and while the store is flooded."""
    rows = 512
    engine = Engine(Slow(open_memory("")), rows, hit_ttl_s=0.0, health_probe_s=0.0)
    keys = [key(number) for number in range(rows)]
    engine.write(range(rows), keys)
    job = engine.store(keys[:64], range(64))
    engine.wait(lambda: job in engine.results)
    # Loads go into the first rows; what is stored comes from the others.
    offered = itertools.cycle(range(64, rows, FLOOD_CHUNKS))
    taken: dict[str, list[float]] = {"idle": [], "flooded": []}
    block = 50
    try:
        for _ in range(-(-loads // block)):
            for kind in rng.sample(sorted(taken), 2):
                under_way: list[int] = []

                def flood(under_way: list[int] = under_way) -> None:
                    under_way[:] = [job for job in under_way if job not in engine.results]
                    while len(under_way) < 6:
                        start = next(offered)
                        under_way.append(engine.store(keys[start : start + FLOOD_CHUNKS], range(start, start + FLOOD_CHUNKS)))

                if kind == "flooded":
                    flood()
                    engine.wait(lambda: engine.gauge("queued_store_bytes") > 0)
                for _ in range(block):
                    if kind == "flooded":
                        flood()
                    first = rng.randrange(64 - size)
                    result = engine.load(keys[first : first + size], range(first, first + size))
                    if not result.success:
                        raise RuntimeError("a load failed")
                    taken[kind].append(result.elapsed_s)
                    end_s = time.monotonic() + rng.uniform(0.0, 0.02)
                    engine.wait(lambda end_s=end_s: time.monotonic() > end_s)
                engine.wait(lambda under_way=under_way: all(job in engine.results for job in under_way))
                engine.results.clear()
    finally:
        engine.tier.close()
    return taken


def quantile(values: Sequence[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * part))]


def interval(values: Sequence[float], seed: int = 1) -> tuple[float, float]:
    """95 % interval of the 99th percentile, by resampling."""
    rng = random.Random(seed)
    found = sorted(quantile(rng.choices(values, k=len(values)), 0.99) for _ in range(RESAMPLES))
    return found[int(RESAMPLES * 0.025)], found[int(RESAMPLES * 0.975)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    logging.getLogger("kvstore_sdk").setLevel(logging.ERROR)
    rng = random.Random(args.seed)
    raw: dict[str, Any] = {"facts": machine_facts()}
    misses: list[str] = []
    print("## A store that is dead, slow, or back again", "", ", ".join(f"{k} {v}" for k, v in raw["facts"].items()) + ".", "", sep="\n")
    print(f"| dead store | look-up, median of {LOOK_UPS:,}, µs | 99th percentile, µs | step, µs |", "|---|---|---|---|", sep="\n")
    for how in DEATHS:
        raw[how] = cost = dead(how)
        print(f"| {how} | {cost['median_us']:.1f} | {cost['p99_us']:.1f} | {cost['step_us']:.1f} |")
        misses += [f"a look-up takes {cost['median_us']:.1f} µs"] if cost["median_us"] > WANTED_US else []
    print("", f"| back again, {args.rounds} times | intervals, median | most |", "|---|---|---|", sep="\n")
    for name, tried in (("requests try it", True), ("nobody uses it", False)):
        raw[name] = took = recoveries(args.rounds, rng, tried=tried)
        print(f"| {name} | {statistics.median(took):.2f} | {max(took):.2f} |")
        misses += [f"{name}: back after {max(took):.2f} intervals"] if max(took) > WANTED_INTERVALS else []
    head = f"| chunks a load, {args.loads} loads | idle p99, ms | flooded p99, ms | 95 % interval, ms | times idle |"
    print("", head, "|---|---|---|---|---|", sep="\n")
    for size in SIZES:
        raw[f"flooded {size}"] = taken = flooded(size, args.loads, rng)
        idle, p99, (low, high) = quantile(taken["idle"], 0.99), quantile(taken["flooded"], 0.99), interval(taken["flooded"])
        print(
            f"| {size} | {idle * 1e3:.1f} | {p99 * 1e3:.1f} | {low * 1e3:.1f} to {high * 1e3:.1f} | {low / idle:.2f} to {high / idle:.2f} |"
        )
        misses += [f"loads of {size} chunks take up to {high / idle:.2f} times as long"] if high > WANTED_TIMES * idle else []
    raw["targets"] = [judge("survive", not misses, "; ".join(misses) or "nothing missed")]
    if args.json:
        args.json.write_text(json.dumps(raw, indent=1) + "\n")
    print("", *misses or ["Nothing was missed."], sep="\n")


if __name__ == "__main__":
    main()
