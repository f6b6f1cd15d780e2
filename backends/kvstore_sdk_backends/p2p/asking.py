"""From names and buffers to answers: look up, fetch from where it is, and once more elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from kvstore_sdk.backend import (
    BackendError,
    Deadline,
    Failure,
    Get,
    GetResult,
    GetStatus,
    TimedOutError,
    UnavailableError,
)
from kvstore_sdk_backends.p2p.doubts import LandingDoubt
from kvstore_sdk_backends.p2p.landing import InDoubtError, Landing
from kvstore_sdk_backends.p2p.link import Link
from kvstore_sdk_backends.p2p.lookups import Lookups
from kvstore_sdk_backends.p2p.messages import BUSY, FOUND, MAX_WAIT_MS, MISSING, WRONG_SIZE, Fetch, Result
from kvstore_sdk_backends.p2p.places import Places

__all__ = ["Asking"]

ROUNDS = 2
"""Of looking up and fetching: a peer that has lost a record, or is lost itself, is not the only one."""

_FOUND = GetResult(GetStatus.FOUND)
_MISSING = GetResult(GetStatus.MISSING)
_TIMED_OUT = GetResult(GetStatus.TIMED_OUT)


class Asking:
    """All of it belongs to the loop.

    Attributes:
        counts: What became of loads, for `P2PBackend.counters`.
    """

    def __init__(self, lookups: Lookups, places: Places, landing: Landing | None) -> None:
        """`landing`: None where no data comes over NIXL."""
        self._lookups = lookups
        self._places = places
        self._landing = landing
        self.counts = {"loads": 0, "loaded": 0, "loaded_bytes": 0, "load_failures": 0, "load_timeouts": 0, "in_doubt": 0, "breaches": 0}

    def forget(self) -> None:
        """Where records were found means nothing any more."""
        self._places.clear()

    async def exists(self, names: Sequence[str], until_s: float) -> list[bool | Failure]:
        hunt = await self._lookups.find(names, until_s)
        failure = hunt.failure()
        absent: bool | Failure = Failure(failure) if failure is not None else False
        return [absent if name in hunt.missing else True for name in names]

    async def get(self, gets: Sequence[Get], until_s: float, opened: list[LandingDoubt]) -> list[GetResult]:
        """Each get has one buffer at most. `opened` gets what may be in doubt, whatever becomes of this call."""
        self.counts["loads"] += len(gets)
        answers: dict[str, GetResult] = {}
        left = {get.name: get for get in gets}
        for last in (False, True):
            unknown = [name for name in left if self._places.of(name) is None]
            if unknown:
                hunt = await self._lookups.find(unknown, until_s)
                failure = hunt.failure()
                for name in hunt.missing:
                    del left[name]
                    if name not in answers or answers[name].status is GetStatus.MISSING:
                        answers[name] = GetResult.failed(failure) if failure is not None else _MISSING
            groups: dict[Link, list[Get]] = {}
            for name, get in left.items():
                # One whose session has ended since is looked up again, if there is a next round.
                if (place := self._places.of(name)) is not None and not get.size_bytes:
                    # No record is empty.
                    answers[name] = GetResult.wrong_size(place.size_bytes, 0)
                elif place is not None:
                    groups.setdefault(place.link, []).append(get)
                else:
                    answers.setdefault(name, GetResult.failed(UnavailableError(f"p2p get {name}: its peer is lost")))
            fetched = await asyncio.gather(*(self._fetch(link, group, until_s, opened) for link, group in groups.items()))
            for group, results in zip(groups.values(), fetched, strict=True):
                for get, result in zip(group, results, strict=True):
                    answers[get.name] = result
                    if result.status not in (GetStatus.MISSING, GetStatus.FAILED):
                        del left[get.name]
                    else:
                        self._places.forget(get.name)
            if not left or last or time.monotonic() >= until_s:
                break
        return [self._counted(get, answers.get(get.name, _TIMED_OUT)) for get in gets]

    def _counted(self, get: Get, result: GetResult) -> GetResult:
        if result.status is GetStatus.FOUND:
            self.counts["loaded"] += 1
            self.counts["loaded_bytes"] += get.size_bytes
        elif result.status is GetStatus.FAILED:
            self.counts["load_failures"] += 1
        elif result.status in (GetStatus.TIMED_OUT, GetStatus.IN_DOUBT):
            self.counts["load_timeouts"] += 1
            self.counts["in_doubt"] += result.status is GetStatus.IN_DOUBT
        return result

    async def _fetch(self, link: Link, gets: Sequence[Get], until_s: float, opened: list[LandingDoubt]) -> list[GetResult]:
        step = link.welcome.max_items
        parts = [gets[at : at + step] for at in range(0, len(gets), step)]
        if link.welcome.path == "nixl":
            moving = [self._over_nixl(link, part, until_s, opened) for part in parts]
        else:
            moving = [self._over_zmq(link, part, until_s) for part in parts]
        fetched = await asyncio.gather(*moving)
        return [result for part in fetched for result in part]

    async def _over_nixl(self, link: Link, gets: Sequence[Get], until_s: float, opened: list[LandingDoubt]) -> list[GetResult]:
        try:
            if self._landing is None:
                raise UnavailableError("p2p: this node has no data plane")
            result = await self._landing.fetch(link, gets, until_s, opened)
        except InDoubtError as error:
            return [GetResult(GetStatus.IN_DOUBT, error=error, ticket=error.doubt)] * len(gets)
        except TimedOutError:
            return [_TIMED_OUT] * len(gets)
        except BackendError as error:
            return [GetResult.failed(error)] * len(gets)
        return self._judge(link, gets, result)

    async def _over_zmq(self, link: Link, gets: Sequence[Get], until_s: float) -> list[GetResult]:
        assert link.receiver is not None
        number = link.number()
        left_ms = max(1, min(MAX_WAIT_MS, int((until_s - time.monotonic()) * 1000)))
        arrival = link.receiver.expect(number, {index: get.into[0] for index, get in enumerate(gets)})
        answer: asyncio.Future[Result] | None = None
        try:
            answer = link.post(Fetch(number, 0, left_ms, tuple((get.name, get.size_bytes, 0, 0) for get in gets)), Result)
            news: list[asyncio.Future[Any]] = [answer, arrival.over]
            await asyncio.wait(news, timeout=max(0.0, until_s - time.monotonic()), return_when=asyncio.FIRST_COMPLETED)
            results = [_FOUND] * len(gets)
            if arrival.missing and (answer.done() or link.ended):
                results = self._judge(link, gets, answer.result())
                arrival.skip(index for index, result in enumerate(results) if result is not _FOUND)
                await arrival.wait(Deadline(until_s))
            lost = _TIMED_OUT
            if link.ended:
                lost = GetResult.failed(link.error)
            return [lost if index in arrival.missing else result for index, result in enumerate(results)]
        except BackendError as error:
            return [GetResult.failed(error) if index in arrival.missing else _FOUND for index in range(len(gets))]
        finally:
            # From here on no byte is written.
            arrival.cancel()
            if answer is not None:
                answer.cancel()

    def _judge(self, link: Link, gets: Sequence[Get], result: Result) -> list[GetResult]:
        """What a peer says of each, which ends the session where it cannot be."""
        judged = []
        for get, (code, size_bytes) in zip(gets, result.statuses, strict=True):
            asked_bytes = get.size_bytes
            if (code == FOUND and size_bytes != asked_bytes) or (code == WRONG_SIZE and size_bytes in (0, asked_bytes)):
                self.counts["breaches"] += 1
                error = link.end(f"answered status {code} and {size_bytes} bytes for a record of {asked_bytes}")
                return [GetResult.failed(error)] * len(gets)
            if code == FOUND:
                judged.append(_FOUND)
            elif code == MISSING:
                judged.append(_MISSING)
            elif code == WRONG_SIZE:
                judged.append(GetResult.wrong_size(size_bytes, asked_bytes))
            else:
                why = "is busy" if code == BUSY else "could not send it"
                judged.append(GetResult.failed(UnavailableError(f"p2p get {get.name}: peer {link.address} {why}")))
        return judged
