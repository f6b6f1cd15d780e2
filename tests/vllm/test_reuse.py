"""What one engine stored, another one reuses, and answers as if it had computed it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from vllm_engines import PROMPT_TOKENS, Engine, fs_entry, reusable
from vllm_models import ModelShop, prompts
from vllm_records import header_of, is_good, record_paths, replace_payload

from kvstore_sdk.vllm.worker import ScrubbedWorker

MARKER = bytes(random.Random(5).randrange(1, 256) for _ in range(32))


@pytest.fixture
def marked_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fills each row with a marker just before something is stored in it; lists the rows."""
    rows: list[int] = []
    store = ScrubbedWorker.submit_store

    def mark_and_store(self: ScrubbedWorker, job_id: int, src_spec: object, dst_spec: object) -> bool:
        region = self._inner._region
        view = region._base.numpy().view(np.uint8).reshape(-1, region._row_stride)
        for row in dst_spec.block_ids:
            view[row] = np.resize(np.frombuffer(MARKER, np.uint8), view.shape[1])
            rows.append(int(row))
        return store(self, job_id, src_spec, dst_spec)

    monkeypatch.setattr(ScrubbedWorker, "submit_store", mark_and_store)
    return rows


def marker_is_in(data: bytes) -> bool:
    """Whether any 16 bytes of the marker are there, wherever they start in it."""
    around = MARKER + MARKER
    return any(around[at : at + 16] in data for at in range(len(MARKER)))


@pytest.mark.parametrize(
    ("name", "blocks_per_chunk", "tokens"),
    [
        ("llama", 1, PROMPT_TOKENS),
        ("llama", 4, PROMPT_TOKENS),
        ("deepseek", 1, PROMPT_TOKENS),
        ("deepseek", 4, PROMPT_TOKENS),
        ("gemma", 1, PROMPT_TOKENS),
        ("gemma", 4, PROMPT_TOKENS),
        # vLLM offers no states of larger chunks to its tiers.
        ("qwen", 1, 1000),
    ],
)
def test_another_engine_reuses_all_that_can_be_reused_and_answers_the_same(
    name: str, blocks_per_chunk: int, tokens: int, models: ModelShop, start: Callable[..., Engine], tmp_path: Path, marked_rows: list[int]
) -> None:
    """HMA-01. Tokens and log-probabilities are equal, bit for bit; and they differ where a record holds something else.

    What is compared with is the first engine's own second answer, for which vLLM took the KV from its own memory. vLLM's CPU kernel for MLA
    answers a prompt with a known beginning slightly differently from one that it computes as a whole, so for that model the first answers
    prove nothing; for the others both must be equal.
    """
    model = models(name)
    folder = tmp_path / "kv"
    *asked, control = prompts(3, tokens)
    extra = {"blocks_per_chunk": blocks_per_chunk}

    first = start(model, fs_entry(folder), extra=extra)
    expected_reuse = reusable(tokens, first.block_tokens * blocks_per_chunk)
    computed = first.ask(asked)
    first.settle()
    good = set(record_paths(folder))
    computed += first.ask([control])
    first.settle()
    again = first.ask([*asked, control])
    first.stop()

    assert [answer.reused for answer in computed] == [0, 0, 0]
    assert [answer.reused for answer in again] == [expected_reuse] * 3
    assert computed[0].differs(computed[1]) == float("inf"), "a model that answers everything alike proves nothing"
    if name != "deepseek":
        assert [mine.differs(theirs) for mine, theirs in zip(computed, again, strict=True)] == [0.0, 0.0, 0.0]

    records = record_paths(folder)
    assert len({key.group for key in records}) == model.groups
    assert all(is_good(key, path) for key, path in records.items())
    assert marked_rows
    assert not any(marker_is_in(path.read_bytes()) for path in records.values())
    if name == "gemma":
        # The group with one layer where the others have two.
        assert len({header_of(path).payload_bytes for path in records.values()}) == 2

    # The control: one record of the third prompt holds something else, and passes for a good one.
    spoiled = next(key for key in records if key not in good)
    replace_payload(spoiled, records[spoiled], random.Random(3).randbytes(header_of(records[spoiled]).payload_bytes))

    second = start(model, fs_entry(folder), extra=extra)
    reused = second.ask([*asked, control])
    assert second.metrics.total("loads", "loaded") > 0
    second.stop()
    assert [answer.reused / expected_reuse for answer in reused] == [1.0, 1.0, 1.0]
    differences = [mine.differs(theirs) for mine, theirs in zip(reused, again, strict=True)]
    assert differences[:2] == [0.0, 0.0]
    assert differences[2] > 0.0, "wrong KV must show, or equal answers would prove nothing"
