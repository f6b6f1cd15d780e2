"""What ends a child of the data plane, and what that costs: the child."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import threading
from collections.abc import Iterator

import pytest
from p2p_planes import LONG_S, MIB, Pair, is_gone, noise, stopped, target_of, unsent_bytes, until

from kvstore_sdk.backend import BackendError, Deadline, PutResult, PutStatus, UnavailableError

pytestmark = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")

SIZE = 64 * MIB


@pytest.fixture(scope="module")
def made() -> Iterator[Pair]:
    pair = Pair("tcp", SIZE)
    pair.records.view[:] = noise(SIZE, 1)
    yield pair
    pair.close()


@pytest.fixture
def pair(made: Pair) -> Pair:
    """Whatever a test before did to the children."""
    made.admit()
    return made


def blob_of(pair: Pair) -> tuple[bytes, list[tuple[int, int]]]:
    target = target_of(pair.asker)
    return target[1], [(base, size) for _, base, size in target[2]]


def kill(pid: int | None) -> None:
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def test_a_bent_blob_ends_the_child_that_loads_it_and_nothing_else(pair: Pair) -> None:
    """The first byte of UCX's address is its version, and one that it does not know aborts it."""
    agent, regions = blob_of(pair)
    at = agent.index(b"UCX|c") + len(b"UCX|c") + 8
    bent = agent[:at] + bytes([agent[at] ^ 0xFF]) + agent[at + 1 :]
    # Of a name of its own: the address of an agent that is known is not looked at again.
    bent = re.sub(rb"kvstore-p2p-[0-9a-f]{32}", b"kvstore-p2p-" + b"0" * 32, bent)
    with pair.dying(pair.owner), pytest.raises(BackendError):
        pair.owner.admit(b"bent", bent, regions, Deadline.after(LONG_S))
    with pytest.raises(UnavailableError, match="is not admitted"):
        pair.owner.send(b"bent", pair.pieces(1, MIB), Deadline.after(LONG_S))
    pair.admit()
    assert pair.works()


def test_blobs_that_are_no_agent_of_ours_are_not_loaded(pair: Pair) -> None:
    pid = pair.owner.pid
    for blob in (b"x", bytes(1000), noise(4096, 2), b"nixlSerDes|Agent("):
        with pytest.raises(BackendError, match="its metadata names no agent"):
            pair.owner.admit(b"odd", blob, [(4096, 4096)], Deadline.after(LONG_S))
    assert pair.owner.pid == pid
    assert pair.works()


def test_a_child_of_the_owner_that_dies_idle_is_made_up_for(pair: Pair) -> None:
    """Peers are not asked to say hello again."""
    assert pair.works()
    with pair.dying(pair.owner):
        kill(pair.owner.pid)
    assert pair.works()


def test_a_child_of_the_owner_that_dies_sending_answers_at_once_and_peers_have_to_come_again(pair: Pair) -> None:
    """It may have been that peer's doing: who crashes one child does not get the next one."""
    assert pair.works()
    answers: list[PutResult] = []
    with pair.dying(pair.owner), stopped(pair.asker.pid):
        sender = threading.Thread(target=lambda: answers.extend(pair.send(pair.pieces(64, MIB))))
        sender.start()
        until(lambda: unsent_bytes(pair.owner.pid) > 0, "it is on its way")
        kill(pair.owner.pid)
        sender.join(LONG_S)
    assert [answer.status for answer in answers] == [PutStatus.UNKNOWN] * 64
    with pytest.raises(UnavailableError, match="is not admitted"):
        pair.send(pair.pieces(1, MIB))
    pair.admit()
    assert pair.works()


def test_a_child_of_the_asker_that_dies_ends_what_is_sent_to_it_and_not_the_owners(pair: Pair) -> None:
    assert pair.works()
    owner = pair.owner.pid
    answers: list[PutResult] = []
    with pair.dying(pair.asker), stopped(pair.asker.pid):
        sender = threading.Thread(target=lambda: answers.extend(pair.send(pair.pieces(64, MIB))))
        sender.start()
        until(lambda: unsent_bytes(pair.owner.pid) > 0, "it is on its way")
        kill(pair.asker.pid)
        sender.join(LONG_S)
    assert [answer.status for answer in answers] == [PutStatus.UNKNOWN] * 64
    assert "the peer is gone" in str(answers[0].error)
    assert [result.status for result in pair.send(pair.pieces(1, MIB))] == [PutStatus.UNKNOWN]
    pair.admit()
    assert pair.works()
    assert pair.owner.pid == owner


def test_a_generation_is_over_when_its_child_is_gone_and_is_never_named_again(pair: Pair) -> None:
    seen = []
    for _ in range(2):
        pid, generation = pair.asker.pid, pair.asker.generation
        seen.append(generation)
        pair.asker.fence()
        until(lambda generation=generation: pair.asker.generation != generation, "the generation changes")
        assert is_gone(pid)
        seen.append(target_of(pair.asker)[0])
    assert seen == sorted(seen)
    assert len(set(seen)) == 3
    pair.admit()
    assert pair.works()


def test_a_child_that_came_up_while_nobody_looked_is_named_the_first_time(pair: Pair) -> None:
    """Peers would be told to write into the one before, and what it was to fill would be in doubt."""
    before = pair.asker.generation
    pair.asker.fence()
    until(lambda: pair.asker.child not in (0, before), "another child is up")
    assert pair.asker.generation == pair.asker.child
    pair.admit()
    assert pair.works()


def test_a_fence_of_ones_own_sends_peers_nowhere(pair: Pair) -> None:
    """The owner is an asker too, and takes its memory back; who it was sending to did nothing wrong."""
    assert pair.works()
    with pair.dying(pair.owner), stopped(pair.asker.pid):
        sender = threading.Thread(target=lambda: pair.send(pair.pieces(64, MIB)))
        sender.start()
        until(lambda: unsent_bytes(pair.owner.pid) > 0, "it is on its way")
        pair.owner.fence()
        sender.join(LONG_S)
    assert pair.works()


def test_sessions_that_come_and_go_leave_nothing_behind(pair: Pair) -> None:
    """As those of a peer do whose control connection breaks, while its child lives on."""

    def descriptors() -> int:
        return sum(len(os.listdir(f"/proc/{plane.pid}/fd")) for plane in (pair.owner, pair.asker))

    assert pair.works()
    before = descriptors()
    for _ in range(10):
        pair.admit()
        assert pair.works()
    until(lambda: descriptors() <= before, "as many descriptors as before")


def test_while_it_is_down_nothing_waits(pair: Pair) -> None:
    with pair.dying(pair.owner):
        pair.owner.fence()
        until(lambda: pair.owner.pid is None, "it is down")
        assert pair.owner.target() is None
        with pytest.raises(UnavailableError):
            pair.owner.send(pair.session, pair.pieces(1, MIB), Deadline.after(LONG_S))
        with pytest.raises(UnavailableError):
            pair.owner.admit(b"other", *blob_of(pair), Deadline.after(LONG_S))
