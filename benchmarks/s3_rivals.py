"""What the S3 backend is compared with: boto3, s3fs, NIXL's object plugin and vLLM's `obj` tier, each as its own users drive it.

None of them seals, verifies, or looks whether a read was whole. Each moves every record between the store and memory that was there before.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import os
import time
from collections.abc import Callable
from typing import Any

from s3_drive import Round, Rows, Sampled, Times, by_polling, by_tasks, by_threads

SECRETS = ("benchmark", "benchmark-secret")
REGION_NAME = "us-east-1"
# As our own client has it: no second pass over the payload for its signature.
HTTP = {"addressing_style": "path", "payload_signing_enabled": False}


class Boto3:
    """One client, as many threads as records under way, and as large a pool."""

    def __init__(self, endpoint: str, bucket: str) -> None:
        self._endpoint, self._bucket = endpoint, bucket
        self._rows: Rows | None = None

    def prepare(self, round_: Round) -> None:
        import boto3
        from botocore.config import Config

        self.close()
        config = Config(
            max_pool_connections=round_.concurrency,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3=HTTP,
        )
        names = {"aws_access_key_id": SECRETS[0], "aws_secret_access_key": SECRETS[1], "region_name": REGION_NAME}
        self._client: Any = boto3.client("s3", endpoint_url=self._endpoint, config=config, **names)
        self._rows = Rows(len(round_.keys), round_.record_bytes)
        self.sampled = Sampled(self._rows.region.view)

    def put(self, round_: Round) -> Times:
        assert self._rows
        rows = self._rows

        def work(row: int) -> None:
            # botocore takes no memoryview.
            self._client.put_object(Bucket=self._bucket, Key=round_.keys[row], Body=bytes(rows.view(row)))

        return by_threads(work, len(round_.keys), round_.concurrency)

    def get(self, round_: Round) -> Times:
        assert self._rows
        rows = self._rows

        def work(row: int) -> None:
            body = self._client.get_object(Bucket=self._bucket, Key=round_.keys[row])["Body"]
            view = rows.view(row)
            while view and (length := body.readinto(view)):
                view = view[length:]
            body.close()

        return by_threads(work, len(round_.keys), round_.concurrency)

    def close(self) -> None:
        if self._rows:
            self._client.close()
            self.sampled = None  # type: ignore[assignment]
            self._rows.close()
            self._rows = None


class S3fs:
    """One asynchronous file system on a loop of its own. Its listings, and the request for the size before a read, are off."""

    def __init__(self, endpoint: str, bucket: str) -> None:
        self._endpoint, self._bucket = endpoint, bucket
        self._loop = asyncio.new_event_loop()
        self._rows: Rows | None = None

    def prepare(self, round_: Round) -> None:
        self.close()
        self._loop.run_until_complete(self._open(round_.concurrency))
        self._rows = Rows(len(round_.keys), round_.record_bytes)
        self.sampled = Sampled(self._rows.region.view)

    async def _open(self, concurrency: int) -> None:
        import s3fs

        self._fs: Any = s3fs.S3FileSystem(
            key=SECRETS[0],
            secret=SECRETS[1],
            endpoint_url=self._endpoint,
            asynchronous=True,
            loop=self._loop,
            skip_instance_cache=True,
            use_listings_cache=False,
            client_kwargs={"region_name": REGION_NAME},
            config_kwargs={
                "max_pool_connections": concurrency,
                "request_checksum_calculation": "when_required",
                "response_checksum_validation": "when_required",
                "s3": HTTP,
            },
        )
        self._session = await self._fs.set_session()

    def put(self, round_: Round) -> Times:
        assert self._rows
        rows = self._rows

        async def work(row: int) -> None:
            await self._fs._pipe_file(f"{self._bucket}/{round_.keys[row]}", bytes(rows.view(row)))

        return self._loop.run_until_complete(by_tasks(work, len(round_.keys), round_.concurrency))

    def get(self, round_: Round) -> Times:
        assert self._rows
        rows = self._rows

        async def work(row: int) -> None:
            # With another `max_concurrency` it asks for the size first.
            rows.view(row)[:] = await self._fs._cat_file(f"{self._bucket}/{round_.keys[row]}", max_concurrency=1)

        return self._loop.run_until_complete(by_tasks(work, len(round_.keys), round_.concurrency))

    def close(self) -> None:
        if self._rows:
            self._loop.run_until_complete(self._session.close())
            self.sampled = None  # type: ignore[assignment]
            self._rows.close()
            self._rows = None


class Nixl:
    """An agent with the `OBJ` plugin, driven directly: one handle a record, as many threads of the plugin as records under way."""

    def __init__(self, endpoint: str, bucket: str) -> None:
        self._endpoint, self._bucket = endpoint, bucket
        self._rows: Rows | None = None
        self._device_ids = 0

    def prepare(self, round_: Round) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self.close()
        self._agent: Any = nixl_agent("benchmark", nixl_agent_config(enable_prog_thread=False, backends=[]))
        params = {
            "access_key": SECRETS[0],
            "secret_key": SECRETS[1],
            "bucket": self._bucket,
            "endpoint_override": self._endpoint,
            "scheme": "http",
            "region": REGION_NAME,
            "use_virtual_addressing": "false",
            "req_checksum": "required",
            "num_threads": str(round_.concurrency),
        }
        self._agent.create_backend("OBJ", params)
        self._rows = Rows(len(round_.keys), round_.record_bytes)
        region = self._rows.region
        self._memory = self._agent.register_memory([(region.address, region.size_bytes, 0, "")], "DRAM")
        self.sampled = Sampled(region.view)

    def put(self, round_: Round) -> Times:
        return self._move("WRITE", round_)

    def get(self, round_: Round) -> Times:
        return self._move("READ", round_)

    def _move(self, operation: str, round_: Round) -> Times:
        assert self._rows
        agent, address, size = self._agent, self._rows.region.address, round_.record_bytes

        def begin(row: int) -> Any:
            self._device_ids += 1
            there = agent.register_memory([(0, size, self._device_ids, round_.keys[row])], "OBJ")
            here = agent.get_xfer_descs([(address + row * size, size, 0)], "DRAM")
            handle = agent.initialize_xfer(operation, here, there.trim(), "benchmark")
            agent.transfer(handle)
            return handle, there

        def done(under_way: dict[int, Any]) -> list[int]:
            finished = []
            for row, (handle, there) in under_way.items():
                state = agent.check_xfer_state(handle)
                if state == "DONE":
                    agent.release_xfer_handle(handle)
                    agent.deregister_memory(there)
                    finished.append(row)
                elif state != "PROC":
                    raise RuntimeError(f"NIXL: {operation} ended as {state}")
            return finished

        return by_polling(begin, done, len(round_.keys), round_.concurrency)

    def close(self) -> None:
        if self._rows:
            self._agent.deregister_memory(self._memory)
            self._agent = None
            self.sampled = None  # type: ignore[assignment]
            self._rows.close()
            self._rows = None


class Vllm:
    """vLLM's `obj` tier below its own manager and host memory: jobs of one chunk, as many I/O threads as jobs under way.

    Its objects lie below `prefix`, under names of its own. It lets nobody choose when checksums are sent: NIXL sends them with every put.
    """

    def __init__(self, endpoint: str, bucket: str, prefix: str) -> None:
        self._endpoint, self._bucket, self._prefix = endpoint, bucket, prefix
        self._manager: Any = None
        self._jobs = 0

    def prepare(self, round_: Round) -> None:
        import vllm.v1.kv_offload.base as base
        import vllm.v1.kv_offload.tiering.base as tiering
        from calls_child import fields
        from vllm.v1.kv_offload import config
        from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

        self.close()
        # vLLM asks NIXL how long each transfer took, and fails when NIXL was not told to know.
        os.environ.setdefault("NIXL_TELEMETRY_ENABLE", "y")
        self._base, self._tiering = base, tiering
        tier = {
            "type": "obj",
            "store_config": {
                "bucket": self._bucket,
                "endpoint_override": self._endpoint,
                "access_key": SECRETS[0],
                "secret_key": SECRETS[1],
                "region": REGION_NAME,
            },
            "prefix": self._prefix,
            "io_threads": round_.concurrency,
        }
        sizes = {"rank": 0, "world_size": 1, "tp_size": 1, "pp_size": 1, "pcp_size": 1, "dcp_size": 1}
        spec = TieringOffloadingSpec(
            fields(
                config.OffloadingConfig,
                groups=(fields(config.OffloadingGroupConfig, tokens_per_block=16, layer_names=("l0",), group_id=0),),
                worker_kv_bytes_per_block=round_.record_bytes,
                enable_kv_cache_events=False,
                extra_config={"cpu_bytes_to_use": len(round_.keys) * round_.record_bytes, "secondary_tiers": [tier]},
                engine_id=f"bench-{os.getpid()}-{time.monotonic_ns()}",
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
        self._manager = spec.get_manager()
        self._tier = self._manager.secondary_tiers[0]
        if self._tier.block_size_bytes != round_.record_bytes:
            raise RuntimeError(f"vLLM moves {self._tier.block_size_bytes} bytes a chunk instead of {round_.record_bytes}")
        view = self._tier._primary_kv_view
        flat = memoryview((ctypes.c_char * view.nbytes).from_buffer(view)).cast("B")
        flat[:] = (os.urandom(1 << 20) * (view.nbytes // (1 << 20) + 1))[: view.nbytes]
        self.sampled = Sampled(flat)

    def put(self, round_: Round) -> Times:
        return self._move(self._tier.submit_store, round_, load=False)

    def get(self, round_: Round) -> Times:
        return self._move(self._tier.submit_load, round_, load=True)

    def _move(self, submit: Callable[[Any], None], round_: Round, *, load: bool) -> Times:
        import numpy as np

        keys = [self._base.make_offload_key(hashlib.sha256(key.encode()).digest(), 0) for key in round_.keys]
        context = self._base.ReqContext(req_id=f"r{self._jobs}")
        self._tier.on_new_request(context)
        rows_of: dict[int, int] = {}

        def begin(row: int) -> int:
            self._jobs += 1
            rows_of[self._jobs] = row
            submit(self._tiering.TransferJob(self._jobs, [keys[row]], np.array([row], dtype=np.int32), load, context))
            return self._jobs

        def done(under_way: dict[int, Any]) -> list[int]:
            results = list(self._tier.get_finished_jobs())
            if not all(result.success for result in results):
                raise RuntimeError(f"a job failed: {results}")
            return [rows_of[result.job_id] for result in results]

        times = by_polling(begin, done, len(keys), round_.concurrency)
        self._tier.on_request_finished(context)
        return times

    def close(self) -> None:
        if self._manager is not None:
            self.sampled = None  # type: ignore[assignment]
            self._manager.shutdown()
            self._manager = self._tier = None
