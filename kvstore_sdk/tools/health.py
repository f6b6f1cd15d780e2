"""Asking a store whether it works, call by call, each in bounded time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from kvstore_sdk.backend import Backend, BackendError, BreachError, Deadline, Failure, Mode, SupportsDelete
from kvstore_sdk.errors import KVStoreError, text_of
from kvstore_sdk.tools.reading import PAGE_BYTES, Reader
from kvstore_sdk.tools.removal import check_removes, remove
from kvstore_sdk.tools.retry import Retry
from kvstore_sdk.tools.writing import Writer

__all__ = ["Step", "check", "timed"]

_GRACE_S = 0.5
_VISIBLE_S = 10.0
"""A store without `read_after_write` may take so long to show a record."""
_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class Step:
    """One call, and what came of it.

    Attributes:
        name: What was done.
        elapsed_s: How long it took.
        problem: Why it failed, in one line; empty when it did not.
    """

    name: str
    elapsed_s: float
    problem: str = ""


def timed(name: str, timeout_s: float, call: Callable[[], object]) -> Step:
    """Make a call, on a thread that is left behind when it does not return in time: a dead mount cannot be interrupted.

    Raises:
        ConfigError: of the call.
    """
    began_s = time.monotonic()
    ended: Future[None] = Future()

    def run() -> None:
        try:
            call()
        except KVStoreError as error:
            ended.set_exception(error)
        except BaseException as cause:  # noqa: BLE001  # vendor code may raise anything; whoever asked is told what it was
            ended.set_exception(BackendError(f"{name}: the backend raised {type(cause).__name__}: {text_of(cause)}"))
        else:
            ended.set_result(None)

    threading.Thread(target=run, name=f"health-{name}", daemon=True).start()
    problem = ""
    try:
        # Half a second more, as a backend has to return by then.
        ended.exception(timeout_s + _GRACE_S)
    except TimeoutError:
        problem = f"{name}: the backend did not return within {timeout_s:g} s"
    else:
        try:
            ended.result()
        except BackendError as error:
            problem = text_of(error)
    return Step(name, time.monotonic() - began_s, problem)


def check(backend: Backend, *, timeout_s: float, write: bool) -> Iterator[Step]:
    """Ask for a name that is not there, and, with `write`, store a record under it, read and remove it. Yields each step as it ends.

    Nothing is tried twice. A record that may have been stored is removed, whatever failed before.

    Raises:
        UnsupportedError: what is written could not be removed. Nothing was written.
    """
    name = f"kvstore-health-{os.urandom(8).hex()}"
    scratch = _Scratch(backend, name, timeout_s)
    removes = check_removes(backend, "health --write") if write else None
    for step, call in (("exists", scratch.exists), ("get", scratch.get)):
        yield timed(step, timeout_s, call)
    if removes is None:
        return
    stored = timed("put", timeout_s, scratch.put)
    yield stored
    if not stored.problem:
        limit_s = timeout_s if backend.capabilities.read_after_write else max(timeout_s, _VISIBLE_S)
        yield timed("get what was put", limit_s, lambda: scratch.get_back(limit_s))
    yield timed("delete", timeout_s, lambda: scratch.delete(removes))


class _Scratch:
    """A record that nobody else knows of."""

    def __init__(self, backend: Backend, name: str, timeout_s: float) -> None:
        self._backend = backend
        self._name = name
        self._record = os.urandom(PAGE_BYTES)
        self._timeout_s = timeout_s
        self._retry = Retry(timeout_s, tries=1)

    def exists(self) -> None:
        [answer] = self._backend.exists([self._name], Deadline.after(self._timeout_s))
        if isinstance(answer, Failure):
            raise answer.error
        if answer is not False:
            raise BreachError(f"exists {self._name}: answered {answer!r} for a name that nobody has stored")

    def get(self) -> None:
        if self._read() is not None:
            raise BreachError(f"get {self._name}: found a record that nobody has stored")

    def put(self) -> None:
        writer = Writer(self._backend, self._retry)
        try:
            if not writer.write(self._name, self._record, Mode.CREATE):
                raise BreachError(f"put {self._name}: says that there is a record that nobody has stored")
        finally:
            writer.close()

    def get_back(self, limit_s: float) -> None:
        end_s = time.monotonic() + limit_s
        while (found := self._read()) is None and not self._backend.capabilities.read_after_write and time.monotonic() < end_s:
            time.sleep(_LOOK_S)
        if found is None:
            raise BreachError(f"get {self._name}: does not find what was stored")
        if found != self._record:
            raise BreachError(f"get {self._name}: the bytes are not those that were stored")

    def delete(self, backend: SupportsDelete) -> None:
        [answer] = remove(backend, [self._name], self._retry)
        if isinstance(answer, BackendError):
            raise answer

    def _read(self) -> bytes | None:
        reader = Reader(self._backend, self._retry)
        try:
            found = reader.read(self._name, PAGE_BYTES)
            return found if found is None else bytes(found) if isinstance(found, memoryview) else b""
        finally:
            reader.close()
