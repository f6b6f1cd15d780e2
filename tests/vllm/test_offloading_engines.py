"""What went through our own host memory, and through a tier below it, is answered as if it had been computed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import PROMPT_TOKENS, Answer, Engine, fs_entry, reusable
from vllm_models import ModelShop, prompts
from vllm_records import header_of, is_good, record_paths, replace_payload

from kvstore_sdk.format import HEADER_BYTES

CASES = [
    ("llama", 1, PROMPT_TOKENS),
    ("llama", 4, PROMPT_TOKENS),
    ("deepseek", 1, PROMPT_TOKENS),
    ("deepseek", 4, PROMPT_TOKENS),
    ("gemma", 1, PROMPT_TOKENS),
    ("gemma", 4, PROMPT_TOKENS),
    # vLLM offers no states of larger chunks to its tiers.
    ("qwen", 1, 1000),
]
LAYOUTS = {"llama": "kv1:lbh-ktv", "deepseek": "kv1:latent", "gemma": "kv1:lbh-ktv", "qwen": "kv1:gdn-kv+lbh-ktv"}
HOST_BYTES = 64 << 20


def offloading(blocks_per_chunk: int, **more: Any) -> dict[str, Any]:
    return {"spec": "KVStoreOffloadingSpec", "cpu_bytes_to_use": HOST_BYTES, "blocks_per_chunk": blocks_per_chunk, **more}


@pytest.fixture(scope="module")
def computed(models: ModelShop, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int, int], list[Answer]]:
    """What an engine without offloading answers to three prompts.

    vLLM's CPU kernel for MLA answers a prompt with a known beginning slightly differently from one that it computes as a whole, and without
    offloading no beginning is ever known there. For MLA the answers are those of an engine that reuses as much from vLLM's own host memory.
    """
    known: dict[tuple[str, int], list[Answer]] = {}

    def answer(name: str, blocks_per_chunk: int, tokens: int) -> list[Answer]:
        mla = name == "deepseek"
        key = (name, blocks_per_chunk if mla else 1)
        if key not in known:
            asked = prompts(3, tokens)
            tier = fs_entry(tmp_path_factory.mktemp("reference")) if mla else None
            engine = Engine(models(name), tier, extra={"blocks_per_chunk": blocks_per_chunk})
            try:
                if mla:
                    engine.ask(asked)
                    engine.settle()
                    engine.reset_device()
                answers = engine.ask(asked)
            finally:
                engine.stop()
            reuse = reusable(tokens, engine.block_tokens * blocks_per_chunk) if mla else 0
            assert [answer.reused for answer in answers] == [reuse] * 3
            assert answers[0].differs(answers[1]) == float("inf"), "a model that answers everything alike proves nothing"
            known[key] = answers
        return known[key]

    return answer


def differences(answers: Sequence[Answer], expected: Sequence[Answer]) -> list[float]:
    return [mine.differs(theirs) for mine, theirs in zip(answers, expected, strict=True)]


@pytest.mark.parametrize(("name", "blocks_per_chunk", "tokens"), CASES)
def test_host_memory_and_another_engine_s_store_give_what_was_computed(
    name: str,
    blocks_per_chunk: int,
    tokens: int,
    models: ModelShop,
    start: Callable[..., Engine],
    computed: Callable[..., list[Answer]],
    tmp_path: Path,
) -> None:
    """HMA-01. All is reused that can be; tokens and log-probabilities are those of an engine without offloading, bit for bit; and they
    differ where a record holds something else."""
    model, folder, extra = models(name), tmp_path / "kv", offloading(blocks_per_chunk)
    *asked, control = prompts(3, tokens)
    first = start(model, fs_entry(folder), extra=extra)
    reuse = reusable(tokens, first.block_tokens * blocks_per_chunk)
    assert first.store.identity.layout == LAYOUTS[name]
    assert [answer.reused for answer in first.ask(asked)] == [0, 0]
    first.settle()
    good = set(record_paths(folder))
    first.ask([control])
    first.settle()
    first.reset_device()
    from_host = first.ask([*asked, control])
    assert first.store.metrics.total("hits", "host") > 0
    assert first.store.metrics.total("hits", "1:kvstore") == 0
    first.stop()

    records = record_paths(folder)
    assert len({key.group for key in records}) == model.groups
    assert all(is_good(key, path) for key, path in records.items())
    # The control: one record of the third prompt holds something else, and passes for a good one.
    spoiled = next(key for key in records if key not in good)
    replace_payload(spoiled, records[spoiled], random.Random(3).randbytes(header_of(records[spoiled]).payload_bytes))

    second = start(model, fs_entry(folder), extra=extra)
    from_store = second.ask([*asked, control])
    assert second.store.metrics.total("promotions", "1:kvstore", "loaded") > 0
    second.stop()

    expected = computed(name, blocks_per_chunk, tokens)
    assert [answer.reused for answer in from_host + from_store] == [reuse] * 6
    assert differences(from_host, expected) == [0.0] * 3
    assert differences(from_store[:2], expected[:2]) == [0.0] * 2
    assert from_store[2].differs(expected[2]) > 0.0, "wrong KV must show, or equal answers would prove nothing"


@pytest.mark.parametrize("name", ["llama", "deepseek", "gemma", "qwen"])
def test_host_memory_alone_gives_what_was_computed(
    name: str, models: ModelShop, start: Callable[..., Engine], computed: Callable[..., list[Answer]]
) -> None:
    """HMA-01. As above without any tier; wrong bytes in a slot show."""
    tokens = 1000 if name == "qwen" else PROMPT_TOKENS
    asked = prompts(2, tokens)
    engine = start(models(name), [], extra=offloading(1))
    reuse = reusable(tokens, engine.block_tokens)
    engine.ask(asked)
    engine.settle()
    engine.reset_device()
    answers = engine.ask(asked)
    hits = engine.store.metrics.total("hits", "host")
    host = engine.store.host
    for row in range(host.row_count):
        payload = host.record(row).view[HEADER_BYTES:]
        payload[:] = b"\x3c" * len(payload)
    engine.reset_device()
    wrong = engine.ask(asked[:1])
    engine.stop()
    assert hits > 0
    assert [answer.reused for answer in answers + wrong] == [reuse] * 3
    expected = computed(name, 1, tokens)[:2]
    assert differences(answers, expected) == [0.0, 0.0]
    assert wrong[0].differs(expected[0]) > 0.0


def test_of_a_prefix_larger_than_host_memory_the_head_is_loaded(
    models: ModelShop, start: Callable[..., Engine], computed: Callable[..., list[Answer]], tmp_path: Path
) -> None:
    """T11. No request waits for ever for what cannot be there all at once."""
    asked = prompts(3, PROMPT_TOKENS)
    roomy = start(models("llama"), fs_entry(tmp_path / "kv"), extra=offloading(1))
    roomy.ask(asked)
    roomy.settle()
    size = next(group.payload_bytes for group in roomy.store.identity.groups) + HEADER_BYTES
    roomy.stop()
    # Six chunks of the twelve.
    small = start(models("llama"), fs_entry(tmp_path / "kv"), extra=offloading(1, cpu_bytes_to_use=(256 << 10) + HEADER_BYTES + 6 * size))
    answers = small.ask(asked)
    small.settle()
    small.stop()
    whole = reusable(PROMPT_TOKENS, small.block_tokens)
    assert all(0 < answer.reused < whole for answer in answers)
    assert differences(answers, computed("llama", 1, PROMPT_TOKENS)) == [0.0] * 3
