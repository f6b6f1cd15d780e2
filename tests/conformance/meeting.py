"""Where calls of several threads meet: what goes wrong only between them waits there for the others, for a bounded while."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvstore_sdk.backend import Deadline, DeleteStatus, Failure, Get, GetResult, ListPage, Put, PutResult
from kvstore_sdk.testing import BackendWrapper
from kvstore_sdk.testing.wrapper import item_name

__all__ = ["Meeting", "Place"]

CROWDED_S = 0.5
"""Longest that a call waits for one of a kind that it has met before: more than a busy machine takes to let a thread run."""
_LOOK_S = 0.0005

_places: dict[object, Place] = {}
_places_lock = threading.Lock()


class Place:
    """The calls of all views of a location, and which kinds of them were ever made at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside: Counter[str] = Counter()
        self._met: set[tuple[str, str]] = set()
        self._begun = 0
        self._done: deque[tuple[int, str, Sequence[str]]] = deque(maxlen=1000)

    @staticmethod
    def of(location: object) -> Place:
        """The one of this location."""
        with _places_lock:
            return _places.setdefault(location, Place())

    @contextlib.contextmanager
    def call(self, op: str, names: Sequence[str]) -> Iterator[None]:
        """While a call is made."""
        with self._lock:
            for other in +self._inside:
                self._met |= {(op, other), (other, op)}
            self._inside[op] += 1
            self._begun += 1
            number = self._begun
        try:
            yield
        finally:
            with self._lock:
                self._inside[op] -= 1
                self._done.append((number, op, names))

    def wait(self, op: str, other: str, came: Callable[[], object], alone_s: float) -> bool:
        """In a call of `op`, wait for what comes with a call of `other`; where no such calls meet not longer than `alone_s`.

        Returns:
            Whether it came.
        """
        began_s = time.monotonic()
        while not came():
            if time.monotonic() - began_s > (CROWDED_S if (op, other) in self._met else alone_s):
                return False
            time.sleep(_LOOK_S)
        return True

    def wait_for(self, op: str, other: str, name: str, alone_s: float) -> bool:
        """Likewise, wait until a call of `other` that names `name`, and begins from now on, has ended."""
        with self._lock:
            begun = self._begun

        def came() -> bool:
            with self._lock:
                return any(number > begun and other == done and name in names for number, done, names in self._done)

        return self.wait(op, other, came, alone_s)


class Meeting(BackendWrapper):
    """A wrapper whose calls meet at the place of its location."""

    @property
    def place(self) -> Place:
        inner: Any = self.inner
        # Of `memory`, or of `fs`.
        return Place.of(id(inner._shelf) if hasattr(inner, "_shelf") else inner._root)

    def exists(self, names: Sequence[str], deadline: Deadline) -> list[bool | Failure]:
        with self.place.call("exists", names):
            return super().exists(names, deadline)

    def put(self, puts: Sequence[Put], deadline: Deadline) -> list[PutResult]:
        with self.place.call("put", [*map(item_name, puts)]):
            return super().put(puts, deadline)

    def get(self, gets: Sequence[Get], deadline: Deadline) -> list[GetResult]:
        with self.place.call("get", [*map(item_name, gets)]):
            return super().get(gets, deadline)

    def _delete(self, names: Sequence[str], deadline: Deadline) -> list[DeleteStatus | Failure]:
        with self.place.call("delete", names):
            return super()._delete(names, deadline)

    def _list(self, prefix: str, deadline: Deadline, cursor: str | None = None, limit: int = 1000) -> ListPage:
        with self.place.call("list", [prefix]):
            return super()._list(prefix, deadline, cursor, limit)
