"""One refusal is one line in the log, also where the address of one of its connections was not seen in time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest
import zmq
from p2p_bench import run, until

from kvstore_sdk_backends.p2p import guard as guards
from kvstore_sdk_backends.p2p.guard import Guard


def guarded(steps: Callable[[Guard], object]) -> None:
    """Run the steps over a guard that sweeps."""

    async def test() -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            guard = Guard(socket, most=4, secured=False, label="a node")
            sweeping = asyncio.ensure_future(guard.run())
            try:
                found = steps(guard)
                if asyncio.iscoroutine(found):
                    await found
            finally:
                sweeping.cancel()
                await asyncio.wait({sweeping})
                guard.close()

    run(test)


@pytest.mark.parametrize("hosts", [("", "10.0.0.1"), ("10.0.0.1", ""), ("", "", "10.0.0.1", "", "10.0.0.1")])
def test_who_comes_again_with_an_address_is_said_with_it(
    hosts: tuple[str, ...], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guards, "SESSION_S", 2.0)

    async def steps(guard: Guard) -> None:
        for host in hosts:
            guard._say(host, "it is no friend")
        await until(lambda: not guard._nameless)

    with caplog.at_level(logging.WARNING):
        guarded(steps)
    assert caplog.messages == ["a node: refused 10.0.0.1: it is no friend"]


def test_who_does_not_come_again_is_said_without(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "SESSION_S", 0.01)

    async def steps(guard: Guard) -> None:
        for _ in range(5):
            guard._say("", "it is no friend")
        await until(lambda: caplog.messages == ["a node: refused a connection: it is no friend"])
        guard._say("", "")

    with caplog.at_level(logging.WARNING):
        guarded(steps)


def test_reasons_that_strangers_make_up_take_so_much_memory_and_no_more() -> None:
    def steps(guard: Guard) -> None:
        for number in range(1000):
            guard._say("", f"reason {number}")
        assert len(guard._nameless) == guards._MOST_REASONS

    guarded(steps)
