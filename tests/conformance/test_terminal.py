"""What the end of a run says beside verdicts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from suite_runner import QUICK, run_suite


def test_musts_that_do_not_apply_are_told_with_the_reason_where_the_profile_is_claimed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ran = run_suite("memory:", tmp_path, "capacity", "durability")
    said = " ".join(capfd.readouterr().out.split())
    assert ran.verdict("capacity") == "CONFORMANT"
    reason = "the backend has no capacity of at most 256 MiB; give it one with an option, such as max_bytes=64MiB"
    assert f"KV-CAP-03, KV-CAP-04, KV-CAP-05: not applicable: {reason}" in said
    # Nothing of a profile that is not claimed.
    assert "KV-DUR-" not in said
    assert "not claimed: durability" in said


def test_the_figures_of_the_profile_performance_are_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ran = run_suite("memory:", tmp_path, "performance")
    said = capfd.readouterr().out
    figures = {name: value for found in ran.report["requirements"] for name, value in found.get("figures", {}).items()}
    assert "put_4KiB_1_thread_p50_ms" in figures
    printed = dict(re.findall(r"^  KV-PERF-\d+ +(\S+) +(\S+)$", said, re.MULTILINE))
    assert {name: float(value) for name, value in printed.items()} == pytest.approx(figures)


def test_the_largest_record_that_was_tried_is_told_as_it_was(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--kvstore-examples=2", "-k", "test_exists_tells_what_is_there"]
    run_suite("memory:{fresh}?max_bytes=32MiB", tmp_path, "core", options=options)
    assert (
        f"Records up to {16 << 20} bytes were tried, {1 << 30} are declared; the largest is half of the capacity." in capfd.readouterr().out
    )
    run_suite("memory:", tmp_path, "core", options=[*QUICK, *options[1:]])
    assert f"Records up to {1 << 20} bytes were tried, {1 << 30} are declared; --largest sets this" in capfd.readouterr().out
