"""Both sides of an engine without a model: vLLM's own manager, specs and region of whatever version is imported, and KV tensors of zeros.

Two ranks, two groups. The pages of a row, for one rank (the sizes are bytes):

    tensor 0: 1,024 (group 0 uses all, group 1 the first 768)     tensor 1: 512 (group 0 alone)
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import itertools
import os
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import vllm.v1.core.kv_cache_utils as hashing
from vllm.utils.hashing import get_hash_fn_by_name

from kvstore_sdk.vllm import compat
from kvstore_sdk.vllm.spec import KVStoreTieringSpec

offload = importlib.import_module("vllm.v1.kv_offload.base")
PAGES = (1024, 512)
REFS = (((0, 1024), (1, 512)), ((0, 768),))
LAYERS = (("layers.0", "layers.1"), ("layers.2",))
BLOCK_TOKENS = 16

_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class FullAttentionSpec:
    """Named as vLLM's, which changes its fields."""

    block_size: int = BLOCK_TOKENS
    num_kv_heads: int = 1
    head_size: int = 32


class Layer:
    """What vLLM's attention layers answer."""

    def get_kv_cache_spec(self, config: object) -> object:
        return FullAttentionSpec()

    def get_attn_backend(self) -> Any:
        return SimpleNamespace(get_name=lambda: "FAKE_ATTN")


