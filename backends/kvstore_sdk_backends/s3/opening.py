"""Options of an S3 store, checked before anything is sent; then its engine, and a probe."""

from __future__ import annotations

import dataclasses
import importlib.util
import ipaddress
import logging
import re
import ssl
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from kvstore_sdk.backend import Backend, Bounds, ConfigError, UnavailableError
from kvstore_sdk.isolation import in_child, open_isolated
from kvstore_sdk_backends.loop import EventLoop
from kvstore_sdk_backends.s3.backend import MAX_NAME_BYTES, S3Backend
from kvstore_sdk_backends.s3.current import CREDENTIALS_S
from kvstore_sdk_backends.s3.probe import PROBE_S, probe_store
from kvstore_sdk_backends.s3.settings import (
    MAX_PUT_BYTES,
    TLS_OFF,
    WHERE,
    Addressing,
    Checksums,
    ConditionalWrites,
    Engine,
    Probe,
    S3Settings,
)

if TYPE_CHECKING:
    from kvstore_sdk_backends.s3.s3fs_client import S3fsClient

__all__ = ["check_location", "open_s3"]

logger = logging.getLogger(__name__)

CLOSE_S = 5.0

_MAX_KEY_BYTES = 1024
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")
_PREFIX_SEGMENT = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9!'()*+,=@_.:-]+")
_REGION = re.compile(r"[A-Za-z0-9-]{1,64}")
_STORAGE_CLASS = re.compile(r"[A-Za-z0-9_-]{1,64}")
_EXPRESS = "--x-s3"
_ARCHIVES = frozenset({"GLACIER", "DEEP_ARCHIVE"})
_MAX_TAGS = 10


