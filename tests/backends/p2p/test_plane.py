"""Records go from the memory of one node into that of another one, and nowhere else."""

from __future__ import annotations

import importlib.util
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from p2p_planes import LISTENING, LONG_S, MIB, Pair, cpu_s, is_gone, noise, sockets_of, stopped, target_of, until, wake_ups

from kvstore_sdk.backend import BackendError, Deadline, InvalidError, PutResult, PutStatus, Region, UnavailableError, UnsupportedError
from kvstore_sdk_backends.p2p.plane import LOOPBACK_TLS, Plane

pytestmark = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")

SIZE = 32 * MIB


@pytest.fixture(scope="module", params=["tcp", LOOPBACK_TLS])
def made(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(request.param, SIZE)
    yield pair
    pair.close()


@pytest.fixture
def pair(made: Pair) -> Pair:
    """Whatever a test before did to the children."""
    made.admit()
    made.slots.view[:] = bytes(SIZE)
    return made


over_tcp = pytest.mark.parametrize("made", ["tcp"], indirect=True)
over_cma = pytest.mark.parametrize("made", [LOOPBACK_TLS], indirect=True)


def test_what_is_stored_has_landed_and_no_other_byte_has_changed(pair: Pair) -> None:
    pair.records.view[:] = noise(SIZE, 1)
    expected = bytearray(SIZE)
    pieces = []
    # Of any length, from anywhere to anywhere.
    for place, at, size in ((0, 3 * MIB, 1), (7, 4 * MIB + 5, 3 * MIB + 11), (9 * MIB, 9 * MIB, 16 * MIB), (31 * MIB, MIB, MIB - 1)):
        pieces.append((pair.records.buffer(place, size), pair.base + at))
        expected[at : at + size] = pair.records.view[place : place + size]
    results = pair.send(pieces)
    assert [result.status for result in results] == [PutStatus.STORED] * len(pieces)
    assert pair.slots.view == expected


def test_a_batch_larger_than_one_transfer_arrives_whole(pair: Pair) -> None:
    """16 MiB each, to the same place over and over: 128 MiB in all."""
    pair.records.view[:] = noise(SIZE, 2)
    results = pair.send(pair.pieces(1, 16 * MIB) * 8)
    assert {result.status for result in results} == {PutStatus.STORED}
    assert pair.slots.view[: 16 * MIB] == pair.records.view[: 16 * MIB]


def test_threads_that_send_at_a_time_get_their_own_records_over(pair: Pair) -> None:
    pair.records.view[:] = noise(SIZE, 3)
    seen: list[PutStatus] = []

    def work(lane: int) -> None:
        for _ in range(8):
            seen.extend(result.status for result in pair.send(pair.pieces(4, MIB, lane * 4 * MIB)))

    threads = [threading.Thread(target=work, args=(lane,)) for lane in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert seen == [PutStatus.STORED] * 8 * 8 * 4
    assert pair.slots.view == pair.records.view


def test_addresses_outside_what_the_peer_offered_are_refused_and_the_others_served(pair: Pair) -> None:
    pair.records.view[:] = noise(SIZE, 4)
    end = pair.base + SIZE
    size = 4096
    outside = [0, 1, pair.base - size, pair.base - 1, end - size + 1, end, end + size, (1 << 63), (1 << 64) - size, (1 << 64) - 1]
    pieces = [(pair.records.buffer(0, size), address) for address in outside]
    pieces.insert(3, (pair.records.buffer(0, size), end - size))
    results = pair.send(pieces)
    [stored] = [results.pop(3)]
    assert stored.status is PutStatus.STORED
    assert {result.status for result in results} == {PutStatus.FAILED}
    assert {type(result.error) for result in results} == {InvalidError}
    assert "not in memory that" in str(results[0].error)
    assert not any(pair.slots.view[:-size])


def test_a_region_that_the_peer_has_not_is_no_reason_to_write_there(pair: Pair) -> None:
    """What a peer says of its memory has to be what its agent says too."""
    target = target_of(pair.asker)
    pid = pair.owner.pid
    pair.owner.drop(pair.session)
    for regions in ([(pair.base, SIZE + 4096)], [(pair.base, SIZE), (4096, 4096)], [(pair.base - 4096, SIZE)]):
        with pytest.raises(InvalidError, match="nixl does not take its metadata"):
            pair.owner.admit(b"greedy", target[1], regions, Deadline.after(LONG_S))
        with pytest.raises(UnavailableError, match="is not admitted"):
            pair.owner.send(b"greedy", pair.pieces(1, 4096), Deadline.after(LONG_S))
    assert pair.owner.pid == pid


@over_tcp
@pytest.mark.parametrize(
    ("agent", "regions"),
    [
        (b"", [(4096, 4096)]),
        (bytes(65537), [(4096, 4096)]),
        (b"x", []),
        (b"x", [(4096, 4096)] * 65),
        (b"x", [(0, 4096)]),
        (b"x", [(4096, 0)]),
        (b"x", [(4096, -1)]),
        (b"x", [((1 << 64) - 4096, 8192)]),
    ],
)
def test_a_peer_out_of_bounds_does_not_get_as_far_as_the_child(pair: Pair, agent: bytes, regions: list[tuple[int, int]]) -> None:
    with pytest.raises(InvalidError, match="p2p: admit"):
        pair.owner.admit(b"odd", agent, regions, Deadline.after(LONG_S))


def test_two_peers_cannot_be_the_same_agent(pair: Pair) -> None:
    """Or one could have records written where the other one keeps something else."""
    target = target_of(pair.asker)
    with pytest.raises(UnavailableError, match="an agent of another session"):
        pair.owner.admit(b"thief", target[1], [(pair.base, SIZE)], Deadline.after(LONG_S))
    assert pair.works()


def test_who_was_dropped_is_written_to_no_more_and_may_come_back(pair: Pair) -> None:
    pair.owner.drop(pair.session)
    pair.owner.drop(pair.session)
    with pytest.raises(UnavailableError, match="is not admitted; its peer has to say hello again"):
        pair.send(pair.pieces(1, 4096))
    assert not any(pair.slots.view)
    pair.admit()
    assert pair.works()


def test_who_was_dropped_while_the_child_stood_still_may_come_back_in_another_session(pair: Pair) -> None:
    """A drop that the child does not do in time must not keep that peer out until the child ends."""
    child = pair.owner.generation
    with stopped(pair.owner.pid):
        pair.owner.drop(pair.session)
    pair.admit()
    assert pair.works()
    assert pair.owner.generation == child


def test_memory_that_was_not_announced_is_not_sent(pair: Pair) -> None:
    stranger = Region(4096)
    with pytest.raises(InvalidError, match="not registered"):
        pair.send([(stranger.buffer(0, 4096), pair.base)])
    stranger.close()


@over_tcp
def test_where_peers_may_write_changes_with_the_regions(pair: Pair) -> None:
    before = target_of(pair.asker)
    assert pair.asker.target() is before
    more = Region(MIB)
    try:
        pair.asker.add_region(more)
        pair.asker.add_region(more)
        both = target_of(pair.asker)
        assert [(region, size) for region, _, size in both[2]] == [(pair.slots, SIZE), (more, MIB)]
        assert (both[0], both[1] != before[1]) == (before[0], True)
        pair.asker.remove_region(more)
        pair.asker.remove_region(more)
        after = target_of(pair.asker)
        assert [region for region, _, _ in after[2]] == [pair.slots]
    finally:
        more.close()


@over_tcp
def test_without_shared_memory_allowed_nothing_reaches_a_child_that_stands_still(pair: Pair) -> None:
    """And what its deadline leaves in doubt is over when it goes on."""
    pair.records.view[:] = noise(SIZE, 5)
    pair.slots.view[:] = bytes(SIZE)
    results: list[PutResult] = []

    def begun() -> bool:
        results[:] = pair.send(pair.pieces(32, MIB), 1.0)
        return results[0].status is not PutStatus.TIMED_OUT

    with stopped(pair.asker.pid):
        # What the owner's child had no time to begin is not in doubt.
        until(begun, "a transfer begins")
        tickets = [result.ticket for result in results if result.ticket is not None]
        assert {result.status for result in results} == {PutStatus.IN_DOUBT}
        assert pair.owner.settle(tickets, Deadline.after(0.1)) == [False] * 32
        # Nor does it end with the session.
        pair.owner.drop(pair.session)
        assert pair.owner.settle(tickets, Deadline.after(0.1)) == [False] * 32
        assert pair.slots.view != pair.records.view
    assert pair.owner.settle(tickets, Deadline.after(LONG_S)) == [True] * 32
    until(lambda: pair.slots.view == pair.records.view, "what was in doubt has landed")


@over_cma
def test_shared_memory_is_used_where_it_is_allowed(pair: Pair) -> None:
    """Seen by what only a copy from process to process can: it reaches a child that stands still."""
    assert pair.works()
    with stopped(pair.asker.pid):
        assert pair.works()


def test_it_listens_on_loopback_alone_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UCX_TLS", "UCX_NET_DEVICES"):
        monkeypatch.setenv(name, "all")
    plane = Plane()
    region = Region(MIB)
    try:
        plane.add_region(region)
        target_of(plane)
        assert plane.pid is not None
        found = sockets_of(plane.pid)
        assert {address for protocol in found.values() for address, _, _ in protocol} == {"127.0.0.1"}
        assert [state for _, _, state in found["tcp"]].count(LISTENING) == 1
        # UCX's own shared memory, which any process of this user could open.
        assert "/dev/shm" not in Path(f"/proc/{plane.pid}/maps").read_text()
    finally:
        plane.close()
        region.close()


@over_tcp
def test_idle_it_costs_next_to_nothing_and_while_something_is_expected_more(pair: Pair) -> None:
    """Some 0.4 % of a core in either process. The second half shows that the first one could fail."""
    with pair.dying(pair.asker):
        pair.asker.fence()
    pid = pair.asker.pid
    assert pid is not None
    time.sleep(1.0)

    def used() -> list[float]:
        own = resource.getrusage(resource.RUSAGE_SELF)
        return [own.ru_nvcsw, wake_ups(pid), own.ru_utime + own.ru_stime, cpu_s(pid)]

    # A child that has just come up has work left, on a busy machine for seconds. What turns without an end is found in each stretch.
    for _ in range(5):
        began_s, before = time.monotonic(), used()
        time.sleep(4.0)
        after, took_s = used(), time.monotonic() - began_s
        # The seconds on a machine of any speed.
        costs = [(last - first) / took_s for first, last in zip(before, after, strict=True)]
        if idle := all(cost < most for cost, most in zip(costs, (100, 160, 0.02, 0.02), strict=True)):
            break
    assert idle, costs
    pair.asker.expect(time.monotonic() + LONG_S)
    woken = wake_ups(pid)
    until(lambda: wake_ups(pid) - woken > 3000, "what is expected is looked for")


def test_without_nixl_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="nixl is not installed; pip install 'kvstore-sdk"):
        Plane()


def test_transports_and_devices_that_are_not_there_are_refused_with_what_to_mend() -> None:
    with pytest.raises(UnsupportedError, match=r"p2p: nixl did not come up: .*UCX_TLS=tcp on none0; mend ucx_tls or ucx_devices"):
        Plane(tls="tcp", devices="none0")


def test_closed_it_refuses_at_once_and_leaves_no_process() -> None:
    plane = Plane()
    pid = plane.pid
    plane.close()
    plane.close()
    assert is_gone(pid)
    assert plane.target() is None
    until(lambda: plane.generation == 0, "no child is up")
    plane.expect(time.monotonic() + 1.0)
    plane.drop(b"session")
    with pytest.raises(BackendError):
        plane.admit(b"session", b"x", [(4096, 4096)], Deadline.after(LONG_S))
