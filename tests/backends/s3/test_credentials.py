"""Where credentials come from, when they are asked for anew, whom they reach, and where they are never seen."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("s3fs")

from fault_proxy import FaultProxy
from proxy_faults import Delay, Fault, Status, clock_skew, expired_token
from s3_server import REGION, S3Server

from kvstore_sdk.backend import ConfigError, Deadline, DeniedError, Get, GetResult, GetStatus, Put, PutStatus, Region, open_backend
from kvstore_sdk_backends.s3 import S3Backend, open_s3
from kvstore_sdk_backends.s3.redaction import Redaction, redact_logs
from kvstore_sdk_backends.s3.settings import S3Settings

NAME = "v1/record"
SECRET = "secret/of+this-test=1"
TOKEN = "token/of+this-test=="
JWT = "eyJhbGciOiJub25lIn0.eyJzdWIiOiJ0aGlzLXRlc3QifQ.c2lnbmF0dXJl"
LIMIT_S = 20.0


@pytest.fixture(autouse=True)
def _no_credentials_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_DEFAULT_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))


Opener = Callable[..., S3Backend]


@pytest.fixture
def opened(proxy: FaultProxy, bucket: str, request: pytest.FixtureRequest) -> Opener:
    """Opens the bucket with options of the test alone, and closes it at the end."""

    def open_it(**options: Any) -> S3Backend:
        backend = open_s3(f"{bucket}/kv", engine="s3fs", region=REGION, **({"endpoint": proxy.endpoint, "probe": "off"} | options))
        request.addfinalizer(backend.close)
        return backend

    return open_it


def get(backend: S3Backend, name: str = NAME, size_bytes: int = 4096) -> GetResult:
    region = Region(size_bytes)
    try:
        [result] = backend.get([Get(name, [region.buffer(0, size_bytes)])], Deadline.after(LIMIT_S))
    finally:
        region.close()
    return result


def put(backend: S3Backend, name: str = NAME, size_bytes: int = 4096) -> PutStatus:
    region = Region(size_bytes)
    try:
        [result] = backend.put([Put(name, [region.buffer(0, size_bytes)])], Deadline.after(LIMIT_S))
    finally:
        region.close()
    return result.status


def keys_seen(proxy: FaultProxy) -> list[str]:
    """Which access key each request was signed with."""
    found = [re.search(r"Credential=([^/]+)/", seen.headers.get("authorization", "")) for seen in proxy.requests]
    return [match[1] if match else "" for match in found]


def set_environment(monkeypatch: pytest.MonkeyPatch, key: str, secret: str = SECRET) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)


def test_two_stores_of_one_process_never_mix(s3_server: S3Server, proxy: FaultProxy, bucket: str, opened: Opener) -> None:
    other = FaultProxy(s3_server.endpoint)
    try:
        one = opened(access_key_id="KEYONE", secret_access_key=SECRET)
        two = opened(access_key_id="KEYTWO", secret_access_key=f"{SECRET}2", endpoint=other.endpoint)
        names = [f"v1/{number}" for number in range(12)]
        with ThreadPoolExecutor(8) as pool:
            statuses = list(pool.map(lambda name: put(one if int(name[3:]) % 2 else two, name), names))
            assert set(statuses) == {PutStatus.STORED}
            found = list(pool.map(lambda name: get(two if int(name[3:]) % 2 else one, name), names))
        assert {result.status for result in found} == {GetStatus.FOUND}
        assert set(keys_seen(proxy)) == {"KEYONE"}
        assert set(keys_seen(other)) == {"KEYTWO"}
        assert len(proxy.requests) + len(other.requests) == 24
        two.close()
    finally:
        other.stop()


def test_the_environment_is_the_default(opened: Opener, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, "KEYENV")
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    assert put(opened()) is PutStatus.STORED
    assert keys_seen(proxy) == ["KEYENV"]
    assert proxy.requests[0].headers["x-amz-security-token"] == TOKEN


def test_a_profile_names_its_own(opened: Opener, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_environment(monkeypatch, "KEYENV")
    (tmp_path / "credentials").write_text(f"[kv]\naws_access_key_id = KEYPROFILE\naws_secret_access_key = {SECRET}\n")
    assert put(opened(profile="kv")) is PutStatus.STORED
    assert keys_seen(proxy) == ["KEYPROFILE"]


def test_static_ones_win_over_the_environment(opened: Opener, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, "KEYENV")
    assert put(opened(access_key_id="KEYSTATIC", secret_access_key=SECRET)) is PutStatus.STORED
    assert keys_seen(proxy) == ["KEYSTATIC"]


@pytest.mark.parametrize("refusal", [expired_token(), Status(403, "InvalidAccessKeyId"), Status(403, "SignatureDoesNotMatch")])
def test_after_a_refusal_the_chain_is_read_anew(
    opened: Opener, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, refusal: Status
) -> None:
    set_environment(monkeypatch, "KEYOLD")
    backend = opened()
    assert put(backend) is PutStatus.STORED
    set_environment(monkeypatch, "KEYNEW", "another")
    assert get(backend).status is GetStatus.FOUND, "nobody asked for new ones"
    proxy.script(Fault(refusal, "GET", times=1))
    assert get(backend).status is GetStatus.FOUND
    assert keys_seen(proxy) == ["KEYOLD", "KEYOLD", "KEYOLD", "KEYNEW"]


def test_a_head_that_was_refused_without_a_word_asks_for_new_ones(
    opened: Opener, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer to HEAD has no body, so nothing says whether the token expired."""
    set_environment(monkeypatch, "KEYOLD")
    backend = opened()
    assert put(backend) is PutStatus.STORED
    set_environment(monkeypatch, "KEYNEW")
    proxy.script(Fault(expired_token(), "HEAD", times=1))
    assert backend.exists([NAME], Deadline.after(LIMIT_S)) == [True]
    assert keys_seen(proxy) == ["KEYOLD", "KEYOLD", "KEYNEW"]


