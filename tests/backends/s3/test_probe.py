"""The open-time probe: what it finds, in one line that names the option; and what it leaves, which is nothing."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

pytest.importorskip("s3fs")

from fault_proxy import FaultProxy
from proxy_faults import Fault, NeverAnswers, ResetAfterBody, Status, WrongBytes, clock_skew, expired_token, slow_down
from s3_server import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY, S3Server
from scripted_client import ScriptedClient

from kvstore_sdk.backend import BackendError, ConfigError, DeniedError, InvalidError, ThrottledError, UnsupportedError
from kvstore_sdk_backends.s3 import S3Backend, open_s3
from kvstore_sdk_backends.s3.client import AttemptError
from kvstore_sdk_backends.s3.memory import ItemMemory
from kvstore_sdk_backends.s3.probe import PROBE_NAME, probe_store
from kvstore_sdk_backends.s3.settings import S3Settings

Opener = Callable[..., S3Backend]


@pytest.fixture
def opened(proxy: FaultProxy, bucket: str, request: pytest.FixtureRequest) -> Opener:
    def open_it(location: str = f"{bucket}/kv", **options: Any) -> S3Backend:
        given = {"endpoint": proxy.endpoint, "access_key_id": ACCESS_KEY_ID, "secret_access_key": SECRET_ACCESS_KEY, "region": REGION}
        backend = open_s3(location, engine="s3fs", **(given | options))
        request.addfinalizer(backend.close)
        return backend

    return open_it


def refusal(opened: Opener, **options: Any) -> ConfigError:
    with pytest.raises(ConfigError) as raised:
        opened(**options)
    assert "\n" not in str(raised.value)
    return raised.value


@pytest.mark.parametrize("checksums", ["when_required", "when_supported", "off"])
def test_a_good_store_is_opened_and_left_empty(opened: Opener, proxy: FaultProxy, s3_server: S3Server, bucket: str, checksums: str) -> None:
    backend = opened(checksums=checksums)
    assert backend._client.conditional
    assert s3_server.objects(bucket) == {}
    assert {seen.method for seen in proxy.requests} >= {"PUT", "HEAD", "GET"}
    assert all(f"/{bucket}/kv/{PROBE_NAME}" in seen.path for seen in proxy.requests if seen.method != "POST")


@pytest.mark.parametrize("options", [{"probe": "read"}, {"read_only": True}])
def test_reading_alone_writes_nothing(opened: Opener, proxy: FaultProxy, options: dict[str, Any]) -> None:
    opened(**options)
    assert {seen.method for seen in proxy.requests} == {"HEAD", "GET"}


def test_off_sends_nothing(opened: Opener, proxy: FaultProxy) -> None:
    opened(probe="off")
    assert proxy.requests == []


@pytest.mark.parametrize("probe", ["write", "read"])
def test_a_bucket_that_is_missing(opened: Opener, probe: str) -> None:
    error = refusal(opened, location="no-such-bucket/kv", probe=probe)
    assert error.field == "location"
    assert "create the bucket no-such-bucket" in str(error)


@pytest.mark.parametrize(
    ("fault", "options", "field", "advice"),
    [
        (Fault(Status(403, "AccessDenied"), "PUT"), {}, "read_only", "grant s3:PutObject on"),
        (Fault(Status(403, "AccessDenied"), "PUT"), {"tags": "a=b"}, "read_only", "s3:PutObjectTagging"),
        (Fault(Status(403, "AccessDenied"), "GET"), {}, "permission", "grant s3:GetObject on"),
        (Fault(Status(403, "AccessDenied"), "HEAD", times=1), {}, "permission", "grant s3:GetObject on"),
        (Fault(Status(403, "AccessDenied"), "HEAD"), {"probe": "read"}, "permission", "grant s3:ListBucket on the bucket"),
        (Fault(Status(403, "AccessDenied"), "POST"), {}, "probe", "grant s3:DeleteObject on"),
        (Fault(Status(403, "AccessDenied"), "DELETE"), {"checksums": "off"}, "probe", "write probe=read"),
        (Fault(clock_skew()), {}, "clock", "NTP"),
        (Fault(expired_token()), {"session_token": "t"}, "session_token", "new temporary credentials"),
        (Fault(Status(403, "InvalidAccessKeyId")), {}, "access_key_id", "does not know this key"),
        (Fault(Status(403, "SignatureDoesNotMatch")), {}, "secret_access_key", "is the secret that of the key"),
        (Fault(Status(301, "PermanentRedirect")), {}, "region", "the bucket's region"),
        (Fault(Status(403, "SecondLevelDomainForbidden")), {}, "addressing", "write virtual"),
        (Fault(Status(400, "InvalidStorageClass"), "PUT"), {"storage_class": "COLD"}, "storage_class", "no such class"),
        (Fault(Status(501, "NotImplemented"), "PUT"), {"tags": "a=b"}, "tags", "leave it out"),
        (Fault(Status(501, "NotImplemented"), "POST"), {}, "checksums", "write off"),
        (Fault(Status(400, "MissingContentMD5"), "POST"), {}, "checksums", "write off"),
        (Fault(WrongBytes(3), "GET"), {}, "endpoint", "speak S3"),
        (Fault(WrongBytes(3), "GET"), {"checksums": "when_supported"}, "checksums", "write when_required"),
        (Fault(NeverAnswers()), {"read_timeout_s": 0.3}, "endpoint", "speak S3"),
        (Fault(ResetAfterBody(), "PUT"), {}, "endpoint", "speak S3"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(
    opened: Opener, proxy: FaultProxy, fault: Fault, options: dict[str, Any], field: str, advice: str
) -> None:
    proxy.script(fault)
    error = refusal(opened, **options)
    assert error.field == field
    assert advice in str(error)
    assert SECRET_ACCESS_KEY not in str(error)


@pytest.mark.parametrize("verb", ["HEAD", "GET", "POST"])
def test_a_probe_that_fails_half_way_leaves_nothing(opened: Opener, proxy: FaultProxy, s3_server: S3Server, bucket: str, verb: str) -> None:
    proxy.script(Fault(Status(403, "AccessDenied"), verb))
    refusal(opened)
    assert s3_server.objects(bucket) == {}


def test_a_put_whose_answer_was_lost_leaves_nothing(opened: Opener, proxy: FaultProxy, s3_server: S3Server, bucket: str) -> None:
    proxy.script(Fault(ResetAfterBody(), "PUT"))
    refusal(opened)
    assert s3_server.objects(bucket) == {}
    assert any(seen.method == "DELETE" for seen in proxy.requests), "there was an object to be removed"


def test_a_store_that_is_busy_is_asked_again(opened: Opener, proxy: FaultProxy) -> None:
    proxy.script(Fault(slow_down(), "PUT", times=2))
    opened()


def test_a_store_that_stays_busy_is_no_fault_of_the_configuration(opened: Opener, proxy: FaultProxy) -> None:
    proxy.script(Fault(slow_down(), "PUT"))
    with pytest.raises(ThrottledError, match="HTTP 503 SlowDown"):
        opened()


def test_nobody_there(opened: Opener) -> None:
    assert refusal(opened, endpoint="http://127.0.0.1:1").field == "endpoint"
    assert refusal(opened, endpoint="http://no-such-host.invalid").field == "endpoint"


def test_a_bucket_that_is_no_host(opened: Opener) -> None:
    error = refusal(opened, endpoint="http://no-such-host.invalid", addressing="virtual")
    assert error.field == "addressing"
    assert "write path" in str(error)


def test_a_server_that_is_no_store(opened: Opener) -> None:
    class Page(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer()

        do_PUT = do_HEAD = do_POST = do_DELETE = do_GET

        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = b"" if self.command == "HEAD" else b"<html><body>Welcome!</body></html>"
            self.send_response(200 if self.command != "PUT" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        error = refusal(opened, endpoint=f"http://127.0.0.1:{server.server_port}")
        assert error.field == "endpoint"
        assert "speak S3" in str(error)
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """Of 127.0.0.1, signed by itself; the key is in the same file."""
    key, cert, both = tmp_path / "key.pem", tmp_path / "cert.pem", tmp_path / "both.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True, timeout=250)
    both.write_text(key.read_text() + cert.read_text())
    return both


def test_certificates_are_verified(opened: Opener, s3_server: S3Server, certificate: Path, tmp_path: Path) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    proxy = FaultProxy(s3_server.endpoint, tls=context)
    try:
        error = refusal(opened, endpoint=proxy.endpoint)
        assert error.field == "ca_bundle"
        opened(endpoint=proxy.endpoint, ca_bundle=str(tmp_path / "cert.pem")).close()
        opened(endpoint=proxy.endpoint, verify_tls=False).close()
        assert refusal(opened, endpoint=proxy.endpoint.replace("https", "http")).field == "endpoint"
        assert refusal(opened, endpoint=s3_server.endpoint.replace("http", "https")).field == "endpoint"
    finally:
        proxy.stop()


class Store(ScriptedClient):
    """With habits that stores have: `ignores` conditions, or `rejects` them; `denies_misses`, as without the right to list."""

    checksums: Any = "when_required"
    ignores = denies_misses = False
    rejects: AttemptError | None = None

    async def put(self, key: str, memory: ItemMemory, create: bool) -> bool:
        if create and self.rejects is not None:
            raise self.rejects
        return await super().put(key, memory, create and not self.ignores)

    async def head(self, key: str) -> int | None:
        size_bytes = await super().head(key)
        if size_bytes is None and self.denies_misses:
            raise AttemptError(DeniedError("HTTP 403"), status=403, code="403")
        return size_bytes

    async def delete(self, keys: Sequence[str]) -> dict[str, BackendError | None]:
        return await super().delete(keys)


def probed(store: Store, **settings: Any) -> Store:
    asyncio.run(probe_store(store, "bucket", "kv", S3Settings(**settings)))
    return store


NOT_IMPLEMENTED = AttemptError(UnsupportedError("HTTP 501 NotImplemented"), status=501, code="NotImplemented")


@pytest.mark.parametrize(
    ("habits", "heeded"),
    [({}, True), ({"ignores": True}, False), ({"rejects": NOT_IMPLEMENTED}, False)],
)
def test_it_is_found_out_whether_conditions_are_heeded(habits: dict[str, Any], heeded: bool) -> None:
    store = Store()
    vars(store).update(habits)
    assert probed(store).conditional is heeded
    assert store.objects == {}


@pytest.mark.parametrize("habits", [{"ignores": True}, {"rejects": NOT_IMPLEMENTED}])
def test_conditions_that_must_be_heeded_and_are_not(habits: dict[str, Any]) -> None:
    store = Store()
    vars(store).update(habits)
    with pytest.raises(ConfigError):
        probed(store, conditional_writes="always")
    assert store.objects == {}


def test_conditions_that_are_not_wanted_are_not_tried() -> None:
    store = Store(conditional=False)
    store.rejects = AttemptError(InvalidError("asked for"), status=400)
    assert not probed(store, conditional_writes="never").conditional


def test_a_store_that_denies_what_is_missing_cannot_tell_a_miss() -> None:
    store = Store()
    store.denies_misses = True
    with pytest.raises(ConfigError, match="grant s3:ListBucket") as raised:
        probed(store)
    assert raised.value.field == "permission"
    assert store.objects == {}


def test_a_store_that_does_not_show_what_was_stored() -> None:
    class Late(Store):
        async def head(self, key: str) -> int | None:
            return None

    with pytest.raises(ConfigError, match="show at once what was stored") as raised:
        probed(Late())
    assert raised.value.field == "endpoint"
