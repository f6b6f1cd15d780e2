"""Runs a driver on the Python files of every vLLM version that has its own shape of the interface."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
INSTALLED = "0.32.0"
# `make test` says where the Python files of the others lie: one folder for each version, to be put first on the path.
OVERLAYS = Path(os.environ.get("KVSTORE_VLLM_OVERLAYS", "/nonexistent"))
VERSIONS = ["0.24.0", "0.26.0", "0.28.0", "0.30.0", INSTALLED, "0.33.0"]


def drive(driver: str, version: str, folder: Path) -> dict[str, Any]:
    """What a driver of this folder reports when it runs on `version`."""
    here = Path(__file__).parent
    paths = [ROOT, ROOT / "backends", ROOT / "conformance", here]
    if version != INSTALLED:
        assert (OVERLAYS / version / "vllm").is_dir(), f"KVSTORE_VLLM_OVERLAYS has no {version}: run `make test`"
        paths.insert(0, OVERLAYS / version)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        # Before 0.29 vLLM hashes from a random value without it.
        "PYTHONHASHSEED": "0",
        # There is no worker here whose configuration would say it.
        "VLLM_KV_CACHE_LAYOUT": "HND",
    }
    command = [sys.executable, here / driver, folder, version]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    lines = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    assert len(lines) == 1, f"{version} ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    report: dict[str, Any] = json.loads(lines[-1].removeprefix("REPORT "))
    return report


def drive_all(driver: str, make_folder: Callable[[str], Path]) -> Callable[[str], dict[str, Any]]:
    """Start the driver on every version, two at a time: they mostly import. Returns what gives the report of one, once it is there."""
    pool = ThreadPoolExecutor(2)
    running: dict[str, Future[dict[str, Any]]] = {
        version: pool.submit(drive, driver, version, make_folder(version)) for version in VERSIONS
    }
    pool.shutdown(wait=False)
    return lambda version: running[version].result()
