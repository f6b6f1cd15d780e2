"""A client of s3fs with credentials, connections and habits of its own."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import aiobotocore
import s3fs
from aiobotocore.session import AioSession
from botocore import UNSIGNED
from botocore.exceptions import BotoCoreError, ProfileNotFound, UnknownCredentialError
from botocore.utils import parse_timestamp

from kvstore_sdk.backend import ConfigError
from kvstore_sdk_backends.s3.causes import one_line
from kvstore_sdk_backends.s3.failures import reason_of_source
from kvstore_sdk_backends.s3.http import PlainSession
from kvstore_sdk_backends.s3.redaction import redact_logs
from kvstore_sdk_backends.s3.settings import WHERE, S3Settings

__all__ = ["Credentials", "Session"]


_SOON_S = 900.0
_NOW_S = 600.0
"""Before temporary credentials expire: from when on new ones are fetched, as botocore does too; and from when on requests wait for them."""
_KILLED_S = 1.0


@dataclass(frozen=True, slots=True)
class Credentials:
    """What requests are signed with. `session_token` is empty where there is none."""

    access_key_id: str = field(repr=False)
    secret_access_key: str = field(repr=False)
    session_token: str = field(repr=False)


class Session:
    """Shares nothing with any other session, nor with the process: made by `open`, closed by who made it.

    Attributes:
        client: Of aiobotocore, as s3fs makes it.
        signed_with: The credentials that were resolved last, None if there are none.
        virtual: Whether its requests put the bucket before the host.
    """

    __slots__ = ("_found", "_settings", "client", "signed_with", "virtual")

    def __init__(self, settings: S3Settings, found: Any, client: Any) -> None:
        self._settings = settings
        self._found = found
        self.client = client
        self.signed_with: Credentials | None = None
        self.virtual = False

    @classmethod
    async def open(cls, settings: S3Settings, bucket: str) -> Session:
        """On the loop that it is for. Asks the sources of credentials; takes some 50 ms of the loop otherwise.

        Raises:
            ConfigError: an option cannot be used, or a source of credentials.
        """
        redact_logs()
        source = AioSession(profile=settings.profile)
        source.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=_timestamp)
        found = None if settings.access_key_id is not None else await _credentials(settings, source)
        try:
            session = cls(settings, found, await _file_system(settings, source).set_session())
        except ValueError as cause:
            raise ConfigError(WHERE, "endpoint", f"{cause}; write http://host:port or https://host") from None
        except BotoCoreError as cause:
            raise _unusable(settings, cause) from None
        try:
            if urlsplit(session.client.meta.endpoint_url).username is not None:
                raise ConfigError(
                    WHERE, "endpoint", "that of the environment or profile has credentials in it; these have options of their own"
                )
            session.client.meta.events.register("before-call.s3", _no_redirection)
            session.client.meta.events.register("request-created.s3.PutObject", _no_expectation)
            session.virtual = await _is_virtual(session.client, bucket)
            # What is wrong with them, a request will tell.
            with suppress(Exception):
                await session.fetch_credentials()
        except BaseException:
            await session.close()
            raise
        return session

    async def fetch_credentials(self) -> None:
        """Set `signed_with` to those of now, which are fetched where they expire. May raise whatever their source does."""
        settings = self._settings
        if settings.access_key_id is not None:
            self.signed_with = Credentials(settings.access_key_id, settings.secret_access_key or "", settings.session_token or "")
        elif self._found is not None:
            frozen = await self._found.get_frozen_credentials()
            self.signed_with = Credentials(frozen.access_key, frozen.secret_key, frozen.token or "")

    @property
    def secrets(self) -> tuple[str, ...]:
        """Not to be repeated."""
        now = self.signed_with
        return () if now is None else tuple(filter(None, (now.secret_access_key, now.session_token)))

    @property
    def expires_soon(self) -> bool:
        """Better fetch credentials now; those of now still serve."""
        return self._expires_within(_SOON_S)

    @property
    def is_expiring(self) -> bool:
        """Requests need other credentials first."""
        return self._expires_within(_NOW_S)

    async def close(self) -> None:
        """Close its connections, also those in use."""
        await self.client.close()

    def _expires_within(self, seconds: float) -> bool:
        # Those that never expire have no such method.
        needed = getattr(self._found, "refresh_needed", None)
        return needed is not None and bool(needed(seconds))


async def _credentials(settings: S3Settings, source: AioSession) -> Any:
    """From the first source that has some, None if none has."""
    try:
        with suppress(UnknownCredentialError):
            source.get_component("credential_provider").get_provider("custom-process")._popen = _Program.start
        return await source.get_credentials()
    except Exception as cause:  # noqa: BLE001  # a source may be any program or file
        problem = _unusable(settings, cause)
    # Outside, so that what a source said is not in its context.
    raise problem


def _unusable(settings: S3Settings, cause: Exception) -> ConfigError:
    """The AWS configuration, or what it says of credentials."""
    if isinstance(cause, ProfileNotFound):
        return ConfigError(WHERE, "profile", f"{one_line(str(cause), (), 200)}; name one of the AWS configuration")
    problem = f"the AWS configuration, or what it names, gives no credentials ({reason_of_source(cause)}); mend it, or give access_key_id"
    return ConfigError(WHERE, "profile" if settings.profile is not None else "access_key_id", problem)


async def _is_virtual(client: Any, bucket: str) -> bool:
    """By the URL that botocore makes. Endpoints of the environment and names that are no host names count in that."""

    def unsigned(**_: Any) -> Any:
        return UNSIGNED

    client.meta.events.register_first("choose-signer.s3.HeadObject", unsigned)
    try:
        url = await client.generate_presigned_url("head_object", Params={"Bucket": bucket, "Key": "key"})
    finally:
        client.meta.events.unregister("choose-signer.s3.HeadObject", unsigned)
    return not urlsplit(url).path.endswith(f"/{bucket}/key")


class _Program:
    """A program that prints credentials. It does not outlive whoever waits for it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, *arguments: str, **options: Any) -> _Program:
        return cls(await asyncio.create_subprocess_exec(*arguments, **options))

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def communicate(self) -> tuple[bytes, bytes]:
        try:
            return await self._process.communicate()
        except asyncio.CancelledError:
            with suppress(ProcessLookupError):
                self._process.kill()
            # Its pipes may be held open by programs that it started.
            self._process._transport.close()  # type: ignore[attr-defined]
            until_s = time.monotonic() + _KILLED_S
            while self._process.returncode is None and time.monotonic() < until_s:
                # Whoever ends the loop cancels again, and what waits for it with a task of its own.
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.005)
            raise


