"""Tiny models of random weights, one for each kind of KV cache."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOCABULARY = 512


@dataclass(frozen=True)
class TinyModel:
    """A model in a folder, and how an engine has to be set up for it.

    Attributes:
        path: The folder.
        block_tokens: Tokens of a block.
        blocks: Blocks of the engine's own cache.
        groups: KV cache groups that vLLM makes of it.
        engine: Further arguments of the engine.
    """

    path: Path
    block_tokens: int
    blocks: int
    groups: int
    engine: dict[str, Any] = field(default_factory=dict)


def prompts(count: int, tokens: int, seed: int = 1) -> list[list[int]]:
    """Prompts of random tokens that share no prefix."""
    source = random.Random(seed)
    return [[source.randrange(VOCABULARY) for _ in range(tokens)] for _ in range(count)]


class ModelShop:
    """Builds each model when it is first asked for.

    Weights are drawn with a large deviation: a tiny model with the usual one gives every prompt the same answer, and proves nothing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, TinyModel] = {}

    def __call__(self, name: str) -> TinyModel:
        if name not in self._made:
            self._made[name] = _MODELS[name](self._folder / name)
        return self._made[name]


def _save(path: Path, build: Callable[[], Any], seed: int = 0) -> Path:
    import torch

    torch.manual_seed(seed)
    build().to(torch.bfloat16).save_pretrained(path)
    return path


def llama(path: Path, seed: int = 0) -> TinyModel:
    """Full attention; two KV heads, so that it can be split in two."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=VOCABULARY,
        max_position_embeddings=2048,
        initializer_range=0.2,
    )
    return TinyModel(_save(path, lambda: LlamaForCausalLM(config), seed), block_tokens=32, blocks=40, groups=1)


def deepseek(path: Path) -> TinyModel:
    """MLA: one latent for all heads."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        # The CPU kernel takes no other sums.
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        q_lora_rank=None,
        # No layer has experts.
        first_k_dense_replace=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=2048,
        initializer_range=0.2,
    )
    return TinyModel(_save(path, lambda: DeepseekV2ForCausalLM(config)), block_tokens=16, blocks=80, groups=1)


def gemma(path: Path) -> TinyModel:
    """5 layers with a sliding window and 2 without, in groups of 2: one group fills half of its row."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=VOCABULARY,
        sliding_window=64,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
        max_position_embeddings=2048,
        initializer_range=0.2,
    )
    return TinyModel(_save(path, lambda: Gemma3ForCausalLM(config)), block_tokens=32, blocks=160, groups=4)


def qwen(path: Path) -> TinyModel:
    """3 layers with a state (gated delta net) and 1 with full attention; vLLM makes blocks of 128 tokens for it."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=128,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        vocab_size=VOCABULARY,
        max_position_embeddings=4096,
        initializer_range=0.1,
    )
    options = {"block_size": None, "max_model_len": 2048, "enable_prefix_caching": True}
    return TinyModel(_save(path, lambda: Qwen3NextForCausalLM(config)), block_tokens=128, blocks=40, groups=4, engine=options)


_MODELS: dict[str, Callable[[Path], TinyModel]] = {
    "llama": llama,
    "llama-other-weights": lambda path: llama(path, seed=7),
    "deepseek": deepseek,
    "gemma": gemma,
    "qwen": qwen,
}
