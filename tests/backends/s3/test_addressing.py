"""Where the bucket is in a request: in the host name or in the path, whoever says so."""

from __future__ import annotations

import socket
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("s3fs")

from client_steps import KEY, Ask, asker, memory_of
from fault_proxy import FaultProxy
from proxy_faults import Fault, Status

from kvstore_sdk_backends.s3.client import AttemptError
from kvstore_sdk_backends.s3.s3fs_client import S3fsClient


@pytest.fixture
def ask(proxy: FaultProxy, bucket: str) -> Ask:
    """Runs a step with an open client that talks through the proxy."""
    return asker(proxy.endpoint, bucket)


@pytest.mark.parametrize(
    ("bucket_name", "options", "environment", "virtual"),
    [
        ("bucket", {}, {}, True),
        ("a.bucket", {}, {}, False),
        ("bucket", {"addressing": "path"}, {}, False),
        ("bucket", {"endpoint": "http://localhost:9"}, {}, False),
        ("bucket", {"endpoint": "http://localhost:9/bucket/key"}, {}, False),
        ("bucket", {"endpoint": "http://localhost:9", "addressing": "virtual"}, {}, True),
        ("bucket", {}, {"AWS_ENDPOINT_URL": "http://localhost:9"}, False),
        ("bucket", {}, {"AWS_ENDPOINT_URL_S3": "http://localhost:9"}, False),
        ("bucket", {"addressing": "virtual"}, {"AWS_ENDPOINT_URL": "http://localhost:9"}, True),
    ],
)
def test_where_the_bucket_goes_is_what_requests_do(
    bucket_name: str, options: dict[str, str], environment: dict[str, str], virtual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    given = {"region": "eu-central-1"} | options
    urls: list[str] = []

    def keep(request: Any, **_: Any) -> None:
        urls.append(request.url)
        raise ConnectionResetError

    async def step(client: S3fsClient) -> bool:
        session = client._sessions.now
        assert session is not None
        # The last that is asked before a request goes out; none does.
        session.client.meta.events.register("before-send.s3", keep)
        with pytest.raises(AttemptError):
            await client.head(KEY)
        return client.virtual

    assert asker(None, bucket_name)(step, **given) is virtual
    assert [str(urlsplit(url).hostname).startswith(f"{bucket_name}.") for url in urls] == [virtual]


def test_a_bucket_in_the_host_name_is_asked_for_there(ask: Ask, proxy: FaultProxy, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *more, **also: resolve("127.0.0.1" if "localhost" in str(host) else host, *more, **also)
    )
    proxy.script(Fault(Status(404, "NoSuchKey"), "GET"))
    endpoint = proxy.endpoint.replace("127.0.0.1", "localhost")
    assert ask(lambda client: client.get(KEY, memory_of(b"x")), endpoint=endpoint, addressing="virtual") is None
    [seen] = proxy.requests
    assert seen.path == f"/{KEY}"
    assert seen.headers["host"] == urlsplit(endpoint).netloc.replace("localhost", f"{bucket}.localhost")
