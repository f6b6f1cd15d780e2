"""What a check works with: one location that nobody else uses, and everything that it opens there."""

from __future__ import annotations

import contextlib
import random

from kvstore_sdk.backend import Deadline, KVStoreError, SupportsDelete, SupportsList
from kvstore_sdk_conformance.callers import Callers, HungError
from kvstore_sdk_conformance.calls import Calls
from kvstore_sdk_conformance.children import Child
from kvstore_sdk_conformance.failure import ConformanceFailure
from kvstore_sdk_conformance.target import Place, Target
from kvstore_sdk_conformance.view import View

__all__ = ["OPEN_S", "FixtureError", "Store"]

OPEN_S = 60.0
"""To open a store: 30 s for what it waits for, such as a server that restarts, and as much again for a busy machine."""
_CLEAN_S = 10.0
_CLEAN_RECORDS = 100_000
_NAMESPACE = f"{0xC0FFEE:032x}"


class FixtureError(Exception):
    """The store could not be opened, so nothing can be said about the requirement."""


class Store:
    """A fresh location of the target, which holds `capacity_bytes`, as far as that is known.

    Attributes:
        random: Seeded by the run's seed and the check: the same in every run with that seed.
        calls: The last calls, as lines of Python.
        figures: What a check measured, by name.
    """

    def __init__(self, target: Target, seed: str, capacity_bytes: int | None = None, *, place: Place | None = None) -> None:
        self.random = random.Random(seed)
        self.calls = Calls()
        self._called = "store"
        self.place: Place = place or target.fresh()
        self._views: list[View] = []
        self._made: set[str] = set()
        self._children: list[Child] = []
        self._target = target
        self._capacity_bytes = capacity_bytes
        self._others: list[Store] = []
        self.figures: dict[str, float] = {}

    def open(self) -> View:
        """Open the location, once more if it is open already.

        Raises:
            FixtureError: it could not be opened the first time.
            ConformanceFailure: it could be opened once, and not again.
        """
        label = self.calls.new_view()
        callers = Callers()
        try:
            backend = callers.run(self.place.open, OPEN_S)
        except (KVStoreError, HungError) as error:
            problem = str(error) or f"no answer within {OPEN_S:g} s"
            if self._views:
                raise ConformanceFailure("the location to open again", problem, breaks="KV-CORE-18") from error
            raise FixtureError(f"the backend could not be opened: {problem}") from error
        finally:
            callers.stop()
        self.calls.append(f"{label} = {self._called}.open()")
        view = View(label, backend, self.calls.append, self._capacity_bytes)
        self._views.append(view)
        return view

    def child(self) -> Child:
        """A process of its own that has the location open.

        Raises:
            ConformanceFailure: it could not open it.
        """
        shared = any(view.capabilities.shared for view in self._views)
        child = Child(self.place, shared=shared, log=self.calls.append)
        self._children.append(child)
        child.start()
        return child

    def elsewhere(self) -> Store:
        """Another fresh location of the same target, which begins with this one."""
        place = self.place.beside(len(self._others) + 1)
        other = Store(self._target, str(self.random.random()), self._capacity_bytes, place=place)
        other.calls, other._called = self.calls, self.calls.new_place()
        self.calls.append(f"{other._called} = {self._called}.elsewhere()")
        self._others.append(other)
        return other

    def name(self, group: int = 0) -> str:
        """A new name, as the SDK makes them."""
        digest = self.random.randbytes(32).hex()
        made = f"v1/{_NAMESPACE}/{digest[:2]}/{digest}-g{group}"
        self._made.add(made)
        return made

    def names(self, count: int) -> list[str]:
        return [self.name() for _ in range(count)]

    def discard(self) -> None:
        """End children, close what is open, remove what was stored."""
        for other in self._others:
            other.discard()
        for child in self._children:
            child.kill()
        for view in self._views:
            if not (view.hung or view.closed):
                # How it ends is judged by checks of its own.
                with contextlib.suppress(Exception):
                    view.close()
            view.drop()
        for child in self._children:
            child.discard()
        if self.place.folder is None and not any(view.hung for view in self._views):
            with contextlib.suppress(Exception):
                self._remove_records()
        self.place.discard()

    def _remove_records(self) -> None:
        """Remove what was stored where the suite cannot remove the place itself. Nobody else knows the location."""
        backend = self.place.open()
        try:
            if not isinstance(backend, SupportsDelete) or backend.capabilities.read_only:
                return
            names = self._made.union(*(view.names for view in self._views))
            if isinstance(backend, SupportsList):
                names |= {entry.name for entry in backend.list("", Deadline.after(_CLEAN_S), None, _CLEAN_RECORDS).entries}
            some = sorted(names)
            for start in range(0, len(some), backend.capabilities.max_batch):
                backend.delete(some[start : start + backend.capabilities.max_batch], Deadline.after(_CLEAN_S))
        finally:
            backend.close()
