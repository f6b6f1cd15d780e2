"""Memory that a peer may still write into after its call is over, and how it comes back."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from kvstore_sdk.backend import Deadline, Ticket

__all__ = ["CallDoubt", "Child", "Doubt", "Doubts", "LandingDoubt"]

logger = logging.getLogger(__name__)

FENCE_AFTER_S = 2.0
"""After a session ended, for its last transfers to be waited for: others may end in the same moment, and one fence serves all."""
FENCE_OLD_S = 30.0
"""A peer that is there, and says for so long of a load that it is not over, will not say anything else."""
MAX_DOUBT_BYTES = 128 << 20
"""Memory in doubt beyond this is taken back at once."""
FENCE_EVERY_S = 1.0
"""A fence ends the loads of all peers."""
_LOOK_S = 0.02


class Child(Protocol):
    """What a fence needs of the data plane."""

    @property
    def generation(self) -> int: ...

    def fence(self) -> None: ...


class Doubt(Protocol):
    """A ticket."""

    @property
    def over(self) -> bool:
        """Whether nothing is written any more. Once True it stays True."""
        ...


class LandingDoubt:
    """Records that a peer was told to write. It is over when the peer says so, or when the child that they were to land in is gone.

    Attributes:
        late_s: Since when nobody waits for the records any more; 0 while somebody does.
        gone_s: When the session was found to have ended, after which the peer says nothing; 0 while it stands.
        size_bytes: Of all records.
        regions: Ids of those that the records are in.
    """

    __slots__ = ("_child", "_closed", "_ended", "_generation", "gone_s", "late_s", "regions", "size_bytes")

    def __init__(self, child: Child, generation: int, ended: Callable[[], bool], size_bytes: int, regions: frozenset[int]) -> None:
        """`ended`: whether the session has."""
        self.late_s = self.gone_s = 0.0
        self.size_bytes = size_bytes
        self.regions = regions
        self._ended = ended
        self._child = child
        self._generation = generation
        self._closed = False

    @property
    def over(self) -> bool:
        if not self._closed and self._child.generation != self._generation:
            self._closed = True
        return self._closed

    def close(self) -> None:
        """The peer has said that it is over, or was never told."""
        self._closed = True

    def leave(self) -> None:
        """Nobody waits any more."""
        self.late_s = self.late_s or time.monotonic()

    def look(self, now_s: float) -> None:
        if not self.gone_s and self._ended():
            self.gone_s = now_s


class CallDoubt:
    """A call that its caller could not wait for: over when it never began, or has ended and what it left in doubt is over."""

    __slots__ = ("_parts", "_running")

    def __init__(self) -> None:
        self._running = False
        self._parts: Sequence[Doubt] = ()

    @property
    def over(self) -> bool:
        return not self._running and all(part.over for part in self._parts)

    def begin(self) -> None:
        self._running = True

    def end(self, left: Sequence[Doubt]) -> None:
        self._parts = left
        self._running = False


class Doubts:
    """What landings are open, when to take their memory back by force, and who waits for it. Thread-safe."""

    def __init__(self, child: Child | None) -> None:
        self._child = child
        self._lock = threading.Lock()
        self._open: list[LandingDoubt] = []
        self._fenced_s = 0.0
        # The child that was fenced last. It may take a second until nothing is in doubt for it, and the next one must not pay for that.
        self._fenced = 0
        self.fences = 0

    def landing(self, generation: int, ended: Callable[[], bool], size_bytes: int, regions: frozenset[int]) -> LandingDoubt:
        """Before a peer is told to write into the child of this generation. The rest is as of `LandingDoubt`."""
        assert self._child is not None
        doubt = LandingDoubt(self._child, generation, ended, size_bytes, regions)
        with self._lock:
            self._open.append(doubt)
        return doubt

    @property
    def landings(self) -> int:
        """How many are open, those that their callers wait for among them."""
        return len(self._open)

    @property
    def late_bytes(self) -> int:
        """Memory that nobody waits for any more, and that may still be written into."""
        with self._lock:
            return sum(doubt.size_bytes for doubt in self._open if doubt.late_s and not doubt.over)

    def touch(self, region: int) -> bool:
        """Whether something may still be written into the region of this id."""
        with self._lock:
            return any(region in doubt.regions and not doubt.over for doubt in self._open)

    def wait_for(self, region: int, deadline: Deadline) -> bool:
        """Whether nothing is written into the region of this id any more, by the deadline."""
        while self.touch(region):
            if deadline.expired:
                return False
            time.sleep(min(_LOOK_S, deadline.remaining_s()))
        return True

    def look(self) -> bool:
        """Forget what is over, and fence where that is due. To be called every some ten ms. Whether anything is open."""
        now_s = time.monotonic()
        with self._lock:
            self._open = [doubt for doubt in self._open if not doubt.over]
            late_bytes = sum(doubt.size_bytes for doubt in self._open if doubt.late_s)
            why = ""
            if late_bytes > MAX_DOUBT_BYTES:
                why = f"{late_bytes} bytes are in doubt"
            for doubt in self._open:
                doubt.look(now_s)
                if doubt.gone_s and now_s - doubt.gone_s >= FENCE_AFTER_S:
                    why = "a peer is gone, and may still write into memory that it was told to fill"
                elif doubt.late_s and now_s - doubt.late_s >= FENCE_OLD_S:
                    why = f"a peer has not finished a load {FENCE_OLD_S:.0f} s after its deadline"
            if not why or now_s - self._fenced_s < FENCE_EVERY_S:
                return bool(self._open)
        self.fence(why)
        return True

    def fence(self, why: str) -> None:
        """Take back all memory that is in doubt, by ending the child, once for each child. `why`: for the log."""
        assert self._child is not None
        with self._lock:
            generation = self._child.generation
            if generation in (0, self._fenced):
                return
            self._fenced = generation
            self._fenced_s = time.monotonic()
            self.fences += 1
        logger.warning("p2p: the data plane is restarted: %s", why)
        self._child.fence()

    def settle(self, tickets: Sequence[Ticket], deadline: Deadline) -> list[bool]:
        """As `SupportsSettle.settle`."""
        while True:
            over = [bool(getattr(ticket, "over", True)) for ticket in tickets]
            if all(over) or deadline.expired:
                return over
            time.sleep(min(_LOOK_S, deadline.remaining_s()))
