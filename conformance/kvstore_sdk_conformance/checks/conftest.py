"""What every check gets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore_sdk_conformance.check import requirement_of
from kvstore_sdk_conformance.run import Run
from kvstore_sdk_conformance.session import RUN
from kvstore_sdk_conformance.store import Store
from kvstore_sdk_conformance.view import View


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Run:
    """The run: seed, limits, and what the backend offers."""
    found: Run = request.config.stash[RUN]
    return found


@pytest.fixture
def store(request: pytest.FixtureRequest, run: Run) -> Iterator[Store]:
    """A fresh location; what is opened there is closed after the check."""
    requirement = requirement_of(request.function)
    assert requirement is not None
    made = Store(run.target, f"{run.seed}/{request.node.name}", run.offer.capacity_bytes)
    yield made
    made.discard()


@pytest.fixture
def view(store: Store) -> View:
    """An open backend at a fresh location."""
    return store.open()