def _file_system(settings: S3Settings, source: AioSession) -> Any:
    return s3fs.S3FileSystem(
        asynchronous=True,
        loop=asyncio.get_running_loop(),
        skip_instance_cache=True,
        use_listings_cache=False,
        cache_regions=False,
        session=source,
        endpoint_url=settings.endpoint,
        key=settings.access_key_id,
        secret=settings.secret_access_key,
        token=settings.session_token,
        client_kwargs={"region_name": settings.region, "verify": settings.ca_bundle or settings.verify_tls},
        config_kwargs={
            "connect_timeout": settings.connect_timeout_s,
            # That is the client's.
            "read_timeout": None,
            "max_pool_connections": settings.concurrency,
            "parameter_validation": False,
            "user_agent": f"kvstore-sdk aiobotocore/{aiobotocore.__version__}",
            "http_session_cls": PlainSession,
            # One attempt.
            "retries": {"mode": "standard", "total_max_attempts": 1},
            # Checksums are the client's. A signature over the body would be one more pass over it, and protects nothing on the way
            # back: that is what TLS is for.
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            "s3": {"addressing_style": settings.addressing, "payload_signing_enabled": False},
        },
    )


def _timestamp(value: Any) -> datetime:
    """As botocore reads one, which takes a good part of the time of a small request."""
    with suppress(TypeError, ValueError):
        return datetime.fromisoformat(value) if value[:1].isdigit() else parsedate_to_datetime(value)
    found: datetime = parse_timestamp(value)
    return found


def _no_redirection(context: dict[str, Any], **_: Any) -> None:
    """Have botocore think that it followed one already: else it asks in which region the bucket is, again and again if nobody knows."""
    context.setdefault("s3_redirect", {})["redirected"] = True


def _no_expectation(request: Any, **_: Any) -> None:
    """Send the body at once. Waiting for a word of the store costs a round trip each time, and some stores never give it."""
    del request.headers["Expect"]
