"""A backend that crashes, leaks, spins or never returns, in a child of a real engine: every answer is right, and the engine goes on."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hostile_backends import Misdeed, processes_of
from leftovers import held
from vllm_batches import Batch
from vllm_engines import OURS, Answer, Engine
from vllm_models import ModelShop, TinyModel, prompts

REQUESTS, AT_ONCE, TOKENS = 500, 8, 2
PROMPTS, PROMPT_TOKENS = 48, 70
LIMIT_S = 300.0
"""For a busy machine: it takes some seconds."""
# Less host memory than there are chunks: what is asked for again comes from the tier.
WAYS: dict[str, dict[str, Any]] = {
    "tiering": {"cpu_bytes_to_use": 1 << 20, "blocks_per_chunk": 1},
    "offloading": {"spec": OURS, "cpu_bytes_to_use": 1 << 20, "blocks_per_chunk": 1, "kvstore": {"lookup_timeout_s": 0.5}},
}
SHORT = {
    "lookup_timeout_s": 0.5,
    "load_timeout_s": 0.5,
    "store_timeout_s": 0.5,
    "close_timeout_s": 2.0,
    "breaker_probe_s": 0.05,
    "isolation_hang_kill_s": 0.3,
}
MISDEEDS: dict[Misdeed, dict[str, Any]] = {
    "segfault": {},
    "leak": {"leak_bytes": 2 << 20, "isolation_memory_bytes": 96 << 20},
    "spin_with_gil": {},
    "spin_without_gil": {},
    "never_return": {},
    "exit": {},
    "spin": {},
}
# A real engine takes seconds: the others are for the long run.
OFTEN = {
    "tiering": {"segfault", "leak", "spin_with_gil", "never_return"},
    "offloading": {"segfault", "spin_without_gil"},
}


@dataclass(frozen=True)
class Known:
    """What an engine answers that offloads nothing."""

    model: TinyModel
    prompts: list[list[int]]
    answers: list[Answer]

    def turns(self) -> Iterator[range]:
        """Numbers of prompts, so many at a time, over and over."""
        yield from (range(first, first + AT_ONCE) for first in itertools.cycle(range(0, PROMPTS, AT_ONCE)))


@pytest.fixture(scope="module")
def known(models: ModelShop) -> Known:
    asked = prompts(PROMPTS, PROMPT_TOKENS)
    engine = Engine(models("llama"), None)
    try:
        answers = Batch(engine).ask(asked, TOKENS)
    finally:
        engine.stop()
    assert answers[0].differs(answers[1]) > 0.0, "a model that answers everything alike proves nothing"
    return Known(models("llama"), asked, answers)


def entry(folder: Path, misdeed: Misdeed, **options: Any) -> dict[str, Any]:
    own = {"backend": "hostile_backends:open_hostile", "location": str(folder), "misdeed": misdeed}
    return {"type": "kvstore", "isolation": "process", **own, **SHORT, **options}


def tier_of(engine: Engine, way: str) -> Any:
    return engine.store._tiers[0].tier if way == "offloading" else engine.tier


def cases() -> list[Any]:
    return [
        pytest.param(way, misdeed, id=f"{misdeed}-{way}", marks=() if misdeed in OFTEN[way] else pytest.mark.long)
        for way in WAYS
        for misdeed in MISDEEDS
    ]


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize(("way", "misdeed"), cases())
def test_500_requests_are_answered_right_whatever_the_backend_does_to_its_process(
    way: str, misdeed: Misdeed, known: Known, tmp_path: Path, start: Callable[..., Engine]
) -> None:
    """And what it stored before is found after; and nothing is left of any of its processes."""
    folder = tmp_path / "kv"
    before = held()
    engine = start(known.model, entry(folder, misdeed, **MISDEEDS[misdeed]), extra=WAYS[way])
    tier, batch = tier_of(engine, way), Batch(engine)
    backend, metrics = tier._backend, tier.metrics
    first_pid, answered, loaded_at_death = backend.pid, 0, None
    until_s = time.monotonic() + LIMIT_S
    for turn in known.turns():
        found = batch.ask([known.prompts[number] for number in turn], TOKENS)
        assert [answer.differs(known.answers[number]) for answer, number in zip(found, turn, strict=True)] == [0.0] * AT_ONCE
        answered += AT_ONCE
        if backend.deaths and loaded_at_death is None:
            loaded_at_death = metrics.total("loads", "loaded")
        if answered >= REQUESTS and loaded_at_death is not None and metrics.total("loads", "loaded") > loaded_at_death:
            break
        assert time.monotonic() < until_s, f"{answered} answers, {backend.deaths} deaths, {backend.restarts} restarts, {backend!r}"
    assert metrics.total("isolation_deaths") == backend.deaths >= 1
    assert metrics.total("isolation_restarts") == backend.restarts >= 1
    assert backend.pid != first_pid
    assert os.getpid() not in processes_of(folder)
    assert misdeed == "leak" or processes_of(folder)
    assert sum(answer.reused for answer in batch.answers.values()) > 0
    engine.stop()
    del tier, backend, metrics, batch
    assert held() == before
