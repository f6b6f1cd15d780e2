"""What the tests of the suite share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# Where the backends that are wrong on purpose are found, by this process and by those that the suite starts.
sys.path.insert(0, str(Path(__file__).parent))

TIMEOUT_S = 600
"""Runs of the suite start dozens of processes and wait for deadlines; a machine with much else to do takes ten times as long for them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
