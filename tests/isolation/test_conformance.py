"""Backends in children are CONFORMANT in all that they are without: what isolation adds breaks no promise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

IN_ONE_PROCESS = {"core", "atomicity", "concurrency", "liveness", "errors", "deletion", "listing", "capacity", "regions", "tier"}
SHARED = IN_ONE_PROCESS | {"sharing", "durability"}
# What passes through the child most: the rest is the backend's own, and for the long run.
MOSTLY_ISOLATION = {"errors", "regions"}


# Far above what it takes on a machine that does nothing else: a minute for the short runs, five for the long ones.
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("target", "profiles"),
    [
        ("open_fs", MOSTLY_ISOLATION),
        pytest.param("open_fs", SHARED, marks=pytest.mark.long),
        pytest.param("open_memory", IN_ONE_PROCESS, marks=pytest.mark.long),
    ],
    ids=["fs in what isolation may change", "fs", "memory"],
)
def test_it_is_conformant_in_all_that_it_is_without_isolation(target: str, profiles: set[str], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "kvstore_sdk", "conformance", f"isolated_targets:{target}", f"--report={report}", "--largest=64MiB"]
    if profiles == MOSTLY_ISOLATION:
        command += [f"--profile={','.join(sorted(profiles))}", "--largest=1MiB", "--examples=5"]
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=1150, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = {profile: found["verdict"] for profile, found in json.loads(report.read_text())["verdicts"].items()}
    assert {profile for profile, verdict in verdicts.items() if verdict == "CONFORMANT"} == profiles, done.stdout
    assert set(verdicts.values()) <= {"CONFORMANT", "NOT CLAIMED"}, done.stdout
