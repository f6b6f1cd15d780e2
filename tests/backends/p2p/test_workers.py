"""Steps that block get threads, so many at most, which nobody waits for."""

from __future__ import annotations

import asyncio
import threading

import pytest
from p2p_bench import PATIENCE_S, run, until

from kvstore_sdk.backend import UnavailableError
from kvstore_sdk_backends.p2p.workers import Workers


def test_a_step_returns_or_raises_to_whoever_waits() -> None:
    async def test() -> None:
        workers = Workers("test", 2)
        assert await workers.run(lambda: 7) == 7
        with pytest.raises(ZeroDivisionError):
            await workers.run(lambda: 1 // 0)
        assert await workers.run(threading.current_thread) is not threading.current_thread()
        workers.close()

    run(test)


def test_there_are_as_many_threads_as_steps_at_a_time_up_to_the_most() -> None:
    async def test() -> None:
        workers = Workers("test", 3)
        for _ in range(20):
            await workers.run(int)
        assert workers.threads == 1
        free = threading.Event()
        waiting = [asyncio.ensure_future(workers.run(lambda: free.wait(PATIENCE_S))) for _ in range(8)]
        await until(lambda: workers.threads == 3)
        assert not any(step.done() for step in waiting)
        free.set()
        assert await asyncio.gather(*waiting) == [True] * 8
        assert workers.threads == 3
        workers.close()
        await until(lambda: workers.threads == 0)

    run(test)


def test_threads_end_when_they_have_nothing_to_do_and_come_again() -> None:
    async def test() -> None:
        workers = Workers("test", 2, idle_s=0.02)
        for _ in range(3):
            assert await workers.run(lambda: 7) == 7
            await until(lambda: workers.threads == 0)
        workers.close()

    run(test)


def test_many_steps_from_threads_that_come_and_go_are_all_done() -> None:
    async def test() -> None:
        workers = Workers("test", 4, idle_s=0.001)
        for _ in range(50):
            assert await asyncio.gather(*(workers.run(lambda n=n: n) for n in range(10))) == list(range(10))  # type: ignore[misc]
            await asyncio.sleep(0.001)
        workers.close()
        await until(lambda: workers.threads == 0)

    run(test)


def test_what_is_left_when_they_close_is_done_and_what_comes_later_too() -> None:
    async def test() -> None:
        workers = Workers("test", 1)
        free = threading.Event()
        waiting = [asyncio.ensure_future(workers.run(lambda: free.wait(PATIENCE_S))) for _ in range(3)]
        await until(lambda: workers.threads == 1)
        workers.close()
        workers.close()
        late = asyncio.ensure_future(workers.run(lambda: 7))
        assert await late == 7
        free.set()
        assert await asyncio.gather(*waiting) == [True] * 3
        await until(lambda: workers.threads == 0)

    run(test)


def test_a_step_whose_caller_is_gone_goes_on() -> None:
    async def test() -> None:
        workers = Workers("test", 1)
        began, free, ended = threading.Event(), threading.Event(), threading.Event()

        def step() -> None:
            began.set()
            free.wait(PATIENCE_S)
            ended.set()

        caller = asyncio.ensure_future(workers.run(step))
        await until(began.is_set)
        caller.cancel()
        await asyncio.wait({caller})
        free.set()
        await until(ended.is_set)
        assert await workers.run(lambda: 7) == 7
        workers.close()

    run(test)


def _refuse(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_where_no_thread_can_be_begun_a_step_is_refused_and_never_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container at its limit of processes. Whoever was told that it failed does not expect it later."""

    async def test() -> None:
        workers = Workers("test", 2)
        done: list[int] = []
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", _refuse)
            for _ in range(3):
                with pytest.raises(UnavailableError, match="can't start new thread; raise the limit"):
                    await workers.run(lambda: done.append(1))
        assert workers.threads == 0
        await asyncio.gather(*(workers.run(lambda: done.append(2)) for _ in range(2)))
        assert done == [2, 2]
        workers.close()
        await until(lambda: workers.threads == 0)

    run(test)


def test_where_no_more_threads_can_be_begun_those_that_are_there_do_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        workers = Workers("test", 4)
        free = threading.Event()
        waiting = [asyncio.ensure_future(workers.run(lambda: free.wait(PATIENCE_S)))]
        await until(lambda: workers.threads == 1)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", _refuse)
            waiting += [asyncio.ensure_future(workers.run(lambda: free.wait(PATIENCE_S))) for _ in range(5)]
            await asyncio.sleep(0)
        assert workers.threads == 1
        free.set()
        assert await asyncio.gather(*waiting) == [True] * 6
        workers.close()
        await until(lambda: workers.threads == 0)

    run(test)


def test_a_step_that_comes_after_closing_is_refused_where_no_thread_can_be_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        workers = Workers("test", 1)
        workers.close()
        monkeypatch.setattr(threading.Thread, "start", _refuse)
        with pytest.raises(UnavailableError):
            await workers.run(int)

    run(test)
