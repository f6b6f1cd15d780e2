"""Room for what this process writes into a bounded folder: asked for in time, used, and given back.

`max_bytes` holds for every process and host on a mount together. They have no memory in common, and a file server tells nobody what others
do, so each would have to look at all files before each put to know what is used. Instead one of them, the evictor, knows it, and
**grants**: before a member writes, it has been promised that the bytes fit, whatever others do in the meantime. So the bound holds by
construction, at every moment, temporary files included; the evictor's reaction time decides how long a put waits, never how much too much
is written. A grant covers many records where they are small beside `max_bytes`, so few puts ask.

- What is granted runs out after half of `LEASE_S`, by a clock that cannot be set, and the evictor holds it back for all of it: a member
  that was stopped, or that nobody hears of any more, wastes no room for long and does no harm when it comes back.
- Without an evictor, or while a new one counts, nothing is granted: puts wait until shortly before their deadline, and then answer
  that there is no room.
- A put takes room for what the folder grows by: one that replaces a record of its size needs none, although for an instant both are there.
- Between the look at what a put replaces and its rename lies an instant in which another may replace, delete or evict it. Then the sum is
  off by that record until the files are counted again.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from kvstore_sdk.backend import NoSpaceError
from kvstore_sdk_backends.fs.evictor import Evictor
from kvstore_sdk_backends.fs.io import StoppedError
from kvstore_sdk_backends.fs.lease import LEASE_S
from kvstore_sdk_backends.fs.ledger import BYE, Ledger, Member, Request, boot_s

__all__ = ["Claim", "Space", "live_bound"]

_log = logging.getLogger("kvstore_sdk_backends.fs")

REFRESH_S = 3600.0
"""A record that is used every minute costs one write of its time an hour; eviction is that much less exact."""
MARGIN_S = 0.1
"""Before the deadline: an answer that comes late counts as none. More than it sleeps at a time."""
PATIENCE_S = 1.0
"""An evictor that has room answers in a fraction of it. Who waited for so long has found the folder full, not himself in a hurry."""
END_S = 1.0

_STEP_S = 0.02
_FIRST_STEP_S = 0.0005
_AGAIN_S = LEASE_S / 4
_SHARE = 64
"""All threads that wait are served at once, up to this part of `max_bytes`: a small folder has no room for all of them."""
_LOOK_AGAIN_S = 60.0


class Claim:
    """Room that one put holds. Not thread-safe.

    Attributes:
        held: How many bytes.
    """

    def __init__(self, space: Space, name: str, stopped: Callable[[], bool], at_s: float) -> None:
        self.held = 0
        self._space = space
        self._name = name
        self._stopped = stopped
        self._at_s = at_s
        self._grown = 0

    def fit(self, growth: int) -> None:
        """Hold at least `growth` bytes.

        Raises:
            StoppedError: the backend was closed, or the deadline passed.
            NoSpaceError: there is no room, or none came free although the deadline was not near.
            OSError: nobody could be asked.
        """
        if growth > self.held:
            self._space._take(growth - self.held, self._name, self._stopped, self._at_s)
            self.held = growth

    def settle(self, growth: int) -> None:
        """The folder has grown by so much, or may have."""
        self._grown = growth

    def end(self) -> None:
        """Give back what was not used."""
        self._space._settle(self.held, self._grown)


class Space:
    """This process's share of a folder that is bounded by `max_bytes`. Thread-safe.

    Args:
        identity: The name of this process's writer, "" if it has none now.
    """

    def __init__(self, root: str, temp_root: str, max_bytes: int, identity: Callable[[], str]) -> None:
        self._root = root
        self._max_bytes = max_bytes
        self._identity = identity
        self._stand_in = f"nolock-0-{secrets.token_hex(8)}"
        self._ledger = Ledger(root)
        self._news = threading.Event()
        self._settled = 0
        self._evictor = Evictor(
            root, temp_root, self._ledger, max_bytes, identity=self._member, settled=lambda: self._settled, news=self._news.set
        )
        self._changed = threading.Condition()
        self._asking = threading.Lock()
        self._serial = 0
        self._allowance = 0
        self._valid_until = 0.0
        self._in_flight = 0
        self._waiting = 0
        self._look_at = 0.0

    @property
    def evicted_records(self) -> int:
        return self._evictor.victims.records

    @property
    def evicted_bytes(self) -> int:
        return self._evictor.victims.bytes

    def begin(self) -> None:
        """Say that this process is there, and evict if nobody does.

        Raises:
            OSError: that failed. The first put that needs room tries again.
        """
        self._ledger.begin()
        found = self._ledger.read()
        if not self._evictor.lead_if_vacant(found) and found.max_bytes not in (0, self._max_bytes):
            _log.warning(
                "fs %s: max_bytes %d here, %d for others; the larger one is kept while both are open",
                self._root,
                self._max_bytes,
                found.max_bytes,
            )
        self._send(0)

    def end(self) -> None:
        """Stop evicting, and give back what was granted. Call when no put runs any more. Never raises."""
        with suppress(OSError):
            self._send(BYE)
        self._evictor.end(END_S)

    def claim(self, name: str, stopped: Callable[[], bool], at_s: float) -> Claim:
        """For one put of the record `name`, until `at_s` by `time.monotonic`."""
        return Claim(self, name, stopped, at_s)

    def freed(self, size_bytes: int) -> None:
        """A record of this size was deleted."""
        self._settle(0, -size_bytes)

    def used(self, fd: int) -> None:
        """The record that is open as `fd` was read: it shall not be evicted soon. Never raises."""
        # Another user's record keeps its time; it will be evicted as if nobody had read it.
        with suppress(OSError):
            age_s = self._ledger.clock.now_s() - os.fstat(fd).st_mtime
            # Far in the future: the clock was set back.
            if abs(age_s) < REFRESH_S:
                return
            os.utime(fd)
            if boot_s() > self._look_at:
                self._look_at = boot_s() + _LOOK_AGAIN_S
                self._ledger.clock.look_s()

    def _take(self, size: int, name: str, stopped: Callable[[], bool], at_s: float) -> None:
        with self._changed:
            if self._covers(size):
                return
            self._waiting += size
        # While there is still time to say it. Who was in a hurry has not found the folder full, and is stopped at its deadline.
        full_at_s = at_s - MARGIN_S if time.monotonic() + PATIENCE_S < at_s else math.inf
        try:
            while True:
                if stopped():
                    raise StoppedError
                if time.monotonic() >= full_at_s:
                    problem = f"no room came free before the deadline: {self._max_bytes} bytes (max_bytes) are taken, or are being counted"
                    raise NoSpaceError(f"fs put {self._root}/{name}: {problem}")
                if self._asking.acquire(blocking=False):
                    try:
                        self._ask(size, name, lambda: stopped() or time.monotonic() >= full_at_s)
                    finally:
                        self._asking.release()
                        with self._changed:
                            self._changed.notify_all()
                with self._changed:
                    if self._covers(size):
                        return
                    self._changed.wait(_STEP_S)
                    if self._covers(size):
                        return
        finally:
            with self._changed:
                self._waiting -= size

    def _covers(self, size: int) -> bool:
        """Take it from what was granted, if that is enough. Call with the lock held."""
        if boot_s() >= self._valid_until or self._allowance - self._settled - self._in_flight < size:
            return False
        self._in_flight += size
        return True

    def _settle(self, held: int, grown: int) -> None:
        with self._changed:
            self._in_flight -= held
            self._settled += grown
            if held > grown and self._waiting:
                self._changed.notify_all()

    def _ask(self, size: int, name: str, stopped: Callable[[], bool]) -> None:
        """Ask for room for all that wait, and see the answer; give up when it does not come soon, or another evictor does."""
        member = self._member()
        sent_s = boot_s()
        serial = self._send(max(size, min(self._waiting, self._max_bytes // _SHARE)))
        first: str | None = None
        step_s = _FIRST_STEP_S
        while True:
            self._news.clear()
            found = self._ledger.read()
            # An answer that comes later may be one that was written too late: see `lease`.
            if boot_s() - sent_s >= _AGAIN_S:
                return
            answer = found.members.get(member)
            if answer and answer.serial >= serial:
                self._adopt(answer, sent_s, name, found.max_bytes)
                return
            if not self._evictor.lead_if_vacant(found) and size > found.max_bytes > 0:
                problem = f"{size} bytes are more than the {found.max_bytes} that another process allows this folder (max_bytes)"
                raise NoSpaceError(f"fs put {self._root}/{name}: {problem}")
            # A new owner may not have seen the request, because the old one had taken it.
            if first not in (None, found.owner):
                return
            first = found.owner
            if stopped():
                return
            self._news.wait(step_s)
            step_s = min(2 * step_s, _STEP_S)

    def _adopt(self, answer: Member, sent_s: float, name: str, max_bytes: int) -> None:
        if answer.denied:
            problem = f"{max_bytes} bytes (max_bytes) are taken by what cannot be evicted; remove it"
            raise NoSpaceError(f"fs put {self._root}/{name}: {problem}")
        with self._changed:
            self._allowance = answer.allowance
            self._valid_until = sent_s + LEASE_S / 2

    def _send(self, more: int) -> int:
        """Ask for `more` than what is being written, and give back what else was granted. Returns the request's serial."""
        with self._changed:
            self._serial += 1
            self._valid_until = 0.0
            serial, settled = self._serial, self._settled
            need = more if more == BYE else self._in_flight + more
        self._ledger.send(Request(self._member(), serial, settled, need, self._max_bytes))
        self._evictor.wake()
        return serial

    def _member(self) -> str:
        return self._identity() or self._stand_in


def live_bound(root: str) -> int | None:
    """The `max_bytes` that other processes keep this folder below now; None when none does."""
    with suppress(OSError):
        ledger = Ledger(root)
        found = ledger.read()
        if found.owner and ledger.clock.look_s() - found.at_s < LEASE_S:
            return found.max_bytes
    return None
