"""What one agent does, two do at a time: each byte is written once, and what becomes of it is told of the piece."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from p2p_planes import LONG_S, until
from p2p_scripted_nixl import ScriptedNixl

from kvstore_sdk.backend import Deadline, PutResult, PutStatus, Region
from kvstore_sdk_backends.p2p.lanes import CUT_BYTES, Lanes, Sent
from kvstore_sdk_backends.p2p.nixl_driver import Piece, Transfer
from kvstore_sdk_backends.p2p.plane import Plane

PEER = "peer"
MEMORY = [(1 << 40, 1 << 40)]


class Copier:
    """Stands in for a `Driver`.

    Attributes:
        wrote: The pieces of each batch that was begun.
        refuses: The calls that raise.
        go: Copies take until this is set.
        copying: How many do.
        peers: That it was told of.
        memory: Likewise, by its address.
    """

    def __init__(self) -> None:
        self.wrote: list[Sequence[Piece]] = []
        self.refuses: set[str] = set()
        self.go = threading.Event()
        self.go.set()
        self.copying = 0
        self.peers: set[str] = set()
        self.memory: set[int] = set()

    def _may(self, what: str) -> None:
        if what in self.refuses:
            raise RuntimeError(what)

    def register(self, address: int, size_bytes: int) -> int:
        self._may("register")
        self.memory.add(address)
        return address

    def deregister(self, memory: int) -> None:
        self.memory.discard(memory)

    def load(self, name: str, metadata: bytes, regions: Sequence[tuple[int, int]]) -> None:
        self._may("load")
        self.peers.add(name)

    def unload(self, name: str) -> None:
        self.peers.discard(name)

    def prepare(self, peer: str, pieces: Sequence[Piece]) -> Transfer:
        self._may("prepare")
        assert peer in self.peers
        return Transfer(peer, pieces)

    def post(self, transfer: Transfer) -> None:
        self.copying += 1
        assert self.go.wait(LONG_S)
        self.copying -= 1
        self.wrote.append(transfer.handle)
        transfer.over.set()


class Pair:
    """Lanes of two copiers, the second of which may refuse to be."""

    def __init__(self, refuses: str = "") -> None:
        self.first, self.second = Copier(), Copier()
        self.second.refuses = {refuses}
        self.made = 0
        self.lanes = Lanes(self.first, self._make)  # type: ignore[arg-type]
        self.lanes.load(PEER, b"agent", MEMORY)

    def _make(self) -> Any:
        self.made += 1
        self.second._may("make")
        return self.second

    def write(self, pieces: Sequence[Piece]) -> dict[int, Sent]:
        """What became of each piece, once it is over."""
        found = {index: sent for sent, indexes in self.lanes.write(PEER, pieces) for index in indexes}
        for sent in found.values():
            assert all(transfer.over.wait(LONG_S) for transfer in sent.transfers)
        return found

    @property
    def wrote(self) -> list[Piece]:
        return sorted(piece for batch in self.first.wrote + self.second.wrote for piece in batch)


def pieces_of(*sizes: int) -> list[Piece]:
    """One behind the other, in the peer's memory in steps of a GiB."""
    places = [sum(sizes[:index]) for index in range(len(sizes))]
    return [(place, MEMORY[0][0] + (index << 30), size) for index, (place, size) in enumerate(zip(places, sizes, strict=True))]


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Those that lie one behind the other here and there as one."""
    found: list[Piece] = []
    for local, remote, size in sorted(pieces):
        if found and (sum(found[-1][::2]), found[-1][1] + found[-1][2]) == (local, remote):
            found[-1] = (*found[-1][:2], found[-1][2] + size)
        else:
            found.append((local, remote, size))
    return found


@given(st.lists(st.integers(1, 3 * CUT_BYTES), min_size=1, max_size=8).filter(lambda sizes: sum(sizes) >= CUT_BYTES))
def test_of_a_large_batch_each_writes_a_half_and_no_byte_is_written_twice_or_left_out(sizes: list[int]) -> None:
    pair = Pair()
    sent = pair.write(pieces_of(*sizes))
    assert sorted(sent) == list(range(len(sizes)))
    assert joined(pair.wrote) == pieces_of(*sizes)
    halves = [sum(size for batch in driver.wrote for _, _, size in batch) for driver in (pair.first, pair.second)]
    assert abs(halves[0] - halves[1]) <= 2 * 4096


def test_a_small_batch_is_one_transfer_and_makes_no_agent() -> None:
    pair = Pair()
    sent = pair.write(pieces_of(4096, 8192))
    assert pair.first.wrote == [pieces_of(4096, 8192)]
    assert sent[0] is sent[1]
    assert pair.made == 0


def test_a_batch_waits_for_no_agent_that_copies_while_the_other_is_free() -> None:
    pair = Pair()
    pair.write(pieces_of(CUT_BYTES))
    pair.first.go.clear()
    copying = threading.Thread(target=lambda: pair.write(pieces_of(4096)))
    copying.start()
    until(lambda: pair.first.copying == 1, "the first one copies")
    before = len(pair.second.wrote)
    # A large one too, which is not cut then.
    for size in (8192, CUT_BYTES):
        pair.write(pieces_of(size))
    assert pair.second.wrote[before:] == [pieces_of(8192), pieces_of(CUT_BYTES)]
    pair.first.go.set()
    copying.join(LONG_S)
    assert not copying.is_alive()


@pytest.mark.parametrize("refuses", ["make", "register", "load"])
def test_without_a_second_agent_the_first_one_writes_all(refuses: str) -> None:
    pair = Pair(refuses)
    region = Region(4096)
    try:
        pair.lanes.register(region)
        for _ in range(2):
            pair.write(pieces_of(CUT_BYTES))
        assert pair.first.wrote == [pieces_of(CUT_BYTES)] * 2
        assert pair.made == 1
        pair.lanes.deregister(region)
    finally:
        region.close()


@pytest.mark.parametrize("refuser", ["first", "second"])
def test_of_a_batch_whose_half_is_not_begun_each_piece_has_what_became_of_it(refuser: str) -> None:
    pair = Pair()
    getattr(pair, refuser).refuses = {"prepare"}
    sent = pair.write(pieces_of(CUT_BYTES, CUT_BYTES // 2, CUT_BYTES))
    begun = [bool(sent[index].transfers) for index in range(3)]
    failed = [sent[index].error is not None for index in range(3)]
    assert begun == ([True, True, False] if refuser == "second" else [False, True, True])
    assert failed == ([False, True, True] if refuser == "second" else [True, True, False])
    # And both are free again.
    getattr(pair, refuser).refuses = set()
    assert all(each.error is None for each in pair.write(pieces_of(CUT_BYTES, CUT_BYTES)).values())


@pytest.fixture
def region() -> Iterator[Callable[[], Region]]:
    made: list[Region] = []

    def make() -> Region:
        made.append(Region(4096))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_the_second_one_knows_the_memory_and_the_peers_that_the_first_one_knows(region: Callable[[], Region]) -> None:
    pair = Pair()
    before, after = region(), region()
    pair.lanes.register(before)
    pair.write(pieces_of(CUT_BYTES))
    pair.lanes.register(after)
    assert pair.second.memory == pair.first.memory == {before.address, after.address}
    pair.lanes.deregister(before)
    pair.lanes.deregister(before)
    assert pair.second.memory == pair.first.memory == {after.address}
    assert pair.lanes.regions == [after]
    assert pair.second.peers == {PEER}
    pair.lanes.unload(PEER)
    assert pair.second.peers == pair.first.peers == set()
    pair.lanes.load(PEER, b"another", MEMORY)
    pair.write(pieces_of(CUT_BYTES))
    assert pair.second.peers == {PEER}


def test_memory_that_the_second_one_refuses_is_not_known_to_the_first(region: Callable[[], Region]) -> None:
    pair = Pair()
    pair.write(pieces_of(CUT_BYTES))
    pair.second.refuses = {"register"}
    with pytest.raises(RuntimeError):
        pair.lanes.register(region())
    assert pair.first.memory == set()
    assert pair.lanes.regions == []


class Scripted:
    """A data plane whose child has a `nixl` that does as it is told, and one record in two halves."""

    def __init__(self, folder: Path) -> None:
        self.nixl = ScriptedNixl(folder)
        self.plane = Plane()
        self.region = Region(CUT_BYTES)
        self.plane.add_region(self.region)
        agent = f"kvstore-p2p-{uuid.uuid4().hex}"
        self.plane.admit(b"it", f"agent {agent}".encode(), MEMORY, Deadline.after(LONG_S))

    def half(self, state: str) -> None:
        """What becomes of the second one from now on."""
        self.nixl.state(MEMORY[0][0] + CUT_BYTES // 2, state)

    def send(self, timeout_s: float) -> PutResult:
        [result] = self.plane.send(b"it", [(self.region.buffer(0, CUT_BYTES), MEMORY[0][0])], Deadline.after(timeout_s))
        return result

    def close(self) -> None:
        self.plane.close()
        self.region.close()


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scripted]:
    monkeypatch.syspath_prepend(tmp_path)
    made = Scripted(tmp_path)
    yield made
    made.close()
    assert not made.nixl.overlapped


def test_a_record_has_landed_when_both_halves_have(scripted: Scripted) -> None:
    assert scripted.send(LONG_S).status is PutStatus.STORED
    half = f"{CUT_BYTES // 2:x}"
    first, second = MEMORY[0][0], MEMORY[0][0] + CUT_BYTES // 2
    wrote = sorted(line for line in scripted.nixl.said if line.startswith("write"))
    assert wrote == [f"write {first:x}+{half}", f"write {second:x}+{half}"]


def test_a_record_is_in_doubt_until_both_halves_are_over(scripted: Scripted) -> None:
    scripted.half("PROC")
    # One that the child had no time to begin is another's.
    for _ in range(60):
        if (result := scripted.send(0.5)).status is not PutStatus.TIMED_OUT:
            break
    assert result.status is PutStatus.IN_DOUBT
    assert scripted.plane.settle([result.ticket], Deadline.after(0.1)) == [False]
    scripted.half("DONE")
    assert scripted.plane.settle([result.ticket], Deadline.after(LONG_S)) == [True]


def test_of_a_record_one_half_of_which_broke_off_nobody_says_that_it_landed(scripted: Scripted) -> None:
    scripted.half("nixlRemoteDisconnectError")
    result = scripted.send(LONG_S)
    assert result.status is PutStatus.UNKNOWN
    assert "the peer is gone" in str(result.error)
