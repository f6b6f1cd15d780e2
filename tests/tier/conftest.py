"""What the tests of the Tier share: an engine that is nothing but rows of memory, and stores to give to it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from record_rows import RecordRows
from tier_bench import Engine
from work_bench import Queue

from kvstore_sdk.backend import Backend
from kvstore_sdk_backends.memory import open_memory

NewEngine = Callable[..., Engine]


@pytest.fixture
def way() -> str:
    """How the tier moves records: `staged`; `direct`; or `polled`, direct and with calls that no thread waits for. A module whose promises
    hold in several ways has a fixture of this name that has them."""
    return "staged"


@pytest.fixture
def new_engine(way: str) -> Iterator[NewEngine]:
    """Makes engines with a tier each, over a memory backend unless another is given. Closes them, and finds threads that stayed behind."""
    made: list[Engine] = []
    before = set(threading.enumerate())

    def make(backend: Backend | None = None, **options: Any) -> Engine:
        if way != "staged" and "memory" not in options:
            options["memory"] = RecordRows(options.pop("rows", 64), options.get("of"))
        options.setdefault("polled", way == "polled")
        engine = Engine(open_memory("") if backend is None else backend, **options)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()
    left = [thread.name for thread in threading.enumerate() if thread not in before and "-io-" in thread.name]
    assert not left, f"threads of a tier outlived its close: {left}"


@pytest.fixture
def queue() -> Queue:
    return Queue()
