"""Whether the store answers, also while nobody uses it."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable

from kvstore_sdk.keys import GROUP_BYTES
from kvstore_sdk.tier.breaker import Breakers
from kvstore_sdk.tier.probe import Probe

__all__ = ["Health"]

logger = logging.getLogger(__name__)

_SCRATCH = hashlib.sha256(b"kvstore health").digest()[:16] + bytes(GROUP_BYTES)
"""Key of a chunk that there never is."""
_AGAIN_S = 60.0
"""A question that is not answered may hang, and then has a thread for itself; or no thread comes to it, as all hang. So long no second one
is asked, unless the queue has dropped it since."""
_LOOK_S = 0.02
_SOON_S = 0.1
_GRACE_S = 0.5
"""As a backend has to return by then."""


class Health:
    """Asks an idle or failing store for one name that is not there, by the same queue and calls as any look-up; thread-safe.

    A store that is in use and answers is not asked. An answer closes the breaker of `exists`. Those of `get` and `put` it closes on trust,
    if nobody has tried these operations for as long as a trial takes to come round: their next failure opens them again. So a store that
    came back is used again as a whole, though no request tried it; and one that answers questions but cannot be read costs the first
    request after a pause, and no other.
    """

    def __init__(
        self,
        name: str,
        breakers: Breakers,
        *,
        probe_s: float,
        timeout_s: float,
        send: Callable[[Probe], None],
        pump: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            name: For logs and the thread.
            breakers: Of the tier.
            probe_s: How often the store is asked; 0 for never.
            timeout_s: What an answer may take.
            send: Queues a question; from the thread of this.
            pump: Does some of what is queued, where no other thread does; likewise.
            clock: For tests.
        """
        self._breakers = breakers
        self._probe_s = probe_s
        self._timeout_s = timeout_s + _GRACE_S
        self._send = send
        self._pump = pump
        self._clock = clock
        self._lock = threading.Lock()
        self._probe: Probe | None = None
        self._is_new = False
        # What was so when the present question was asked.
        self._answered = True
        self._due_s = clock() + probe_s
        self._stop = threading.Event()
        self.threads: list[threading.Thread] = []
        """The one that asks, once it was started."""
        self._name = name

    @property
    def healthy(self) -> bool:
        """Whether the store can be read, as far as anybody tried: its breakers are closed, and what was asked last was answered.

        Questions are no loads: once the breaker of `get` was closed on trust, a store that answers and cannot be read is healthy until the
        next load.
        """
        return not (self._breakers.exists.is_open or self._breakers.get.is_open) and self._answers(self._probe)

    def start(self) -> None:
        """Begin to ask. Without a thread, which the system may refuse, nothing is asked."""
        if not self._probe_s:
            return
        thread = threading.Thread(target=self._run, name=f"{self._name}-health", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            logger.exception("%s: no thread could be started that watches the store's health", self._name)
        else:
            self.threads.append(thread)

    def stop(self) -> None:
        """End the thread, soon."""
        self._stop.set()

    def forget(self) -> None:
        """What was asked will not be answered: it is about to be taken out of the queue."""
        with self._lock:
            self._answered = self._answers(self._probe)
            self._probe = None
            self._due_s = self._clock() + self._probe_s

    def check(self) -> float:
        """Take in an answer, and ask if it is time to. Returns after how many seconds to call again."""
        with self._lock:
            now = self._clock()
            probe = self._probe
            if self._is_new and probe is not None and probe.answered is not None:
                self._is_new = False
                if probe.answered:
                    self._breakers.get.ease()
                    self._breakers.put.ease()
            if probe is not None and probe.answered is None:
                out_s = now - probe.asked_s
                if out_s <= self._timeout_s:
                    return _LOOK_S
                # If it was not begun, it need not be: whoever comes to it drops it, and then the next one is due.
                probe.over.update(probe.keys)
                if out_s <= _AGAIN_S:
                    return _SOON_S
            if now < self._due_s:
                return self._due_s - now
            breakers = self._breakers
            if not breakers.exists.is_open and not breakers.get.is_open and now - self._heard_s() < self._probe_s:
                # It is in use, and works.
                self._due_s = self._heard_s() + self._probe_s
                return max(_LOOK_S, self._due_s - now)
            if not breakers.exists.allows():
                # A look-up tries it, or it is to be left alone.
                return min(_SOON_S, self._probe_s)
            self._answered = self._answers(probe)
            probe = self._probe = Probe.of(_SCRATCH, asked_s=now, trial=True)
            self._is_new = True
            self._due_s = now + self._probe_s
        self._send(probe)
        self._pump()
        return _LOOK_S

    def _answers(self, probe: Probe | None) -> bool:
        """Whether the store answered this question, or anything since; while it may still do so, whether it did before."""
        if probe is None:
            return self._answered
        if probe.answered or self._heard_s() >= probe.asked_s:
            return True
        return self._answered and probe.answered is None and self._clock() - probe.asked_s <= self._timeout_s

    def _heard_s(self) -> float:
        return max(self._breakers.exists.heard_s, self._breakers.get.heard_s)

    def _run(self) -> None:
        pause_s = self._probe_s
        while not self._stop.wait(pause_s):
            try:
                if (probe := self._probe) is not None and probe.answered is None:
                    self._pump()
                pause_s = self.check()
            except Exception:  # the thread must go on: nobody would hear that it ended
                logger.exception("%s: the store's health could not be looked at", self._name)
                pause_s = self._probe_s
