"""Two tensor parallel ranks, each a process, in one row."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_engines import PROMPT_TOKENS, EngineProcess, fs_entry, reusable
from vllm_models import ModelShop, TinyModel, prompts
from vllm_records import header_of, is_good, payload_of, record_paths, replace_payload

from kvstore_sdk.vllm.geometry import is_abandoned


@pytest.fixture
def processes() -> Iterator[list[EngineProcess]]:
    running: list[EngineProcess] = []
    yield running
    for engine in running:
        engine.stop()
    # vLLM's ranks talk through memory that they leave behind.
    for path in Path("/dev/shm").glob("vllm_dist_*"):
        if is_abandoned(str(path)):
            path.unlink()


def begin(running: list[EngineProcess], model: TinyModel, folder: Path) -> EngineProcess:
    engine = EngineProcess(model, fs_entry(folder), tensor_parallel_size=2)
    running.append(engine)
    return engine


# Engines of two ranks take a minute to start on a busy machine.
@pytest.mark.timeout(400)
def test_both_ranks_halves_are_stored_and_reused(models: ModelShop, processes: list[EngineProcess], tmp_path: Path) -> None:
    """KEY-08, KEY-09, TOP-01: one record holds what both ranks have, under one name."""
    folder = tmp_path / "kv"
    model = models("llama")
    *asked, control = prompts(3, PROMPT_TOKENS)
    first = begin(processes, model, folder)
    computed = first.ask(asked)
    first.send(settle=True)
    good = set(record_paths(folder))
    computed += first.ask([control])
    first.send(settle=True)
    first.stop()
    records = record_paths(folder)
    assert all(is_good(key, path) for key, path in records.items())
    reuse = reusable(PROMPT_TOKENS, first.block_tokens)
    assert len(records) == 3 * reuse // first.block_tokens
    # Two layers, keys and values, two heads of 32 elements of 2 bytes.
    assert {header_of(path).payload_bytes for path in records.values()} == {2 * 2 * first.block_tokens * 2 * 32 * 2}

    # The control: the second rank's half of one record of the third prompt is wrong, and passes for good.
    spoiled = next(key for key in records if key not in good)
    half = header_of(records[spoiled]).payload_bytes // 2
    replace_payload(spoiled, records[spoiled], payload_of(records[spoiled])[:half] + random.Random(3).randbytes(half))

    second = begin(processes, model, folder)
    reused = second.ask([*asked, control])
    second.stop()
    assert [answer.reused for answer in reused] == [reuse] * 3
    differences = [mine.differs(theirs) for mine, theirs in zip(reused, computed, strict=True)]
    assert differences[:2] == [0.0, 0.0]
    assert differences[2] > 0.0
