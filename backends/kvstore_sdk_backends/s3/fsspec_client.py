"""Any object store that fsspec has an asynchronous file system for. Experimental."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from kvstore_sdk.backend import BackendError, ConfigError, UnavailableError
from kvstore_sdk_backends.s3.client import AttemptError, ObjectInfo, delete_singly
from kvstore_sdk_backends.s3.current import Current
from kvstore_sdk_backends.s3.fsspec_failures import attempt_error, status_of
from kvstore_sdk_backends.s3.memory import COPY_BYTES, ItemMemory

__all__ = ["FileSystemKind", "FsspecClient"]

T = TypeVar("T")

CLOSE_S = 2.0
"""For saying goodbye to a store that may be gone; its connections are dropped all the same."""
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")


@dataclass(frozen=True, slots=True)
class FileSystemKind:
    """One file system of fsspec, and how it is made and closed.

    Attributes:
        scheme: Of its URLs.
        package: What to install for it.
        make: Makes one; called on the backend's event loop with the keyword arguments that every `AsyncFileSystem` takes, and
            `storage_options`.
        end: Closes its connections.
    """

    scheme: str
    package: str
    make: Callable[..., Any]
    end: Callable[[Any], Awaitable[None]]


class FsspecClient:
    """A bucket behind an `AsyncFileSystem`, used through the coroutines that all of them have. An `ObjectClient`; experimental.

    The libraries behind it repeat failed requests on their own and resolve credentials their own way: an attempt is what they do within
    `request_timeout_s`. A record is read and written whole, through one copy of it. Looking for an object that is not there may make a
    library ask for a folder of that name too, which is one listing of one entry.
    """

    def __init__(
        self, kind: FileSystemKind, bucket: str, storage_options: dict[str, Any], *, concurrency: int, request_timeout_s: float
    ) -> None:
        self.conditional = False
        self._kind = kind
        self._bucket = bucket
        self._options = storage_options
        self._concurrency = concurrency
        self._request_timeout_s = request_timeout_s
        self._systems = Current(self._make, self._end, _says)

    def __repr__(self) -> str:
        return f"FsspecClient({self._kind.scheme}://{self._bucket})"

    async def open(self) -> None:
        """Make the file system.

        Raises:
            ConfigError: it cannot be made of `storage_options`.
        """
        await self._systems.open()

    async def head(self, key: str) -> int | None:
        try:
            info = await self._run("head", key, lambda fs: fs._info(self._path(key)))
        except FileNotFoundError:
            return None
        if info.get("type") != "file":
            return None
        size = info.get("size")
        if size is None:
            raise AttemptError(UnavailableError(f"{self._doing('head', key)}: the file system knows no size"))
        return int(size)

    async def get(self, key: str, memory: ItemMemory) -> int | None:
        """As `ObjectClient.get`. One byte more than wanted is asked for, so that an object that is larger shows at once."""
        wanted = memory.size_bytes

        async def body(fs: Any) -> bytes:
            try:
                return bytes(await fs._cat_file(self._path(key), start=0, end=wanted + 1))
            except Exception as cause:
                if status_of(cause) == 416:
                    # An empty object has no first byte.
                    return b""
                raise

        try:
            data = await self._run("get", key, body)
        except FileNotFoundError:
            return None
        if len(data) != wanted:
            size = await self.head(key)
            if size == wanted:
                message = f"{self._doing('get', key)}: {len(data)} bytes came of an object of {size}"
                raise AttemptError(UnavailableError(message), retryable=True)
            return size
        for at in range(0, wanted, COPY_BYTES):
            memory.write(at, memoryview(data)[at : at + COPY_BYTES])
            # Other items have answers to take meanwhile.
            await asyncio.sleep(0)
        return wanted

    async def put(self, key: str, memory: ItemMemory, create: bool) -> bool:
        pieces = []
        for at in range(0, memory.size_bytes, COPY_BYTES):
            pieces.append(memory.read(at, min(COPY_BYTES, memory.size_bytes - at)))
            await asyncio.sleep(0)
        data = b"".join(pieces)
        mode = {"mode": "create"} if create and self.conditional else {}
        try:
            await self._run("put", key, lambda fs: fs._pipe_file(self._path(key), data, **mode))
        except FileExistsError:
            return False
        except FileNotFoundError as cause:
            raise attempt_error(self._doing("put", key), cause) from None
        return True

    async def delete(self, keys: Sequence[str]) -> dict[str, BackendError | None]:
        """As `ObjectClient.delete`, with a request for each key, at most `concurrency` at a time."""

        async def remove(key: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                await self._run("delete", key, lambda fs: fs._rm_file(self._path(key)))

        return await delete_singly(keys, remove, self._concurrency)

    async def list_page(self, prefix: str, start_after: str, limit: int) -> tuple[list[ObjectInfo], bool]:
        """As `ObjectClient.list_page`. fsspec knows no pages: folders are listed one by one, but for those before `start_after`."""
        folder, slash, _ = prefix.rpartition("/")
        found: list[ObjectInfo] = []
        async with contextlib.aclosing(self._walk(folder + slash, prefix, start_after)) as objects:
            async for info in objects:
                if len(found) == limit:
                    return found, True
                found.append(info)
        return found, False

    async def refresh_credentials(self) -> None:
        """Make the file system anew; the old one is closed when its last attempt ended."""
        await self._systems.renew(self._doing("credentials for", ""))

    async def close(self) -> None:
        await self._systems.close()

    async def _walk(self, folder: str, prefix: str, start_after: str) -> AsyncGenerator[ObjectInfo, None]:
        """Objects below `folder`, sorted by key. `folder` is empty or ends in `/`."""
        try:
            entries = await self._run("list", folder, lambda fs: fs._ls(self._path(folder.rstrip("/")), detail=True))
        except FileNotFoundError:
            return
        start = len(self._bucket) + 1
        known: dict[str, dict[str, Any]] = {}
        for entry in entries:
            key = str(entry["name"]).strip("/")[start:]
            if not key.startswith(folder) or key == folder.rstrip("/"):
                continue
            # A folder sorts among the keys as what all keys in it begin with.
            known[key if entry.get("type") == "file" else f"{key}/"] = entry
        for key in sorted(known, key=str.encode):
            entry = known[key]
            if not key.endswith("/"):
                if key.startswith(prefix) and key.encode() > start_after.encode():
                    yield ObjectInfo(key, int(entry["size"]), _modified_s(entry))
            elif (key.startswith(prefix) or prefix.startswith(key)) and (
                start_after.startswith(key) or key.encode() > start_after.encode()
            ):
                async with contextlib.aclosing(self._walk(key, prefix, start_after)) as below:
                    async for info in below:
                        yield info

    async def _run(self, verb: str, key: str, call: Callable[[Any], Awaitable[T]]) -> T:
        """One attempt. That nothing is there, or something, is for the caller to judge."""
        doing = self._doing(verb, key)
        async with self._systems.use(doing) as fs:
            try:
                async with asyncio.timeout(self._request_timeout_s):
                    return await call(fs)
            except (FileNotFoundError, FileExistsError):
                raise
            except Exception as cause:  # noqa: BLE001  # told without its words
                if status_of(cause) == 404:
                    raise FileNotFoundError(key) from None
                failed = attempt_error(doing, cause)
                failed.stale_credentials = failed.stale_credentials and not self._systems.is_new(fs)
                raise failed from None

    async def _make(self) -> Any:
        common = {"asynchronous": True, "loop": asyncio.get_running_loop(), "skip_instance_cache": True, "use_listings_cache": False}
        try:
            return self._kind.make(**common, **self._options)
        except Exception as cause:  # noqa: BLE001  # told without its words
            problem = (
                f"{self._kind.package} cannot make a file system of it ({type(cause).__name__}); what it says is not shown, since it may "
                "hold secrets: make one with the same options in a Python shell"
            )
            raise ConfigError(f"backend {self._kind.scheme}", "storage_options", problem) from None

    async def _end(self, fs: Any) -> None:
        # Whatever a file system that is done with may raise concerns nobody.
        with contextlib.suppress(Exception):
            async with asyncio.timeout(CLOSE_S):
                await self._kind.end(fs)

    def _path(self, key: str) -> str:
        return f"{self._bucket}/{key}" if key else self._bucket

    def _doing(self, verb: str, key: str) -> str:
        return f"{self._kind.scheme} {verb} {self._path(key)}"


def _says(cause: Exception) -> str:
    """Without the words of a library, which may repeat a token or an option."""
    return f"{cause.field}: {cause.problem}" if isinstance(cause, ConfigError) else type(cause).__name__


def _modified_s(entry: dict[str, Any]) -> float | None:
    for name in _TIMES:
        value = entry.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return None