def test_requests_that_run_end_with_the_credentials_they_have(opened: Opener, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, "KEYOLD")
    backend = opened()
    assert put(backend) is PutStatus.STORED
    assert put(backend, "v1/slow") is PutStatus.STORED
    set_environment(monkeypatch, "KEYNEW")
    proxy.script(Fault(Delay(1.5), "GET", "slow"), Fault(expired_token(), "GET", "record", times=1))
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(get, backend, "v1/slow")
        while not any(seen.path.endswith("slow") and seen.method == "GET" for seen in proxy.requests):
            assert not slow.done()
        assert get(backend).status is GetStatus.FOUND
        assert slow.result(LIMIT_S).status is GetStatus.FOUND
    assert keys_seen(proxy) == ["KEYOLD", "KEYOLD", "KEYOLD", "KEYOLD", "KEYNEW"]


def test_a_store_that_refuses_for_good_is_not_asked_with_new_ones_each_time(
    opened: Opener, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_environment(monkeypatch, "KEYOLD")
    backend = opened()
    proxy.script(Fault(expired_token(), "GET"))
    for requests in (2, 3, 4):
        result = get(backend)
        assert isinstance(result.error, DeniedError)
        assert len(proxy.requests) == requests


@pytest.mark.parametrize("refusal", [expired_token(), Status(403, "AccessDenied"), clock_skew()])
def test_static_ones_are_refused_once(opened: Opener, proxy: FaultProxy, refusal: Status) -> None:
    backend = opened(access_key_id="KEYSTATIC", secret_access_key=SECRET)
    proxy.script(Fault(refusal, "GET"))
    result = get(backend)
    assert isinstance(result.error, DeniedError)
    assert refusal.code in str(result.error)
    assert len(proxy.requests) == 1


@pytest.mark.parametrize("probe", ["write", "off"])
def test_without_any_it_says_where_to_get_them(opened: Opener, proxy: FaultProxy, probe: str) -> None:
    if probe == "write":
        with pytest.raises(ConfigError, match=r"access_key_id: .*no credentials"):
            opened(probe=probe)
    else:
        assert "no credentials" in str(get(opened(probe=probe)).error)
    assert proxy.requests == []


def test_nothing_that_is_shown_or_logged_holds_a_secret(
    opened: Opener, proxy: FaultProxy, caplog: pytest.LogCaptureFixture, bucket: str
) -> None:
    caplog.set_level(1)
    backend = opened(access_key_id="KEYSTATIC", secret_access_key=SECRET, session_token=TOKEN, checksums="when_supported", probe="write")
    assert put(backend) is PutStatus.STORED
    shown = [repr(backend), repr(backend._client)]
    for refusal in (Status(403, "AccessDenied"), expired_token(), Status(500)):
        proxy.script(Fault(refusal, "GET", times=5))
        error = get(backend).error
        proxy.heal()
        shown += [str(error), repr(error), repr(error.__cause__), repr(error.__context__)] if error else []
    with pytest.raises(ConfigError) as raised:
        open_backend(f"s3://{bucket}/kv?secret_access_key={SECRET}", {"session_token": TOKEN, "endpoint": "ftp://x"})
    shown += [str(raised.value), repr(raised.value)]
    assert any(record.name == "botocore.auth" for record in caplog.records), "the libraries were silent, so this proves nothing"
    for text in [*shown, *(record.getMessage() for record in caplog.records), *(str(record.exc_text) for record in caplog.records)]:
        assert SECRET not in text
        assert TOKEN not in text
        assert not re.search(r"Signature=[0-9a-f]", text)


@pytest.mark.parametrize(
    "text",
    [
        f"headers={{'X-Amz-Security-Token': b'{TOKEN}', 'a': 1}}",
        f"x-amz-security-token:{TOKEN}\nx-amz-date:1",
        f"<SecretAccessKey>{SECRET}</SecretAccessKey><SessionToken>{TOKEN}</SessionToken>",
        f'{{"SecretAccessKey": "{SECRET}", "SessionToken" : "{TOKEN}"}}',
        f"<Error><Code>ExpiredToken</Code><Token-0>{TOKEN}</Token-0></Error>",
        f"aws_secret_access_key = {SECRET}",
        f"{{'WebIdentityToken': '{TOKEN}', 'Action': 'AssumeRoleWithWebIdentity'}}",
        f'{{"refreshToken": "{TOKEN}", "clientSecret": "{SECRET}", "accessToken": "{TOKEN}"}}',
        f'Received non 200 response: {{"Token": "{TOKEN}"}}',
        f"x-amz-sso_bearer_token: {TOKEN}",
        f"SAMLAssertion={TOKEN}",
        f"<Message>bad token {JWT}</Message>",
        f"Setting endpoint to http://user:{TOKEN.replace('/', '')}@host:9000",
    ],
)
def test_the_log_filter_knows_the_forms_in_which_secrets_come(text: str) -> None:
    record = logging.LogRecord("botocore.parsers", logging.DEBUG, __file__, 1, "Response body: %s", (text,), None)
    assert Redaction().filter(record)
    assert SECRET not in record.getMessage()
    assert TOKEN not in record.getMessage()
    assert TOKEN.replace("/", "") not in record.getMessage()
    assert JWT not in record.getMessage()
    assert "***" in record.getMessage()


@pytest.mark.parametrize("logger", ["aiobotocore.credentials", "botocore.endpoint"])
def test_the_log_filter_looks_into_tracebacks(logger: str) -> None:
    """botocore logs one of each refresh that failed: of those nothing but the class is shown."""
    try:
        raise ValueError(f"headers={{'X-Amz-Security-Token': b'{TOKEN}'}}")
    except ValueError:
        record = logging.LogRecord(logger, logging.WARNING, __file__, 1, "Refreshing failed", (), sys.exc_info())
    assert Redaction().filter(record)
    lines = logging.Formatter().format(record).splitlines()
    assert lines[0] == "Refreshing failed"
    assert lines[-1] == ("ValueError" if logger == "aiobotocore.credentials" else "ValueError: headers={'X-Amz-Security-Token': b'***'}")
    assert TOKEN not in "".join(lines)
    assert record.exc_info is None, "some handlers look into it themselves"


def test_every_logger_of_the_library_that_tells_of_credentials_is_filtered() -> None:
    redact_logs()
    for name in ("credentials", "tokens", "utils", "regions"):
        for library in ("botocore", "aiobotocore"):
            assert any(isinstance(one, Redaction) for one in logging.getLogger(f"{library}.{name}").filters)


def test_settings_do_not_show_them() -> None:
    settings = S3Settings(access_key_id="KEYSTATIC", secret_access_key=SECRET, session_token=TOKEN)
    assert not [secret for secret in ("KEYSTATIC", SECRET, TOKEN) if secret in repr(settings)]
