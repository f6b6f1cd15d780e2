"""Hit rates of the eviction policies and what a call of theirs costs: `python benchmarks/eviction.py`. Needs no vLLM, and a minute.

Hit rates are the same on every machine. Another policy is measured beside them with `--policy module:factory`.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import eviction_traces as traces
from eviction_traces import Trace
from harness import machine_facts

from kvstore_sdk.host.policies import open_policy

WORKLOADS: dict[str, tuple[Callable[[], Trace], tuple[int, ...]]] = {
    "Zipf 1.0, 10,000 keys": (lambda: traces.zipf(60_000, 10_000, 1.0, seed=1), (100, 1000, 3000)),
    "Zipf 0.7, 10,000 keys": (lambda: traces.zipf(60_000, 10_000, 0.7, seed=2), (100, 1000, 3000)),
    "loop over 1,000 keys": (lambda: traces.loop(30_000, 1000), (500, 999, 1000)),
    "drifting keys": (lambda: traces.drifting(60_000, 2000, 0.1, seed=3), (200, 500, 1000)),
    "500 hot keys and scans of 2,000": (lambda: traces.hot_and_scans(60_000, 500, 2000, seed=4), (500, 1000, 2000)),
    "60 chats that grow": (lambda: traces.sessions(3000, 60, 0.0, seed=5), (500, 1000, 2000)),
    "the same, 20 % one-shot prompts": (lambda: traces.sessions(3000, 60, 0.2, seed=6), (500, 1000, 2000)),
    "the same, 50 % one-shot prompts": (lambda: traces.sessions(3000, 60, 0.5, seed=7), (500, 1000, 2000)),
    "questions about 400 documents": (lambda: traces.documents(3000, 400, seed=8), (500, 1000, 2000)),
}
POLICIES = ("lru", "arc")
SIZES = (1000, 10_000, 100_000)
CHAIN = 16


def row(workload: str, capacity: int, policies: Sequence[str] = POLICIES) -> str:
    """A row of the table of hit rates."""
    trace = WORKLOADS[workload][0]()
    rates = [traces.hit_rate(open_policy(name, capacity), capacity, trace) for name in policies]
    shown = (f"{100 * rate:.1f}" for rate in (*rates, traces.best_hit_rate(capacity, trace)))
    return f"| {workload} | {capacity:,} | {' | '.join(shown)} |"


def costs(name: str, size: int, pinned_share: float, batches: int) -> list[float]:
    """Microseconds a key, in a full host tier: to pin and unpin one that is there, to use one, and to let one in for one that goes.

    Keys come in chains of 16; the share that is pinned is the coldest. The median over batches of a whole chain.
    """
    policy = open_policy(name, size)
    numbers = itertools.count()

    def new_chain() -> list[bytes]:
        # As long as a key of the adapter is.
        return [next(numbers).to_bytes(36, "big") for _ in range(CHAIN)]

    def let_in(chain: list[bytes], full: bool) -> None:
        for key in chain:
            policy.miss(key)
            if full:
                victim = policy.victim()
                assert victim is not None
                policy.evict(victim)
            policy.insert(key)
        policy.unpin(chain)

    chains = [new_chain() for _ in range(size // CHAIN)]
    for chain in chains:
        let_in(chain, full=False)
        policy.used(chain)
    pinned = int(len(chains) * pinned_share)
    for key in itertools.chain.from_iterable(chains[:pinned]):
        policy.pin(key)

    def timed(call: Callable[[list[bytes]], None], each: Sequence[list[bytes]]) -> float:
        taken = []
        for chain in each:
            start = time.perf_counter()
            call(chain)
            taken.append(time.perf_counter() - start)
        return statistics.median(taken) / CHAIN * 1e6

    def pin_and_unpin(chain: list[bytes]) -> None:
        for key in chain:
            policy.pin(key)
        policy.unpin(chain)

    there = chains[pinned:]
    step = max(1, len(there) // batches)
    sample = there[::step]
    found = [timed(pin_and_unpin, sample), timed(policy.used, sample)]
    return [*found, timed(lambda chain: let_in(chain, full=True), [new_chain() for _ in range(batches)])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", action="append", default=[], help="module:factory of another policy; may be repeated")
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    policies = (*POLICIES, *args.policy)
    for name in policies:
        open_policy(name, 1)

    lines = [f"| workload | room for | {' | '.join(policies)} | best |", "|---|---|" + "---|" * (len(policies) + 1)]
    lines += [row(workload, capacity, policies) for workload, (_, sizes) in WORKLOADS.items() for capacity in sizes]
    lines += ["", ", ".join(f"{name} {value}" for name, value in machine_facts().items()) + ".", ""]
    lines += ["| policy | keys | pinned | pin and unpin, µs | use, µs | let in, µs |", "|---|---|---|---|---|---|"]
    for name, size, share in itertools.product(policies, SIZES, (0.0, 0.5)):
        shown = " | ".join(f"{cost:.2f}" for cost in costs(name, size, share, args.batches))
        lines.append(f"| {name} | {size:,} | {share:.0%} | {shown} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if args.markdown:
        args.markdown.write_text(text)


if __name__ == "__main__":
    main()
