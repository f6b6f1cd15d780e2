"""No call about host memory does more work because more is resident."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from store_bench import identity

from kvstore_sdk.backend import Region
from kvstore_sdk.format import record_bytes
from kvstore_sdk.host import HostTier
from kvstore_sdk.store import TieredStore
from kvstore_sdk.tier import Lookup

PAYLOAD_BYTES = 4096
CHAIN = 16
FEW, MANY = 8 * CHAIN, 256 * CHAIN


class CountedKey(bytes):
    """A key that counts how often any table is asked for it, or takes it in."""

    looks = 0

    def __hash__(self) -> int:
        CountedKey.looks += 1
        return super().__hash__()


def chain(number: int) -> list[bytes]:
    return [CountedKey((number * CHAIN + place).to_bytes(32, "big") + bytes(4)) for place in range(CHAIN)]


def work_of(call: Callable[[], object]) -> tuple[int, int]:
    """Steps of Python that a call takes, and how often it looks a key up."""
    steps = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal steps
        frame.f_trace_opcodes = True
        steps += event == "opcode"
        return trace

    before, looks, collects = sys.gettrace(), CountedKey.looks, gc.isenabled()
    # A collection may fall into any call, and what other tests left to be finalised, or hooked into collections, is Python as well.
    gc.disable()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return steps, CountedKey.looks - looks


class Full:
    """A store whose host memory is full of chains, of which a request stored each."""

    def __init__(self, chunks: int, policy: str) -> None:
        self.region = Region(chunks * record_bytes(PAYLOAD_BYTES))
        self.store = TieredStore(HostTier(self.region, {0: PAYLOAD_BYTES}, policy=policy), (), identity=identity((PAYLOAD_BYTES,)))
        self.next = 0
        for _ in range(2 * chunks // CHAIN):
            self.add()

    def add(self) -> None:
        some, request = chain(self.next), f"r{self.next}"
        self.next += 1
        self.store.begin_request(request)
        assert self.store.begin_store(request, some) is not None
        self.store.end_store(some)
        self.store.end_request(request)
        self.store.poll()
        self.store.flush()

    def work(self) -> dict[str, tuple[int, int]]:
        """Of each call for a chain, with one for a request that uses the newest chain."""
        store, there, new = self.store, chain(self.next - 1), chain(self.next)
        self.next += 1
        store.begin_request("user")
        found = {
            "look up": work_of(lambda: [store.lookup("user", one) for one in there]),
            "look up again": work_of(lambda: [store.lookup("user", one) for one in there]),
            "begin a load": work_of(lambda: store.begin_load("user", there)),
            "end a load": work_of(lambda: store.end_load("user", there)),
            "begin a store": work_of(lambda: store.begin_store("user", new)),
            "end a store": work_of(lambda: store.end_store(new)),
            "end a request": work_of(lambda: store.end_request("user")),
            "poll": work_of(store.poll),
            "flush": work_of(store.flush),
            "missing": work_of(lambda: [store.lookup("other", one) for one in chain(1 << 20)]),
            "let go of nobody": work_of(lambda: store.let_go(["nobody"])),
        }
        store.end_request("other")
        assert store.lookup("later", new[-1]) is Lookup.HIT
        store.end_request("later")
        return found

    def close(self) -> None:
        assert self.store.close()
        self.region.close()


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_calls_about_a_chain_take_as_many_steps_whatever_is_resident(policy: str) -> None:
    """Counted, not timed: steps of the interpreter, and look-ups of keys."""
    few, many = Full(FEW, policy), Full(MANY, policy)
    try:
        for _ in range(3):
            small, large = few.work(), many.work()
            assert len(many.store.host) == MANY
            assert len(few.store.host) == FEW
            assert all(steps and (looks or name in ("poll", "flush", "let go of nobody")) for name, (steps, looks) in small.items())
            assert large == small
    finally:
        few.close()
        many.close()
