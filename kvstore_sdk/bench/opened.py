"""A store while it is measured: opened and closed in bounded time, looked at before anything is written, and left as it was."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from kvstore_sdk.backend import Backend, BackendError, Deadline, ReadOnlyError, SupportsDelete, SupportsUsage, UnsupportedError
from kvstore_sdk.bench.drive import Driver
from kvstore_sdk.tools.health import timed

__all__ = ["Opened"]

_CLOSE_S = 5.0
"""As the contract says."""
_TRIES = 3
_USAGE_S = 5.0
"""A large store takes long to count itself; then its room is not known."""


class Opened:
    """A context. Leaving it removes what was stored, closes the store, and writes into `problems` what could not be removed.

    Attributes:
        driver: Of the store.
        folder: Of its files, where it is a folder.
        deletes: Whether what is stored is removed again.
    """

    driver: Driver

    def __init__(
        self,
        label: str,
        open_store: Callable[[], AbstractContextManager[Backend]],
        *,
        folder: Path | None,
        namespace: str,
        timeout_s: float,
        leave_records: bool,
        problems: list[str],
    ) -> None:
        self._label = label
        self._open = open_store
        self._namespace = namespace
        self._timeout_s = timeout_s
        self._leave = leave_records
        self._problems = problems
        self._context: AbstractContextManager[Backend] | None = None
        self.folder = folder
        self.deletes = not leave_records

    def __enter__(self) -> Opened:
        opened: list[AbstractContextManager[Backend]] = []
        step = timed("open", self._timeout_s, lambda: opened.append(self._open()))
        if step.problem:
            raise BackendError(f"bench: {self._label}: {step.problem}")
        self._context = opened[0]
        backend = self._context.__enter__()
        self.driver = Driver(backend, self._namespace, self._timeout_s)
        try:
            self._check(backend)
        except BaseException:
            self.__exit__()
            raise
        if self.folder is not None and not self.folder.is_dir():
            self.folder = None
        self._had_tree = self.folder is not None and (self.folder / "v1").exists()
        return self

    def _check(self, backend: Backend) -> None:
        """That it can be measured. Nothing was written yet."""
        if backend.capabilities.read_only:
            raise ReadOnlyError(f"bench: {self._label} is read-only, and this stores records")
        if not self._leave and not isinstance(backend, SupportsDelete):
            problem = "does not remove records (SupportsDelete); with --leave-records what this stores stays there"
            raise UnsupportedError(f"bench: {type(backend).__name__} {problem}")
        needed = len(self.driver.keys(1)[0].name)
        if backend.capabilities.max_name_bytes < needed:
            raise UnsupportedError(
                f"bench: {self._label} takes names of {backend.capabilities.max_name_bytes} bytes, records need {needed}"
            )

    def room_bytes(self) -> int | None:
        """How much more it takes without evicting anything, as far as it or its filesystem says; None: neither does."""
        known: list[int] = []
        backend = self.driver.backend
        if isinstance(backend, SupportsUsage):

            def ask() -> None:
                usage = backend.usage(Deadline.after(_USAGE_S))
                if usage.capacity_bytes is not None:
                    known.append(usage.capacity_bytes - usage.used_bytes)

            timed("usage", _USAGE_S, ask)
        if self.folder is not None:
            known.append(shutil.disk_usage(self.folder).free)
        return min(known, default=None)

    def path(self, name: str) -> str:
        """Where the file of a record is, if the store keeps it in one of this name, as `fs` does."""
        return f"{self.folder}/{name}"

    def __exit__(self, *_: object) -> None:
        if self._context is None:
            return
        context, self._context = self._context, None
        left, written = self.driver.left, len(self.driver.left)
        why = "--leave-records" if self._leave else "interrupted while they were removed"
        try:
            if left and not self._leave:
                why = timed("delete", self._timeout_s * _TRIES, self.driver.clean).problem
        finally:
            if left or self.driver.is_unsure:
                why = why or "a put that did not return may still store them"
                how = f"give the same store to kvstore prune --namespace {self._namespace} to remove them"
                self._problems.append(f"up to {written} records of this run are in {self._label} ({why}); {how}")
            try:
                self.driver.close()
                timed("close", _CLOSE_S, lambda: context.__exit__(None, None, None))
            finally:
                # Interrupted or not.
                if self.folder is not None and not left:
                    self._sweep(self.folder / "v1")

    def _sweep(self, tree: Path) -> None:
        """The empty folders of our namespace. A folder that is not empty stays, whoever filled it."""
        with contextlib.suppress(OSError):
            for entry in os.scandir(tree / self._namespace):
                os.rmdir(entry.path)
            os.rmdir(tree / self._namespace)
            if not self._had_tree:
                os.rmdir(tree)
