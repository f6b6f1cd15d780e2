"""The contract of kvstore-sdk on a Redis server: a record is one string, whose key is `prefix:name`."""

import contextlib
import os
import re
import socket
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import kvstore_sdk.backend as kv
import redis.backoff
import redis.exceptions
import redis.retry
from redis.client import Pipeline

from acme_redis.connection import CALL, DeadlineConnection

LOCATION = re.compile(r"(?P<host>[^/:@\[\]]+|\[[0-9A-Fa-f:]+\]):(?P<port>\d{1,5})/(?P<db>\d{1,5})/(?P<prefix>.+)")

# Whatever is not here may pass: a server that is gone, loading, busy, out of connections.
ERRORS: dict[type[Exception], type[kv.BackendError]] = {
    redis.TimeoutError: kv.TimedOutError,
    redis.exceptions.OutOfMemoryError: kv.NoSpaceError,
    redis.exceptions.ReadOnlyError: kv.ReadOnlyError,
    redis.exceptions.NoPermissionError: kv.DeniedError,
    redis.exceptions.AuthenticationError: kv.DeniedError,
}
STATUS = {kv.ClosedError: "CLOSED", kv.TimedOutError: "TIMED_OUT"}


def open_acmeredis(
    location: str,
    *,
    username: Annotated[str | None, "user of the server's access control list"] = None,
    password: Annotated[str | None, "of the user, or of the server"] = None,
    open_timeout_s: Annotated[float, kv.Bounds(ge=0.01, le=60), "longest wait for the server when the store is opened"] = 5.0,
    max_record_bytes: Annotated[int, kv.Bounds(ge=1, le=512 << 20), "largest record"] = 64 << 20,
) -> "AcmeRedisBackend":
    """Open the store `host:port/db/prefix`. The prefix tells stores in one database apart."""
    match = LOCATION.fullmatch(location)
    if match is None or int(match["port"]) > 65535 or not kv.is_valid_name(match["prefix"]):
        # Without the location: people write passwords into it.
        raise kv.ConfigError("backend acmeredis", "location", "must be host:port/db/prefix, as in acmeredis://127.0.0.1:6379/0/kv")
    # Looked up once, here: a resolver keeps no deadline.
    host, port = socket.getaddrinfo(match["host"].strip("[]"), int(match["port"]), type=socket.SOCK_STREAM)[0][4][:2]
    server = {"host": host, "port": port, "db": int(match["db"]), "username": username, "password": password}
    backend = AcmeRedisBackend(server, match["prefix"], max_record_bytes)
    [answer] = backend.exists(["probe"], kv.Deadline.after(open_timeout_s))
    if isinstance(answer, kv.Failure):
        backend.close()
        raise answer.error
    return backend


