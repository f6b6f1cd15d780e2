"""Copies between the memory of a GPU and the region, asynchronously, on streams of their own.

This module was written against vLLM's interfaces and has not run on hardware: everything up to the calls of the CUDA runtime is tested on
CPU against a runtime that is played.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from kvstore_sdk.backend import Region
from kvstore_sdk.errors import ConfigError
from kvstore_sdk.vllm.offloading.copies import Copies, DevicePages, cut

__all__ = ["PINNED_PIECE_BYTES", "CudaMover"]

logger = logging.getLogger(__name__)

PINNED_PIECE_BYTES = 64 << 30
"""How much is registered in one call, as vLLM does: drivers refuse more. No copy crosses from one piece into the next."""


class _Motion:
    """Copies on a stream, between two events. Holds the arrays of the batch, which the driver may read until the copies are over."""

    def __init__(self, start: Any, end: Any, held: tuple[Any, ...]) -> None:
        self._start, self._end, self._held = start, end, held

    def done(self) -> bool:
        return bool(self._end.query())

    def wait(self) -> None:
        self._end.synchronize()

    def seconds(self) -> float:
        return float(self._start.elapsed_time(self._end)) / 1000


class CudaMover:
    """Moves bytes by the copy engines: one stream a direction, one batch a transfer.

    Both directions are ordered after the stream that the model computes on, as it is when a transfer is started: a store must see blocks
    that were computed, and a load must not be overwritten by what was done before to blocks that changed hands. Loads have a request
    waiting, so their stream goes first.
    """

    def __init__(
        self, pages: Sequence[DevicePages], region: Region, cuda: Any = torch.cuda, batch: Callable[..., None] | None = None
    ) -> None:
        """Pin the region and make the streams.

        Args:
            pages: The tensors, all on one device.
            region: The shared region.
            cuda: The CUDA runtime.
            batch: Copies arrays of pointers: `batch(sources, targets, sizes, is_src_access_order_any=...)`. Where it is not given, vLLM's
                operator, or one copy after another where this build of vLLM has none.

        Raises:
            ConfigError: the region cannot be pinned. From other memory copies would hold up the thread that computes.
        """
        self._cuda, self._device = cuda, pages[0].tensor.device
        self._bases = np.array([found.tensor.data_ptr() for found in pages], np.int64)
        self._tensors = [found.flat() for found in pages]
        self._address = region.address
        self._host = torch.frombuffer(region.view, dtype=torch.int8)
        self._batch = batch or _vllm_batch()
        self._piece_bytes = PINNED_PIECE_BYTES
        self._pinned = _pin(cuda, region.address, region.size_bytes, self._piece_bytes)
        # Torch numbers priorities downwards: 0 is the least.
        self._stores = cuda.Stream(device=self._device, priority=0)
        self._loads = cuda.Stream(device=self._device, priority=-1)
        self._open = True

    def store(self, copies: Copies) -> _Motion:
        return self._start(self._stores, copies, store=True)

    def load(self, copies: Copies) -> _Motion:
        return self._start(self._loads, copies, store=False)

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        try:
            self._stores.synchronize()
            self._loads.synchronize()
        finally:
            # Only now: memory that a copy still touches must stay pinned and mapped.
            _unpin(self._cuda, self._pinned)
            self._pinned, self._tensors, self._host = [], [], torch.empty(0, dtype=torch.int8)

    def _start(self, stream: Any, copies: Copies, *, store: bool) -> _Motion:
        copies = cut(copies, self._piece_bytes)
        start, end = self._cuda.Event(enable_timing=True), self._cuda.Event(enable_timing=True)
        stream.wait_stream(self._cuda.current_stream(self._device))
        held: tuple[Any, ...] = ()
        with self._cuda.stream(stream):
            start.record(stream)
            if len(copies.bytes) and self._batch is not None:
                device, host = self._bases[copies.tensor] + copies.device, self._address + copies.host
                source, target = (device, host) if store else (host, device)
                held = tuple(torch.from_numpy(np.ascontiguousarray(array)) for array in (source, target, copies.bytes))
                # What a load reads lies still, so the driver may read ahead. What a store reads is computed up to this stream's turn.
                self._batch(*held, is_src_access_order_any=not store)
            elif len(copies.bytes):
                self._one_by_one(copies, store=store)
            end.record(stream)
        return _Motion(start, end, held)

    def _one_by_one(self, copies: Copies, *, store: bool) -> None:
        for tensor, device, host, size in zip(*(array.tolist() for array in copies), strict=True):
            there, here = self._tensors[tensor][device : device + size], self._host[host : host + size]
            if store:
                here.copy_(there, non_blocking=True)
            else:
                there.copy_(here, non_blocking=True)


def _vllm_batch() -> Callable[..., None] | None:
    """vLLM's operator that starts all copies of a batch in one call of the driver."""
    from vllm import _custom_ops as operators

    if not hasattr(torch.ops._C_cache_ops, "swap_blocks_batch"):
        return None
    found: Callable[..., None] | None = getattr(operators, "swap_blocks_batch", None)
    return found


def _pin(cuda: Any, address: int, size: int, piece_bytes: int) -> list[int]:
    """Register the region piece by piece; the addresses to unregister later.

    Raises:
        ConfigError: CUDA refused a piece. Nothing stays registered.
    """
    pinned: list[int] = []
    for offset in range(0, size, piece_bytes):
        code = _number(cuda.cudart().cudaHostRegister(address + offset, min(piece_bytes, size - offset), 0))
        if code:
            _unpin(cuda, pinned)
            problem = f"{size} bytes of host memory cannot be pinned (CUDA error {code}); lower it, or raise the limit of locked memory"
            raise ConfigError("kvstore offloading", "cpu_bytes_to_use", problem)
        pinned.append(address + offset)
    return pinned


def _unpin(cuda: Any, pinned: Sequence[int]) -> None:
    for address in pinned:
        if code := _number(cuda.cudart().cudaHostUnregister(address)):
            logger.warning("kvstore: cudaHostUnregister failed with CUDA error %d", code)


def _number(code: Any) -> int:
    """CUDA's error code, which torch wraps."""
    return int(getattr(code, "value", code))
