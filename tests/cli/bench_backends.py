"""Stores that go wrong in one way each while they are measured, opened by name."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from kvstore_sdk.backend import (
    Backend,
    Capabilities,
    Deadline,
    DeleteStatus,
    Failure,
    GetResult,
    GetStatus,
    NoSpaceError,
    PutResult,
    PutStatus,
    Region,
    UnavailableError,
)
from kvstore_sdk.testing import BackendWrapper, Fault, FaultyBackend, Hang, Raise, Return, Say, WrongBytes
from kvstore_sdk_backends.memory import open_memory

SCRIPTS: dict[str, Fault] = {
    "wrong bytes": Fault("get", WrongBytes()),
    "get misses": Fault("get", Say(GetResult(GetStatus.MISSING))),
    "get says another length": Fault("get", Say(GetResult.wrong_size(1, 2))),
    "get finds and writes nothing": Fault("get", Say(GetResult(GetStatus.FOUND))),
    "get raises": Fault("get", Raise(lambda: RuntimeError("a bug"))),
    "get hangs": Fault("get", Hang()),
    "put hangs": Fault("put", Hang()),
    "put exits": Fault("put", Raise(lambda: SystemExit(0))),
    "put says it is there": Fault("put", Say(PutResult(PutStatus.EXISTS))),
    "put answers nonsense": Fault("put", Return(lambda _: 7)),
    "put is full after a while": Fault("put", Say(PutResult.failed(NoSpaceError("put: the disk is full"))), skip=3),
    "exists misses": Fault("exists", Say(False)),
    "exists fails": Fault("exists", Say(Failure(UnavailableError("the store is down")))),
    "delete fails": Fault("delete", Say(Failure(UnavailableError("the store is down")))),
    "nothing": Fault("get", Hang(0.0)),
}
opened: list[FaultyBackend] = []


class NoDelete:
    """The four methods, and no more."""

    def __init__(self, inner: Backend) -> None:
        self.capabilities = inner.capabilities
        self.exists, self.get, self.put, self.close = inner.exists, inner.get, inner.put, inner.close


class ReadOnly(BackendWrapper):
    """Takes no writes."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(max_record_bytes=1 << 30, read_only=True)


class WithoutMemory(BackendWrapper):
    """Cannot take the memory that it is told of."""

    def register_region(self, region: Region) -> None:
        raise MemoryError("no more")

    def unregister_region(self, region: Region) -> None:
        pass


class Narrow(BackendWrapper):
    """Takes two records in a call and one call at a time, and fails whoever asks for more."""

    inside = 0

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(max_record_bytes=1 << 30, max_batch=2, max_concurrency=1)

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Callable[[Sequence[Any]], Any]) -> Any:
        self.inside += 1
        try:
            assert len(items) <= 2
            assert self.inside == 1
            return proceed(items)
        finally:
            self.inside -= 1


class DeleteLies(BackendWrapper):
    """Removes nothing, and says that it did."""

    def around(self, op: str, items: Sequence[Any], deadline: Deadline | None, proceed: Callable[[Sequence[Any]], Any]) -> Any:
        return [DeleteStatus.DELETED for _ in items] if op == "delete" else proceed(items)


def open_faulty(location: str, *, how: str = "nothing", token: str = "") -> Any:
    backend = FaultyBackend(open_memory(location), [SCRIPTS[how]])
    opened.append(backend)
    return backend


def open_no_delete(location: str) -> Any:
    return NoDelete(open_memory(location))


def open_read_only(location: str) -> Any:
    return ReadOnly(open_memory(location))


def open_narrow(location: str) -> Any:
    return Narrow(open_memory(location))


def open_without_memory(location: str) -> Any:
    return WithoutMemory(open_memory(location))


def open_delete_lies(location: str) -> Any:
    return DeleteLies(open_memory("cli-bench-lies"))


def open_with_a_secret_location(location: str) -> Any:
    return open_memory("cli-bench")


def open_hanging(location: str) -> Any:
    time.sleep(20.0)
    raise UnavailableError("after all")
