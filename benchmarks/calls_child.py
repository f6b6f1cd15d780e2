"""One side of the comparison of calling-thread time: `python calls_child.py ours|vllm FOLDER`.

Both sides are secondary tiers of vLLM's real `TieringOffloadingSpec`, built by its own factory over its own host region, and are driven as
its manager drives them. A question is {"op": "lookup"|"submit_store"|"submit_load"|"poll"|"store"|"load"|"idle_poll", "round"}; the answer
{"rate": ...}: chunks (idle polls: calls) that the calling thread gets through in a second, counting only the time inside the tier's method.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from child import serve

CHUNK_BYTES = 128 << 10
JOB_CHUNKS = 16
JOBS = 16
CHUNKS = JOB_CHUNKS * JOBS
WAIT_S = 30.0


def fields(kind: type[Any], **values: Any) -> Any:
    """An instance of one of vLLM's dataclasses; fields that this version lacks are dropped."""
    names = {field.name for field in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in values.items() if name in names})


class Side:
    """A tier, and what vLLM passes to it."""

    def __init__(self, tier_config: dict[str, Any]) -> None:
        import vllm.v1.kv_offload.base as base
        import vllm.v1.kv_offload.tiering.base as tiering
        from vllm.v1.kv_offload import config
        from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

        self.base, self.tiering = base, tiering
        sizes = {"rank": 0, "world_size": 1, "tp_size": 1, "pp_size": 1, "pcp_size": 1, "dcp_size": 1}
        spec = TieringOffloadingSpec(
            fields(
                config.OffloadingConfig,
                groups=(fields(config.OffloadingGroupConfig, tokens_per_block=16, layer_names=("l0",), group_id=0),),
                worker_kv_bytes_per_block=CHUNK_BYTES,
                enable_kv_cache_events=False,
                extra_config={"cpu_bytes_to_use": 2 * CHUNK_BYTES * CHUNKS, "secondary_tiers": [tier_config]},
                engine_id=f"bench-{os.getpid()}",
                model=fields(config.OffloadingModelConfig, name="m", dtype="bfloat16", max_model_len=1024),
                cache=fields(config.OffloadingCacheConfig, tokens_per_hash=16, blocks_per_chunk=1),
                parallel=fields(
                    config.OffloadingParallelConfig,
                    **sizes,
                    data_parallel_index=0,
                    data_parallel_size=1,
                    data_parallel_rank_local=None,
                    is_parallelism_agnostic=True,
                ),
            )
        )
        self.manager = spec.get_manager()
        self.tier = self.manager.secondary_tiers[0]
        self.step = base.ScheduleEndContext(new_req_ids=(), preempted_req_ids=())
        self.jobs = 0
        self.requests = 0
        # What the look-ups and loads find: stored once. A request that stays keeps vLLM's table of look-ups alive.
        self.known = [base.make_offload_key(b"known".ljust(28, b"\0") + i.to_bytes(4, "big"), 0) for i in range(CHUNKS)]
        self.submit_all(self.tier.submit_store, self.known, load=False)
        self.wait_jobs()
        self.look_up(self.new_request())

    def new_request(self) -> Any:
        self.requests += 1
        request = self.base.ReqContext(req_id=f"r{self.requests}")
        self.tier.on_new_request(request)
        return request

    def look_up(self, request: Any) -> None:
        """Ask until nothing is pending; every key must be found."""
        end = time.monotonic() + WAIT_S
        hit, retry = self.base.LookupResult.HIT, self.base.LookupResult.RETRY
        waiting = list(self.known)
        while waiting and time.monotonic() < end:
            answers = {key: self.tier.lookup(key, request) for key in waiting}
            self.tier.on_schedule_end(self.step)
            waiting = [key for key, answer in answers.items() if answer is retry]
            if any(answer not in (hit, retry) for answer in answers.values()):
                raise RuntimeError("a stored chunk was not found")
            time.sleep(0.001)

    def submit_all(self, submit: Callable[[Any], None], keys: list[Any], *, load: bool) -> float:
        """Submit in jobs; returns seconds inside the tier."""
        import numpy as np

        spent = 0.0
        request = self.new_request()
        for start in range(0, len(keys), JOB_CHUNKS):
            self.jobs += 1
            part = keys[start : start + JOB_CHUNKS]
            rows = np.arange(start, start + len(part), dtype=np.int32)
            job = self.tiering.TransferJob(self.jobs, part if load else set(part), rows, load, request)
            begun = time.perf_counter()
            submit(job)
            spent += time.perf_counter() - begun
        self.tier.on_request_finished(request)
        return spent

    def wait_jobs(self) -> float:
        """Poll until every job is back, in steps of 2 ms; returns seconds inside the tier."""
        spent, end = 0.0, time.monotonic() + WAIT_S
        while time.monotonic() < end:
            begun = time.perf_counter()
            results = list(self.tier.get_finished_jobs())
            spent += time.perf_counter() - begun
            if any(not result.success for result in results):
                raise RuntimeError(f"a job failed: {results}")
            self.jobs_back = getattr(self, "jobs_back", 0) + len(results)
            if self.jobs_back == self.jobs:
                return spent
            time.sleep(0.002)
        raise RuntimeError("a job did not come back")

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        op, number = question["op"], question["round"]
        if op == "lookup":
            request = self.new_request()
            lookup, keys = self.tier.lookup, self.known
            begun = time.perf_counter()
            for key in keys:
                lookup(key, request)
            spent = time.perf_counter() - begun
            self.tier.on_request_finished(request)
            return {"rate": CHUNKS / spent}
        if op == "idle_poll":
            poll = self.tier.get_finished_jobs
            begun = time.perf_counter()
            for _ in range(1000):
                list(poll())
            return {"rate": 1000 / (time.perf_counter() - begun)}
        if op in ("submit_store", "poll", "store"):
            keys = [self.base.make_offload_key(f"{op}{number}".encode().ljust(28, b"\0") + i.to_bytes(4, "big"), 0) for i in range(CHUNKS)]
            submitted = self.submit_all(self.tier.submit_store, keys, load=False)
        else:
            submitted = self.submit_all(self.tier.submit_load, self.known, load=True)
        polled = self.wait_jobs()
        return {"rate": CHUNKS / {"poll": polled, "store": submitted + polled, "load": submitted + polled}.get(op, submitted)}


def main() -> None:
    side, folder = sys.argv[1], Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    ours = {"type": "kvstore", "module_path": "kvstore_sdk.vllm", "backend": "fs", "location": str(folder / "store")}
    tier = Side(ours if side == "ours" else {"type": "fs", "root_dir": str(folder)})
    serve(tier.answer)
    tier.manager.shutdown()


if __name__ == "__main__":
    main()
