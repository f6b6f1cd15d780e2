"""Nodes in processes of their own, and networks between them; whatever a test leaves open is ended."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from p2p_network import Link, need


@pytest.fixture
def link() -> Iterator[Link]:
    need("namespaces")
    made = Link()
    yield made
    made.close()
