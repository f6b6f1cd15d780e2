"""A store that is bounded for the run, as the documentation asks for, is conformant in all that is checked by default."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from suite_runner import run_suite

from kvstore_sdk.backend import BackendError, Deadline
from kvstore_sdk.testing import BackendWrapper
from kvstore_sdk_backends.memory import open_memory

SMALL = ("--kvstore-examples=2",)


REFUSING = "memory:{{fresh}}?max_bytes={}"
FULL_OF_ONE = "memory:{{fresh}}?max_bytes={0}&max_record_bytes={0}"
EVICTING = "evicts:open_evicting"


@pytest.mark.parametrize(
    ("target", "max_bytes"),
    [
        (REFUSING, "32MiB"),
        (FULL_OF_ONE, "64MiB"),
        (EVICTING, "32MiB"),
        pytest.param(REFUSING, "64MiB", marks=pytest.mark.long),
        pytest.param(FULL_OF_ONE, "32MiB", marks=pytest.mark.long),
        pytest.param(EVICTING, "64MiB", marks=pytest.mark.long),
    ],
)
def test_a_bounded_store_is_conformant(target: str, max_bytes: str, tmp_path: Path) -> None:
    options = SMALL if "{" in target else [*SMALL, f"--kvstore-option=max_bytes={max_bytes}"]
    ran = run_suite(target.format(max_bytes), tmp_path, options=options)
    assert ran.ids("fail") | ran.ids("error") | ran.ids("blocked") | ran.ids("advisory") == set()
    assert {ran.verdict(profile) for profile in ("core", "atomicity", "liveness", "deletion", "capacity", "tier")} == {"CONFORMANT"}
    assert ran.ids("pass") >= {"KV-CAP-01", "KV-CAP-02", "KV-CAP-03", "KV-CAP-04"}


@pytest.mark.long
@pytest.mark.parametrize("max_bytes", ["32MiB", "64MiB"])
def test_so_is_fs(max_bytes: str, tmp_path: Path) -> None:
    ran = run_suite("fs", tmp_path, options=[*SMALL, f"--kvstore-option=max_bytes={max_bytes}"])
    assert ran.ids("fail") | ran.ids("error") | ran.ids("blocked") | ran.ids("advisory") == set()
    assert ran.verdict("durability") == ran.verdict("capacity") == "CONFORMANT"


class Uncounted(BackendWrapper):
    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Callable[[Sequence[Any]], Any]) -> Any:
        if op == "usage":
            raise BackendError("uncounted usage: nobody counts here")
        return proceed(items)


def open_uncounted(location: str) -> Uncounted:
    return Uncounted(open_memory(location.strip("/")))


def test_a_usage_that_fails_blocks_nothing_that_is_not_about_usage(tmp_path: Path) -> None:
    ran = run_suite("test_bounded:open_uncounted", tmp_path, "core", "atomicity", "deletion", "listing", "capacity", options=SMALL)
    assert ran.ids("fail") == {"KV-CAP-01"}
    # Any sequence of operations has usage among them.
    assert ran.ids("blocked") == {"KV-CAP-02", "KV-CORE-24"}
    assert [ran.verdict(profile) for profile in ("atomicity", "deletion", "listing")] == ["CONFORMANT"] * 3
