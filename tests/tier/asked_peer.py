"""A store that waits for what is not there yet, as one does that asks a peer."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvstore_sdk.backend import Backend, Capabilities, ClosedError, Deadline, Failure, Hint
from kvstore_sdk.testing import BackendWrapper

__all__ = ["AskedPeer"]


class AskedPeer(BackendWrapper):
    """Over another store, which has what came.

    Attributes:
        told: (thread, names, hint) of every hint, in order.
        asked: (thread, names, seconds left) of every look-up.
        identities: What it was told by `use_identity`, and after how many look-ups.
        waiting: Look-ups that wait now.
        most_waiting: That waited at the same time.
    """

    def __init__(self, inner: Backend, max_concurrency: int = 64) -> None:
        super().__init__(inner)
        self._max_concurrency = max_concurrency
        self._changed = threading.Condition()
        self._hints: dict[str, tuple[int, Hint]] = {}
        self._closed = False
        self.told: list[tuple[int, list[str], Hint]] = []
        self.asked: list[tuple[int, list[str], float]] = []
        self.identities: list[tuple[str, str, int]] = []
        self.waiting = self.most_waiting = 0

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities, max_concurrency=self._max_concurrency)

    def use_identity(self, namespace: str, layout: str) -> None:
        self.identities.append((namespace, layout, len(self.asked)))

    def hint(self, names: Sequence[str], hint: Hint) -> None:
        with self._changed:
            thread = threading.get_ident()
            self.told.append((thread, list(names), hint))
            self._hints.update(dict.fromkeys(names, (thread, hint)))

    def exists(self, names: Sequence[str], deadline: Deadline) -> list[bool | Failure]:
        with self._changed:
            thread = threading.get_ident()
            self.asked.append((thread, list(names), deadline.remaining_s()))
            hints = [hint for name in names if (entry := self._hints.get(name)) is not None for by, hint in [entry] if by == thread]
            if hints:
                self._wait(hints[0], names, min(deadline.at_s, time.monotonic() + hints[0].wait_s))
            if self._closed:
                return [Failure(ClosedError("closed")) for _ in names]
        return super().exists(names, deadline)

    def put(self, puts: Any, deadline: Deadline) -> Any:
        results = super().put(puts, deadline)
        with self._changed:
            self._changed.notify_all()
        return results

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        super().close()

    def _wait(self, hint: Hint, names: Sequence[str], until_s: float) -> None:
        wanted = list(hint.until or names)
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting)
        try:
            while not self._closed and (left_s := until_s - time.monotonic()) > 0:
                if all(found is True for found in super().exists(wanted, Deadline.after(5.0))):
                    return
                self._changed.wait(left_s)
        finally:
            self.waiting -= 1
