"""A backend that is right and small: its locations hold so many bytes, and whoever needs room there removes the oldest records."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kvstore_sdk.backend import Backend, Deadline, NoSpaceError, PutResult
from kvstore_sdk.testing import BackendWrapper
from kvstore_sdk_backends.memory import open_memory

__all__ = ["Evicting", "open_evicting"]

_locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)


def open_evicting(location: str, *, max_bytes: int) -> Evicting:
    name = location.strip("/")
    return Evicting(open_memory(name), max_bytes, _locks[name])


class Evicting(BackendWrapper):
    """Removes before it stores, so that it never holds more than it may."""

    def __init__(self, inner: Backend, max_bytes: int, lock: threading.Lock) -> None:
        super().__init__(inner)
        self._max_bytes = max_bytes
        self._lock = lock

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Callable[[Sequence[Any]], Any]) -> Any:
        if op == "usage":
            return replace(proceed(items), capacity_bytes=self._max_bytes)
        if op != "put":
            return proceed(items)
        with self._lock:
            return [self._put(item, proceed) for item in items]

    def _put(self, item: Any, proceed: Callable[[Sequence[Any]], Any]) -> PutResult:
        inner: Any = self.inner
        # What cannot be stored anyhow is refused by whom it is put to.
        if item.size_bytes > self._max_bytes and not inner._closed:
            return PutResult.failed(
                NoSpaceError(f"evicting put {item.name}: {item.size_bytes} bytes are more than max_bytes {self._max_bytes}")
            )
        records = inner._shelf.records
        others = [name for name in list(records) if name != item.name]
        while others and not inner._closed and inner._shelf.used_bytes + item.size_bytes > self._max_bytes:
            inner.delete([others.pop(0)], Deadline.after(1.0))
        [result] = proceed([item])
        return result  # type: ignore[no-any-return]
