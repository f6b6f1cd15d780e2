"""A script for hours: what goes wrong with a store, and when, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from kvstore_sdk.backend import GetResult, GetStatus, PutResult, PutStatus, ThrottledError, TimedOutError, UnavailableError
from kvstore_sdk.testing.actions import Hang, InDoubt, NoSpace, Raise, ReadLate, Return, ReturnLate, Say, WriteLate
from kvstore_sdk.testing.clock import JumpClock
from kvstore_sdk.testing.corruption import Stale, SwapRecords, Torn, WrongBytes, WrongSize
from kvstore_sdk.testing.faults import Action, Fault

__all__ = ["BREACHES", "KINDS", "Episode", "Schedule", "draw_episodes"]

_PAGE = 4096
_HOUR_S = 3600.0
_Rules = Sequence[tuple[str, Action]]


@dataclass(frozen=True, slots=True)
class Episode:
    """A time in which one kind of thing goes wrong."""

    kind: str
    begins_s: float
    ends_s: float


def draw_episodes(
    duration_s: float, kinds: Collection[str], *, seed: int, episode_s: tuple[float, float] = (1.0, 4.0), calm: float = 0.3
) -> tuple[Episode, ...]:
    """Fill `duration_s` with episodes, one after another. Every kind comes once before any comes again.

    Args:
        duration_s: The last one ends by then.
        kinds: Which there are.
        seed: Equal seeds, equal episodes.
        episode_s: The shortest and the longest; lengths are uniform between them.
        calm: Part of the time, on average, in which nothing goes wrong: it lies between the episodes.

    Raises:
        ValueError: there is no kind, or a number is out of bounds.
    """
    shortest_s, longest_s = episode_s
    if not kinds or not 0.0 < shortest_s <= longest_s or not 0.0 <= calm < 1.0:
        raise ValueError(f"draw_episodes: {len(kinds)} kinds, episode_s {episode_s}, calm {calm}: at least one, 0 < shortest, calm below 1")
    draw = random.Random(f"episodes {seed}")
    pause_s = (shortest_s + longest_s) / 2 * calm / (1.0 - calm)
    episodes: list[Episode] = []
    deck: list[str] = []
    at_s = 0.0
    while True:
        at_s += draw.uniform(0.0, 2 * pause_s)
        ends_s = at_s + draw.uniform(shortest_s, longest_s)
        if ends_s > duration_s:
            return tuple(episodes)
        if not deck:
            deck = sorted(kinds)
            draw.shuffle(deck)
        episodes.append(Episode(deck.pop(), at_s, ends_s))
        at_s = ends_s


class Schedule(Sequence[Fault]):
    """The rules of a long script: episodes of faults with calm between them, drawn from a seed.

    It is a script, for `FaultyBackend`: its times count from when it is armed. Two schedules added, `[*first, *second]`, go on at the same
    time. `KINDS` has the kinds.

    Attributes:
        duration_s: All episodes are over by then.
        episodes: Of what kind each is, and its time.
    """

    def __init__(
        self,
        duration_s: float,
        *,
        seed: int,
        kinds: Collection[str] | None = None,
        hang_s: float = 3.0,
        episode_s: tuple[float, float] = (1.0, 4.0),
        calm: float = 0.3,
        probabilities: Sequence[float] = (0.2, 0.5, 1.0),
    ) -> None:
        """Draw it. Equal arguments, equal schedules.

        Args:
            duration_s: All is over by then, but for what hangs.
            seed: Of everything that is drawn.
            kinds: Some of `KINDS`. None: all but `BREACHES`, which only a caller survives that lends a backend no memory but its own.
            hang_s: How long a call hangs; longer than the time-outs of the caller, or there is nothing to see.
            episode_s: The shortest and the longest episode.
            calm: Part of the time, on average, in which nothing goes wrong.
            probabilities: Of an item to be hit; each rule has one of them.

        Raises:
            ValueError: a kind is unknown, or a number out of bounds.
        """
        chosen = [kind for kind in KINDS if kind not in BREACHES] if kinds is None else list(kinds)
        if unknown := [kind for kind in chosen if kind not in KINDS]:
            raise ValueError(f"Schedule: kinds: {unknown[0]!r} is none of them; choose from {' '.join(KINDS)}")
        self.duration_s = duration_s
        self.episodes = draw_episodes(duration_s, chosen, seed=seed, episode_s=episode_s, calm=calm)
        draw = random.Random(f"faults {seed}")
        # What a backend offers must not depend on what was drawn: of two that open one location, one may be a restart of the other.
        self._faults = [Fault("put", InDoubt(), times=0)] if "in_doubt" in chosen else []
        self._faults += [
            Fault(op, action, probability=draw.choice(probabilities), begins_s=episode.begins_s, ends_s=episode.ends_s)
            for episode in self.episodes
            for op, action in KINDS[episode.kind](draw, hang_s)
        ]

    def __len__(self) -> int:
        return len(self._faults)

    @overload
    def __getitem__(self, index: int) -> Fault: ...
    @overload
    def __getitem__(self, index: slice) -> list[Fault]: ...
    def __getitem__(self, index: int | slice) -> Fault | list[Fault]:
        return self._faults[index]

    def __repr__(self) -> str:
        return f"Schedule({self.duration_s:g} s, {len(self.episodes)} episodes, {len(self)} faults)"


def _none(_: Any) -> object:
    return None


def _cut(results: Any) -> object:
    return results[:-1] if isinstance(results, list) else results


def _errors(draw: random.Random, _: float) -> _Rules:
    error = draw.choice(
        (
            lambda: UnavailableError("injected: the store cannot be reached"),
            lambda: ThrottledError("injected: too many requests", 0.05),
            lambda: TimedOutError("injected: no answer"),
            lambda: OSError(5, "injected"),
            lambda: MemoryError("injected"),
        )
    )
    return [("*", Raise(error))]


def _lost_answers(draw: random.Random, _: float) -> _Rules:
    if draw.random() < 0.5:
        return [("*", Raise(after=True))]
    return [("put", Say(PutResult(PutStatus.UNKNOWN), after=draw.random() < 0.5))]


def _lies(draw: random.Random, _: float) -> _Rules:
    return [
        ("put", Say(PutResult(PutStatus.STORED))),
        ("get", Say(GetResult(draw.choice((GetStatus.MISSING, GetStatus.TIMED_OUT))))),
        ("exists", Say(draw.random() < 0.5)),
    ]


def _nonsense(draw: random.Random, _: float) -> _Rules:
    return [("*", draw.choice((Return(_none), Return(_cut), Say(None), Say(42))))]


def _late_writes(_: random.Random, hang_s: float) -> _Rules:
    return [("get", WriteLate(hang_s / 10)), ("put", ReadLate(hang_s / 10))]


def _wrong_bytes(draw: random.Random, _: float) -> _Rules:
    return [(op, WrongBytes(length=draw.choice((1, 8, _PAGE)), flip=draw.choice((0x01, 0x80, 0xFF)))) for op in ("get", "put")]


KINDS: Mapping[str, Callable[[random.Random, float], _Rules]] = {
    "errors": _errors,
    "lost_answers": _lost_answers,
    "slow": lambda draw, hang_s: [("*", Hang(draw.uniform(0.002, hang_s / 20)))],
    "hangs": lambda draw, hang_s: [(draw.choice(("exists", "get", "put", "*")), Hang(hang_s, after=draw.random() < 0.5))],
    "late_answers": lambda _, hang_s: [("*", ReturnLate(hang_s / 10))],
    "in_doubt": lambda draw, hang_s: [(op, InDoubt(draw.uniform(0.01, hang_s / 5))) for op in ("get", "put")],
    "short": lambda draw, _: [(op, WrongSize(draw.choice((-1, 1)) * _PAGE)) for op in ("get", "put")],
    "torn": lambda draw, _: [(op, Torn()) for op in ("get", "put")],
    "stale": lambda draw, hang_s: [("put", Stale(draw.uniform(0.05, hang_s / 3)))],
    "wrong_bytes": _wrong_bytes,
    "swapped": lambda draw, _: [("get", SwapRecords())],
    "no_space": lambda draw, _: [("put", NoSpace(raw=draw.random() < 0.5))],
    "clock": lambda draw, _: [("*", JumpClock(draw.choice((-24, -1, 1, 24)) * _HOUR_S))],
    "lies": _lies,
    "nonsense": _nonsense,
    "late_writes": _late_writes,
}
"""What can go wrong, by name: a function of what is drawn and `hang_s`, that makes the rules of one episode."""

BREACHES = frozenset({"late_writes"})
"""Kinds that use the caller's memory after the call returned."""
