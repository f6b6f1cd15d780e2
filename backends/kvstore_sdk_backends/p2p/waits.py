"""Look-ups that wait for records to come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable, Sequence

from kvstore_sdk_backends.p2p.limits import Limits

__all__ = ["Waits"]


class _Wait:
    """One look-up. `missing` is the first name that was not there when it was looked at last."""

    __slots__ = ("answer", "missing", "names", "number", "session", "until_s")

    def __init__(self, session: Hashable, number: int, names: Sequence[str], until_s: float, answer: Callable[[], None]) -> None:
        self.session = session
        self.number = number
        self.names = names
        self.until_s = until_s
        self.answer = answer
        self.missing = 0


class Waits:
    """Of each look-up that waits, one name is looked at every few milliseconds: the first that was missing; the others once it is there.

    One thread uses it.
    """

    def __init__(self, sizes: Callable[[Sequence[str]], list[int]], limits: Limits) -> None:
        """`sizes`: bytes of each record, 0 for what is not there."""
        self._sizes = sizes
        self._limits = limits
        self._waits: list[_Wait] = []
        self._any = asyncio.Event()
        # Look-ups and their names, of each session and of all.
        self._of_session: dict[Hashable, tuple[int, int]] = {}
        self._names = 0

    def __len__(self) -> int:
        return len(self._waits)

    def add(self, session: Hashable, number: int, names: Sequence[str], until_s: float, answer: Callable[[], None]) -> bool:
        """Have `answer` called once, by `look`: when all the names are there, or `until_s` is past; or by `cut_short`, with that number.
        False: too many wait already.

        Of all that wait the session that has most gives up its oldest for one of another that has fewer. That is answered by this call.
        """
        limits = self._limits
        waits, all_names = self._of_session.get(session, (0, 0))
        mine = waits + 1, all_names + len(names)
        if mine[0] > limits.session_waits or mine[1] > limits.session_wait_names:
            return False
        given_up: list[_Wait] = []
        while not (has_room := self._has_room(len(names))) and (oldest := self._oldest_of_the_greediest(*mine)) is not None:
            self._remove([oldest])
            given_up.append(oldest)
        if has_room:
            self._of_session[session] = mine
            self._names += len(names)
            self._waits.append(_Wait(session, number, names, until_s, answer))
            self._any.set()
        for wait in given_up:
            wait.answer()
        return has_room

    async def run(self, safely: Callable[[Callable[[float], None]], None]) -> None:
        """Look at them while there are any, until it is cancelled. `safely` makes the look, and survives it."""
        while True:
            await self._any.wait()
            while self._waits:
                began_s = time.monotonic()
                safely(self.look)
                # However many wait, looking takes a tenth of the loop's time at most.
                await asyncio.sleep(max(self._limits.wait_poll_s, 9 * (time.monotonic() - began_s)))
            self._any.clear()

    def look(self, now_s: float) -> None:
        """Answer the look-ups whose records are there, and those whose time is up."""
        if not self._waits:
            return
        firsts = self._sizes([wait.names[wait.missing] for wait in self._waits])
        over = [wait for wait, size in zip(self._waits, firsts, strict=True) if (size and self._all_there(wait)) or wait.until_s <= now_s]
        if over:
            self._remove(over)
            for wait in over:
                wait.answer()

    def cut_short(self, session: Hashable, number: int) -> None:
        """Answer the look-up that was added with this number now, if it waits."""
        if (wait := next((one for one in self._waits if (one.number, one.session) == (number, session)), None)) is not None:
            self._remove([wait])
            wait.answer()

    def end(self, session: Hashable) -> None:
        """Forget what a session waits for: nothing is answered."""
        if session in self._of_session:
            self._remove([wait for wait in self._waits if wait.session == session])

    def waits_of(self, session: Hashable) -> int:
        """How many look-ups of a session wait."""
        return self._of_session.get(session, (0, 0))[0]

    def _has_room(self, names: int) -> bool:
        return len(self._waits) < self._limits.max_waits and self._names + names <= self._limits.max_wait_names

    def _oldest_of_the_greediest(self, waits: int, names: int) -> _Wait | None:
        """None: no session has more than these."""
        by, own = (0, waits) if len(self._waits) >= self._limits.max_waits else (1, names)
        most = max(self._of_session, key=lambda session: self._of_session[session][by], default=None)
        if most is None or self._of_session[most][by] <= own:
            return None
        return next(wait for wait in self._waits if wait.session == most)

    def _all_there(self, wait: _Wait) -> bool:
        sizes = self._sizes(wait.names)
        wait.missing = next((at for at, size in enumerate(sizes) if not size), 0)
        return all(sizes)

    def _remove(self, over: Sequence[_Wait]) -> None:
        gone = set(map(id, over))
        self._waits = [wait for wait in self._waits if id(wait) not in gone]
        for wait in over:
            waits, names = self._of_session[wait.session]
            self._names -= len(wait.names)
            if waits > 1:
                self._of_session[wait.session] = (waits - 1, names - len(wait.names))
            else:
                del self._of_session[wait.session]
