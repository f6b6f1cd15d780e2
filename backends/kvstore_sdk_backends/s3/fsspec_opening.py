"""Stores of Google and Azure, through their file systems of fsspec. Experimental."""

from __future__ import annotations

import importlib
import json
import logging
import secrets
import weakref
from typing import Annotated, Any

from kvstore_sdk.backend import Bounds, ConfigError, DeniedError, UnavailableError, is_valid_name
from kvstore_sdk_backends.loop import EventLoop
from kvstore_sdk_backends.s3.backend import S3Backend
from kvstore_sdk_backends.s3.client import AttemptError
from kvstore_sdk_backends.s3.current import CREDENTIALS_S
from kvstore_sdk_backends.s3.fsspec_client import FileSystemKind, FsspecClient
from kvstore_sdk_backends.s3.memory import ItemMemory
from kvstore_sdk_backends.s3.opening import check_location
from kvstore_sdk_backends.s3.probe import PROBE_NAME
from kvstore_sdk_backends.s3.settings import MAX_PUT_BYTES, S3Settings

__all__ = ["open_abfs", "open_fsspec", "open_gs"]

logger = logging.getLogger(__name__)

PROBE_S = 30.0
CLOSE_S = 5.0

_OURS = ("asynchronous", "listings_expiry_time", "loop", "max_paths", "skip_instance_cache", "use_listings_cache")
"""A file system that shares an instance or remembers a listing would answer for a store that has changed since."""
_NO_LIMIT = "its writers cannot keep a bucket below a size; expire objects by a lifecycle rule, or run kvstore prune --to-bytes"

_Options = Annotated[str | None, "arguments of the file system, as a JSON object"]
_Concurrency = Annotated[int, Bounds(ge=1, le=100), "requests at one time; the libraries keep at most 100 connections"]
_RequestTimeout = Annotated[float, Bounds(ge=0.01, le=3600), "for one attempt, and what the library repeats of it"]
_Retries = Annotated[int, Bounds(ge=0, le=100), "attempts after the first, inside the deadline of the call"]
_ReadOnly = Annotated[bool, "write and delete nothing"]
_MaxRecord = Annotated[int, Bounds(ge=1, le=MAX_PUT_BYTES), "refuse to store larger records"]
_MaxBytes = Annotated[int | None, Bounds(ge=1), "refused: a bucket is kept small by a lifecycle rule, or kvstore prune"]


def open_gs(
    location: str,
    *,
    storage_options: _Options = None,
    concurrency: _Concurrency = 32,
    request_timeout_s: _RequestTimeout = 30.0,
    request_retries: _Retries = 2,
    read_only: _ReadOnly = False,
    max_record_bytes: _MaxRecord = 1 << 30,
    max_bytes: _MaxBytes = None,
) -> S3Backend:
    """Open a bucket of Google Cloud Storage, or a prefix of one, as a store: `bucket` or `bucket/prefix`. Experimental; needs `gcsfs`.

    The bucket must exist. Zonal buckets are not supported: they speak a protocol of their own.

    Raises:
        ConfigError: a package is missing, or the store cannot be used as it is configured; the message says why. No record was written.
        BackendError: the store cannot be used now.
    """
    # Of the two that the package has, the one that speaks JSON over HTTP alone.
    kind = FileSystemKind("gs", "gcsfs", _file_system("gs", "gcsfs", "gcsfs.core", "GCSFileSystem"), _end_gs)
    settings = _settings(kind, concurrency, request_timeout_s, request_retries, read_only, max_record_bytes, max_bytes)
    return open_fsspec(kind, location, storage_options, settings)


def open_abfs(
    location: str,
    *,
    storage_options: _Options = None,
    concurrency: _Concurrency = 32,
    request_timeout_s: _RequestTimeout = 30.0,
    request_retries: _Retries = 2,
    read_only: _ReadOnly = False,
    max_record_bytes: _MaxRecord = 1 << 30,
    max_bytes: _MaxBytes = None,
) -> S3Backend:
    """Open a container of Azure's blob storage, or a prefix of one, as a store: `container` or `container/prefix`. Experimental.

    Needs `adlfs`. The container must exist; `storage_options` or the environment say in which account.

    Raises:
        ConfigError: a package is missing, or the store cannot be used as it is configured; the message says why. No record was written.
        BackendError: the store cannot be used now.
    """
    kind = FileSystemKind("abfs", "adlfs", _file_system("abfs", "adlfs", "adlfs", "AzureBlobFileSystem"), _end_abfs)
    settings = _settings(kind, concurrency, request_timeout_s, request_retries, read_only, max_record_bytes, max_bytes)
    return open_fsspec(kind, location, storage_options, settings)


