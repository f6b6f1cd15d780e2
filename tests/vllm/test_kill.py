"""`kill -9` of an engine while it stores: what is visible is whole, and nothing is left behind."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_engines import PROMPT_TOKENS, EngineProcess, Stored, fs_entry
from vllm_models import prompts
from vllm_records import is_good, record_paths

from kvstore_sdk.backend import open_backend
from kvstore_sdk.vllm.geometry import is_abandoned


def left_behind() -> list[str]:
    """Files of engines in /dev/shm that no process has open or mapped. Memory without a name ends with the processes that map it."""
    return [name for name in os.listdir("/dev/shm") if "vllm_offload" in name and is_abandoned(f"/dev/shm/{name}")]


@pytest.fixture
def processes() -> Iterator[list[EngineProcess]]:
    running: list[EngineProcess] = []
    yield running
    for engine in running:
        engine.stop()


@pytest.mark.parametrize("kills", [1, pytest.param(5, marks=pytest.mark.long)])
def test_a_killed_engine_leaves_whole_records_and_nothing_else(
    kills: int, stored: Stored, processes: list[EngineProcess], tmp_path: Path
) -> None:
    """ATM-01, ATM-08, LEAK-01."""
    folder = tmp_path / "kv"
    when = random.Random(kills)
    for number in range(kills):
        engine = EngineProcess(stored.model, fs_entry(folder))
        processes.append(engine)
        seen = len(record_paths(folder)) if folder.exists() else 0
        engine.post(ask=prompts(8, PROMPT_TOKENS, seed=100 + number) if number else stored.prompts)
        until = time.monotonic() + 120
        while len(record_paths(folder)) <= seen:
            assert time.monotonic() < until, "nothing is stored"
            time.sleep(0.001)
        time.sleep(when.uniform(0.0, 0.05))
        engine.kill()
        records = record_paths(folder)
        assert len(records) > seen
        assert all(is_good(key, path) for key, path in records.items())
        assert left_behind() == []

    # The folder is swept when it is opened, and is as good as any.
    open_backend("fs", location=str(folder)).close()
    assert list((folder / ".kvstore" / "tmp").iterdir()) == []
    last = EngineProcess(stored.model, fs_entry(folder))
    processes.append(last)
    answers = last.ask(stored.prompts)
    stored.check(answers)
    assert answers[0].reused > 0
