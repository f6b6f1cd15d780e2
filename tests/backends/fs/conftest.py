"""Other processes, and disks that fail."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvstore_sdk_backends.fs import evictor, lease, native, space

# For the modules that tests share.
sys.path.insert(0, str(Path(__file__).parent))

CHILD = Path(__file__).with_name("child.py")


# Tests that put something in the place of functions of `os`: C does not call those.
REPLACING = {"disk", "filesystem", "python_alone"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    # Of the tests of this folder, with the autouse fixture below.
    if "moved_by" in metafunc.fixturenames:
        names = {*metafunc.fixturenames}
        ways = ["Python"] if REPLACING & names else ["C"] if "c_alone" in names else ["Python", "C"]
        metafunc.parametrize("moved_by", ways, indirect=True)


@pytest.fixture(autouse=True)
def moved_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What moves the records of this test, of the processes that it starts too: both ways answer the same."""
    way = str(request.param)
    if way == "C":
        assert native.load() is not None, "build it: python tools/native.py"
    else:
        monkeypatch.setenv("KVSTORE_FS_NATIVE", "0")
    return way


@pytest.fixture
def python_alone() -> None:
    """For a test that replaces what Python calls."""


@pytest.fixture
def c_alone() -> None:
    """For a test of the library, or of both ways at once."""


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


class Disk:
    """Takes the place of functions of `os`, and puts them back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._real: dict[str, Any] = {}

    def replace(self, name: str, made: Callable[..., Any]) -> None:
        """`made` gets the real function first, and then what the caller gave."""
        real = self._real.setdefault(name, getattr(os, name))
        self._monkeypatch.setattr(os, name, lambda *args, **kwargs: made(real, *args, **kwargs))

    def fail(self, name: str, code: int, times: int = 1 << 30, *, only: str = "") -> None:
        """The next `times` calls fail, of those whose first argument has `only` in it."""
        left = [times]

        def failing(real: Any, *args: Any, **kwargs: Any) -> Any:
            if not left[0] or only not in str(args[0]):
                return real(*args, **kwargs)
            left[0] -= 1
            raise OSError(code, os.strerror(code))

        self.replace(name, failing)

    def mend(self) -> None:
        for name, real in self._real.items():
            self._monkeypatch.setattr(os, name, real)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture
def set_lease(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Makes leases of this process last so many seconds: few, to see one run out, or more than the machine stands still."""

    def set_it(lease_s: float) -> None:
        for module in (lease, evictor, space):
            monkeypatch.setattr(module, "LEASE_S", lease_s)
        monkeypatch.setattr(lease, "SETTLE_S", min(0.1, lease_s / 20))
        monkeypatch.setattr(space, "_AGAIN_S", lease_s / 4)

    return set_it


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    """In memory where that is possible: freeing the blocks of 5,000 files takes some disks ten seconds."""
    with tempfile.TemporaryDirectory(prefix="kvstore-test-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as made:
        yield Path(made)
