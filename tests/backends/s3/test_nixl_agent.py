"""Transfers by NIXL, with an S3 server behind a proxy: what they bring, what they leave alone, and how they end."""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator

import pytest
from fault_proxy import FaultProxy
from nixl_transfers import RECORD, SOON, Memory, ended, making, parameters, read, taken, write
from proxy_faults import Fault, NeverAnswers, ResetBefore, ResetInsideBody, Status
from s3_server import SECRET_ACCESS_KEY, S3Server

from kvstore_sdk.backend import Deadline, UnsupportedError
from kvstore_sdk_backends.s3 import nixl_agent
from kvstore_sdk_backends.s3.nixl_agent import State
from kvstore_sdk_backends.s3.nixl_agents import NixlAgents
from kvstore_sdk_backends.s3.staging import Staging

# Importing it here would hide what the backend does when it is the first to import it.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")


@pytest.fixture
def make(proxy: FaultProxy, bucket: str) -> Iterator[Callable[[int], NixlAgents]]:
    with making(proxy, bucket) as make_it:
        yield make_it


@pytest.fixture
def agents(make: Callable[[int], NixlAgents]) -> NixlAgents:
    return make(4)


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
    slot.begin("READ", "a", memory.address, memory.size_bytes, SOON)
    if isinstance(expected, State):
        # NIXL repeats it, and goes on behind what it has.
        assert ended(slot) is expected
        assert memory.content == bytes(len(RECORD))
    else:
        assert ended(slot) is State.DONE
    slot.give_back()
    assert read(agents, "a", len(RECORD)) == RECORD


def test_without_memory_nothing_is_sent_and_the_slot_stays_fit(
    agents: NixlAgents, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object) -> Staging:
        raise OSError("cannot allocate memory")

    memory = Memory(RECORD)
    slot = taken(agents)
    with monkeypatch.context() as patched:
        patched.setattr(nixl_agent, "Staging", no_memory)
        assert not slot.begin("READ", "a", memory.address, memory.size_bytes, SOON)
    slot.give_back()
    late = taken(agents)
    assert not late.begin("WRITE", "a", memory.address, memory.size_bytes, Deadline.after(-1))
    late.give_back()
    assert not proxy.requests
    assert write(agents, "a", RECORD) is State.DONE
    assert read(agents, "a", len(RECORD)) == RECORD


def test_memory_that_cannot_tell_any_more_ends_its_use(
    agents: NixlAgents, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(agents, "a", RECORD)
    slot = taken(agents)
    libc = ctypes.CDLL(None, use_errno=True)
    assert slot._staging is not None
    guard = ctypes.c_void_p(slot._staging._guard)
    if libc.mlock(guard, 1):
        pytest.skip("this process may lock no memory")
    memory = Memory(len(RECORD))
    slot.begin("READ", "a", memory.address, memory.size_bytes, SOON)
    assert ended(slot) is State.DONE
    assert not slot.take_out(memory.address, memory.size_bytes, SOON)
    assert not slot.room_bytes
    slot.give_back()
    assert not agents.is_held_up("WRITE")
    monkeypatch.setattr(Staging, "works", lambda _: False)
    other = taken(agents)
    assert not other.begin("READ", "a", memory.address, memory.size_bytes, SOON)
    other.give_back()
    assert agents.is_held_up("WRITE")
    assert agents.take("READ", 1) is None
    assert "mlockall" in caplog.text


def test_what_cannot_be_made_says_so_without_the_keys(proxy: FaultProxy, bucket: str) -> None:
    with pytest.raises(UnsupportedError, match="plugin OBJ cannot be used") as told:
        NixlAgents(parameters(proxy.endpoint, bucket, scheme="gopher"), 1)
    error, shown = told.value, repr(told.value)
    assert error.__context__ is None
    traceback = error.__traceback__
    while traceback:
        # What tools show that print the variables of every frame.
        shown += repr(traceback.tb_frame.f_locals)
        traceback = traceback.tb_next
    assert "NixlAgents" in shown
    assert SECRET_ACCESS_KEY not in shown


CHILD = """
import ctypes, logging, sys, time
from kvstore_sdk.backend import Deadline
from kvstore_sdk_backends.s3.nixl_agent import State
from kvstore_sdk_backends.s3.nixl_agents import NixlAgents

endpoint, bucket, verb, end = sys.argv[1:]
parameters = {"access_key": "a", "secret_key": "b", "bucket": bucket, "endpoint_override": endpoint, "region": "us-east-1"}
agents = NixlAgents(lambda: parameters, 3)
assert logging.raiseExceptions
memory = ctypes.create_string_buffer(100_000)
slots = [agents.take("READ", 100_000) for _ in range(3)]
for slot in slots:
    slot.begin(verb, "a", ctypes.addressof(memory), 100_000, Deadline.after(60))
time.sleep(0.5)
assert [slot.state() for slot in slots] == [State.RUNNING] * 3
if end != "held":
    for slot in slots:
        slot.give_back(running=True)
if end == "closed":
    agents.close()
"""


@pytest.mark.parametrize(("verb", "end"), [("READ", "held"), ("WRITE", "left"), ("WRITE", "closed")])
def test_a_process_ends_although_its_transfers_do_not(proxy: FaultProxy, bucket: str, s3_server: S3Server, verb: str, end: str) -> None:
    s3_server.client().put_object(Bucket=bucket, Key="a", Body=RECORD[:100_000])
    proxy.script(Fault(NeverAnswers()))
    command = [sys.executable, "-c", textwrap.dedent(CHILD), proxy.endpoint, bucket, verb, end]
    # NIXL itself holds on for one minute and more.
    found = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert (found.returncode, found.stdout) == (0, ""), found.stderr
