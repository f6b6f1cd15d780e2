"""Calls end by their deadline, whatever the store and the loop do, and then leave their buffers alone."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from scripted_client import Calling, Lost, ScriptedClient, refused, store_over

from kvstore_sdk.backend import (
    ClosedError,
    Deadline,
    Get,
    GetStatus,
    Mode,
    PutStatus,
    Region,
    TimedOutError,
)
from kvstore_sdk_backends.s3.backend import S3Backend
from kvstore_sdk_backends.s3.calls import Call

SIZE = 1 << 20
LATE_S = 10.0
"""On a machine with nothing else to do it is a millisecond, and the contract allows half a second; one that stands still takes longer.
What is waited for here never comes."""


@pytest.fixture
def client() -> ScriptedClient:
    return ScriptedClient()


@pytest.fixture
def store(client: ScriptedClient) -> Iterator[S3Backend]:
    with store_over(client, concurrency=4) as backend:
        yield backend


def late_calls(store: S3Backend, desk: Any, limit_s: float) -> tuple[list[Any], float]:
    """The answers of each kind of call, and how long after its deadline the latest of them returned."""
    calls: list[Callable[[Deadline], Any]] = [
        lambda deadline: store.exists(["a"], deadline)[0],
        lambda deadline: store.get([desk.get_item("a", 4)], deadline)[0],
        lambda deadline: store.put([desk.put_item("b", b"x")], deadline)[0],
        lambda deadline: store.delete(["a"], deadline)[0],
    ]
    answers, late_s = [], 0.0
    for call in calls:
        deadline = Deadline.after(limit_s)
        answers.append(call(deadline))
        late_s = max(late_s, time.monotonic() - deadline.at_s)
    return answers, late_s


def check_timed_out(answers: list[Any], put: PutStatus) -> None:
    exists, got, stored, deleted = answers
    assert isinstance(exists.error, TimedOutError)
    assert isinstance(deleted.error, TimedOutError)
    assert (got.status, stored.status) == (GetStatus.TIMED_OUT, put)


def test_calls_return_by_their_deadline_when_the_store_never_answers(client: ScriptedClient, store: S3Backend, desk: Any) -> None:
    client.hang = {"head", "get", "put", "delete"}
    answers, late_s = late_calls(store, desk, 0.1)
    assert late_s < LATE_S
    check_timed_out(answers, PutStatus.UNKNOWN)


def test_calls_return_by_their_deadline_when_the_loop_stands_still(client: ScriptedClient, store: S3Backend, desk: Any) -> None:
    client.stall = threading.Event()
    stalled = Calling(lambda: store.exists(["a"], Deadline.after(60.0)))
    assert client.began.wait(20)
    answers, late_s = late_calls(store, desk, 0.1)
    assert late_s < LATE_S
    # No request of theirs went out, so nothing is in doubt.
    check_timed_out(answers, PutStatus.TIMED_OUT)
    client.stall.set()
    stalled.answer()
    # And none goes out afterwards.
    client.stall = None
    assert store.exists(["b"], Deadline.after(20)) == [False]
    assert client.count("put") == 0
    assert client.objects == {}


def test_a_deadline_that_has_passed_asks_nothing(client: ScriptedClient, store: S3Backend, desk: Any) -> None:
    answers, _ = late_calls(store, desk, -1.0)
    check_timed_out(answers, PutStatus.TIMED_OUT)
    assert client.requests == []


def test_a_put_that_waits_for_its_turn_at_the_deadline_never_happened(client: ScriptedClient, store: S3Backend, desk: Any) -> None:
    client.hang = {"put"}
    puts = [desk.put_item(f"{number}", b"x") for number in range(10)]
    results = store.put(puts, Deadline.after(2.5))
    # Of four turns puts may have three.
    assert [result.status for result in results] == [PutStatus.UNKNOWN] * 3 + [PutStatus.TIMED_OUT] * 7
    client.hang = set()
    assert store.exists(["0"], Deadline.after(20)) == [False]
    assert client.count("put") == 3


def test_a_put_between_two_attempts_at_the_deadline_is_known_unless_an_answer_was_lost(desk: Any) -> None:
    client = ScriptedClient()
    client.fail("put", Lost(), key="kv/lost")
    client.fail("put", refused(), key="kv/refused")
    with store_over(client, retries=1) as store:
        store._requests._draw = lambda: 1e6
        for name in ("lost", "refused"):
            [result] = store.put([desk.put_item(name, b"x", Mode.REPLACE)], Deadline.after(30.0))
            # The gap does not fit, which is told at once.
            assert result.status is (PutStatus.UNKNOWN if name == "lost" else PutStatus.FAILED)
            assert result.error is not None


def test_items_that_are_done_at_the_deadline_keep_their_answers(client: ScriptedClient, store: S3Backend, desk: Any) -> None:
    client.objects["kv/a"] = b"aaaa"
    client.hang = {"put"}
    client.fail("get", *[refused(retry_after_s=1.0)] * 5, key="kv/slow")
    gets = [desk.get_item("a", 4), desk.get_item("slow", 4), desk.get_item("none", 4)]
    results = store.get(gets, Deadline.after(2.5))
    assert (results[0].status, results[2].status) == (GetStatus.FOUND, GetStatus.MISSING)
    assert results[1].status in (GetStatus.FAILED, GetStatus.TIMED_OUT)
    assert bytes(gets[0].into[0].view) == b"aaaa"


def test_what_is_asked_no_more_is_cancelled(client: ScriptedClient, store: S3Backend, desk: Any) -> None:
    client.hang = {"get"}
    store.get([desk.get_item(f"{number}", 4) for number in range(10)], Deadline.after(2.5))
    client.hang = set()
    # All turns are free again.
    assert store.exists(["a"] * 1, Deadline.after(20)) == [False]
    assert (client.running, client.cancelled) == (0, 4)


@pytest.mark.parametrize("seed", range(40))
def test_after_a_call_returned_nothing_touches_its_buffers(seed: int) -> None:
    """LEAK-06"""
    rng = random.Random(seed)
    client = ScriptedClient()
    client.objects = {f"kv/{number}": bytes([0xAA]) * SIZE for number in range(8)}
    pause_s = rng.random() * 0.0005
    client.before_copy = lambda: time.sleep(pause_s)
    region = Region(8 * SIZE)
    with store_over(client, concurrency=8) as store:
        gets = [Get(f"{number}", (region.buffer(number * SIZE, SIZE),)) for number in range(8)]
        results = store.get(gets, Deadline.after(rng.random() * 0.02))
        mine = rng.randbytes(16) * (8 * SIZE // 16)
        found = [index for index, result in enumerate(results) if result.status is GetStatus.FOUND]
        for index in found:
            assert region.view[index * SIZE : (index + 1) * SIZE] == client.objects[f"kv/{index}"]
        region.view[:] = mine
        # The loop comes to what was cancelled, and beyond.
        assert store.exists(["0"], Deadline.after(20)) == [True]
        assert region.view == mine
    assert region.view == mine
    region.close()


@pytest.mark.parametrize("seed", range(20))
def test_a_put_that_was_given_up_stores_the_record_or_nothing(seed: int, desk: Any) -> None:
    rng = random.Random(seed)
    client = ScriptedClient()
    pause_s = rng.random() * 0.001
    client.before_copy = lambda: time.sleep(pause_s)
    with store_over(client, concurrency=8) as store:
        puts = [desk.put_item(f"{number}", bytes([number]) * SIZE) for number in range(8)]
        results = store.put(puts, Deadline.after(rng.random() * 0.03))
        for put in puts:
            put.parts[0].view[:] = b"\xff" * SIZE
        assert store.exists(["x"], Deadline.after(20)) == [False]
    for number, result in enumerate(results):
        stored = client.objects.get(f"kv/{number}")
        assert stored in (None, bytes([number]) * SIZE)
        if result.status is PutStatus.STORED:
            assert stored is not None
        elif result.status is PutStatus.TIMED_OUT:
            assert stored is None


def test_a_wait_that_is_broken_off_gives_the_memory_back(client: ScriptedClient, store: S3Backend, desk: Any) -> None:
    client.hang = {"get"}

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            store.get([desk.get_item("a", 4)], Deadline.after(30))
    finally:
        signal.signal(signal.SIGALRM, before)
    client.hang = set()
    assert store.exists(["a"], Deadline.after(20)) == [False]
    assert client.running == 0
    assert store._calls == set()


@pytest.mark.parametrize("verb", ["get", "put", "exists", "delete", "list"])
def test_an_interrupt_before_the_wait_gives_the_memory_back(
    client: ScriptedClient, store: S3Backend, desk: Any, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """LEAK-06"""
    client.hang = {"head", "get", "put", "list"}
    begin = Call.begin

    def interrupted(call: Call[Any]) -> None:
        begin(call)
        assert client.began.wait(20)
        raise KeyboardInterrupt

    monkeypatch.setattr(Call, "begin", interrupted)
    far = Deadline.after(30)
    calls: dict[str, Callable[[], object]] = {
        "get": lambda: store.get([desk.get_item("a", 4)], far),
        "put": lambda: store.put([desk.put_item("a", b"aaaa")], far),
        "exists": lambda: store.exists(["a"], far),
        "delete": lambda: store.delete(["a"], far),
        "list": lambda: store.list("", far),
    }
    with pytest.raises(KeyboardInterrupt):
        calls[verb]()
    assert store._calls == set()
    monkeypatch.undo()
    client.hang = set()
    assert store.exists(["a"], Deadline.after(20)) == [False]
    assert (client.running, client.cancelled) == (0, 1)


# All at once


def test_all_gets_of_a_call_are_under_way_at_once(desk: Any) -> None:
    client = ScriptedClient()
    client.objects = {f"kv/{number}": b"x" for number in range(64)}
    client.delay_s = 0.05
    with store_over(client, concurrency=64) as store:
        results = store.get([desk.get_item(f"{number}", 1) for number in range(64)], Deadline.after(30))
    assert {result.status for result in results} == {GetStatus.FOUND}
    assert client.peak == 64


@pytest.mark.parametrize("stuck", ["put", "delete", "list"])
def test_loads_go_on_while_what_is_in_the_background_never_ends(client: ScriptedClient, store: S3Backend, desk: Any, stuck: str) -> None:
    client.objects = {"kv/a": b"aaaa"} | {f"kv/{number}": b"x" for number in range(20)}
    client.hang = {stuck}
    far = Deadline.after(60)
    puts = [desk.put_item(f"{number}", b"x", Mode.REPLACE) for number in range(20)]
    calls: dict[str, Callable[[], object]] = {
        "put": lambda: store.put(puts, far),
        "delete": lambda: store.delete(["0", "1"], far),
        "list": lambda: suppressing(lambda: store.list("", far)),
    }
    stuck_calls = [Calling(calls[stuck]) for _ in range(1 if stuck == "put" else 8)]
    limit = Deadline.after(20)
    while client.running < 3 and not limit.expired:
        time.sleep(0.001)
    assert desk.get(store, "a", 4)[0].status is GetStatus.FOUND
    assert store.exists(["a", "none"], Deadline.after(20)) == [True, False]
    assert client.running == 3
    store.close()
    for call in stuck_calls:
        call.answer()


def suppressing(step: Callable[[], object]) -> None:
    with suppress(ClosedError):
        step()


def test_calls_of_all_threads_share_the_limit(client: ScriptedClient, store: S3Backend) -> None:
    client.delay_s = 0.02
    calls = [Calling(lambda: store.exists(["a", "b", "c"], Deadline.after(30))) for _ in range(8)]
    assert [call.answer() for call in calls] == [[False] * 3] * 8
    assert client.peak == 4
