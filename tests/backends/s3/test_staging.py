"""Memory that tells how long the object was that was read into it."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_sdk.backend import Deadline
from kvstore_sdk_backends.s3.staging import PageMap, Staging

LEFT = b"\x01" * 64
SOON = Deadline.after(3600)


@pytest.fixture(scope="module")
def pages() -> Iterator[PageMap]:
    found = PageMap()
    yield found
    found.close()


@pytest.fixture(scope="module")
def staging(pages: PageMap) -> Staging:
    return Staging(1 << 16, pages)


def arrive(staging: Staging, size_bytes: int, body: bytes) -> int:
    """What a request for `size_bytes` and one more does with the body of an object. Returns the last byte before it."""
    staging.expect()
    before = ctypes.string_at(staging.start(1), 1)[0]
    ctypes.memmove(staging.start(size_bytes), body, min(len(body), size_bytes + 1))
    return before


def taken_out(staging: Staging, size_bytes: int) -> bytes:
    into = ctypes.create_string_buffer(size_bytes)
    assert staging.take_out(ctypes.addressof(into), size_bytes, SOON)
    return into.raw


def test_this_machine_tells_what_was_touched(staging: Staging) -> None:
    assert staging.works()
    assert staging.works()


@given(size_bytes=st.integers(1, 1 << 16), other=st.integers(-3, 3), fill=st.binary(min_size=1, max_size=8))
def test_a_body_of_another_length_is_never_exact_whatever_its_bytes(staging: Staging, size_bytes: int, other: int, fill: bytes) -> None:
    length = max(size_bytes + other, 0)
    body = (fill * (length // len(fill) + 1))[:length]
    before = arrive(staging, size_bytes, body)
    # The last byte may be what was there before: then it cannot be told that it arrived.
    assert staging.is_exact() == (length == size_bytes and body[-1] != before)


@pytest.mark.parametrize("beyond", [0, 255])
def test_one_byte_too_many_is_seen_whatever_it_is_and_does_not_spoil_the_next(staging: Staging, beyond: int) -> None:
    for _ in range(3):
        arrive(staging, 100, bytes(100) + bytes([beyond]))
        assert not staging.is_exact()
    exact = 0
    for _ in range(20):
        before = arrive(staging, 100, LEFT + bytes(36))
        exact += staging.is_exact()
        assert staging.is_exact() == (before != 0)
    assert exact


def test_a_record_that_was_there_before_is_not_taken_for_one_that_did_not_arrive(staging: Staging) -> None:
    record = bytes(range(200))
    while arrive(staging, 200, record) == record[-1]:
        pass
    assert staging.is_exact()
    assert taken_out(staging, 200) == record
    staging.expect()
    assert not staging.is_exact()


def test_records_of_any_length_go_in_and_out(staging: Staging) -> None:
    for size_bytes in (1, 63, 4096, 4097, 1 << 16):
        record = bytes(at * 31 % 251 for at in range(size_bytes))
        source = ctypes.create_string_buffer(record, size_bytes)
        assert staging.put_in(ctypes.addressof(source), size_bytes, SOON)
        assert taken_out(staging, size_bytes) == record
        assert ctypes.string_at(staging.start(size_bytes), size_bytes) == record


def test_a_copy_ends_at_its_deadline(staging: Staging) -> None:
    memory = ctypes.create_string_buffer(b"x" * 100, 100)
    late = Deadline.after(-1)
    staging.put_in(ctypes.addressof(memory), 100, SOON)
    assert not staging.take_out(ctypes.addressof(memory), 100, late)
    ctypes.memset(memory, 0, 100)
    assert not staging.put_in(ctypes.addressof(memory), 100, late)
    assert taken_out(staging, 100) == b"x" * 100


def test_a_guard_that_was_locked_is_told_from_one_that_works(pages: PageMap) -> None:
    staging = Staging(1 << 12, pages)
    assert staging.works()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlock(ctypes.c_void_p(staging.address + (1 << 12)), 1):
        pytest.skip("this process may lock no memory")
    assert not staging.works()
    with pytest.raises(OSError, match="Invalid argument"):
        staging.is_exact()


def test_room_is_whole_pages_and_only_what_is_used_is_committed(pages: PageMap) -> None:
    large = Staging((1 << 30) + 1, pages)
    assert large.capacity_bytes == (1 << 30) + mmap.PAGESIZE
    source = ctypes.create_string_buffer(b"x" * 10_000, 10_000)
    assert large.put_in(ctypes.addressof(source), 10_000, SOON)
    assert pages.touched(large.start(1))
    assert not pages.touched(large.start(1 << 20))


def test_the_page_map_closes_its_file() -> None:
    found = PageMap()
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    found.close()
    found.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        found.touched(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
