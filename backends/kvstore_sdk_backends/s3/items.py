"""What the items of each kind of call do on the loop, and what they answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from kvstore_sdk.backend import (
    BackendError,
    Buffer,
    ClosedError,
    DeleteStatus,
    Failure,
    Get,
    GetResult,
    GetStatus,
    Mode,
    Put,
    PutResult,
    PutStatus,
    TimedOutError,
    UnavailableError,
)
from kvstore_sdk_backends.s3.calls import Call, Item
from kvstore_sdk_backends.s3.client import MAX_DELETE, AttemptError
from kvstore_sdk_backends.s3.memory import ItemMemory
from kvstore_sdk_backends.s3.retries import Requests

__all__ = ["DeleteItem", "GetItem", "PutItem", "SizeItem", "StepItem"]

T = TypeVar("T")

_STORED = PutResult(PutStatus.STORED)
_EXISTS = PutResult(PutStatus.EXISTS)
_FOUND = GetResult(GetStatus.FOUND)
_MISSING = GetResult(GetStatus.MISSING)


def _memory(parts: Sequence[Buffer]) -> ItemMemory:
    """Of the one buffer, or none, that an item has."""
    return ItemMemory(parts[0].view if parts else memoryview(b""))


def _ended(doing: str, closed: bool) -> BackendError:
    return ClosedError(f"{doing}: the backend is closed") if closed else TimedOutError(f"{doing}: the deadline passed")


class SizeItem(Item["int | Failure | None"]):
    """The size of a record in bytes, None when there is none."""

    def __init__(self, requests: Requests, name: str, verb: str) -> None:
        """`verb`: what it is asked for, for errors."""
        self._requests = requests
        self._name = name
        self._verb = verb
        self._key = requests.key(name)

    @property
    def doing(self) -> str:
        return f"s3 {self._verb} {self._requests.url(self._name)}"

    async def answer(self, call: Call[int | Failure | None]) -> int | Failure | None:
        try:
            return await self._requests.repeat(lambda: self._requests.client.head(self._key), call.deadline)
        except AttemptError as failed:
            return Failure(failed.error)

    def failed(self, error: BackendError) -> Failure:
        return Failure(error)

    def unfinished(self, closed: bool) -> Failure:
        return Failure(_ended(self.doing, closed))


class GetItem(Item[GetResult]):
    """One get."""

    memory: ItemMemory

    def __init__(self, requests: Requests, get: Get) -> None:
        self._requests = requests
        self._name = get.name
        self._key = requests.key(get.name)
        self.memory = _memory(get.into)

    @property
    def doing(self) -> str:
        return f"s3 get {self._requests.url(self._name)}"

    async def answer(self, call: Call[GetResult]) -> GetResult:
        try:
            size_bytes = await self._requests.repeat(lambda: self._requests.client.get(self._key, self.memory), call.deadline)
        except AttemptError as failed:
            return GetResult.failed(failed.error)
        if size_bytes is None:
            return _MISSING
        asked_bytes = self.memory.size_bytes
        return _FOUND if size_bytes == asked_bytes else GetResult.wrong_size(size_bytes, asked_bytes)

    def failed(self, error: BackendError) -> GetResult:
        return GetResult.failed(error)

    def unfinished(self, closed: bool) -> GetResult:
        return GetResult(GetStatus.CLOSED if closed else GetStatus.TIMED_OUT)


class PutItem(Item[PutResult]):
    """One put. Names say what is in a record, so repeating one whose answer was lost changes nothing."""

    memory: ItemMemory

    def __init__(self, requests: Requests, put: Put) -> None:
        self._requests = requests
        self._name = put.name
        self._key = requests.key(put.name)
        self._create = put.mode is Mode.CREATE
        self.memory = _memory(put.parts)

    @property
    def doing(self) -> str:
        return f"s3 put {self._requests.url(self._name)}"

    async def answer(self, call: Call[PutResult]) -> PutResult:
        requests = self._requests
        create = self._create and requests.client.conditional
        try:
            if self._create and not create and await self._is_there(call):
                return _EXISTS
            stored = await requests.repeat(lambda: self._attempt(call, create), call.deadline, background=True)
        except AttemptError as failed:
            return self.failed(failed.error)
        return _STORED if stored else _EXISTS

    async def _is_there(self, call: Call[PutResult]) -> bool:
        return await self._requests.repeat(lambda: self._requests.client.head(self._key), call.deadline, background=True) is not None

    async def _attempt(self, call: Call[PutResult], create: bool) -> bool:
        lost = self.may_have_happened
        call.go(self)
        try:
            return await self._requests.client.put(self._key, self.memory, create)
        except AttemptError as failed:
            # An earlier attempt whose answer was lost stays in doubt, whatever becomes of the later ones.
            self.may_have_happened = lost or failed.may_have_happened
            raise

    def failed(self, error: BackendError) -> PutResult:
        return PutResult(PutStatus.UNKNOWN if self.may_have_happened else PutStatus.FAILED, error)

    def unfinished(self, closed: bool) -> PutResult:
        if self.may_have_happened:
            return PutResult(PutStatus.UNKNOWN)
        return PutResult(PutStatus.CLOSED if closed else PutStatus.TIMED_OUT)


class DeleteItem(Item["list[DeleteStatus | Failure]"]):
    """All deletes of a call: looks what is there, which S3 does not tell otherwise, and removes that in as few requests as it takes."""

    def __init__(self, requests: Requests, names: Sequence[str]) -> None:
        self._requests = requests
        self._names = names
        self._keys = [requests.key(name) for name in names]
        self._answers: dict[str, DeleteStatus | Failure] = {}

    @property
    def doing(self) -> str:
        more = len(self._names) - 1
        return f"s3 delete {self._requests.url(self._names[0])}" + (f" and {more} more" if more else "")

    async def answer(self, call: Call[list[DeleteStatus | Failure]]) -> list[DeleteStatus | Failure]:
        await asyncio.gather(*(self._look(call, key) for key in self._keys))
        there = [key for key in self._keys if key not in self._answers]
        await asyncio.gather(*(self._remove(call, there[at : at + MAX_DELETE]) for at in range(0, len(there), MAX_DELETE)))
        return [self._answers[key] for key in self._keys]

    async def _look(self, call: Call[list[DeleteStatus | Failure]], key: str) -> None:
        try:
            if await self._requests.repeat(lambda: self._requests.client.head(key), call.deadline, background=True) is None:
                self._answers[key] = DeleteStatus.ABSENT
        except AttemptError as failed:
            self._answers[key] = Failure(failed.error)

    async def _remove(self, call: Call[list[DeleteStatus | Failure]], keys: list[str]) -> None:
        left = keys

        async def attempt() -> None:
            nonlocal left
            refused = []
            for key, error in (await self._requests.client.delete(left)).items():
                self._answers[key] = DeleteStatus.DELETED if error is None else Failure(error)
                if isinstance(error, UnavailableError):
                    refused.append((key, error))
            if refused:
                left = [key for key, _ in refused]
                raise AttemptError(refused[0][1], retryable=True)

        try:
            await self._requests.repeat(attempt, call.deadline, background=True)
        except AttemptError as failed:
            for key in left:
                self._answers.setdefault(key, Failure(failed.error))

    def failed(self, error: BackendError) -> list[DeleteStatus | Failure]:
        return [self._answers.get(key) or Failure(error) for key in self._keys]

    def unfinished(self, closed: bool) -> list[DeleteStatus | Failure]:
        return self.failed(_ended(self.doing, closed))


class StepItem(Item["T | BackendError"]):
    """A call that has one answer for all, or an error: a listing, a count."""

    def __init__(self, doing: str, step: Callable[[Call[T | BackendError]], Awaitable[T]]) -> None:
        self._doing = doing
        self._step = step

    @property
    def doing(self) -> str:
        return self._doing

    async def answer(self, call: Call[T | BackendError]) -> T | BackendError:
        try:
            return await self._step(call)
        except AttemptError as failed:
            return failed.error

    def failed(self, error: BackendError) -> BackendError:
        return error

    def unfinished(self, closed: bool) -> BackendError:
        return _ended(self._doing, closed)
