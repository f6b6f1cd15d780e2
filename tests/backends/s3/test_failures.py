"""What an exception of the libraries means: which error, whether to repeat, whether it may have happened, and no secret in its words."""

from __future__ import annotations

import asyncio
import ssl
from email.utils import formatdate
from time import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("s3fs")

import aiohttp
from botocore import exceptions as boto
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
from kvstore_sdk_backends.s3.causes import retry_after_s
from kvstore_sdk_backends.s3.client import AttemptError
from kvstore_sdk_backends.s3.failures import attempt_error, error_of_code
from kvstore_sdk_backends.s3.memory import ReturnedError

DOING = "s3 PUT bucket/kv/name"
URL = "https://bucket.example/kv/name"


def answer(status: int, code: str | None = None, message: str = "", **headers: str) -> boto.ClientError:
    error = {"Code": code or str(status), "Message": message}
    about = {"HTTPStatusCode": status, "HTTPHeaders": {name.replace("_", "-"): value for name, value in headers.items()}}
    return boto.ClientError({"Error": error, "ResponseMetadata": about}, "PutObject")


@pytest.mark.parametrize(
    ("status", "code", "kind", "retryable"),
    [
        (400, "InvalidArgument", InvalidError, False),
        (400, "RequestTimeout", UnavailableError, True),
        (400, "BadDigest", UnavailableError, True),
        (400, "ExpiredToken", DeniedError, False),
        (401, "Unauthorized", DeniedError, False),
        (403, "AccessDenied", DeniedError, False),
        (403, "RequestTimeTooSkewed", DeniedError, False),
        (403, "QuotaExceeded", NoSpaceError, False),
        (404, "NoSuchBucket", UnavailableError, False),
        (405, "MethodNotAllowed", UnsupportedError, False),
        (409, "OperationAborted", UnavailableError, True),
        (413, "EntityTooLarge", InvalidError, False),
        (429, None, ThrottledError, True),
        (500, "InternalError", UnavailableError, True),
        (501, "NotImplemented", UnsupportedError, False),
        (503, "SlowDown", ThrottledError, True),
        (503, None, ThrottledError, True),
        (504, None, UnavailableError, True),
        (507, "XMinioStorageFull", NoSpaceError, False),
        (599, None, UnavailableError, True),
    ],
)
def test_an_answer_becomes_the_error_that_advises_right(status: int, code: str | None, kind: type[BackendError], retryable: bool) -> None:
    failed = attempt_error(DOING, answer(status, code), writes=True)
    assert type(failed.error) is kind
    assert failed.retryable is retryable
    assert str(failed.error).startswith(f"{DOING}: HTTP {status}")
    assert code is None or code in str(failed.error)
    assert "\n" not in str(failed.error)


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (500, "InternalError"),
        (502, None),
        (503, "InternalError"),
        # Of a gateway: it may have passed the request on before it lost the store.
        (503, None),
        (504, None),
        (520, None),
        (522, None),
        (524, None),
        (408, None),
        (499, None),
    ],
)
def test_a_put_that_a_gateway_gave_up_may_have_happened(status: int, code: str | None) -> None:
    assert attempt_error(DOING, answer(status, code), writes=True).may_have_happened
    assert not attempt_error(DOING, answer(status, code)).may_have_happened, "a read changes nothing"


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (503, "SlowDown"),
        (503, "ServiceUnavailable"),
        (507, "XMinioStorageFull"),
        (501, "NotImplemented"),
        (501, None),
        (505, None),
        (507, None),
        (400, "RequestTimeout"),
        (429, None),
        (412, "PreconditionFailed"),
    ],
)
def test_a_refusal_in_the_words_of_a_store_is_definite(status: int, code: str | None) -> None:
    assert not attempt_error(DOING, answer(status, code), writes=True).may_have_happened


@pytest.mark.parametrize(
    ("status", "code", "stale"),
    [
        (400, "ExpiredToken", True),
        (403, "InvalidAccessKeyId", True),
        (403, "SignatureDoesNotMatch", True),
        # A HEAD has no body: an expired token, or no permission.
        (403, None, True),
        (400, None, True),
        (403, "AccessDenied", False),
        (403, "RequestTimeTooSkewed", False),
        (503, "SlowDown", False),
    ],
)
def test_new_credentials_are_asked_for_where_they_may_help(status: int, code: str | None, stale: bool) -> None:
    assert attempt_error(DOING, answer(status, code)).stale_credentials is stale


def test_the_clock_says_by_how_much_it_is_wrong() -> None:
    failed = attempt_error(DOING, answer(403, "RequestTimeTooSkewed", date=formatdate(time() - 7200, usegmt=True)))
    assert "720" in str(failed.error)
    assert "ahead of the store's" in str(failed.error)


KEY = aiohttp.client_reqrep.ConnectionKey("bucket.example", 443, True, True, None, None, None)


def connector_error(kind: type[aiohttp.ClientConnectorError], cause: OSError) -> Exception:
    return boto.EndpointConnectionError(endpoint_url=URL, error=kind(KEY, cause))


