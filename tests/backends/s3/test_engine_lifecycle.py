"""With each engine and a server: buffers are left alone, stores end in time, and forked children are refused."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from fault_proxy import FaultProxy
from proxy_faults import Bandwidth, Fault, NeverAnswers
from s3_server import S3Server
from scripted_client import Calling

from kvstore_sdk.backend import ClosedError, Deadline, Failure, Get, GetStatus, Mode, Put, PutStatus, Region

SIZE = 1 << 19
RECORDS = 4


def record(number: int) -> bytes:
    return random.Random(number).randbytes(SIZE)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_get_that_was_given_up_leaves_its_buffers_alone(store: Any, proxy: FaultProxy) -> None:
    """LEAK-06"""
    rng = random.Random(5)
    region = Region(RECORDS * SIZE)
    parts = [region.buffer(number * SIZE, SIZE) for number in range(RECORDS)]
    for number, part in enumerate(parts):
        part.view[:] = record(number)
    puts = [Put(f"{number}", (part,)) for number, part in enumerate(parts)]
    assert {result.status for result in store.put(puts, Deadline.after(30))} == {PutStatus.STORED}
    seen = set()
    for _ in range(6):
        # A record takes about as long as its call has.
        proxy.script(Fault(Bandwidth(rng.choice((4e6, 16e6, 64e6))), "GET"))
        gets = [Get(f"{number}", (part,)) for number, part in enumerate(parts)]
        results = store.get(gets, Deadline.after(rng.uniform(0.02, 0.3)))
        for number, result in enumerate(results):
            if result.status is GetStatus.FOUND:
                assert parts[number].view == record(number)
            seen.add(result.status)
        mine = rng.randbytes(4096) * (region.size_bytes // 4096)
        region.view[:] = mine
        proxy.heal()
        time.sleep(0.05)
        assert store.exists(["0"], Deadline.after(30)) == [True]
        assert region.view == mine
    assert GetStatus.TIMED_OUT in seen
    store.close()
    assert region.view == mine
    region.close()


def test_a_put_that_was_given_up_is_there_whole_or_not_at_all(store: Any, proxy: FaultProxy, s3_server: S3Server, bucket: str) -> None:
    """LEAK-06, ATM-06"""
    rng = random.Random(6)
    region = Region(RECORDS * SIZE)
    parts = [region.buffer(number * SIZE, SIZE) for number in range(RECORDS)]
    statuses = {}
    for turn in range(4):
        for number, part in enumerate(parts):
            part.view[:] = record(number)
        proxy.script(Fault(Bandwidth(rng.choice((8e6, 32e6))), "PUT"))
        puts = [Put(f"{turn}-{number}", (part,), Mode.REPLACE) for number, part in enumerate(parts)]
        for put, result in zip(puts, store.put(puts, Deadline.after(rng.uniform(0.02, 0.4))), strict=True):
            statuses[put.name] = result.status
        # What still goes out of these is no record any more.
        region.view[:] = b"\xff" * region.size_bytes
    proxy.heal()
    store.close()
    there = {key.removeprefix("kv/"): body for key, body in s3_server.objects(bucket).items()}
    for name, status in statuses.items():
        assert there.get(name) in (None, record(int(name[-1])))
        if status is PutStatus.STORED:
            assert name in there
        elif status is not PutStatus.UNKNOWN:
            assert name not in there
    region.close()


def test_closing_ends_calls_that_wait_for_a_store_that_never_answers(store: Any, desk: Any, proxy: FaultProxy) -> None:
    """LEAK-06"""
    proxy.script(Fault(NeverAnswers()))
    gets = [desk.get_item(f"{number}", 4096) for number in range(4)]
    puts = [desk.put_item(f"{number}", b"x" * 4096) for number in range(4)]
    far = Deadline.after(60)
    calls = [Calling(lambda: store.get(gets, far)), Calling(lambda: store.put(puts, far)), Calling(lambda: store.exists(["a"], far))]
    limit = Deadline.after(20)
    while proxy.peak < 9 and not limit.expired:
        time.sleep(0.01)
    begun_s = time.monotonic()
    store.close()
    got, stored, [exists] = (call.answer(20 - (time.monotonic() - begun_s)) for call in calls)
    assert time.monotonic() - begun_s < 20
    assert {result.status for result in got} == {GetStatus.CLOSED}
    # They went out, and nobody knows what became of them.
    assert {result.status for result in stored} == {PutStatus.UNKNOWN}
    assert isinstance(exists.error, ClosedError)


def test_a_store_that_was_closed_leaves_no_thread_and_no_descriptor(
    open_store: Callable[..., Any], engine: str, desk: Any, proxy: FaultProxy
) -> None:
    desk_item = desk.put_item("a", b"x" * 4096)

    def life() -> None:
        store = open_store(engine)
        store.put([desk_item], Deadline.after(30))
        store.exists([f"{number}" for number in range(20)], Deadline.after(30))
        proxy.script(Fault(NeverAnswers(), "HEAD"))
        assert isinstance(store.exists(["a"], Deadline.after(0.1))[0], Failure)
        proxy.heal()
        store.close()

    # Libraries open some things once and keep them.
    life()
    limit = Deadline.after(60)
    before = open_descriptors(), threading.active_count()
    for _ in range(3):
        life()
    gc.collect()
    # The proxy, in this process too, closes its ends when it sees ours closed; a thread that looked a name up ends by itself.
    while (open_descriptors() > before[0] or threading.active_count() > before[1]) and not limit.expired:
        time.sleep(0.01)
    assert open_descriptors() <= before[0]
    assert threading.active_count() <= before[1]


@pytest.mark.parametrize("end", ["closes", "forgets"])
def test_a_forked_child_is_refused_at_once_and_its_parent_goes_on(store: Any, desk: Any, proxy: FaultProxy, end: str) -> None:
    """RACE-06: with connections open, whether the child closes its copy or lets it go."""
    names = [f"{number}" for number in range(16)]
    assert desk.put(store, "a", b"x" * 4096).status is PutStatus.STORED
    assert store.exists(names, Deadline.after(30)) == [False] * 16
    child = os.fork()
    if not child:
        # Nothing may get back into pytest in this process.
        signal.alarm(60)
        try:
            begun_s = time.monotonic()
            [answer] = store.exists(["a"], Deadline.after(30))
            assert isinstance(answer, Failure)
            assert isinstance(answer.error, ClosedError)
            assert desk.get(store, "a", 4096)[0].status is GetStatus.CLOSED
            assert desk.put(store, "b", b"x").status is PutStatus.CLOSED
            if end == "closes":
                store.close()
            else:
                # Its client and its connections are nobody's any more.
                vars(store).clear()
            gc.collect()
            os._exit(0 if time.monotonic() - begun_s < 20 else 2)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status == 0
    proxy.reset()
    assert desk.get(store, "a", 4096)[0].status is GetStatus.FOUND
    assert desk.put(store, "b", b"x" * 4096).status is PutStatus.STORED
    assert store.exists(names, Deadline.after(30)) == [False] * 16
    # Each was asked once: no connection had been taken from under it.
    assert len([seen for seen in proxy.requests if seen.method == "HEAD"]) == 16