def engine_config(ranks: int, rank: int, extra: Mapping[str, Any], engine_id: str, **changes: Any) -> Any:
    """As much of a `VllmConfig` as the adapter, and vLLM 0.24, look at. `changes` are attributes by dotted name, dots as `__`."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            model="tiny",
            dtype=torch.bfloat16,
            quantization=None,
            max_model_len=1024,
            hf_config=SimpleNamespace(to_dict=lambda: {"rope": 1}, _commit_hash="c0ffee"),
            get_total_num_kv_heads=lambda: 2,
        ),
        cache_config=SimpleNamespace(
            cache_dtype="auto",
            prefix_caching_hash_algo="sha256_cbor",
            block_size=BLOCK_TOKENS,
            hash_block_size=None,
            enable_prefix_caching=True,
            mamba_cache_mode="none",
            calculate_kv_scales=False,
        ),
        load_config=SimpleNamespace(load_format="auto"),
        lora_config=None,
        speculative_config=None,
        parallel_config=SimpleNamespace(
            nnodes=1,
            rank=rank,
            world_size=ranks,
            tensor_parallel_size=ranks,
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            data_parallel_size=1,
            data_parallel_index=0,
        ),
        compilation_config=SimpleNamespace(static_forward_context={name: Layer() for names in LAYERS for name in names}),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra, engine_id=engine_id),
        kv_events_config=SimpleNamespace(enable_kv_cache_events=bool(extra.get("test_events"))),
        instance_id=engine_id,
    )
    for name, value in changes.items():
        *path, last = name.split("__")
        owner: Any = config
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, last, value)
    return config


class Stand:
    """An engine's two sides. `manager` is the real `TieringOffloadingManager`."""

    def __init__(
        self,
        tiers: Sequence[Mapping[str, Any]],
        *,
        ranks: int = 2,
        groups: int = 2,
        blocks: int = 32,
        blocks_per_chunk: int = 2,
        rows: int = 6,
        spec_class: type[Any] = KVStoreTieringSpec,
        extra: Mapping[str, Any] | None = None,
        workers: bool = True,
        replica: str = "",
        **changes: Any,
    ) -> None:
        self.ranks, self.groups, self.blocks_per_chunk, self.blocks = ranks, groups, blocks_per_chunk, blocks
        self.chunk_tokens = BLOCK_TOKENS * blocks_per_chunk
        row_bytes = -(-sum(PAGES) * blocks_per_chunk * ranks // 4096) * 4096
        self.extra: dict[str, Any] = {
            "cpu_bytes_to_use": rows * row_bytes,
            "block_size": self.chunk_tokens,
            "secondary_tiers": [dict(tier) for tier in tiers],
            **(extra or {}),
        }
        # vLLM adds the replica itself.
        self.engine_id = f"kvstore-test-{os.getpid()}-{next(_numbers)}{replica}"
        self.configs = [engine_config(ranks, rank, self.extra, self.engine_id, **changes) for rank in range(ranks)]
        self._asking: Any = self.configs[0]
        self.tensors = [[torch.zeros((blocks, page), dtype=torch.int8) for page in PAGES] for _ in range(ranks)]
        self.workers: list[Any] = []
        self.worker_specs: list[Any] = []
        self._jobs = itertools.count(1)
        self._closed = False
        if workers:
            # A worker of a real engine has its configuration around it, and may run on a GPU.
            with (
                mock.patch.object(compat, "current_config", side_effect=lambda spec: self._asking),
                mock.patch.object(compat, "host_is_the_device", return_value=True),
            ):
                for rank in range(ranks):
                    self._asking = self.configs[rank]
                    spec = self.spec(spec_class, rank)
                    self.worker_specs.append(spec)
                    self.workers.append(self._worker(spec, rank))
        self.scheduler_spec = self.spec(spec_class, 0)
        self.manager = self.scheduler_spec.get_manager()
        # In this order: the engine draws its seed after the tiers are built.
        hashing.init_none_hash(get_hash_fn_by_name("sha256_cbor"))

    # Building.

    def spec(self, spec_class: type[Any], rank: int) -> Any:
        """A spec as the connector of this version builds it."""
        if compat.SHARES_REGION_BETWEEN_REPLICAS:
            return spec_class(self.configs[rank], self._kv_cache_config())
        return spec_class(self._offloading_config(rank))

    def _kv_cache_config(self) -> Any:
        return SimpleNamespace(
            num_blocks=self.blocks,
            kv_cache_tensors=[SimpleNamespace(size=page * self.blocks, block_stride=0) for page in PAGES],
            kv_cache_groups=[
                SimpleNamespace(layer_names=list(LAYERS[group]), kv_cache_spec=FullAttentionSpec()) for group in range(self.groups)
            ],
        )

    def _offloading_config(self, rank: int) -> Any:
        module = importlib.import_module("vllm.v1.kv_offload.config")

        def build(kind: str, **values: Any) -> Any:
            cls = getattr(module, kind)
            known = {field.name for field in dataclasses.fields(cls)}
            return cls(**{key: value for key, value in values.items() if key in known})

        groups = tuple(
            build("OffloadingGroupConfig", tokens_per_block=BLOCK_TOKENS, layer_names=LAYERS[group], group_id=group)
            for group in range(self.groups)
        )
        parallel = self.configs[rank].parallel_config
        return build(
            "OffloadingConfig",
            groups=groups,
            worker_kv_bytes_per_block=sum(PAGES),
            enable_kv_cache_events=bool(self.extra.get("test_events")),
            extra_config=self.extra,
            engine_id=self.engine_id,
            model=build("OffloadingModelConfig", name="tiny", dtype="bfloat16", max_model_len=1024),
            cache=build("OffloadingCacheConfig", tokens_per_hash=BLOCK_TOKENS, blocks_per_chunk=self.blocks_per_chunk),
            parallel=build(
                "OffloadingParallelConfig",
                rank=rank,
                world_size=self.ranks,
                tp_size=self.ranks,
                pp_size=1,
                pcp_size=1,
                dcp_size=1,
                data_parallel_index=parallel.data_parallel_index,
                data_parallel_size=parallel.data_parallel_size,
                data_parallel_rank_local=None,
                is_parallelism_agnostic=False,
            ),
        )

    def _worker(self, spec: Any, rank: int) -> Any:
        caches = offload.CanonicalKVCaches(
            tensors=[
                offload.CanonicalKVCacheTensor(tensor=tensor, page_size_bytes=page)
                for tensor, page in zip(self.tensors[rank], PAGES, strict=True)
            ],
            group_data_refs=[
                [offload.CanonicalKVCacheRef(tensor_idx=tensor, page_size_bytes=size) for tensor, size in REFS[group]]
                for group in range(self.groups)
            ],
        )
        if hasattr(offload.OffloadingSpec, "get_worker"):
            return spec.get_worker(caches)
        return [handler for _, _, handler in spec.get_handlers(caches)]

    # The workers' work.

    def _transfer(self, device: Any, host: Any, *, store: bool) -> None:
        job = next(self._jobs)
        for worker in self.workers:
            source, target = (device, host) if store else (host, device)
            if isinstance(worker, list):
                handler = worker[0 if store else 1]
                assert handler.transfer_async(job, (source, target))
                finished = [result for one in worker for result in one.get_finished()]
            else:
                assert (worker.submit_store if store else worker.submit_load)(job, source, target)
                finished = worker.get_finished()
                worker.wait({job})
            assert [(result.job_id, result.success) for result in finished] == [(job, True)]

    def device_spec(self, blocks: Sequence[Sequence[int]], first: Sequence[int] | None = None) -> Any:
        """vLLM's name for these blocks of each group, of which the first is block `first` of the request."""
        return offload.GPULoadStoreSpec(
            [block for of_group in blocks for block in of_group],
            group_sizes=[len(of_group) for of_group in blocks],
            block_indices=list(first or [0] * self.groups),
        )

    # What a scheduler does.

    def request(self, name: str, keys: Iterable[bytes] = (), **fields: Any) -> Any:
        """Announce a request. Its keys end at whole chunks, as the connector's scheduler says from 0.31 on."""
        context = offload.ReqContext(req_id=name, **fields)
        if compat.HAS_KEY_POSITIONS:
            places: dict[bytes, int] = {}
            for key in keys:
                group = key[-4:]
                places[group] = places.get(group, 0) + 1
                context.set_offload_key_position(key, places[group] * self.chunk_tokens)
        self.manager.on_new_request(context)
        return context

    def finish(self, context: Any) -> None:
        self.manager.on_request_finished(context)

    def step(self) -> None:
        """The end of a step."""
        if hasattr(offload, "ScheduleEndContext"):
            self.manager.on_schedule_end(offload.ScheduleEndContext(new_req_ids=[], preempted_req_ids=[]))
        else:
            self.manager.on_schedule_end()

    def settle(self, timeout_s: float = 30.0) -> None:
        """Step until every job is reported."""
        until_s = time.monotonic() + timeout_s
        while self.manager.has_pending_work():
            assert time.monotonic() < until_s, "jobs stay open"
            self.step()
            time.sleep(0.001)

    def lookup(self, context: Any, keys: Sequence[bytes], timeout_s: float = 30.0) -> list[bool]:
        """Ask step after step until every key is a hit in host memory, or a miss."""
        until_s = time.monotonic() + timeout_s
        while True:
            answers = [self.manager.lookup(key, context) for key in keys]
            if all(answer is compat.HIT or answer is compat.MISS for answer in answers):
                return [answer is compat.HIT for answer in answers]
            assert time.monotonic() < until_s, f"no answer: {answers}"
            self.step()
            time.sleep(0.001)

    def store(self, context: Any, keys: Sequence[bytes], blocks: Sequence[Sequence[int]]) -> None:
        """Store chunks: blocks to rows, rows to the tiers."""
        output = self.manager.prepare_store(list(keys), context)
        assert output is not None
        assert list(output.keys_to_store) == list(keys)
        self._transfer(self.device_spec(blocks), output.store_spec, store=True)
        self.manager.complete_store(set(keys), context)

    def load(self, context: Any, keys: Sequence[bytes], blocks: Sequence[Sequence[int]]) -> None:
        """Load chunks that are hits: rows to blocks."""
        host = self.manager.prepare_load(list(keys), context)
        self._transfer(self.device_spec(blocks), host, store=False)
        self.manager.complete_load(set(keys), context)

    def fill(self, seed: int, blocks: Sequence[Sequence[int]]) -> list[bytes]:
        """Put random bytes into what each group uses of its blocks; returns them, rank by rank, group by group."""
        source = random.Random(seed)
        for rank in range(self.ranks):
            for group, of_group in enumerate(blocks):
                for block in of_group:
                    for tensor, size in REFS[group]:
                        data = torch.frombuffer(bytearray(source.randbytes(size)), dtype=torch.int8)
                        self.tensors[rank][tensor][block, :size] = data
        return self.content(blocks)

    def content(self, blocks: Sequence[Sequence[int]]) -> list[bytes]:
        """What each group has in its blocks."""
        return [
            b"".join(self.tensors[rank][tensor][block, :size].numpy().tobytes() for block in of_group for tensor, size in REFS[group])
            for rank in range(self.ranks)
            for group, of_group in enumerate(blocks)
        ]

    def keys(self, seed: str, chunks: int) -> list[bytes]:
        """Keys of `chunks` chunks of each group, group by group."""
        return [
            offload.make_offload_key(hashlib.sha256(f"{seed}/{chunk}".encode()).digest(), group)
            for group in range(self.groups)
            for chunk in range(chunks)
        ]

    @property
    def adapter(self) -> Any:
        """The `KVStoreTier`."""
        return self.manager.secondary_tiers[0]

    @property
    def metrics(self) -> Any:
        """What its `Tier` counts."""
        return self.adapter._tier.metrics

    def close(self) -> None:
        """Shut down in vLLM's order. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for worker in self.workers:
            for part in worker if isinstance(worker, list) else [worker]:
                part.shutdown()
        self.manager.shutdown()
