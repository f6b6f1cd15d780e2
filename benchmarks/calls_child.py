"""One side of the comparison of calling-thread time: `python calls_child.py ours|vllm FOLDER wall|cpu`.

Both sides are secondary tiers of vLLM's real `TieringOffloadingSpec`, built by its own factory over its own host region, and are driven as
its manager drives them. A question is {"op": one of `Side.OPERATIONS`, "round"}; the answer {"rate": ...}: chunks (idle polls: calls) that
the calling thread gets through in a second, counting only the time inside the tier's methods: of the wall, or, on a busy machine, of the
thread's own processor time.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from child import serve

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.thread_time}
CHUNK_BYTES = 32 << 10
JOB_CHUNKS = 16
CHUNKS = 256
STEP_CHUNKS = 10_000
WAIT_S = 30.0


def fields(kind: type[Any], **values: Any) -> Any:
    """An instance of one of vLLM's dataclasses; fields that this version lacks are dropped."""
    names = {field.name for field in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in values.items() if name in names})


class Tier:
    """A secondary tier of vLLM's own spec, what vLLM passes to it, and the time that its methods take."""

    def __init__(self, config: dict[str, Any], clock: Callable[[], float]) -> None:
        import vllm.v1.kv_offload.base as base
        import vllm.v1.kv_offload.tiering.base as tiering
        from vllm.v1.kv_offload import config as offload
        from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

        self._base, self._transfer_job, self._clock = base, tiering.TransferJob, clock
        sizes = {"rank": 0, "world_size": 1, "tp_size": 1, "pp_size": 1, "pcp_size": 1, "dcp_size": 1}
        spec = TieringOffloadingSpec(
            fields(
                offload.OffloadingConfig,
                groups=(fields(offload.OffloadingGroupConfig, tokens_per_block=16, layer_names=("l0",), group_id=0),),
                worker_kv_bytes_per_block=CHUNK_BYTES,
                enable_kv_cache_events=False,
                extra_config={"cpu_bytes_to_use": 4 * CHUNK_BYTES * CHUNKS, "secondary_tiers": [config]},
                engine_id=f"bench-{os.getpid()}-{id(self)}",
                model=fields(offload.OffloadingModelConfig, name="m", dtype="bfloat16", max_model_len=1024),
                cache=fields(offload.OffloadingCacheConfig, tokens_per_hash=16, blocks_per_chunk=1),
                parallel=fields(
                    offload.OffloadingParallelConfig,
                    **sizes,
                    data_parallel_index=0,
                    data_parallel_size=1,
                    data_parallel_rank_local=None,
                    is_parallelism_agnostic=True,
                ),
            )
        )
        self._manager = spec.get_manager()
        self._tier = self._manager.secondary_tiers[0]
        self._schedule_end = base.ScheduleEndContext(new_req_ids=(), preempted_req_ids=())
        self._jobs = self._jobs_back = self._requests = 0
        self.hit, self.miss, self.retry = base.LookupResult.HIT, base.LookupResult.MISS, base.LookupResult.RETRY
        self.spent_s = 0.0
        """Inside the tier's methods, so far."""

    def keys(self, name: str, count: int) -> list[Any]:
        return [self._base.make_offload_key(name.encode().ljust(28, b"\0") + i.to_bytes(4, "big"), 0) for i in range(count)]

    def begin_request(self) -> Any:
        self._requests += 1
        request = self._base.ReqContext(req_id=f"r{self._requests}")
        began = self._clock()
        self._tier.on_new_request(request)
        self.spent_s += self._clock() - began
        return request

    def end_request(self, request: Any) -> None:
        began = self._clock()
        self._tier.on_request_finished(request)
        self.spent_s += self._clock() - began

    def look_up(self, keys: Sequence[Any], request: Any) -> list[Any]:
        lookup = self._tier.lookup
        began = self._clock()
        answers = [lookup(key, request) for key in keys]
        self.spent_s += self._clock() - began
        return answers

    def end_step(self) -> None:
        began = self._clock()
        self._tier.on_schedule_end(self._schedule_end)
        self.spent_s += self._clock() - began

    def poll(self) -> None:
        began = self._clock()
        results = list(self._tier.get_finished_jobs())
        self.spent_s += self._clock() - began
        if any(not result.success for result in results):
            raise RuntimeError(f"a job failed: {results}")
        self._jobs_back += len(results)

    def poll_all(self) -> None:
        """Poll until every job is back, in steps of 2 ms."""
        end = time.monotonic() + WAIT_S
        while self._jobs_back < self._jobs:
            self.poll()
            if time.monotonic() > end:
                raise RuntimeError("a job did not come back")
            time.sleep(0.002)

    def submit(self, keys: Sequence[Any], request: Any, *, load: bool, first_row: int = 0) -> None:
        """In jobs, from or into rows from the first one on."""
        import numpy as np

        submit = self._tier.submit_load if load else self._tier.submit_store
        for start in range(0, len(keys), JOB_CHUNKS):
            self._jobs += 1
            part = keys[start : start + JOB_CHUNKS]
            rows = np.arange(first_row + start, first_row + start + len(part), dtype=np.int32)
            job = self._transfer_job(self._jobs, list(part) if load else set(part), rows, load, request)
            began = self._clock()
            submit(job)
            self.spent_s += self._clock() - began

    def store_all(self, keys: Sequence[Any]) -> None:
        for start in range(0, len(keys), CHUNKS):
            request = self.begin_request()
            self.submit(keys[start : start + CHUNKS], request, load=False)
            self.end_request(request)
            self.poll_all()

    def ask_all(self, keys: Sequence[Any], request: Any, answer: Any) -> None:
        """Look up, and end the step, until nothing is pending, in steps of 20 ms; every key must be answered like this."""
        end = time.monotonic() + WAIT_S
        while keys and time.monotonic() < end:
            answers = self.look_up(keys, request)
            self.end_step()
            if any(found not in (answer, self.retry) for found in answers):
                raise RuntimeError(f"a look-up was not answered {answer}")
            keys = [key for key, found in zip(keys, answers, strict=True) if found is self.retry]
            if keys:
                time.sleep(0.02)
        if keys:
            raise RuntimeError("a look-up was not answered")

    def poll_idle(self, times: int) -> None:
        poll = self._tier.get_finished_jobs
        began = self._clock()
        for _ in range(times):
            list(poll())
        self.spent_s += self._clock() - began

    def shutdown(self) -> None:
        self._manager.shutdown()


