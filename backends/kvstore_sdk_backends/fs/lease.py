"""The lease of a bounded folder: which process alone may grant room, known without locks between hosts.

The lease is the ledger. Whoever needs room and finds that its owner is gone takes over, by writing a ledger of his own. Gone is an owner

- that said so, or whose lock on this kernel and this mount is free (see `tempfiles`), or
- that did not touch the ledger for `LEASE_S`, by the filesystem's clock, or while it was watched for so long: a clock can be set.

A rename replaces whatever is there, so of two that write the later one wins, without a word to either. What holds nevertheless, by clocks
that nobody can set:

- **Of several that take over at once one grants.** Each waits `SETTLE_S` after it wrote, and looks again. Who took longer than that from
  finding the ledger abandoned to having written his own may have written over one that grants already, and knows it.
- **An owner that was stopped between its look and its write knows it too.** Nobody takes over from an owner that touched the ledger less
  than `LEASE_S` ago, so a write that ends within half of that met no successor. After one that ended later it grants nothing more, and
  marks what it wrote as doubtful. The successor that it may have written over finds itself not named at its next look, which it takes
  before each write and at least every `LEASE_S / 4`, and grants nothing more either.
- **What such a write granted is used by nobody.** Members take an answer within `LEASE_S / 4` of asking, and the request was heard while
  the lease was certain.
- **What the one that was written over had granted** is valid, and stands in no ledger. It runs out within `LEASE_S / 2`. Whoever takes
  over a ledger that may be such a one waits for so long before he counts: one whose owner fell silent, marked it, or had not waited to
  the end himself.
- A touch, a farewell and that mark are done to the very file that was read, not to its name, so they never meet a successor's.

What is left, if such a late write happens at all: its owner is **killed in the midst of it**, before it knows, for then the next one on
its kernel does not wait; a put that had been granted room by the one that was written over **goes on for more than half a lease**, and its
process asks for nothing more; the filesystem's clock was **set ahead** by `LEASE_S`, so that a living owner was followed, and it was
stopped for more than `SETTLE_S` just then. In each the bound may be exceeded until the next count, by what was granted and not
used: the spare room, a hundredth of `max_bytes`, and the puts under way.
"""

from __future__ import annotations

import math
import threading
import time
from contextlib import suppress

from kvstore_sdk_backends.fs.ledger import Ledger, Reading, boot_s
from kvstore_sdk_backends.fs.tempfiles import is_gone

__all__ = ["LEASE_S", "Lease", "LeaseLost"]

LEASE_S = 10.0
"""Longer than an engine collects garbage, or most file servers take to fail over. When the evictor's host dies, puts find no room for
so long, and half as long again."""
SETTLE_S = 0.1
"""Longer than it takes to read and write a ledger, nearly always: who takes longer waits for half a lease instead."""

_TRIES = 3


class LeaseLost(Exception):
    """Another process evicts now, or this one cannot be sure that none does, or it is to stop."""


class Lease:
    """The right to grant room. `is_vacant` is for those who ask for it, one at a time; the rest is for the thread that holds it.

    Args:
        ended: Set when the lease shall not be held any more.

    Attributes:
        owner: The name under which it was taken last.
    """

    def __init__(self, temp_root: str, ledger: Ledger, ended: threading.Event) -> None:
        self.owner = ""
        self._temp_root = temp_root
        self._ledger = ledger
        self._ended = ended
        self._watched: tuple[tuple[int, int], float] = ((0, 0), 0.0)
        # When the last write or touch began that was surely our own ledger's.
        self._kept_at = -math.inf
        self._complete = self._late = False

    def is_vacant(self, found: Reading) -> bool:
        """Whether the owner is gone. Watches it by being told each reading.

        Raises:
            OSError: the filesystem's clock cannot be read.
        """
        now_s = boot_s()
        if found.version != self._watched[0]:
            self._watched = (found.version, now_s)
        if self._has_ended(found) or now_s - self._watched[1] >= LEASE_S:
            return True
        return self._ledger.clock.now_s() - found.at_s >= LEASE_S and self._ledger.clock.look_s() - found.at_s >= LEASE_S

    def _has_ended(self, found: Reading) -> bool:
        """Whether the owner can write nothing more."""
        return not found.owner or is_gone(self._temp_root, found.owner)

    def take(self, found: Reading, state: Reading) -> None:
        """Take over, with `state`, from what was `found` vacant. Afterwards `state` and a count say all that may be written.

        Raises:
            LeaseLost: somebody else was faster, or this is to end.
            OSError: the ledger cannot be read or written.
        """
        began_s = boot_s()
        if self._ledger.read().version != found.version:
            raise LeaseLost
        # Ours still, from a thread that failed: nobody can have come in between.
        ours = found.owner == self.owner and self._complete and not self._late and began_s - self._kept_at < LEASE_S / 2
        known = ours or (found.complete and self._has_ended(found))
        self.owner, self._complete, self._late = state.owner, False, False
        state.complete = False
        self._kept_at = boot_s()
        self._ledger.write(state)
        known &= boot_s() - began_s < SETTLE_S
        time.sleep(SETTLE_S)
        self.hold()
        until_s = boot_s() if known else boot_s() + LEASE_S / 2
        while boot_s() < until_s:
            self._ended.wait(LEASE_S / 50)
            self.keep()
        state.complete = True
        self.write(state)
        self._complete = True

    def hold(self) -> None:
        """Make sure of the lease, so that what is written next is in time unless this process is stopped.

        Raises:
            LeaseLost: it is another's, or may be.
            OSError: the ledger cannot be read or touched.
        """
        if self._late:
            raise LeaseLost
        for _ in range(_TRIES):
            began_s = boot_s()
            if began_s - self._kept_at < LEASE_S / 4:
                self._check_owner()
                if boot_s() - self._kept_at < LEASE_S / 2:
                    return
                continue
            if not self._ledger.touch(self.owner):
                raise LeaseLost
            if boot_s() - self._kept_at >= LEASE_S / 2:
                # Somebody may have found it abandoned before that touch, who writes about now.
                time.sleep(SETTLE_S)
                self._check_owner()
            self._kept_at = began_s
            if boot_s() - began_s < LEASE_S / 2:
                return
        raise LeaseLost

    def _check_owner(self) -> None:
        if self._ledger.read().owner != self.owner:
            raise LeaseLost

    def keep(self) -> None:
        """Hold the lease if that is due; costs nothing otherwise. To be called often.

        Raises:
            LeaseLost: as `hold`, or this is to end.
            OSError: as `hold`.
        """
        if self._ended.is_set():
            raise LeaseLost
        if boot_s() - self._kept_at >= LEASE_S / 4:
            self.hold()
            self._ledger.clock.look_s()

    def write(self, state: Reading) -> None:
        """Publish `state`.

        Raises:
            LeaseLost: as `hold`; or this process was stopped for so long that it may have written over a successor's.
            OSError: the ledger is as it was.
        """
        self.hold()
        began_s = boot_s()
        try:
            self._ledger.write(state)
        finally:
            # Also when it failed: a file server may have done it and lost the answer.
            if boot_s() - self._kept_at >= LEASE_S / 2:
                self._late = True
                with suppress(OSError):
                    self._ledger.release(self.owner, complete=False)
        if self._late:
            raise LeaseLost
        self._kept_at = began_s

    def release(self) -> None:
        """Say that the owner is gone, so that the next one need not wait.

        Raises:
            LeaseLost: it is another's, or may be.
            OSError: the ledger cannot be touched.
        """
        self.hold()
        self._ledger.release(self.owner, complete=True)
