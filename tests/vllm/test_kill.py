"""`kill -9` of an engine while it stores: what is visible is whole, and nothing is left behind."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from vllm_engines import PROMPT_TOKENS, EngineProcess, Stored, fs_entry
from vllm_models import prompts
from vllm_records import is_good, record_paths

from kvstore_sdk.backend import open_backend
from kvstore_sdk.vllm.geometry import is_abandoned


def left_behind() -> list[str]:
    """Files of engines in /dev/shm that no process has open or mapped. Memory without a name ends with the processes that map it."""
    return [name for name in os.listdir("/dev/shm") if ("vllm_offload" in name or "kvstore" in name) and is_abandoned(f"/dev/shm/{name}")]


def kill_while_it_stores(engine: EngineProcess, folder: Path, ask: Sequence[Sequence[int]], delay_s: float) -> None:
    """All that is visible then is whole, and no memory stays behind."""
    seen = len(record_paths(folder)) if folder.exists() else 0
    engine.post(ask=ask)
    until = time.monotonic() + 120
    # More than two prompts have of them, so that the beginning of the first is among them, and a quarter of what there will be.
    while not folder.exists() or len(record_paths(folder)) <= seen + 24:
        assert time.monotonic() < until, "nothing is stored"
        time.sleep(0.001)
    time.sleep(delay_s)
    engine.kill()
    records = record_paths(folder)
    assert len(records) > seen
    assert all(is_good(key, path) for key, path in records.items())
    assert left_behind() == []


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
        ask = prompts(8, PROMPT_TOKENS, seed=100 + number) if number else stored.prompts
        kill_while_it_stores(engine, folder, ask, when.uniform(0.0, 0.05))

    # The folder is swept when it is opened, and is as good as any.
    open_backend("fs", location=str(folder)).close()
    assert list((folder / ".kvstore" / "tmp").iterdir()) == []
    last = EngineProcess(stored.model, fs_entry(folder))
    processes.append(last)
    answers = last.ask(stored.prompts)
    stored.check(answers)
    assert answers[0].reused > 0


def test_an_engine_with_host_memory_of_ours_leaves_whole_records_and_nothing_else(
    stored: Stored, processes: list[EngineProcess], tmp_path: Path
) -> None:
    """ATM-01, LEAK-01: its records lie in the region itself until a tier has them, and the region goes with the process."""
    engine = EngineProcess(stored.model, fs_entry(tmp_path / "kv"), extra={"spec": "KVStoreOffloadingSpec"})
    processes.append(engine)
    regions = [line for line in Path(f"/proc/{engine.pid}/maps").read_text().splitlines() if "kvstore_offload_" in line]
    assert regions
    assert all(line.endswith("(deleted)") for line in regions), "it has no name that could stay"
    kill_while_it_stores(engine, tmp_path / "kv", stored.prompts, 0.02)
