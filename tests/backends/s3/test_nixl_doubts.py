"""What the engine NIXL answers when its transfers fail, hang, or outlive their calls; and how long that takes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fault_proxy import FaultProxy
from nixl_store import RECORD, SIZE, WAIT_S, filled, get, put, soon, until
from proxy_faults import Bandwidth, Delay, Fault, NeverAnswers, ResetAfterBody, ResetBefore, Status, slow_down
from s3_server import ACCESS_KEY_ID, SECRET_ACCESS_KEY, S3Server

from kvstore_sdk.backend import (
    DeniedError,
    Get,
    GetStatus,
    Put,
    PutStatus,
    Region,
    ThrottledError,
    UnavailableError,
)
from kvstore_sdk_backends.s3 import nixl_backend
from kvstore_sdk_backends.s3.nixl_agent import Slot
from kvstore_sdk_backends.s3.nixl_backend import NixlS3Backend

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


def test_a_get_that_ended_leaves_its_memory_alone_although_the_bytes_still_come(
    nixl: NixlS3Backend, region: Region, proxy: FaultProxy
) -> None:
    put(nixl, region)
    # Five seconds for the whole of it.
    proxy.script(Fault(Bandwidth(60_000), "GET"))
    assert get(nixl, region, seconds=2.0).status is GetStatus.TIMED_OUT
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
    assert put(nixl, region, seconds=2.5).status is PutStatus.UNKNOWN
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
    found = get(nixl, region, seconds=20.0)
    assert found.status is GetStatus.FAILED
    assert isinstance(found.error, error)
    stored = put(nixl, region, "b", seconds=20.0)
    assert stored.status is PutStatus.UNKNOWN
    assert isinstance(stored.error, error)
    proxy.heal()
    assert put(nixl, region, "b").status is PutStatus.STORED
    assert get(nixl, region, "b").status is GetStatus.FOUND


def test_a_refusal_is_told_as_such(nixl: NixlS3Backend, region: Region, proxy: FaultProxy) -> None:
    put(nixl, region)
    proxy.script(Fault(Status(403, "AccessDenied")))
    found, stored = get(nixl, region), put(nixl, region)
    # NIXL does not say what became of its own request.
    assert (found.status, stored.status) == (GetStatus.FAILED, PutStatus.UNKNOWN)
    assert isinstance(found.error, DeniedError)
    assert isinstance(stored.error, DeniedError)


def test_a_put_that_is_refused_after_it_was_done_is_unknown(
    nixl: NixlS3Backend, region: Region, proxy: FaultProxy, s3_server: S3Server, bucket: str
) -> None:
    proxy.script(Fault(ResetAfterBody(), "PUT", times=1), Fault(Status(403, "AccessDenied"), "PUT"))
    stored = put(nixl, region)
    assert s3_server.objects(bucket) == {"kv/a": RECORD}
    assert stored.status is PutStatus.UNKNOWN
    assert isinstance(stored.error, DeniedError)


def test_a_batch_ends_at_its_deadline_however_long_it_takes_to_begin_its_transfers(
    nixl: NixlS3Backend, region: Region, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.script(Fault(NeverAnswers(), "PUT"))
    begin = Slot.begin

    def slowly(*args: Any) -> bool:
        time.sleep(0.7)
        return begin(*args)

    monkeypatch.setattr(Slot, "begin", slowly)
    puts = [Put(f"n{row}", [filled(region, row=row)]) for row in range(40)]
    statuses = [result.status for result in nixl.put(puts, soon(2.45))]
    assert set(statuses) == {PutStatus.UNKNOWN, PutStatus.TIMED_OUT}
    assert statuses.count(PutStatus.UNKNOWN) <= 4


def test_a_transfer_that_is_done_is_seen_while_others_are_begun(
    nixl: NixlS3Backend, region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    begin, give_back = Slot.begin, Slot.give_back

    def slowly(*args: Any) -> bool:
        time.sleep(0.05)
        order.append("begin")
        return begin(*args)

    def noted(slot: Slot, running: bool = False) -> None:
        order.append("end")
        give_back(slot, running)

    monkeypatch.setattr(Slot, "begin", slowly)
    monkeypatch.setattr(Slot, "give_back", noted)
    puts = [Put(f"n{row}", [filled(region, row=row)]) for row in range(20)]
    assert {result.status for result in nixl.put(puts, soon())} == {PutStatus.STORED}
    assert "end" in order[:20]


def test_transfers_that_are_well_are_not_asked_for(
    open_store: Callable[..., Any], region: Region, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_backend, "PATIENCE_S", 4.0)
    nixl = open_store("nixl", concurrency=2)
    proxy.reset()
    proxy.script(Fault(Delay(0.5), "PUT"))
    puts = [Put(f"n{row}", [filled(region, row=row)]) for row in range(20)]
    assert {result.status for result in nixl.put(puts, soon())} == {PutStatus.STORED}
    assert {seen.method for seen in proxy.requests} == {"PUT"}


def test_nobody_waits_while_the_store_is_asked(
    open_store: Callable[..., Any], region: Region, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_backend, "PATIENCE_S", 0.2)
    nixl = open_store("nixl", concurrency=2)
    proxy.reset()
    proxy.script(Fault(NeverAnswers(), "*", "slow"), Fault(Delay(0.2), "PUT"))
    puts = [Put(name, [filled(region, row=row)]) for row, name in enumerate(["slow", *(f"n{row}" for row in range(8))])]
    statuses = [result.status for result in nixl.put(puts, soon(6.0))]
    assert statuses == [PutStatus.UNKNOWN, *[PutStatus.STORED] * 8]
    assert [seen.method for seen in proxy.requests if "slow" in seen.path][:2] == ["PUT", "HEAD"]


def test_a_put_whose_store_cannot_say_what_is_the_matter_is_done_by_the_client(
    nixl: NixlS3Backend, region: Region, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_backend, "PATIENCE_S", 0.2)
    proxy.script(Fault(NeverAnswers(), "PUT", times=1), Fault(slow_down(), "HEAD"))
    started_s = time.monotonic()
    assert put(nixl, region).status is PutStatus.STORED
    assert time.monotonic() - started_s < 15.0


def test_one_item_that_hangs_does_not_keep_others_from_being_asked_again(nixl: NixlS3Backend, region: Region, proxy: FaultProxy) -> None:
    put(nixl, region, "hangs")
    proxy.script(Fault(NeverAnswers(), "GET", "hangs"))
    gets = [Get("hangs", [region.buffer(0, SIZE)]), Get("none", [region.buffer(SIZE, SIZE)])]
    found = nixl.get(gets, soon(4.0))
    assert [result.status for result in found] == [GetStatus.TIMED_OUT, GetStatus.MISSING]


def test_when_most_transfers_hang_the_client_does_the_work(open_store: Callable[..., Any], region: Region, proxy: FaultProxy) -> None:
    nixl = open_store("nixl", concurrency=2)
    put(nixl, region)
    proxy.script(Fault(NeverAnswers(), "GET", times=2))
    gets = [Get("a", [region.buffer(row * SIZE, SIZE)]) for row in range(2)]
    started_s = time.monotonic()
    assert {result.status for result in nixl.get(gets, soon(2.0))} == {GetStatus.TIMED_OUT}
    # NIXL's own time-out for those two is 3 s, and a machine that stands still may let them go by.
    assert nixl._agents.is_held_up("READ") or time.monotonic() - started_s > 3.0
    assert get(nixl, region).status is GetStatus.FOUND


def test_close_ends_a_call_and_leaves_its_memory_alone(nixl: NixlS3Backend, region: Region, proxy: FaultProxy) -> None:
    put(nixl, region)
    proxy.script(Fault(Delay(3.0), "GET"))
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(get(nixl, region)))
    thread.start()
    until(lambda: any(seen.method == "GET" for seen in proxy.requests))
    nixl.close()
    thread.join(WAIT_S)
    assert results[0].status is GetStatus.CLOSED
    filled(region, bytes(SIZE))
    proxy.heal()
    time.sleep(0.3)
    assert not any(region.view[:SIZE])
    assert get(nixl, region).status is GetStatus.CLOSED
    assert put(nixl, region).status is PutStatus.CLOSED


CHILD = """
import sys
from kvstore_sdk.backend import Deadline, Get, Put, Region
from kvstore_sdk_backends.s3 import open_s3

endpoint, location, key, secret = sys.argv[1:]
backend = open_s3(location, engine="nixl", endpoint=endpoint, region="us-east-1", addressing="path", access_key_id=key,
                  secret_access_key=secret, probe="off")
region = Region(1 << 20)
backend.register_region(region)
got = backend.get([Get("a", [region.buffer(0, 300_001)])], Deadline.after(0.5))
put = backend.put([Put("b", [region.buffer(0, 300_001)])], Deadline.after(3.0))
print(got[0].status.name, put[0].status.name)
"""


def test_a_process_that_never_closed_a_store_that_hangs_ends(proxy: FaultProxy, bucket: str) -> None:
    proxy.script(Fault(NeverAnswers()))
    command = [sys.executable, "-c", CHILD, proxy.endpoint, f"{bucket}/kv", ACCESS_KEY_ID, SECRET_ACCESS_KEY]
    found = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert (found.returncode, found.stdout) == (0, "TIMED_OUT UNKNOWN\n"), found.stderr
    assert SECRET_ACCESS_KEY not in found.stderr
