"""Backends that would take the engine's process with them, for `isolation: process`: `"backend": "hostile_backends:open_hostile"`."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from kvstore_sdk.backend import Backend, Bounds, Deadline, open_backend
from kvstore_sdk.testing import BackendWrapper

__all__ = ["Misdeed", "open_crashing", "open_hostile", "processes_of"]

Misdeed = Literal["none", "segfault", "exit", "leak", "spin", "spin_with_gil", "spin_without_gil", "never_return"]


def open_hostile(
    location: str,
    *,
    misdeed: Annotated[Misdeed, "what it does"],
    every: Annotated[int, Bounds(ge=1), "in which call of a process, and each so many later"] = 50,
    leak_bytes: Annotated[int, Bounds(ge=0), "kept of each call by a leak"] = 1 << 20,
) -> Backend:
    """A folder, whose every so-many-th call of exists, put or get goes wrong. The others are as good as any."""
    return _Hostile(open_backend("fs", location=location), Path(location), misdeed, every, leak_bytes)


def open_crashing(location: str) -> Backend:
    """Never gets that far."""
    ctypes.string_at(0)
    return open_backend("fs", location=location)


def processes_of(folder: Path) -> list[int]:
    """The process of each misdeed there was, in their order."""
    journal = _journal(folder)
    return [int(line) for line in journal.read_text().splitlines()] if journal.exists() else []


class _Hostile(BackendWrapper):
    def __init__(self, inner: Backend, folder: Path, misdeed: Misdeed, every: int, leak_bytes: int) -> None:
        super().__init__(inner)
        self._folder, self._misdeed, self._every, self._leak_bytes = folder, misdeed, every, leak_bytes
        self._calls = itertools.count(1)
        self._leaked: list[bytes] = []

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Callable[[Sequence[Any]], Any]) -> Any:
        if op in ("exists", "put", "get"):
            number = next(self._calls)
            if self._misdeed == "leak":
                # Random, so that no kernel and no allocator can do without the pages.
                self._leaked.append(os.urandom(self._leak_bytes))
            if number % self._every == 0 and self._misdeed != "none":
                self._note()
                _DO[self._misdeed]()
        return proceed(items)

    def _note(self) -> None:
        with _journal(self._folder).open("a") as journal:
            journal.write(f"{os.getpid()}\n")


def _journal(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.misdeeds")


def _spin() -> None:
    while True:
        pass


def _spin_with_gil() -> None:
    # Tries all ways to split the letters, which are more than there are nanoseconds in a year, and never lets another thread run.
    re.match(r"(a+)+$", "a" * 60 + "b")


def _spin_without_gil() -> None:
    hashlib.pbkdf2_hmac("sha256", b"password", b"salt", (1 << 31) - 1)


_DO: Mapping[str, Callable[[], object]] = {
    "segfault": lambda: ctypes.string_at(0),
    "exit": lambda: os._exit(3),
    "leak": lambda: None,
    "spin": _spin,
    "spin_with_gil": _spin_with_gil,
    "spin_without_gil": _spin_without_gil,
    "never_return": lambda: threading.Event().wait(),
}
