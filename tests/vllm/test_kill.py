"""`kill -9` of an engine while it stores: what is visible is whole, and nothing is left behind."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_engines import EngineProcess, Stored, fs_entry
from vllm_records import is_good, record_paths

from kvstore_sdk.backend import open_backend


def shared_memory_bytes() -> int:
    found = os.statvfs("/dev/shm")
    return (found.f_blocks - found.f_bfree) * found.f_frsize


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
    names_before, bytes_before = set(os.listdir("/dev/shm")), shared_memory_bytes()
    for number in range(kills):
        engine = EngineProcess(stored.model, fs_entry(folder))
        processes.append(engine)
        seen = len(record_paths(folder)) if folder.exists() else 0
        engine.post(ask=stored.prompts[number % 4 :])
        until = time.monotonic() + 120
        while len(record_paths(folder)) <= seen and time.monotonic() < until and seen < len(stored.prompts) * len(stored.keys[0]):
            time.sleep(0.001)
        time.sleep(when.uniform(0.0, 0.05))
        engine.kill()
        records = record_paths(folder)
        assert len(records) > 0
        assert all(is_good(key, path) for key, path in records.items())
    assert set(os.listdir("/dev/shm")) - names_before == set()
    assert shared_memory_bytes() <= bytes_before + (1 << 20)

    # The folder is swept when it is opened, and is as good as any.
    open_backend("fs", location=str(folder)).close()
    assert list((folder / ".kvstore" / "tmp").iterdir()) == []
    last = EngineProcess(stored.model, fs_entry(folder))
    processes.append(last)
    answers = last.ask(stored.prompts)
    stored.check(answers)
    assert answers[0].reused > 0
