"""The object-store backend: names become keys, a blocking call becomes items on a loop."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from kvstore_sdk.backend import (
    BackendError,
    Capabilities,
    ClosedError,
    Deadline,
    DeleteStatus,
    Durability,
    Failure,
    Fork,
    Get,
    GetResult,
    GetStatus,
    InvalidError,
    ListEntry,
    ListPage,
    Put,
    PutResult,
    PutStatus,
    ReadOnlyError,
    UnavailableError,
    Usage,
    is_valid_name,
)
from kvstore_sdk_backends.loop import EventLoop
from kvstore_sdk_backends.s3.calls import Call, Item
from kvstore_sdk_backends.s3.client import AttemptError, ObjectClient
from kvstore_sdk_backends.s3.items import DeleteItem, GetItem, PutItem, SizeItem, StepItem
from kvstore_sdk_backends.s3.retries import Requests
from kvstore_sdk_backends.s3.settings import S3Settings

__all__ = ["CLOSE_WAIT_S", "MAX_NAME_BYTES", "S3Backend"]

T = TypeVar("T")
ItemT = TypeVar("ItemT", Get, Put)

MAX_NAME_BYTES = 255
"""A key may have 1,024 bytes; the rest is for the prefix."""
MIN_CONCURRENT_CALLS = 64
"""Calls at one time, also where fewer requests may be: the others wait for their turns."""
CLOSE_WAIT_S = 4.0
"""Less than the 5 s that `close` has."""

_IN_NO_NAME = re.compile(r"[^A-Za-z0-9._/-]")
_PAGE = 1000
"""Most keys that S3 lists in one answer."""


class S3Backend:
    """One object a record, at `<prefix>/<name>`, holding the record's bytes and nothing else. Made by `open_s3`.

    A PUT shows its object whole or not at all, to every reader at once. CREATE is conditional where the store can do that; where it
    cannot, it looks first, and of two that create one record at the same instant both may answer STORED, which is as true of either,
    since records of one name are equal.
    """

    def __init__(self, client: ObjectClient, loop: EventLoop, *, shown: str, prefix: str, settings: S3Settings) -> None:
        """
        Args:
            client: Open. The backend closes it.
            loop: That `client` runs on. The backend closes it.
            shown: The location, for errors and `repr`.
            prefix: What keys begin with, without the slash at its end; empty for none.
            settings: `concurrency`, `retries`, `read_only` and `max_record_bytes` are followed here, the others by the client.
        """
        self.capabilities = Capabilities(
            max_record_bytes=settings.max_record_bytes,
            max_batch=1000,
            max_parts=1,
            max_concurrency=max(MIN_CONCURRENT_CALLS, settings.concurrency),
            max_name_bytes=MAX_NAME_BYTES,
            shared=True,
            read_after_write=True,
            read_only=settings.read_only,
            durability=Durability.PROCESS_CRASH,
            fork=Fork.REFUSES,
        )
        self._shown = shown
        self._read_only = settings.read_only
        self._client = client
        self._loop = loop
        self._requests = Requests(client, shown, prefix, concurrency=settings.concurrency, retries=settings.retries)
        self._pid = os.getpid()
        self._closed = False
        self._calls: set[Call[Any]] = set()
        # Of the kind that a signal handler which calls `close` may take again.
        self._lock = threading.RLock()

    def exists(self, names: Sequence[str], deadline: Deadline) -> list[bool | Failure]:
        return [size if isinstance(size, Failure) else size is not None for size in self._sizes("exists", names, deadline)]

    def put(self, puts: Sequence[Put], deadline: Deadline) -> list[PutResult]:
        if refused := self._refused("put"):
            return [PutResult(PutStatus.CLOSED, refused) for _ in puts]
        asked = [self._refused_put(put) or PutItem(self._requests, put) for put in puts]
        return self._answers(asked, deadline)

    def get(self, gets: Sequence[Get], deadline: Deadline) -> list[GetResult]:
        if refused := self._refused("get"):
            return [GetResult(GetStatus.CLOSED, refused) for _ in gets]
        asked = [self._refused_get(get) or GetItem(self._requests, get) for get in gets]
        return self._answers(asked, deadline)

    def delete(self, names: Sequence[str], deadline: Deadline) -> list[DeleteStatus | Failure]:
        """Looks first, since S3 does not tell whether a record was there: that is one request a record, and one for all of them."""
        if refused := self._refused("delete"):
            return [Failure(refused) for _ in names]
        if self._read_only:
            return [Failure(self._read_only_error(f"delete {name}")) for name in names]
        bad = {name: Failure(error) for name in names if (error := self._bad_name("delete", name))}
        good = [name for name in names if name not in bad]
        if not good:
            return [bad[name] for name in names]
        [answers] = self._ask([DeleteItem(self._requests, good)], deadline)
        found = dict(zip(good, answers, strict=True)) | bad
        return [found[name] for name in names]

    def usage(self, deadline: Deadline) -> Usage:
        """Lists every record there is: a request for each thousand. `used_bytes` are the records' own; a bucket has no capacity."""

        async def step(call: Call[Usage | BackendError]) -> Usage:
            records = used_bytes = 0
            after, more = "", True
            while more:
                found, after, more = await self._page("", after, call.deadline)
                records += len(found)
                used_bytes += sum(entry.size_bytes for entry in found)
            return Usage(records, used_bytes)

        return self._answer("usage", step, deadline)

    def close(self) -> None:
        self._closed = True
        if os.getpid() != self._pid:
            # The loop, its thread and its sockets are the parent's.
            return
        with self._lock:
            running = list(self._calls)
        for call in running:
            call.end(closed=True)
        self._loop.close(self._client.close, CLOSE_WAIT_S)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._shown!r})"

    def _sizes(self, verb: str, names: Sequence[str], deadline: Deadline) -> Sequence[int | Failure | None]:
        """Sizes of records in bytes, None for one that is not there. `verb` is what they are asked for."""
        if refused := self._refused(verb):
            return [Failure(refused) for _ in names]
        asked: list[Item[int | Failure | None] | int | Failure | None] = [
            Failure(bad) if (bad := self._bad_name(verb, name)) else SizeItem(self._requests, name, verb) for name in names
        ]
        return self._answers(asked, deadline)

    def _answer(self, verb: str, step: Callable[[Call[T | BackendError]], Awaitable[T]], deadline: Deadline) -> T:
        """What `step` returns on the loop, for a call that has one answer for all."""
        if refused := self._refused(verb):
            raise refused
        item: Item[T | BackendError] = StepItem(f"s3 {verb} {self._shown}", step)
        [answer] = self._ask([item], deadline)
        if isinstance(answer, BackendError):
            raise answer
        return answer

    def _answers(self, asked: Sequence[Item[T] | T], deadline: Deadline) -> list[T]:
        """The answers to what is an item, and what is an answer already."""
        items = [item for item in asked if isinstance(item, Item)]
        if not items:
            return [item for item in asked if not isinstance(item, Item)]
        found = iter(self._ask(items, deadline))
        return [next(found) if isinstance(item, Item) else item for item in asked]

    def _ask(self, items: Sequence[Item[T]], deadline: Deadline) -> list[T]:
        """The answers to `items`, one at least. However this ends, their memory was given back."""
        call = Call(self._loop, items, deadline, self._calls.discard)
        try:
            self._start(call)
            return call.wait()
        finally:
            # `wait` has done both, unless an interrupt came first.
            call.end()
            self._calls.discard(call)

    def _begin(self, items: Sequence[Item[T]], deadline: Deadline) -> Call[T]:
        """Have the loop begin with `items`, one at least. `wait` must follow."""
        call = Call(self._loop, items, deadline, self._calls.discard)
        self._start(call)
        return call

    def _start(self, call: Call[Any]) -> None:
        with self._lock:
            closed = self._closed
            self._calls.add(call)
        if closed or call.deadline.expired:
            call.end(closed)
        else:
            call.begin()

    def _refused(self, verb: str) -> ClosedError | None:
        if self._closed:
            return ClosedError(f"s3 {verb}: the backend is closed")
        if os.getpid() != self._pid:
            return ClosedError(f"s3 {verb}: opened by process {self._pid}; a forked child must open its own")
        return None

    def _refused_put(self, put: Put) -> PutResult | None:
        """Why `put` is not done, if it is not."""
        if bad := self._bad_name("put", put.name):
            return PutResult.failed(bad)
        if self._read_only:
            return PutResult.failed(self._read_only_error(f"put {put.name}"))
        size_bytes, most = put.size_bytes, self.capabilities.max_record_bytes
        if size_bytes > most:
            return PutResult.failed(InvalidError(f"s3 put {put.name}: {size_bytes} bytes are more than max_record_bytes {most}"))
        if len(put.parts) > 1:
            return PutResult.failed(_too_many_parts("put", put.name, len(put.parts)))
        return None

    def _refused_get(self, get: Get) -> GetResult | None:
        """Why `get` is not done, if it is not."""
        if bad := self._bad_name("get", get.name):
            return GetResult.failed(bad)
        if len(get.into) > 1:
            return GetResult.failed(_too_many_parts("get", get.name, len(get.into)))
        return None

    def _bad_name(self, verb: str, name: str) -> InvalidError | None:
        if is_valid_name(name, MAX_NAME_BYTES):
            return None
        return InvalidError(f"s3 {verb}: {name!r} is not a valid name of at most {MAX_NAME_BYTES} bytes")

    def _read_only_error(self, doing: str) -> ReadOnlyError:
        return ReadOnlyError(f"s3 {doing}: {self._shown} was opened with read_only")

    async def _page(self, prefix: str, after: str, deadline: Deadline) -> tuple[Sequence[ListEntry], str, bool]:
        """Records whose keys come after the key `after`, from one request; the last key seen, of any object; whether there are more.

        Raises:
            AttemptError: the request failed, or its answer is none from which a walk could go on.
        """
        start = self._requests.key(prefix)
        found, more = await self._requests.repeat(lambda: self._client.list_page(start, after, _PAGE), deadline, background=True)
        entries = []
        for info in found:
            if info.key <= after:
                raise self._bad_page(f"{info.key!r} comes after {after!r}; stores whose listings are not sorted cannot be walked")
            after = info.key
            # A store that does not heed the prefix must not have objects of others taken for records.
            if after.startswith(start) and is_valid_name(name := self._requests.name(after), MAX_NAME_BYTES):
                entries.append(ListEntry(name, info.size_bytes, info.modified_s))
        if more and not found:
            raise self._bad_page("a page with nothing in it says that there are more")
        return entries, after, more

    def _bad_page(self, problem: str) -> AttemptError:
        return AttemptError(UnavailableError(f"s3 LIST {self._shown}: {problem}"), code="body")

    def list(self, prefix: str, deadline: Deadline, cursor: str | None = None, limit: int = 1000) -> ListPage:
        """In the order of the names. Objects whose keys are no names of records are left out."""
        if limit < 1:
            raise InvalidError(f"s3 list {self._shown}: limit {limit} must be positive")
        last = cursor or ""
        # Stores refuse what XML or a key cannot hold, so they are asked for what a name may begin with; the rest is sorted out here.
        start = _IN_NO_NAME.split(last, maxsplit=1)[0][:MAX_NAME_BYTES]
        may_match = len(prefix) <= MAX_NAME_BYTES and not _IN_NO_NAME.search(prefix)

        async def step(call: Call[ListPage | BackendError]) -> ListPage:
            entries: list[ListEntry] = []
            after, more = self._requests.key(start) if start else "", may_match
            while more and len(entries) < limit:
                # Whole pages, whatever the limit: of what lies there only a few may be records.
                found, after, more = await self._page(prefix, after, call.deadline)
                entries += [entry for entry in found if entry.name > last]
            if len(entries) > limit:
                return ListPage(entries[:limit], entries[limit - 1].name)
            return ListPage(entries, self._requests.name(after) if more else None)

        return self._answer("list", step, deadline)


def _too_many_parts(verb: str, name: str, parts: int) -> InvalidError:
    return InvalidError(f"s3 {verb} {name}: {parts} buffers are more than max_parts 1")
