"""`KVStoreTieringSpec`: vLLM's tiering spec, whose workers say what they hold, and which runs on CPU as well."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator
from typing import Any

from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvstore_sdk.errors import ConfigError
from kvstore_sdk.vllm import compat, geometry
from kvstore_sdk.vllm.facts import collect, spare_pages
from kvstore_sdk.vllm.marks import RowMarks, marks_path
from kvstore_sdk.vllm.plugin import register
from kvstore_sdk.vllm.top_keys import check_top_keys
from kvstore_sdk.vllm.worker import HostCopies, ScrubbedHandler, ScrubbedWorker, SlotLayout, WorkerHandler

__all__ = ["KVStoreTieringSpec"]

register()


class KVStoreTieringSpec(TieringOffloadingSpec):
    """vLLM's `TieringOffloadingSpec` with geometry records, rows without stale bytes, a region that no crash leaves behind, and CPU copies.

    Chosen with `"spec_name": "KVStoreTieringSpec", "spec_module_path": "kvstore_sdk.vllm"`; takes the same configuration.
    """

    def __init__(self, *config: Any) -> None:
        compat.check_version()
        super().__init__(*config)
        check_top_keys("KVStoreTieringSpec", self.extra_config, has_table=False)
        rows = compat.row_facts(self)
        if rows.row_bytes and not rows.rows:
            size = self.extra_config.get("cpu_bytes_to_use")
            raise ConfigError("KVStoreTieringSpec", "cpu_bytes_to_use", f"{size} bytes hold no chunk: one takes {rows.row_bytes}")
        self._kvstore_worker: ScrubbedWorker | None = None
        self._kvstore_handlers: list[tuple[type[Any], type[Any], Any]] | None = None
        self._kvstore_geometry: list[geometry.RankGeometry] | None = None
        self._kvstore_marks: list[RowMarks] = []

    # The workers' side.

    def get_worker(self, kv_caches: Any) -> Any:
        """The worker of vLLM 0.25 and later."""
        if self._kvstore_worker is None:
            self._check_room()
            if compat.host_is_the_device():
                inner, layout, region = self._host_copies(kv_caches)
            else:
                inner = super().get_worker(kv_caches)
                region = compat.region_of_worker(inner)
                layout = self._layout(kv_caches, region)
            self._kvstore_worker = ScrubbedWorker(inner, layout, region, self._marks_of(region))
            self._announce(layout, region)
        return self._kvstore_worker

    def get_handlers(self, kv_caches: Any) -> Iterator[tuple[type[Any], type[Any], Any]]:
        """The handlers of vLLM 0.24."""
        if self._kvstore_handlers is None:
            self._check_room()
            if compat.host_is_the_device():
                inner, layout, region = self._host_copies(kv_caches)
                worker = ScrubbedWorker(inner, layout, region, self._marks_of(region))
                device, host = compat.transfer_ends()
                self._kvstore_handlers = [
                    (device, host, WorkerHandler(worker, "store")),
                    (host, device, WorkerHandler(worker, "load")),
                ]
            else:
                (device, host, stores), loads = super().get_handlers(kv_caches)
                region = compat.region_of_worker(stores)
                layout = self._layout(kv_caches, region)
                self._kvstore_handlers = [(device, host, ScrubbedHandler(stores, layout, region, self._marks_of(region))), loads]
            self._announce(layout, region)
        return iter(self._kvstore_handlers)

    def _check_room(self) -> None:
        """Refuse a region larger than what is free where it lies; mapped nevertheless, it would end the engine at some later write."""
        rows, path = compat.row_facts(self), compat.region_path(self)
        if os.path.exists(path):
            # Another rank made it, and may have filled a part of it by now.
            return
        needed, space = rows.rows * rows.row_bytes, os.statvfs(geometry.SHM)
        free = space.f_bavail * space.f_frsize
        if needed > free:
            problem = (
                f"the region {path} needs {needed} bytes, {geometry.SHM} has {free} free: give less, or enlarge it (docker: --shm-size)"
            )
            raise ConfigError("KVStoreTieringSpec", "cpu_bytes_to_use", problem)

    def _host_copies(self, kv_caches: Any) -> tuple[HostCopies, SlotLayout, Any]:
        known = compat.spec_facts(self)
        region = compat.open_region(self, 0 if known.replicated else known.parallel.rank)
        layout = self._layout(kv_caches, region)
        return HostCopies(kv_caches, layout, region), layout, region

    def _layout(self, kv_caches: Any, region: Any) -> SlotLayout:
        known, given = compat.spec_facts(self), compat.row_facts(self).slot_bytes
        layout = SlotLayout(kv_caches, known.blocks_per_chunk, int(region.rank) * given, spare_pages(self))
        if layout.bytes > given:
            raise ConfigError(
                "KVStoreTieringSpec", "geometry", f"the KV tensors take {layout.bytes} bytes of a row, vLLM gives them {given}"
            )
        return layout

    def _marks_of(self, region: Any) -> RowMarks | None:
        """This rank's marks; none where a chunk is one block, which is there or is not."""
        known = compat.spec_facts(self)
        return RowMarks.create(region.mmap_path, known.parallel.rank, compat.row_facts(self).rows) if known.blocks_per_chunk > 1 else None

    def _announce(self, layout: SlotLayout, region: Any) -> None:
        """Write the geometry record. From here on the scheduler's side unlinks the region."""
        geometry.sweep(geometry.SHM, keep=region.mmap_path)
        compat.detach_region(region)
        # Open for as long as this object lives: an open record is not abandoned.
        stride = compat.row_bytes(region)
        rows, which = int(region.total_size_bytes) // stride, geometry.region_id(region.fd)
        record = collect(self, layout, rows=rows, row_bytes=stride, region=which)
        weakref.finalize(self, os.close, geometry.write_record(region.mmap_path, record))

    # The scheduler's side.

    def get_manager(self) -> Any:
        """vLLM's `TieringOffloadingManager`. When it returns, every process of the engine has mapped the region, and it has no name."""
        manager = compat.manager_of(self)
        if manager is None:
            try:
                manager = super().get_manager()
                self.kvstore_geometry()
                compat.detach_region(compat.region_of_scheduler(self))
            finally:
                self._unlink()
        return manager

    def kvstore_geometry(self) -> list[geometry.RankGeometry]:
        """The record of every rank, read once.

        Raises:
            ConfigError: one is missing after `geometry.RECORDS_TIMEOUT_S`, or they do not belong together.
        """
        if self._kvstore_geometry is None:
            known, region = compat.spec_facts(self), compat.region_path(self)
            records = geometry.read_records(region, known.parallel.world_size, geometry.RECORDS_TIMEOUT_S)
            geometry.refuse_other_regions(records, compat.region_of_scheduler(self).fd)
            if known.blocks_per_chunk > 1:
                self._kvstore_marks = [RowMarks.open(region, record.rank, record.rows) for record in records]
            self._kvstore_geometry = records
        return self._kvstore_geometry

    def kvstore_marks(self) -> list[RowMarks]:
        """The marks of every rank, known once `kvstore_geometry` returned."""
        return self._kvstore_marks

    def _unlink(self) -> None:
        """Take the names of the region, the records and the marks away. Without a name nothing can outlive the processes that map it."""
        region = compat.region_path(self)
        world_size = compat.spec_facts(self).parallel.world_size
        beside = [path(region, rank) for rank in range(world_size) for path in (geometry.record_path, marks_path)]
        for path in (region, *beside):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        # What earlier engines of this id left, which the workers' sweeps had to keep.
        geometry.sweep(geometry.SHM, keep=None)
