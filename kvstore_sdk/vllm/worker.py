"""The workers' side: copies between paged KV tensors and rows on CPU, and rows that hold no stale bytes on every platform."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvstore_sdk.vllm import compat
from kvstore_sdk.vllm.marks import RowMarks
from kvstore_sdk.vllm.offloading.copies import Copies, DevicePages, merge
from kvstore_sdk.vllm.offloading.device import copy_in_host
from kvstore_sdk.vllm.pairing import Integers, plan_copies, used_pages

__all__ = ["HostCopies", "ScrubbedHandler", "ScrubbedWorker", "SlotLayout", "WorkerHandler"]


class SlotLayout:
    """Where one rank's KV tensors lie in a row.

    Attributes:
        blocks_per_chunk: Blocks of a chunk.
        offset: Where the slot starts.
        pages: Length of a page of each tensor.
        starts: Where the part of each tensor starts in the row.
        refs: Of each group, by its place in the engine's list, (tensor, bytes of a page that are used) of each layer.
        spare: Of each group, how many pages at the start of a chunk no reader can need.
    """

    def __init__(self, kv_caches: Any, blocks_per_chunk: int, offset: int, spare: Sequence[int] = ()) -> None:
        self.blocks_per_chunk = blocks_per_chunk
        self.offset = offset
        self.pages = [int(tensor.page_size_bytes) for tensor in kv_caches.tensors]
        self.starts = [offset + blocks_per_chunk * sum(self.pages[:tensor]) for tensor in range(len(self.pages))]
        self.refs = [[(int(ref.tensor_idx), int(ref.page_size_bytes)) for ref in refs] for refs in kv_caches.group_data_refs]
        self.spare = tuple(spare) or (0,) * len(self.refs)

    @property
    def bytes(self) -> int:
        """What the slot takes of a row."""
        return self.blocks_per_chunk * sum(self.pages)

    def used(self, group: int) -> dict[int, int]:
        """Tensor -> bytes of its page that the group uses; layers that share a page count once."""
        return used_pages(self.refs[group])


class HostCopies:
    """Copies blocks of KV tensors in host memory to and from rows, at once, in the calling thread; with the methods of `OffloadingWorker`.

    For CPU only: the model computes in the same thread, so a copy sees every block complete, and a block is free when the copy returns.
    Each job is reported once. A copy that cannot be made raises: the engine has no way to be told that blocks hold nothing.
    """

    def __init__(self, kv_caches: Any, layout: SlotLayout, region: Any) -> None:
        pages = [DevicePages.of(found) for found in kv_caches.tensors]
        self._layout = layout
        self._region = region
        self._row_bytes = compat.row_bytes(region)
        self._rows = memoryview(compat.region_tensor(region).numpy()).cast("B")
        self._row_count = len(self._rows) // self._row_bytes
        self._block_counts = [found.blocks for found in pages]
        self._strides = [found.stride for found in pages]
        self._tensors = [memoryview(found.flat().numpy()).cast("B") for found in pages]
        self._result = compat.transfer_result_class()
        self._done: list[Any] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy blocks into rows."""
        self._copy(job_id, src_spec, compat.row_numbers(dst_spec), to_rows=True)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        """Copy rows into blocks. Every load is expedited."""
        self._copy(job_id, dst_spec, compat.row_numbers(src_spec), to_rows=False)
        return True

    def get_finished(self) -> list[Any]:
        """Results since the last call, each once."""
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Every copy was over when it was submitted."""

    def shutdown(self) -> None:
        """Let go of the region and unmap it."""
        self._tensors, self._rows = [], memoryview(b"")
        if self._region is not None:
            self._region.cleanup()
            self._region = None

    def _copy(self, job_id: int, device: Any, rows: npt.ArrayLike, *, to_rows: bool) -> None:
        started = time.perf_counter()
        copies = merge(self._plan(device, rows))
        copy_in_host(self._tensors, self._rows, copies, store=to_rows)
        elapsed_s = time.perf_counter() - started
        self._done.append(self._result(job_id=job_id, success=True, transfer_size=copies.total_bytes, transfer_time=elapsed_s))

    def _plan(self, device: Any, rows: npt.ArrayLike) -> Copies:
        """Every page of a transfer as a stretch of a tensor and of the rows.

        Raises:
            ValueError: blocks and rows do not add up, or are not there.
        """
        found: list[tuple[Integers, ...]] = []
        for part in plan_copies(device, rows, self._layout.blocks_per_chunk):
            if part.rows.min() < 0 or part.rows.max() >= self._row_count:
                raise ValueError(f"transfer: rows {part.chunks.tolist()} are not all below {self._row_count}")
            for tensor, size in self._layout.used(part.group).items():
                if part.blocks.min() < 0 or part.blocks.max() >= self._block_counts[tensor]:
                    raise ValueError(f"transfer: blocks {part.blocks.tolist()} are not all below {self._block_counts[tensor]}")
                in_row = self._layout.starts[tensor] + part.pages * self._layout.pages[tensor]
                found.append(
                    (
                        np.full_like(part.blocks, tensor),
                        part.blocks * self._strides[tensor],
                        part.rows * self._row_bytes + in_row,
                        np.full_like(part.blocks, size),
                    )
                )
        return Copies(*map(np.concatenate, zip(*found, strict=True))) if found else Copies(*np.empty((4, 0), np.int64))


class _Scrubber:
    """Sees to the pages of a stored chunk that no block goes with: they are zeroed, and where a reader could need them the row is marked.

    A row is reused for chunks of any group and any request. What a store leaves as it was would be another's bytes, and would be kept.
    """

    def __init__(self, layout: SlotLayout, region: Any, marks: RowMarks | None) -> None:
        self._layout = layout
        self._rows: npt.NDArray[np.int8] | None = compat.region_tensor(region).numpy().reshape(-1, compat.row_bytes(region))
        self._marks = marks

    def scrub(self, device: Any, rows: npt.ArrayLike) -> None:
        """Before the blocks of `device` are stored in `rows`.

        Raises:
            ValueError: numbers of blocks and of rows do not fit together; vLLM's own copy would not start either.
        """
        layout = self._layout
        if self._rows is None or layout.blocks_per_chunk == 1:
            return
        if self._marks is not None:
            self._marks.clear(np.asarray(rows, dtype=np.int64))
        for part in plan_copies(device, rows, layout.blocks_per_chunk):
            for row, page in part.untouched(layout.blocks_per_chunk):
                for tensor, size in layout.used(part.group).items():
                    at = layout.starts[tensor] + page * layout.pages[tensor]
                    self._rows[row, at : at + size] = 0
            lacking = part.lacking(layout.spare[part.group])
            if self._marks is not None and len(lacking):
                self._marks.mark(lacking)

    def close(self) -> None:
        self._rows = None


class ScrubbedWorker:
    """What the connector drives (vLLM 0.25 and later): `HostCopies` or vLLM's own worker, with rows scrubbed before each store."""

    def __init__(self, inner: Any, layout: SlotLayout, region: Any, marks: RowMarks | None = None) -> None:
        self._inner = inner
        self._scrubber = _Scrubber(layout, region, marks)

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._scrubber.scrub(src_spec, compat.row_numbers(dst_spec))
        return bool(self._inner.submit_store(job_id, src_spec, dst_spec))

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, **options: Any) -> bool:
        return bool(self._inner.submit_load(job_id, src_spec, dst_spec, **options))

    def get_finished(self) -> list[Any]:
        return self._inner.get_finished()

    def wait(self, job_ids: set[int]) -> None:
        self._inner.wait(job_ids)

    def shutdown(self) -> None:
        # A view that is still held would keep the region mapped.
        self._scrubber.close()
        self._inner.shutdown()


