"""How many transfers of NIXL run at a time, with how much memory, and when what they use ends."""

from __future__ import annotations

import importlib.util
import os
import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from fault_proxy import FaultProxy
from nixl_transfers import RECORD, SOON, WAIT_S, Memory, ended, making, parameters, read, taken, until, write
from proxy_faults import Bandwidth, Delay, Fault, NeverAnswers

from kvstore_sdk.backend import UnsupportedError
from kvstore_sdk_backends.s3 import nixl_agents
from kvstore_sdk_backends.s3.nixl_agent import Slot, State
from kvstore_sdk_backends.s3.nixl_agents import NixlAgents

# Importing it here would hide what the backend does when it is the first to import it.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")


@pytest.fixture
def make(proxy: FaultProxy, bucket: str) -> Iterator[Callable[[int], NixlAgents]]:
    with making(proxy, bucket) as make_it:
        yield make_it


@pytest.fixture
def agents(make: Callable[[int], NixlAgents]) -> NixlAgents:
    return make(4)


def test_as_many_transfers_run_at_a_time_as_there_are_slots(make: Callable[[int], NixlAgents], proxy: FaultProxy) -> None:
    agents = make(64)
    memory = Memory(RECORD[:1000])
    proxy.script(Fault(Delay(1.0), "PUT"))
    slots = [taken(agents) for _ in range(64)]
    assert agents.take("READ", 1) is None
    for number, slot in enumerate(slots):
        slot.begin("WRITE", f"{number}", memory.address, memory.size_bytes, SOON)
    assert [ended(slot) for slot in slots] == [State.DONE] * 64
    assert proxy.peak == 64


def test_a_slot_whose_transfer_was_left_is_free_when_that_is_over(agents: NixlAgents, proxy: FaultProxy) -> None:
    write(agents, "a", RECORD)
    proxy.script(Fault(NeverAnswers(), "GET"))
    memory = Memory(len(RECORD))
    for _ in range(3):
        slot = taken(agents)
        slot.begin("READ", "a", memory.address, memory.size_bytes, SOON)
        time.sleep(0.05)
        assert slot.state() is State.RUNNING
        slot.give_back(running=True)
    assert agents.is_held_up("WRITE")
    other = taken(agents)
    assert agents.take("READ", 1) is None
    other.give_back()
    proxy.heal()
    until(lambda: not agents.is_held_up("WRITE"))
    slots: set[Slot] = set()

    def have_all() -> bool:
        if slot := agents.take("READ", 1):
            slots.add(slot)
        return len(slots) == 4

    until(have_all)
    for slot in slots:
        slot.give_back()
    assert memory.content == bytes(len(RECORD))


def test_closed_ones_last_until_their_transfers_are_over(make: Callable[[int], NixlAgents], proxy: FaultProxy) -> None:
    agents = make(2)
    write(agents, "a", RECORD)
    # Five seconds for the whole of it.
    proxy.script(Fault(Bandwidth(60_000), "GET"))
    slot, idle = taken(agents), taken(agents)
    memory = Memory(len(RECORD))
    slot.begin("READ", "a", memory.address, memory.size_bytes, SOON)
    until(lambda: any(seen.method == "GET" for seen in proxy.requests))
    slot.give_back(running=True)
    agents.close()
    agents.close()
    assert agents.take("READ", 1) is None
    idle.give_back()
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


def test_the_memory_of_all_slots_is_bounded_and_goes_to_who_needs_it(
    make: Callable[[int], NixlAgents], monkeypatch: pytest.MonkeyPatch
) -> None:
    mib = 1 << 20
    monkeypatch.setattr(nixl_agents, "MAX_STAGED_SUM_BYTES", 4 * mib)
    agents = make(8)
    slots = [taken(agents, mib) for _ in range(4)]
    assert agents.take("READ", 1) is None
    assert not agents.is_held_up("WRITE")
    for slot in slots:
        slot.give_back()
    large = taken(agents, 2 * mib + 1)
    assert [slot.room_bytes for slot in slots].count(mib) == 1
    assert agents.take("READ", 2 * mib) is None
    small = taken(agents, mib)
    assert small.room_bytes == mib
    assert large.room_bytes == 3 * mib
    large.give_back(running=True)
    assert taken(agents, 2 * mib).room_bytes == 3 * mib, "its transfer is over, if there was one"


def test_reads_do_not_wait_for_writes(make: Callable[[int], NixlAgents]) -> None:
    agents = make(16)
    reads = [taken(agents) for _ in range(16)]
    assert not agents.is_held_up("READ")
    for slot in reads[1:]:
        slot.give_back()
    for count in range(15):
        assert agents.take("WRITE", 1) is not None, count
    assert agents.is_held_up("READ")
    assert not agents.is_held_up("WRITE")


def test_memory_held_by_what_goes_on_for_long_holds_it_up(
    make: Callable[[int], NixlAgents], proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_agents, "MAX_STAGED_SUM_BYTES", 3 << 20)
    agents = make(8)
    proxy.script(Fault(NeverAnswers()))
    memory = Memory(RECORD)
    for _ in range(2):
        assert not agents.is_held_up("WRITE")
        slot = taken(agents)
        slot.begin("WRITE", "a", memory.address, memory.size_bytes, SOON)
        slot.give_back(running=True)
    assert agents.is_held_up("WRITE")
    proxy.heal()
    until(lambda: not agents.is_held_up("WRITE") and not agents._left)


def test_memory_that_is_idle_for_long_is_given_up_while_other_is_used(agents: NixlAgents, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = [taken(agents, 1) for _ in range(3)]
    for slot in slots:
        slot.give_back()
    assert write(agents, "a", RECORD) is State.DONE
    assert [bool(slot.room_bytes) for slot in slots] == [True, True, True]
    monkeypatch.setattr(nixl_agents, "IDLE_S", 0.0)
    for _ in range(3):
        assert write(agents, "a", RECORD) is State.DONE
    assert [bool(slot.room_bytes) for slot in slots] == [False, False, True]


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
