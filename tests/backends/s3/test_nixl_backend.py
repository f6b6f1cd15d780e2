"""What only the engine NIXL promises, or could break: the requests it makes, the memory it leaves alone, the keys it signs with."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_proxy import FaultProxy
from nixl_store import RECORD, SIZE, WAIT_S, filled, get, put, soon, until
from proxy_faults import Delay, Fault, Status, expired_token
from s3_server import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY, S3Server

from kvstore_sdk.backend import (
    ConfigError,
    Get,
    GetStatus,
    Mode,
    Put,
    PutStatus,
    Region,
)
from kvstore_sdk_backends.s3 import nixl_backend
from kvstore_sdk_backends.s3.nixl_backend import NixlS3Backend
from kvstore_sdk_backends.s3.staging import Staging

pytestmark = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")


@pytest.fixture
def region() -> Iterator[Region]:
    made = Region(64 * SIZE)
    yield made
    made.close()


@pytest.fixture
def nixl(open_store: Callable[..., Any], proxy: FaultProxy) -> NixlS3Backend:
    backend: NixlS3Backend = open_store("nixl")
    proxy.reset()
    return backend


def test_auto_takes_nixl_where_it_is_there(open_store: Callable[..., Any]) -> None:
    assert isinstance(open_store("auto"), NixlS3Backend)


def test_a_put_is_one_request_and_a_get_is_one(nixl: NixlS3Backend, region: Region, proxy: FaultProxy) -> None:
    assert put(nixl, region).status is PutStatus.STORED
    assert get(nixl, region).status is GetStatus.FOUND
    assert region.view[:SIZE] == RECORD
    # One get in 256 cannot tell, and asks again.
    assert [seen.method for seen in proxy.requests][:2] == ["PUT", "GET"]
    assert len(proxy.requests) <= 3
    assert all("NIXL" in seen.headers.get("user-agent", "") or "aws-sdk-cpp" in seen.headers["user-agent"] for seen in proxy.requests[:2])


def test_each_item_of_a_batch_has_its_own_answer(nixl: NixlS3Backend, region: Region) -> None:
    names = [f"n{row}" for row in range(40)]
    puts = [Put(name, [filled(region, RECORD[row:], row)]) for row, name in enumerate(names)]
    puts.insert(1, Put("../bad", [region.buffer(0, 10)]))
    puts.insert(2, Put("empty", [region.buffer(0, 0)]))
    assert [result.status for result in nixl.put(puts, soon())] == [PutStatus.STORED, PutStatus.FAILED, *[PutStatus.STORED] * 40]
    region.view[:] = bytes(region.size_bytes)
    gets = [Get(name, [region.buffer(row * SIZE, SIZE - row)]) for row, name in enumerate(names)]
    others = [Get("none", [region.buffer(50 * SIZE, 10)]), Get("n0", [region.buffer(51 * SIZE, SIZE - 1)]), Get("empty", [])]
    others += [Get("../bad", [region.buffer(0, 10)]), Get("n1", [region.buffer(52 * SIZE, SIZE)])]
    found = nixl.get([*others, *gets], soon())
    assert [result.status for result in found[:5]] == [
        GetStatus.MISSING,
        GetStatus.WRONG_SIZE,
        GetStatus.FOUND,
        GetStatus.FAILED,
        GetStatus.WRONG_SIZE,
    ]
    assert [(result.size_bytes, result.asked_bytes) for result in (found[1], found[4])] == [(SIZE, SIZE - 1), (SIZE - 1, SIZE)]
    assert {result.status for result in found[5:]} == {GetStatus.FOUND}
    assert all(region.view[row * SIZE : (row + 1) * SIZE - row] == RECORD[row:] for row in range(40))
    assert not any(region.view[50 * SIZE :])


def test_memory_of_any_kind_will_do(nixl: NixlS3Backend) -> None:
    # Nothing was announced: a region made after the backend, in the middle of it.
    other = Region(1 << 20)
    other.view[12_345 : 12_345 + SIZE] = RECORD
    assert nixl.put([Put("a", [other.buffer(12_345, SIZE)])], soon())[0].status is PutStatus.STORED
    assert nixl.get([Get("a", [other.buffer(54_321, SIZE)])], soon())[0].status is GetStatus.FOUND
    assert other.view[54_321 : 54_321 + SIZE] == RECORD
    other.close()


def test_two_stores_sign_with_their_own_keys_at_the_same_time(
    open_store: Callable[..., Any], proxy: FaultProxy, s3_server: S3Server, bucket: str
) -> None:
    other_proxy, other_bucket = FaultProxy(s3_server.endpoint), s3_server.make_bucket(f"{bucket}-other")
    try:
        one = open_store("nixl")
        other = open_store(
            "nixl", f"{other_bucket}/kv", endpoint=other_proxy.endpoint, access_key_id="AKIAOTHERKEY0000", session_token="tok"
        )
        regions = [Region(1 << 20), Region(1 << 20)]

        def use(backend: NixlS3Backend, region: Region) -> None:
            for turn in range(15):
                put(backend, region, f"{turn}")
                get(backend, region, f"{turn}")

        threads = [threading.Thread(target=use, args=pair) for pair in zip((one, other), regions, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        for seen_by, key, where in ((proxy, ACCESS_KEY_ID, bucket), (other_proxy, "AKIAOTHERKEY0000", other_bucket)):
            assert len(seen_by.requests) >= 30
            assert all(f"Credential={key}/" in seen.headers["authorization"] for seen in seen_by.requests)
            assert all(seen.path.startswith(f"/{where}") for seen in seen_by.requests)
        for region in regions:
            region.close()
    finally:
        other_proxy.stop()


def test_new_credentials_of_the_chain_are_taken_over(
    open_store: Callable[..., Any], proxy: FaultProxy, region: Region, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = tmp_path / "credentials"

    def renew(key: str) -> None:
        secrets.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {SECRET_ACCESS_KEY}\n")

    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(secrets))
    monkeypatch.setattr(nixl_backend, "CREDENTIALS_SOON_S", 0.0)
    monkeypatch.setattr("kvstore_sdk_backends.s3.current.RENEW_EVERY_S", 0.0)
    renew("AKIAFIRST0000000")
    nixl = open_store("nixl", access_key_id=None, secret_access_key=None)
    put(nixl, region)
    before = nixl._agents
    renew("AKIASECOND000000")
    # NIXL is refused, and so is the client, which finds the new ones.
    proxy.script(Fault(expired_token(), times=2))
    assert get(nixl, region).status is GetStatus.FOUND
    assert get(nixl, region).status is GetStatus.FOUND
    assert nixl._agents is not before
    assert before.is_over
    assert "Credential=AKIASECOND000000/" in proxy.requests[-1].headers["authorization"]
    assert "aws-sdk-cpp" in proxy.requests[-1].headers["user-agent"]


def test_a_batch_goes_on_with_new_credentials(
    open_store: Callable[..., Any], proxy: FaultProxy, region: Region, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = tmp_path / "credentials"

    def renew(key: str) -> None:
        secrets.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {SECRET_ACCESS_KEY}\n")

    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(secrets))
    renew("AKIAFIRST0000000")
    nixl = open_store("nixl", access_key_id=None, secret_access_key=None, concurrency=2)
    before = nixl._agents
    proxy.reset()
    proxy.script(Fault(Delay(0.2), "PUT"))
    results: list[Any] = []
    puts = [Put(f"n{row}", [filled(region, row=row)]) for row in range(20)]
    thread = threading.Thread(target=lambda: results.extend(nixl.put(puts, soon())))
    thread.start()
    until(lambda: len(proxy.requests) > 2)
    renew("AKIASECOND000000")
    nixl._loop.run("renew", nixl._s3fs.refresh_credentials, WAIT_S)
    monkeypatch.setattr(nixl_backend, "CREDENTIALS_EVERY_S", 0.0)
    get(nixl, region, "other")
    assert nixl._agents is not before
    thread.join(WAIT_S)
    assert {result.status for result in results} == {PutStatus.STORED}
    sent = [seen for seen in proxy.requests if seen.method == "PUT"]
    assert len(sent) == 20
    assert all("aws-sdk-cpp" in seen.headers["user-agent"] for seen in sent)
    assert "Credential=AKIASECOND000000/" in sent[-1].headers["authorization"]
    assert before.is_over


def test_creations_are_conditional_where_that_is_asked_for(open_store: Callable[..., Any], proxy: FaultProxy, region: Region) -> None:
    nixl = open_store("nixl", conditional_writes="always")
    proxy.reset()
    creation = Put("a", [filled(region)], Mode.CREATE)
    assert [nixl.put([creation], soon())[0].status for _ in range(2)] == [PutStatus.STORED, PutStatus.EXISTS]
    assert [seen.headers.get("if-none-match") for seen in proxy.requests] == ["*", "*"]
    assert put(nixl, region, mode=Mode.REPLACE).status is PutStatus.STORED
    assert "aws-sdk-cpp" in proxy.requests[-1].headers["user-agent"]


def test_records_wait_for_memory_where_there_is_too_little_for_all(
    nixl: NixlS3Backend, region: Region, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore_sdk_backends.s3.nixl_agents.MAX_STAGED_SUM_BYTES", 3 << 20)
    puts = [Put(f"n{row}", [filled(region, row=row)]) for row in range(12)]
    proxy.script(Fault(Delay(0.1), "PUT"))
    assert {result.status for result in nixl.put(puts, soon())} == {PutStatus.STORED}
    assert proxy.peak_of("PUT") == 3
    assert all("aws-sdk-cpp" in seen.headers["user-agent"] for seen in proxy.requests)


def test_what_memory_cannot_tell_any_more_the_client_does(
    nixl: NixlS3Backend, region: Region, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Staging, "works", lambda _: False)
    assert put(nixl, region).status is PutStatus.STORED
    assert get(nixl, region).status is GetStatus.FOUND
    assert region.view[:SIZE] == RECORD
    assert not any("aws-sdk-cpp" in seen.headers["user-agent"] for seen in proxy.requests)


def test_what_nixl_cannot_say_in_a_put_is_said_by_the_client(open_store: Callable[..., Any], proxy: FaultProxy, region: Region) -> None:
    nixl = open_store("nixl", storage_class="STANDARD_IA", tags="team=kv")
    proxy.reset()
    assert put(nixl, region).status is PutStatus.STORED
    assert proxy.requests[-1].headers["x-amz-storage-class"] == "STANDARD_IA"
    assert proxy.requests[-1].headers["x-amz-tagging"] == "team=kv"
    assert get(nixl, region).status is GetStatus.FOUND


def test_a_wrong_object_is_replaced_also_by_a_put_that_creates(
    nixl: NixlS3Backend, region: Region, s3_server: S3Server, bucket: str
) -> None:
    s3_server.client().put_object(Bucket=bucket, Key="kv/a", Body=b"corrupt")
    assert nixl.put([Put("a", [filled(region)], Mode.CREATE)], soon())[0].status is PutStatus.STORED
    assert s3_server.objects(bucket) == {"kv/a": RECORD}


def test_settings_that_nixl_cannot_follow_are_refused(open_store: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="engine: nixl always verifies certificates"):
        open_store("nixl", verify_tls=False)
    assert not isinstance(open_store("auto", verify_tls=False), NixlS3Backend)


def test_the_keys_show_nowhere(nixl: NixlS3Backend, region: Region, proxy: FaultProxy, capfd: pytest.CaptureFixture[str]) -> None:
    proxy.script(Fault(Status(403, "SignatureDoesNotMatch")))
    found, stored = get(nixl, region), put(nixl, region)
    shown = f"{nixl!r} {nixl._agents!r} {found!r} {stored!r} {found.error!r} {stored.error!r} {capfd.readouterr()}"
    assert SECRET_ACCESS_KEY not in shown
    assert REGION
