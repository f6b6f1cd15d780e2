"""The tier under the real `TieringOffloadingManager` of every vLLM version that has its own shape of the interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from vllm_versions import VERSIONS, drive_all


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """What the driver reported of a version."""
    return drive_all("matrix_driver.py", tmp_path_factory.mktemp)


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
