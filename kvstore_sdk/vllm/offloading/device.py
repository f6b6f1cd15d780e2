"""The worker's side: blocks of one rank's KV tensors to and from slots of the shared region."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvstore_sdk.backend import Region
from kvstore_sdk.errors import ConfigError
from kvstore_sdk.vllm import compat
from kvstore_sdk.vllm.offloading.copies import Copies, DevicePages, RankMap
from kvstore_sdk.vllm.offloading.cuda import CudaMover
from kvstore_sdk.vllm.offloading.marks import MAX_SEQUENCE, Marks
from kvstore_sdk.vllm.offloading.plan import Plan, read_plan
from kvstore_sdk.vllm.offloading.transfers import SlotSpec

__all__ = ["DeviceCopies", "HostMover", "Motion", "Mover", "TorchMover", "copy_in_host"]

logger = logging.getLogger(__name__)

_WHERE = "kvstore offloading"


class Motion(Protocol):
    """Copies that were started together."""

    def done(self) -> bool:
        """Whether all bytes are where they belong. Never blocks."""
        ...

    def wait(self) -> None:
        """Return once they are."""
        ...

    def seconds(self) -> float:
        """How long it took; asked once, when it is done."""
        ...


class Mover(Protocol):
    """Moves bytes between the tensors of a device and the region. What is started in one direction ends in that order."""

    def store(self, copies: Copies) -> Motion:
        """Start copies into the region, of what the device computed up to now."""
        ...

    def load(self, copies: Copies) -> Motion:
        """Start copies into the tensors, after what the device does with them up to now."""
        ...

    def close(self) -> None:
        """Let everything that was started end, then let go of the tensors and of the region. Idempotent."""
        ...


class _Done(NamedTuple):
    elapsed_s: float

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return

    def seconds(self) -> float:
        return self.elapsed_s


def copy_in_host(tensors: Sequence[memoryview], region: memoryview, copies: Copies, *, store: bool) -> None:
    """Copy between tensors and a region that both lie in host memory, as bytes. What lies outside of either is refused.

    Raises:
        ValueError: a copy names bytes that are not there. Those before it were made.
    """
    stretches = (copies.tensor, copies.device, copies.device + copies.bytes, copies.host, copies.host + copies.bytes)
    lists = zip(*(array.tolist() for array in stretches), strict=True)
    # Slices of memory views cost the least of all ways that Python has, and refuse what lies outside.
    if store:
        for tensor, start, end, host, host_end in lists:
            region[host:host_end] = tensors[tensor][start:end]
    else:
        for tensor, start, end, host, host_end in lists:
            tensors[tensor][start:end] = region[host:host_end]


class HostMover:
    """For tensors in host memory: copies at once, in the calling thread.

    The model computes in the same thread, so a copy sees every block complete, and a block is free when the copy returns.
    """

    def __init__(self, pages: Sequence[DevicePages], region: Region) -> None:
        self._region: memoryview | None = region.view
        self._tensors = [memoryview(found.flat().numpy()).cast("B") for found in pages]

    def store(self, copies: Copies) -> Motion:
        return self._copy(copies, store=True)

    def load(self, copies: Copies) -> Motion:
        return self._copy(copies, store=False)

    def close(self) -> None:
        self._region, self._tensors = None, []

    def _copy(self, copies: Copies, *, store: bool) -> Motion:
        started = time.perf_counter()
        region, tensors = self._region, self._tensors
        if region is None:
            raise ValueError("HostMover: it was closed")
        copy_in_host(tensors, region, copies, store=store)
        return _Done(time.perf_counter() - started)


class TorchMover:
    """For tensors on a device that torch can copy from and to: one copy after another, in the calling thread, each over when it returns.

    Torch orders a copy after what the device was told to compute, and waits for it where host memory is not pinned. That holds up the
    thread that computes: it is for devices without a mover of their own. It was tested with tensors in host memory, on no such device.
    """

    def __init__(self, pages: Sequence[DevicePages], region: Region) -> None:
        self._host = torch.frombuffer(region.view, dtype=torch.int8)
        self._tensors = [found.flat() for found in pages]

    def store(self, copies: Copies) -> Motion:
        return self._copy(copies, store=True)

    def load(self, copies: Copies) -> Motion:
        return self._copy(copies, store=False)

    def close(self) -> None:
        self._host, self._tensors = torch.empty(0, dtype=torch.int8), []

    def _copy(self, copies: Copies, *, store: bool) -> Motion:
        started = time.perf_counter()
        for tensor, device, host, size in zip(*(array.tolist() for array in copies), strict=True):
            there, here = self._tensors[tensor][device : device + size], self._host[host : host + size]
            if store:
                here.copy_(there)
            else:
                there.copy_(here)
        return _Done(time.perf_counter() - started)


class _Job(NamedTuple):
    """A transfer under way; `numbers` and `lacks` of a store are what to mark once it is over."""

    job_id: int
    motion: Motion
    bytes: int
    sequence: int
    numbers: npt.NDArray[np.int32]
    lacks: npt.NDArray[np.bool_]


class DeviceCopies:
    """What the connector drives in each worker: the methods of vLLM's `OffloadingWorker`.

    Each job is reported once, and always as a success: vLLM knows no failed transfer. What a store lacks is said by its marks, which are
    set when its bytes are in the slot and before it is reported. A transfer that cannot be made raises before a byte is moved: the engine
    could not be told that blocks hold nothing, and must not go on.
    """

    def __init__(
        self,
        kv_caches: Any,
        blocks_per_chunk: int,
        region: Region,
        rank: int,
        world_size: int,
        spare: Sequence[int] = (),
        mover: Callable[[Sequence[DevicePages], Region], Mover] | None = None,
    ) -> None:
        """Args:
            kv_caches: vLLM's `CanonicalKVCaches`.
            blocks_per_chunk: Blocks of a chunk.
            region: The shared region; this object closes it.
            rank: Of this worker, `stage * tp + tp_rank`.
            world_size: Ranks of the engine.
            spare: Of each group, how many pages at the start of a chunk no reader can need.
            mover: What moves the bytes. Where it is not given, what the device of the tensors needs.

        Raises:
            ConfigError: the tensors lie on a device of another kind than CPU, CUDA and XPU, or cannot be told apart into blocks.
        """
        self._kv_caches: Any = kv_caches
        self._blocks_per_chunk, self._rank, self._world_size, self._spare = blocks_per_chunk, rank, world_size, tuple(spare)
        self._region: Region | None = region
        self._result = compat.transfer_result_class()
        self._mover = (mover or _mover)([DevicePages.of(found) for found in kv_caches.tensors], region)
        self._map: RankMap | None = None
        self._marks: Marks | None = None
        self._jobs: list[_Job] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: SlotSpec) -> bool:
        """Start a copy of blocks into slots, ordered after everything the device was told to compute.

        Raises:
            ConfigError: the plan of the region cannot be read, or is of another engine. Nothing was written.
            ValueError: the transfer does not add up, or names what is not there. Nothing was written.
        """
        (places, region), sequence = self._open(job_id), dst_spec.sequence
        if not 1 <= sequence <= MAX_SEQUENCE:
            raise ValueError(f"store {job_id}: sequence {sequence} is not from 1 to {MAX_SEQUENCE}")
        found = places.store(src_spec, dst_spec)
        self._settle(dst_spec.numbers)
        # A slot is reused for chunks of any request: what a store leaves as it was would be another's bytes, and would be kept.
        for offset, size in zip(*(array.tolist() for array in found.zeros), strict=True):
            region.view[offset : offset + size] = bytes(size)
        self._jobs.append(_Job(job_id, self._mover.store(found.copies), found.copies.total_bytes, sequence, dst_spec.numbers, found.lacks))
        return True

    def submit_load(self, job_id: int, src_spec: SlotSpec, dst_spec: Any, expedited: bool = False) -> bool:
        """Start a copy of slots into blocks, after what the device still does with those blocks. Every load is expedited.

        Raises:
            ConfigError, ValueError: as for `submit_store`. No block was touched.
        """
        places, _ = self._open(job_id)
        copies = places.load(dst_spec, src_spec)
        self._jobs.append(_Job(job_id, self._mover.load(copies), copies.total_bytes, 0, src_spec.numbers, np.empty(0, np.bool_)))
        return True

    def get_finished(self) -> list[Any]:
        """Results of the jobs that ended since the last call, each once."""
        results, running = [], []
        for job in self._jobs:
            if not job.motion.done():
                running.append(job)
                continue
            # There are marks since the first transfer. A store without would be dropped.
            if job.sequence and self._marks is not None:
                self._marks.mark(self._rank, job.numbers, job.sequence, job.lacks)
            results.append(
                self._result(job_id=job.job_id, success=True, transfer_size=job.bytes, transfer_time=max(0.0, job.motion.seconds()))
            )
        self._jobs = running
        return results

    def wait(self, job_ids: set[int]) -> None:
        """Return once those of the jobs that are under way have ended. They are reported by `get_finished` all the same."""
        for job in self._jobs:
            if job.job_id in job_ids:
                job.motion.wait()

    def shutdown(self) -> None:
        """Let what is under way end, unreported; then let go of the tensors and unmap the region. Idempotent."""
        region, self._region = self._region, None
        if region is None:
            return
        try:
            self._mover.close()
        finally:
            self._jobs, self._map, self._kv_caches = [], None, None
            if self._marks is not None:
                self._marks.close()
            region.close()

    def _settle(self, numbers: npt.NDArray[np.int32]) -> None:
        """Let transfers end that still use these slots: only after the engine was reset are there any, since their chunks were forgotten.

        One that wrote late would put another chunk's bytes over zeros, and one that read late would see two chunks.
        """
        for job in self._jobs:
            if not job.motion.done() and np.isin(job.numbers, numbers).any():
                job.motion.wait()

    def _open(self, job_id: int) -> tuple[RankMap, Region]:
        """The map of this rank, and the region. The map is made from the plan at the first transfer: the scheduler wrote it before that."""
        if self._region is None:
            raise ValueError(f"transfer {job_id}: the worker was shut down")
        if any(job.job_id == job_id for job in self._jobs):
            raise ValueError(f"transfer {job_id}: a job of this number is under way")
        if self._map is None:
            plan = read_plan(self._region)
            self._check(plan)
            self._map = RankMap(self._kv_caches, plan, self._rank, self._region.size_bytes, self._spare)
            self._marks = Marks(self._region, plan)
        return self._map, self._region

    def _check(self, plan: Plan) -> None:
        ours, theirs = (self._world_size, self._blocks_per_chunk), (plan.world_size, plan.blocks_per_chunk)
        if ours != theirs:
            problem = "this worker has {} ranks and {} blocks a chunk, the plan {} and {}".format(*ours, *theirs)
            raise ConfigError(_WHERE, "plan", problem)


def _mover(pages: Sequence[DevicePages], region: Region) -> Mover:
    kinds = {found.tensor.device.type for found in pages}
    # A rank without a layer moves nothing, wherever that is, and marks what it has to write.
    if kinds <= {"cpu"}:
        return HostMover(pages, region)
    if kinds == {"cuda"}:
        return CudaMover(pages, region)
    if kinds == {"xpu"}:
        logger.warning("%s: on XPU blocks are copied one after another by the thread that computes; nobody has run this there", _WHERE)
        return TorchMover(pages, region)
    raise ConfigError(_WHERE, "device", f"KV tensors on {', '.join(sorted(kinds))}: only cpu, cuda and xpu are known")
