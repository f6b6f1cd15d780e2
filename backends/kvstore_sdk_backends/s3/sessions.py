"""A client of s3fs with credentials, connections and habits of its own."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

import aiobotocore
import s3fs
from aiobotocore.session import AioSession
from botocore.exceptions import BotoCoreError, ProfileNotFound
from botocore.utils import parse_timestamp

from kvstore_sdk.backend import ConfigError
from kvstore_sdk_backends.s3.redaction import redact_logs
from kvstore_sdk_backends.s3.settings import WHERE, S3Settings

__all__ = ["Credentials", "Session"]


@dataclass(frozen=True, slots=True)
class Credentials:
    """What requests are signed with now. `session_token` is empty where there is none."""

    access_key_id: str = field(repr=False)
    secret_access_key: str = field(repr=False)
    session_token: str = field(repr=False)


class Session:
    """Shares nothing with any other session, nor with the process: made by `open`, closed by who made it.

    Attributes:
        client: Of aiobotocore, as s3fs makes it.
        retired: Nobody begins a request with it any more.
        secrets: What it was opened with, not to be repeated.
        users: Requests that run with it.
    """

    __slots__ = ("_settings", "_source", "client", "retired", "secrets", "users")

    def __init__(self, settings: S3Settings, source: AioSession, client: Any) -> None:
        self._settings = settings
        self._source = source
        self.client = client
        self.retired = False
        self.secrets: tuple[str, ...] = ()
        self.users = 0

    @classmethod
    async def open(cls, settings: S3Settings) -> Session:
        """On the loop that it is for. Asks the sources of credentials; takes some 50 ms of the loop otherwise.

        Raises:
            ConfigError: an option cannot be used.
        """
        redact_logs()
        try:
            source = AioSession(profile=settings.profile)
            source.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=_timestamp)
            session = cls(settings, source, await _file_system(settings, source).set_session())
        except ProfileNotFound as cause:
            raise ConfigError(WHERE, "profile", f"{cause}; name one of the AWS configuration") from None
        except ValueError as cause:
            raise ConfigError(WHERE, "endpoint", f"{cause}; write http://host:port or https://host") from None
        session.client.meta.events.register("before-call.s3", _no_redirection)
        session.client.meta.events.register("request-created.s3.PutObject", _no_expectation)
        # What is wrong with them, a request will tell.
        with suppress(BotoCoreError, OSError, ValueError):
            if found := await session.credentials():
                session.secrets = tuple(filter(None, (found.secret_access_key, found.session_token)))
        return session

    async def credentials(self) -> Credentials | None:
        """Those that a request would be signed with now; refreshed where they expire. None: there are none.

        Raises:
            BotoCoreError: they cannot be had.
        """
        settings = self._settings
        if settings.access_key_id is not None:
            return Credentials(settings.access_key_id, settings.secret_access_key or "", settings.session_token or "")
        found = await self._source.get_credentials()
        if found is None:
            return None
        frozen = await found.get_frozen_credentials()
        return Credentials(frozen.access_key, frozen.secret_key, frozen.token or "")

    async def close(self) -> None:
        """Close its connections, also those in use."""
        await self.client.close()


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
