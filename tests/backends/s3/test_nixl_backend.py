"""What only the engine NIXL promises, or could break: the requests it makes, the memory it leaves alone, the keys it signs with."""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_proxy import FaultProxy
from proxy_faults import Bandwidth, Delay, Fault, NeverAnswers, ResetBefore, Status, expired_token, slow_down
from s3_server import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY, S3Server

from kvstore_sdk.backend import (
    Buffer,
    ConfigError,
    Deadline,
    DeniedError,
    Get,
    GetStatus,
    Mode,
    Put,
    PutStatus,
    Region,
    ThrottledError,
    UnavailableError,
)
from kvstore_sdk_backends.s3 import nixl_backend
from kvstore_sdk_backends.s3.nixl_agent import NixlAgents
from kvstore_sdk_backends.s3.nixl_backend import NixlS3Backend

pytestmark = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")

SIZE = 300_001
RECORD = random.Random(7).randbytes(SIZE)
WAIT_S = 30.0


@pytest.fixture
def region() -> Iterator[Region]:
    made = Region(64 * SIZE)
    yield made
    made.close()


@pytest.fixture
def nixl(open_store: Callable[..., Any], proxy: FaultProxy) -> Iterator[NixlS3Backend]:
    backend: NixlS3Backend = open_store("nixl")
    proxy.reset()
    yield backend
    proxy.heal()
    backend.close()

    def is_over() -> bool:
        # What was left running repeats its requests, and would meet a proxy that is ending.
        NixlAgents._end_closed()
        return backend._agents.is_over

    until(is_over)


def soon(seconds: float = 20.0) -> Deadline:
    return Deadline.after(seconds)


def filled(region: Region, content: bytes = RECORD, row: int = 0) -> Buffer:
    buffer = region.buffer(row * SIZE, len(content))
    buffer.view[:] = content
    return buffer


def put(backend: NixlS3Backend, region: Region, name: str = "a", seconds: float = 20.0) -> Any:
    [result] = backend.put([Put(name, [filled(region)])], soon(seconds))
    return result


def get(backend: NixlS3Backend, region: Region, name: str = "a", seconds: float = 20.0) -> Any:
    filled(region, bytes(SIZE))
    [result] = backend.get([Get(name, [region.buffer(0, SIZE)])], soon(seconds))
    return result


def until(done: Callable[[], bool]) -> None:
    limit_s = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < limit_s, "it does not come to that"
        time.sleep(0.01)


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


def test_a_get_that_ended_leaves_its_memory_alone_although_the_bytes_still_come(
    nixl: NixlS3Backend, region: Region, proxy: FaultProxy
) -> None:
    put(nixl, region)
    proxy.script(Fault(Bandwidth(150_000), "GET"))
    started_s = time.monotonic()
    assert get(nixl, region, seconds=0.7).status is GetStatus.TIMED_OUT
    assert time.monotonic() - started_s < 0.7 + 0.5
    pattern = bytes([0xA5]) * SIZE
    filled(region, pattern)
    left = list(nixl._agents._left)
    assert left
    until(lambda: all(slot.state().value == "done" or slot._handle is None for slot in left))
    assert region.view[:SIZE] == pattern
    proxy.heal()
    assert get(nixl, region).status is GetStatus.FOUND


def test_a_put_that_was_sent_and_not_answered_is_unknown_and_one_that_was_not_sent_timed_out(
    nixl: NixlS3Backend, region: Region, proxy: FaultProxy
) -> None:
    proxy.script(Fault(NeverAnswers(), "PUT"))
    assert put(nixl, region, seconds=0.5).status is PutStatus.UNKNOWN
    assert put(nixl, region, seconds=-1).status is PutStatus.TIMED_OUT
    proxy.heal()
    assert put(nixl, region).status is PutStatus.STORED


@pytest.mark.parametrize(
    ("kind", "error"), [(slow_down(), ThrottledError), (Status(500), UnavailableError), (ResetBefore(), UnavailableError)]
)
def test_a_store_that_fails_all_the_time_is_told_before_the_deadline(
    nixl: NixlS3Backend, region: Region, proxy: FaultProxy, kind: Any, error: type[Exception]
) -> None:
    put(nixl, region)
    proxy.script(Fault(kind))
    found = get(nixl, region, seconds=8.0)
    assert found.status is GetStatus.FAILED
    assert isinstance(found.error, error)
    stored = put(nixl, region, "b", seconds=8.0)
    assert stored.status is PutStatus.UNKNOWN
    assert isinstance(stored.error, error)
    proxy.heal()
    assert put(nixl, region, "b").status is PutStatus.STORED
    assert get(nixl, region, "b").status is GetStatus.FOUND


