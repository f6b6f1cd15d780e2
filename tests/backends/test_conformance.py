"""The backends of this repository are CONFORMANT in all that they claim, by the command that operators use."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

IN_ONE_PROCESS = {"core", "atomicity", "concurrency", "liveness", "errors", "deletion", "listing", "capacity", "tier"}
SHARED = IN_ONE_PROCESS | {"sharing", "durability"}

RUNS = {
    "memory": (["memory:", "--largest=1GiB"], IN_ONE_PROCESS),
    "fs": (["fs"], SHARED),
    # What only a bound changes. The records of the other profiles are not many.
    "bounded fs": (
        ["fs", "--option=max_bytes=64MiB", "--profile=core,deletion,listing,capacity,tier"],
        {"core", "deletion", "listing", "capacity", "tier"},
    ),
    "bounded memory": (["memory:{fresh}?max_bytes=64MiB", "--profile=core,capacity"], {"core", "capacity"}),
}


# Three minutes is what the whole suite may take on a folder, on a machine that does nothing else.
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("arguments", "claimed"), RUNS.values(), ids=RUNS)
def test_it_is_conformant_in_all_that_it_claims(arguments: Sequence[str], claimed: set[str], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "kvstore_sdk", "conformance", *arguments, f"--report={report}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = {profile: found["verdict"] for profile, found in json.loads(report.read_text())["verdicts"].items()}
    assert {profile for profile, verdict in verdicts.items() if verdict == "CONFORMANT"} == claimed, done.stdout
    assert set(verdicts.values()) <= {"CONFORMANT", "NOT CLAIMED"}, done.stdout
