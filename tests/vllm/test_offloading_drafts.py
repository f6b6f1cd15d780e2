"""HMA-03. Models with draft layers get hits: as much comes back as vLLM reuses of such layers, and what nobody reads can be seen."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm_engines import HOST_BYTES, PROMPT_TOKENS, Answer, Engine, fs_entry, reusable
from vllm_models import VOCABULARY, ModelShop, TinyModel, prompts
from vllm_records import header_of, is_good, record_paths, replace_payload

HIDDEN = 128


def draft_weights(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def drawn(*shape: int, seed: int = 5) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * 0.2).to(torch.bfloat16)


def eagle(folder: Path, llama: TinyModel, heads: int) -> dict[str, Any]:
    """A draft model of one layer for the tiny Llama, as the engine's `speculative_config`."""
    folder.mkdir()
    described = json.loads((llama.path / "config.json").read_text())
    described |= {"num_hidden_layers": 1, "num_key_value_heads": heads, "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(described))
    layer = {
        "self_attn.q_proj": drawn(128, HIDDEN),
        "self_attn.k_proj": drawn(32 * heads, HIDDEN),
        "self_attn.v_proj": drawn(32 * heads, HIDDEN, seed=6),
        "self_attn.o_proj": drawn(HIDDEN, 128),
        "mlp.gate_proj": drawn(256, HIDDEN),
        "mlp.up_proj": drawn(256, HIDDEN, seed=6),
        "mlp.down_proj": drawn(HIDDEN, 256),
        "post_attention_layernorm": torch.ones(HIDDEN, dtype=torch.bfloat16),
    }
    draft_weights(folder, {"fc.weight": drawn(HIDDEN, 2 * HIDDEN)} | {f"layers.0.{name}.weight": value for name, value in layer.items()})
    return {"method": "eagle", "model": str(folder), "num_speculative_tokens": 2}


def exaone(folder: Path) -> TinyModel:
    """3 layers with a sliding window, 2 without, and one more without that predicts the token after the next."""
    from transformers import ExaoneMoeConfig, ExaoneMoeForCausalLM

    sliding, full, layers = "sliding_attention", "full_attention", 5
    config = ExaoneMoeConfig(
        hidden_size=HIDDEN,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=VOCABULARY,
        max_position_embeddings=2048,
        initializer_range=0.2,
        sliding_window=64,
        layer_types=[sliding, full, sliding, full, sliding],
        # No layer has experts.
        mlp_layer_types=["dense"] * layers,
    )
    torch.manual_seed(0)
    ExaoneMoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    described = json.loads((folder / "config.json").read_text())
    described |= {"num_nextn_predict_layers": 1, "mtp_layer_types": [full]}
    (folder / "config.json").write_text(json.dumps(described))
    weights = load_file(folder / "model.safetensors")
    for name, value in list(weights.items()):
        if ".layers.1." in name:
            # The norms as they are, all else drawn anew.
            place = name.split(".layers.1.")[1]
            weights[f"mtp.layers.0.{place}"] = drawn(*value.shape, seed=len(place)) if value.dim() > 1 else value.clone()
    ones = torch.ones(HIDDEN, dtype=torch.bfloat16)
    weights |= {f"mtp.{name}.weight": ones.clone() for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    draft_weights(folder, weights | {"mtp.fc.weight": drawn(HIDDEN, 2 * HIDDEN)})
    return TinyModel(folder, block_tokens=32, blocks=160, groups=2)


@pytest.fixture(scope="module")
def mtp(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return exaone(tmp_path_factory.mktemp("drafts") / "exaone")


MTP = {"method": "mtp", "num_speculative_tokens": 1}
# Of layers with a window vLLM offloads by default what a reader at the end of the prompt needs, and no more.
DENSE = {"prefix_cache_retention_interval": None}


def offloading(blocks_per_chunk: int = 1) -> dict[str, Any]:
    return {"spec": "KVStoreOffloadingSpec", "cpu_bytes_to_use": 4 * HOST_BYTES, "blocks_per_chunk": blocks_per_chunk}


def differences(answers: Sequence[Answer], expected: Sequence[Answer]) -> list[float]:
    return [mine.differs(theirs) for mine, theirs in zip(answers, expected, strict=True)]


@pytest.fixture(scope="module")
def computed() -> Callable[..., list[Answer]]:
    """What an engine of a model and a draft model answers to three prompts without offloading."""
    known: dict[Path, list[Answer]] = {}

    def answer(model: TinyModel, **options: Any) -> list[Answer]:
        if model.path not in known:
            engine = Engine(model, None, **options)
            try:
                answers = engine.ask(prompts(3, PROMPT_TOKENS))
            finally:
                engine.stop()
            assert [answer.reused for answer in answers] == [0] * 3
            assert answers[0].differs(answers[1]) == float("inf"), "a model that answers everything alike proves nothing"
            known[model.path] = answers
        return known[model.path]

    return answer


def back_from_everywhere(
    start: Callable[..., Engine],
    expected: Sequence[Answer],
    model: TinyModel,
    folder: Path,
    blocks_per_chunk: int,
    reuse: int,
    layout: str,
    **options: Any,
) -> None:
    """Known prompts come back from host memory, and from another engine's store, with `reuse` tokens and the right answers; and wrong
    ones where a record holds something else."""
    *asked, control = prompts(3, PROMPT_TOKENS)
    first = start(model, fs_entry(folder), extra=offloading(blocks_per_chunk), **options)
    assert first.store.identity.layout == layout
    assert [answer.reused for answer in first.ask(asked)] == [0, 0]
    first.settle()
    good = set(record_paths(folder))
    first.ask([control])
    first.settle()
    first.reset_device()
    from_host = first.ask([*asked, control])
    assert first.store.metrics.total("hits", "1:kvstore") == 0
    assert first.store.metrics.total("engine_loads") > 0
    first.stop()

    records = record_paths(folder)
    assert all(is_good(key, path) for key, path in records.items())
    assert len({key.group for key in records}) == model.groups
    # Layers without a window see all of it.
    spoiled = [key for key in records if key not in good and key.group == model.groups - 1]
    for key in spoiled:
        replace_payload(key, records[key], random.Random(3).randbytes(header_of(records[key]).payload_bytes))

    second = start(model, fs_entry(folder), extra=offloading(blocks_per_chunk), **options)
    from_store = second.ask([*asked, control])
    assert second.store.metrics.total("promotions", "1:kvstore", "loaded") > 0
    assert second.store.metrics.total("engine_loads") > 0
    second.stop()

    assert [answer.reused for answer in from_host + from_store] == [reuse] * 6
    assert differences(from_host, expected) == [0.0] * 3
    assert differences(from_store[:2], expected[:2]) == [0.0] * 2
    assert from_store[2].differs(expected[2]) > 0.0, "wrong KV must show, or equal answers would prove nothing"


@pytest.mark.parametrize(("heads", "layout"), [(2, "kv1:lbh-ktv"), (4, "opaque-ranks")])
def test_a_draft_model_among_the_layers_of_the_model(
    heads: int, layout: str, models: ModelShop, start: Callable[..., Engine], computed: Callable[..., list[Answer]], tmp_path: Path
) -> None:
    """vLLM puts the layers of an EAGLE model in the group of the model's own, and reuses what it does without one. A draft model of other
    heads has pages of another size there: its chunks are certified for nobody."""
    llama = models("llama")
    speculative = eagle(tmp_path / "eagle", llama, heads)
    reuse, expected = reusable(PROMPT_TOKENS, llama.block_tokens), computed(llama, speculative_config=speculative)
    back_from_everywhere(start, expected, llama, tmp_path / "kv", 1, reuse, layout, speculative_config=speculative)


def test_engines_with_and_without_a_draft_model_do_not_share(models: ModelShop, start: Callable[..., Engine], tmp_path: Path) -> None:
    """Nor do those of two draft models: their KV lies in the chunks."""
    llama, names = models("llama"), set()
    options = [{}] + [{"speculative_config": eagle(tmp_path / name, llama, 2)} for name in ("one", "other")]
    weights = load_file(tmp_path / "other" / "model.safetensors")
    draft_weights(tmp_path / "other", weights | {"fc.weight": drawn(HIDDEN, 2 * HIDDEN, seed=9)})
    for option in options:
        engine = start(llama, [], extra=offloading(), **option)
        names.add(engine.store.identity.namespace)
        engine.stop()
    assert len(names) == 3


@pytest.mark.parametrize("blocks_per_chunk", [1, 4])
def test_a_group_that_holds_a_draft_layer_is_read_but_for_its_last_chunk(
    blocks_per_chunk: int, mtp: TinyModel, start: Callable[..., Engine], computed: Callable[..., list[Answer]], tmp_path: Path
) -> None:
    """vLLM flags the group, and resumes a chunk before the end of what it finds there: the draft layer has to see the token after the last
    one of a chunk."""
    chunk = mtp.block_tokens * blocks_per_chunk
    reuse = reusable(PROMPT_TOKENS, chunk) - chunk
    assert reuse > 0
    expected, options = computed(mtp, speculative_config=MTP), {"speculative_config": MTP, **DENSE}
    back_from_everywhere(start, expected, mtp, tmp_path / "kv", blocks_per_chunk, reuse, "kv1:lbh-ktv", **options)


def test_the_draft_layer_s_own_pages_come_back(mtp: TinyModel, start: Callable[..., Engine]) -> None:
    """The model checks what is drafted, so no answer shows whether the draft layer's KV is right: its bytes do."""
    (prompt,) = prompts(1, PROMPT_TOKENS)
    engine = start(mtp, [], extra=offloading(), speculative_config=MTP, **DENSE)
    (flagged,) = [group for group in engine.core.scheduler.kv_cache_config.kv_cache_groups if group.is_eagle_group]
    layer = flagged.layer_names[-1]
    assert layer.startswith("mtp.")
    cache = engine.core.vllm_config.compilation_config.static_forward_context[layer].kv_cache
    cache = cache[0] if isinstance(cache, (list, tuple)) else cache

    def pages() -> set[bytes]:
        return {page.contiguous().view(torch.uint8).numpy().tobytes() for page in cache}

    before = pages()
    engine.ask([prompt])
    engine.settle()
    written = pages() - before
    engine.reset_device()
    cache.zero_()
    (answer,) = engine.ask([prompt])
    found = pages() & written
    engine.stop()
    assert len(found) >= answer.reused // mtp.block_tokens == 11


def test_what_vllm_offloads_too_little_of_is_said_and_counted(
    mtp: TinyModel, start: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    """With its defaults vLLM keeps of the layers with a window what a reader at the end of the prompt needs, and then resumes a chunk
    before. Nothing is ever found whole: look-ups hit, and no chunk is loaded."""
    asked = prompts(2, PROMPT_TOKENS)
    with caplog.at_level(logging.WARNING):
        engine = start(mtp, [], extra=offloading(), speculative_config=MTP)
    said = [record.getMessage() for record in caplog.records if "prefix_cache_retention_interval" in record.getMessage()]
    engine.ask(asked)
    engine.settle()
    engine.reset_device()
    answers = engine.ask(asked)
    count = engine.store.metrics.total
    stores, loads, hits = count("engine_stores"), count("engine_loads"), count("hits")
    engine.stop()
    assert len(said) == 1
    assert "--prefix-cache-retention-interval None" in said[0]
    assert [answer.reused for answer in answers] == [0, 0]
    assert hits > 0
    assert stores >= 2 * PROMPT_TOKENS // mtp.block_tokens
    assert loads == 0
