"""Which peers the data plane may write to, and the end of what is written to those that are gone."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from kvstore_sdk.backend import BackendError, Deadline, InvalidError, UnavailableError
from kvstore_sdk_backends.p2p.limits import Limits
from kvstore_sdk_backends.p2p.messages import Target
from kvstore_sdk_backends.p2p.notices import Notices
from kvstore_sdk_backends.p2p.plane import Plane
from kvstore_sdk_backends.p2p.sessions import Session
from kvstore_sdk_backends.p2p.workers import Workers

__all__ = ["Targets"]

logger = logging.getLogger(__name__)

_ADMIT_S = 3.0
PAUSE_S = 1.0
"""Between two Targets of one host, after one of it that could not be read: NIXL prints what is wrong with each, and may end for it."""
MOST_WAITING = 4
"""So many of a host wait for that; the others are refused for now."""
FORGIVEN_S = 60.0
_MOST_HOSTS = 256


class Targets:
    """The data plane, as far as sessions begin and end there.

    Attributes:
        fences: How often it was restarted to end transfers.
    """

    def __init__(self, plane: Plane, workers: Workers, limits: Limits, label: str) -> None:
        """`label`: of the node, in the log."""
        self.fences = 0
        self._plane = plane
        self._workers = workers
        self._limits = limits
        self._label = label
        self._notices = Notices()
        # Hosts that sent what could not be read, and when the next Target of theirs may be.
        self._bent: dict[str, float] = {}

    @property
    def up(self) -> bool:
        """Whether the data plane is: nothing moves over it otherwise, and sessions that are to use it are of no use."""
        return self._plane.up

    async def admit(self, session: Session, target: Target, before: Sequence[Session] = ()) -> tuple[str, str] | None:
        """Let the data plane write to what a peer named, one Target after the other. Returns code and text of a refusal, if it cannot.

        While it is read, and where it cannot be, nothing is written. Whoever calls this counted it as one of `targets_pending`.

        Args:
            before: Sessions of the same node that have just ended. The data plane takes an agent once, so these are forgotten first.
        """
        try:
            async with session.targets:
                session.target = None
                for old in before:
                    # Behind whatever Target of that one is being read.
                    async with old.targets:
                        await self._workers.run(partial(self._plane.drop, old.id))
                await self._wait_for_turn(session)
                admit = partial(self._plane.admit, session.id, target.agent, target.regions, Deadline.after(_ADMIT_S))
                await self._workers.run(admit)
                if session.ended:
                    await self._workers.run(partial(self._plane.drop, session.id))
                else:
                    session.target = target
        except BackendError as error:
            # Whatever is not wrong with the Target itself may be over soon.
            code = "path" if isinstance(error, InvalidError) else "busy"
            if code == "path":
                self._note_bent(session.host)
            if (unsaid := self._notices.due((session.host, code))) is not None:
                logger.warning("%s: nixl does not reach %s: %s%s", self._label, session.host, error, Notices.more(unsaid))
            return code, str(error)
        finally:
            session.targets_pending -= 1
        return None

    def _note_bent(self, host: str) -> None:
        next_s = max(self._bent.pop(host, 0.0), time.monotonic() + PAUSE_S)
        while len(self._bent) >= _MOST_HOSTS:
            del self._bent[next(iter(self._bent))]
        self._bent[host] = next_s

    async def _wait_for_turn(self, session: Session) -> None:
        now_s = time.monotonic()
        if (next_s := self._bent.get(session.host)) is None or now_s - next_s > FORGIVEN_S:
            self._bent.pop(session.host, None)
            return
        turn_s = max(now_s, next_s)
        if turn_s - now_s > MOST_WAITING * PAUSE_S:
            raise UnavailableError(f"p2p: others of {session.host} sent targets that cannot be read, and wait as well; try again")
        self._bent[session.host] = turn_s + PAUSE_S
        await asyncio.sleep(turn_s - now_s)
        if session.ended:
            raise UnavailableError("p2p: the session ended meanwhile")

    async def drop(self, session: Session) -> None:
        """Have the data plane forget a peer whose session ended. What is on its way to it ends by itself, or is ended; also what was begun
        for a Target before the last one, which may still be being read, or was refused."""
        with suppress(BackendError):
            await self._workers.run(partial(self._plane.drop, session.id))
        until = Deadline.after(self._limits.fence_after_s)
        while session.fetching and not until.expired:
            await asyncio.sleep(self._limits.fence_after_s / 100)
        if session.fetching:
            logger.warning("%s: transfers to %s do not end; the data plane is restarted", self._label, session.host)
            await self.fence(Deadline.after(self._limits.fence_after_s))

    async def fence(self, until: Deadline) -> None:
        """Restart the data plane: whatever it was about to read or write, it does not."""
        self.fences += 1
        with suppress(TimeoutError):
            async with asyncio.timeout(until.remaining_s()):
                await self._workers.run(self._plane.fence)
