"""What a million known chunks cost: `python benchmarks/scale.py`.

For 10^3 to 10^6 keys that are known to a Tier, or resident in a full host tier: what each call costs the calling thread, what a key costs
in memory, and how long a full collection of Python's garbage takes. A plain dict is asked as well, since what is not in the processor's
caches costs more whoever asks for it, and vLLM's CPU offloading manager.

All sizes are asked one after the other in every round, in a random order, each in a process of its own; growth is the ratio between the
largest and the smallest in the same round, noise the ratio of the smallest to itself. A call is called flat or logarithmic when its growth
from 10^3 to 10^6 is no more than log(10^6) / log(10^3), which is 2, or would be but for what one look-up in the dict came to cost. Memory
is what the process grows by; it is flat when a key costs no more than half as much again at 10^6 as at 10^4: a dict has from a third to two
thirds of its places in use.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from child import Child
from harness import add_outputs, bootstrap, geometric_mean, machine_facts
from targets import judge

from kvstore_sdk.bench.plot import lines

HERE = Path(__file__).parent
TITLE = "What grows with the number of chunks"
SIZES = (1_000, 10_000, 100_000, 1_000_000)
HOST = {
    "lookup": "look up, a resident chunk",
    "again": "look up once more, a chunk",
    "load": "begin and end a load, a chunk",
    "store": "begin and end a store, a chunk evicted for each",
    "request": "a whole request, a chunk",
}
SUBJECTS = {
    "dict": {"lookup": "look up"},
    "tier": {
        "known": "look up, a known chunk",
        "repeated": "look up again what was answered",
        "missing": "look up again what is missing",
        "new": "look up a new chunk, and send the question",
        "step": "a step of 100,000 look-ups, a look-up",
        "submit load": "submit 256 loads of 16 chunks, a chunk",
        "submit store": "submit 256 stores of 16 chunks, a chunk",
        "jobs": "256 stores in flight, submitted and polled until done, a chunk",
        "idle poll": "poll with nothing to report",
    },
    "host-lru": HOST,
    "host-arc": HOST,
    "vllm-lru": HOST,
    "vllm-arc": HOST,
}
OURS = ("tier", "host-lru", "host-arc")
MOST_GROWTH, MOST_HEAVIER = 2.0, 1.5
LEAST_WEIGHED = 10_000
"""Fewer keys are lost in what a process grows by for other reasons."""


@dataclass(frozen=True, eq=False)
class Curve:
    """One call: microseconds by number of keys, and round."""

    subject: str
    op: str
    name: str
    us: dict[int, list[float]]
    again: list[float]
    growth: float = field(init=False)
    interval: tuple[float, float] = field(init=False)
    noise: tuple[float, float] = field(init=False)

    def __post_init__(self) -> None:
        least, most = min(self.us), max(self.us)
        ratios = [b / a for a, b in zip(self.us[least], self.us[most], strict=True)]
        object.__setattr__(self, "growth", geometric_mean(ratios))
        object.__setattr__(self, "interval", bootstrap(ratios))
        object.__setattr__(self, "noise", bootstrap([b / a for a, b in zip(self.us[least], self.again, strict=True)]))

    def judged_growth(self, dict_us: float) -> float:
        """The growth; where it is too much, without what a look-up in a dict came to cost, `dict_us` more at the largest size."""
        if self.growth <= MOST_GROWTH:
            return self.growth
        return self.growth - dict_us / statistics.median(self.us[min(self.us)])


@dataclass(frozen=True)
class Held:
    """What keys cost that nobody asks for: bytes a key, and a full collection in milliseconds, by number of keys."""

    subject: str
    bytes_a_key: dict[int, float]
    collection_ms: dict[int, float]

    @property
    def misses(self) -> bool:
        found = self.bytes_a_key
        return self.subject in OURS and len(found) > 1 and found[max(found)] > MOST_HEAVIER * found[min(found)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--subjects", default=",".join(SUBJECTS))
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--seed", type=int, default=1)
    add_outputs(parser)
    args = parser.parse_args()
    sizes = [int(size) for size in args.sizes.split(",")]
    rng = random.Random(args.seed)
    curves: list[Curve] = []
    held: list[Held] = []
    for subject in args.subjects.split(","):
        children = {size: Child(HERE / "scale_child.py", subject, str(size)) for size in sizes}
        try:
            weights = {size: child.ask({"op": "memory"})["bytes"] for size, child in children.items() if size >= LEAST_WEIGHED}
            held.append(Held(subject, weights, {size: child.ask({"op": "gc"})["us"] / 1e3 for size, child in children.items()}))
            for op, name in SUBJECTS[subject].items():
                curves.append(run(subject, op, name, children, args.rounds, rng))
                print(row(curves[-1], sizes, dict_us(curves)), flush=True)
        finally:
            for child in children.values():
                child.close()
    facts = machine_facts() | {"rounds": str(args.rounds)}
    text = report(curves, held, sizes, facts)
    print("\n" + text)
    if args.json:
        body = {"title": TITLE, "unit": "us", "facts": facts, "targets": [verdict(curves, held)]}
        body |= {"cells": [asdict(curve) for curve in curves], "held": [asdict(each) for each in held]}
        args.json.write_text(json.dumps(body, indent=1) + "\n")
    if args.markdown:
        args.markdown.write_text(text)
    if args.svg:
        args.svg.write_text(plot(curves))


def run(subject: str, op: str, name: str, children: dict[int, Child], rounds: int, rng: random.Random) -> Curve:
    """Every size once a round, the smallest twice, after a round that is not counted."""
    least = min(children)
    seen: dict[str, list[float]] = {str(size): [] for size in children} | {"again": []}
    for number in range(rounds + 1):
        for side in rng.sample(list(seen), len(seen)):
            us = children[least if side == "again" else int(side)].ask({"op": op})["us"]
            if number:
                seen[side].append(us)
    again = seen.pop("again")
    return Curve(subject, op, name, {int(size): values for size, values in seen.items()}, again)


def dict_us(curves: Sequence[Curve]) -> float:
    """What a look-up in a plain dict costs more at the largest size than at the smallest."""
    table = next((curve.us for curve in curves if curve.subject == "dict"), None)
    return statistics.median(table[max(table)]) - statistics.median(table[min(table)]) if table else 0.0


def row(curve: Curve, sizes: Sequence[int], more_us: float) -> str:
    """A row of the table."""
    cost = " | ".join(f"{statistics.median(curve.us[size]):.2f}" for size in sizes)
    low, high = curve.interval
    noise = f"{curve.noise[0]:.2f} to {curve.noise[1]:.2f}"
    net = f"{curve.judged_growth(more_us):.2f}"
    return f"| {curve.subject}: {curve.name} | {cost} | {curve.growth:.2f} | {low:.2f} to {high:.2f} | {noise} | {net} |"


def report(curves: Sequence[Curve], held: Sequence[Held], sizes: Sequence[int], facts: dict[str, str]) -> str:
    """A Markdown section."""
    head = " | ".join(f"{size:,}" for size in sizes)
    parts = [
        f"## {TITLE}",
        "",
        ", ".join(f"{name} {value}" for name, value in facts.items()) + ".",
        "",
        f"| microseconds of the calling thread | {head} | growth | 95 % interval | noise | judged |",
        "|---|" + "---|" * (len(sizes) + 4),
        *(row(curve, sizes, dict_us(curves)) for curve in curves),
        "",
        f"| bytes a key, without the key | {head} |",
        "|---|" + "---|" * len(sizes),
        *(
            f"| {each.subject} | "
            + " | ".join(f"{each.bytes_a_key[size]:,.0f}" if size in each.bytes_a_key else "" for size in sizes)
            + " |"
            for each in held
        ),
        "",
        f"| a full collection of Python's garbage, ms | {head} |",
        "|---|" + "---|" * len(sizes),
        *(f"| {each.subject} | " + " | ".join(f"{each.collection_ms[size]:,.1f}" for size in sizes) + " |" for each in held),
        "",
    ]
    grown = {curve: curve.judged_growth(dict_us(curves)) for curve in curves if curve.subject in OURS}
    misses = [f"- Missed: {curve.subject}: {curve.name}: growth {growth:.2f}." for curve, growth in grown.items() if growth > MOST_GROWTH]
    misses += [f"- Missed: {each.subject}: memory of a key grows." for each in held if each.misses]
    return "\n".join([*parts, *(misses or ["Nothing missed."])]) + "\n"


def verdict(curves: Sequence[Curve], held: Sequence[Held]) -> dict[str, str | bool]:
    """What is said of the target: every call of ours has to meet it."""
    more_us = dict_us(curves)
    worst = max((curve for curve in curves if curve.subject in OURS), key=lambda curve: curve.judged_growth(more_us))
    growth = worst.judged_growth(more_us)
    text = f"growth {growth:.2f} at most ({worst.growth:.2f} with a dict's own), {worst.subject}: {worst.name}"
    return judge("scale", growth <= MOST_GROWTH and not any(each.misses for each in held), text)


def plot(curves: Sequence[Curve]) -> str:
    """Ours, and the dict, as lines on logarithmic axes."""
    shown = ("look up", "known", "step", "submit", "lookup", "store", "jobs")
    series = {
        f"{curve.subject}: {curve.op}": [(float(size), statistics.median(values)) for size, values in curve.us.items()]
        for curve in curves
        if curve.subject in ("dict", *OURS) and curve.op.split()[0] in shown
    }
    return lines(TITLE, "chunks that are known, or resident", "microseconds of the calling thread, a chunk", series)


if __name__ == "__main__":
    main()
