"""What requests are made with: which one is current, when it is replaced, and that each is ended once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from kvstore_sdk.backend import DeniedError
from kvstore_sdk_backends.s3 import current
from kvstore_sdk_backends.s3.client import AttemptError
from kvstore_sdk_backends.s3.current import Current

LIMIT_S = 20.0


class Maker:
    """Makes numbers, one at a time, and counts what is ended."""

    def __init__(self) -> None:
        self.made = 0
        self.ended: list[int] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.fault: Exception | None = None

    async def make(self) -> int:
        await self.gate.wait()
        if self.fault:
            raise self.fault
        self.made += 1
        return self.made

    async def end(self, one: int) -> None:
        self.ended.append(one)


def play(scene: Callable[[Maker, Current[int]], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        maker = Maker()
        numbers = Current(maker.make, maker.end, lambda cause: type(cause).__name__)
        async with asyncio.timeout(LIMIT_S):
            await numbers.open()
            await scene(maker, numbers)
            await numbers.close()
        assert sorted(maker.ended) == list(range(1, maker.made + 1)), "each is ended, once"

    asyncio.run(whole())


@pytest.fixture
def at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current, "RENEW_EVERY_S", 0.0)


def test_what_was_replaced_is_ended_after_its_last_use() -> None:
    async def scene(maker: Maker, numbers: Current[int]) -> None:
        async with numbers.use("x") as one, numbers.use("x"):
            await numbers.renew("x")
            assert (one, numbers.now, maker.ended) == (1, 2, [])
            async with numbers.use("x") as other:
                assert other == 2
        assert maker.ended == [1]

    play(scene)


def test_what_is_new_is_not_replaced() -> None:
    async def scene(maker: Maker, numbers: Current[int]) -> None:
        for _ in range(3):
            await numbers.renew("x")
        assert maker.made == 2
        assert numbers.is_new(2)
        assert not numbers.is_new(1)

    play(scene)


@pytest.mark.usefixtures("at_any_time")
def test_many_wait_for_one_renewal_and_none_of_them_ends_it() -> None:
    async def scene(maker: Maker, numbers: Current[int]) -> None:
        maker.gate.clear()
        waiting = [asyncio.create_task(numbers.renew("x")) for _ in range(5)]
        await asyncio.sleep(0)
        for task in waiting[:3]:
            task.cancel()
        await asyncio.wait(waiting[:3])
        assert all(task.cancelled() for task in waiting[:3])
        maker.gate.set()
        await asyncio.gather(*waiting[3:])
        assert numbers.now == maker.made == 2

    play(scene)


def test_a_renewal_that_fails_leaves_the_old_one_and_is_not_tried_again_at_once() -> None:
    async def scene(maker: Maker, numbers: Current[int]) -> None:
        maker.fault = ValueError("hidden-token")
        with pytest.raises(AttemptError, match=r"^doing: credentials cannot be had: ValueError$") as raised:
            await numbers.renew("doing")
        assert isinstance(raised.value.error, DeniedError)
        assert raised.value.code == "credentials"
        maker.fault = None
        await numbers.renew("doing")
        assert (numbers.now, maker.made) == (1, 1)
        assert numbers.is_new(1), "no other would be better"

    play(scene)


def test_a_source_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current, "CREDENTIALS_S", 0.05)

    async def scene(maker: Maker, numbers: Current[int]) -> None:
        maker.gate.clear()
        with pytest.raises(AttemptError, match=r"credentials cannot be had: not within 0\.05 s"):
            await numbers.renew("x")

    play(scene)


def test_closing_ends_a_renewal_and_whoever_waits_for_it() -> None:
    async def scene(maker: Maker, numbers: Current[int]) -> None:
        maker.gate.clear()
        waiting = asyncio.create_task(numbers.renew("x"))
        await asyncio.sleep(0)
        await numbers.close()
        with pytest.raises(AttemptError, match="closed") as raised:
            await waiting
        assert raised.value.code == "closed"
        with pytest.raises(AttemptError, match=r"^x: the client is closed$"):
            async with numbers.use("x"):
                pass
        await numbers.renew("x")
        assert (numbers.now, maker.made) == (None, 1)

    play(scene)


def test_what_is_in_use_when_all_is_closed_is_ended_once() -> None:
    async def scene(maker: Maker, numbers: Current[int]) -> None:
        async with numbers.use("x"):
            await numbers.close()
        assert maker.ended == [1]

    play(scene)