def open_s3(
    location: str,
    *,
    engine: Annotated[
        Engine, "what moves records: nixl, in a child process, or s3fs, in this one; auto: nixl where it can be used, else s3fs"
    ] = "auto",
    endpoint: Annotated[str | None, "URL of the store; without one AWS, or what its environment and profile say"] = None,
    region: Annotated[str | None, "of the bucket; without one what the AWS environment and profile say"] = None,
    addressing: Annotated[Addressing, "bucket in the path or in the host name; auto: path where endpoint is given"] = "auto",
    ca_bundle: Annotated[str | None, "file of CA certificates, for a store whose certificate is signed by none that is known"] = None,
    verify_tls: Annotated[bool, "false: take any certificate; for tests"] = True,
    profile: Annotated[str | None, "of the AWS configuration, for credentials and region"] = None,
    access_key_id: Annotated[str | None, "static credentials; without them AWS's default chain is asked, and again when refused"] = None,
    secret_access_key: Annotated[str | None, "belongs to access_key_id"] = None,
    session_token: Annotated[str | None, "belongs to temporary credentials"] = None,
    checksums: Annotated[Checksums, "when_supported: CRC-32 of each record, both ways; off: none, and no DeleteObjects"] = "when_required",
    conditional_writes: Annotated[
        ConditionalWrites,
        "If-None-Match when a record is created; auto: where the probe finds that the store heeds it, and never with nixl; "
        "always: needs a store that heeds it, and creations do without nixl",
    ] = "auto",
    concurrency: Annotated[int, Bounds(ge=1, le=1024), "requests at one time, and connections kept"] = 64,
    connect_timeout_s: Annotated[float, Bounds(ge=0.01, le=300), "for a connection"] = 3.0,
    read_timeout_s: Annotated[float, Bounds(ge=0.01, le=3600), "without a byte sent or received, once connected"] = 10.0,
    request_timeout_s: Annotated[float, Bounds(ge=0.01, le=3600), "for one attempt in all"] = 30.0,
    request_retries: Annotated[int, Bounds(ge=0, le=100), "attempts after the first, inside the deadline of the call"] = 4,
    storage_class: Annotated[str | None, "of new objects; without one the bucket's default"] = None,
    tags: Annotated[str | None, "of new objects, as k=v&k2=v2; for lifecycle rules and bills"] = None,
    read_only: Annotated[bool, "write and delete nothing"] = False,
    max_record_bytes: Annotated[int, Bounds(ge=1, le=MAX_PUT_BYTES), "refuse to store larger records"] = 1 << 30,
    probe: Annotated[Probe, "when opening: write, read and delete a scratch object; read: look for one; off: send nothing"] = "write",
    max_bytes: Annotated[int | None, Bounds(ge=1), "refused: a bucket is kept small by a lifecycle rule, or kvstore prune"] = None,
) -> Backend:
    """Open a bucket, or a prefix of one, as a store: `location` is `bucket` or `bucket/prefix`. Any number of processes may have it open.

    With NIXL it is open in a child process, unless this is one already.

    The bucket must exist. Unless `probe` is off, scratch objects under the prefix tell whether the store can be used.

    Raises:
        ConfigError: the store cannot be used as it is configured; the message says why. No record was written.
        BackendError: the store answers, but not now.
    """
    bucket, prefix = check_location(WHERE, location)
    if bucket.endswith(_EXPRESS):
        problem = f"{bucket} is a directory bucket of S3 Express, whose listings are not sorted; use a general purpose bucket"
        raise ConfigError(WHERE, "location", problem)
    if max_bytes is not None:
        problem = "its writers cannot keep a bucket below a size; expire objects by a lifecycle rule, or run kvstore prune --to-bytes"
        raise ConfigError(WHERE, "max_bytes", problem)
    settings = S3Settings(
        engine=engine,
        endpoint=_endpoint(endpoint, addressing),
        region=_matching("region", region, _REGION, "eu-central-1"),
        addressing=addressing,
        ca_bundle=_ca_bundle(ca_bundle, verify_tls),
        verify_tls=verify_tls,
        profile=profile,
        access_key_id=access_key_id,
        secret_access_key=secret_access_key,
        session_token=session_token,
        checksums=checksums,
        conditional_writes=conditional_writes,
        concurrency=concurrency,
        connect_timeout_s=connect_timeout_s,
        read_timeout_s=read_timeout_s,
        request_timeout_s=request_timeout_s,
        retries=request_retries,
        storage_class=_storage_class(storage_class),
        tags=_tags(tags),
        read_only=read_only,
        max_record_bytes=max_record_bytes,
        probe="read" if read_only and probe == "write" else probe,
    )
    _check_credentials(settings)
    if settings.engine == "s3fs" or in_child():
        return _open(bucket, prefix, settings)
    return _open_isolated(bucket, prefix, settings)


def check_location(where: str, location: str) -> tuple[str, str]:
    """Bucket and prefix, which is empty or has no slash at its ends. Looks at the text alone.

    Raises:
        ConfigError: it names no bucket, or a prefix that leaves no room for names.
    """
    bucket, _, prefix = location.partition("/")
    prefix = prefix.rstrip("/")
    if not _BUCKET.fullmatch(bucket):
        raise ConfigError(where, "location", f"{bucket!r} is no name of a bucket; write bucket/prefix, or s3://bucket/prefix as a URL")
    if prefix.startswith("/"):
        raise ConfigError(where, "location", f"{prefix!r} begins with a slash; write {bucket}{prefix}")
    if prefix and not all(map(_PREFIX_SEGMENT.fullmatch, prefix.split("/"))):
        problem = f"{prefix!r} is no prefix that can be used; write segments of letters, digits and -_.=+,@!*'(): with a slash in between"
        raise ConfigError(where, "location", problem)
    if len(prefix) + 1 + MAX_NAME_BYTES > _MAX_KEY_BYTES:
        raise ConfigError(where, "location", f"a prefix of {len(prefix)} bytes leaves no room for the names of records; use a shorter one")
    return bucket, prefix


