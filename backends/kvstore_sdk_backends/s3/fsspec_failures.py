"""What any file system of fsspec may raise, as the failure of one attempt."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping

from kvstore_sdk.backend import DeniedError, InvalidError, ThrottledError, TimedOutError, UnavailableError
from kvstore_sdk_backends.s3.causes import retry_after_s
from kvstore_sdk_backends.s3.client import AttemptError

__all__ = ["attempt_error", "status_of"]

_REFUSED = frozenset(
    {
        "AzureSigningError",
        "ClientAuthenticationError",
        "CredentialUnavailableError",
        "DefaultCredentialsError",
        "NoCredentialsError",
        "RefreshError",
    }
)
"""By name: the packages of azure, google and botocore need not be installed."""
_MISUSE = (AttributeError, LookupError, NotImplementedError, TypeError, ValueError)
_DEEPEST = 8


def attempt_error(doing: str, cause: Exception) -> AttemptError:
    """The failure that `cause` stands for. Its own words are left out: they may repeat a token, a signed address or an option.

    Whatever is not surely refused may have happened: the libraries repeat requests on their own, and show the last answer alone.
    """
    status = status_of(cause) or 0
    what = f"{doing}: {_named(cause, status)}"
    if isinstance(cause, PermissionError) or status in (401, 403) or type(cause).__name__ in _REFUSED:
        # Of these only what speaks of who is asking, not of what they may do, can be mended by other credentials.
        stale = status == 401 or type(cause).__name__ in _REFUSED
        problem = DeniedError(f"{what}; check the credentials in storage_options, and what they allow")
        return AttemptError(problem, stale_credentials=stale, status=status, code="credentials" if stale else "")
    if status in (429, 503):
        wish_s = _wish_s(cause)
        throttled = ThrottledError(what, wish_s)
        return AttemptError(throttled, retryable=True, may_have_happened=True, retry_after_s=wish_s, status=status)
    if isinstance(cause, TimeoutError) or status == 408:
        return AttemptError(TimedOutError(what), retryable=True, may_have_happened=True, status=status, code="timeout")
    if isinstance(cause, FileNotFoundError) or status == 404:
        return AttemptError(UnavailableError(f"{what}; is the bucket or container there?"), status=404)
    if 400 <= status < 500:
        return AttemptError(InvalidError(what), status=status)
    # One of its own kind of errors means that the file system could not use what it was given. What it did before is not known.
    retryable = bool(status) or not isinstance(cause, _MISUSE)
    return AttemptError(UnavailableError(what), retryable=retryable, may_have_happened=True, status=status, code="" if status else "closed")


def status_of(cause: BaseException) -> int | None:
    """The HTTP status behind an exception, wherever its library keeps it."""
    for error in _chain(cause):
        response = getattr(error, "response", None)
        if isinstance(response, Mapping):
            found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        else:
            found = next((value for name in ("status_code", "status", "code") if (value := getattr(error, name, None)) is not None), None)
        text = str(found)
        if text.isdecimal() and 100 <= int(text) <= 599:
            return int(text)
        # gcsfs says 403 in words alone.
        if isinstance(error, OSError) and error.errno is None and str(error).startswith("Forbidden"):
            return 403
    return None


def _chain(cause: BaseException | None) -> Iterator[BaseException]:
    for _ in range(_DEEPEST):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__


def _named(cause: Exception, status: int) -> str:
    kind = type(cause).__name__
    if status:
        return f"HTTP {status} ({kind})"
    if isinstance(cause, OSError) and cause.errno is not None:
        return f"{errno.errorcode.get(cause.errno, cause.errno)} ({kind})"
    return kind


def _wish_s(cause: BaseException) -> float:
    for error in _chain(cause):
        response = getattr(error, "response", None)
        for headers in (getattr(error, "headers", None), getattr(response, "headers", None), _headers_of(response)):
            if isinstance(headers, Mapping) and (wish_s := retry_after_s(headers)):
                return wish_s
    return 0.0


def _headers_of(response: object) -> object:
    return response.get("ResponseMetadata", {}).get("HTTPHeaders") if isinstance(response, Mapping) else None
