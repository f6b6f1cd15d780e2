"""Nodes in processes of their own, and networks between them; whatever a test leaves open is ended."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "soak"))
sys.path.insert(0, str(Path(__file__).parent))

from p2p_network import Link, need
from p2p_nodes import NodeProcess


@pytest.fixture
def link() -> Iterator[Link]:
    need("namespaces")
    made = Link()
    yield made
    made.close()


@pytest.fixture
def start_node() -> Iterator[Callable[..., NodeProcess]]:
    """Starts a process for a node, by the arguments of `NodeProcess`; all are ended, whatever became of them."""
    started: list[NodeProcess] = []

    def start(*arguments: Any, **options: Any) -> NodeProcess:
        started.append(NodeProcess(*arguments, **options))
        return started[-1]

    yield start
    for number, node in enumerate(started):
        # Shown with a test that failed.
        sys.stdout.write(f"--- log of node {number}, pid {node.pid}\n{node.log()}\n")
        node.end()
