"""A real vLLM engine that offloads through the adapter, in the process of whoever starts it."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from vllm_models import TinyModel, prompts
from vllm_records import record_paths

from kvstore_sdk.keys import ChunkKey

HOST_BYTES = 16 << 20
PROMPT_TOKENS = 405
"""No whole number of blocks: at the end of the last one a known prompt leaves something to compute."""
TOKENS = 6
"""How many tokens are generated for each prompt."""
OURS = "KVStoreOffloadingSpec"
PATIENT = {"lookup_timeout_s": 20.0, "load_timeout_s": 30.0}
"""Limits for tests that are not about them: on a busy machine a store may take longer than an engine should wait."""


@dataclass(frozen=True)
class Answer:
    """What the engine made of a prompt.

    Attributes:
        reused: Tokens whose KV was not computed.
        tokens: Generated.
        logprobs: Of each of the three likeliest tokens at each step.
    """

    reused: int
    tokens: tuple[int, ...]
    logprobs: tuple[tuple[tuple[int, float], ...], ...]

    def differs(self, other: Answer) -> float:
        """The largest difference of two log-probabilities at one place; infinite where the tokens differ."""
        if self.tokens != other.tokens:
            return float("inf")
        worst = 0.0
        for mine, theirs in zip(self.logprobs, other.logprobs, strict=True):
            found = dict(theirs)
            apart = [abs(value - found.get(token, float("inf"))) for token, value in mine]
            # Not a number is not near anything.
            worst = max([worst, *(gap if gap == gap else float("inf") for gap in apart)])
        return worst


def connector(tiers: Sequence[Mapping[str, Any]], *, spec: str = "KVStoreTieringSpec", **extra: Any) -> dict[str, Any]:
    """`kv_transfer_config` with these tiers."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": spec,
            **({"spec_module_path": "kvstore_sdk.vllm"} if spec.startswith("KVStore") else {}),
            "cpu_bytes_to_use": HOST_BYTES,
            "secondary_tiers": [dict(tier) for tier in tiers],
            **extra,
            **({"kvstore": {"lookup_timeout_s": PATIENT["lookup_timeout_s"], **extra.get("kvstore", {})}} if spec == OURS else {}),
        },
    }


def arguments(model: TinyModel, transfer: Mapping[str, Any] | None, **options: Any) -> dict[str, Any]:
    """Arguments of vLLM's `LLM` or `AsyncEngineArgs` for a tiny model."""
    return {
        "model": str(model.path),
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": "bfloat16",
        "max_model_len": 1024,
        "block_size": model.block_tokens,
        "num_gpu_blocks_override": model.blocks,
        "seed": 0,
        **model.engine,
        **({"kv_transfer_config": dict(transfer)} if transfer is not None else {}),
        **options,
    }


