"""One bucket, through s3fs: it signs, resolves credentials and speaks HTTP; attempts, time-outs and memory are ours."""

from __future__ import annotations

import asyncio
import base64
import errno
import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

from botocore.exceptions import ClientError

from kvstore_sdk.backend import BackendError, ConfigError, UnavailableError
from kvstore_sdk_backends.s3.causes import one_line
from kvstore_sdk_backends.s3.client import AttemptError, ObjectInfo, delete_singly
from kvstore_sdk_backends.s3.current import Current, Shared
from kvstore_sdk_backends.s3.failures import attempt_error, error_of_code, reason_of_source
from kvstore_sdk_backends.s3.memory import COPY_BYTES, ItemMemory
from kvstore_sdk_backends.s3.sessions import Credentials, Session
from kvstore_sdk_backends.s3.settings import S3Settings

__all__ = ["S3fsClient"]

_SINGLE_DELETES = 16
"""At one time, where the store is spared DeleteObjects."""
_MISSING = frozenset({"NoSuchKey", "NoSuchVersion", "NotFound", "404", "NoSuchObject"})
_WHOLE = frozenset({200})
_DONE = frozenset({200, 201, 204})
_REFUSES_CONDITION = frozenset({"NotImplemented", "501"})


class S3fsClient:
    """An `ObjectClient` of one bucket.

    Of s3fs it takes the client that `S3FileSystem` makes, and none of its file-system calls: those list, cache and repeat. No state of
    the process is shared: every instance has a session of its own, so credentials and endpoints of two never mix.

    Attributes:
        conditional: As in `ObjectClient`. The probe sets it, or a store that answers 501 to the condition.
        checksums: The policy. `off`: objects are deleted one by one too, since DeleteObjects needs a checksum.
    """

    def __init__(self, bucket: str, settings: S3Settings) -> None:
        self.conditional = settings.conditional_writes != "never"
        self.checksums = settings.checksums
        self._bucket = bucket
        self._settings = settings
        self._sessions = Current(lambda: Session.open(settings, bucket), Session.close, _why_none)
        self._fetching = Shared(_why_none)
        self._is_static = settings.access_key_id is not None
        self._put_extras: dict[str, str] = {}
        if settings.storage_class:
            self._put_extras["StorageClass"] = settings.storage_class
        if settings.tags:
            self._put_extras["Tagging"] = settings.tags

    def __repr__(self) -> str:
        return f"S3fsClient({self._bucket!r}, endpoint={self._settings.endpoint!r})"

    @property
    def endpoint(self) -> str:
        """Where requests go to, from the option, the environment or the profile; for AWS its own. Known after `open`."""
        return str(session.client.meta.endpoint_url) if (session := self._sessions.now) else ""

    @property
    def region(self) -> str:
        """Which region requests are signed for. Known after `open`."""
        return str(session.client.meta.region_name) if (session := self._sessions.now) else ""

    @property
    def virtual(self) -> bool:
        """Whether requests put the bucket before the host, rather than in the path. Known after `open`."""
        return session.virtual if (session := self._sessions.now) else False

    async def open(self) -> None:
        await self._sessions.open()

    async def refresh_credentials(self) -> None:
        if not self._is_static:
            await self._sessions.renew(self._doing("credentials for", ""))

    async def credentials(self) -> Credentials | None:
        """Those that a request would be signed with now; refreshed where they expire. None: there are none.

        Raises:
            AttemptError: they cannot be had.
        """
        async with self._sessions.use(self._doing("credentials for", "")) as session:
            await self._fetch(session).wait()
            return session.signed_with

    async def close(self) -> None:
        await self._fetching.close()
        await self._sessions.close()

    async def head(self, key: str) -> int | None:
        async with self._attempt("HEAD", key) as attempt:
            try:
                answer = await attempt.session.client.head_object(Bucket=self._bucket, Key=key)
            except ClientError as cause:
                if _is_missing(cause):
                    return None
                raise
            self._check("HEAD", key, answer, _WHOLE)
            return self._length("HEAD", key, answer)

    async def get(self, key: str, memory: ItemMemory) -> int | None:
        extras = {"ChecksumMode": "ENABLED"} if self.checksums == "when_supported" else {}
        async with self._attempt("GET", key) as attempt:
            try:
                answer = await attempt.session.client.get_object(Bucket=self._bucket, Key=key, **extras)
            except ClientError as cause:
                if _is_missing(cause):
                    return None
                raise
            body = answer["Body"]
            try:
                self._check("GET", key, answer, _WHOLE)
                size_bytes = self._length("GET", key, answer)
                if size_bytes == memory.size_bytes:
                    await self._receive(key, body, memory, attempt)
                return size_bytes
            finally:
                # Whole bodies gave their connection back already; any other is closed with its connection.
                body.close()

    async def put(self, key: str, memory: ItemMemory, create: bool) -> bool:
        extras: dict[str, Any] = dict(self._put_extras)
        conditional = create and self.conditional
        if conditional:
            extras["IfNoneMatch"] = "*"
        async with self._attempt("PUT", key, writes=True) as attempt:
            if self.checksums == "when_supported":
                # As a header. botocore would send it after the body, which then has no length.
                extras |= {"ChecksumAlgorithm": "CRC32", "ChecksumCRC32": await _crc32(memory)}
            body = _Body(memory, attempt) if memory.size_bytes else b""
            try:
                answer = await attempt.session.client.put_object(
                    Bucket=self._bucket, Key=key, Body=body, ContentLength=memory.size_bytes, **extras
                )
            except ClientError as cause:
                code, status = _answer_of(cause)
                if conditional and status == 412:
                    return False
                if conditional and (status == 501 or code in _REFUSES_CONDITION) and self._settings.conditional_writes == "auto":
                    self.conditional = False
                    failed = self._failed(self._doing("PUT", key), cause, attempt, writes=True)
                    raise AttemptError(failed.error, retryable=True, status=failed.status, code=failed.code) from None
                raise
            self._check("PUT", key, answer, _DONE)
        return True

    async def delete(self, keys: Sequence[str]) -> dict[str, BackendError | None]:
        if not keys:
            return {}
        if self.checksums == "off" or len(keys) == 1:
            return await delete_singly(keys, self._delete, _SINGLE_DELETES)
        async with self._attempt("DELETE", f"{len(keys)} objects", writes=True) as attempt:
            wanted = {"Objects": [{"Key": key} for key in keys]}
            answer = await attempt.session.client.delete_objects(Bucket=self._bucket, Delete=wanted)
            self._check("DELETE", key="", answer=answer, expected=_WHOLE)
            # What the answer does not name was not done: it may be no answer of an object store at all.
            gone: dict[str, BackendError | None] = {
                key: UnavailableError(f"{self._doing('DELETE', key)}: the answer to DeleteObjects does not name it") for key in keys
            }
            for done in answer.get("Deleted", ()):
                if done.get("Key") in gone:
                    gone[done["Key"]] = None
            for failed in answer.get("Errors", ()):
                code = one_line(str(failed.get("Code") or "refused"), attempt.session.secrets, 80)
                if (key := failed.get("Key")) in gone:
                    gone[key] = None if code in _MISSING else error_of_code(self._doing("DELETE", key), 0, code)
            return gone

    async def list_page(self, prefix: str, start_after: str, limit: int) -> tuple[list[ObjectInfo], bool]:
        async with self._attempt("LIST", prefix) as attempt:
            extras = {"StartAfter": start_after} if start_after else {}
            answer = await attempt.session.client.list_objects_v2(Bucket=self._bucket, Prefix=prefix, MaxKeys=min(limit, 1000), **extras)
            self._check("LIST", prefix, answer, _WHOLE)
            if "IsTruncated" not in answer:
                raise self._bad_body("LIST", prefix, "is no listing; does the endpoint speak S3?")
            found = [self._info(prefix, entry) for entry in answer.get("Contents", ())]
            return found, bool(answer["IsTruncated"])

    def _info(self, prefix: str, entry: dict[str, Any]) -> ObjectInfo:
        key, size_bytes = entry.get("Key"), entry.get("Size")
        if not isinstance(key, str) or not isinstance(size_bytes, int) or size_bytes < 0:
            raise self._bad_body("LIST", prefix, "has an entry without a key or a size")
        modified = entry.get("LastModified")
        return ObjectInfo(key, size_bytes, modified.timestamp() if isinstance(modified, datetime) else None)

    async def _receive(self, key: str, body: Any, memory: ItemMemory, attempt: _Attempt) -> None:
        """Fill `memory`, and read on to the end of the body: only there it is checked."""
        done = 0
        while piece := await body.read(COPY_BYTES):
            attempt.moved()
            # A byte more than was declared is not written; it is told from a body that ends where it should.
            if done + len(piece) > memory.size_bytes:
                raise self._bad_body("GET", key, f"has more than the {memory.size_bytes} bytes that were declared")
            memory.write(done, piece)
            done += len(piece)
        if done != memory.size_bytes:
            raise self._bad_body("GET", key, f"ended after {done} of {memory.size_bytes} bytes")

    async def _delete(self, key: str) -> None:
        async with self._attempt("DELETE", key, writes=True) as attempt:
            try:
                answer = await attempt.session.client.delete_object(Bucket=self._bucket, Key=key)
            except ClientError as cause:
                if _is_missing(cause):
                    return
                raise
            self._check("DELETE", key, answer, _DONE)

    @asynccontextmanager
    async def _attempt(self, verb: str, key: str, *, writes: bool = False) -> AsyncIterator[_Attempt]:
        """A session for one request, within the time-outs. What is raised inside leaves as `AttemptError`."""
        doing = self._doing(verb, key)
        async with self._sessions.use(doing) as session:
            if session.expires_soon:
                # Before the clock of the request begins. Who signs it would fetch them too, and be cancelled with it.
                fetching = self._fetch(session)
                await (fetching.wait() if session.is_expiring else asyncio.sleep(0))
            attempt = _Attempt(session, self._settings)
            try:
                async with attempt.timeout:
                    yield attempt
            except Exception as cause:  # noqa: BLE001  # whatever it is, the attempt failed
                # Without the cause: what it says and holds may be a secret.
                raise self._failed(doing, cause, attempt, writes=writes) from None

    def _fetch(self, session: Session) -> Shared:
        return self._fetching.begin(self._doing("credentials for", ""), session.fetch_credentials)

    def _failed(self, doing: str, cause: Exception, attempt: _Attempt, *, writes: bool) -> AttemptError:
        session = attempt.session
        failed = attempt_error(doing, cause, writes=writes, secrets=session.secrets)
        if failed.stale_credentials:
            # New ones may mend it unless there can be none, or these are new themselves.
            failed.stale_credentials = not (self._is_static or self._sessions.is_new(session))
        if writes and attempt.sent and not failed.status:
            # What was said last may be of a second connection, after the first one had taken it all.
            failed.may_have_happened = True
        return failed

    def _check(self, verb: str, key: str, answer: dict[str, Any], expected: frozenset[int]) -> None:
        """That the answer says what was asked for: others of 200 to 299 may be a part of an object, or a promise."""
        status = _status_of(answer)
        if status not in expected or "ContentRange" in answer:
            error = UnavailableError(f"{self._doing(verb, key)}: HTTP {status} is no answer of S3; does the endpoint speak it?")
            raise AttemptError(error, retryable=True, may_have_happened=verb in ("PUT", "DELETE"), status=status, code="body")

    def _length(self, verb: str, key: str, answer: dict[str, Any]) -> int:
        if "ContentLength" not in answer:
            raise self._bad_body(verb, key, "comes without a length")
        return int(answer["ContentLength"])

    def _bad_body(self, verb: str, key: str, what: str) -> AttemptError:
        return AttemptError(UnavailableError(f"{self._doing(verb, key)}: the body {what}"), retryable=True, code="body")

    def _doing(self, verb: str, key: str) -> str:
        return f"s3 {verb} {self._bucket}/{key}"


