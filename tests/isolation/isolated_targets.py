"""The backends of this repository in children, for the conformance suite: `isolated_targets:open_fs` and so on."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from kvstore_sdk.backend import Backend, Bounds, ClosedError, Deadline, Region
from kvstore_sdk.isolation import IsolatedBackend, open_isolated
from kvstore_sdk.isolation.calls import failed
from kvstore_sdk.testing import BackendWrapper

__all__ = ["open_fs", "open_memory"]


def open_fs(
    location: str,
    *,
    max_bytes: Annotated[int | None, Bounds(ge=1), "of backend fs"] = None,
    read_only: Annotated[bool, "of backend fs"] = False,
) -> IsolatedBackend:
    """Backend fs in a child."""
    options: dict[str, Any] = {"read_only": read_only}
    if max_bytes is not None:
        options["max_bytes"] = max_bytes
    return open_isolated("fs", options, location=location, label="isolated fs")


def open_memory(location: str, *, max_bytes: Annotated[int | None, Bounds(ge=1), "of backend memory"] = None) -> Backend:
    """Backend memory in a child: one for each location, because its records live in the process. Locations stay, as those of memory do."""
    with _lock:
        if location not in _children:
            options = {} if max_bytes is None else {"max_bytes": max_bytes}
            _children[location] = _Child(open_isolated("memory", options, location=location, label="isolated memory"))
        return _View(_children[location])


class _Child:
    """A child, and how often each region was announced by its views."""

    def __init__(self, backend: IsolatedBackend) -> None:
        self.backend = backend
        self.regions: Counter[int] = Counter()


class _View(BackendWrapper):
    """One of several that were opened at a location. Closing it closes no other."""

    def __init__(self, child: _Child) -> None:
        super().__init__(child.backend)
        self._child = child
        self._closed = False
        self._known: dict[int, Region] = {}

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Callable[[Sequence[Any]], Any]) -> Any:
        if op in ("register_region", "unregister_region"):
            if not self._closed:
                self._announce(items[0], op == "register_region")
            return None
        if op == "close":
            self._closed = True
            for region in list(self._known.values()):
                self._announce(region, False)
            return None
        if self._closed and op != "settle":
            answer = failed(op, len(items), ClosedError(f"isolated memory {op}: is closed"), sent=False)
            if isinstance(answer, BaseException):
                raise answer
            return answer
        return proceed(items)

    def _announce(self, region: Region, is_new: bool) -> None:
        if (region.id in self._known) is is_new:
            return
        with _lock:
            counts = self._child.regions
            if is_new:
                self._known[region.id] = region
                counts[region.id] += 1
                if counts[region.id] == 1:
                    self._child.backend.register_region(region)
            else:
                del self._known[region.id]
                counts[region.id] -= 1
                if not counts[region.id]:
                    self._child.backend.unregister_region(region)


_children: dict[str, _Child] = {}
_lock = threading.Lock()
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
