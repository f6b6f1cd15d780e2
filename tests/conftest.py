"""What holds for every test of this repository."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import pytest

# The same examples in every run: a failure of CI is seen again by whoever looks for it. No deadline: machines of CI stall.
hypothesis.settings.register_profile("repository", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("repository")

_ENGINE_TESTS = Path(__file__).parent / "vllm"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _ENGINE_TESTS in item.path.parents:
            item.add_marker("vllm")
