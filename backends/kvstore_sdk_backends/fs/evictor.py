"""The one process that keeps a bounded folder within its bound: it alone grants room, and it evicts before it does.

What it knows is one sum that is never too small::

    bytes used, as counted  +  all that members may still write  <=  max_bytes

It counts the files when it begins, and again when too much is uncertain. No number outlives a crash but those in the ledger, where the
grants of its predecessor stand, and these are honoured. A member that is killed takes nothing along: its grant counts as written until
the next count, which finds what was. So the sum is too large at times, and then a little too much is evicted.

There is one at a time, by a lease (see `lease`); that two evict, after one was stopped and came back, is harmless, and both never grant.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

from kvstore_sdk.backend import Deadline
from kvstore_sdk_backends.fs.lease import LEASE_S, Lease, LeaseLost
from kvstore_sdk_backends.fs.ledger import BYE, Ledger, Member, Reading, Request, boot_s
from kvstore_sdk_backends.fs.tempfiles import is_gone, sweep
from kvstore_sdk_backends.fs.victims import Victim, Victims

__all__ = ["Evictor"]

_log = logging.getLogger("kvstore_sdk_backends.fs")

RECOUNT_S = 3600.0
"""What was deleted by hand, or written by somebody without a bound, is noticed then at the latest."""
FORGET_S = 3600.0
"""A member of another host that asked for nothing for so long is taken for gone. It is known again when it asks."""

_BUSY_S = 0.005
"""How often requests of other processes are looked for while there are some: what a put may wait for an answer."""
_IDLE_S = 0.1
_BUSY_FOR_S = 2.0
_SLICE_S = 0.05
"""Most time between two looks at requests, while it evicts or counts."""
_AGAIN_S = 1.0
_STUCK_S = 1.0
_SHARE = 100
"""A hundredth of `max_bytes` is kept free, so that few puts wait for an eviction, and another may be granted before it is needed."""


class Evictor:
    """Evicts in `root` while it holds the lease, on a thread of its own.

    Args:
        identity: Names this process's member.
        settled: What that has written by now.
        news: Called when the ledger was written.
    """

    def __init__(
        self,
        root: str,
        temp_root: str,
        ledger: Ledger,
        max_bytes: int,
        *,
        identity: Callable[[], str],
        settled: Callable[[], int],
        news: Callable[[], None],
    ) -> None:
        self.victims = Victims(root, ledger.clock.now_s)
        self._root = root
        self._temp_root = temp_root
        self._ledger = ledger
        self._max_bytes = max_bytes
        self._identity = identity
        self._settled = settled
        self._news = news
        self._wake = threading.Event()
        self._mutex = threading.Lock()
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._lease = Lease(temp_root, ledger, self._ended)
        self._found = Reading()
        self._failing = self._told = False
        self._forget_all()

    def _forget_all(self) -> None:
        self._state = Reading()
        self._used = self._lost = 0
        self._doubtful = False
        self._pending: dict[str, Request] = {}
        self._heard_at: dict[str, float] = {}
        self._oldest: Iterator[Victim | None] = iter(())
        self._last_size = 0
        self._busy_until = self._counted_at = self._checked_at = self._exhausted_at = 0.0
        self._stuck_at = 0.0
        self._count_s = 0.0
        self._evicted_before = self.victims.bytes

    def lead_if_vacant(self, found: Reading) -> bool:
        """Take the lease if, as was `found`, nobody has it; on a thread that holds it until `end`, or until somebody else has it.

        Returns at once. For one thread at a time.

        Returns:
            Whether nobody had it.

        Raises:
            OSError: the filesystem's clock cannot be read.
        """
        # Our own, when the thread that held it failed, is vacant too.
        if not self._lease.is_vacant(found) and (found.owner != self._lease.owner or self._runs()):
            return False
        with self._mutex:
            if not self._ended.is_set() and not self._runs():
                self._found = found
                self._thread = threading.Thread(target=self._run, name="kvstore-fs-evictor", daemon=True)
                self._thread.start()
        return True

    def _runs(self) -> bool:
        return bool(self._thread and self._thread.is_alive())

    def wake(self) -> None:
        """There is a request, from this process."""
        self._wake.set()

    def end(self, limit_s: float) -> None:
        """Give up the lease, within `limit_s`: a filesystem that hangs keeps it until it runs out."""
        with self._mutex:
            self._ended.set()
            thread = self._thread
        self._wake.set()
        if thread:
            thread.join(limit_s)

    def _run(self) -> None:
        self._forget_all()
        try:
            self._take()
            self._count(first=True)
            self._failing = False
            while True:
                self._turn()
                busy = boot_s() < self._busy_until
                self._wake.wait(_BUSY_S if busy else _IDLE_S)
                self._wake.clear()
        except LeaseLost:
            pass
        except FileNotFoundError:
            # Unmounted, or removed by somebody. Whoever stores next makes it anew.
            pass
        except OSError as cause:
            if not self._failing:
                _log.warning("fs %s: cannot evict (%s); puts are refused when what they were granted is used up", self._root, cause)
            self._failing = True
            # Somebody who waits for room begins again at once; a disk that fails need not hear of it a hundred times a second.
            self._ended.wait(_AGAIN_S)
        self._oldest = iter(())
        # Otherwise the next one would have to wait until it runs out.
        with suppress(OSError, LeaseLost):
            self._hear()
            self._lease.write(self._state)
            self._lease.release()
        self._news()

    def _take(self) -> None:
        self._state = Reading(self._identity(), counting=True, max_bytes=self._max_bytes, members=self._found.members)
        self._heard_at = dict.fromkeys(self._state.members, boot_s())
        self._limit()
        self._lease.take(self._found, self._state)

    def _publish(self) -> None:
        self._lease.write(self._state)
        self._news()

    def _limit(self) -> None:
        """The largest bound of those that have the folder open is kept: one that was started with a wrong one evicts nothing of others."""
        self._state.max_bytes = max([self._max_bytes, *(member.limit for member in self._state.members.values())])

    def _turn(self) -> None:
        self._lease.keep()
        changed = self._hear() | self._reclaim()
        if boot_s() - self._counted_at >= self._count_again_s():
            self._count()
        if self._answer(evict=True) or changed:
            self._publish()
        spare, size = self._state.max_bytes // _SHARE, self._last_size
        # Only with records that are small beside it: ten that fill the bound shall stay ten.
        wanted = spare - size if size and self._room() + 2 * size <= spare else 0
        if self._room() < wanted:
            self._make_room(wanted, largest=spare)
            self._busy_until = max(self._busy_until, boot_s() + _BUSY_S)

    def _count_again_s(self) -> float:
        """How long the last count may be relied on."""
        # What should have been evicted was not there: somebody else removed it.
        if self._exhausted_at > self._counted_at:
            return 0.0
        # Between the look at what a put replaces and its rename another may have replaced or removed it: such errors add up.
        if self.victims.bytes - self._evicted_before > self._state.max_bytes:
            return 20 * self._count_s
        # Rather than evict for bytes that nobody may have written.
        few = self._state.max_bytes // _SHARE
        doubtful = self._doubtful or (self._lost > few and self._room() < max(self._wanted(), few))
        return 20 * self._count_s if doubtful else RECOUNT_S

    def _is_stuck(self) -> bool:
        """Nothing was left to evict for a while, although the files were counted again. An instant says nothing: others are writing."""
        return bool(self._stuck_at) and boot_s() - self._stuck_at >= _STUCK_S

    def _hear(self) -> bool:
        """Take in what members ask for. Whether the ledger changes by it."""
        changed = False
        members = self._state.members
        self._hear_self()
        for request in self._ledger.take(self._lease.hold):
            member = members.get(request.member)
            if member is None:
                member = members[request.member] = Member(allowance=request.settled, settled=request.settled)
                # It has a history that nobody knows: what it was writing when that was lost may not have been counted.
                self._doubtful |= request.settled != 0
            elif request.serial <= member.serial:
                continue
            self._used += request.settled - member.settled - member.lost
            self._lost -= member.lost
            member.settled, member.lost = request.settled, 0
            self._heard_at[request.member] = boot_s()
            changed = True
            member.limit = request.limit
            if request.need == BYE:
                self._forget(request.member)
            else:
                self._pending[request.member] = request
                self._busy_until = boot_s() + _BUSY_FOR_S
                self._limit()
        return changed

    def _hear_self(self) -> None:
        """What this process wrote needs no request to be known."""
        if member := self._state.members.get(self._identity()):
            settled = self._settled()
            self._used += settled - member.settled
            member.settled = settled

    def _reclaim(self) -> bool:
        """What was granted to somebody who is gone, or did not ask for so long that it may not be used any more, counts as written.

        Returns:
            Whether the ledger changes by it.
        """
        now_s = boot_s()
        if now_s - self._checked_at < LEASE_S / 20:
            return False
        self._checked_at = now_s
        changed = False
        for name, member in [*self._state.members.items()]:
            gone = is_gone(self._temp_root, name)
            if gone or (member.outstanding and now_s - self._heard_at[name] >= LEASE_S):
                self._used += member.outstanding
                self._lost += member.outstanding
                member.lost += member.outstanding
                member.allowance = member.settled
                changed = True
            if gone or now_s - self._heard_at[name] >= FORGET_S:
                self._forget(name)
        return changed

    def _forget(self, name: str) -> None:
        self._state.members.pop(name)
        self._heard_at.pop(name, None)
        self._pending.pop(name, None)
        self._limit()

    def _wanted(self) -> int:
        return sum(max(0, self._more(asked)) for asked in self._pending.values())

    def _more(self, asked: Request) -> int:
        """How much more than now would be granted."""
        member = self._state.members[asked.member]
        return asked.settled + asked.need - max(member.allowance, member.settled)

    def _room(self) -> int:
        return self._state.max_bytes - self._used - self._outstanding()

    def _answer(self, evict: bool) -> bool:
        """Grant what is asked for, as far as there is room or can be made. Whether anything was granted or denied."""
        answered = False
        until_s = boot_s() + _SLICE_S
        for request in [*self._pending.values()]:
            member = self._state.members[request.member]
            # It gave back what it was granted before, but for what it is writing, which it needs.
            more = self._more(request)
            limit = self._state.max_bytes
            if more > self._room() and more <= limit and evict:
                self._make_room(more, until_s)
            room = self._room()
            if more <= room:
                active = sum(boot_s() - at_s < LEASE_S for at_s in self._heard_at.values())
                share = min(room - more, limit // _SHARE // max(1, active))
                # Whole multiples: a rest that is too small for the next record would be held back for nothing.
                member.allowance = request.settled + request.need + (share // request.need * request.need if request.need else 0)
                member.denied = False
                self._stuck_at = 0.0 if more > 0 else self._stuck_at
            elif more > limit or (evict and self._is_stuck() and more > limit - max(0, self._used - self._outstanding())):
                # Nothing is left to evict, and what is being written, which may have been counted, would not be enough when it can be.
                member.denied = True
            else:
                continue
            member.serial = request.serial
            del self._pending[request.member]
            answered = True
        return answered

    def _outstanding(self) -> int:
        return sum(member.outstanding for member in self._state.members.values())

    def _make_room(self, wanted: int, until_s: float = 0.0, largest: int | None = None) -> None:
        """Evict until `wanted` bytes are free, time is up, nothing is left that could be removed, or a record is more than `largest`."""
        until_s = until_s or boot_s() + _SLICE_S
        # A pass over everything was for nothing, so not at once again, and not before the files are counted.
        if boot_s() < self._exhausted_at + 10 * self._count_s or self._exhausted_at > self._counted_at:
            return
        self._lease.hold()
        while self._room() < wanted and boot_s() < until_s:
            self._lease.keep()
            try:
                victim = next(self._oldest)
            except StopIteration:
                self._oldest = self.victims.oldest()
                self._exhausted_at = boot_s()
                self._stuck_at = self._stuck_at or self._exhausted_at
                if self.victims.refused and not self._told:
                    _log.warning("fs %s: records that may not be removed fill max_bytes (%s)", self._root, self.victims.refused)
                self._told = bool(self.victims.refused)
                return
            if victim and largest is not None and (size := self.victims.size_bytes(victim)) > largest:
                # One that fills the folder alone is not evicted for the convenience of others that may never come.
                self._last_size = size
                return
            removed = self.victims.remove(victim) if victim else None
            if removed is not None:
                self._used -= removed
                self._last_size = removed
                self._stuck_at = 0.0

    def _count(self, first: bool = False) -> None:
        """Count the files. What members wrote meanwhile is added, if it was counted or not: the sum must not be too small."""
        began_s = last_s = boot_s()
        with suppress(OSError):
            sweep(self._temp_root, Deadline.after(_SLICE_S))
        self._ledger.clock.look_s()
        self._hear()
        self._checked_at = 0.0
        self._reclaim()
        self._lost, self._doubtful = 0, False
        for member in self._state.members.values():
            member.lost = 0
        # Of others the last word has to do: what they wrote since then will be counted twice, until the next count.
        self._hear_self()
        before = self._used
        total = 0
        for size in self.victims.count():
            total += size
            self._lease.keep()
            if not first and boot_s() - last_s > _SLICE_S:
                if self._hear() | self._answer(evict=False):
                    self._publish()
                last_s = boot_s()
        for name, size in self.victims.temporary().items():
            # A member's own are part of what it was granted, unless that has run out.
            total += max(0, size - self._state.members[name].outstanding) if name in self._state.members else size
        self._used = total + self._used - before
        self._oldest = self.victims.oldest()
        self._evicted_before = self.victims.bytes
        self._counted_at = boot_s()
        self._count_s = self._counted_at - began_s
        if first:
            self._state.counting = False
            self._publish()
