"""What the child does with states of NIXL that cannot be brought about at will; `p2p_scripted_nixl` stands in for it."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from p2p_planes import LONG_S, until
from p2p_scripted_nixl import ScriptedNixl

from kvstore_sdk.backend import Buffer, ConfigError, Deadline, InvalidError, Put, PutResult, PutStatus, Region, UnavailableError
from kvstore_sdk_backends.p2p import plane_names
from kvstore_sdk_backends.p2p.nixl_plane import open_plane
from kvstore_sdk_backends.p2p.plane import Plane

HERE, THERE, ELSEWHERE = 0x10000, 0x20000, 0x30000
"""Places in the peer's memory."""
MEMORY = [(0x10000, 0x30000)]
SIZE = 4096


@pytest.fixture
def nixl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedNixl:
    made = ScriptedNixl(tmp_path)
    monkeypatch.syspath_prepend(made.folder)
    return made


@pytest.fixture
def region() -> Iterator[Region]:
    made = Region(1 << 20)
    yield made
    made.close()


@pytest.fixture
def plane(nixl: ScriptedNixl, region: Region) -> Iterator[Plane]:
    made = Plane()
    made.add_region(region)
    yield made
    made.close()
    assert not nixl.overlapped


def agent(kind: str = "agent") -> tuple[str, bytes]:
    """The name of one, and its metadata."""
    name = f"kvstore-p2p-{uuid.uuid4().hex}"
    return name, f"{kind} {name}".encode()


def admit(plane: Plane, session: bytes = b"it") -> str:
    name, metadata = agent()
    plane.admit(session, metadata, MEMORY, Deadline.after(LONG_S))
    return name


def to(region: Region, *addresses: int) -> list[tuple[Buffer, int]]:
    return [(region.buffer(0, SIZE), address) for address in addresses]


def in_doubt(plane: Plane, region: Region, address: int) -> object:
    """The ticket of a transfer that was begun and has not ended in its time. One that the child had no time to begin is another's."""
    sent: list[PutResult] = []

    def begun() -> bool:
        sent[:] = plane.send(b"it", to(region, address), Deadline.after(0.1))
        return sent[0].status is not PutStatus.TIMED_OUT

    until(begun, "a transfer begins")
    assert sent[0].status is PutStatus.IN_DOUBT
    return sent[0].ticket


def test_a_batch_is_one_transfer(nixl: ScriptedNixl, plane: Plane, region: Region) -> None:
    admit(plane)
    results = plane.send(b"it", to(region, HERE, THERE, ELSEWHERE), Deadline.after(LONG_S))
    assert [result.status for result in results] == [PutStatus.STORED] * 3
    assert [line for line in nixl.said if line.startswith("write")] == ["write 10000+1000 20000+1000 30000+1000"]


@pytest.mark.parametrize("state", ["PROC", "nixlBackendError", "nixlNotFoundError", "ERR"])
def test_only_done_and_disconnected_are_ends(nixl: ScriptedNixl, plane: Plane, region: Region, state: str) -> None:
    """After any other answer something may go on: its memory is given back when NIXL says more, or the child is gone."""
    admit(plane)
    nixl.state(HERE, state)
    ticket = in_doubt(plane, region, HERE)
    assert plane.settle([ticket], Deadline.after(0.1)) == [False]
    assert "release 10000" not in nixl.said
    nixl.state(HERE, "nixlRemoteDisconnectError")
    assert plane.settle([ticket], Deadline.after(LONG_S)) == [True]
    assert nixl.said.count("release 10000") == 1


def test_an_answer_that_says_nothing_for_long_ends_the_child_and_so_the_doubt(nixl: ScriptedNixl, plane: Plane, region: Region) -> None:
    admit(plane)
    generation = plane.generation
    nixl.unsure(1.0)
    nixl.state(HERE, "nixlUnknownError")
    assert plane.settle([in_doubt(plane, region, HERE)], Deadline.after(LONG_S)) == [True]
    until(lambda: plane.generation not in (0, generation), "another child is up")


