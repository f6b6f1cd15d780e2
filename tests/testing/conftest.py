"""A memory backend with four records, and buffers to read them into."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore_sdk.backend import Backend, Deadline, Get, GetResult, Mode, Put, PutResult, Region
from kvstore_sdk_backends.memory import MemoryBackend, open_memory

RECORD_BYTES = 8192


class Bench:
    """Memory for `SLOTS` records, and one-line puts and gets."""

    SLOTS = 16

    def __init__(self) -> None:
        self.region = Region(self.SLOTS * RECORD_BYTES)

    def put(self, name: str, slot: int = 0, mode: Mode = Mode.CREATE) -> Put:
        return Put(name, (self.region.buffer(slot * RECORD_BYTES, RECORD_BYTES),), mode)

    def get(self, name: str, slot: int = 0) -> Get:
        return Get(name, (self.region.buffer(slot * RECORD_BYTES, RECORD_BYTES),))

    def fill(self, slot: int, record: bytes) -> None:
        self.region.view[slot * RECORD_BYTES : slot * RECORD_BYTES + len(record)] = record

    def read(self, slot: int = 0) -> bytes:
        return bytes(self.region.view[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES])

    def fetch(self, backend: Backend, name: str, slot: int = 0, timeout_s: float = 30.0) -> tuple[GetResult, bytes]:
        [result] = backend.get([self.get(name, slot)], Deadline.after(timeout_s))
        return result, self.read(slot)

    def store(self, backend: Backend, name: str, record: bytes, timeout_s: float = 30.0) -> PutResult:
        self.fill(15, record)
        [result] = backend.put([self.put(name, 15)], Deadline.after(timeout_s))
        return result

    @staticmethod
    def record(name: str) -> bytes:
        """What the record `name` holds: its name, again and again."""
        return (name.encode() * RECORD_BYTES)[:RECORD_BYTES]


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.region.close()


@pytest.fixture
def inner(bench: Bench) -> MemoryBackend:
    """A memory backend with the records `a`, `b`, `c` and `d`."""
    backend = open_memory("")
    for name in "abcd":
        bench.store(backend, name, bench.record(name))
    return backend
