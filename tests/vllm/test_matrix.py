"""The tier under the real `TieringOffloadingManager` of every vLLM version that has its own shape of the interface."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DRIVER = Path(__file__).with_name("matrix_driver.py")
INSTALLED = "0.32.0"
# `make test` says where the Python files of the others lie: one folder for each version, to be put first on the path.
OVERLAYS = Path(os.environ.get("KVSTORE_VLLM_OVERLAYS", "/nonexistent"))
VERSIONS = ["0.24.0", "0.26.0", "0.28.0", "0.30.0", INSTALLED, "0.33.0"]


def drive(version: str, folder: Path) -> dict[str, Any]:
    paths = [ROOT, ROOT / "backends", ROOT / "conformance", DRIVER.parent]
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
    done = subprocess.run([sys.executable, DRIVER, folder, version], env=environment, capture_output=True, text=True, timeout=300)
    lines = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    assert len(lines) == 1, f"{version} ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    report: dict[str, Any] = json.loads(lines[-1].removeprefix("REPORT "))
    return report


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """What the driver reported of a version. Two run at a time: they mostly import."""
    running: dict[str, Future[dict[str, Any]]] = {}
    pool = ThreadPoolExecutor(2)
    for version in VERSIONS:
        running[version] = pool.submit(drive, version, tmp_path_factory.mktemp(version))
    pool.shutdown(wait=False)
    return lambda version: running[version].result()


@pytest.mark.parametrize("version", VERSIONS)
def test_the_real_manager_stores_evicts_promotes_resets_and_shuts_down(version: str, report: Callable[[str], dict[str, Any]]) -> None:
    """API-02, API-03, KEY-12, CFG-12; see the driver for what it asserts itself."""
    found = report(version)
    minor = int(version.split(".")[1])
    assert found["left in /dev/shm"] == []
    # From 0.25 on tiers have metrics, from 0.26 on events.
    assert ("vllm:kvstore_lookups" in found["declared"]) == (minor >= 25)
    assert (found.get("loads") == 4.0) == (minor >= 25)
    storage = "Medium.STORAGE removed=False" if found["has Medium"] else "STORAGE removed=False"
    assert (found["events"].get(storage, 0) > 0) == (minor >= 26)
    assert found["has Medium"] == (minor >= 27)
    assert found["refuses replicas"] == (minor <= 25)
    assert found["refuses offload_prompt_only"] == (minor == 26)
    assert found["refuses mamba align"] == (28 <= minor <= 30)
