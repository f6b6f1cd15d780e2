"""`KVStoreOffloadingSpec`: host memory and tiers of the SDK's own, below any device that vLLM computes on."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from vllm.v1.kv_offload.base import OffloadingSpec

from kvstore_sdk.backend import Region
from kvstore_sdk.host import join_region, open_region
from kvstore_sdk.vllm import compat, geometry, metrics
from kvstore_sdk.vllm.certified import interior_of
from kvstore_sdk.vllm.facts import collect, spare_pages
from kvstore_sdk.vllm.offloading.assembly import WHERE, build_manager
from kvstore_sdk.vllm.offloading.copies import group_pages
from kvstore_sdk.vllm.offloading.device import DeviceCopies
from kvstore_sdk.vllm.offloading.options import named_for_operators, parse_offloading_options
from kvstore_sdk.vllm.offloading.plan import claim_region
from kvstore_sdk.vllm.offloading.transfers import SlotSpec
from kvstore_sdk.vllm.worker import SlotLayout, WorkerHandler

__all__ = ["KVStoreOffloadingSpec"]

logger = logging.getLogger(__name__)

REGION_TIMEOUT_S = 30.0
"""How long a process waits for another one that is to make the region. While memory is being reserved for it, longer, by its size."""

_PAGE = 4096


class KVStoreOffloadingSpec(OffloadingSpec):
    """vLLM's offloading over the SDK's host tier and tiers, on CPU and CUDA.

    Chosen with `"spec_name": "KVStoreOffloadingSpec", "spec_module_path": "kvstore_sdk.vllm"`. All ranks of an engine write and read one
    shared region, whose slots are the records that tiers store.
    """

    @classmethod
    def build_metric_definitions(cls, extra_config: Mapping[str, Any]) -> dict[str, Any]:
        """Every metric there can be. Runs in the API server: opens nothing."""
        return metrics.store_definitions()

    def __init__(self, *config: Any) -> None:
        """Check the configuration.

        Raises:
            ConfigError: something in it is wrong, or vLLM is of a version that was not tested.
        """
        compat.check_version()
        compat.borrow_logging()
        super().__init__(*config)
        self._kvstore_options = parse_offloading_options(WHERE, self.extra_config)
        self._kvstore_worker: DeviceCopies | None = None
        self._kvstore_manager: Any = None

    # The workers' side.

    def get_worker(self, kv_caches: Any) -> DeviceCopies:
        """The worker of vLLM 0.25 and later. Its geometry record is there when this returns."""
        if self._kvstore_worker is None:
            known = compat.spec_facts(self)
            geometry.sweep(geometry.SHM, keep=self._region_path())
            region = self._open_region(open_region)
            with contextlib.ExitStack() as undo:
                undo.callback(region.close)
                spare = spare_pages(self)
                rank, ranks = known.parallel.rank, known.parallel.world_size
                worker = DeviceCopies(kv_caches, known.blocks_per_chunk, region, rank, ranks, spare)
                # It closes the region too, after whatever holds it.
                undo.pop_all()
                undo.callback(worker.shutdown)
                self._announce(kv_caches, region, SlotLayout(kv_caches, known.blocks_per_chunk, 0, spare))
                undo.pop_all()
            self._kvstore_worker = worker
        return self._kvstore_worker

    def get_handlers(self, kv_caches: Any) -> Iterator[tuple[type[Any], type[Any], Any]]:
        """The handlers of vLLM 0.24."""
        worker = self.get_worker(kv_caches)
        device, _ = compat.transfer_ends()
        yield device, SlotSpec, WorkerHandler(worker, "store")
        yield SlotSpec, device, WorkerHandler(worker, "load")

    def _announce(self, kv_caches: Any, region: Region, layout: SlotLayout) -> None:
        """Write the geometry record."""
        known, config = compat.spec_facts(self), compat.current_config(self)
        record = collect(self, layout, rows=region.size_bytes // _PAGE, row_bytes=_PAGE, region=geometry.region_id(region.fd))
        groups: dict[int, Mapping[str, Any]] = {}
        for (group, tokens, layers), pages in zip(known.groups, group_pages(kv_caches), strict=True):
            found = interior_of(config, layers, tokens, known.blocks_per_chunk, list(pages.values()))
            groups[group] = {**record.groups[group], "layout": found.to_plain()}
        record = dataclasses.replace(record, groups=groups)
        # Open for as long as this object lives: an open record is not abandoned.
        weakref.finalize(self, os.close, geometry.write_record(self._region_path(), record))

    # The scheduler's side.

    def get_manager(self) -> Any:
        """The manager. When it returns, every process of the engine has mapped the region, and it has no name.

        Raises:
            ConfigError: the configuration or the engine is one that cannot be served. No record was written.
            BackendError: a store could not be opened.
        """
        if self._kvstore_manager is None:
            path, ranks = self._region_path(), compat.spec_facts(self).parallel.world_size
            try:
                records = geometry.read_records(path, ranks, geometry.RECORDS_TIMEOUT_S)
                self._kvstore_manager = build_manager(self, self._kvstore_options, records, lambda: self._join_region(records))
            finally:
                for name in (path, *(geometry.record_path(path, rank) for rank in range(ranks))):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(name)
                # What earlier engines of this id left, which the workers' sweeps had to keep.
                geometry.sweep(geometry.SHM, keep=None)
        return self._kvstore_manager

    def _join_region(self, records: Sequence[geometry.RankGeometry]) -> Region:
        """The region that the workers mapped, for this manager alone."""
        region = self._open_region(join_region)
        try:
            geometry.refuse_other_regions(records, region.fd)
            claim_region(region)
        except BaseException:
            region.close()
            raise
        return region

    # Both.

    def _region_path(self) -> str:
        return os.path.join(geometry.SHM, f"kvstore_offload_{compat.engine_id(self)}.mmap")

    def _open_region(self, how: Callable[[str, int, float], Region]) -> Region:
        """Workers make the region. The scheduler's side does not: memory that no worker maps would hold a plan that none reads."""
        # Of what is too small the scheduler's side says how much is needed: only there all ranks' caches are known.
        size_bytes = max(1, self._kvstore_options.host_bytes // _PAGE) * _PAGE
        with named_for_operators(WHERE):
            return how(self._region_path(), size_bytes, REGION_TIMEOUT_S)