class AcmeRedisBackend:
    def __init__(self, server: dict[str, Any], prefix: str, max_record_bytes: int) -> None:
        self.capabilities = kv.Capabilities(
            max_record_bytes=max_record_bytes,
            max_concurrency=8,  # one core of the server serves all of them
            shared=True,
            durability=kv.Durability.PROCESS_CRASH,  # of this process; a server that crashes forgets whole records
        )
        self._sockets: dict[redis.Connection, socket.socket] = {}  # as many as calls at a time: the pool uses connections again
        # No retry: the SDK repeats what may be repeated.
        options = {"sockets": self._sockets, "retry": redis.retry.Retry(redis.backoff.NoBackoff(), 0), "protocol": 2, **server}
        self._client = redis.Redis(connection_pool=redis.ConnectionPool(DeadlineConnection, self.capabilities.max_concurrency, **options))
        self._where = f"at {server['host']}:{server['port']}"
        self._prefix = prefix
        self._pid = os.getpid()
        self._closed = False

    def exists(self, names: Sequence[str], deadline: kv.Deadline) -> list[bool | kv.Failure]:
        answers = self._ask("exists", names, deadline, lambda pipe, key, _: pipe.exists(key))
        return [kv.Failure(answer) if isinstance(answer, kv.BackendError) else bool(answer) for answer in answers]

    def put(self, puts: Sequence[kv.Put], deadline: kv.Deadline) -> list[kv.PutResult]:
        def add(pipe: Pipeline, key: str, i: int) -> None:
            if puts[i].size_bytes > self.capabilities.max_record_bytes:
                raise kv.InvalidError(f"{puts[i].name} has {puts[i].size_bytes} bytes, more than max_record_bytes")
            pipe.set(key, puts[i].parts[0].view, nx=puts[i].mode is kv.Mode.CREATE)

        return [self._put_result(answer) for answer in self._ask("put", [put.name for put in puts], deadline, add)]

    def get(self, gets: Sequence[kv.Get], deadline: kv.Deadline) -> list[kv.GetResult]:
        # Sizes first, then one by one: no record of another size is moved, and the server never holds more than one answer for us.
        sizes = self._ask("get", [get.name for get in gets], deadline, lambda pipe, key, _: pipe.strlen(key))
        return [self._get(get, size, deadline) for get, size in zip(gets, sizes, strict=True)]

    def delete(self, names: Sequence[str], deadline: kv.Deadline) -> list[kv.DeleteStatus | kv.Failure]:
        answers = self._ask("delete", names, deadline, lambda pipe, key, _: pipe.unlink(key))
        return [kv.Failure(a) if isinstance(a, kv.BackendError) else kv.DeleteStatus(("absent", "deleted")[a]) for a in answers]

    def close(self) -> None:
        self._closed = True
        if os.getpid() == self._pid:  # a forked child would end the connections of its parent
            for live in list(self._sockets.values()):
                with contextlib.suppress(OSError):
                    live.shutdown(socket.SHUT_RDWR)
            self._client.connection_pool.disconnect(inuse_connections=False)

    def _put_result(self, answer: bool | kv.BackendError | None) -> kv.PutResult:
        if not isinstance(answer, kv.BackendError):
            return kv.PutResult(kv.PutStatus.STORED if answer else kv.PutStatus.EXISTS)
        if CALL.connected and isinstance(answer, kv.UnavailableError | kv.ClosedError):
            return kv.PutResult(kv.PutStatus.UNKNOWN, answer)  # it may have left: nobody can say that the server will not do it
        return kv.PutResult(kv.PutStatus[STATUS.get(type(answer), "FAILED")], answer)

    def _get(self, get: kv.Get, answer: Any, deadline: kv.Deadline) -> kv.GetResult:
        if answer in (0, get.size_bytes):  # STRLEN of nothing is 0, too
            [answer] = self._ask("get", [get.name], deadline, lambda pipe, key, _: pipe.get(key))
        if isinstance(answer, kv.BackendError):
            return kv.GetResult(kv.GetStatus[STATUS.get(type(answer), "FAILED")], answer)
        if answer is None:
            return kv.GetResult(kv.GetStatus.MISSING)
        if isinstance(answer, bytes) and len(answer) == get.size_bytes:
            get.into[0].view[:] = answer
            return kv.GetResult(kv.GetStatus.FOUND)
        return kv.GetResult.wrong_size(len(answer) if isinstance(answer, bytes) else answer, get.size_bytes)

    def _ask(self, doing: str, names: Sequence[str], deadline: kv.Deadline, add: Callable[[Pipeline, str, int], object]) -> list[Any]:
        """One round trip. For each name the server's answer to what `add` put into the pipeline, or a `BackendError`."""
        answers: list[Any] = [kv.InvalidError(f"acmeredis {doing}: {name!r} is not a valid name") for name in names]
        valid = [i for i, name in enumerate(names) if kv.is_valid_name(name, self.capabilities.max_name_bytes)]
        CALL.deadline, CALL.connected = deadline, False
        try:
            if self._closed or os.getpid() != self._pid:
                raise kv.ClosedError("the backend is closed, or belongs to the parent of this process")
            if deadline.expired:
                raise kv.TimedOutError("the deadline passed")
            with self._client.pipeline(transaction=False) as pipe:
                for i in valid:
                    add(pipe, f"{self._prefix}:{names[i]}", i)  # no name and no prefix holds a colon
                found = pipe.execute(raise_on_error=False)
        except (redis.RedisError, OSError, kv.BackendError) as cause:
            found = [cause] * len(valid)
        for i, answer in zip(valid, found, strict=True):
            answers[i] = self._error(f"{doing} {names[i]}", answer) if isinstance(answer, Exception) else answer
        return answers

    def _error(self, doing: str, cause: Exception) -> kv.BackendError:
        """A new error: one that was raised keeps its frames alive, and in them views of the buffers."""
        # Servers repeat what they do not understand, and that may be the password.
        text = f"acmeredis {doing} {self._where}: {str(cause).partition(', with args')[0]}"
        kind = kv.ClosedError if self._closed else ERRORS.get(type(cause), kv.UnavailableError)
        return type(cause)(text) if isinstance(cause, kv.BackendError) else kind(text)
