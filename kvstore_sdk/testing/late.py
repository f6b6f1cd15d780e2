"""Waiting that a test can end, and work that goes on after a call returned."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from kvstore_sdk.backend import Buffer

__all__ = ["LateCall", "LateWork"]


class LateWork:
    """What a faulty backend does out of turn: calls that hang, threads that act later, tickets that are open.

    `release` ends every wait of calls that began before it, `stop` those that come as well. Every thread is named `kvstore-late-<n>`.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._releases = 0
        self._stopped = False
        self._hanging = 0
        # Those that have something to do, and all that have not ended.
        self._threads: set[threading.Thread] = set()
        self._begun: list[threading.Thread] = []
        self._started = 0
        self._open: set[object] = set()
        self.errors: list[BaseException] = []

    @property
    def hanging(self) -> int:
        """Calls that wait now."""
        with self._changed:
            return self._hanging

    def begin(self) -> LateCall:
        """For a call that begins now. What it waits for ends with the next `release`, also when the wait begins after that."""
        with self._changed:
            return LateCall(self, self._releases)

    def wait(self, seconds: float | None, releases: int) -> None:
        """See `LateCall`. `releases`: how many there had been when the call began."""
        with self._changed:
            self._hanging += 1
            self._changed.notify_all()
            try:
                self._wait(seconds, releases)
            finally:
                self._hanging -= 1
                self._changed.notify_all()

    def later(self, seconds: float | None, releases: int, work: Callable[[], object], memory: Sequence[Buffer], ticket: object) -> None:
        """See `LateCall`. `releases`: how many there had been when the call began."""

        def run() -> None:
            try:
                with self._changed:
                    self._wait(seconds, releases)
                work()
            except BaseException as error:  # noqa: BLE001  kept for the test; a thread has nobody to raise to
                # The memory may be gone by now: its owner closed the region, rightly, after the call returned.
                if not (isinstance(error, ValueError) and any(map(_is_gone, memory))):
                    self.errors.append(error)
            finally:
                with self._changed:
                    self._open.discard(ticket)
                    self._threads.discard(thread)
                    self._changed.notify_all()

        with self._changed:
            self._started += 1
            thread = threading.Thread(target=run, name=f"kvstore-late-{self._started}", daemon=True)
            self._threads.add(thread)
            self._begun = [*filter(threading.Thread.is_alive, self._begun), thread]
            if ticket is not None:
                self._open.add(ticket)
            thread.start()

    def wait_hanging(self, calls: int, timeout_s: float) -> bool:
        """Wait until so many calls hang. False: they do not, after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._hanging >= calls, timeout_s)

    def wait_done(self, timeout_s: float) -> bool:
        """Wait until no late work is left. False: there is some, after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._threads, timeout_s)

    def wait_over(self, tickets: list[object], timeout_s: float) -> list[bool]:
        """Wait until none of these tickets is open, at most `timeout_s`; say for each whether it is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._open.isdisjoint(tickets), timeout_s)
            return [ticket not in self._open for ticket in tickets]

    def release(self) -> None:
        """End every wait of calls that began before."""
        with self._changed:
            self._releases += 1
            self._changed.notify_all()

    def stop(self, timeout_s: float) -> None:
        """End every wait, now and from now on, and join the threads, at most `timeout_s`. Idempotent."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            threads = [thread for thread in self._begun if thread is not threading.current_thread()]
        end = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _wait(self, seconds: float | None, releases: int) -> None:
        self._changed.wait_for(lambda: self._stopped or self._releases != releases, seconds)


class LateCall:
    """What one call of a faulty backend does out of turn."""

    def __init__(self, work: LateWork, releases: int) -> None:
        self._work = work
        self._releases = releases

    def wait(self, seconds: float | None) -> None:
        """Return after `seconds`, or on a `release` since the call began, or on `stop`. None: only on the latter two."""
        self._work.wait(seconds, self._releases)

    def later(self, seconds: float | None, work: Callable[[], object], memory: Sequence[Buffer], ticket: object = None) -> None:
        """Do `work`, which touches `memory`, in a thread, after a wait like that of `wait`. A `ticket` is open until then."""
        self._work.later(seconds, self._releases, work, memory, ticket)


def _is_gone(buffer: Buffer) -> bool:
    try:
        buffer.view.release()
    except ValueError:
        return True
    return False
