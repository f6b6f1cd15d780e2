"""Stores of one process with other credentials and endpoints never mix, whatever their engines, and whoever opened first."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_proxy import FaultProxy
from proxy_faults import Fault, Status
from s3_server import S3Server
from signatures import key_of, signed_with

from kvstore_sdk.backend import Deadline, DeniedError, GetResult, GetStatus, PutStatus

KEYS = {"one": ("AKIAONE", "secret/of+one"), "two": ("AKIATWO", "secret/of+two")}


@pytest.fixture
def other_proxy(s3_server: S3Server) -> Iterator[FaultProxy]:
    made = FaultProxy(s3_server.endpoint)
    yield made
    made.stop()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Credentials that nobody asked for, and two profiles that somebody may."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAENVIRONMENT")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret/of+environment")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    lines = [f"[{name}]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n" for name, (key, secret) in KEYS.items()]
    (tmp_path / "credentials").write_text("".join(lines))


def options_of(name: str, source: str) -> dict[str, Any]:
    if source == "profiles":
        return {"profile": name, "access_key_id": None, "secret_access_key": None}
    return dict(zip(("access_key_id", "secret_access_key"), KEYS[name], strict=True))


@pytest.mark.parametrize(
    ("engines", "source"), [(("s3fs", "s3fs"), "options"), (("nixl", "nixl"), "options"), (("s3fs", "nixl"), "profiles")]
)
def test_each_request_is_signed_with_its_own_key(
    engines: tuple[str, str],
    source: str,
    open_store: Callable[..., Any],
    desk: Any,
    proxy: FaultProxy,
    other_proxy: FaultProxy,
    s3_server: S3Server,
) -> None:
    if "nixl" in engines:
        pytest.importorskip("nixl")
    proxies = {"one": proxy, "two": other_proxy}
    stores, puts, gets, records = {}, {}, {}, {}
    for name, engine in zip(KEYS, engines, strict=True):
        bucket = s3_server.make_bucket(f"{name}-{random.randbytes(8).hex()}")
        stores[name] = open_store(engine, f"{bucket}/kv", endpoint=proxies[name].endpoint, **options_of(name, source))
        records[name] = [random.randbytes(5000) for _ in range(8)]
        puts[name] = [desk.put_item(f"r{number}", record) for number, record in enumerate(records[name])]
        gets[name] = [desk.get_item(f"r{number}", 5000) for number in range(8)]

    def use(name: str) -> None:
        store, deadline = stores[name], Deadline.after(30.0)
        for put in puts[name]:
            assert store.put([put], deadline)[0].status is PutStatus.STORED
        assert store.get(gets[name], deadline) == [GetResult(GetStatus.FOUND)] * 8
        assert store.exists(["r0", "none"], deadline) == [True, False]
        assert len(store.list("", deadline).entries) == 8
        store.delete(["r0", "r1"], deadline)

    threads = [threading.Thread(target=use, args=(name,)) for name in KEYS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    for name, (key, secret) in KEYS.items():
        seen = proxies[name].requests
        assert len(seen) > 20
        assert {key_of(one) for one in seen} == {key}
        assert [one.target for one in seen if not signed_with(one, secret)] == []
        assert [bytes(get.into[0].view) for get in gets[name]] == records[name]


def test_what_one_is_refused_says_nothing_of_the_other(
    open_store: Callable[..., Any], engine: str, proxy: FaultProxy, other_proxy: FaultProxy, desk: Any
) -> None:
    one = open_store(engine)
    two = open_store(engine, endpoint=other_proxy.endpoint)
    desk.put(one, "k", b"abc")
    proxy.script(Fault(Status(403, "InvalidAccessKeyId")))
    [answer] = one.exists(["k"], Deadline.after(10.0))
    assert isinstance(answer.error, DeniedError)
    assert two.exists(["k"], Deadline.after(10.0)) == [True]
    one.close()
    assert desk.get(two, "k", 3) == (GetResult(GetStatus.FOUND), b"abc")


def test_a_signature_is_told_from_another(open_store: Callable[..., Any], proxy: FaultProxy) -> None:
    """Else the test above would prove nothing."""
    store = open_store("s3fs", access_key_id="AKIAONE", secret_access_key="right")
    proxy.reset()
    store.exists(["a"], Deadline.after(10.0))
    [seen] = proxy.requests
    assert signed_with(seen, "right")
    assert not signed_with(seen, "wrong")