def open_fsspec(kind: FileSystemKind, location: str, storage_options: str | None, settings: S3Settings) -> S3Backend:
    """Open a store of any kind. Of the settings `concurrency`, `request_timeout_s`, `retries`, `read_only` and `max_record_bytes` count.

    Raises:
        ConfigError, BackendError: as `open_gs`.
    """
    bucket, prefix = check_location(f"backend {kind.scheme}", location)
    if prefix and not is_valid_name(prefix):
        # File systems read other characters as versions, patterns, users and queries.
        problem = f"{prefix!r} is no prefix that can be used; write segments of letters, digits and -_. with a slash in between"
        raise ConfigError(f"backend {kind.scheme}", "location", problem)
    options = _parsed(kind.scheme, storage_options)
    shown = f"{kind.scheme}://{bucket}" + (f"/{prefix}" if prefix else "")
    client = FsspecClient(kind, bucket, options, concurrency=settings.concurrency, request_timeout_s=settings.request_timeout_s)
    loop = EventLoop(f"kvstore-{kind.scheme}")
    try:
        loop.run(f"{kind.scheme} open {shown}: finding credentials", client.open, CREDENTIALS_S)
        loop.run(f"{kind.scheme} open {shown}", lambda: _probe(kind.scheme, client, prefix, settings.read_only), PROBE_S)
        backend = S3Backend(client, loop, shown=shown, prefix=prefix, settings=settings)
    except BaseException as error:
        loop.close(client.close, CLOSE_S)
        # What it came from may hold the options.
        error.__context__ = None
        raise
    logger.warning("%s: the backend %s is experimental: no release was tried on a real store of this kind", shown, kind.scheme)
    return backend


def _settings(
    kind: FileSystemKind,
    concurrency: int,
    request_timeout_s: float,
    retries: int,
    read_only: bool,
    max_record_bytes: int,
    max_bytes: int | None,
) -> S3Settings:
    if max_bytes is not None:
        raise ConfigError(f"backend {kind.scheme}", "max_bytes", _NO_LIMIT)
    return S3Settings(
        concurrency=concurrency,
        request_timeout_s=request_timeout_s,
        retries=retries,
        read_only=read_only,
        max_record_bytes=max_record_bytes,
    )


async def _probe(scheme: str, client: FsspecClient, prefix: str, read_only: bool) -> None:
    """Store, find, read and remove a scratch object, and see whether its creation can be conditional. Read-only: look for one."""
    key = f"{prefix}/{PROBE_NAME}{secrets.token_hex(8)}".lstrip("/")
    sent = secrets.token_bytes(1000)
    got = bytearray(len(sent))
    try:
        if read_only:
            await client.head(key)
            return
        await client.put(key, ItemMemory(memoryview(sent)), create=False)
        try:
            client.conditional = await _is_conditional(client, key, sent)
            found = await client.head(key), await client.get(key, ItemMemory(memoryview(got)))
        finally:
            refused = (await client.delete([key]))[key]
        if refused is not None:
            raise AttemptError(refused)
        if found != (len(sent), len(sent)) or got != sent:
            raise UnavailableError(
                f"{scheme} open: a scratch object of {len(sent)} bytes was not read back as it was stored: sizes {found}"
            )
        if await client.head(key) is not None:
            raise UnavailableError(f"{scheme} open: a scratch object, {key}, is still there after its deletion")
    except AttemptError as failed:
        if isinstance(failed.error, DeniedError) or failed.status == 404:
            raise ConfigError(f"backend {scheme}", "location", str(failed.error)) from None
        raise failed.error from None


async def _is_conditional(client: FsspecClient, key: str, sent: bytes) -> bool:
    """Whether a second creation is refused. Not every file system looks at the mode, and not every one takes it."""
    client.conditional = True
    try:
        return not await client.put(key, ItemMemory(memoryview(sent)), create=True)
    except AttemptError:
        return False


def _parsed(scheme: str, text: str | None) -> dict[str, Any]:
    where = f"backend {scheme}"
    try:
        options = {} if text is None else json.loads(text)
    except ValueError as cause:
        at = f" (line {cause.lineno}, column {cause.colno})" if isinstance(cause, json.JSONDecodeError) else ""
        raise ConfigError(where, "storage_options", f'is no JSON{at}; write an object such as {{"project": "mine"}}') from None
    if not isinstance(options, dict):
        raise ConfigError(where, "storage_options", 'is no JSON object; write one such as {"project": "mine"}')
    if taken := sorted(set(options) & set(_OURS)):
        raise ConfigError(
            where, "storage_options", f"{taken[0]} is set by the backend, so that nothing is answered from a cache; leave it out"
        )
    return options


def _file_system(scheme: str, package: str, module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as cause:
        raise ConfigError(f"backend {scheme}", "backend", f"needs {package} ({cause}); pip install {package}") from cause


async def _end_gs(fs: Any) -> None:
    if fs._session is not None:
        await fs._session.close()
    _disarm(fs)


async def _end_abfs(fs: Any) -> None:
    try:
        await fs.service_client.close()
        if fs.credential is not None and hasattr(fs.credential, "close"):
            await fs.credential.close()
    finally:
        _disarm(fs)


def _disarm(fs: Any) -> None:
    """Keep a file system from being closed again when the interpreter ends, on a loop that is gone.

    That of adlfs would even live until then.
    """
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        found = finalizer.peek()
        if found is not None and found[0] is fs:
            finalizer.detach()
