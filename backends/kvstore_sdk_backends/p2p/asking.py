"""From names and buffers to answers: look up, fetch from where it is, and once more elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

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
from kvstore_sdk_backends.p2p.hints import Hinted
from kvstore_sdk_backends.p2p.landing import InDoubtError, Landing
from kvstore_sdk_backends.p2p.link import Link
from kvstore_sdk_backends.p2p.lookups import Lookups
from kvstore_sdk_backends.p2p.messages import BUSY, FOUND, MAX_WAIT_MS, MISSING, WRONG_SIZE, Fetch, Result
from kvstore_sdk_backends.p2p.peer import Peer
from kvstore_sdk_backends.p2p.places import Places

__all__ = ["Asking"]

T = TypeVar("T")

PATIENCE_S = 1.0
"""A load that had less time than this says nothing about the peer that did not finish it."""

_ELSEWHERE = frozenset({GetStatus.MISSING, GetStatus.WRONG_SIZE, GetStatus.FAILED})
"""What another peer may have all the same."""

_FOUND = GetResult(GetStatus.FOUND)
_MISSING = GetResult(GetStatus.MISSING)
_TIMED_OUT = GetResult(GetStatus.TIMED_OUT)


class _PeerFaultError(UnavailableError):
    """A peer has the record, and could not give it."""


async def _all(steps: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What they return; an exception only when all have ended, since they fill buffers."""
    steps = list(steps)
    if len(steps) == 1:
        # A task of its own would have it wait for its turn twice.
        return [await steps[0]]
    done = await asyncio.gather(*steps, return_exceptions=True)
    for one in done:
        if isinstance(one, BaseException):
            raise one
    return [one for one in done if not isinstance(one, BaseException)]


def _told(doing: str, error: BackendError, until_s: float) -> BackendError:
    """The error as whoever called has it: that of the operation. Once its time is up, that is what is the matter."""
    kind = TimedOutError if isinstance(error, TimedOutError) or time.monotonic() >= until_s else UnavailableError
    return kind(f"{doing}: {str(error).removeprefix('p2p ')}")


