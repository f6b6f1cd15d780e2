"""Our own manager, and the connector's own scheduler over it, under every vLLM version that has its own shape of the interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from vllm_versions import VERSIONS, drive_all


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """What the driver reported of a version."""
    return drive_all("offloading_driver.py", tmp_path_factory.mktemp)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_manager_stores_evicts_promotes_resets_and_shuts_down(version: str, report: Callable[[str], dict[str, Any]]) -> None:
    """API-02, API-03, KEY-12; see the driver for what it asserts itself."""
    found = report(version)
    assert found["left in /dev/shm"] == []
    assert found["promoted"] == found["loads"] > 0
    assert found["promoted for the scheduler"] == 4
    assert found["misses"] > 0
    prefix = "Medium." if int(version.split(".")[1]) >= 27 else ""
    for event in ("CPU removed=False", "CPU removed=True", "STORAGE removed=False"):
        assert found["events"][prefix + event] > 0


@pytest.mark.parametrize("version", VERSIONS)
def test_models_with_draft_layers_get_hits(version: str, report: Callable[[str], dict[str, Any]]) -> None:
    """HMA-03. vLLM resumes a chunk before the end of what a group of draft layers has; 0.24 does not store its last chunk either."""
    drafts = report(version)["drafts"]
    assert drafts["found"] == (8 if version == "0.24.0" else 9)
    assert drafts["loads"] == 2 * drafts["found"]
    assert drafts["promoted"] >= drafts["loads"]
    assert drafts["stores"] > drafts["loads"]