def _open_isolated(bucket: str, prefix: str, settings: S3Settings) -> Backend:
    """With NIXL in a child process: nothing but the end of the process cancels its requests. Or, where NIXL can be done without, and cannot
    be used, with s3fs in this one.
    """
    shown = _shown(bucket, prefix)
    refused = None
    if importlib.util.find_spec("nixl") is None:
        refused = _not_imported("nixl", "there is none")
    elif not settings.verify_tls:
        refused = ConfigError(WHERE, "engine", TLS_OFF)
    else:
        options: dict[str, Any] = dataclasses.asdict(dataclasses.replace(settings, engine="nixl"))
        options["request_retries"] = options.pop("retries")
        location = f"{bucket}/{prefix}" if prefix else bucket
        try:
            backend = open_isolated(f"{__name__}:{open_s3.__name__}", options, location=location, label=shown)
        except ConfigError as cause:
            if cause.field != "engine":
                raise
            refused = cause
        except UnavailableError as cause:
            # The store, or NIXL, which may crash or hang where it begins. If it is the store, s3fs will say the same.
            if settings.engine == "nixl":
                raise
            refused = ConfigError(WHERE, "engine", f"nixl did not come up: {cause}")
        else:
            logger.info("%s: engine nixl, in child process %d", shown, backend.pid)
            return backend
    if settings.engine == "nixl":
        raise refused
    return _open(bucket, prefix, settings, refused)


def _open(bucket: str, prefix: str, settings: S3Settings, refused: ConfigError | None = None) -> S3Backend:
    """In this process. `refused`: why NIXL is not to be used, if it is not."""
    try:
        from kvstore_sdk_backends.s3.s3fs_client import S3fsClient
    except ImportError as cause:
        problem = f"{cause.name or 's3fs'} cannot be imported ({cause}); pip install 'kvstore-sdk[s3]'"
        raise ConfigError(WHERE, "engine", problem) from cause
    shown = _shown(bucket, prefix)
    client = S3fsClient(bucket, settings)
    loop = EventLoop("kvstore-s3")
    try:
        loop.run(f"s3 open {shown}: finding credentials", client.open, CREDENTIALS_S)
        loop.run(f"s3 open {shown}", lambda: probe_store(client, bucket, prefix, settings), PROBE_S + CLOSE_S)
        return _backend(client, loop, bucket, prefix, settings, refused)
    except BaseException as error:
        loop.close(client.close, CLOSE_S)
        # What it came from holds requests, with what they were signed with.
        error.__context__ = None
        raise


def _backend(client: S3fsClient, loop: EventLoop, bucket: str, prefix: str, settings: S3Settings, refused: ConfigError | None) -> S3Backend:
    shown = _shown(bucket, prefix)
    if settings.engine != "s3fs" and refused is None:
        try:
            from kvstore_sdk_backends.s3.nixl_backend import NixlS3Backend

            backend = NixlS3Backend(client, loop, bucket=bucket, shown=shown, prefix=prefix, settings=settings)
        except ImportError as cause:
            refused = _not_imported(cause.name or "nixl", str(cause))
        except ConfigError as cause:
            refused = cause
        else:
            logger.info("%s at %s: engine nixl", shown, client.endpoint)
            return backend
        if settings.engine == "nixl":
            raise refused
    if refused is not None:
        # Whoever installed it wants it used.
        level = logging.WARNING if importlib.util.find_spec("nixl") is not None else logging.INFO
        logger.log(level, "%s at %s: engine s3fs, since nixl cannot be used: %s", shown, client.endpoint, refused.problem)
    else:
        logger.info("%s at %s: engine s3fs", shown, client.endpoint)
    return S3Backend(client, loop, shown=shown, prefix=prefix, settings=settings)


def _not_imported(module: str, why: str) -> ConfigError:
    return ConfigError(WHERE, "engine", f"{module} cannot be imported ({why}); pip install 'kvstore-sdk[nixl]', or write s3fs")


def _shown(bucket: str, prefix: str) -> str:
    return f"s3://{bucket}/{prefix}" if prefix else f"s3://{bucket}"