def test_a_refusal_is_told_as_such(nixl: NixlS3Backend, region: Region, proxy: FaultProxy) -> None:
    put(nixl, region)
    proxy.script(Fault(Status(403, "AccessDenied")))
    found, stored = get(nixl, region), put(nixl, region)
    assert (found.status, stored.status) == (GetStatus.FAILED, PutStatus.FAILED)
    assert isinstance(found.error, DeniedError)
    assert isinstance(stored.error, DeniedError)


def test_one_item_that_hangs_does_not_keep_others_from_being_asked_again(nixl: NixlS3Backend, region: Region, proxy: FaultProxy) -> None:
    put(nixl, region, "hangs")
    proxy.script(Fault(NeverAnswers(), "GET", "hangs"))
    gets = [Get("hangs", [region.buffer(0, SIZE)]), Get("none", [region.buffer(SIZE, SIZE)])]
    found = nixl.get(gets, soon(1.5))
    assert [result.status for result in found] == [GetStatus.TIMED_OUT, GetStatus.MISSING]


def test_when_most_transfers_hang_the_client_does_the_work(open_store: Callable[..., Any], region: Region, proxy: FaultProxy) -> None:
    nixl = open_store("nixl", concurrency=2)
    put(nixl, region)
    proxy.script(Fault(NeverAnswers(), "GET", times=2))
    gets = [Get("a", [region.buffer(row * SIZE, SIZE)]) for row in range(2)]
    assert {result.status for result in nixl.get(gets, soon(0.5))} == {GetStatus.TIMED_OUT}
    started_s = time.monotonic()
    assert get(nixl, region).status is GetStatus.FOUND
    # NIXL's own time-out for those two is 3 s.
    assert time.monotonic() - started_s < 2.0


def test_close_ends_a_call_and_leaves_its_memory_alone(nixl: NixlS3Backend, region: Region, proxy: FaultProxy) -> None:
    put(nixl, region)
    proxy.script(Fault(Delay(3.0), "GET"))
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(get(nixl, region)))
    thread.start()
    until(lambda: any(seen.method == "GET" for seen in proxy.requests))
    started_s = time.monotonic()
    nixl.close()
    thread.join(WAIT_S)
    assert time.monotonic() - started_s < 5.0
    assert results[0].status is GetStatus.CLOSED
    filled(region, bytes(SIZE))
    proxy.heal()
    time.sleep(0.3)
    assert not any(region.view[:SIZE])
    assert get(nixl, region).status is GetStatus.CLOSED
    assert put(nixl, region).status is PutStatus.CLOSED


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
    monkeypatch.setattr("kvstore_sdk_backends.s3.s3fs_client.REFRESH_EVERY_S", 0.0)
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


def test_a_forked_child_is_refused_and_its_parent_goes_on(nixl: NixlS3Backend, region: Region) -> None:
    put(nixl, region)
    child = os.fork()
    if not child:
        status = 1
        try:
            refused = get(nixl, region).status is GetStatus.CLOSED and put(nixl, region).status is PutStatus.CLOSED
            nixl.close()
            status = 0 if refused else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    put(nixl, region, "b")
    assert get(nixl, region).status is GetStatus.FOUND


CHILD = """
import sys
from kvstore_sdk.backend import Deadline, Get, Put, Region
from kvstore_sdk_backends.s3 import open_s3

endpoint, location, key, secret = sys.argv[1:]
backend = open_s3(location, engine="nixl", endpoint=endpoint, region="us-east-1", addressing="path", access_key_id=key,
                  secret_access_key=secret, probe="off")
region = Region(1 << 20)
got = backend.get([Get("a", [region.buffer(0, 300_001)])], Deadline.after(0.5))
put = backend.put([Put("b", [region.buffer(0, 300_001)])], Deadline.after(0.5))
print(got[0].status.name, put[0].status.name)
"""


def test_a_process_that_never_closed_a_store_that_hangs_ends(proxy: FaultProxy, bucket: str) -> None:
    proxy.script(Fault(NeverAnswers()))
    command = [sys.executable, "-c", CHILD, proxy.endpoint, f"{bucket}/kv", ACCESS_KEY_ID, SECRET_ACCESS_KEY]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (found.returncode, found.stdout) == (0, "TIMED_OUT UNKNOWN\n"), found.stderr
    assert SECRET_ACCESS_KEY not in found.stderr


def test_the_keys_show_nowhere(nixl: NixlS3Backend, region: Region, proxy: FaultProxy, capfd: pytest.CaptureFixture[str]) -> None:
    proxy.script(Fault(Status(403, "SignatureDoesNotMatch")))
    found, stored = get(nixl, region), put(nixl, region)
    shown = f"{nixl!r} {nixl._agents!r} {found!r} {stored!r} {found.error!r} {stored.error!r} {capfd.readouterr()}"
    assert SECRET_ACCESS_KEY not in shown
    assert REGION
