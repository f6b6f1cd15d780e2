"""What NIXL prints of metadata that it cannot read, and what reading it may cost, is bounded: by the host that sends it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from p2p_bench import run
from p2p_fake_plane import FakePlane

from kvstore_sdk_backends.p2p import targets as targets_module
from kvstore_sdk_backends.p2p.limits import Limits
from kvstore_sdk_backends.p2p.messages import Target
from kvstore_sdk_backends.p2p.sessions import Session
from kvstore_sdk_backends.p2p.targets import Targets
from kvstore_sdk_backends.p2p.workers import Workers

Steps = Callable[[Targets, FakePlane], Coroutine[Any, Any, None]]


def admitting(steps: Steps) -> None:
    async def test() -> None:
        plane, workers = FakePlane(), Workers("test-targets", 4)
        try:
            await steps(Targets(plane, workers, Limits(), "a node"), plane)  # type: ignore[arg-type]
        finally:
            workers.close()

    run(test)


async def send(targets: Targets, agent: bytes, host: str = "10.0.0.1", session: Session | None = None) -> str:
    """In a session of its own. Returns the code of the refusal."""
    session = session or Session(b"c", 7, host, b"n", "nixl", None, Limits())
    session.targets_pending += 1
    refusal = await targets.admit(session, target(agent))
    assert session.targets_pending == 0
    return refusal[0] if refusal is not None else ""


def target(agent: bytes) -> Target:
    made = Target.__new__(Target)
    object.__setattr__(made, "agent", agent)
    object.__setattr__(made, "regions", ((1 << 20, 4096),))
    return made


def test_bent_targets_of_a_host_are_read_one_a_while_however_many_sessions_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets_module, "PAUSE_S", 0.5)

    async def steps(targets: Targets, plane: FakePlane) -> None:
        read = 0
        admit = plane.admit

        def counted(*arguments: Any) -> None:
            nonlocal read
            read += 1
            admit(*arguments)

        plane.admit = counted  # type: ignore[method-assign]
        assert await send(targets, b"bent") == "path"
        codes = await asyncio.gather(*(send(targets, b"bent") for _ in range(100)))
        # All at once, but for what this machine is busy with meanwhile.
        assert codes.count("busy") >= 80
        assert codes.count("path") == read - 1 > 0

    admitting(steps)


def test_other_hosts_are_read_at_once_and_so_is_whoever_sent_nothing_bent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets_module, "PAUSE_S", 600.0)

    async def steps(targets: Targets, plane: FakePlane) -> None:
        assert await send(targets, b"bent", "10.0.0.9") == "path"
        waiting = asyncio.ensure_future(send(targets, b"good", "10.0.0.9"))
        for _ in range(30):
            assert await send(targets, b"good") == ""
        assert not waiting.done()
        waiting.cancel()
        await asyncio.wait({waiting})

    admitting(steps)


def test_a_host_is_forgiven_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets_module, "PAUSE_S", 0.01)
    monkeypatch.setattr(targets_module, "FORGIVEN_S", 0.01)

    async def steps(targets: Targets, plane: FakePlane) -> None:
        assert await send(targets, b"bent") == "path"
        await asyncio.sleep(0.1)
        monkeypatch.setattr(targets_module, "PAUSE_S", 600.0)
        assert [await send(targets, b"good") for _ in range(3)] == [""] * 3

    admitting(steps)


def test_what_ended_while_it_waited_is_not_read(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(targets_module, "PAUSE_S", 0.3)

    async def steps(targets: Targets, plane: FakePlane) -> None:
        assert await send(targets, b"bent") == "path"
        session = Session(b"c", 7, "10.0.0.1", b"n", "nixl", None, Limits())
        waiting = asyncio.ensure_future(send(targets, b"good", session=session))
        await asyncio.sleep(0.05)
        session.ended = True
        assert await waiting == "busy"
        assert plane.admitted == {}

    with caplog.at_level(logging.WARNING):
        admitting(steps)


def test_hosts_are_remembered_up_to_a_bound() -> None:
    async def steps(targets: Targets, plane: FakePlane) -> None:
        for number in range(1000):
            targets._note_bent(f"host-{number}")
        assert len(targets._bent) == targets_module._MOST_HOSTS

    admitting(steps)
