"""Things that are done at the same time, for a bounded while."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

__all__ = ["Over", "race", "rounds"]

ROUNDS = 100
RACE_S = 1.5
"""Of one race, whatever its number of rounds: a store over a network gets fewer of them."""
FEWEST, FEW = 3, 8
LATEST_S = 8.0
"""Until then rounds are made up for where there were few: a machine that stands still takes from the time, not from what is to be seen."""
LOOK_S = 0.1
"""Longest that is waited for whoever watches to look."""
START_S = 30.0
END_S = 120.0
"""Longest that a race is waited for. Every call in it is bounded, so that is never reached."""


class Over(threading.Event):
    """Set when a race is over: whoever is in it stops before its next step."""

    def __init__(self) -> None:
        super().__init__()
        self._looked = threading.Event()

    def look(self) -> None:
        """Whoever watches has looked once."""
        self._looked.set()

    def await_look(self) -> None:
        """Wait for a look since the last time this was called, for a while: what nobody watches shows nothing."""
        self._looked.wait(LOOK_S)
        self._looked.clear()


def rounds(over: Over, most: int = ROUNDS, *, few: int = FEW) -> Iterator[int]:
    """Numbers of rounds, until the race is over, or there were enough of them: `few` where they are slow."""
    began_s = time.monotonic()
    for number in range(most):
        took_s = time.monotonic() - began_s
        if over.is_set() or (number >= FEWEST and took_s > (RACE_S if number >= few else LATEST_S)):
            return
        yield number


def race(runners: Sequence[Callable[[Over], None]], watchers: Sequence[Callable[[Over], None]] = ()) -> None:
    """Start all of them at the same moment, each on a thread of its own. When the last runner has ended, watchers are told to stop.

    Raises:
        BaseException: what the first of them raised. The others are told to stop, and waited for.
    """
    over, start = Over(), threading.Barrier(len(runners) + len(watchers))
    raised: list[BaseException] = []

    def run(act: Callable[[Over], None]) -> None:
        try:
            start.wait(START_S)
            act(over)
        except BaseException as error:  # noqa: BLE001  # told to whoever asked for the race
            raised.append(error)
            over.set()

    running = [threading.Thread(target=run, args=(act,), name="kvstore-conformance-race", daemon=True) for act in runners]
    watching = [threading.Thread(target=run, args=(act,), name="kvstore-conformance-race", daemon=True) for act in watchers]
    for thread in [*running, *watching]:
        thread.start()
    until_s = time.monotonic() + END_S
    with contextlib.ExitStack() as end:
        end.callback(_join, watching, until_s)
        end.callback(over.set)
        _join(running, until_s)
    if raised:
        raise raised[0]
    if any(thread.is_alive() for thread in [*running, *watching]):
        raise TimeoutError(f"a race did not end within {END_S:g} s")


def _join(threads: Sequence[threading.Thread], until_s: float) -> None:
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))
