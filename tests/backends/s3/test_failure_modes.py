"""Ways in which other stores were seen to fail, with each engine and a server: half of a put, a dying writer, large records."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fault_proxy import FaultProxy, Seen
from proxy_faults import Bandwidth, Delay, Fault, Status
from s3_server import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY, S3Server
from scripted_client import Calling

from kvstore_sdk.backend import Deadline, Get, GetResult, GetStatus, Put, PutResult, PutStatus, Region

RECORD = random.Random(8).randbytes(1 << 19)
SLOW = Bandwidth(128e3)
"""Half a MiB takes 4 s. Nobody waits for that but a test which says so."""

WRITER = f"""
import random, sys
from kvstore_sdk.backend import Deadline, Put, Region, SupportsRegions
from kvstore_sdk_backends.s3 import open_s3

engine, location, endpoint = sys.argv[1:]
store = open_s3(location, engine=engine, endpoint=endpoint, region={REGION!r}, addressing="path", probe="off",
                access_key_id={ACCESS_KEY_ID!r}, secret_access_key={SECRET_ACCESS_KEY!r})
region = Region({len(RECORD)})
if isinstance(store, SupportsRegions):
    store.register_region(region)
buffer = region.buffer(0, {len(RECORD)})
buffer.view[:] = random.Random(9).randbytes({len(RECORD)})
store.put([Put("k", (buffer,))], Deadline.after(60))
"""


def later() -> Deadline:
    return Deadline.after(60.0)


def wait_for(there: Callable[[], bool], what: str) -> None:
    limit = Deadline.after(60.0)
    while not there():
        assert not limit.expired, f"no {what}"
        time.sleep(0.01)


def puts(proxy: FaultProxy) -> list[Seen]:
    return [seen for seen in proxy.requests if seen.method == "PUT"]


@pytest.fixture
def region() -> Iterator[Region]:
    made = Region(80 << 20)
    yield made
    made.close()


def test_half_a_record_is_not_there(store: Any, desk: Any, proxy: FaultProxy) -> None:
    """INT-07"""
    proxy.script(Fault(SLOW, "PUT", "kv/k"))
    item = desk.put_item("k", RECORD)
    writer = Calling(lambda: store.put([item], later()))
    wait_for(lambda: len(puts(proxy)) == 1, "put")
    for _ in range(5):
        assert store.exists(["k"], later()) == [False]
        assert desk.get(store, "k", len(RECORD))[0] == GetResult(GetStatus.MISSING)
        assert store.list("", later()).entries == []
    assert puts(proxy)[0].body_bytes == 0, "all of it had arrived, so nothing was shown"
    assert writer.answer(60) == [PutResult(PutStatus.STORED)]
    assert desk.get(store, "k", len(RECORD)) == (GetResult(GetStatus.FOUND), RECORD)


def test_a_name_whose_writer_died_half_way_can_be_stored_at_once(
    store: Any, desk: Any, engine: str, proxy: FaultProxy, s3_server: S3Server, bucket: str
) -> None:
    """ATM-06: nothing of the dead writer is in the way, and nothing of it stays."""
    proxy.script(Fault(SLOW, "PUT", "kv/k", 1))
    writer = subprocess.Popen([sys.executable, "-c", WRITER, engine, f"{bucket}/kv", proxy.endpoint])
    try:
        wait_for(lambda: len(puts(proxy)) == 1, "put")
    finally:
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait(30)
    assert puts(proxy)[0].body_bytes == 0, "all of it had arrived, so nothing was shown"
    assert store.exists(["k"], later()) == [False]
    assert desk.put(store, "k", RECORD) == PutResult(PutStatus.STORED)
    assert desk.get(store, "k", len(RECORD)) == (GetResult(GetStatus.FOUND), RECORD)
    assert s3_server.objects(bucket) == {"kv/k": RECORD}
    assert "Uploads" not in s3_server.client().list_multipart_uploads(Bucket=bucket)


@pytest.mark.parametrize("size", [(16 << 20) + 1, 65 << 20])
def test_a_large_record_is_one_put(store: Any, proxy: FaultProxy, region: Region, size: int) -> None:
    """CFG-01: no upload in parts, which some stores do not know, and which can be left behind half done."""
    proxy.script(Fault(Status(501, "NotImplemented"), "POST"))
    record = random.Random(size).randbytes(4096) * (size // 4096 + 1)
    buffer = region.buffer(0, size)
    buffer.view[:] = record[:size]
    [stored] = store.put([Put("k", (buffer,))], later())
    whole = [seen for seen in puts(proxy) if seen.body_bytes >= size]
    # Where the machine stands still for longer than a request may take it is sent again, and may be there.
    assert stored.status is PutStatus.STORED or (stored.status is PutStatus.EXISTS and len(puts(proxy)) > 1)
    assert whole
    assert {seen.query for seen in proxy.requests} == {""}
    assert "POST" not in {seen.method for seen in proxy.requests}
    buffer.view[:] = bytes(size)
    assert store.get([Get("k", (buffer,))], later()) == [GetResult(GetStatus.FOUND)]
    assert buffer.view == record[:size]


def test_as_many_threads_as_the_pool_has_connections_are_served_at_once(
    store: Any, desk: Any, proxy: FaultProxy, s3_server: S3Server, bucket: str
) -> None:
    """PERF-01: each has a request under way before the first is answered."""
    s3_server.client().put_object(Bucket=bucket, Key="kv/k", Body=RECORD[:4096])
    proxy.script(Fault(Delay(60.0), "GET"))
    items = [desk.get_item("k", 4096) for _ in range(64)]
    calls = [Calling(lambda item=item: store.get([item], later())) for item in items]  # type: ignore[misc]
    try:
        wait_for(lambda: proxy.peak_of("GET") == 64, "64 gets at one time")
    finally:
        proxy.heal()
    assert [call.answer(60) for call in calls] == [[GetResult(GetStatus.FOUND)]] * 64
    assert all(item.into[0].view == RECORD[:4096] for item in items)


def test_closing_among_slow_puts_gives_their_memory_back(
    store: Any, region: Region, proxy: FaultProxy, s3_server: S3Server, bucket: str
) -> None:
    """LEAK-06: what is written to it afterwards is in no object, and no thread is left."""
    threads = threading.active_count()
    proxy.script(Fault(Bandwidth(1e6), "PUT"))
    parts = [region.buffer(number * len(RECORD), len(RECORD)) for number in range(8)]
    for part in parts:
        part.view[:] = RECORD
    writer = Calling(lambda: store.put([Put(f"{number}", (part,)) for number, part in enumerate(parts)], later()))
    wait_for(lambda: len(puts(proxy)) == 8, "8 puts at one time")
    store.close()
    region.view[:] = b"\xff" * region.size_bytes
    results = writer.answer()
    # They were sent, and nobody knows what becomes of them.
    assert {result.status for result in results} <= {PutStatus.UNKNOWN, PutStatus.STORED}
    assert PutStatus.UNKNOWN in {result.status for result in results}
    wait_for(lambda: threading.active_count() < threads, "end of the thread")
    wait_for(lambda: all(seen.ended_s for seen in puts(proxy)), "end of the requests")
    assert set(s3_server.objects(bucket).values()) <= {RECORD}
