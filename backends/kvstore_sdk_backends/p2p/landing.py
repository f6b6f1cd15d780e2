"""Loads over NIXL: peers write into memory of this node, which its data plane maps, and say when they are done."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from kvstore_sdk.backend import Deadline, Get, Region, TimedOutError, UnavailableError
from kvstore_sdk_backends.p2p.doubts import Doubts, LandingDoubt
from kvstore_sdk_backends.p2p.link import Link, PeerRefusedError
from kvstore_sdk_backends.p2p.messages import MAX_REGIONS, MAX_WAIT_MS, Fetch, Ready, Result, Target
from kvstore_sdk_backends.p2p.plane import Plane
from kvstore_sdk_backends.p2p.plane import Target as PlaneTarget

__all__ = ["InDoubtError", "Landing"]

TELL_S = 4.0
"""For a peer to load where it may write: its own data plane takes up to 3 s."""
_GONE_S = 5.0
"""For a child that was killed to be gone, the copies that the kernel makes for it included."""
_LOOK_S = 0.05
_EXPECT_S = 1.0
"""How far ahead the child is told to expect data. Longer would only cost it CPU time after the last record."""


class InDoubtError(UnavailableError):
    """A peer was told to write, and has not said that it is done. `doubt` is over when nothing is written any more."""

    def __init__(self, text: str, doubt: LandingDoubt) -> None:
        super().__init__(text)
        self.doubt = doubt


class Landing:
    """All of it belongs to the loop, but for `add_region` and `remove_region`."""

    def __init__(self, plane: Plane, doubts: Doubts) -> None:
        self._plane = plane
        self._doubts = doubts
        self._changes = 0
        self._target: tuple[int, int, PlaneTarget] | None = None
        self._registered: set[int] = set()
        """Ids of regions."""
        self._told: dict[Link, tuple[PlaneTarget, int]] = {}
        """What each was told last, and the number of that Target."""
        self._telling: dict[Link, asyncio.Task[None]] = {}
        self._looking: asyncio.Task[None] | None = None

    def add_region(self, region: Region) -> None:
        """Let peers write into a region, from any thread; blocks while the child maps it."""
        self._plane.add_region(region)
        self._registered.add(region.id)
        self._changes += 1

    def remove_region(self, region: Region) -> None:
        """Let no peer write into a region any more: afterwards none does. Blocks while a child that maps it ends.

        Raises:
            TimedOutError: a child that cannot be killed may still let peers write there.
        """
        self._registered.discard(region.id)
        # In this order: no new load, none that is under way, and only then may the child have other memory at its address.
        self._plane.withhold(region)
        self._changes += 1
        if self._doubts.touch(region.id):
            self._doubts.fence("memory that a peer may still write into is taken back")
            if not self._doubts.wait_for(region.id, Deadline.after(_GONE_S)):
                raise TimedOutError(f"p2p: {region!r} is taken back, and a process that cannot be ended may still write into it; keep it")
        self._plane.remove_region(region)

    async def fetch(self, link: Link, gets: Sequence[Get], until_s: float, opened: list[LandingDoubt]) -> Result:
        """Have the peer write each record into its buffer, the only one of its get. `opened` gets what is in doubt until this ends well.

        Raises:
            InDoubtError: the peer may still be writing: there was no answer by `until_s`, or the session ended.
            UnavailableError: nothing is written any more, or ever was.
        """
        for get in gets:
            if get.into[0].region.id not in self._registered:
                raise _not_registered(get)
        number, target = await self._tell(link, until_s)
        generation, _, regions = target
        places = {region.id: index for index, (region, _, _) in enumerate(regions)}
        items = []
        for get in gets:
            [buffer] = get.into
            if (index := places.get(buffer.region.id)) is None:
                raise _not_registered(get)
            items.append((get.name, buffer.length, index, buffer.offset))
        size_bytes, touched = sum(get.size_bytes for get in gets), frozenset(get.into[0].region.id for get in gets)
        doubt = self._doubts.landing(generation, lambda: link.ended, size_bytes, touched)
        opened.append(doubt)
        # Who takes a region back counts that first, and looks for doubts then: one of the two sees the other.
        if (known := self._known()) is None or known[2] is not target:
            doubt.close()
            raise UnavailableError("p2p get: the memory that peers may write to has just changed")
        self._plane.expect(min(until_s, time.monotonic() + _EXPECT_S))
        self._look_after()
        left_ms = max(1, min(MAX_WAIT_MS, int((until_s - time.monotonic()) * 1000)))
        try:
            answer = link.post(Fetch(link.number(), number, left_ms, tuple(items)), Result, lambda result: doubt.close())
        except BaseException:
            # It was not sent.
            doubt.close()
            raise
        try:
            while not answer.done() and not doubt.over and (left_s := until_s - time.monotonic()) > 0:
                await asyncio.wait({answer}, timeout=min(left_s, _LOOK_S))
            if answer.done():
                result = answer.result()
                doubt.close()
                return result
        except PeerRefusedError as refusal:
            if not link.ended:
                # The session goes on: it did not begin with it.
                doubt.close()
            raise self._in_doubt(link, str(refusal), doubt) from None
        except UnavailableError as error:
            raise self._in_doubt(link, str(error), doubt) from None
        finally:
            # Who comes after this is told by the doubt.
            doubt.leave()
            if not answer.cancel() and not answer.cancelled() and answer.exception() is None:
                # It came in the moment in which this was given up.
                doubt.close()
        raise self._in_doubt(link, f"p2p peer {link.address}: has not finished a load in time", doubt)

    def _in_doubt(self, link: Link, text: str, doubt: LandingDoubt) -> UnavailableError:
        return UnavailableError(text) if doubt.over else InDoubtError(text, doubt)

    async def _tell(self, link: Link, until_s: float) -> tuple[int, PlaneTarget]:
        """Have the peer know where it may write, as of now, and return that with the number of the Target that says it. Once at a time a
        session, and not cut short by this call's deadline.

        Raises:
            TimedOutError: not by `until_s`.
            UnavailableError: this data plane is down, or the peer's does not take it.
        """
        while True:
            if (telling := self._telling.get(link)) is None or telling.done():
                told = self._told.get(link)
                # The very same: another one of the same generation may have other regions by the same indexes.
                if (known := self._known()) is not None and told is not None and told[0] is known[2]:
                    return told[1], known[2]
                if telling is None:
                    link.on_end(lambda: self._forget(link))
                telling = self._telling[link] = asyncio.ensure_future(self._tell_once(link))
                # Where nobody waits any more, nothing is to be said of its failure.
                telling.add_done_callback(lambda told: told.cancelled() or told.exception())
            await asyncio.wait({telling}, timeout=max(0.0, until_s - time.monotonic()))
            if not telling.done():
                raise TimedOutError(f"p2p peer {link.address}: does not know in time where to write")
            telling.result()

    async def _tell_once(self, link: Link) -> None:
        _, generation, target = await self._current()
        shown = tuple((base, size_bytes) for _, base, size_bytes in target[2])
        if not 0 < len(shown) <= MAX_REGIONS:
            raise UnavailableError(f"p2p: {len(shown)} regions are registered, a peer can be told of 1 to {MAX_REGIONS}")
        if (told := self._told.get(link)) is not None and told[0][0] != generation:
            # What a peer is about to write for the Target before could go to this one by mistake: both are of one session there.
            raise link.end("the data plane of this node was restarted")
        self._plane.expect(time.monotonic() + _EXPECT_S)
        number = link.number()
        await link.ask(Target(number, target[1], shown), Ready, time.monotonic() + TELL_S)
        self._told[link] = (target, number)

    def _forget(self, link: Link) -> None:
        self._telling.pop(link, None)
        self._told.pop(link, None)

    def _known(self) -> tuple[int, int, PlaneTarget] | None:
        """Where peers may write, if that has not changed since it was asked for."""
        known = self._target
        return known if known is not None and known[:2] == (self._changes, self._plane.child) else None

    async def _current(self) -> tuple[int, int, PlaneTarget]:
        if (known := self._known()) is None:
            changes = self._changes
            found = await asyncio.get_running_loop().run_in_executor(None, self._plane.target)
            if found is None:
                raise UnavailableError("p2p: the data plane of this node is being restarted")
            known = self._target = (changes, found[0], found)
        return known

    def _look_after(self) -> None:
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(self._look())

    async def _look(self) -> None:
        """While something may land: have the child take it in, and fence where that is due."""
        while self._doubts.look():
            self._plane.expect(time.monotonic() + _EXPECT_S)
            await asyncio.sleep(_LOOK_S)


def _not_registered(get: Get) -> UnavailableError:
    return UnavailableError(f"p2p {get.into[0].region!r} is not registered (register_region) with this data plane")