class Engine:
    """One engine.

    `tier` is the entry of the one tier under test, or all entries there are, or None for an engine that offloads nothing. With
    `extra={"spec": "KVStoreOffloadingSpec"}` they lie below the SDK's host memory, otherwise below vLLM's.
    """

    def __init__(
        self,
        model: TinyModel,
        tier: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
        *,
        extra: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        from vllm import LLM

        self.model = model
        # vLLM collects garbage several times while it starts. What is here already is out of the way until it stops: that saves a second.
        gc.freeze()
        tiers = [tier] if isinstance(tier, Mapping) else tier
        transfer = None if tiers is None else connector(tiers, **(extra or {}))
        try:
            self._llm: Any = LLM(**arguments(model, transfer, **options))
            # vLLM may choose others than it was given.
            self.block_tokens = int(self.core.vllm_config.cache_config.block_size)
        except BaseException:
            _forget_engine()
            raise

    def ask(self, prompts: Sequence[Sequence[int]], transfer_params: Mapping[str, Any] | None = None) -> list[Answer]:
        """Answer the prompts, one after another, so that what one stores the next may find. `transfer_params` are the requests'."""
        from vllm import SamplingParams

        more = {} if transfer_params is None else {"extra_args": {"kv_transfer_params": dict(transfer_params)}}
        parameters = SamplingParams(temperature=0, max_tokens=TOKENS, detokenize=False, logprobs=3, **more)
        return [self._answer(list(prompt), parameters) for prompt in prompts]

    def _answer(self, prompt: list[int], parameters: Any) -> Answer:
        (output,) = self._llm.generate([{"prompt_token_ids": prompt}], parameters, use_tqdm=False)
        (completion,) = output.outputs
        logprobs = tuple(tuple(sorted((token, found.logprob) for token, found in step.items())) for step in completion.logprobs)
        return Answer(output.num_cached_tokens, tuple(completion.token_ids), logprobs)

    def generate(self, prompts: Sequence[Sequence[int]], tokens: Sequence[int]) -> None:
        """Answer prompts, several at a time, each with a number of tokens of its own."""
        from vllm import SamplingParams

        parameters = [SamplingParams(temperature=0, max_tokens=count, detokenize=False, ignore_eos=True) for count in tokens]
        self._llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], parameters, use_tqdm=False)

    @property
    def core(self) -> Any:
        """The `EngineCore`, which lives in this process."""
        return self._llm.llm_engine.engine_core.engine_core

    @property
    def manager(self) -> Any:
        """vLLM's `TieringOffloadingManager`, or ours."""
        return self.core.scheduler.connector.connector_scheduler.manager

    @property
    def store(self) -> Any:
        """The SDK's `TieredStore`, where there is one."""
        return self.manager._store

    @property
    def adapter(self) -> Any:
        """The `KVStoreTier`."""
        return self.manager.secondary_tiers[0]

    @property
    def tier(self) -> Any:
        """The SDK's `Tier` behind it."""
        return self.adapter._tier

    @property
    def metrics(self) -> Any:
        """What that counted."""
        return self.tier.metrics

    def settle(self, timeout_s: float = 20.0) -> None:
        """Step until the tier has reported every job: what was computed is stored."""
        until_s = time.monotonic() + timeout_s
        while self.core.scheduler.connector.has_pending_push_work():
            if time.monotonic() > until_s:
                raise TimeoutError(f"jobs are still open after {timeout_s} s")
            self.core.step_fn()

    def reset(self) -> None:
        """Reset the engine's caches and the tier's, as an update of the weights does."""
        self._llm.reset_prefix_cache(reset_running_requests=False, reset_connector=True)

    def reset_own_caches(self) -> None:
        """Forget what the engine and vLLM's host tier hold; the tier under test is not told."""
        self.reset_device()
        self.manager.primary_tier.reset_cache()

    def reset_device(self) -> None:
        """Forget what the engine's own cache holds. Host memory is not told."""
        self._llm.reset_prefix_cache()

    def pages(self) -> list[list[str]]:
        """Of each rank, XXH3 of every page of its cache, layer by layer."""
        return self._llm.collective_rpc(_page_digests)

    def stop(self) -> None:
        """Shut down and leave nothing behind. Idempotent."""
        if self._llm is None:
            return
        self._llm.llm_engine.engine_core.shutdown()
        self._llm = None
        _forget_engine()


def fs_entry(folder: Path, **options: Any) -> dict[str, Any]:
    """A tier's entry for a folder."""
    return {"type": "kvstore", "backend": "fs", "location": str(folder), **PATIENT, **options}


class Stored:
    """What an engine stored in a folder: for each prompt its answer, and its records in the order of their names."""

    def __init__(self, model: TinyModel, folder: Path) -> None:
        self.model, self.folder = model, folder
        self.prompts = prompts(8, PROMPT_TOKENS)
        self.answers: list[Answer] = []
        self.keys: list[list[ChunkKey]] = []
        engine = Engine(model, fs_entry(folder))
        try:
            self.reuse = reusable(PROMPT_TOKENS, engine.block_tokens)
            for prompt in self.prompts:
                before = set(record_paths(folder))
                self.answers += engine.ask([prompt])
                engine.settle()
                self.keys.append([key for key in record_paths(folder) if key not in before])
        finally:
            engine.stop()

    def check(self, answers: Sequence[Answer], first: int = 0) -> None:
        """Assert that these are the right answers to the prompts from number `first` on."""
        expected = self.answers[first : first + len(answers)]
        assert [found.differs(answer) for found, answer in zip(answers, expected, strict=True)] == [0.0] * len(answers)