def _lost(name: str, error: BackendError, until_s: float) -> GetResult:
    told = _told(f"p2p get {name}", error, until_s)
    return _TIMED_OUT if isinstance(told, TimedOutError) else GetResult.failed(told)


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

    async def exists(self, names: Sequence[str], until_s: float, hinted: Mapping[Hinted, Sequence[str]]) -> list[bool | Failure]:
        """Look up, and wait for what is not there yet, as `hinted` says."""
        hunt = await self._lookups.find(names, until_s, hinted=hinted)
        failure = hunt.failure()
        absent: bool | Failure = Failure(_told("p2p exists", failure, until_s)) if failure is not None else False
        return [absent if name in hunt.missing else True for name in names]

    async def get(self, gets: Sequence[Get], until_s: float, opened: list[LandingDoubt]) -> list[GetResult]:
        """Look up what is not known, fetch, and do both once more: a peer that has lost a record may not be the only one, and one whose
        session was lost may have another one at once.

        Each get has one buffer at most. `opened` gets what may be in doubt, whatever becomes of this call.
        """
        self.counts["loads"] += len(gets)
        answers: dict[str, GetResult] = {}
        left = {get.name: get for get in gets}
        avoid: set[Peer] = set()
        lost = False
        for last in (False, True):
            unknown = [name for name in left if self._places.of(name) is None]
            if unknown:
                hunt = await self._lookups.find(unknown, until_s, avoid=avoid)
                if lost or hunt.failure() is not None:
                    hunt = await self._lookups.find_again(hunt, until_s)
                failure = hunt.failure()
                for name in hunt.missing:
                    del left[name]
                    if name not in answers or answers[name].status is GetStatus.MISSING:
                        answers[name] = _lost(name, failure, until_s) if failure is not None else _MISSING
            groups: dict[tuple[Peer, Link], list[Get]] = {}
            for name, get in left.items():
                if (place := self._places.of(name)) is None:
                    # Its session has ended since. If there is a next round, it is looked up again.
                    answers.setdefault(name, GetResult.failed(UnavailableError(f"p2p get {name}: its peer is lost")))
                elif not get.size_bytes:
                    # No record is empty.
                    answers[name] = GetResult.wrong_size(place.size_bytes, 0)
                else:
                    groups.setdefault((place.peer, place.link), []).append(get)
            began_s = time.monotonic()
            fetched = await _all(self._fetch(link, group, until_s, opened) for (_, link), group in groups.items())
            for (peer, link), group, results in zip(groups, groups.values(), fetched, strict=True):
                if link.ended and {GetStatus.FAILED} <= {result.status for result in results} <= {GetStatus.FAILED, GetStatus.FOUND}:
                    # Nothing is in doubt; and the first time it says little of the peer.
                    lost = True
                    if last:
                        peer.blame(began_s)
                elif self._is_of_no_use(peer, results, began_s):
                    avoid.add(peer)
                for get, result in zip(group, results, strict=True):
                    answers[get.name] = result
                    if result.status is not GetStatus.FOUND:
                        self._places.forget(get.name)
            left = {name: get for name, get in left.items() if answers[name].status in _ELSEWHERE}
            if not left or last or time.monotonic() >= until_s:
                break
        return [self._counted(get, answers.get(get.name, _TIMED_OUT)) for get in gets]

    def _is_of_no_use(self, peer: Peer, results: Sequence[GetResult], began_s: float) -> bool:
        """Whether to ask others for what a peer did not give of what it had. One that gave nothing is not the first to be asked."""
        statuses = {result.status for result in results}
        if GetStatus.FOUND in statuses:
            peer.thank()
            # What it is too busy for it may give the next time.
            return bool(statuses & {GetStatus.MISSING, GetStatus.WRONG_SIZE})
        peer.hit_s = 0.0
        late = bool(statuses & {GetStatus.TIMED_OUT, GetStatus.IN_DOUBT})
        if any(isinstance(result.error, _PeerFaultError) for result in results) or (late and time.monotonic() - began_s >= PATIENCE_S):
            peer.blame(began_s)
        return True

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
            moving: list[Coroutine[Any, Any, list[GetResult]]] = [self._over_nixl(link, part, until_s, opened) for part in parts]
        else:
            moving = [self._over_zmq(link, part, until_s) for part in parts]
        fetched = await _all(moving)
        return [result for part in fetched for result in part]

    async def _over_nixl(self, link: Link, gets: Sequence[Get], until_s: float, opened: list[LandingDoubt]) -> list[GetResult]:
        try:
            if self._landing is None:
                raise UnavailableError("p2p: this node has no data plane")
            return self._judge(link, gets, await self._landing.fetch(link, gets, until_s, opened))
        except InDoubtError as error:
            return [GetResult(GetStatus.IN_DOUBT, _told(f"p2p get {get.name}", error, until_s), error.doubt) for get in gets]
        except BackendError as error:
            return [_lost(get.name, error, until_s) for get in gets]

    async def _over_zmq(self, link: Link, gets: Sequence[Get], until_s: float) -> list[GetResult]:
        assert link.receiver is not None
        number = link.number()
        left_ms = max(1, min(MAX_WAIT_MS, int((until_s - time.monotonic()) * 1000)))
        arrival = link.receiver.expect(number, {index: get.into[0] for index, get in enumerate(gets)})
        answer: asyncio.Future[Result] | None = None
        # Of what has arrived, unless the peer says something else.
        results = [_FOUND] * len(gets)
        try:
            answer = link.post(Fetch(number, 0, left_ms, tuple((get.name, get.size_bytes, 0, 0) for get in gets)), Result)
            answer.add_done_callback(lambda _: arrival.stir())
            await arrival.wait(Deadline(until_s))
            if arrival.missing and link.receiver.closed:
                # Nothing comes any more; why the session ends may be known a little later.
                await asyncio.wait({ended := asyncio.ensure_future(link.wait_ended())}, timeout=max(0.0, until_s - time.monotonic()))
                ended.cancel()
            if arrival.missing and (answer.done() or link.ended):
                results = self._judge(link, gets, answer.result())
                arrival.skip(index for index, result in enumerate(results) if result is not _FOUND)
                await arrival.wait(Deadline(until_s))
            if arrival.missing and link.ended:
                raise link.error
            return [_TIMED_OUT if index in arrival.missing else result for index, result in enumerate(results)]
        except BackendError as error:
            lost = [_lost(get.name, error, until_s) for get in gets]
            return [lost[index] if index in arrival.missing else result for index, result in enumerate(results)]
        finally:
            # From here on no byte is written.
            arrival.cancel()
            if answer is not None:
                answer.cancel()

    def _judge(self, link: Link, gets: Sequence[Get], result: Result) -> list[GetResult]:
        """What a peer says of each.

        Raises:
            UnavailableError: that cannot be; it ends the session.
        """
        judged = []
        for get, (code, size_bytes) in zip(gets, result.statuses, strict=True):
            asked_bytes = get.size_bytes
            if (code == FOUND and size_bytes != asked_bytes) or (code == WRONG_SIZE and size_bytes in (0, asked_bytes)):
                self.counts["breaches"] += 1
                raise link.end(f"answered status {code} and {size_bytes} bytes for a record of {asked_bytes}")
            if code == FOUND:
                judged.append(_FOUND)
            elif code == MISSING:
                judged.append(_MISSING)
            elif code == WRONG_SIZE:
                judged.append(GetResult.wrong_size(size_bytes, asked_bytes))
            else:
                doing = f"p2p get {get.name}: peer {link.address}"
                error = UnavailableError(f"{doing} is busy") if code == BUSY else _PeerFaultError(f"{doing} could not send it")
                judged.append(GetResult.failed(error))
        return judged
