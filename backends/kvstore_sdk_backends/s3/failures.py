"""What went wrong in one attempt, read off the exceptions of botocore and aiohttp."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
from botocore.exceptions import (
    ConnectTimeoutError,
    CredentialRetrievalError,
    FlexibleChecksumError,
    HTTPClientError,
    NoCredentialsError,
    PartialCredentialsError,
    ProxyConnectionError,
    ReadTimeoutError,
    ResponseStreamingError,
    SSOTokenLoadError,
    TokenRetrievalError,
    UnauthorizedSSOTokenError,
)
from botocore.parsers import ResponseParserError

from kvstore_sdk.backend import (
    BackendError,
    DeniedError,
    InvalidError,
    NoSpaceError,
    ThrottledError,
    TimedOutError,
    UnavailableError,
    UnsupportedError,
)
from kvstore_sdk_backends.s3.causes import one_line, retry_after_s
from kvstore_sdk_backends.s3.client import AttemptError
from kvstore_sdk_backends.s3.memory import ReturnedError

__all__ = ["attempt_error", "error_of_code", "reason_of_source"]

_THROTTLED = frozenset(
    {"SlowDown", "SlowDownRead", "SlowDownWrite", "ServiceUnavailable", "Throttling", "ThrottlingException", "RequestLimitExceeded"}
    | {"TooManyRequests", "TooManyRequestsException", "BandwidthLimitExceeded", "RequestThrottled", "XMinioServerBusy"}
)
_STALE = frozenset(
    {"ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired", "RequestExpired", "InvalidAccessKeyId"}
    | {"SignatureDoesNotMatch", "UnrecognizedClientException", "InvalidClientTokenId", "AuthFailure"}
)
# Of a HEAD there is no body, hence no code. An expired token is a 400 there.
_STALE_STATUS = frozenset({400, 401, 403})
_FULL = frozenset({"QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "InsufficientStorage", "InsufficientCapacity"})
_DAMAGED = frozenset({"BadDigest", "InvalidDigest", "IncompleteBody", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"})
_LATE = frozenset({"RequestTimeout", "OperationAborted", "ConditionalRequestConflict", "ClientDisconnected"})
_ELSEWHERE = frozenset(
    {"PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "Redirect"}
)
_NOT_DONE = frozenset({501, 505, 507})
"""Of all above 499 those that say that nothing was done, whoever says them."""
_GIVEN_UP = frozenset({"408", "499"})
"""Codes of answers that have none of their own: of a gateway that stopped waiting for somebody."""


def attempt_error(doing: str, cause: BaseException, *, writes: bool = False, secrets: tuple[str, ...] = ()) -> AttemptError:
    """What `cause` means.

    Args:
        doing: Verb and object, `s3 PUT bucket/key` for example.
        cause: Raised by an attempt.
        writes: The request changes something, so that a lost answer leaves it open whether it did.
        secrets: Not to be repeated, whatever the store says.
    """
    if isinstance(cause, AttemptError):
        return cause
    response = getattr(cause, "response", None)
    if isinstance(response, Mapping):
        return _answered(doing, response, writes, secrets)
    return _unanswered(doing, cause, writes, secrets)


def error_of_code(doing: str, status: int, code: str, text: str = "", wait_s: float = 0.0) -> BackendError:
    """The error for an answer of the store; `text` is what it says beside its code, `wait_s` how long it asks to wait."""
    said = f"HTTP {status} {code}" if status and code and code != str(status) else f"HTTP {status}" if status else code
    message = f"{doing}: {said}" + (f" ({text})" if text else "")
    if code in _THROTTLED or status in (429, 503, 509):
        return ThrottledError(message, wait_s)
    if code in _FULL or status == 507:
        return NoSpaceError(message)
    if code in _DAMAGED:
        return UnavailableError(f"{message}: the bytes that arrived are not those that were sent")
    if code in _LATE or status == 408:
        return UnavailableError(message)
    if code in _ELSEWHERE or 300 <= status < 400:
        return DeniedError(f"{message}: the bucket is in another region, or at another endpoint; set region or endpoint")
    if code == "NoSuchBucket":
        return UnavailableError(f"{message}: there is no such bucket")
    if code == "RequestTimeTooSkewed":
        return DeniedError(f"{message}: the clock of this host is wrong")
    if code in _STALE or status in (401, 403) or code == "AccessDenied":
        return DeniedError(message)
    if code == "NotImplemented" or status in (405, 501):
        return UnsupportedError(message)
    if code == "InternalError" or status >= 500:
        return UnavailableError(message)
    return InvalidError(message)


def reason_of_source(cause: BaseException) -> str:
    """Why a source of credentials gave none: not in its own words, which may be credentials."""
    parts = [type(cause).__name__]
    if isinstance(cause, OSError) and cause.strerror:
        parts.append(cause.strerror)
    if isinstance(response := getattr(cause, "response", None), Mapping):
        parts.append(str((response.get("Error") or {}).get("Code")))
    if isinstance(about := getattr(cause, "kwargs", None), Mapping):
        parts += [str(about[name]) for name in ("provider", "path") if name in about]
    return one_line(": ".join(parts), (), 200)


def _answered(doing: str, response: Mapping[str, Any], writes: bool, secrets: tuple[str, ...]) -> AttemptError:
    said = response.get("Error") or {}
    about = response.get("ResponseMetadata") or {}
    headers = about.get("HTTPHeaders") or {}
    status = int(about.get("HTTPStatusCode") or 0)
    code = one_line(str(said.get("Code") or status), secrets, 80)
    text = "" if code == str(status) else one_line(str(said.get("Message") or ""), secrets, 200)
    if code == "RequestTimeTooSkewed":
        text = _skew(headers) or text
    if region := headers.get("x-amz-bucket-region") or said.get("Region"):
        text = f"the bucket is in {one_line(str(region), secrets, 40)}" if code in _ELSEWHERE or 300 <= status < 400 else text
    wait_s = retry_after_s(headers)
    error = error_of_code(doing, status, code, text, wait_s)
    return AttemptError(
        error,
        retryable=isinstance(error, UnavailableError) and code != "NoSuchBucket",
        may_have_happened=writes and _is_open(status, code),
        retry_after_s=wait_s,
        stale_credentials=code in _STALE or (code == str(status) and status in _STALE_STATUS),
        status=status,
        code=code,
    )


def _is_open(status: int, code: str) -> bool:
    """Whether a request that changes something may have been done in spite of this answer.

    Gateways say 502, 503, 504, 520, 522 or 524 of a request that they passed on, and the store InternalError of one that it began.
    Definite is what a store says in words of its own.
    """
    return code in _GIVEN_UP or (status >= 500 and status not in _NOT_DONE and code not in _THROTTLED | _FULL)


def _unanswered(doing: str, cause: BaseException, writes: bool, secrets: tuple[str, ...]) -> AttemptError:
    chain = [*_chain(cause)]

    def among(*kinds: type[BaseException]) -> bool:
        return any(isinstance(error, kinds) for error in chain)

    def failed(error: BackendError, code: str, *, sent: bool = True, retryable: bool = True, stale: bool = False) -> AttemptError:
        return AttemptError(error, retryable=retryable, may_have_happened=writes and sent, stale_credentials=stale, code=code)

    text = one_line(_reason(chain), secrets, 200)
    if among(ReturnedError):
        return failed(TimedOutError(f"{doing}: the call ended before the request"), "closed", retryable=False)
    if among(NoCredentialsError, PartialCredentialsError):
        return failed(DeniedError(f"{doing}: no credentials ({text})"), "credentials", sent=False, retryable=False, stale=True)
    if among(CredentialRetrievalError, TokenRetrievalError, UnauthorizedSSOTokenError, SSOTokenLoadError):
        return failed(
            DeniedError(f"{doing}: credentials cannot be had ({reason_of_source(chain[0])})"), "credentials", sent=False, stale=True
        )
    if among(ssl.SSLCertVerificationError, ssl.CertificateError, aiohttp.ClientConnectorCertificateError):
        return failed(DeniedError(f"{doing}: TLS: {text}"), "tls", sent=False, retryable=False)
    if among(aiohttp.ClientConnectorSSLError):
        return failed(UnavailableError(f"{doing}: TLS: {text}"), "tls", sent=False)
    if among(aiohttp.ClientConnectorDNSError, socket.gaierror):
        return failed(UnavailableError(f"{doing}: the host name {_host(chain)}does not resolve ({text})"), "dns", sent=False)
    if among(aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, ConnectTimeoutError, ProxyConnectionError):
        return failed(UnavailableError(f"{doing}: cannot connect ({text})"), "connect", sent=False)
    if among(FlexibleChecksumError):
        return failed(UnavailableError(f"{doing}: the body does not fit its checksum"), "checksum")
    if among(ResponseParserError):
        return failed(UnavailableError(f"{doing}: the answer cannot be understood; does the endpoint speak S3?"), "body")
    if among(TimeoutError, ReadTimeoutError):
        return failed(UnavailableError(f"{doing}: no answer in time"), "timeout")
    if among(aiohttp.ClientPayloadError, ResponseStreamingError):
        return failed(UnavailableError(f"{doing}: the body was cut short ({text})"), "body")
    if among(HTTPClientError, aiohttp.ClientError, ConnectionError):
        return failed(UnavailableError(f"{doing}: the connection was lost ({text})"), "closed")
    return failed(BackendError(f"{doing}: {text}"), type(cause).__name__, retryable=False)


def _chain(cause: BaseException) -> Iterator[BaseException]:
    """The error and those that it was made of, each once."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [cause]
    while todo:
        error = todo.pop()
        if not isinstance(error, BaseException) or id(error) in seen:
            continue
        seen.add(id(error))
        yield error
        kwargs = getattr(error, "kwargs", None)
        inner = kwargs.get("error") if isinstance(kwargs, Mapping) else None
        todo += [error.__context__, error.__cause__, inner if isinstance(inner, BaseException) else None]


def _host(chain: list[BaseException]) -> str:
    return next((f"{error.host} " for error in chain if isinstance(error, aiohttp.ClientConnectorError)), "")


def _reason(chain: list[BaseException]) -> str:
    # Below the errors of botocore, whose words repeat the whole URL.
    for error in chain:
        # A connection that is being made begins with a BlockingIOError, which stays in the context of what ends it.
        if isinstance(error, OSError) and error.strerror and not isinstance(error, BlockingIOError):
            return error.strerror
    for error in chain:
        if isinstance(error, aiohttp.ClientResponseError | aiohttp.http_exceptions.HttpProcessingError):
            # They repeat what came, which may be of a record.
            return f"{type(error).__name__}: no HTTP"
    for error in chain:
        if isinstance(error, aiohttp.ClientError):
            return f"{type(error).__name__}: {error}"
    return f"{type(chain[0]).__name__}: {chain[0]}"


def _skew(headers: Mapping[str, str]) -> str:
    try:
        ahead_s = (datetime.now(UTC) - parsedate_to_datetime(headers.get("date", ""))).total_seconds()
    except (ValueError, TypeError):
        return ""
    return f"{abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} the store's"