class Side:
    """Two tiers: `tier`, which knows what was stored, and `strange`, which has stored chunks and does not believe what it knows of them.

    vLLM's forgets the answer to a question with the last request that asked it, so that any chunk is new to it; ours believes a HIT for a
    minute, and is told not to.
    """

    OPERATIONS = (
        *("lookup", "lookup_new", "lookup_missing", "submit_store", "submit_load", "poll", "store", "load", "idle_poll"),
        *("step_1000", "step_10000"),
    )

    def __init__(self, side: str, folder: Path, clock: Callable[[], float]) -> None:
        ours = {"type": "kvstore", "module_path": "kvstore_sdk.vllm", "backend": "fs", "location": str(folder / "store")}
        theirs = {"type": "fs", "root_dir": str(folder / "store")}
        self._tier = Tier(ours if side == "ours" else theirs, clock)
        self._strange = Tier(ours | {"hit_ttl_s": 0} if side == "ours" else theirs, clock)
        # Stored once. A request that stays keeps vLLM's table of look-ups alive.
        self._known = self._tier.keys("known", STEP_CHUNKS // 2)
        self._tier.store_all(self._known)
        self._tier.ask_all(self._known, self._tier.begin_request(), self._tier.hit)
        self._new = self._strange.keys("new", CHUNKS)
        self._strange.store_all(self._new)

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        op, number = question["op"], question["round"]
        if op not in self.OPERATIONS:
            raise ValueError(f"no such operation: {op}")
        tier = self._strange if op == "lookup_new" else self._tier
        tier.spent_s = 0.0
        if op.startswith("step_"):
            chunks = int(op.removeprefix("step_"))
            self._step(f"{op}-{number}", chunks)
            return {"rate": chunks / tier.spent_s}
        if op == "idle_poll":
            tier.poll_idle(1000)
            return {"rate": 1000 / tier.spent_s}
        request = tier.begin_request()
        if op == "lookup":
            self._known_again(request)
        elif op == "lookup_new":
            tier.ask_all(self._new, request, tier.hit)
        elif op == "lookup_missing":
            keys = tier.keys(f"{op}-{number}", CHUNKS)
            tier.spent_s = 0.0
            tier.ask_all(keys, request, tier.miss)
        else:
            load = op in ("submit_load", "load")
            keys = self._known[:CHUNKS] if load else tier.keys(f"{op}-{number}", CHUNKS)
            tier.spent_s = 0.0
            tier.submit(keys, request, load=load)
            if op == "poll":
                tier.spent_s = 0.0
            spent_s = tier.spent_s
            tier.poll_all()
            if op.startswith("submit_"):
                tier.spent_s = spent_s
        spent_s = tier.spent_s
        tier.end_request(request)
        return {"rate": CHUNKS / spent_s}

    def _known_again(self, request: Any) -> None:
        tier = self._tier
        tier.spent_s = 0.0
        answers = tier.look_up(self._known[:CHUNKS], request)
        if any(answer is not tier.hit for answer in answers):
            raise RuntimeError("a known chunk was not found")

    def _step(self, name: str, chunks: int) -> None:
        """A request of so many chunks, from its begin to its end.

        All are looked up, as the engine does while none is a miss: one half is known, the other was never stored. Of each half 256 chunks
        at most are moved: the known ones loaded, the others, once they are computed, stored. The engine comes by again when that may be
        done.
        """
        tier = self._tier
        known, others = self._known[: chunks // 2], tier.keys(name, chunks // 2)
        request = tier.begin_request()
        tier.poll()
        answers = tier.look_up([*known, *others], request)
        if any(answer is not tier.hit for answer in answers[: len(known)]):
            raise RuntimeError("a known chunk was not found")
        tier.submit(known[:CHUNKS], request, load=True)
        tier.end_step()
        time.sleep(0.1)
        tier.poll()
        tier.ask_all(others, request, tier.miss)
        tier.submit(others[:CHUNKS], request, load=False, first_row=CHUNKS)
        tier.end_step()
        time.sleep(0.1)
        tier.poll_all()
        tier.end_request(request)

    def shutdown(self) -> None:
        self._tier.shutdown()
        self._strange.shutdown()


def main() -> None:
    side, folder, clock = sys.argv[1], Path(sys.argv[2]), CLOCKS[sys.argv[3]]
    folder.mkdir(parents=True, exist_ok=True)
    found = Side(side, folder, clock)
    serve(found.answer)
    found.shutdown()


if __name__ == "__main__":
    main()
