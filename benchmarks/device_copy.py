"""What it costs to take a chunk apart, against one large memcpy of as many bytes: `python benchmarks/device_copy.py`.

A transfer moves pages that lie scattered in the engine's KV tensors to and from records in one shared region. The measure is what the
machine does at best: one `memmove` between the same two stretches of memory, right beside it, in the calling thread as well. Planning the
transfer is counted.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from harness import Cell, CellResult, add_outputs, machine_facts, publish, run_cell, verdict

from kvstore_sdk.backend import Region
from kvstore_sdk.format import record_bytes
from kvstore_sdk.layout import AttentionShape, Topology
from kvstore_sdk.vllm.offloading.device import DeviceCopies
from kvstore_sdk.vllm.offloading.plan import GroupPlan, Plan, control_bytes, write_plan
from kvstore_sdk.vllm.offloading.transfers import SlotSpec

LAYERS, BLOCKS_PER_CHUNK = 4, 8
PAGES = (16 << 10, 64 << 10, 256 << 10, 1 << 20)


class Bench:
    """A worker of one rank with as much KV as the region holds, and transfers of `moved_bytes`."""

    def __init__(self, page: int, moved_bytes: int, rng: random.Random) -> None:
        chunk = LAYERS * BLOCKS_PER_CHUNK * page
        self._chunks = moved_bytes // chunk
        blocks = 2 * self._chunks * BLOCKS_PER_CHUNK
        self._tensors = [torch.randint(-128, 127, (blocks, page), dtype=torch.int8) for _ in range(LAYERS)]
        shape = AttentionShape(layers=LAYERS, blocks=BLOCKS_PER_CHUNK, block_tokens=16, heads=8, token_head_bytes=page // 128)
        slots, record = 2 * self._chunks, record_bytes(chunk)
        start = control_bytes(slots, 1)
        self._region = Region(start + slots * record)
        # Memory that was never touched is slower once, for whoever comes first.
        np.frombuffer(self._region.view, np.uint8)[:] = 1
        plan = Plan(
            world_size=1,
            blocks_per_chunk=BLOCKS_PER_CHUNK,
            slot_count=slots,
            slots_start=start,
            groups=(GroupPlan(shape, Topology(1, (LAYERS,))),),
        )
        write_plan(self._region, plan)
        kv = SimpleNamespace(
            tensors=[SimpleNamespace(tensor=tensor, page_size_bytes=page) for tensor in self._tensors],
            group_data_refs=[[SimpleNamespace(tensor_idx=tensor, page_size_bytes=page) for tensor in range(LAYERS)]],
        )
        self._worker = DeviceCopies(kv, BLOCKS_PER_CHUNK, self._region, 0, 1)
        self._rng, self._blocks, self._slots, self._record, self._start = rng, blocks, slots, record, start
        self._numbers = itertools.count(1)
        self.bytes = self._chunks * chunk

    def transfer(self, *, store: bool, scattered: bool) -> float:
        """MB/s of a transfer of other blocks and slots each time."""
        needed = self._chunks * BLOCKS_PER_CHUNK
        if scattered:
            blocks = self._rng.sample(range(self._blocks), needed)
        else:
            first = self._rng.randrange(self._blocks - needed + 1)
            blocks = list(range(first, first + needed))
        numbers = self._rng.sample(range(self._slots), self._chunks)
        device = SimpleNamespace(block_ids=np.array(blocks, np.int32), group_sizes=[needed], block_indices=[0])
        slots, job = [self._start + number * self._record for number in numbers], next(self._numbers)
        started = time.perf_counter()
        if store:
            self._worker.submit_store(job, device, SlotSpec(slots, numbers, job))
        else:
            self._worker.submit_load(job, SlotSpec(slots, numbers), device)
        (result,) = self._worker.get_finished()
        elapsed = time.perf_counter() - started
        assert result.transfer_size == self.bytes
        return self.bytes / elapsed / 1e6

    def memcpy(self, *, store: bool) -> float:
        """MB/s of one copy between half of the region and the tensors; one for each tensor, since they do not touch."""
        part = self.bytes // LAYERS
        addresses = [(self._region.address + self._start + number * part, tensor.data_ptr()) for number, tensor in enumerate(self._tensors)]
        started = time.perf_counter()
        for host, device in addresses:
            ctypes.memmove(*((host, device) if store else (device, host)), part)
        return self.bytes / (time.perf_counter() - started) / 1e6

    def close(self) -> None:
        self._worker.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moved-mib", type=int, default=256, help="bytes of a transfer")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seed", type=int, default=1)
    add_outputs(parser)
    args = parser.parse_args()

    rng = random.Random(args.seed)
    results: list[CellResult] = []
    for page in PAGES:
        bench = Bench(page, args.moved_mib << 20, rng)
        try:
            for store, scattered in itertools.product((True, False), (True, False)):
                name = f"{'store' if store else 'load'}, pages of {page >> 10} KiB, blocks {'scattered' if scattered else 'in a row'}"
                results.append(run_cell(Cell(name, *_sides(bench, store, scattered)), args.rounds, rng))
        finally:
            bench.close()
    facts: dict[str, Any] = machine_facts() | {"torch": torch.__version__, "transfer": f"{args.moved_mib} MiB", "rounds": str(args.rounds)}
    title = "Transfers between KV tensors and records against one large memcpy"
    misses = [f"- Missed: {miss}." for miss in verdict(results, 0.85, 0.5)]
    publish(args, title, "MB/s", results, facts, misses or ["Nothing missed."])


def _sides(bench: Bench, store: bool, scattered: bool) -> tuple[Callable[[], float], Callable[[], float]]:
    return lambda: bench.transfer(store=store, scattered=scattered), lambda: bench.memcpy(store=store)


if __name__ == "__main__":
    main()
