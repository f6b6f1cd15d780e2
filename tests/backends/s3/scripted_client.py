"""A bucket in memory, behind the interface of an object client, that fails, hangs and blocks as a test says."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from kvstore_sdk.backend import BackendError, UnavailableError
from kvstore_sdk_backends.loop import EventLoop
from kvstore_sdk_backends.s3.backend import S3Backend
from kvstore_sdk_backends.s3.client import AttemptError, ObjectInfo
from kvstore_sdk_backends.s3.memory import ItemMemory
from kvstore_sdk_backends.s3.settings import S3Settings

T = TypeVar("T")

PIECE = 64 * 1024
LONGEST_STALL_S = 20.0


class Lost(Exception):
    """Scripted: the request is done, and its answer is lost."""


def refused(text: str = "503", **how: object) -> AttemptError:
    """An attempt that failed and may be repeated."""
    return AttemptError(UnavailableError(text), **({"retryable": True} | how))  # type: ignore[arg-type]


def lost_answer() -> AttemptError:
    return refused("the answer was lost", may_have_happened=True)


class ScriptedClient:
    """All of it belongs to the loop, but for `objects`, `requests` and the switches, which a test may set before and read after.

    Attributes:
        objects: By key.
        requests: Verb and key of each attempt, in the order in which they began.
        starts: Where each listing began.
        peak: Most attempts that ran at one time.
        delay_s: What each attempt takes.
        hang: Verbs that never answer.
        stall: Attempts block the loop until this is set; None: they do not.
        before_copy: Called before each piece of a body is copied.
        page: Most objects of one listing, whatever is asked for.
    """

    def __init__(self, conditional: bool = True) -> None:
        self.conditional = conditional
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.peak = self.running = self.refreshes = self.cancelled = 0
        self.delay_s = 0.0
        self.hang: set[str] = set()
        self.stall: threading.Event | None = None
        self.before_copy: Callable[[], object] | None = None
        self.began = threading.Event()
        self.closed = False
        self.starts: list[str] = []
        self.close_hangs = False
        self.page = 1000
        self._refreshing: asyncio.Task[None] | None = None
        self._scripts: dict[tuple[str, str], deque[BaseException]] = {}

    def fail(self, verb: str, *failures: BaseException, key: str = "*") -> None:
        """The next attempts of `verb`, of this key or of any, fail so. `Lost` does what was asked, and then loses the answer."""
        self._scripts.setdefault((verb, key), deque()).extend(failures)

    def count(self, verb: str) -> int:
        return sum(asked == verb for asked, _ in self.requests)

    async def open(self) -> None: ...

    async def head(self, key: str) -> int | None:
        return await self._attempt("head", key, lambda: len(self.objects[key]) if key in self.objects else None)

    async def get(self, key: str, memory: ItemMemory) -> int | None:
        body = await self._attempt("get", key, lambda: self.objects.get(key))
        if body is not None and len(body) == memory.size_bytes:
            for at in range(0, len(body), PIECE):
                if self.before_copy is not None:
                    self.before_copy()
                memory.write(at, body[at : at + PIECE])
                await asyncio.sleep(0)
        return None if body is None else len(body)

    async def put(self, key: str, memory: ItemMemory, create: bool) -> bool:
        pieces = []
        for at in range(0, memory.size_bytes, PIECE):
            if self.before_copy is not None:
                self.before_copy()
            pieces.append(memory.read(at, min(PIECE, memory.size_bytes - at)))
            await asyncio.sleep(0)

        def store() -> bool:
            if create and key in self.objects:
                return False
            self.objects[key] = b"".join(pieces)
            return True

        return await self._attempt("put", key, store)

    async def delete(self, keys: Sequence[str]) -> dict[str, BackendError | None]:
        def remove() -> dict[str, BackendError | None]:
            for key in keys:
                self.objects.pop(key, None)
            return dict.fromkeys(keys)

        return await self._attempt("delete", " ".join(keys), remove)

    async def list_page(self, prefix: str, start_after: str, limit: int) -> tuple[list[ObjectInfo], bool]:
        def page() -> tuple[list[ObjectInfo], bool]:
            keys = sorted(key for key in self.objects if key.startswith(prefix) and key > start_after)
            most = min(limit, self.page)
            return [ObjectInfo(key, len(self.objects[key]), 0.0) for key in keys[:most]], len(keys) > most

        self.starts.append(start_after)
        return await self._attempt("list", prefix, page)

    async def refresh_credentials(self) -> None:
        if self._refreshing is None or self._refreshing.done():
            self.refreshes += 1
            self._refreshing = asyncio.ensure_future(self._attempt("refresh", "", lambda: None))
        await asyncio.shield(self._refreshing)

    async def close(self) -> None:
        if self.close_hangs:
            await asyncio.sleep(3600)
        self.closed = True

    async def _attempt(self, verb: str, key: str, step: Callable[[], T]) -> T:
        self.requests.append((verb, key))
        self.running += 1
        self.peak = max(self.peak, self.running)
        self.began.set()
        try:
            if self.stall is not None:
                self.stall.wait(LONGEST_STALL_S)
            await asyncio.sleep(3600 if verb in self.hang else self.delay_s)
            script = self._scripts.get((verb, key)) or self._scripts.get((verb, "*"))
            failure = script.popleft() if script else None
            if failure is not None and not isinstance(failure, Lost):
                raise failure
            answer = step()
            if failure is not None:
                raise lost_answer()
            return answer
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1


@contextmanager
def store_over(client: ScriptedClient, prefix: str = "kv", **settings: Any) -> Iterator[S3Backend]:
    """A store over `client`, closed at the end."""
    loop = EventLoop("kvstore-s3-test")
    backend = S3Backend(client, loop, shown=f"s3://bucket/{prefix}", prefix=prefix, settings=S3Settings(**settings))
    try:
        yield backend
    finally:
        if client.stall is not None:
            client.stall.set()
        backend.close()


class Calling:
    """A call on a thread of its own."""

    def __init__(self, step: Callable[[], Any]) -> None:
        self._answer: list[Any] = []
        self._thread = threading.Thread(target=lambda: self._answer.append(step()))
        self._thread.start()

    def answer(self, limit_s: float = 20.0) -> Any:
        self._thread.join(limit_s)
        assert not self._thread.is_alive(), "the call did not return"
        return self._answer[0]
