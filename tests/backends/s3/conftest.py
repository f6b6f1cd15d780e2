"""A proxy that fails and a bucket of its own for each test, and stores behind them with every engine."""

from __future__ import annotations

import importlib.util
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fault_proxy import FaultProxy
from s3_server import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY, S3Server

_buckets = itertools.count()

ENGINES = ["s3fs", "nixl"]


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultProxy]:
    made = FaultProxy(s3_server.endpoint)
    yield made
    made.stop()


@pytest.fixture
def bucket(s3_server: S3Server) -> str:
    """The name of a bucket that nobody else uses."""
    return s3_server.make_bucket(f"test-{next(_buckets)}")


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    return name


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL runs here, as it does in the child process that it has otherwise: what runs there is looked into."""
    monkeypatch.setattr("kvstore_sdk_backends.s3.opening.in_child", lambda: True)


@pytest.fixture
def open_store(proxy: FaultProxy, bucket: str, in_this_process: None) -> Iterator[Callable[..., Any]]:
    """Opens `bucket/kv` through the proxy, or another location; whatever is opened is closed at the end."""
    from kvstore_sdk_backends.s3 import open_s3

    opened: list[Any] = []

    def open_it(engine: str, location: str = f"{bucket}/kv", **options: Any) -> Any:
        given = {"endpoint": proxy.endpoint, "access_key_id": ACCESS_KEY_ID, "secret_access_key": SECRET_ACCESS_KEY} | options
        opened.append(open_s3(location, engine=engine, region=REGION, addressing="path", **given))
        return opened[-1]

    yield open_it
    proxy.heal()
    for backend in opened:
        backend.close()
    # What NIXL left running repeats its requests, and would meet a proxy that is ending.
    limit_s = time.monotonic() + 30.0
    while any(not backend._agents.is_over for backend in opened if hasattr(backend, "_agents")):
        assert time.monotonic() < limit_s, "NIXL does not end"
        type(backend._agents)._end_closed()
        time.sleep(0.01)


@pytest.fixture
def store(open_store: Callable[..., Any], engine: str, proxy: FaultProxy) -> Any:
    """A store with each engine in turn. The proxy has forgotten how it was opened."""
    made = open_store(engine)
    proxy.reset()
    return made
