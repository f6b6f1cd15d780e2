"""A backend that is right, and whose calls take time at random, fails nothing."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from mutant import MemoryMutant
from suite_runner import run_suite

from kvstore_sdk.backend import Backend, Deadline

DELAY_S = 0.005
PROFILES = ("core", "atomicity", "concurrency")


class Delayed(MemoryMutant):
    """No mutant at all: it waits before and after each call, and tells the truth."""

    breaks = ""
    seed = 0

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.draw = random.Random(self.seed)

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Callable[[Sequence[Any]], Any]) -> Any:
        time.sleep(self.draw.random() * DELAY_S)
        results = proceed(items)
        time.sleep(self.draw.random() * DELAY_S)
        return results


def check_nothing_fails(seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Delayed, "seed", seed)
    options = ("--kvstore-largest=1MiB", "--kvstore-examples=5", f"--kvstore-seed={seed}")
    # By the name under which this module was imported: another copy of it would know nothing of the seed.
    ran = run_suite(f"{__name__}:Delayed.open", folder, *PROFILES, options=options)
    assert ran.ids("fail") | ran.ids("error") | ran.ids("blocked") | ran.ids("advisory") == set()
    assert {ran.verdict(profile) for profile in PROFILES} == {"CONFORMANT"}


@pytest.mark.parametrize("seed", range(1, 3))
def test_delays_break_nothing(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_nothing_fails(seed, tmp_path, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3, 21))
def test_delays_break_nothing_with_many_seeds(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_nothing_fails(seed, tmp_path, monkeypatch)
