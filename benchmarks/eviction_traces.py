"""Requests to replay against an eviction policy, and the best that any policy could do with them.

A trace is a list of requests, a request the keys of its chain, the head of the prefix first. All are drawn from a seed.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterator, Sequence

from kvstore_sdk.host.policy import EvictionPolicy

Trace = list[tuple[bytes, ...]]


def key(name: str, *numbers: int) -> bytes:
    return ":".join((name, *map(str, numbers))).encode()


def zipf_weights(count: int, exponent: float) -> list[float]:
    """How often each of `count` keys is asked for; they add up to 1."""
    weights = [1 / rank**exponent for rank in range(1, count + 1)]
    total = sum(weights)
    return [weight / total for weight in weights]


def zipf(requests: int, count: int, exponent: float, seed: int) -> Trace:
    """Single keys, each request independent of those before it."""
    drawn = random.Random(seed).choices(range(count), zipf_weights(count, exponent), k=requests)
    return [(key("zipf", number),) for number in drawn]


def loop(requests: int, count: int) -> Trace:
    """The same `count` keys over and over, in the same order."""
    return [(key("loop", number % count),) for number in range(requests)]


def drifting(requests: int, depth: int, new_share: float, seed: int) -> Trace:
    """Keys that are asked for again soon or never: what was used last is the best guess, and how often says nothing."""
    rng = random.Random(seed)
    recent = [key("drift", number) for number in range(depth)]
    numbers = itertools.count(depth)
    trace: Trace = []
    for _ in range(requests):
        if rng.random() < new_share:
            recent.pop(0)
            recent.append(key("drift", next(numbers)))
        else:
            recent.append(recent.pop(depth - 1 - min(depth - 1, int(rng.expovariate(4 / depth)))))
        trace.append((recent[-1],))
    return trace


def hot_and_scans(requests: int, hot: int, scan: int, seed: int) -> Trace:
    """A hot set, asked for evenly, and now and then a scan of `scan` keys that nobody asks for again: half of the requests each."""
    rng = random.Random(seed)
    numbers = itertools.count()
    trace: Trace = []
    while len(trace) < requests:
        trace += [(key("hot", rng.randrange(hot)),) for _ in range(scan)]
        trace += [(key("scan", next(numbers)),) for _ in range(scan)]
    return trace[:requests]


def sessions(requests: int, at_once: int, one_shot_share: float, seed: int) -> Trace:
    """Chats that grow, and prompts that nobody sends again.

    A chat begins with one of 4 system prompts of 8 chunks, and grows by 4 chunks each turn for 12 turns on the average; `at_once` chats are
    under way, and any of them may be next. A one-shot prompt begins with a system prompt too, and has 40 chunks of its own.
    """
    rng = random.Random(seed)
    numbers = itertools.count()

    def new_chat() -> list[bytes]:
        system = rng.randrange(4)
        return [key("system", system, chunk) for chunk in range(8)]

    chats = {next(numbers): new_chat() for _ in range(at_once)}
    trace: Trace = []
    for _ in range(requests):
        if rng.random() < one_shot_share:
            number = next(numbers)
            trace.append((*new_chat(), *(key("shot", number, chunk) for chunk in range(40))))
            continue
        number = rng.choice(list(chats))
        chat = chats[number]
        chat += [key("chat", number, len(chat) + chunk) for chunk in range(4)]
        trace.append(tuple(chat))
        if rng.random() < 1 / 12:
            del chats[number]
            chats[next(numbers)] = new_chat()
    return trace


def documents(requests: int, count: int, seed: int) -> Trace:
    """Questions about documents: a system prompt of 8 chunks, a document of 24 drawn by Zipf, a question of 2 that nobody asks again."""
    rng = random.Random(seed)
    drawn = rng.choices(range(count), zipf_weights(count, 0.9), k=requests)
    system = [key("system", chunk) for chunk in range(8)]
    return [
        (*system, *(key("document", document, chunk) for chunk in range(24)), *(key("question", number, chunk) for chunk in range(2)))
        for number, document in enumerate(drawn)
    ]


def replay(policy: EvictionPolicy, capacity: int, trace: Trace) -> Iterator[tuple[int, list[bytes]]]:
    """For each request: how many of its chunks were there, counted up to the first that was not; and what was evicted for the others.

    As a host tier does it: what is there is pinned meanwhile, what is missing takes the room of victims as long as there are any.
    """
    resident: set[bytes] = set()
    for chain in trace:
        held = [key for key in chain if key in resident]
        for key in held:
            policy.pin(key)
        hits = sum(1 for _ in itertools.takewhile(resident.__contains__, chain))
        evicted: list[bytes] = []
        for key in chain:
            if key in resident:
                continue
            policy.miss(key)
            if len(resident) == capacity:
                victim = policy.victim()
                if victim is None:
                    break
                policy.evict(victim)
                resident.remove(victim)
                evicted.append(victim)
            policy.insert(key)
            resident.add(key)
        policy.unpin([key for key in chain if key in resident])
        policy.used(chain)
        yield hits, evicted


def hit_rate(policy: EvictionPolicy, capacity: int, trace: Trace) -> float:
    """The share of all chunks asked for that was there."""
    return sum(hits for hits, _ in replay(policy, capacity, trace)) / sum(map(len, trace))


def best_hit_rate(capacity: int, trace: Trace) -> float:
    """Belady's optimum: what is asked for again last goes first, and is not let in at all if that is the new key itself.

    No policy can have more, with chains or without: a chunk counts here whether or not those before it are there.
    """
    asked: Sequence[bytes] = [key for chain in trace for key in chain]
    never = len(asked)
    next_use = [never] * len(asked)
    seen: dict[bytes, int] = {}
    for at in range(len(asked) - 1, -1, -1):
        next_use[at] = seen.get(asked[at], never)
        seen[asked[at]] = at
    until: dict[bytes, int] = {}
    # Of a key only the entry with its present next use counts.
    latest: list[tuple[int, bytes]] = []
    hits = 0
    for at, key in enumerate(asked):
        hits += key in until
        if next_use[at] == never:
            until.pop(key, None)
            continue
        until[key] = next_use[at]
        heapq.heappush(latest, (-next_use[at], key))
        while len(until) > capacity:
            time, last = heapq.heappop(latest)
            if until.get(last) == -time:
                del until[last]
    return hits / len(asked)
