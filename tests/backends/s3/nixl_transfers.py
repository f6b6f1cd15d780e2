"""Transfers of NIXL one at a time, and memory as a caller has it."""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fault_proxy import FaultProxy
from s3_server import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY

from kvstore_sdk.backend import Deadline
from kvstore_sdk_backends.s3.nixl_agent import Slot, State
from kvstore_sdk_backends.s3.nixl_agents import NixlAgents

__all__ = ["RECORD", "SOON", "WAIT_S", "Memory", "ended", "making", "parameters", "read", "taken", "until", "write"]

WAIT_S = 30.0
SOON = Deadline.after(3600)
RECORD = random.Random(5).randbytes(300_001)


def parameters(endpoint: str, bucket: str, **others: str) -> Callable[[], dict[str, str]]:
    return lambda: {
        "access_key": ACCESS_KEY_ID,
        "secret_key": SECRET_ACCESS_KEY,
        "bucket": bucket,
        "endpoint_override": endpoint,
        "scheme": "http",
        "region": REGION,
        "req_checksum": "required",
        **others,
    }


@contextmanager
def making(proxy: FaultProxy, bucket: str) -> Iterator[Callable[[int], NixlAgents]]:
    """Makes agents for so many transfers at a time, which are closed at the end."""
    made: list[NixlAgents] = []

    def make_it(concurrency: int) -> NixlAgents:
        made.append(NixlAgents(parameters(proxy.endpoint, bucket), concurrency))
        return made[-1]

    yield make_it
    proxy.heal()
    for agents in made:
        agents.close()


class Memory:
    """A record of the caller."""

    def __init__(self, content: bytes | int) -> None:
        self._buffer = ctypes.create_string_buffer(content, len(content) if isinstance(content, bytes) else content)
        self.address = ctypes.addressof(self._buffer)
        self.size_bytes = len(self._buffer)

    @property
    def content(self) -> bytes:
        return self._buffer.raw


def taken(agents: NixlAgents, size_bytes: int = len(RECORD)) -> Slot:
    slot = agents.take("READ", size_bytes)
    assert slot is not None
    return slot


def until(done: Callable[[], bool]) -> None:
    limit_s = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < limit_s, "it does not come to that"
        time.sleep(0.005)


def ended(slot: Slot) -> State:
    found = State.RUNNING

    def is_over() -> bool:
        nonlocal found
        found = slot.state()
        return found is not State.RUNNING

    until(is_over)
    return found


def write(agents: NixlAgents, key: str, content: bytes) -> State:
    memory, slot = Memory(content), taken(agents, len(content))
    slot.begin("WRITE", key, memory.address, memory.size_bytes, SOON)
    state = ended(slot)
    slot.give_back()
    return state


def read(agents: NixlAgents, key: str, size_bytes: int) -> bytes | State:
    """The record, or how the READ ended without one."""
    memory, slot = Memory(size_bytes), taken(agents, size_bytes)
    # A last byte that is not changed cannot be told from one that did not come: one READ in 256 says nothing.
    for _ in range(5):
        slot.begin("READ", key, memory.address, size_bytes, SOON)
        state = ended(slot)
        if state is State.DONE and slot.take_out(memory.address, size_bytes, SOON):
            slot.give_back()
            return memory.content
    assert memory.content == bytes(size_bytes), "what is no record was copied"
    slot.give_back()
    return state
