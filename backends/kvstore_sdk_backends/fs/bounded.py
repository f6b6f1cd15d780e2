"""Waiting for a filesystem that may never answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from kvstore_sdk.backend import TimedOutError

__all__ = ["within"]

T = TypeVar("T")


def within(limit_s: float, doing: str, step: Callable[[], T], undo: Callable[[T], object]) -> T:
    """The result of `step`, or its exception, if it comes within `limit_s`.

    A system call on a dead network mount cannot be interrupted, so `step` runs on a thread of its own, which is left behind when
    the time is up. Should it come back after all, `undo` gets what it made.

    Raises:
        TimedOutError: the time is up. `doing` begins the message.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            made = step()
        except BaseException as cause:  # noqa: BLE001  # handed to the caller, whatever it is
            if answer.set_running_or_notify_cancel():
                answer.set_exception(cause)
            return
        # Exactly one of two things happens: the caller takes the answer, or it gave up and this thread puts it away.
        if answer.set_running_or_notify_cancel():
            answer.set_result(made)
        else:
            undo(made)

    thread = threading.Thread(target=run, name=doing, daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive() and answer.cancel():
        raise TimedOutError(f"{doing}: the filesystem did not answer within {limit_s:g} s; is its server there?")
    return answer.result()
