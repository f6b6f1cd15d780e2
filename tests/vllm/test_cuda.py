"""Copies by a GPU's copy engines, against a CUDA runtime that is played: its streams run when they are told to, and on host memory.

What only hardware can show is not shown here: that the driver takes these arrays, and how fast it is.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from offload_world import STALE, World, device, is_unmapped, random_pages

from kvstore_sdk.backend import Region
from kvstore_sdk.errors import ConfigError
from kvstore_sdk.layout import AttentionShape, Topology
from kvstore_sdk.vllm.offloading import cuda
from kvstore_sdk.vllm.offloading.copies import Copies, DevicePages
from kvstore_sdk.vllm.offloading.cuda import CudaMover

FOUR = AttentionShape(layers=2, blocks=4, block_tokens=4, heads=2, token_head_bytes=6)


class Stream:
    """Work that was given to a stream, done in order and only on demand."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.priority = priority
        self.queue: list[Callable[[], Any]] = []

    def wait_stream(self, other: Stream) -> None:
        """All that the other one has been given by now comes first."""
        for number in range(len(other.queue)):
            self.queue.append(lambda number=number: other.run(number + 1 - other.ran))  # type: ignore[misc]

    ran = 0

    def run(self, count: int | None = None) -> None:
        for _ in range(len(self.queue) - self.ran if count is None else max(0, count)):
            work = self.queue[self.ran]
            self.ran += 1
            work()

    def synchronize(self) -> None:
        self.run()


class Event:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.happened, self.at = False, 0
        self.stream: Stream | None = None

    def record(self, stream: Stream) -> None:
        self.stream = stream
        self.at = len(stream.queue)
        stream.queue.append(self._happen)

    def _happen(self) -> None:
        self.happened = True

    def query(self) -> bool:
        return self.happened

    def synchronize(self) -> None:
        assert self.stream is not None
        self.stream.run(self.at + 1 - self.stream.ran)

    def elapsed_time(self, end: Event) -> float:
        assert self.happened
        assert end.happened
        return 1500.0


class Cuda:
    """As much of `torch.cuda` as is used."""

    Event = Event

    def __init__(self, register_codes: tuple[int, ...] = ()) -> None:
        self.compute = Stream()
        self.streams: list[Stream] = []
        self.current = self.compute
        self.pinned: dict[int, int] = {}
        self.log: list[str] = []
        self.batches: list[tuple[int, bool]] = []
        self._codes = list(register_codes)

    def Stream(self, device: Any, priority: int) -> Stream:
        self.streams.append(Stream(device, priority))
        return self.streams[-1]

    def current_stream(self, device: Any) -> Stream:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def cudart(self) -> Any:
        return SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self._unregister)

    def batch(self, sources: Any, targets: Any, sizes: Any, is_src_access_order_any: bool) -> None:
        """vLLM's operator, which takes pointers; everything it would tell the driver is checked here."""
        for array in (sources, targets, sizes):
            assert (array.dtype, array.device.type, array.is_contiguous()) == (torch.int64, "cpu", True)
        self.batches.append((len(sizes), is_src_access_order_any))

        def move() -> None:
            self.log.append("copy")
            for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
                ctypes.memmove(target, source, size)

        self.current.queue.append(move)

    def _register(self, address: int, size: int, flags: int) -> Any:
        code = self._codes.pop(0) if self._codes else 0
        if not code:
            self.pinned[address] = size
        return SimpleNamespace(value=code)

    def _unregister(self, address: int) -> Any:
        self.log.append("unregister")
        del self.pinned[address]
        return SimpleNamespace(value=0)


class Stand:
    """A worker on a played GPU."""

    def __init__(self, topology: Topology | None = None, batch: bool = True, **options: Any) -> None:
        self.cuda = Cuda()

        def mover(pages: Any, region: Region) -> CudaMover:
            # Without an operator, as in this build of vLLM, the copies are torch's own: they are over at once on host memory.
            return CudaMover(pages, region, self.cuda, self.cuda.batch if batch else None)

        self.world = World([FOUR], [topology or Topology(1, (2,))], mover=mover, **options)
        self.worker = self.world.workers[0]
        self.stores, self.loads = self.cuda.streams[:2]

    def finished(self) -> list[int]:
        return [result.job_id for result in self.worker.get_finished()]


@pytest.fixture
def stand() -> Iterator[Callable[..., Stand]]:
    built: list[Stand] = []

    def build(**options: Any) -> Stand:
        built.append(Stand(**options))
        return built[-1]

    yield build
    for made in built:
        made.world.close()


