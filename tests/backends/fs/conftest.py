"""Other processes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

CHILD = Path(__file__).with_name("child.py")


class Child:
    """A process that runs a command of child.py."""

    def __init__(self, *arguments: str) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self.line() == "ready"

    def line(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def go(self) -> None:
        assert self.process.stdin
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=30)


@pytest.fixture
def child() -> Iterator[Callable[..., Child]]:
    """Starts children, and ends them with the test."""
    started: list[Child] = []

    def start(*arguments: object) -> Child:
        started.append(Child(*map(str, arguments)))
        return started[-1]

    yield start
    for one in started:
        one.end()


@pytest.fixture(scope="session")
def children() -> ModuleType:
    """The module that the children run."""
    spec = importlib.util.spec_from_file_location("fs_test_child", CHILD)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
