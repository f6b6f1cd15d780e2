"""A real vLLM engine that offloads through the adapter, in the process of whoever starts it."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_models import TinyModel

HOST_BYTES = 16 << 20
TOKENS = 6
"""How many tokens are generated for each prompt."""


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
            worst = max([worst, *(abs(value - found[token]) if token in found else float("inf") for token, value in mine)])
        return worst


def connector(tiers: Sequence[Mapping[str, Any]], *, spec: str = "KVStoreTieringSpec", **extra: Any) -> dict[str, Any]:
    """`kv_transfer_config` with these tiers."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": spec,
            **({"spec_module_path": "kvstore_sdk.vllm"} if spec == "KVStoreTieringSpec" else {}),
            "cpu_bytes_to_use": HOST_BYTES,
            "secondary_tiers": [dict(tier) for tier in tiers],
            **extra,
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
    """One engine. `tier` is the entry of the one tier under test; None for an engine that offloads nothing."""

    def __init__(self, model: TinyModel, tier: Mapping[str, Any] | None, *, extra: Mapping[str, Any] | None = None, **options: Any) -> None:
        from vllm import LLM

        self.model = model
        # vLLM collects garbage several times while it starts. What is here already is out of the way until it stops: that saves a second.
        gc.freeze()
        transfer = None if tier is None else connector([tier], **(extra or {}))
        try:
            self._llm: Any = LLM(**arguments(model, transfer, **options))
        except BaseException:
            _forget_engine()
            raise

    def ask(self, prompts: Sequence[Sequence[int]]) -> list[Answer]:
        """Answer the prompts, one after another, so that what one stores the next may find."""
        from vllm import SamplingParams

        parameters = SamplingParams(temperature=0, max_tokens=TOKENS, detokenize=False, logprobs=3)
        return [self._answer(list(prompt), parameters) for prompt in prompts]

    def _answer(self, prompt: list[int], parameters: Any) -> Answer:
        (output,) = self._llm.generate([{"prompt_token_ids": prompt}], parameters, use_tqdm=False)
        (completion,) = output.outputs
        logprobs = tuple(tuple(sorted((token, found.logprob) for token, found in step.items())) for step in completion.logprobs)
        return Answer(output.num_cached_tokens, tuple(completion.token_ids), logprobs)

    @property
    def core(self) -> Any:
        """The `EngineCore`, which lives in this process."""
        return self._llm.llm_engine.engine_core.engine_core

    @property
    def manager(self) -> Any:
        """The `TieringOffloadingManager`."""
        return self.core.scheduler.connector.connector_scheduler.manager

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

    @property
    def block_tokens(self) -> int:
        """Tokens of a block; vLLM may choose others than it was given."""
        return int(self.core.vllm_config.cache_config.block_size)

    def settle(self, timeout_s: float = 20.0) -> None:
        """Step until the tier has reported every job: what was computed is stored."""
        import time

        until_s = time.monotonic() + timeout_s
        while self.core.scheduler.connector.has_pending_push_work():
            if time.monotonic() > until_s:
                raise TimeoutError(f"jobs are still open after {timeout_s} s")
            self.core.step_fn()

    def reset(self) -> None:
        """Reset the engine's caches and the tier's, as an update of the weights does."""
        self._llm.reset_prefix_cache(reset_running_requests=False, reset_connector=True)

    def stop(self) -> None:
        """Shut down and leave nothing behind. Idempotent."""
        if self._llm is None:
            return
        self._llm.llm_engine.engine_core.shutdown()
        self._llm = None
        _forget_engine()


def _forget_engine() -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()


def reusable(prompt_tokens: int, chunk_tokens: int) -> int:
    """Tokens of a prompt that can be reused: vLLM computes the last token always, and loads whole chunks."""
    return (prompt_tokens - 1) // chunk_tokens * chunk_tokens
