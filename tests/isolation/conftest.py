"""Backends of tests in children, and memory for them; whatever a test leaves open is closed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore_sdk.backend import Region
from kvstore_sdk.isolation import IsolatedBackend, IsolationLimits, open_isolated

# Children take over the path, and find `obeying` there.
sys.path.insert(0, str(Path(__file__).parent))

from isolation_bench import LIMITS, Open


@pytest.fixture
def open_child(tmp_path: Path) -> Iterator[Open]:
    """Opens a factory of `obeying` in a child; keyword arguments are limits, or options."""
    opened: list[IsolatedBackend] = []

    def open_it(factory: str = "open_obeys", **given: Any) -> IsolatedBackend:
        limits = IsolationLimits(**{name: value for name, value in given.items() if name in LIMITS})
        options = {name: value for name, value in given.items() if name not in LIMITS}
        opened.append(open_isolated(f"obeying:{factory}", options, location=str(tmp_path), limits=limits, label="it"))
        return opened[-1]

    yield open_it
    for backend in opened:
        backend.close()


@pytest.fixture
def region() -> Iterator[Region]:
    region = Region(1 << 20)
    yield region
    region.close()


@pytest.fixture
def child(open_child: Open, region: Region) -> IsolatedBackend:
    """A backend with the region announced."""
    backend = open_child()
    backend.register_region(region)
    return backend