@pytest.mark.parametrize("batch", [True, False], ids=["one batch", "one by one"])
def test_a_chunk_goes_to_its_slot_and_back(stand: Callable[..., Stand], batch: bool) -> None:
    made = stand(batch=batch)
    rng = np.random.default_rng(1)
    content = [random_pages(FOUR, rng) for _ in range(8)]
    for block, pages in zip([3, 4, 5, 9, 0, 1, 2, 6], content, strict=True):
        made.world.compute(0, block, pages)
    made.worker.submit_store(1, device([[3, 4, 5, 9, 0, 1, 2, 6]], [0]), made.world.slots([5, 2], 1))
    made.stores.run()
    assert made.finished() == [1]
    made.worker.submit_load(2, made.world.slots([5, 2]), device([[20, 12, 13, 14, 15]], [3]))
    made.loads.run()
    assert made.finished() == [2]
    for block, pages in zip([20, 12, 13, 14, 15], content[3:], strict=True):
        assert made.world.holds(0, block, pages)


def test_a_store_is_marked_and_reported_only_when_its_bytes_are_there(stand: Callable[..., Stand]) -> None:
    """Whoever believed a mark that came first would read another chunk's bytes."""
    made = stand()
    made.world.compute(0, 1, random_pages(FOUR, np.random.default_rng(2)))
    made.worker.submit_store(1, device([[1]], [3]), made.world.slots([5], 4))
    assert made.finished() == []
    assert made.world.marks.read([5], 4) == ({5}, set())
    chunk = np.frombuffer(made.world.payload(5), np.uint8).reshape(2, 4, -1)
    assert not chunk[:, :3].any(), "what no block goes with is zero whenever the copy comes"
    assert (chunk[:, 3] == STALE).all()
    made.stores.run()
    assert made.world.marks.read([5], 4) == ({5}, set()), "the host has not looked yet"
    (result,) = made.worker.get_finished()
    assert (result.job_id, result.success, result.transfer_size, result.transfer_time) == (1, True, 2 * 48, 1.5)
    assert made.world.marks.read([5], 4) == (set(), {5})
    assert made.finished() == []


def test_both_directions_come_after_what_was_given_to_the_device_before(stand: Callable[..., Stand]) -> None:
    """A store must see blocks that were computed; a load must not be overwritten by what was done before to blocks that changed hands."""
    made = stand()
    pages = random_pages(FOUR, np.random.default_rng(3))
    made.cuda.compute.queue.append(lambda: made.world.compute(0, 1, pages))
    made.worker.submit_store(1, device([[1]], [0]), made.world.slots([5], 1))
    made.cuda.compute.queue.append(lambda: made.world.compute(0, 1, random_pages(FOUR, np.random.default_rng(4))))
    made.stores.run()
    chunk = np.frombuffer(made.world.payload(5), np.uint8).reshape(2, 4, -1)
    assert [page.tobytes() for page in chunk[:, 0]] == [page.tobytes() for page in pages]
    zeroed = [np.zeros_like(page) for page in pages]
    made.cuda.compute.queue.append(lambda: made.world.compute(0, 7, zeroed))
    made.worker.submit_load(2, made.world.slots([5]), device([[7]], [0]))
    made.loads.run()
    made.cuda.compute.run()
    assert made.world.holds(0, 7, pages)


def test_jobs_end_in_their_own_time_and_each_is_reported_once(stand: Callable[..., Stand]) -> None:
    made = stand()
    made.worker.submit_store(1, device([range(4)], [0]), made.world.slots([5], 1))
    made.worker.submit_load(2, made.world.slots([3]), device([range(8, 12)], [0]))
    made.worker.submit_store(3, device([range(4, 8)], [0]), made.world.slots([6], 2))
    made.loads.run()
    assert made.finished() == [2]
    made.worker.wait({1, 2, 77})
    assert made.finished() == [1]
    assert made.world.marks.read([5], 1) == (set(), set())
    made.worker.wait({3})
    assert made.finished() == [3]
    assert made.finished() == []


@pytest.mark.parametrize("first", ["store", "load"])
def test_a_slot_that_is_still_in_use_is_written_only_after_that(stand: Callable[..., Stand], first: str) -> None:
    """After a reset the engine may give a slot to another chunk while a forgotten transfer is under way."""
    made = stand()
    rng = np.random.default_rng(5)
    old, new = random_pages(FOUR, rng), random_pages(FOUR, rng)
    for block in range(4):
        made.world.compute(0, block, old)
    made.world.compute(0, 9, new)
    if first == "load":
        made.worker.submit_store(1, device([range(4)], [0]), made.world.slots([5], 1))
        made.stores.run()
        made.worker.submit_load(2, made.world.slots([5]), device([range(12, 16)], [0]))
    else:
        made.worker.submit_store(1, device([range(4)], [0]), made.world.slots([5], 1))
    made.worker.submit_store(3, device([range(4, 8)], [0]), made.world.slots([2], 2))
    assert made.finished() == ([1] if first == "load" else [])
    made.worker.submit_store(4, device([[9]], [3]), made.world.slots([5], 3))
    made.loads.run()
    made.stores.run()
    chunk = np.frombuffer(made.world.payload(5), np.uint8).reshape(2, 4, -1)
    assert not chunk[:, :3].any()
    assert [page.tobytes() for page in chunk[:, 3]] == [page.tobytes() for page in new]
    assert first == "store" or all(made.world.holds(0, block, old) for block in range(12, 16))
    made.finished()
    assert made.world.marks.read([5], 3) == (set(), {5})


