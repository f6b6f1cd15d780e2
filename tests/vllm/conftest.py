"""What the tests of the adapter share. They run engines in their own process: 1 to 3 s each, where a process of its own takes 30."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# The scripts that tests start as processes import the same helpers from their own folder.
sys.path.insert(0, str(Path(__file__).parent))

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    # Without it vLLM binds this process, and every thread that a later test starts, to some of the cores.
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    # Two ranks with a thread for each core would wait for each other most of the time.
    OMP_NUM_THREADS="1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    # vLLM compiles two small kernels with g++ otherwise: 15 seconds, and nothing here is about them.
    TORCH_COMPILE_DISABLE="1",
)

import vllm_kernels  # noqa: F401  before vLLM
from vllm_engines import Engine, Stored
from vllm_models import ModelShop
from vllm_stand import Stand


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> ModelShop:
    """Builds tiny models of random weights, each once."""
    return ModelShop(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def stored(models: ModelShop, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """What an engine stored. Use a copy of it: `folder`."""
    return Stored(models("llama"), tmp_path_factory.mktemp("stored") / "kv")


@pytest.fixture
def folder(stored: Stored, tmp_path: Path) -> Path:
    """A copy of what was stored, to be spoiled."""
    return Path(shutil.copytree(stored.folder, tmp_path / "kv"))


@pytest.fixture
def start() -> Iterator[Callable[..., Engine]]:
    """Starts engines, and stops those that the test left running."""
    running: list[Engine] = []

    def begin(*arguments: Any, **options: Any) -> Engine:
        engine = Engine(*arguments, **options)
        running.append(engine)
        return engine

    yield begin
    for engine in running:
        engine.stop()


@pytest.fixture
def stand() -> Iterator[Callable[..., Stand]]:
    """Builds stands, and closes those that the test left open."""
    built: list[Stand] = []

    def build(*arguments: Any, **options: Any) -> Stand:
        made = Stand(*arguments, **options)
        built.append(made)
        return made

    yield build
    for made in built:
        made.close()
