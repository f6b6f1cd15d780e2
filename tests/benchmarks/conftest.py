"""The scripts of `benchmarks/` are no package: they import each other by name, from their folder."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Import one of them by its name."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module