class ScrubbedHandler:
    """vLLM 0.24's own handler for stores, with rows scrubbed before each."""

    def __init__(self, inner: Any, layout: SlotLayout, region: Any, marks: RowMarks | None = None) -> None:
        self._inner = inner
        self._scrubber = _Scrubber(layout, region, marks)

    def transfer_async(self, job_id: int, spec: tuple[Any, Any]) -> bool:
        self._scrubber.scrub(spec[0], compat.row_numbers(spec[1]))
        return bool(self._inner.transfer_async(job_id, spec))

    def get_finished(self) -> list[Any]:
        return self._inner.get_finished()

    def wait(self, job_ids: set[int]) -> None:
        self._inner.wait(job_ids)

    def shutdown(self) -> None:
        self._scrubber.close()
        self._inner.shutdown()


class WorkerHandler:
    """One direction of a worker for vLLM 0.24, which drives a handler for each. The one for stores reports and closes for both."""

    def __init__(self, worker: Any, direction: Literal["store", "load"]) -> None:
        self._worker = worker
        self._stores = direction == "store"

    def transfer_async(self, job_id: int, spec: tuple[Any, Any]) -> bool:
        submit = self._worker.submit_store if self._stores else self._worker.submit_load
        return submit(job_id, *spec)

    def get_finished(self) -> list[Any]:
        return self._worker.get_finished() if self._stores else []

    def wait(self, job_ids: set[int]) -> None:
        self._worker.wait(job_ids)

    def shutdown(self) -> None:
        if self._stores:
            self._worker.shutdown()