def test_a_disconnected_peer_is_an_answer_of_each_item(nixl: ScriptedNixl, plane: Plane, region: Region) -> None:
    admit(plane)
    nixl.state(HERE, "nixlRemoteDisconnectError")
    results = plane.send(b"it", to(region, HERE, THERE), Deadline.after(LONG_S))
    assert [result.status for result in results] == [PutStatus.UNKNOWN] * 2
    assert isinstance(results[0].error, UnavailableError)
    assert "the peer is gone" in str(results[0].error)


def test_a_peer_that_was_dropped_is_kept_for_when_it_comes_back(nixl: ScriptedNixl, plane: Plane) -> None:
    """Each time that NIXL is made to forget one that lives, a connection stays open at both ends."""
    name, metadata = agent()
    for session in (b"first", b"second", b"third"):
        plane.admit(session, metadata, MEMORY, Deadline.after(LONG_S))
        plane.drop(session)
    assert f"remove {name}" not in nixl.said


def test_of_many_that_were_dropped_the_oldest_are_removed_but_for_one_that_is_written_to(
    nixl: ScriptedNixl, plane: Plane, region: Region
) -> None:
    busy = admit(plane)
    nixl.state(HERE, "PROC")
    ticket = in_doubt(plane, region, HERE)
    plane.drop(b"it")
    others = [admit(plane, b"it") for _ in range(70)]
    assert [line for line in nixl.said if line.startswith("remove")] == [f"remove {name}" for name in others[:6]]
    assert plane.settle([ticket], Deadline.after(0.1)) == [False]
    nixl.state(HERE, "DONE")
    assert plane.settle([ticket], Deadline.after(LONG_S)) == [True]
    admit(plane, b"it")
    assert nixl.said[-2] == f"remove {busy}"


def test_a_session_whose_metadata_is_not_taken_leaves_nothing(nixl: ScriptedNixl, plane: Plane, region: Region) -> None:
    name, metadata = agent("broken")
    with pytest.raises(InvalidError, match=r"nixl does not take its metadata \(nixlBackendError\)"):
        plane.admit(b"it", metadata, MEMORY, Deadline.after(LONG_S))
    assert nixl.said == [f"add {name}", f"remove {name}"]
    # Under the same name: nothing stands in its way.
    plane.admit(b"it", f"agent {name}".encode(), MEMORY, Deadline.after(LONG_S))
    [result] = plane.send(b"it", to(region, HERE), Deadline.after(LONG_S))
    assert result.status is PutStatus.STORED


def test_metadata_of_two_agents_or_of_another_name_is_not_taken(nixl: ScriptedNixl, plane: Plane) -> None:
    (first, _), (second, _) = agent(), agent()
    for metadata in (f"agent {first} {second}", f"agent {first} other", "agent kvstore-p2p-short"):
        with pytest.raises(InvalidError, match="p2p: admit"):
            plane.admit(b"it", metadata.encode(), MEMORY, Deadline.after(LONG_S))
    assert second not in " ".join(nixl.said)


