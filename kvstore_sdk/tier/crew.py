"""Who makes the calls of a Tier: threads that wait for them, or whoever comes by."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from kvstore_sdk.backend import Backend
from kvstore_sdk.isolation import PolledBackend
from kvstore_sdk.tier.batch import Batch
from kvstore_sdk.tier.calls import Asked, Asking, drive
from kvstore_sdk.tier.types import EngineMemory, RecordMemory
from kvstore_sdk.tier.work import WorkQueue

__all__ = ["Crew", "PolledCrew", "ThreadCrew", "crew_of", "polled_by"]

logger = logging.getLogger(__name__)

Run = Callable[[Batch], Asking[None]]
"""What becomes of a batch."""
Failed = Callable[[Batch], None]
"""Is told, within the handling of the exception, of a batch that ended by a fault of ours."""

_LEAST_S = 0.002
_SHARE = 0.25
_MOST_S = 0.01
"""One pump goes on beginning and ending batches for a share of the time since the one before, within these bounds, and for one batch at
least. Requests wait for what it does, and for the step that it delays."""


def polled_by(backend: Backend, memory: EngineMemory | RecordMemory) -> PolledBackend | None:
    """The backend, if its calls are to be made by a `PolledCrew`.

    Not where records are staged, as the engine's thread would have to copy them: 220 to 290 us for a MiB, against 50 to 100 in the direct
    way (`benchmarks/isolation.py`, 2 cores). Beside an engine that waits half of its time, threads move as much and cost it nothing; beside
    one that never does they move a quarter or less, and about what they do in its own process.
    """
    return backend if isinstance(backend, PolledBackend) and isinstance(memory, RecordMemory) else None


class Crew(Protocol):
    """Takes batches from a queue, has their calls made, and does what follows from the answers."""

    @property
    def threads(self) -> list[threading.Thread]:
        """Those that have not ended, by the last time that was looked at."""
        ...

    def grow(self) -> bool:
        """Have as many calls at a time as the queue wants. Returns whether there can be any."""
        ...

    def pump(self) -> None:
        """Do some of what there is to do, for a bounded time; nothing where threads do it. Never waits. From any thread."""
        ...

    def wait(self, until_s: float) -> None:
        """Wait until a batch ends, not later than `until_s`."""
        ...

    def wait_quiet(self, until_s: float) -> None:
        """Wait until no call is running, not later than `until_s`."""
        ...

    def stop(self) -> None:
        """Begin nothing more."""
        ...

    def settle(self, until_s: float) -> None:
        """The backend is closed: take in what that has ended, calls and what was in doubt."""
        ...


class ThreadCrew:
    """As many threads as the queue wants, each taking one batch after another. Used by one thread at a time."""

    def __init__(self, name: str, work: WorkQueue, run: Run, failed: Failed) -> None:
        self._name = name
        self._work = work
        self._run = run
        self._failed = failed
        self._started = 0
        self.threads: list[threading.Thread] = []

    def grow(self) -> bool:
        """Start the threads that the queue wants. One that the system does not start is logged, and wanted again."""
        self.threads = [thread for thread in self.threads if thread.is_alive()]
        while self._work.wants_thread():
            self._started += 1
            thread = threading.Thread(target=self._take, name=f"{self._name}-io-{self._started}", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                self._work.thread_failed()
                logger.exception("%s: a thread could not be started", self._name)
                break
            self.threads.append(thread)
        return bool(self.threads)

    def pump(self) -> None:
        """The threads do it."""

    def wait(self, until_s: float) -> None:
        self._work.wait_changed(until_s)

    def wait_quiet(self, until_s: float) -> None:
        self._work.wait_quiet(until_s)

    def stop(self) -> None:
        self._work.stop()

    def settle(self, until_s: float) -> None:
        """The threads have done it, or hang: a backend that answers after its `close` is not to be waited for by anybody else."""

    def _take(self) -> None:
        while (batch := self._work.next()) is not None:
            try:
                drive(self._run(batch))
            except BaseException:  # noqa: BLE001  # a fault of ours, as a backend's are caught: the thread and the jobs must go on
                self._failed(batch)


@dataclass(slots=True, eq=False)
class _Running:
    """A batch that was begun, and the call that it waits for."""

    batch: Batch
    steps: Asking[None]
    asked: Asked[Any] | None = None
    began_s: float = 0.0
    answer: object = None


class PolledCrew:
    """No threads: calls are begun, and their answers taken, by whoever pumps.

    A thread that waits for a call competes with the engine's own for the interpreter, and where that is busy loses: each system call of its
    costs it up to a switch interval. The engine comes by anyway. In return what follows from an answer, verification above all, is done on
    its thread, and answers wait until it comes by: so more calls are under way than the backend works on at a time.
    """

    DEPTH = 4
    """Calls under way in the place of each that runs."""

    def __init__(self, work: WorkQueue, backend: PolledBackend, run: Run, failed: Failed) -> None:
        self._work = work
        self._backend = backend
        self._run = run
        self._failed = failed
        self.threads: list[threading.Thread] = []
        # Every batch that was begun and has not ended: one that an interrupt has lost keeps its slots, as its call may go on.
        self._running: set[_Running] = set()
        self._calls: dict[int, _Running] = {}
        self._answered: deque[_Running] = deque()
        # When answers were last looked for.
        self._looked_s = 0.0
        # When the last pump that may have had something to do began.
        self._pumped_s = 0.0
        # Held by who pumps. Others have nothing to do meanwhile.
        self._pumping = threading.Lock()

    def grow(self) -> bool:
        while self._work.wants_thread():
            pass
        return True

    def pump(self) -> None:
        self._pump()

    def wait(self, until_s: float) -> None:
        if self._pump():
            return
        if self._calls:
            self._backend.wait_answers(until_s)
            self._pump()
        else:
            # Nothing is asked, so what comes is due at a time: a retry, a question about what is in doubt.
            time.sleep(max(0.0, min(0.01, until_s - time.monotonic())))

    def wait_quiet(self, until_s: float) -> None:
        while (self._calls or self._answered) and time.monotonic() < until_s:
            self.wait(until_s)

    def stop(self) -> None:
        """Jobs and questions are refused by now, so that there is nothing to begin but questions about what is in doubt."""

    def settle(self, until_s: float) -> None:
        while not self._work.is_untouched and time.monotonic() < until_s:
            self.wait(min(until_s, time.monotonic() + 0.05))
        self._work.stop()

    def _pump(self) -> bool:
        """Returns whether there was something to do."""
        if not (self._calls or self._answered or self._work.waits) or not self._pumping.acquire(blocking=False):
            return False
        try:
            if self._calls:
                self._take_answers()
            now = time.monotonic()
            allowed_s = min(_MOST_S, max(_LEAST_S, _SHARE * (now - self._pumped_s)))
            self._pumped_s = now
            # Its own time: while somebody else has the processor the engine loses nothing by us.
            until_s = time.thread_time() + allowed_s
            done = False
            while self._advance():
                done = True
                if time.thread_time() >= until_s:
                    break
            return done
        finally:
            self._pumping.release()

    def _advance(self) -> bool:
        """Begin a batch and let one go on, as far as there are any. Returns whether there was one."""
        # Begun first: while we look at an answer the backend has something to do.
        batch = self._work.try_next()
        if batch is not None:
            begun = _Running(batch, self._run(batch))
            self._running.add(begun)
            self._go_on(begun, None)
        if not self._answered:
            return batch is not None
        running = self._answered.popleft()
        self._go_on(running, running.asked)
        return True

    def _take_answers(self) -> None:
        # What is there now was not there then.
        unanswered_s, self._looked_s = self._looked_s, time.monotonic()
        for number, answer in self._backend.take_answers():
            running = self._calls.pop(number, None)
            if running is not None:
                running.answer = answer
                running.batch.returned = True
                running.batch.unanswered_s = unanswered_s
                self._answered.append(running)

    def _answers(self, running: _Running, answered: Asked[Any]) -> list[Any]:
        def said() -> object:
            if isinstance(running.answer, BaseException):
                raise running.answer
            return running.answer

        return answered.judge(said, running.began_s)

    def _go_on(self, running: _Running, answered: Asked[Any] | None) -> None:
        """Let a batch go on, after a call of it was answered, to its next call or its end."""
        batch = running.batch
        try:
            asked = next(running.steps) if answered is None else running.steps.send(self._answers(running, answered))
            while asked.refused is not None:
                asked = running.steps.send(asked.refused)
        except StopIteration:
            self._running.discard(running)
            return
        except BaseException as error:
            self._running.discard(running)
            self._failed(batch)
            if isinstance(error, Exception):
                return
            # Not ours: an interrupt of the thread that pumps.
            raise
        running.asked = asked
        running.began_s = time.monotonic()
        batch.returned = False
        self._calls[self._backend.begin(asked.operation, list(asked.items), asked.deadline)] = running


def crew_of(name: str, work: WorkQueue, polled: PolledBackend | None, run: Run, failed: Failed) -> Crew:
    """Who makes the calls of a tier: nobody but whoever comes by, if there is a `polled` backend."""
    return ThreadCrew(name, work, run, failed) if polled is None else PolledCrew(work, polled, run, failed)
