"""What the tests of the store share."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from store_bench import LIMIT_S, Stand

from kvstore_sdk.backend import Backend
from kvstore_sdk_backends.memory import open_memory

NewStand = Callable[..., Stand]


@pytest.fixture
def new_stand() -> Iterator[NewStand]:
    """Makes stores, over one memory backend `below` unless others are given. Closes them, and finds threads that stayed behind."""
    made: list[Stand] = []
    before = set(threading.enumerate())

    def make(backends: Mapping[str, Backend] | Backend | None = None, **options: Any) -> Stand:
        if backends is None:
            backends = {"below": open_memory("")}
        elif not isinstance(backends, Mapping):
            backends = {"below": backends}
        stand = Stand(backends, **options)
        made.append(stand)
        return stand

    yield make
    for stand in made:
        stand.close()
    for thread in threading.enumerate():
        if thread not in before and ("-io-" in thread.name or "-seal" in thread.name):
            thread.join(LIMIT_S)
            assert not thread.is_alive(), f"{thread.name} outlived the close of its store"
