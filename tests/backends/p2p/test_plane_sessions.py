"""Whom the child knows: each peer that may be written to, and nobody who was dropped, whatever it answers late or not at all.

The child is one of this test's, since a real one answers too late only when its machine wants it to.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from kvstore_sdk.backend import (
    Buffer,
    Capabilities,
    Deadline,
    DeleteStatus,
    Failure,
    Put,
    PutResult,
    PutStatus,
    Region,
    TimedOutError,
    UnavailableError,
)
from kvstore_sdk_backends.p2p import plane as module
from kvstore_sdk_backends.p2p import plane_names
from kvstore_sdk_backends.p2p.plane import Plane

LONG_S = 20.0
FIRST, SECOND, OTHER = b"1" * 16, b"2" * 16, b"3" * 16
PLACES = [(4096, 4096)]


class Child:
    """What `Plane` sees of its child: sessions by name, each with the metadata of its agent, which no other one may have."""

    capabilities = Capabilities(max_record_bytes=1 << 40, max_batch=256, max_concurrency=64, in_doubt=True)
    state = "up"
    pid = 1
    died_s = float("-inf")

    def __init__(self) -> None:
        self.deaths = 0
        self.sessions: dict[str, bytes] = {}
        self.stands_still = False
        self.answers_late = False
        self.before_admission: Callable[[], None] = lambda: None
        self.after_put: Callable[[], None] = lambda: None

    def die(self) -> None:
        self.deaths += 1
        self.sessions.clear()

    def delete(self, names: Sequence[str], deadline: Deadline) -> list[DeleteStatus | Failure]:
        if self.stands_still:
            time.sleep(max(0.0, deadline.remaining_s()))
            return [Failure(TimedOutError("not begun")) for _ in names]
        for name in names:
            self.sessions.pop(name, None)
        return [DeleteStatus.DELETED] * len(names)

    def exists(self, names: Sequence[str], deadline: Deadline) -> list[bool | Failure]:
        self.before_admission()
        [name] = names
        admission = plane_names.read_admission(name)
        assert admission is not None
        session, agent, _ = admission
        self.sessions.pop(session, None)
        if agent in self.sessions.values():
            return [Failure(UnavailableError("an agent of another session"))]
        self.sessions[session] = agent
        return [Failure(TimedOutError("late"))] if self.answers_late else [True]

    def put(self, puts: Sequence[Put], deadline: Deadline) -> list[PutResult]:
        known = [plane_names.read_place(put.name)[0] in self.sessions for put in puts]
        self.after_put()
        return [PutResult(PutStatus.STORED) if each else PutResult.failed(UnavailableError("not admitted")) for each in known]


@pytest.fixture
def child() -> Child:
    return Child()


@pytest.fixture
def plane(child: Child, monkeypatch: pytest.MonkeyPatch) -> Plane:
    monkeypatch.setattr(module, "open_isolated", lambda *_, **__: child)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda _: True)
    return Plane()


@pytest.fixture
def pieces() -> Iterator[list[tuple[Buffer, int]]]:
    region = Region(4096)
    yield [(region.buffer(0, 4096), 4096)]
    region.close()


def admit(plane: Plane, session: bytes, agent: bytes = b"agent") -> None:
    plane.admit(session, agent, PLACES, Deadline.after(LONG_S))


def send(plane: Plane, pieces: list[tuple[Buffer, int]], session: bytes = FIRST) -> PutStatus:
    [result] = plane.send(session, pieces, Deadline.after(LONG_S))
    return result.status


def test_an_admission_that_was_answered_too_late_keeps_nobody_out(plane: Plane, child: Child) -> None:
    child.answers_late = True
    with pytest.raises(TimedOutError):
        admit(plane, FIRST)
    child.answers_late = False
    admit(plane, SECOND)
    assert list(child.sessions) == [SECOND.hex()]


def test_who_is_dropped_while_a_new_child_is_told_of_it_keeps_nobody_out(
    plane: Plane, child: Child, pieces: list[tuple[Buffer, int]]
) -> None:
    admit(plane, FIRST)
    child.die()

    def drop() -> None:
        child.before_admission = lambda: None
        dropping = threading.Thread(target=plane.drop, args=(FIRST,))
        dropping.start()
        dropping.join(LONG_S)

    child.before_admission = drop
    send(plane, pieces)
    admit(plane, SECOND)
    assert list(child.sessions) == [SECOND.hex()]


def test_a_call_of_before_a_death_leaves_nobody_behind_in_the_next_child(
    plane: Plane, child: Child, pieces: list[tuple[Buffer, int]]
) -> None:
    admit(plane, FIRST)

    def die() -> None:
        child.after_put = lambda: None
        child.die()
        assert send(plane, pieces) is PutStatus.STORED, "another load of that peer"

    child.after_put = die
    send(plane, pieces)
    plane.drop(FIRST)
    admit(plane, SECOND)
    assert list(child.sessions) == [SECOND.hex()]


def test_who_is_admitted_again_stays_admitted_though_it_was_dropped_in_vain(
    plane: Plane, child: Child, pieces: list[tuple[Buffer, int]]
) -> None:
    admit(plane, FIRST)
    child.stands_still = True
    plane.drop(FIRST)
    admit(plane, FIRST)
    child.stands_still = False
    admit(plane, OTHER, b"other")
    assert send(plane, pieces) is PutStatus.STORED


def test_a_peer_that_the_child_does_not_know_is_told_to_it_again(plane: Plane, child: Child, pieces: list[tuple[Buffer, int]]) -> None:
    admit(plane, FIRST)
    child.sessions.clear()
    assert [send(plane, pieces) for _ in range(2)] == [PutStatus.FAILED, PutStatus.STORED]


def test_forgetting_who_was_dropped_takes_no_more_time_than_a_call_has(
    plane: Plane, child: Child, pieces: list[tuple[Buffer, int]]
) -> None:
    admit(plane, FIRST)
    admit(plane, OTHER, b"other")
    child.die()
    assert send(plane, pieces, OTHER) is PutStatus.STORED
    seen: list[float] = []
    delete = child.delete

    def watched(names: Sequence[str], deadline: Deadline) -> list[DeleteStatus | Failure]:
        seen.append(deadline.at_s)
        return delete(names, deadline)

    child.stands_still = True
    plane.drop(OTHER)
    child.delete = watched  # type: ignore[method-assign]
    deadline = Deadline.after(0.05)
    plane.send(FIRST, pieces, deadline)
    assert seen == [deadline.at_s]
