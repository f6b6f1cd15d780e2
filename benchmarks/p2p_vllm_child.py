"""One end of vLLM's own p2p tier for `p2p.py`: `python p2p_vllm_child.py serve|load BYTES COUNT`; UCX_TLS as in the environment.

Its real `TieringOffloadingSpec` with one secondary tier, driven as its scheduler drives it, in steps of 1 ms; no engine. The owner stores
COUNT chunks in its host memory and says {"port"}; the asker answers {"port", "seconds"} with {"rate": MB/s from the first look-up to the
last HIT, of as many loads as fit}. Both say their "pid". {"idle": seconds}: how many cores a peer takes that has nothing to do. {"paused":
pid, "port"}: how long a load takes to fail whose owner was stopped when it had begun.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import sys
import threading
import time
from typing import Any

import numpy as np
from calls_child import fields
from child import serve
from p2p_child import cpu_s

WAIT_S = 60.0


class End:
    def __init__(self, size: int, count: int) -> None:
        import vllm.v1.kv_offload.base as base
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import init_none_hash
        from vllm.v1.kv_offload import config
        from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

        # Peers compare it when they meet; PYTHONHASHSEED makes it the same.
        init_none_hash(sha256)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        one = dict.fromkeys(("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size", "data_parallel_size"), 1)
        tier = {"type": "p2p", "host": "127.0.0.1", "port": self.port}
        self._spec = TieringOffloadingSpec(
            fields(
                config.OffloadingConfig,
                groups=(fields(config.OffloadingGroupConfig, tokens_per_block=16, layer_names=("l0",), group_id=0),),
                worker_kv_bytes_per_block=size,
                enable_kv_cache_events=False,
                extra_config={"cpu_bytes_to_use": 2 * size * count, "spec_name": "TieringOffloadingSpec", "secondary_tiers": [tier]},
                engine_id=f"bench-{os.getpid()}",
                model=fields(config.OffloadingModelConfig, name="m", dtype="float16", max_model_len=1024),
                cache=fields(config.OffloadingCacheConfig, tokens_per_hash=16, blocks_per_chunk=1),
                parallel=fields(
                    config.OffloadingParallelConfig,
                    **one,
                    rank=0,
                    data_parallel_index=0,
                    data_parallel_rank_local=None,
                    is_parallelism_agnostic=True,
                ),
            )
        )
        self._base, self._manager = base, self._spec.get_manager()
        # 0.33 has a thread of its own, and a lock against it.
        self._lock = getattr(self._manager, "lock", None) or contextlib.nullcontext()
        self._keys = [base.make_offload_key(number.to_bytes(32, "big"), 0) for number in range(count)]
        self._rows = np.asarray(self._manager.primary_tier.get_kv_memoryview()).view(np.uint8)
        self._size, self._numbers = size, itertools.count()

    def serve(self, question: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            request = self._base.ReqContext(req_id="s")
            self._manager.on_new_request(request)
            for number, row in enumerate(self._manager.prepare_store(self._keys, request).store_spec.block_ids):
                self._rows[row, :] = number % 251 + 1
            self._manager.complete_store(set(self._keys), request)
            self._step()
            self._manager.on_request_finished(request)
        threading.Thread(target=self._run, daemon=True).start()
        return {"port": self.port, "pid": os.getpid()}

    def load(self, question: dict[str, Any]) -> dict[str, Any]:
        if "idle" in question:
            before_s, until_s = cpu_s(os.getpid()), time.monotonic() + question["idle"]
            while time.monotonic() < until_s:
                with self._lock:
                    self._step()
                time.sleep(0.001)
            return {"cores": (cpu_s(os.getpid()) - before_s) / question["idle"]}
        if "paused" in question:
            return {"seconds": self._load(question["port"], question["paused"])}
        each = [self._load(question["port"])]
        while sum(each) < question["seconds"]:
            each.append(self._load(question["port"]))
        return {"rate": len(each) * len(self._keys) * self._size / sum(each) / 1e6, "pid": os.getpid()}

    def _load(self, port: int, pause: int = 0) -> float:
        """Seconds of one load; with `pause`, from when that process is stopped to the miss."""
        number = next(self._numbers)
        source = {"kv_request_id": f"k{number}", "remote_host": "127.0.0.1", "remote_port": port}
        request = self._base.ReqContext(req_id=f"l{number}", kv_transfer_params={"remote_kv_source": source})
        hit, miss = self._base.LookupResult.HIT, self._base.LookupResult.MISS
        began_s, stopped_s = time.perf_counter(), 0.0
        with self._lock:
            self._manager.on_new_request(request)
        while True:
            with self._lock:
                answers = [self._manager.lookup(key, request) for key in self._keys]
                self._step()
            if pause and not stopped_s:
                os.kill(pause, signal.SIGSTOP)
                stopped_s = time.perf_counter()
            if pause and miss in answers:
                os.kill(pause, signal.SIGCONT)
                return time.perf_counter() - stopped_s
            if miss in answers or time.perf_counter() > began_s + WAIT_S:
                raise RuntimeError("a chunk was not found")
            if all(answer is hit for answer in answers):
                break
            time.sleep(0.001)
        took_s = time.perf_counter() - began_s
        with self._lock:
            found = self._manager.prepare_load(self._keys, request).block_ids
            assert all((self._rows[row] == at % 251 + 1).all() for at, row in enumerate(found))
            self._manager.complete_load(set(self._keys), request)
            self._manager.on_request_finished(request)
            self._step()
            # Else the next load finds them in host memory.
            self._manager.reset_cache()
            if hasattr(self._manager, "on_reset_flushed"):
                self._manager.on_reset_flushed()
        return took_s

    def _step(self) -> None:
        self._manager.on_schedule_end(self._base.ScheduleEndContext(new_req_ids=(), preempted_req_ids=()))

    def _run(self) -> None:
        while True:
            with self._lock:
                self._step()
            time.sleep(0.001)


if __name__ == "__main__":
    # What libraries print is none of the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    end = End(int(sys.argv[2]), int(sys.argv[3]))
    serve(end.serve if sys.argv[1] == "serve" else end.load, answers)
    with contextlib.suppress(OSError):
        # Else it stays in /dev/shm.
        os.unlink(f"/dev/shm/vllm_offload_bench-{os.getpid()}.mmap")
    # Its threads do not end by themselves.
    os._exit(0)
