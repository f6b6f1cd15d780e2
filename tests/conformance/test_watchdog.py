"""A run ends, also where no call is watched, and leaves nothing that looks like another verdict."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

STORE = """
import time

from kvstore_sdk_backends.memory import open_memory


def open_store(location):
    backend = open_memory(location)
    exists = backend.exists
    backend.exists = lambda names, deadline: HangingList(exists(names, deadline))
    return backend


class HangingList(list):
    def __len__(self):
        time.sleep(3600)
"""


STORE_THAT_ENDS = """
import os

from kvstore_sdk_backends.memory import MemoryBackend, open_memory


def open_store(location):
    return open_memory(location)


MemoryBackend.put = lambda *_: os._exit(0)
"""


def run(folder: Path, source: str, check_s: float) -> subprocess.CompletedProcess[str]:
    (folder / "acme_store.py").write_text(source)
    suite = ["--pyargs", "kvstore_sdk_conformance", "--kvstore-backend=acme_store:open_store", "--kvstore-profile=core"]
    suite += ["--kvstore-largest=64KiB", f"--kvstore-report={folder / 'report.json'}", "-p", "no:cacheprovider"]
    code = f"import pytest, sys; from kvstore_sdk_conformance import session; session.CHECK_S = {check_s}; "
    code += f"sys.exit(pytest.main({suite!r}))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def test_an_object_of_the_backend_that_hangs_where_it_is_looked_at_ends_the_run_as_incomplete(tmp_path: Path) -> None:
    done = run(tmp_path, STORE, check_s=6.0)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "did not end within 6 s" in done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["verdicts"]["core"]["verdict"] == "INCOMPLETE"


def test_a_run_that_does_not_come_to_its_end_leaves_no_report_of_an_earlier_one(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("{}")
    done = run(tmp_path, STORE_THAT_ENDS, check_s=60.0)
    assert done.returncode == 0
    assert not (tmp_path / "report.json").exists()