def _endpoint(endpoint: str | None, addressing: Addressing) -> str | None:
    if endpoint is None:
        return None
    try:
        parts = urlsplit(endpoint)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        host, port, parts = "", None, urlsplit("")
    if "@" in endpoint or parts.query or parts.fragment:
        # Not repeated: it may hold a password.
        raise ConfigError(WHERE, "endpoint", "must be a scheme, a host and a port alone; credentials have options of their own")
    if parts.scheme not in ("http", "https") or not host or port == 0 or any(c.isspace() for c in endpoint):
        raise ConfigError(WHERE, "endpoint", f"{endpoint!r} is no URL of a store; write https://host, or http://host:port")
    if addressing == "virtual" and _is_address(host):
        raise ConfigError(WHERE, "addressing", f"virtual puts the bucket before the host, and {host} is an address; write path")
    return endpoint.rstrip("/")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _matching(field: str, value: str | None, pattern: re.Pattern[str], example: str) -> str | None:
    if value is not None and not pattern.fullmatch(value):
        raise ConfigError(WHERE, field, f"{value!r} is no {field}; write {example} for example, or leave it out")
    return value


def _ca_bundle(path: str | None, verify_tls: bool) -> str | None:
    if path is None:
        return None
    if not verify_tls:
        raise ConfigError(WHERE, "ca_bundle", "is not looked at with verify_tls=false; leave one of them out")
    try:
        ssl.create_default_context(cafile=path)
    except (OSError, ValueError) as cause:
        # An ssl.SSLError is an OSError.
        raise ConfigError(WHERE, "ca_bundle", f"{path}: {cause}; name a file of certificates in PEM form") from None
    return path


def _storage_class(value: str | None) -> str | None:
    if value in _ARCHIVES:
        raise ConfigError(
            WHERE, "storage_class", f"objects in {value} cannot be read until they are restored; write STANDARD, or leave it out"
        )
    return _matching("storage_class", value, _STORAGE_CLASS, "STANDARD_IA")


def _tags(text: str | None) -> str | None:
    if text is None:
        return None
    try:
        if not text:
            raise ValueError
        found = parse_qsl(text, keep_blank_values=True, strict_parsing=True, max_num_fields=_MAX_TAGS)
    except ValueError:
        raise ConfigError(WHERE, "tags", f"{text!r} is no list of tags; write k=v&k2=v2, {_MAX_TAGS} at most") from None
    names = [name for name, _ in found]
    if len(set(names)) < len(names):
        raise ConfigError(WHERE, "tags", f"{text!r} names one tag twice; leave one out")
    bad = [name for name, value in found if not 0 < len(name) <= 128 or len(value) > 256]
    if bad:
        raise ConfigError(WHERE, "tags", f"{bad[0]!r}: a name has 1 to 128 characters, a value at most 256; shorten it")
    return urlencode(found)


def _check_credentials(settings: S3Settings) -> None:
    given = {name: getattr(settings, name) for name in ("access_key_id", "secret_access_key", "session_token")}
    for name, value in given.items():
        if value is not None and (not value or not value.isascii() or not value.isprintable() or " " in value):
            raise ConfigError(WHERE, name, "is empty or has characters that no credential has; was it cut or pasted with a space?")
    if (given["access_key_id"] is None) != (given["secret_access_key"] is None):
        missing = "access_key_id" if given["access_key_id"] is None else "secret_access_key"
        raise ConfigError(WHERE, missing, "must be given too: access_key_id and secret_access_key belong together")
    if given["session_token"] is not None and given["access_key_id"] is None:
        raise ConfigError(WHERE, "session_token", "belongs to access_key_id and secret_access_key; give them too, or leave it out")
    if settings.profile is not None and given["access_key_id"] is not None:
        raise ConfigError(WHERE, "profile", "and access_key_id both say which credentials to use; leave one of them out")
    if settings.profile == "":
        raise ConfigError(WHERE, "profile", "is empty; name one of the AWS configuration, or leave it out")
