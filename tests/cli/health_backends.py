"""Stores that go wrong in one way each, opened by name."""

from __future__ import annotations

import time
from typing import Any

from kvstore_sdk.backend import Backend, DeniedError, Failure, PutResult, UnavailableError
from kvstore_sdk.testing import BackendWrapper, Fault, FaultyBackend, Hang, Raise, Return, Say, WrongBytes
from kvstore_sdk_backends.memory import open_memory

SCRIPTS: dict[str, Fault] = {
    "exists raises": Fault("exists", Raise()),
    "exists fails": Fault("exists", Say(Failure(UnavailableError("the store is down")))),
    "exists lies": Fault("exists", Say(True)),
    "exists answers nonsense": Fault("exists", Return(lambda _: 7)),
    "exists hangs": Fault("exists", Hang()),
    "get raises": Fault("get", Raise(lambda: RuntimeError("a bug"))),
    "get hangs": Fault("get", Hang()),
    "put is forbidden": Fault("put", Say(PutResult.failed(DeniedError("put: not for you")))),
    "wrong bytes": Fault("get", WrongBytes()),
    "delete fails": Fault("delete", Say(Failure(UnavailableError("the store is down")))),
    "nothing": Fault("get", Hang(0.0)),
}
opened: list[FaultyBackend] = []


class Lazy(BackendWrapper):
    """Takes long to close."""

    def close(self) -> None:
        time.sleep(0.6)
        self.inner.close()


class NoDelete:
    """The four methods, and no more."""

    def __init__(self, inner: Backend) -> None:
        self.capabilities = inner.capabilities
        self.exists, self.get, self.put, self.close = inner.exists, inner.get, inner.put, inner.close


def open_faulty(location: str, *, how: str = "nothing", token: str = "") -> Any:
    backend = FaultyBackend(open_memory(location), [SCRIPTS[how]])
    opened.append(backend)
    return backend


def open_no_delete(location: str) -> Any:
    opened.append(backend := FaultyBackend(open_memory("")))
    return NoDelete(backend)


def open_lazy(location: str) -> Any:
    return Lazy(open_memory(""))


def open_down(location: str) -> Any:
    raise UnavailableError("nobody answers")


def open_hanging(location: str) -> Any:
    time.sleep(20.0)
    raise UnavailableError("after all")
