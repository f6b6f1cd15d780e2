"""Transfers by NIXL, with an S3 server behind a proxy: what they bring, what they leave running, and how they end."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import random
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from fault_proxy import FaultProxy
from proxy_faults import Bandwidth, Delay, Fault, NeverAnswers, ResetBefore, ResetInsideBody, Status
from s3_server import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY, S3Server

from kvstore_sdk.backend import UnsupportedError
from kvstore_sdk_backends.s3.nixl_agent import MAX_STAGED_BYTES, NixlAgents, Slot, State

# Importing it here would hide what the backend does when it is the first to import it.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")

WAIT_S = 30.0
RECORD = random.Random(5).randbytes(300_001)


def parameters(endpoint: str, bucket: str) -> dict[str, str]:
    return {
        "access_key": ACCESS_KEY_ID,
        "secret_key": SECRET_ACCESS_KEY,
        "bucket": bucket,
        "endpoint_override": endpoint,
        "scheme": "http",
        "region": REGION,
        "req_checksum": "required",
    }


@pytest.fixture
def make(proxy: FaultProxy, bucket: str) -> Iterator[Callable[[int], NixlAgents]]:
    made: list[NixlAgents] = []

    def make_it(concurrency: int) -> NixlAgents:
        made.append(NixlAgents(parameters(proxy.endpoint, bucket), concurrency))
        return made[-1]

    yield make_it
    proxy.heal()
    for agents in made:
        agents.close()


@pytest.fixture
def agents(make: Callable[[int], NixlAgents]) -> NixlAgents:
    return make(4)


class Memory:
    """A record of the caller."""

    def __init__(self, content: bytes | int) -> None:
        self._buffer = ctypes.create_string_buffer(content, len(content) if isinstance(content, bytes) else content)
        self.address = ctypes.addressof(self._buffer)
        self.size_bytes = len(self._buffer)

    @property
    def content(self) -> bytes:
        return self._buffer.raw


def taken(agents: NixlAgents) -> Slot:
    slot = agents.take()
    assert slot is not None
    return slot


def until(done: Callable[[], bool]) -> None:
    limit_s = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < limit_s, "it does not come to that"
        time.sleep(0.005)


def ended(slot: Slot) -> State:
    found = State.RUNNING

    def is_over() -> bool:
        nonlocal found
        found = slot.state()
        return found is not State.RUNNING

    until(is_over)
    return found


def write(agents: NixlAgents, key: str, content: bytes) -> State:
    memory, slot = Memory(content), taken(agents)
    slot.begin("WRITE", key, memory.address, memory.size_bytes)
    state = ended(slot)
    agents.give_back(slot)
    return state


def read(agents: NixlAgents, key: str, size_bytes: int) -> bytes | State:
    """The record, or how the READ ended without one."""
    memory, slot = Memory(size_bytes), taken(agents)
    # A last byte that is not changed cannot be told from one that did not come: one READ in 256 says nothing.
    for _ in range(5):
        slot.begin("READ", key, memory.address, size_bytes)
        state = ended(slot)
        if state is State.DONE and slot.take_out(memory.address, size_bytes):
            agents.give_back(slot)
            return memory.content
    assert memory.content == bytes(size_bytes), "what is no record was copied"
    agents.give_back(slot)
    return state


def test_what_was_written_is_what_is_read(agents: NixlAgents, s3_server: S3Server, bucket: str, proxy: FaultProxy) -> None:
    sizes = (1, 5, 4096, 300_001, 3 << 20)
    for size_bytes in sizes:
        assert write(agents, f"kv/a=b+c/{size_bytes}", (RECORD * 11)[:size_bytes]) is State.DONE
        assert read(agents, f"kv/a=b+c/{size_bytes}", size_bytes) == (RECORD * 11)[:size_bytes]
    assert s3_server.objects(bucket) == {f"kv/a=b+c/{size_bytes}": (RECORD * 11)[:size_bytes] for size_bytes in sizes}
    assert sum(seen.method == "PUT" for seen in proxy.requests) == len(sizes)
    assert {seen.method for seen in proxy.requests} == {"PUT", "GET"}


@pytest.mark.parametrize("difference", [-300_000, -1, 1, 5000])
def test_an_object_of_another_length_is_no_record(agents: NixlAgents, difference: int) -> None:
    write(agents, "a", RECORD)
    assert read(agents, "a", len(RECORD) + difference) is State.DONE
    assert read(agents, "a", len(RECORD)) == RECORD


def test_what_is_not_there_fails_at_once_and_leaves_the_slot_fit(agents: NixlAgents) -> None:
    assert read(agents, "none", 100) is State.FAILED
    assert write(agents, "none", RECORD) is State.DONE
    assert read(agents, "none", len(RECORD)) == RECORD


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(Status(503, "SlowDown"), State.FAILED), (ResetInsideBody(1000), State.FAILED), (ResetBefore(), RECORD)],
    ids=["503", "cut", "reset"],
)
def test_bytes_of_a_failed_answer_never_end_up_in_a_record(
    agents: NixlAgents, proxy: FaultProxy, kind: Status | ResetInsideBody | ResetBefore, expected: State | bytes
) -> None:
    write(agents, "a", RECORD)
    proxy.script(Fault(kind, "GET", times=1))
    memory, slot = Memory(len(RECORD)), taken(agents)
    slot.begin("READ", "a", memory.address, memory.size_bytes)
    if isinstance(expected, State):
        # NIXL repeats it, and goes on behind what it has.
        assert ended(slot) is expected
        assert memory.content == bytes(len(RECORD))
    else:
        assert ended(slot) is State.DONE
    agents.give_back(slot)
    assert read(agents, "a", len(RECORD)) == RECORD


def test_as_many_transfers_run_at_a_time_as_there_are_slots(make: Callable[[int], NixlAgents], proxy: FaultProxy) -> None:
    agents = make(64)
    memory = Memory(RECORD[:1000])
    proxy.script(Fault(Delay(1.0), "PUT"))
    slots = [taken(agents) for _ in range(64)]
    assert agents.take() is None
    for number, slot in enumerate(slots):
        slot.begin("WRITE", f"{number}", memory.address, memory.size_bytes)
    assert [ended(slot) for slot in slots] == [State.DONE] * 64
    assert proxy.peak == 64


def test_a_slot_whose_transfer_was_left_is_free_when_that_is_over(agents: NixlAgents, proxy: FaultProxy) -> None:
    write(agents, "a", RECORD)
    proxy.script(Fault(NeverAnswers(), "GET"))
    memory = Memory(len(RECORD))
    for _ in range(3):
        slot = taken(agents)
        slot.begin("READ", "a", memory.address, memory.size_bytes)
        time.sleep(0.05)
        assert slot.state() is State.RUNNING
        agents.give_back(slot, running=True)
    assert agents.is_held_up()
    other = taken(agents)
    assert agents.take() is None
    agents.give_back(other)
    proxy.heal()
    until(lambda: not agents.is_held_up())
    slots: set[Slot] = set()

    def have_all() -> bool:
        if slot := agents.take():
            slots.add(slot)
        return len(slots) == 4

    until(have_all)
    for slot in slots:
        agents.give_back(slot)
    assert memory.content == bytes(len(RECORD))


def test_closed_ones_last_until_their_transfers_are_over(make: Callable[[int], NixlAgents], proxy: FaultProxy) -> None:
    agents = make(2)
    write(agents, "a", RECORD)
    proxy.script(Fault(Bandwidth(300_000), "GET"))
    slot, idle = taken(agents), taken(agents)
    memory = Memory(len(RECORD))
    slot.begin("READ", "a", memory.address, memory.size_bytes)
    until(lambda: any(seen.method == "GET" for seen in proxy.requests))
    agents.give_back(slot, running=True)
    started_s = time.monotonic()
    agents.close()
    agents.close()
    assert time.monotonic() - started_s < 0.5
    assert agents.take() is None
    agents.give_back(idle)
    assert not agents.is_over
    make(1).close()
    assert not agents.is_over
    assert memory.content == bytes(len(RECORD))

    def is_over() -> bool:
        # Whoever makes or closes others looks.
        make(1).close()
        time.sleep(0.1)
        return agents.is_over

    until(is_over)
    assert memory.content == bytes(len(RECORD))


def test_nothing_is_left_of_what_was_closed(make: Callable[[int], NixlAgents]) -> None:
    def counts() -> tuple[int, int]:
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    def use(agents: NixlAgents) -> None:
        for number in range(20):
            write(agents, f"{number}", RECORD)
            read(agents, f"{number}", len(RECORD))
            read(agents, "none", 10)
        agents.close()
        assert agents.is_over

    # The first one starts threads of the AWS SDK that stay with the process.
    use(make(30))
    before = counts()
    for _ in range(3):
        use(make(30))
    until(lambda: counts() <= before)


def test_threads_share_the_slots(make: Callable[[int], NixlAgents]) -> None:
    agents = make(8)
    failed: list[object] = []

    def use(number: int) -> None:
        content = random.Random(number).randbytes(10_000 + number)
        for turn in range(10):
            key = f"{number}-{turn % 3}"
            if write(agents, key, content) is not State.DONE or read(agents, key, len(content)) != content:
                failed.append(key)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not failed


def test_a_record_too_large_for_memory_fails_and_leaves_the_slot_fit(agents: NixlAgents) -> None:
    slot = taken(agents)
    slot.begin("READ", "a", 0, 1 << 50)
    assert slot.state() is State.FAILED
    agents.give_back(slot)
    assert write(agents, "a", RECORD) is State.DONE
    assert read(agents, "a", len(RECORD)) == RECORD
    assert MAX_STAGED_BYTES < 1 << 50


def test_what_cannot_be_made_says_so_without_the_keys(proxy: FaultProxy, bucket: str) -> None:
    with pytest.raises(UnsupportedError, match="plugin OBJ cannot be used") as told:
        NixlAgents(parameters(proxy.endpoint, bucket) | {"scheme": "gopher"}, 1)
    assert SECRET_ACCESS_KEY not in f"{told.value!r} {told.value.__cause__!r}"


CHILD = """
import ctypes, logging, sys, time
from kvstore_sdk_backends.s3.nixl_agent import NixlAgents, State