class _Attempt:
    """One request: its session, its end, and whether any of its body was given out.

    One timer for all that bounds it. The library's own for silence is set anew with every piece, which takes a tenth of the time of a
    large body.
    """

    __slots__ = ("_end_s", "_moved_s", "_now_s", "_silence_s", "sent", "session", "timeout")

    def __init__(self, session: Session, settings: S3Settings) -> None:
        self.session = session
        self.sent = False
        self._now_s = asyncio.get_running_loop().time
        self._moved_s = self._now_s()
        self._end_s = self._moved_s + settings.request_timeout_s
        self._silence_s = settings.read_timeout_s
        self.timeout = asyncio.timeout_at(min(self._end_s, self._moved_s + settings.connect_timeout_s + self._silence_s))

    def moved(self) -> None:
        """Bytes went out or came in: from here on there may be silence for `read_timeout_s`."""
        now_s = self._now_s()
        if now_s - self._moved_s > self._silence_s / 20 and not self.timeout.expired():
            self._moved_s = now_s
            self.timeout.reschedule(min(self._end_s, now_s + self._silence_s))


class _Body:
    """The bytes of a request, copied piece by piece: what the connection keeps is never the caller's memory.

    botocore takes it for a file, aiohttp for an iterator.
    """

    def __init__(self, memory: ItemMemory, attempt: _Attempt) -> None:
        self._memory = memory
        self._attempt = attempt
        self._at = 0

    def __len__(self) -> int:
        return self._memory.size_bytes

    def read(self, most: int = -1) -> bytes:
        left = len(self) - self._at
        piece = self._memory.read(self._at, left if most < 0 else min(most, left))
        self._at += len(piece)
        return piece

    def seek(self, at: int, whence: int = 0) -> int:
        self._at = at + (0, self._at, len(self))[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._attempt.sent:
            raise ConnectionResetError(errno.ECONNRESET, "the connection was lost, and a body is not sent twice in one attempt")
        self._attempt.sent = True
        for start in range(0, len(self), COPY_BYTES):
            self._attempt.moved()
            yield self._memory.read(start, min(COPY_BYTES, len(self) - start))


async def _crc32(memory: ItemMemory) -> str:
    found = 0
    for start in range(0, memory.size_bytes, COPY_BYTES):
        found = zlib.crc32(memory.read(start, min(COPY_BYTES, memory.size_bytes - start)), found)
        # Some 100 us a piece: others may go on in between.
        await asyncio.sleep(0)
    return base64.b64encode(found.to_bytes(4, "big")).decode()


def _why_none(cause: Exception) -> str:
    """Why there are no credentials."""
    return f"{cause.field}: {cause.problem}" if isinstance(cause, ConfigError) else reason_of_source(cause)


def _answer_of(cause: ClientError) -> tuple[str, int]:
    return str(cause.response.get("Error", {}).get("Code", "")), _status_of(cause.response)


def _status_of(response: Mapping[str, Any]) -> int:
    return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _is_missing(cause: ClientError) -> bool:
    code, status = _answer_of(cause)
    return status == 404 and code in _MISSING
