"""Threads that make calls for a while: how many records they got done, how long it took, and a call that never returns."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from kvstore_sdk.backend import BackendError, TimedOutError
from kvstore_sdk.errors import KVStoreError, text_of

__all__ = ["GRACE_S", "Done", "Watch", "work_through"]

_T = TypeVar("_T")
GRACE_S = 1.0
"""A backend has to return half a second after its deadline; the rest is for a busy machine."""
_LOOK_S = 0.1


class Done(NamedTuple):
    """What a measurement came to.

    Attributes:
        records: That were done, each time counted.
        seconds: From when the threads were let go until the last of them was done.
        calls_s: How long each call took, with what was done around it.
    """

    records: int
    seconds: float
    calls_s: Sequence[float]

    @property
    def rate(self) -> float:
        """Records a second."""
        return self.records / max(self.seconds, 1e-9)


class Watch:
    """When each thread's call began, so that one that does not return is noticed. A thread writes its own place alone.

    Attributes:
        threads: How many there are, at least 1.
        timeout_s: Of one call.
    """

    def __init__(self, threads: int, timeout_s: float) -> None:
        self.threads = threads
        self.timeout_s = timeout_s
        self._began_s = [0.0] * threads

    def begins(self, thread: int) -> None:
        self._began_s[thread] = time.monotonic()

    def ends(self, thread: int) -> None:
        self._began_s[thread] = 0.0

    @property
    def is_late(self) -> bool:
        """Whether a call should have returned by now."""
        now = time.monotonic()
        return any(began_s and now - began_s > self.timeout_s + GRACE_S for began_s in self._began_s)

    @property
    def is_inside(self) -> bool:
        """Whether a call has not returned."""
        return any(self._began_s)


def work_through(
    doing: str,
    batches: Sequence[Sequence[_T]],
    work: Callable[[int, Sequence[_T]], None],
    watch: Watch,
    *,
    limit_s: float,
    repeat: bool = False,
) -> Done:
    """Let the threads of `watch` take one batch after another, until none is left or `limit_s` has passed. Each of them takes one at least.

    Args:
        doing: For errors.
        batches: What there is to do, at least one.
        work: Does a batch, given the number of the thread; tells the watch when it is inside a backend.
        watch: A new one.
        limit_s: After it no batch is begun; infinity for all of them.
        repeat: Begin again when all are done.

    Raises:
        BackendError: the first that any thread met, or `TimedOutError` for a call that does not return: its thread is left behind.
        KeyboardInterrupt: after the calls that ran then have ended, or were given up.
    """
    source: Iterator[Sequence[_T]] = itertools.cycle(batches) if repeat else iter(batches)
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    go, stop = threading.Event(), threading.Event()
    calls: list[tuple[float, float, int]] = []
    began_s = 0.0

    def run(thread: int) -> None:
        failed: BaseException | None = None
        try:
            go.wait()
            before_s = time.perf_counter()
            # Taken under the GIL, one each.
            while not stop.is_set() and (batch := next(source, None)) is not None:
                work(thread, batch)
                now_s = time.perf_counter()
                calls.append((now_s, now_s - before_s, len(batch)))
                before_s = now_s
                if now_s - began_s > limit_s:
                    break
        except BaseException as error:  # noqa: BLE001  # raised again by whoever waits
            failed = error
        finally:
            watch.ends(thread)
            ended.put(failed)

    for number in range(watch.threads):
        threading.Thread(target=run, args=(number,), name=f"kvstore-bench-{number}", daemon=True).start()
    left, first = watch.threads, None
    began_s = time.perf_counter()
    try:
        go.set()
        while left:
            try:
                error = ended.get(timeout=_LOOK_S)
            except queue.Empty:
                if watch.is_late:
                    raise TimedOutError(f"{doing}: the backend did not return within {watch.timeout_s:g} s") from None
                continue
            left -= 1
            if error is not None:
                first = first or error
                stop.set()
    finally:
        stop.set()
        end_s = time.monotonic() + watch.timeout_s + GRACE_S
        # What a call that still runs may store cannot be removed for good.
        while left and time.monotonic() < end_s and not watch.is_late:
            try:
                ended.get(timeout=_LOOK_S)
                left -= 1
            except queue.Empty:
                continue
    if isinstance(first, KVStoreError):
        raise first
    if first is not None:
        raise BackendError(f"{doing}: the backend raised {type(first).__name__} ({text_of(first)})") from first
    return Done(sum(count for _, _, count in calls), max(at for at, _, _ in calls) - began_s, [seconds for _, seconds, _ in calls])
