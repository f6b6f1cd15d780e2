"""The whole conformance suite on a real server. It asks for a password, so that secrets are checked as well."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from redis_server import redis_server


def test_the_backend_is_conformant_in_all_that_it_claims(tmp_path: Path) -> None:
    report = tmp_path / "conformance.json"
    with redis_server(tmp_path, "requirepass hunter2-and-more") as server:
        backend = ("--kvstore-backend", server.url, "--kvstore-option", "password=hunter2-and-more")
        suite = [sys.executable, "-m", "pytest", "--pyargs", "kvstore_sdk_conformance", *backend, "--kvstore-report", str(report)]
        done = subprocess.run(suite, cwd=tmp_path, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = {profile: found["verdict"] for profile, found in json.loads(report.read_text())["verdicts"].items()}
    assert verdicts["core"] == verdicts["sharing"] == verdicts["durability"] == "CONFORMANT", done.stdout
    assert set(verdicts.values()) <= {"CONFORMANT", "NOT CLAIMED"}, done.stdout
