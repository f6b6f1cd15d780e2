"""The thread that a child lives by: starts it, watches it, kills it when it has to be, and starts the next one."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import threading
import time
from collections.abc import Iterable
from typing import Any

from kvstore_sdk.backend import BackendError, BreachError, ClosedError, KVStoreError, TimedOutError, UnavailableError
from kvstore_sdk.isolation.exchange import Exchange
from kvstore_sdk.isolation.hello import Offer, Spec, error_of, hello, offer_of
from kvstore_sdk.isolation.limits import IsolationLimits
from kvstore_sdk.isolation.link import Link
from kvstore_sdk.isolation.process import ChildProcess
from kvstore_sdk.isolation.regions import KnownRegion
from kvstore_sdk.isolation.restarts import Restarts
from kvstore_sdk.isolation.wire import WireError, encode

__all__ = ["Keeper"]

logger = logging.getLogger("kvstore_sdk.isolation")

_START_S = 75.0
"""A factory may take 60; importing what it needs comes before."""
_TICK_S = 0.25
_LATE_S = 1.0
"""After its deadline; a call that is this late keeps its worker from serving others."""
_DRAIN_S = 2.0
_CLOSE_S = 2.0
_END_S = 0.8
"""Killing takes milliseconds, unless the kernel cannot let go of it. With the wait for its own end it is what `close` may take."""


class Keeper:
    """Owns the thread, the process and the line. What it tells callers goes through the exchange.

    Attributes:
        offer: What the first child offered.
        state: "up", "down", "given up" or "closed".
        pid: Of the child that is up.
        deaths: Children that ended without being asked to.
        died_s: When the last child was gone, on the monotonic clock: known before `deaths` and `state` tell of it. Infinite once one was
            left behind that cannot be killed.
        restarts: Children that came up in the place of one that died.
    """

    def __init__(self, spec: Spec, limits: IsolationLimits, label: str) -> None:
        self.exchange = Exchange(label, self.wake)
        self.offer: Offer | None = None
        self.state = "down"
        self.pid: int | None = None
        self.deaths = 0
        self.died_s = -math.inf
        self.restarts = 0
        self._spec = spec
        self._limits = limits
        self._label = label
        self._policy = Restarts(limits.restarts)
        try:
            self._cwd: str | None = os.getcwd()
        except OSError:
            self._cwd = None
        self._closing = False
        self._fenced = False
        self._process: ChildProcess | None = None
        self._link: Link | None = None
        self._started = threading.Event()
        self._start_error: KVStoreError | None = None
        self._wake_lock = threading.Lock()
        try:
            self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError as cause:
            raise UnavailableError(f"{label}: open: no descriptor for its keeper ({cause.strerror})") from cause
        self._thread = threading.Thread(target=self._run, name=f"{label} keeper", daemon=True)

    def start(self) -> Offer:
        """Start the thread and the first child.

        Raises:
            KVStoreError: as the child's `open_backend` raised it, or no child came up.
        """
        try:
            self._thread.start()
        except RuntimeError as cause:
            self._close_wake()
            raise UnavailableError(f"{self._label}: open: no thread for its keeper ({cause})") from cause
        try:
            self._started.wait()
        except BaseException:
            # Whoever waits was interrupted; there is nobody to close what comes up.
            self._closing = True
            self.wake()
            raise
        if self._start_error is not None:
            self._thread.join()
            raise self._start_error
        assert self.offer is not None
        return self.offer

    def wake(self) -> None:
        """Have the thread look."""
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def _close_wake(self) -> None:
        with self._wake_lock:
            os.close(self._wake_fd)
            self._wake_fd = -1

    def fence(self) -> None:
        """Kill the child now."""
        self._fenced = True
        if (process := self._process) is not None:
            process.kill()
        self.wake()

    def close(self) -> None:
        """Ask the child to close the store and end; kill it when it does not. Bounded."""
        self.exchange.refuse(self._closed)
        self._closing = True
        self.wake()
        self._thread.join(_CLOSE_S + 2.5 * _END_S)

    def forget(self) -> None:
        """In a forked process: let go of what belongs to the parent."""
        if (link := self._link) is not None:
            link.forget()
        if (process := self._process) is not None:
            process.forget()
        self.exchange.regions.forget()
        if self._wake_fd >= 0:
            os.close(self._wake_fd)
            self._wake_fd = -1

    # The thread.

    def _run(self) -> None:
        try:
            while not self._closing:
                why = self._live()
                if self._closing or self._start_error is not None:
                    break
                self._wait_for_turn(why)
        except BaseException:
            # Nothing may stay behind, and nobody may wait for ever.
            logger.exception("%s: its keeper failed; it is closed", self._label)
            self._start_error = self._start_error or UnavailableError(f"{self._label}: its keeper failed")
        finally:
            try:
                self._end_child()
            finally:
                self.died_s = time.monotonic() if self._process is None else math.inf
                self.state, self.pid = "closed", None
                self.exchange.refuse(self._closed)
                with self.exchange.lock:
                    self.exchange.regions.close()
                self._close_wake()
                self._started.set()
            if self._process is None:
                # Otherwise it may still touch memory: what it was asked stays in doubt.
                self.exchange.down(self._closed(), self._closed)
            else:
                self._process.leave()

    def _live(self) -> str:
        """One child, from its start to its end. Returns how it ended, as what completes "its child was"."""
        try:
            offer = self._start()
            if self.offer is None:
                self.offer = offer
                self.exchange.calls.may_doubt = offer.capabilities.in_doubt
            elif offer != self.offer:
                self._end_child()
                logger.error("%s: the new child offers something else than the first; open the backend anew", self._label)
                self._rest(None)
                return "another backend"
            self._let_through()
        except KVStoreError as error:
            self._end_child()
            if (left := self._process) is not None:
                logger.error("%s: a child (pid %d) that did not start cannot be killed; it is left behind", self._label, left.pid)
                left.leave()
                self._process = self._link = None
            if not self._started.is_set():
                self._start_error = error
            return f"not started ({error})"
        self.pid = self._process.pid if self._process else None
        self.state = "up"
        if self._started.is_set():
            self.restarts += 1
            logger.warning("%s: a new child is up (pid %s)", self._label, self.pid)
        self._started.set()
        return self._watch()

    def _start(self) -> Offer:
        """Start a child, and have it open the store."""
        self._fenced = False
        process = self._process = ChildProcess(self._cwd)
        link = self._link = Link(process.socket)
        try:
            link.send(encode(hello(self._spec, self._label, logger.getEffectiveLevel())))
        except WireError as cause:
            raise BackendError(f"{self._label}: open: the options: what goes to the child {cause}") from None
        [opened] = self._expect([0], time.monotonic() + _START_S)
        return offer_of(opened)

    def _let_through(self) -> None:
        """Have the child map the regions, and let calls through to it."""
        assert self._link is not None
        told: dict[int, KnownRegion] = {}
        while not self.exchange.up(self._link, told):
            with self.exchange.lock:
                wanted = self.exchange.regions.all()
            self._tell_regions(told, wanted, time.monotonic() + _START_S)
            told = wanted

    def _tell_regions(self, told: dict[int, KnownRegion], wanted: dict[int, KnownRegion], until_s: float) -> None:
        assert self._link is not None
        numbers = []
        for region_id in told.keys() - wanted.keys():
            numbers.append(-region_id)
            self._link.send(encode([-region_id, "unregister", until_s, region_id]))
        for region in (wanted[region_id] for region_id in wanted.keys() - told.keys()):
            numbers.append(-region.id)
            self._link.send(encode([-region.id, "register", until_s, region.announcement()]), region.descriptor)
        self._expect(numbers, until_s)

    def _expect(self, numbers: Iterable[int], until_s: float) -> list[Any]:
        """Wait for the child's answers to these, before callers may use the line."""
        process, link = self._process, self._link
        assert process is not None
        assert link is not None
        found: dict[int, Any] = {}
        missing = set(numbers)
        while missing:
            self._pause(min(until_s, time.monotonic() + _TICK_S), process, link)
            with link.reader:
                messages = link.receive(None)
            for message in messages:
                if isinstance(message, list) and self.exchange.log.tell(message):
                    continue
                if not _is_answer(message) or message[0] not in missing:
                    raise BreachError(f"{self._label}: open: the child sent what is no answer")
                if message[1] is not True:
                    raise error_of(message[2])
                missing.discard(message[0])
                found[message[0]] = message[2]
            if not missing:
                break
            if self._closing:
                raise self._closed()
            # Who dies hangs up first.
            if process.wait(_END_S if link.ended else 0.0):
                raise UnavailableError(f"{self._label}: open: the child was {self._end_child()} before the store was open")
            if link.ended:
                raise UnavailableError(f"{self._label}: open: the child closed its end of the line before the store was open")
            if link.broken is not None:
                raise BreachError(f"{self._label}: open: the child broke the protocol: {link.broken}")
            if time.monotonic() >= until_s:
                raise TimedOutError(f"{self._label}: open: the store was not open after {_START_S:g} s")
        return [found[number] for number in numbers]

    def _watch(self) -> str:
        """Look after a child that is up until it is gone, and tell callers. Returns why it ended."""
        process, link = self._process, self._link
        assert process is not None
        assert link is not None
        killed_for: str | None = None
        kill_at_s: float | None = None
        draining = stood_still = False
        looked_s = time.monotonic()
        asked_to_close = False
        while not process.gone:
            now = time.monotonic()
            # Who was not looked at for long, because this process stood still, is not judged by it; but the next time in any case.
            stood_still, looked_s = not stood_still and now - looked_s > 4 * _TICK_S, now
            if self._closing and not asked_to_close:
                asked_to_close, killed_for = True, killed_for or "closed"
                link.send(encode([0, "close", now + _CLOSE_S, None]))
                kill_at_s = min(kill_at_s or now + _CLOSE_S, now + _CLOSE_S)
            if (killed_for is None or draining) and not stood_still:
                verdict, may_drain = self._verdict(process, link, now)
                if verdict is not None and not (draining and may_drain):
                    killed_for, draining = verdict, may_drain
                    kill_at_s = now + _DRAIN_S if may_drain else now
                    self.exchange.refuse(self._refusal(f"its child is ended ({killed_for})", None))
            if kill_at_s is not None and (now >= kill_at_s or (not asked_to_close and not self.exchange.busy)):
                process.kill()
                if self._closing and now >= kill_at_s + _END_S:
                    break
            hurry = killed_for is not None or link.unsent
            self._pause(now + (0.02 if hurry else _TICK_S), process, link if asked_to_close else None)
            self.exchange.tend()
        if not process.gone:
            logger.error("%s: its child (pid %d) cannot be killed: it is in the kernel; it is left behind", self._label, process.pid)
            return "cannot be killed"
        # What it said before it died is still there.
        self.exchange.tend()
        how = self._end_child() or "gone"
        return how if killed_for is None else f"{how}: {killed_for}"

    def _verdict(self, process: ChildProcess, link: Link, now_s: float) -> tuple[str | None, bool]:
        """Why the child has to be killed, if it has to be, and whether what runs may end before."""
        if self._fenced:
            return "fenced", False
        if link.broken is not None:
            return f"it broke the protocol: {link.broken}", False
        if link.ended:
            return "it closed its end of the line", False
        with self.exchange.lock:
            late_s = sorted(now_s - call.deadline_s for call in self.exchange.calls.late.values())
            unreadable = self.exchange.calls.unreadable
            self.exchange.calls.unreadable = 0
        if unreadable:
            return "an answer that cannot be read left buffers in doubt", False
        if late_s and late_s[-1] > self._limits.hang_kill_s:
            return f"a call was more than {self._limits.hang_kill_s:g} s late", False
        workers = self.offer.capabilities.max_concurrency if self.offer else 1
        if sum(late > _LATE_S for late in late_s) * 2 > workers:
            return f"more than half of its {workers} workers were in late calls", False
        used = process.private_bytes()
        if used is not None and used > self._limits.memory_bytes:
            return f"it used {used} bytes of memory, {self._limits.memory_bytes} are allowed", used <= 2 * self._limits.memory_bytes
        return None, False

    def _wait_for_turn(self, why: str) -> None:
        """A child has died: tell callers, and wait until the next may be started."""
        now = self.died_s = time.monotonic()
        self.deaths += 1
        again_s, given_up = self._policy.died(now)
        self.state, self.pid = ("given up" if given_up else "down"), None
        error = UnavailableError(f"{self._label}: its child was {why}")
        self.exchange.down(error, self._refusal(f"its child was {why}", again_s))
        if given_up:
            logger.error(
                "%s: its child was %s; more than %d ended within ten minutes: the next is started in %.0f minutes",
                self._label, why, self._limits.restarts, (again_s - now) / 60,
            )  # fmt: skip
        else:
            logger.warning("%s: its child was %s; a new one is started in %.1f s", self._label, why, again_s - now)
        self._rest(again_s)

    def _rest(self, until_s: float | None) -> None:
        """Wait until then, or, with None, until the backend is closed."""
        if until_s is None:
            self.state, self.pid = "given up", None
            error = UnavailableError(f"{self._label}: its child offers something else than the first one; open it anew")
            self.exchange.down(error, lambda: error)
        while not self._closing and (until_s is None or time.monotonic() < until_s):
            self._pause(time.monotonic() + 60.0 if until_s is None else until_s, None, None)
            self.exchange.tend()

    def _pause(self, until_s: float, process: ChildProcess | None, link: Link | None) -> None:
        """Wait until then, for the end of the process, for something to read, or until somebody calls."""
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        if process is not None:
            poll.register(process, select.POLLIN)
        if link is not None and link.readable:
            poll.register(link, select.POLLIN)
        poll.poll(max(0.0, until_s - time.monotonic()) * 1000)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    def _end_child(self) -> str | None:
        """Kill it if it lives, and let go of all that belonged to it. Returns how it ended; None when it did not, or there is none."""
        process, link = self._process, self._link
        if process is None:
            return None
        process.kill()
        how = process.reap() if process.wait(_END_S) else None
        if link is not None:
            link.close()
        if how is not None:
            process.leave()
            self._process = self._link = None
        return how

    def _refusal(self, what: str, again_s: float | None) -> Any:
        def refusal() -> BackendError:
            when = "soon" if again_s is None else f"in {max(0.0, again_s - time.monotonic()):.1f} s"
            return UnavailableError(f"{self._label}: {what}; a new one is started {when}")

        return refusal

    def _closed(self) -> ClosedError:
        return ClosedError(f"{self._label}: is closed")


def _is_answer(message: Any) -> bool:
    """Whether it has the form of one. What the child wrote may be anything, also what cannot be looked up."""
    return isinstance(message, list) and len(message) == 3 and type(message[0]) is int and isinstance(message[1], bool)
