"""Failed requests are repeated with growing gaps, inside the deadline, and so many run at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scripted_client import ScriptedClient, refused

from kvstore_sdk.backend import Deadline, DeniedError
from kvstore_sdk_backends.s3.client import AttemptError
from kvstore_sdk_backends.s3.retries import FIRST_GAP_S, LONGEST_GAP_S, Gaps, Requests

part = st.floats(0.0, 1.0, exclude_max=True)


def requests_of(client: ScriptedClient, concurrency: int = 8, retries: int = 4, draw: Callable[[], float] = lambda: 0.0) -> Requests:
    return Requests(client, "s3://bucket/kv", "kv", concurrency=concurrency, retries=retries, draw=draw)


class Attempts:
    """An attempt that fails so many times, or as it is told."""

    def __init__(self, *failures: AttemptError) -> None:
        self.failures = list(failures)
        self.at_s: list[float] = []

    async def __call__(self) -> str:
        self.at_s.append(time.monotonic())
        if self.failures:
            raise self.failures.pop(0)
        return "done"


def repeat(requests: Requests, attempt: Callable[[], Awaitable[str]], limit_s: float = 30.0) -> str:
    return asyncio.run(requests.repeat(attempt, Deadline.after(limit_s)))


@given(part, st.integers(0, 20))
def test_gaps_stay_below_a_limit_that_doubles(drawn: float, retries: int) -> None:
    gaps = Gaps(retries, lambda: drawn)
    for number in range(retries):
        gap_s = gaps.next_s(0.0, 1e9)
        assert gap_s == pytest.approx(drawn * min(FIRST_GAP_S * 2**number, LONGEST_GAP_S))
    assert gaps.next_s(0.0, 1e9) is None


@given(part, st.floats(0.0, 100.0), st.floats(0.0, 100.0))
@example(0.5, 0.9999999999999999, 1.0)
def test_a_gap_is_as_long_as_the_store_wishes_and_fits_in_what_is_left(drawn: float, retry_after_s: float, remaining_s: float) -> None:
    gap_s = Gaps(1, lambda: drawn).next_s(retry_after_s, remaining_s)
    if gap_s is None:
        # Not for a wish that would have fitted.
        assert retry_after_s == 0 or retry_after_s >= remaining_s
    else:
        assert retry_after_s <= gap_s < remaining_s


def test_those_that_failed_together_come_back_apart() -> None:
    drawn = {Gaps(1).next_s(1.0, 10.0) for _ in range(50)}
    assert len(drawn) > 40


def test_an_attempt_is_repeated_until_it_gets_an_answer() -> None:
    attempt = Attempts(refused(), refused())
    assert repeat(requests_of(ScriptedClient()), attempt) == "done"
    assert len(attempt.at_s) == 3


def test_the_last_failure_is_told_when_attempts_run_out() -> None:
    attempt = Attempts(*(refused(f"no {number}") for number in range(9)))
    with pytest.raises(AttemptError, match="no 2"):
        repeat(requests_of(ScriptedClient(), retries=2), attempt)
    assert len(attempt.at_s) == 3


def test_what_cannot_succeed_is_not_repeated() -> None:
    attempt = Attempts(AttemptError(DeniedError("403")))
    with pytest.raises(AttemptError, match="403"):
        repeat(requests_of(ScriptedClient()), attempt)
    assert len(attempt.at_s) == 1


def test_the_wish_of_the_store_is_followed() -> None:
    attempt = Attempts(refused(retry_after_s=0.3))
    assert repeat(requests_of(ScriptedClient()), attempt) == "done"
    assert attempt.at_s[1] - attempt.at_s[0] >= 0.3


def test_a_wish_beyond_the_deadline_is_answered_at_once() -> None:
    attempt = Attempts(refused(retry_after_s=60.0))
    begun_s = time.monotonic()
    with pytest.raises(AttemptError):
        repeat(requests_of(ScriptedClient()), attempt, limit_s=20.0)
    assert time.monotonic() - begun_s < 10


def test_no_more_than_the_limit_run_at_a_time_and_nobody_waits_while_there_is_room() -> None:
    client = ScriptedClient()
    client.delay_s = 0.001
    requests = requests_of(client, concurrency=64)

    async def all_of_them() -> None:
        await asyncio.gather(*(requests.repeat(lambda: client.head("kv/a"), Deadline.after(30)) for _ in range(256)))

    asyncio.run(all_of_them())
    assert client.peak == 64
    assert client.count("head") == 256


@pytest.mark.parametrize(("concurrency", "ahead"), [(1, 1), (2, 1), (4, 3), (64, 56)])
def test_a_load_is_next_however_much_waits_in_the_background(concurrency: int, ahead: int) -> None:
    client = ScriptedClient()
    client.delay_s = 0.01
    requests = requests_of(client, concurrency=concurrency)

    def ask(key: str, background: bool) -> asyncio.Future[int | None]:
        return asyncio.ensure_future(requests.repeat(lambda: client.head(key), Deadline.after(30), background=background))

    async def all_of_them() -> None:
        behind = [ask("background", True) for _ in range(200)]
        await asyncio.sleep(0)
        await ask("load", False)
        await asyncio.gather(*behind)

    asyncio.run(all_of_them())
    assert [key for _, key in client.requests].index("load") == ahead
    assert (client.count("head"), client.peak) == (201, min(concurrency, ahead + 1))


def test_a_gap_holds_no_turn() -> None:
    client = ScriptedClient()
    requests = requests_of(client, concurrency=1)
    slow = Attempts(refused(retry_after_s=0.5))
    quick = Attempts()

    async def both() -> None:
        await asyncio.gather(requests.repeat(slow, Deadline.after(30)), requests.repeat(quick, Deadline.after(30)))

    asyncio.run(both())
    assert quick.at_s[0] < slow.at_s[1]


def test_those_that_were_refused_together_resolve_credentials_once() -> None:
    client = ScriptedClient()
    requests = requests_of(client)
    attempts = [Attempts(AttemptError(DeniedError("expired"), stale_credentials=True)) for _ in range(5)]

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*(requests.repeat(attempt, Deadline.after(30)) for attempt in attempts))

    assert asyncio.run(all_of_them()) == ["done"] * 5
    assert client.refreshes == 1


def test_a_refresh_that_fails_is_told_to_all_that_wait_for_it() -> None:
    client = ScriptedClient()
    client.fail("refresh", AttemptError(DeniedError("no keys"), code="credentials"))
    requests = requests_of(client)
    attempts = [Attempts(AttemptError(DeniedError("expired"), stale_credentials=True)) for _ in range(5)]

    async def all_of_them() -> list[str | BaseException]:
        repeats = (requests.repeat(attempt, Deadline.after(30)) for attempt in attempts)
        return await asyncio.gather(*repeats, return_exceptions=True)

    assert [str(answer) for answer in asyncio.run(all_of_them())] == ["no keys"] * 5
    assert client.refreshes == 1


def test_a_refresh_that_takes_longer_than_a_call_is_waited_for_by_the_next() -> None:
    client = ScriptedClient()
    client.delay_s = 0.2
    requests = requests_of(client)

    async def two_calls() -> str:
        for _ in range(2):
            expired = Attempts(AttemptError(DeniedError("expired"), stale_credentials=True))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(requests.repeat(expired, Deadline.after(0.01)), 0.01)
        last = Attempts(AttemptError(DeniedError("expired"), stale_credentials=True))
        return await requests.repeat(last, Deadline.after(30))

    assert asyncio.run(two_calls()) == "done"
    assert client.refreshes == 1


def test_credentials_that_stay_refused_are_resolved_once_for_an_item() -> None:
    client = ScriptedClient()
    attempt = Attempts(*(AttemptError(DeniedError("expired"), stale_credentials=True) for _ in range(9)))
    with pytest.raises(AttemptError, match="expired"):
        repeat(requests_of(client), attempt)
    assert (client.refreshes, len(attempt.at_s)) == (1, 2)


def test_credentials_are_resolved_anew_each_time_they_expire() -> None:
    client = ScriptedClient()
    requests = requests_of(client)

    async def one_after_another() -> None:
        for _ in range(3):
            expired = Attempts(AttemptError(DeniedError("expired"), stale_credentials=True))
            assert await requests.repeat(expired, Deadline.after(30)) == "done"

    asyncio.run(one_after_another())
    assert client.refreshes == 3