@pytest.mark.parametrize(
    ("cause", "code", "may_have_happened"),
    [
        (connector_error(aiohttp.ClientConnectorError, ConnectionRefusedError(111, "Connection refused")), "connect", False),
        (connector_error(aiohttp.ClientConnectorDNSError, OSError(-2, "Name or service not known")), "dns", False),
        (boto.ConnectTimeoutError(endpoint_url=URL, error=aiohttp.ServerTimeoutError()), "connect", False),
        (boto.SSLError(endpoint_url=URL, error=ssl.SSLCertVerificationError(1, "self-signed certificate")), "tls", False),
        (boto.NoCredentialsError(), "credentials", False),
        (boto.CredentialRetrievalError(provider="process", error_msg="exit 1"), "credentials", False),
        (boto.ReadTimeoutError(endpoint_url=URL, error=TimeoutError()), "timeout", True),
        (TimeoutError(), "timeout", True),
        (boto.ConnectionClosedError(endpoint_url=URL, error=aiohttp.ServerDisconnectedError()), "closed", True),
        (boto.EndpointConnectionError(endpoint_url=URL, error=aiohttp.ClientOSError(104, "Connection reset by peer")), "closed", True),
        (boto.ResponseStreamingError(error=aiohttp.ClientPayloadError("not enough")), "body", True),
        (boto.FlexibleChecksumError(error_msg="Expected x"), "checksum", True),
        (ResponseParserError("invalid XML"), "body", True),
        (ReturnedError("over"), "closed", True),
        (KeyError("a fault of ours"), "KeyError", True),
    ],
)
def test_without_an_answer_it_says_how_far_the_request_came(cause: Exception, code: str, may_have_happened: bool) -> None:
    failed = attempt_error(DOING, cause, writes=True)
    assert (failed.code, failed.may_have_happened, failed.status) == (code, may_have_happened, 0)
    assert str(failed.error).startswith(f"{DOING}: ")
    assert "\n" not in str(failed.error)


def test_credentials_that_cannot_be_had_are_asked_for_again() -> None:
    failed = attempt_error(DOING, boto.CredentialRetrievalError(provider="process", error_msg="exit 1"))
    assert isinstance(failed.error, DeniedError)
    assert failed.retryable
    assert failed.stale_credentials


def test_memory_that_was_given_back_is_not_asked_for_again() -> None:
    failed = attempt_error(DOING, ReturnedError("over"))
    assert isinstance(failed.error, TimedOutError)
    assert not failed.retryable


def test_what_is_an_attempt_error_already_stays_what_it_is() -> None:
    error = AttemptError(UnavailableError("x"), retryable=True)
    assert attempt_error(DOING, error, writes=True) is error


def test_a_failure_while_another_was_handled_is_told_by_its_own_words() -> None:
    """A connection attempt leaves a BlockingIOError in the context of whatever ends it."""

    async def fail() -> None:
        try:
            raise BlockingIOError(115, "Operation now in progress")
        except BlockingIOError:
            raise boto.ConnectionClosedError(endpoint_url=URL, error=aiohttp.ServerDisconnectedError()) from None

    with pytest.raises(boto.ConnectionClosedError) as raised:
        asyncio.run(fail())
    assert "in progress" not in str(attempt_error(DOING, raised.value).error)


@pytest.mark.parametrize(
    "cause",
    [
        answer(403, "AccessDenied", "the secret TOP/SECRET+KEY was used\nand the token A-TOKEN=="),
        answer(403, "TOP/SECRET+KEY", "A-TOKEN=="),
        boto.ProxyConnectionError(proxy_url="http://user:hunter2@proxy:3128", error=OSError("http://user:hunter2@proxy")),
        OSError("cannot use https://user:hunter2@host/TOP/SECRET+KEY"),
        ValueError("TOP/SECRET+KEY\nA-TOKEN=="),
    ],
)
def test_no_secret_is_repeated(cause: Exception) -> None:
    failed: Any = attempt_error(DOING, cause, secrets=("TOP/SECRET+KEY", "A-TOKEN=="))
    for text in (str(failed), repr(failed), str(failed.error), repr(failed.error), failed.code):
        assert not [secret for secret in ("TOP/SECRET", "A-TOKEN==", "hunter2") if secret in text]
        assert "\n" not in text


def test_a_host_that_does_not_resolve_is_named() -> None:
    failed = attempt_error(DOING, connector_error(aiohttp.ClientConnectorDNSError, OSError(-2, "Name or service not known")))
    assert "the host name bucket.example does not resolve (Name or service not known)" in str(failed.error)


def test_a_secret_that_is_a_word_does_not_turn_messages_into_riddles() -> None:
    failed = attempt_error(DOING, answer(403, "AccessDenied", "the test of s3 was refused"), secrets=("test", "s3"))
    assert "the test of s3 was refused" in str(failed.error)


def test_the_wish_to_wait_is_read_in_both_forms() -> None:
    assert retry_after_s({"retry-after": "7"}) == 7.0
    assert 8.0 < retry_after_s({"retry-after": formatdate(time() + 10, usegmt=True)}) <= 10.0
    assert attempt_error(DOING, answer(503, "SlowDown", retry_after="7")).retry_after_s == 7.0


@given(st.text() | st.floats().map(str) | st.integers().map(str))
def test_whatever_a_store_wishes_is_a_time_to_wait(text: str) -> None:
    assert 0.0 <= retry_after_s({"retry-after": text}) <= 3600.0


@given(st.integers(0, 999), st.text(max_size=50), st.text(max_size=50))
def test_every_answer_has_an_error(status: int, code: str, text: str) -> None:
    assert str(error_of_code(DOING, status, code, text)).startswith(DOING)
