"""Memory that backends read from and write into."""

from __future__ import annotations

import ctypes
import mmap
import os

import pytest

from kvstore_sdk.backend import Region


def test_a_region_is_page_aligned_zeroed_and_whole_pages() -> None:
    region = Region(5000)
    assert region.size_bytes == 2 * mmap.PAGESIZE
    assert region.address % mmap.PAGESIZE == 0
    assert bytes(region.view) == bytes(region.size_bytes)
    assert region.view.format == "B"
    region.close()


def test_view_address_and_descriptor_are_the_same_memory() -> None:
    """A C library, another process and a memoryview must see one and the same byte."""
    region = Region(8192)
    part = region.buffer(4096, 16)
    part.view[:4] = b"abcd"
    assert ctypes.string_at(part.address, 4) == b"abcd"
    assert os.pread(region.fd, 4, 4096) == b"abcd"
    region.close()


def test_ids_are_never_used_twice() -> None:
    regions = [Region(1) for _ in range(3)]
    for region in regions:
        region.close()
    ids = [region.id for region in [*regions, Region(1)]]
    assert len(set(ids)) == 4


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, -1), (0, 4097), (4096, 1), (1 << 40, 1), (1, 4096)])
def test_a_buffer_outside_the_region_is_refused(offset: int, length: int) -> None:
    """Slicing would clip silently, and a short buffer would pass for a whole one."""
    region = Region(4096)
    with pytest.raises(ValueError, match="outside its 4096 bytes"):
        region.buffer(offset, length)
    region.close()


def test_an_empty_buffer_at_the_end_is_none() -> None:
    region = Region(4096)
    assert bytes(region.buffer(4096, 0).view) == b""
    region.close()


@pytest.mark.parametrize("size", [0, -1])
def test_a_region_has_a_size(size: int) -> None:
    with pytest.raises(ValueError, match="size_bytes"):
        Region(size)


def test_close_is_idempotent_and_pulls_no_memory_from_under_a_view() -> None:
    """LEAK-06: a call that still runs must not be killed by a shutdown."""
    region = Region(4096)
    held = region.buffer(0, 4).view
    held[:] = b"live"
    region.close()
    region.close()
    assert bytes(held) == b"live"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(region.fd)


def test_a_region_is_not_inherited_by_other_programs() -> None:
    region = Region(4096)
    assert not os.get_inheritable(region.fd)
    region.close()


def test_a_region_of_an_fd_is_the_same_memory_and_owns_the_fd() -> None:
    region = Region(8192)
    again = Region.from_fd(os.dup(region.fd), 8192)
    again.view[5000] = 7
    assert region.view[5000] == 7
    assert (again.size_bytes, again.address % mmap.PAGESIZE) == (8192, 0)
    assert again.id != region.id
    assert not os.get_inheritable(again.fd)
    region.close()
    again.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(again.fd)


@pytest.mark.parametrize("size", [0, -4096, 4097, 8192 + 4096])
def test_memory_beyond_the_end_of_a_file_is_refused(size: int) -> None:
    """It could be mapped, and its first touch would end the process."""
    region = Region(8192)
    fd = os.dup(region.fd)
    with pytest.raises(ValueError, match=r"of the 8192 bytes that rank 3 has"):
        Region.from_fd(fd, size, "rank 3")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    region.close()


def test_a_pipe_is_no_memory() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with pytest.raises(ValueError, match="of the 0 bytes"):
        Region.from_fd(writing, 4096)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(writing)