def _page_digests(worker: Any) -> list[str]:
    """In a rank."""
    import torch

    pages = [cache.contiguous().view(torch.uint8).reshape(cache.shape[0], -1).numpy() for cache in worker.model_runner.kv_caches]
    return [xxhash.xxh3_128_hexdigest(page) for layer in pages for page in layer]


def _forget_engine() -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()


def reusable(prompt_tokens: int, chunk_tokens: int) -> int:
    """Tokens of a prompt that can be reused: vLLM computes the last token always, and loads whole chunks."""
    return (prompt_tokens - 1) // chunk_tokens * chunk_tokens


class EngineProcess:
    """An engine in a process of its own, driven by `engine_process.py`."""

    def __init__(self, model: TinyModel, tier: Mapping[str, Any], *, extra: Mapping[str, Any] | None = None, **options: Any) -> None:
        here = Path(__file__).parent
        root = here.parents[1]
        paths = [root, root / "backends", root / "conformance", here]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed by `stop`
        # A session of its own: its ranks are killed with it.
        self._process = subprocess.Popen(
            [sys.executable, here / "engine_process.py"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )
        try:
            self.block_tokens = self._start(model, tier, extra, options)
        except BaseException:
            self.kill()
            self._log.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def post(self, **command: Any) -> None:
        """Send a command and wait for nothing."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command, default=str).encode() + b"\n")
        self._process.stdin.flush()

    def receive(self, timeout_s: float = 240.0) -> Any:
        """The answer to the oldest command that was not answered yet."""
        assert self._process.stdout is not None
        until_s = time.monotonic() + timeout_s
        while True:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, until_s - time.monotonic()))
            line = self._process.stdout.readline() if ready else b""
            if line.startswith(b"ANSWER "):
                return json.loads(line.removeprefix(b"ANSWER "))
            if not line:
                raise AssertionError(f"the engine's process does not answer: {self.log()[-4000:]}")

    def send(self, **command: Any) -> Any:
        self.post(**command)
        return self.receive()

    def ask(self, prompts: Sequence[Sequence[int]]) -> list[Answer]:
        self.post(ask=prompts)
        return self.answers()

    def answers(self) -> list[Answer]:
        """Those to prompts that were posted."""
        return [
            Answer(
                found["reused"], tuple(found["tokens"]), tuple(tuple((token, value) for token, value in step) for step in found["logprobs"])
            )
            for found in self.receive()
        ]

    def restart(self, model: TinyModel, tier: Mapping[str, Any], *, extra: Mapping[str, Any] | None = None, **options: Any) -> None:
        """Another engine in the same process, which has imported vLLM by now."""
        self.send(stop=True)
        self.block_tokens = self._start(model, tier, extra, options)

    def _start(self, model: TinyModel, tier: Mapping[str, Any], extra: Mapping[str, Any] | None, options: Mapping[str, Any]) -> int:
        described = dataclasses.asdict(model) | {"path": str(model.path)}
        answer = self.send(start={"model": described, "tier": tier, "extra": extra, "options": options})
        return int(answer["block_tokens"])

    def call(self, function: str, **arguments: Any) -> Any:
        """Call `module:function` with the engine there; it returns what JSON can say."""
        return self.send(call=function, arguments=arguments)

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def kill(self) -> None:
        """`kill -9` of the process and of its ranks."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def stop(self) -> None:
        """End in peace, or by force after a while. Idempotent."""
        if self._process.returncode is None:
            try:
                self.post(stop=True)
                self._process.communicate(timeout=60)
            except (subprocess.TimeoutExpired, BrokenPipeError):
                self.kill()
        self._log.close()
