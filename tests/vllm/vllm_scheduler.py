"""One request after another through the real scheduler side of the OffloadingConnector of whatever vLLM is imported."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import time
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm_stand import BLOCK_TOKENS, LAYERS, Stand

from kvstore_sdk.vllm import compat


class Lenient(SimpleNamespace):
    """Has every attribute: what was not given is None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def lenient(found: Any) -> Any:
    return Lenient(**{name: lenient(value) for name, value in vars(found).items()}) if type(found) is SimpleNamespace else found


def attention_spec() -> Any:
    known = inspect.signature(FullAttentionSpec).parameters
    given = {"block_size": BLOCK_TOKENS, "num_kv_heads": 1, "head_size": 32, "dtype": torch.bfloat16}
    return FullAttentionSpec(**{name: value for name, value in given.items() if name in known})


class Scheduler:
    """The connector's scheduler over the manager of a stand, and as much of vLLM's own as talks to it."""

    def __init__(self, stand: Stand, drafts: Collection[int] = ()) -> None:
        """Args:
        stand: Whose manager it drives.
        drafts: The groups that hold draft layers.
        """
        self.stand = stand
        module = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler")
        self.metadata = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.offloading.common")
        spec = attention_spec()
        groups = [
            Lenient(layer_names=list(LAYERS[group]), kv_cache_spec=spec, is_eagle_group=group in drafts) for group in range(stand.groups)
        ]
        kv_cache_config = Lenient(kv_cache_groups=groups, prefix_cacheable_group_ids=tuple(range(stand.groups)))
        vllm_config = lenient(stand.configs[0])
        if compat.SHARES_REGION_BETWEEN_REPLICAS:
            # There the connector takes both from the spec.
            stand.scheduler_spec.vllm_config, stand.scheduler_spec.kv_cache_config = vllm_config, kv_cache_config
        takes = inspect.signature(module.OffloadingConnectorScheduler.__init__).parameters
        arguments = {"spec": stand.scheduler_spec, "vllm_config": vllm_config, "kv_cache_config": kv_cache_config}
        self.connector = module.OffloadingConnectorScheduler(**{name: value for name, value in arguments.items() if name in takes})

    def request(self, name: str, chunks: int, seed: str) -> Any:
        """A request of whole chunks and one token; equal seeds have equal prompts."""
        tokens = chunks * self.stand.chunk_tokens
        hashes = [hashlib.sha256(f"{seed}/{block}".encode()).digest() for block in range(tokens // BLOCK_TOKENS)]
        request = Lenient(
            request_id=name,
            block_hashes=hashes,
            num_tokens=tokens + 1,
            num_prompt_tokens=tokens + 1,
            num_computed_tokens=0,
            num_preemptions=0,
            all_token_ids=list(range(tokens + 1)),
            kv_transfer_params=None,
            skip_reading_prefix_cache=False,
            done=False,
        )
        request.is_finished = lambda: request.done
        if hasattr(self.connector, "on_new_request"):
            self.connector.on_new_request(request)
        return request

    def find(self, request: Any, steps: int = 2000) -> int:
        """How many tokens can be loaded, asked step after step."""
        for _ in range(steps):
            found, _ = self.connector.get_num_new_matched_tokens(request, 0)
            if found is not None:
                return int(found)
            self.step([])
            time.sleep(0.001)
        raise AssertionError("no answer")

    def load(self, request: Any, blocks: list[list[int]], tokens: int) -> None:
        """Load so many tokens into these blocks of each group."""
        allocated = Lenient(blocks=tuple([Lenient(block_id=block, block_hash=None, is_null=False) for block in group] for group in blocks))
        self.connector.update_state_after_alloc(request, allocated, tokens)
        self.step([])

    def step(self, new: list[tuple[Any, list[list[int]], int]], finished: tuple[str, ...] = ()) -> None:
        """One step: these requests start, with their blocks and tokens."""
        output = Lenient(
            scheduled_new_reqs=[
                Lenient(req_id=request.request_id, block_ids=tuple(blocks), num_computed_tokens=request.num_computed_tokens)
                for request, blocks, _ in new
            ],
            scheduled_cached_reqs=Lenient(
                req_ids=[], new_block_ids=[], resumed_from_preemption=[], resumed_req_ids=set(), num_computed_tokens=[]
            ),
            num_scheduled_tokens={request.request_id: tokens for request, _, tokens in new},
            finished_req_ids=set(finished),
            preempted_req_ids=set(),
        )
        meta = self.connector.build_connector_meta(output)
        for request, _, tokens in new:
            request.num_computed_tokens += tokens
        self.work(meta)

    def work(self, meta: Any) -> None:
        """What all workers do with a step's metadata."""
        done: dict[int, int] = {}
        for name, store in (("store_jobs", True), ("load_jobs", False)):
            for job_id, job in getattr(meta, name).items():
                source, target = (job.src_spec, job.dst_spec) if hasattr(job, "src_spec") else job.transfer_spec
                device, host = (source, target) if store else (target, source)
                self.stand._transfer(device, host, store=store)
                done[job_id] = len(self.stand.workers)
        if done:
            report = self.metadata.OffloadingWorkerMetadata()
            report.completed_jobs.update(done)
            self.connector.update_connector_output(Lenient(kv_connector_worker_meta=report, finished_sending=set(), finished_recving=set()))

    def finish(self, request: Any) -> None:
        """The request ends."""
        request.done = True
        self.connector.request_finished(request)
        self.step([], finished=(request.request_id,))

    def settle(self) -> None:
        """Step until nothing is pending."""
        for _ in range(5000):
            if not self.connector.has_pending_push_work():
                return
            self.step([])
            time.sleep(0.001)
        raise AssertionError("work is pending for ever")
