"""Memory that was given back is touched by nobody."""

from __future__ import annotations

import random
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_sdk_backends.s3 import memory as module
from kvstore_sdk_backends.s3.memory import COPY_BYTES, ItemMemory, ReturnedError

SIZE = 3 * COPY_BYTES + 17


@given(st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE), st.integers(0, 255))))
def test_it_holds_what_a_plain_buffer_holds_after_the_same_writes(writes: list[tuple[int, int, int]]) -> None:
    model, memory = bytearray(SIZE), ItemMemory(memoryview(bytearray(SIZE)))
    for start, length, fill in writes:
        length = min(length, SIZE - start)
        data = bytes([fill]) * length
        model[start : start + length] = data
        memory.write(start, data)
        assert memory.read(start, length) == data
    assert memory.read(0, SIZE) == model


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_it_takes_what_libraries_hand_out(kind: type) -> None:
    data = random.Random(1).randbytes(SIZE)
    memory = ItemMemory(memoryview(bytearray(SIZE)))
    memory.write(0, kind(data))
    assert memory.read(0, SIZE) == data


@pytest.mark.parametrize(("start", "length"), [(-1, 1), (0, 11), (10, 1), (5, -1)])
def test_a_range_outside_is_refused_and_nothing_is_written(start: int, length: int) -> None:
    target = bytearray(b"\xee" * 10)
    memory = ItemMemory(memoryview(target))
    with pytest.raises(ValueError, match=r"outside its 10 bytes"):
        memory.read(start, length)
    if length > 0:
        with pytest.raises(ValueError, match=r"outside its 10 bytes"):
            memory.write(start, b"x" * length)
    assert target == b"\xee" * 10


def test_what_was_read_is_a_copy() -> None:
    target = bytearray(b"before")
    read = ItemMemory(memoryview(target)).read(0, 6)
    target[:] = b"after."
    assert read == b"before"


def test_after_giving_back_every_access_is_refused() -> None:
    target = bytearray(8)
    memory = ItemMemory(memoryview(target))
    memory.give_back()
    memory.give_back()
    with pytest.raises(ReturnedError):
        memory.read(0, 8)
    with pytest.raises(ReturnedError):
        memory.write(0, b"x")
    # Nobody holds a view of it any more: it may be resized, unmapped, freed.
    target.clear()
    assert memory.size_bytes == 8


@pytest.mark.parametrize("seed", range(30))
def test_a_copy_under_way_ends_before_giving_back_returns(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Small pieces: many points at which the owner can come between.
    monkeypatch.setattr(module, "COPY_BYTES", 512)
    rng = random.Random(seed)
    size = 1 << 18
    target = bytearray(size)
    memory = ItemMemory(memoryview(target))
    started, refusals = threading.Barrier(4), []

    def write() -> None:
        data = b"\xaa" * size
        started.wait(10)
        try:
            while True:
                memory.write(0, data)
        except ReturnedError as error:
            refusals.append(error)

    def read() -> None:
        started.wait(10)
        try:
            while True:
                seen = memory.read(0, size)
                assert 0x55 not in seen, "the new owner's bytes were read"
        except ReturnedError as error:
            refusals.append(error)

    threads = [threading.Thread(target=step) for step in (write, write, read)]
    for thread in threads:
        thread.start()
    started.wait(10)
    threading.Event().wait(rng.random() * 0.01)
    memory.give_back()
    target[:] = b"\x55" * size
    for thread in threads:
        thread.join(20)
    assert len(refusals) == 3
    assert target == b"\x55" * size