endpoint, bucket, verb, end = sys.argv[1:]
parameters = {"access_key": "a", "secret_key": "b", "bucket": bucket, "endpoint_override": endpoint, "region": "us-east-1"}
agents = NixlAgents(parameters, 3)
assert logging.raiseExceptions
memory = ctypes.create_string_buffer(100_000)
slots = [agents.take() for _ in range(3)]
for slot in slots:
    slot.begin(verb, "a", ctypes.addressof(memory), 100_000)
time.sleep(0.5)
assert [slot.state() for slot in slots] == [State.RUNNING] * 3
if end != "held":
    for slot in slots:
        agents.give_back(slot, running=True)
if end == "closed":
    agents.close()
"""


@pytest.mark.parametrize(("verb", "end"), [("READ", "held"), ("WRITE", "left"), ("WRITE", "closed")])
def test_a_process_ends_although_its_transfers_do_not(proxy: FaultProxy, bucket: str, s3_server: S3Server, verb: str, end: str) -> None:
    s3_server.client().put_object(Bucket=bucket, Key="a", Body=RECORD[:100_000])
    proxy.script(Fault(NeverAnswers()))
    command = [sys.executable, "-c", textwrap.dedent(CHILD), proxy.endpoint, bucket, verb, end]
    # NIXL itself holds on for one minute and more.
    found = subprocess.run(command, capture_output=True, text=True, timeout=40, check=False)
    assert (found.returncode, found.stdout) == (0, ""), found.stderr


def test_a_child_forked_while_agents_are_open_makes_none_and_harms_none(agents: NixlAgents, proxy: FaultProxy, bucket: str) -> None:
    write(agents, "a", RECORD)
    answer, answers = os.pipe()
    child = os.fork()
    if not child:
        try:
            NixlAgents(parameters(proxy.endpoint, bucket), 1)
        except UnsupportedError as error:
            os.write(answers, str(error).encode())
        finally:
            agents.close()
            os._exit(0)
    os.close(answers)
    with open(answer, "rb") as told:
        assert b"this process was forked from one that used it" in told.read()
    assert os.waitpid(child, 0)[1] == 0
    assert read(agents, "a", len(RECORD)) == RECORD
