"""A vLLM engine with a small model of random weights, for the demo and for the conformance suite; and the demo's process for one.

`python -m kvstore_sdk.cli.demo_engine REQUEST` runs an engine inside this process, which answers one prompt after another. What it is asked
and what it answers are JSON files, because engines print to standard output.
"""

from __future__ import annotations

import gc
import json
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvstore_sdk.tier import COUNTERS

__all__ = [
    "BLOCK_TOKENS",
    "CHUNK_BYTES",
    "ENVIRONMENT",
    "LOG_MARK",
    "TOLERANCE",
    "VOCABULARY",
    "Answer",
    "Answers",
    "Request",
    "answer",
    "build_model",
    "difference",
    "reusable_tokens",
]

BLOCK_TOKENS = 32
VOCABULARY = 2048
LAYERS, KV_HEADS, HEAD_SIZE, BYTES_OF_FLOAT32 = 8, 2, 64, 4
CHUNK_BYTES = LAYERS * BLOCK_TOKENS * KV_HEADS * 2 * HEAD_SIZE * BYTES_OF_FLOAT32
ANSWER_TOKENS = 8
LABELS = frozenset(label for spec in COUNTERS.values() for label in spec.labels)
LOG_MARK = "kvstore_sdk: "
STORE_TIMEOUT_S = 60.0
"""The tier's own time-out of a store is half of this."""
TOLERANCE = 0.05
"""Of a log-probability: a prompt computed in other parts may be rounded at other places. Wrong KV is off by more than 0.2."""
HOST_BYTES = 1 << 29

ENVIRONMENT = {
    # The engine in the process that is started, not in another one below it: half a minute less for each.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # Nothing here is worth a compiler run of some 15 seconds.
    "TORCH_COMPILE_DISABLE": "1",
    # The model lies on disk, and nobody has to know that it runs.
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
"""For an engine's process, where the caller's environment says nothing else. To be set before vLLM is imported."""


@dataclass
class Request:
    """What one engine is to do.

    Attributes:
        model: Folder of the model; made when it is not there.
        prompts: Token ids.
        tiers: Entries of `secondary_tiers`; none for an engine without offloading.
        wait_for_stores: Chunks that every tier must hold before the engine ends.
        answers: File for an `Answers`.
    """

    model: str
    prompts: list[list[int]]
    answers: str
    tiers: list[dict[str, Any]] = field(default_factory=list)
    wait_for_stores: int = 0


@dataclass
class Answer:
    """How one prompt was answered."""

    tokens: list[int]
    logprobs: list[float]
    reused_tokens: int
    first_token_ms: float


@dataclass
class Answers:
    """What one engine did.

    Attributes:
        answers: One for each prompt.
        counted: What its tiers counted: name, labels and value of each metric.
    """

    answers: list[Answer]
    counted: list[list[Any]] = field(default_factory=list)


def build_model(folder: Path) -> None:
    """Write a small Llama of random weights: 26 million of them, so that a prompt costs half a second on two cores."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_SIZE,
        vocab_size=VOCABULARY,
        max_position_embeddings=4096,
        # Five times the usual: with less, a random model gives every prompt the same answer, and then equal answers prove nothing.
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def answer(request: Request) -> Answers:
    """Start an engine, answer the prompts, wait until the tiers have what they should, end the engine.

    Raises:
        TimeoutError: a tier did not store in time.
    """
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    if not Path(request.model).exists():
        build_model(Path(request.model))
    options: dict[str, Any] = {}
    if request.tiers:
        extra = {
            "spec_name": "KVStoreTieringSpec",
            "spec_module_path": "kvstore_sdk.vllm",
            "cpu_bytes_to_use": HOST_BYTES,
            "secondary_tiers": request.tiers,
        }
        options["kv_transfer_config"] = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    # vLLM collects garbage several times while it starts: what is here already is out of the way, which saves seconds.
    gc.freeze()
    engine = LLM(
        model=request.model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        # In bfloat16 the kernels of a CPU with AMX round enough to choose other tokens when a prompt is computed in other parts.
        dtype="float32",
        max_model_len=2048,
        block_size=BLOCK_TOKENS,
        prefix_caching_hash_algo="sha256_cbor",
        disable_log_stats=False,
        **options,
    )
    sampling = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, detokenize=False, logprobs=0)
    answers = []
    try:
        for tokens in request.prompts:
            output = engine.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)[0]
            chosen = output.outputs[0]
            logprobs = [step[token].logprob for step, token in zip(chosen.logprobs, chosen.token_ids, strict=True)]
            answers.append(
                Answer(list(chosen.token_ids), logprobs, output.num_cached_tokens or 0, output.metrics.first_token_latency * 1e3)
            )
        _wait_for_stores(engine, len(request.tiers), request.wait_for_stores)
        counted = _counted(engine) if request.tiers else []
    finally:
        engine.llm_engine.engine_core.shutdown()
        # What the next engine of this process would find in its way.
        cleanup_dist_env_and_memory()
    return Answers(answers, counted)


def reusable_tokens(tokens: Sequence[int]) -> int:
    """How many tokens of a prompt can be reused: vLLM computes the last one itself, and loads whole blocks."""
    return (len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def difference(one: Sequence[Answer], other: Sequence[Answer]) -> float:
    """The largest difference between log-probabilities; without bound where tokens differ."""
    if any(a.tokens != b.tokens for a, b in zip(one, other, strict=True)):
        return float("inf")
    return max(abs(x - y) for a, b in zip(one, other, strict=True) for x, y in zip(a.logprobs, b.logprobs, strict=True))


def _wait_for_stores(engine: Any, tiers: int, chunks: int) -> None:
    """Step the idle engine until each tier has stored `chunks`. An engine that serves would do that while it goes on."""
    give_up_at = time.monotonic() + STORE_TIMEOUT_S
    while tiers and chunks:
        engine.llm_engine.step()
        stored: dict[str, float] = {}
        for metric in engine.get_metrics():
            if metric.name == "vllm:kvstore_stores" and metric.labels["result"] in ("stored", "replaced", "exists"):
                stored[metric.labels["tier"]] = stored.get(metric.labels["tier"], 0) + metric.value
        if len(stored) == tiers and min(stored.values()) >= chunks:
            return
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"{chunks} chunks should have been stored within {STORE_TIMEOUT_S:.0f} s; stored were {stored}")
        time.sleep(0.02)


def _counted(engine: Any) -> list[list[Any]]:
    """What the tiers counted. What happened in the last step of a request is told in the step after it."""
    for _ in range(2):
        engine.llm_engine.step()
    counters = [metric for metric in engine.get_metrics() if metric.name.startswith("vllm:kvstore_") and type(metric).__name__ == "Counter"]
    rows = [
        [
            metric.name.removeprefix("vllm:kvstore_"),
            " ".join(value for name, value in metric.labels.items() if name in LABELS),
            metric.value,
        ]
        for metric in counters
    ]
    return sorted(row for row in rows if row[2])


def main() -> int:
    # Marked, so that the demo finds the SDK's warnings among all that an engine and its libraries print.
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"{LOG_MARK}%(message)s"))
    logging.getLogger("kvstore_sdk").addHandler(handler)
    request = Request(**json.loads(Path(sys.argv[1]).read_text()))
    Path(request.answers).write_text(json.dumps(asdict(answer(request))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