def test_sessions_are_bounded(nixl: ScriptedNixl, plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(1024):
        admit(plane, number.to_bytes(2, "big"))
    with pytest.raises(Exception, match="1024 sessions are known already"):
        admit(plane, b"more")
    plane.drop(bytes(2))
    admit(plane, b"more")


def test_what_was_to_be_written_to_a_target_is_not_written_to_the_one_after_it(nixl: ScriptedNixl, plane: Plane, region: Region) -> None:
    """Where the child comes to it late. The same addresses are other memory, in another process."""
    _, first = agent()
    plane.admit(b"it", first, MEMORY, Deadline.after(LONG_S))
    admit(plane)
    late = Put(plane_names.place(b"it", plane_names.target_of(first, MEMORY), HERE), (region.buffer(0, SIZE),))
    [refused] = plane._backend.put([late], Deadline.after(LONG_S))
    assert refused.status is PutStatus.FAILED
    assert "is not admitted" in str(refused.error)
    [sent] = plane.send(b"it", to(region, HERE), Deadline.after(LONG_S))
    assert sent.status is PutStatus.STORED
    assert [line for line in nixl.said if line.startswith("write")] == ["write 10000+1000"]


def test_deadlines_that_have_passed_begin_nothing(nixl: ScriptedNixl, plane: Plane, region: Region) -> None:
    admit(plane)
    results = plane.send(b"it", to(region, HERE, THERE), Deadline.after(-1.0))
    assert [result.status for result in results] == [PutStatus.TIMED_OUT] * 2
    assert not [line for line in nixl.said if line.startswith("write")]


def test_threads_do_not_meet_in_the_agent(nixl: ScriptedNixl, plane: Plane, region: Region) -> None:
    """The fixture looks whether two did."""
    admit(plane)
    nixl.state(THERE, "PROC")

    def work() -> None:
        for _ in range(20):
            plane.send(b"it", to(region, HERE), Deadline.after(LONG_S))
        plane.send(b"it", to(region, THERE), Deadline.after(0.2))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert len([line for line in nixl.said if line == "write 10000+1000"]) == 80
    nixl.state(THERE, "DONE")


def test_a_module_that_cannot_be_imported_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nixl").mkdir()
    (tmp_path / "nixl" / "__init__.py").write_text("raise ImportError('broken on purpose', name='nixl')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Exception, match=r"p2p: nixl did not come up: .*nixl cannot be imported \(broken on purpose\); pip install"):
        Plane()


def test_outside_a_child_it_is_not_opened() -> None:
    """It would change the settings of UCX for all of the process."""
    with pytest.raises(ConfigError, match="in a child process alone"):
        open_plane("lo", tls="tcp")


ADDRESSES = st.integers(1, (1 << 64) - 1)


@given(st.binary(min_size=1, max_size=64), st.binary(min_size=1, max_size=64), ADDRESSES)
def test_places_come_over_as_they_are(session: bytes, agent: bytes, address: int) -> None:
    target = plane_names.target_of(agent, [(address, 1)])
    assert plane_names.read_place(plane_names.place(session, target, address)) == (session.hex(), target, address)


@given(
    st.binary(min_size=1, max_size=64),
    st.binary(min_size=1, max_size=2000),
    st.lists(ADDRESSES.flatmap(lambda base: st.tuples(st.just(base), st.integers(1, (1 << 64) - base))), min_size=1, max_size=64),
)
def test_peers_come_over_as_they_are(session: bytes, metadata: bytes, regions: list[tuple[int, int]]) -> None:
    checked = plane_names.checked_regions(metadata, regions)
    assert plane_names.read_admission(plane_names.admission(session, metadata, checked)) == (session.hex(), metadata, sorted(regions))


@given(st.floats(0, 1e9))
def test_times_come_over_as_they_are(until_s: float) -> None:
    name = plane_names.expectation(until_s)
    assert plane_names.read_expectation(name) == until_s
    assert plane_names.read_admission(name) is None


def test_the_listing_of_the_agent_and_its_regions_comes_over_as_it_is() -> None:
    regions = [Region(4096), Region(8192)]
    try:
        agent_seen, found = plane_names.read_self(plane_names.self_page(b"agent", regions))
        assert agent_seen == b"agent"
        assert found == [(plane_names.region_key(region), region.address, region.size_bytes) for region in regions]
        # Which another mapping of the same memory has too.
        again = Region.from_fd(os.dup(regions[0].fd), 4096)
        assert plane_names.region_key(again) == plane_names.region_key(regions[0]) != plane_names.region_key(regions[1])
        again.close()
    finally:
        for region in regions:
            region.close()
