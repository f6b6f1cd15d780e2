"""A call costs as many round trips as its items need with all connections in use, and no request that nobody asked for."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from fault_proxy import FaultProxy
from proxy_faults import Delay, Fault
from s3_server import S3Server
from scripted_client import Calling

from kvstore_sdk.backend import Deadline, GetResult, GetStatus, Mode, PutResult, PutStatus

RECORD = random.Random(7).randbytes(4096)


def later() -> Deadline:
    return Deadline.after(100.0)


def at_once(proxy: FaultProxy, verb: str, count: int, call: Callable[[], Any]) -> Any:
    """What a call answers of which so many requests are under way before the first is answered."""
    proxy.reset()
    proxy.script(Fault(Delay(60.0), verb))
    calling = Calling(call)
    limit = Deadline.after(60.0)
    while proxy.peak_of(verb) < count and not limit.expired:
        time.sleep(0.01)
    proxy.heal()
    return calling.answer(60.0)


def fill(server: S3Server, bucket: str, names: list[str]) -> None:
    for name in names:
        server.client().put_object(Bucket=bucket, Key=f"kv/{name}", Body=RECORD)


def test_gets_wait_for_a_slow_store_together(store: Any, desk: Any, proxy: FaultProxy, s3_server: S3Server, bucket: str) -> None:
    """PERF-01: the pool is as large as the concurrency."""
    names = [f"r{number}" for number in range(64)]
    fill(s3_server, bucket, names)
    gets = [desk.get_item(name, len(RECORD)) for name in names]
    assert at_once(proxy, "GET", 64, lambda: store.get(gets, later())) == [GetResult(GetStatus.FOUND)] * 64
    assert proxy.peak_of("GET") == 64


def test_looking_waits_for_a_slow_store_over_as_many_connections_as_there_are(
    open_store: Callable[..., Any], proxy: FaultProxy, s3_server: S3Server, bucket: str
) -> None:
    """PERF-02: 256 names over 64 connections. Neither engine has a way of its own for this."""
    store = open_store("s3fs")
    names = [f"r{number}" for number in range(256)]
    fill(s3_server, bucket, names[::64])
    expected = [number % 64 == 0 for number in range(256)]
    assert at_once(proxy, "HEAD", 64, lambda: store.exists(names, later())) == expected
    assert (proxy.peak, proxy.peak_of("HEAD"), len(proxy.requests)) == (64, 64, 256)


@pytest.mark.parametrize("concurrency", [1, 7])
def test_calls_of_all_threads_share_the_concurrency_that_was_asked_for(
    open_store: Callable[..., Any], desk: Any, engine: str, concurrency: int, proxy: FaultProxy, s3_server: S3Server, bucket: str
) -> None:
    """CFG-08"""
    store = open_store(engine, concurrency=concurrency)
    names = [f"r{number}" for number in range(24)]
    fill(s3_server, bucket, names)
    proxy.reset()
    proxy.script(Fault(Delay(0.05)))
    gets = [desk.get_item(name, len(RECORD)) for name in names]
    results: list[GetResult] = []
    threads = [threading.Thread(target=lambda part=part: results.extend(store.get(gets[part::4], later()))) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert results == [GetResult(GetStatus.FOUND)] * 24
    assert proxy.peak == concurrency


def test_loads_do_not_wait_behind_puts_that_do_not_end(
    open_store: Callable[..., Any], engine: str, desk: Any, proxy: FaultProxy, s3_server: S3Server, bucket: str
) -> None:
    store = open_store(engine, concurrency=4)
    fill(s3_server, bucket, ["there"])
    proxy.reset()
    proxy.script(Fault(Delay(60.0), "PUT"))
    items = [desk.put_item(f"r{number}", RECORD) for number in range(12)]
    puts = Calling(lambda: store.put(items, later()))
    limit = Deadline.after(30.0)
    while proxy.peak_of("PUT") < 3 and not limit.expired:
        time.sleep(0.01)
    try:
        assert desk.get(store, "there", len(RECORD)) == (GetResult(GetStatus.FOUND), RECORD)
        assert store.exists(["there"], later()) == [True]
        assert not any(seen.status for seen in proxy.requests if seen.method == "PUT")
    finally:
        proxy.heal()
    assert puts.answer(60.0) == [PutResult(PutStatus.STORED)] * 12


def test_a_call_sends_what_it_needs_and_lists_nothing(store: Any, desk: Any, proxy: FaultProxy) -> None:
    """One request a record, and none that answers for the next."""
    names = [f"r{number}" for number in range(5)]

    def sent() -> dict[str, int]:
        counted = Counter(seen.method for seen in proxy.requests)
        assert not any(seen.lists or seen.query.startswith("list") for seen in proxy.requests)
        proxy.reset()
        return dict(counted)

    assert store.exists(names, later()) == [False] * 5
    assert sent() == {"HEAD": 5}
    assert {result.status for result in store.put([desk.put_item(name, RECORD) for name in names], later())} == {PutStatus.STORED}
    assert sent() == {"PUT": 5}
    assert store.exists(names, later()) == [True] * 5
    assert sent() == {"HEAD": 5}
    assert store.get([desk.get_item(name, len(RECORD)) for name in names], later()) == [GetResult(GetStatus.FOUND)] * 5
    again = sent()
    # A record of which NIXL cannot tell whether it was whole, one of 256, is asked for a second time.
    assert again.keys() == {"GET"}
    assert 5 <= again["GET"] <= 7


def test_nothing_that_was_seen_before_answers_for_what_is_there_now(store: Any, desk: Any, s3_server: S3Server, bucket: str) -> None:
    """RACE-11: another client writes, changes and deletes; no listing, no miss and no size of before is remembered."""
    client = s3_server.client()
    assert store.exists(["k"], later()) == [False]
    assert desk.get(store, "k", 3)[0] == GetResult(GetStatus.MISSING)
    assert store.list("", later()).entries == []
    client.put_object(Bucket=bucket, Key="kv/k", Body=b"abc")
    assert store.exists(["k"], later()) == [True]
    assert desk.get(store, "k", 3) == (GetResult(GetStatus.FOUND), b"abc")
    assert [entry.name for entry in store.list("", later()).entries] == ["k"]
    client.put_object(Bucket=bucket, Key="kv/k", Body=b"longer")
    assert desk.get(store, "k", 3)[0] == GetResult.wrong_size(6, 3)
    assert desk.get(store, "k", 6) == (GetResult(GetStatus.FOUND), b"longer")
    client.delete_object(Bucket=bucket, Key="kv/k")
    assert store.exists(["k"], later()) == [False]
    assert desk.get(store, "k", 6)[0] == GetResult(GetStatus.MISSING)
    assert store.list("", later()).entries == []


def test_creating_is_conditional_and_replacing_is_not(open_store: Callable[..., Any], desk: Any, proxy: FaultProxy) -> None:
    store = open_store("s3fs")
    proxy.reset()
    for mode in (Mode.CREATE, Mode.REPLACE, Mode.CREATE):
        desk.put(store, "k", b"abc", mode)
    assert [(seen.method, seen.headers.get("if-none-match"), seen.status) for seen in proxy.requests] == [
        ("PUT", "*", 200),
        ("PUT", None, 200),
        ("PUT", "*", 412),
    ]


def test_a_corrupt_object_is_replaced_although_creating_is_conditional(store: Any, desk: Any, s3_server: S3Server, bucket: str) -> None:
    s3_server.client().put_object(Bucket=bucket, Key="kv/k", Body=b"bad")
    assert desk.put(store, "k", b"good", Mode.REPLACE) == PutResult(PutStatus.STORED)
    assert s3_server.objects(bucket) == {"kv/k": b"good"}


def test_a_listing_of_more_than_a_thousand_is_paged(
    open_store: Callable[..., Any], desk: Any, proxy: FaultProxy, s3_server: S3Server, bucket: str
) -> None:
    """CAP-03: what lists is a tool, and it asks in pages of what S3 gives at once."""
    store = open_store("s3fs")
    names = [f"v1/{number % 7}/{number:04}" for number in range(1101)]
    for part in (names[:600], names[600:]):
        assert {result.status for result in store.put([desk.put_item(name, b"x") for name in part], later())} == {PutStatus.STORED}
    s3_server.client().put_object(Bucket=bucket, Key="kv-beside/v1/0/0", Body=b"x")
    proxy.reset()
    usage = store.usage(later())
    assert (usage.records, usage.used_bytes, usage.capacity_bytes) == (1101, 1101, None)
    assert len(proxy.requests) == 2
    seen, cursor = [], None
    for _ in range(30):
        page = store.list("", later(), cursor, 100)
        assert len(page.entries) <= 100
        seen += [entry.name for entry in page.entries]
        if (cursor := page.cursor) is None:
            break
    assert seen == sorted(names)
    assert [entry.name for entry in store.list("v1/3/", later()).entries] == sorted(name for name in names if name.startswith("v1/3/"))