def test_each_transfer_is_one_batch_and_only_loads_may_be_read_ahead(stand: Callable[..., Stand]) -> None:
    """What a store reads changes until its stream's turn has come."""
    made = stand(pad=0)
    made.worker.submit_store(1, device([[0, 1, 2, 3, 8, 9, 6, 7]], [0]), made.world.slots([5, 0], 1))
    made.worker.submit_load(2, made.world.slots([3]), device([[0, 2, 4, 6]], [0]))
    assert made.cuda.batches == [(2 * (1 + 2), False), (2 * 4, True)]
    assert made.loads.priority < made.stores.priority, "lower numbers go first"


def test_an_empty_transfer_ends_too(stand: Callable[..., Stand]) -> None:
    made = stand()
    made.worker.submit_load(1, made.world.slots([]), device([[]], [0]))
    made.loads.run()
    assert made.finished() == [1]
    assert made.cuda.batches == []


def test_shutdown_ends_what_is_under_way_before_memory_goes(stand: Callable[..., Stand]) -> None:
    made = stand()
    address, size = made.world.region.address, made.world.region.size_bytes
    assert made.cuda.pinned == {address: size}
    made.worker.submit_store(1, device([range(4)], [0]), made.world.slots([5], 1))
    made.worker.shutdown()
    made.worker.shutdown()
    assert made.cuda.log == ["copy", "unregister"]
    assert made.cuda.pinned == {}
    assert made.finished() == []


def test_no_copy_crosses_from_one_pinned_piece_into_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver refuses a copy over two registrations."""
    monkeypatch.setattr(cuda, "PINNED_PIECE_BYTES", 4096)
    played, region = Cuda(), Region(3 * 4096)
    tensor = torch.arange(2 * 3000, dtype=torch.int32).to(torch.int8).view(2, 3000)
    seen: list[tuple[list[int], list[int]]] = []

    def batch(sources: Any, targets: Any, sizes: Any, is_src_access_order_any: bool) -> None:
        seen.append((targets.tolist(), sizes.tolist()))
        played.batch(sources, targets, sizes, is_src_access_order_any)

    mover = CudaMover([DevicePages(tensor, 2, 3000)], region, played, batch)
    assert played.pinned == {region.address + at: 4096 for at in (0, 4096, 8192)}
    copies = Copies(*np.array([[0, 0, 100, 3000], [0, 3000, 3100, 3000]], np.int64).T)
    motion = mover.store(copies)
    assert not motion.done()
    motion.wait()
    assert motion.done()
    assert bytes(region.view[100:6100]) == tensor.numpy().tobytes()
    (targets, sizes), start = seen[0], region.address
    assert sorted(zip(targets, sizes, strict=True)) == [(start + 100, 3000), (start + 3100, 996), (start + 4096, 2004)]
    mover.close()
    mover.close()
    assert played.pinned == {}
    region.close()
    assert is_unmapped(region)


def test_memory_that_cannot_be_pinned_is_refused_and_nothing_stays_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "PINNED_PIECE_BYTES", 4096)
    played, region = Cuda(register_codes=(0, 0, 2)), Region(3 * 4096)
    with pytest.raises(ConfigError, match=r"cpu_bytes_to_use: 12288 bytes of host memory cannot be pinned .CUDA error 2."):
        CudaMover([DevicePages(torch.zeros((1, 8), dtype=torch.int8), 1, 8)], region, played, played.batch)
    assert played.pinned == {}
    region.close()
    assert is_unmapped(region)


def test_without_vllms_operator_copies_are_made_one_by_one() -> None:
    """As on this machine: the CPU build of vLLM has none."""
    assert cuda._vllm_batch() is None


def test_vllms_operator_is_used_where_this_build_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import _custom_ops as operators

    monkeypatch.setattr(cuda.torch.ops, "_C_cache_ops", SimpleNamespace(swap_blocks_batch=object()), raising=False)
    assert cuda._vllm_batch() is operators.swap_blocks_batch
