"""A session occupies so much of a node and no more, and makes room when it is idle."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from p2p_bench import run, soon, until

from kvstore_sdk.backend import Deadline
from kvstore_sdk_backends.p2p.limits import Limits
from kvstore_sdk_backends.p2p.messages import Target
from kvstore_sdk_backends.p2p.sessions import Room, Session, Sessions


def session_of(number: int, host: str = "10.0.0.1", heard_s: float = 0.0, node: bytes = b"") -> Session:
    made = Session(b"c%d" % number, number, host, node or b"n%d" % number, "zmq", None, Limits())
    made.heard_s = heard_s
    return made


def sessions_with(*members: Session, **limits: float) -> Sessions:
    sessions = Sessions(dataclasses.replace(Limits(), **limits))
    for session in members:
        sessions.add(session)
    return sessions


def test_a_room_lets_in_what_fits_in_the_order_in_which_it_came() -> None:
    async def test() -> None:
        room = Room(100)
        inside: list[str] = []

        async def enter(name: str, size_bytes: int) -> None:
            assert await room.enter(size_bytes, soon())
            inside.append(name)

        assert await room.enter(60, soon())
        tasks = [asyncio.ensure_future(enter(name, size)) for name, size in (("large", 500), ("small", 1), ("half", 50))]
        await asyncio.sleep(0.01)
        assert inside == []
        room.leave(60)
        await until(lambda: inside)
        await asyncio.sleep(0.01)
        assert inside == ["large"]
        room.leave(500)
        await asyncio.gather(*tasks)
        assert inside == ["large", "small", "half"]
        room.leave(51)
        assert room.used_bytes == 0

    run(test)


def test_who_gives_up_waiting_for_room_lets_the_next_one_in() -> None:
    async def test() -> None:
        room = Room(100)
        assert await room.enter(60, soon())
        leaving = asyncio.ensure_future(room.enter(50, soon()))
        late = asyncio.ensure_future(room.enter(70, Deadline.after(0.05)))
        staying = asyncio.ensure_future(room.enter(40, soon()))
        assert not await late
        leaving.cancel()
        await asyncio.wait({leaving})
        assert await staying
        assert room.used_bytes == 100

    run(test)


def test_who_is_cancelled_as_it_is_let_in_leaves_no_room_taken() -> None:
    async def test() -> None:
        room = Room(100)
        assert await room.enter(100, soon())
        waiting = asyncio.ensure_future(room.enter(100, soon()))
        await asyncio.sleep(0.01)
        room.leave(100)
        waiting.cancel()
        await asyncio.wait({waiting})
        assert room.used_bytes == 0

    run(test)


def test_a_new_session_replaces_those_of_its_connection_and_its_descriptor() -> None:
    async def test() -> None:
        first, second, third = (session_of(number) for number in (1, 2, 3))
        sessions = sessions_with(first, second, third)
        assert sessions.replaced_by(b"c4", 4) == []
        assert sessions.replaced_by(b"c1", 1) == [first]
        assert set(sessions.replaced_by(b"c1", 2)) == {first, second}
        sessions.remove(first)
        assert (sessions.of(b"c1"), sessions.of_fd(1)) == (None, None)
        assert (sessions.of(b"c2"), sessions.of_fd(3)) == (second, third)
        assert list(sessions) == [second, third]

    run(test)


def test_sessions_of_one_node_stand_beside_each_other_and_are_told_by_their_targets() -> None:
    async def test() -> None:
        new, old, other, without = (session_of(number) for number in range(4))
        new.node = old.node = without.node = b"node"
        sessions = sessions_with(new, old, other, without)
        assert len(sessions) == 4
        assert sessions.with_target_beside(new) == []
        old.target = other.target = new.target = Target(0, b"agent", ((1, 1),))
        assert sessions.with_target_beside(new) == [old]
        without.targets_pending = 1
        assert sessions.with_target_beside(new) == [old, without]
        assert sessions.with_target_beside(other) == []

    run(test)


def test_the_idlest_of_the_host_with_most_sessions_makes_room() -> None:
    """Whoever opens many sessions loses one of them, and not the others theirs."""

    async def test() -> None:
        many = [session_of(number, "10.0.0.9", 50.0 + number) for number in range(4)]
        quiet = session_of(10, heard_s=1.0)
        sessions = sessions_with(quiet, *many, idle_s=5.0)
        assert sessions.idlest(100.0, set()) is many[0]
        assert sessions.idlest(100.0, {many[0].id}) is many[1]
        many[1].fetching = 1
        assert sessions.idlest(100.0, {many[0].id}) is many[2]
        assert sessions.idlest(100.0, {session.id for session in many}) is quiet
        assert sessions.idlest(5.9, set()) is None

    run(test)


def test_where_none_is_idle_the_host_with_most_sessions_gives_one_to_another() -> None:
    async def test() -> None:
        many = [session_of(number, "10.0.0.9", 50.0 + number) for number in range(3)]
        sessions = sessions_with(session_of(10, "10.0.0.1"), *many)
        assert sessions.of_the_greediest("10.0.0.2", b"new", 100.0, set()) is many[0]
        many[0].fetching = 1
        assert sessions.of_the_greediest("10.0.0.1", b"new", 100.0, set()) is many[1]
        # Not to one more of its own, nor where it had no more than the other then.
        assert sessions.of_the_greediest("10.0.0.9", b"new", 100.0, set()) is None
        sessions.remove(many[1])
        assert sessions.of_the_greediest("10.0.0.1", b"new", 100.0, set()) is None
        assert sessions.of_the_greediest("10.0.0.2", b"new", 100.0, set()) is many[2]
        sessions.remove(many[2])
        assert sessions.of_the_greediest("10.0.0.2", b"new", 100.0, set()) is None
        assert sessions_with().of_the_greediest("10.0.0.2", b"new", 100.0, set()) is None

    run(test)


def test_of_one_host_the_node_that_has_most_sessions_gives_one_to_another() -> None:
    async def test() -> None:
        many = [session_of(number, heard_s=50.0 + number, node=b"greedy") for number in range(3)]
        sessions = sessions_with(session_of(10, heard_s=1.0), *many, max_sessions=4, idle_s=5.0)
        many[0].fetching = 1
        for _ in range(2):
            assert sessions.of_the_greediest("10.0.0.1", b"new", 100.0, set()) is many[1]
        # Not to one more of its own.
        assert sessions.of_the_greediest("10.0.0.1", b"greedy", 100.0, set()) is None

    run(test)


def test_nodes_of_a_host_that_has_most_of_all_sessions_take_turns() -> None:
    """Whoever opens many sessions, each as another node, and asks something in each now and then, keeps nobody out."""

    async def test() -> None:
        own = [session_of(number, heard_s=50.0 + number) for number in range(4)]
        sessions = sessions_with(*own, max_sessions=4, idle_s=5.0)
        assert sessions.of_the_greediest("10.0.0.1", b"new", 100.0, set()) is own[0]
        assert sessions.of_the_greediest("10.0.0.1", b"new", 104.9, set()) is None
        own[0].heard_s = 99.0
        assert sessions.of_the_greediest("10.0.0.1", b"new", 105.0, {own[1].id}) is own[2]
        # Who has just got a place keeps it as long.
        for session in own:
            session.began_s = 108.0
        assert sessions.of_the_greediest("10.0.0.1", b"new", 112.0, set()) is None
        assert sessions.of_the_greediest("10.0.0.1", b"new", 113.0, set()) is own[1]

    run(test)


def test_hosts_that_have_one_session_each_keep_it() -> None:
    async def test() -> None:
        sessions = sessions_with(*(session_of(number, f"10.0.0.{number}") for number in range(4)), max_sessions=4)
        assert sessions.of_the_greediest("10.0.0.1", b"new", 100.0, set()) is None
        assert sessions.of_the_greediest("10.0.0.9", b"new", 100.0, set()) is None

    run(test)


@pytest.mark.parametrize(("members", "full"), [(1, False), (2, True), (3, True)])
def test_so_many_sessions_are_all(members: int, full: bool) -> None:
    async def test() -> None:
        assert sessions_with(*map(session_of, range(members)), max_sessions=2).full is full

    run(test)


class SessionMachine(RuleBasedStateMachine):
    """Connections come with descriptors that are used again, nodes have several; against a list."""

    few = st.integers(0, 4)

    def __init__(self) -> None:
        super().__init__()
        self.sessions = sessions_with(max_sessions=3, idle_s=2.0)
        self.there: list[Session] = []
        self.now_s = 0.0

    @rule(connection=few, fd=few, node=few, host=st.sampled_from(["near", "far"]))
    def begin(self, connection: int, fd: int, node: int, host: str) -> None:
        self.now_s += 1.0
        new = Session(b"c%d" % connection, fd, host, b"n%d" % node, "zmq", None, Limits())
        new.heard_s = self.now_s
        replaced = self.sessions.replaced_by(new.identity, new.fd)
        alike = [old for old in self.there if old.identity == new.identity or old.fd == new.fd]
        assert {old.id for old in replaced} == {old.id for old in alike}
        if not replaced and self.sessions.full:
            replaced = [idle] if (idle := self.sessions.idlest(self.now_s, set())) is not None else []
            assert bool(replaced) == any(self.now_s - old.heard_s >= 2.0 for old in self.there)
            if not replaced:
                return
        for old in replaced:
            self.sessions.remove(old)
            self.there.remove(old)
        self.sessions.add(new)
        self.there.append(new)

    @rule(fd=few)
    def lose(self, fd: int) -> None:
        if (session := self.sessions.of_fd(fd)) is not None:
            assert session in self.there
            self.sessions.remove(session)
            self.there.remove(session)

    @rule(connection=few)
    def hear(self, connection: int) -> None:
        self.now_s += 1.0
        session = self.sessions.of(b"c%d" % connection)
        assert session == next((one for one in self.there if one.identity == b"c%d" % connection), None)
        if session is not None:
            session.heard_s = self.now_s

    @invariant()
    def has_each_once(self) -> None:
        assert sorted(session.id for session in self.sessions) == sorted(session.id for session in self.there)
        assert len(self.sessions) == len(self.there) <= 3
        for fd in range(5):
            assert self.sessions.of_fd(fd) == next((one for one in self.there if one.fd == fd), None)


SessionMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestSessionMachine = SessionMachine.TestCase
