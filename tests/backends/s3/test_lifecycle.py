"""A store that is closed, or is not this process's, answers so at once and leaves nothing behind."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from forking import in_child
from scripted_client import Calling, ScriptedClient, store_over

from kvstore_sdk.backend import (
    BackendError,
    ClosedError,
    Deadline,
    Failure,
    GetStatus,
    PutStatus,
)
from kvstore_sdk_backends.s3.backend import S3Backend

SIZE = 1 << 20


@pytest.fixture
def client() -> ScriptedClient:
    return ScriptedClient()


@pytest.fixture
def store(client: ScriptedClient) -> Iterator[S3Backend]:
    with store_over(client, concurrency=4) as backend:
        yield backend


def threads_of_loops() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kvstore-s3-test")]


# Until it is closed


def test_closing_ends_the_calls_that_run_at_once_and_truly(client: ScriptedClient, store: S3Backend, desk: Any) -> None:
    client.hang = {"head", "get", "put"}
    far = Deadline.after(60)
    waiting = [desk.put_item(f"{number}", b"x") for number in range(8)]
    puts = Calling(lambda: store.put(waiting, far))
    assert client.began.wait(20)
    get = Calling(lambda: store.get([desk.get_item("a", 4)], far))
    exists = Calling(lambda: store.exists(["a"], far))
    while len(store._calls) < 3 or client.running < 4:
        time.sleep(0.001)
    begun_s = time.monotonic()
    store.close()
    assert time.monotonic() - begun_s < 20
    assert [result.status for result in puts.answer()] == [PutStatus.UNKNOWN] * 3 + [PutStatus.CLOSED] * 5
    assert get.answer()[0].status is GetStatus.CLOSED
    assert isinstance(exists.answer()[0].error, ClosedError)
    assert client.closed
    assert client.running == 0


def test_after_closing_every_call_is_refused(client: ScriptedClient, store: S3Backend, desk: Any) -> None:
    store.close()
    check_closed(store, desk)
    assert client.requests == []


def check_closed(store: S3Backend, desk: Any) -> None:
    soon = Deadline.after(30)
    assert desk.put(store, "a", b"x").status is PutStatus.CLOSED
    assert desk.get(store, "a", 1)[0].status is GetStatus.CLOSED
    for answers in (store.exists(["a"], soon), store.delete(["a"], soon)):
        assert isinstance(answers[0], Failure)
        assert isinstance(answers[0].error, ClosedError)
    with pytest.raises(ClosedError):
        store.list("", soon)
    with pytest.raises(ClosedError):
        store.usage(soon)


def test_closing_twice_and_from_many_threads_is_one_closing(store: S3Backend) -> None:
    closers = [threading.Thread(target=store.close) for _ in range(8)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join(20)
    store.close()
    assert not any(closer.is_alive() for closer in closers)
    assert threads_of_loops() == []


def test_closing_on_its_own_loop_does_not_wait_for_itself(client: ScriptedClient, store: S3Backend, desk: Any) -> None:
    client.objects["kv/a"] = b"x" * 10
    client.before_copy = store.close
    assert desk.get(store, "a", 10)[0].status is GetStatus.CLOSED
    store.close()
    assert threads_of_loops() == []


def test_a_signal_handler_may_close(client: ScriptedClient, store: S3Backend, desk: Any) -> None:
    client.hang = {"get"}
    before = signal.signal(signal.SIGALRM, lambda *_: store.close())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        assert desk.get(store, "a", 10)[0].status is GetStatus.CLOSED
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("fault", ["the loop stands still", "the client does not close"])
def test_closing_is_bounded(fault: str, client: ScriptedClient, desk: Any) -> None:
    client.hang = {"get"}
    client.close_hangs = fault == "the client does not close"
    if not client.close_hangs:
        client.stall = threading.Event()
    with store_over(client) as store:
        running = Calling(lambda: desk.get(store, "a", 4)[0])
        assert client.began.wait(20)
        begun_s = time.monotonic()
        store.close()
        assert time.monotonic() - begun_s < 20
        assert running.answer().status is GetStatus.CLOSED
        if client.stall is not None:
            client.stall.set()
        store.close()
    assert threads_of_loops() == []


@pytest.mark.parametrize("seed", range(10))
def test_closing_among_calls_answers_each_and_leaves_nothing(seed: int, client: ScriptedClient) -> None:
    rng = random.Random(seed)
    client.delay_s = 0.0005
    statuses: set[bool | type[BackendError]] = set()

    def call(store: S3Backend) -> None:
        while True:
            for answer in store.exists(["a", "b", "c"], Deadline.after(30)):
                statuses.add(type(answer.error) if isinstance(answer, Failure) else answer)
            if ClosedError in statuses:
                return

    with store_over(client) as store:
        calls = [Calling(lambda: call(store)) for _ in range(4)]
        time.sleep(rng.random() * 0.02)
        store.close()
        for one in calls:
            one.answer()
    assert statuses <= {False, ClosedError}
    assert store._calls == set()
    assert threads_of_loops() == []


def test_a_store_that_was_used_and_closed_leaves_no_thread_no_descriptor_and_no_memory(desk: Any) -> None:
    def life() -> list[weakref.ref[Any]]:
        client = ScriptedClient()
        client.hang = {"get"}
        with store_over(client) as store:
            desk.put(store, "a", b"x")
            store.get([desk.get_item("a", 1)], Deadline.after(0.01))
            store.exists(["a", "b"], Deadline.after(20))
        return [weakref.ref(thing) for thing in (client, store, store._loop)]

    life()
    gc.collect()
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    lived = [thing for _ in range(5) for thing in life()]
    gc.collect()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
    assert [thing() for thing in lived] == [None] * 15


# In a forked child


def test_a_forked_child_is_refused_at_once_and_its_parent_goes_on(client: ScriptedClient, store: S3Backend, desk: Any) -> None:
    """RACE-06"""
    client.objects["kv/a"] = b"x"
    assert desk.get(store, "a", 1)[0].status is GetStatus.FOUND

    def child() -> None:
        check_closed(store, desk)
        store.close()
        store.close()
        check_closed(store, desk)

    in_child(child)
    assert desk.get(store, "a", 1)[0].status is GetStatus.FOUND
    assert desk.put(store, "b", b"x").status is PutStatus.STORED


def test_a_fork_while_calls_run_hangs_nobody(client: ScriptedClient, store: S3Backend, desk: Any) -> None:
    """RACE-06"""
    client.delay_s = 0.001
    stop = threading.Event()

    def call() -> int:
        count = 0
        while not stop.is_set():
            assert store.exists(["a", "b"], Deadline.after(20)) == [False, False]
            count += 1
        return count

    calls = [Calling(call) for _ in range(4)]
    for _ in range(20):
        in_child(lambda: (check_closed(store, desk), store.close()))
    stop.set()
    assert all(one.answer() > 0 for one in calls)


def test_a_child_does_not_log_what_its_parent_has_open(store: S3Backend, caplog: pytest.LogCaptureFixture) -> None:
    def child() -> None:
        store._loop._loop.call_exception_handler({"message": "Unclosed client session"})
        assert caplog.records == []

    in_child(child)
