"""What can go wrong around a backend, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from kvstore_sdk.backend import GetResult, GetStatus, NoSpaceError, PutResult, PutStatus
from kvstore_sdk.testing import (
    Action,
    Fault,
    Hang,
    InDoubt,
    Raise,
    ReadLate,
    Return,
    ReturnLate,
    Say,
    SwapRecords,
    WriteLate,
    WrongBytes,
    WrongSize,
)

__all__ = ["FIRST_SCRIPT", "Faults", "tell"]

FIRST_SCRIPT = (Fault("put", InDoubt(0.0), times=0),)
"""Makes the faulty backend one that may be in doubt; nothing else."""

PAGE = 4096
PER_SCRIPT = 3
HITS = 6
"""Of a rule: then it is over, so that no script lasts."""


class Faults:
    """Scripts of a few rules each. Every kind of fault comes up once before any comes up again."""

    def __init__(self, source: random.Random, hang_s: float) -> None:
        """A call that hangs does so for `hang_s`, which should be longer than the time-outs of jobs."""
        self._source = source
        self._hang_s = hang_s
        self._deck: list[tuple[str, Action]] = []

    def script(self) -> list[Fault]:
        """The next script."""
        return [Fault(*self._draw(), times=HITS, probability=self._source.choice((0.2, 0.5, 1.0))) for _ in range(PER_SCRIPT)]

    def _draw(self) -> tuple[str, Action]:
        if not self._deck:
            self._deck = _menu(self._source, self._hang_s)
            self._source.shuffle(self._deck)
        return self._deck.pop()


def tell(script: Sequence[Fault]) -> str:
    """The rules as text."""
    return "; ".join(f"{fault.op}: {_text(fault.action)}, p={fault.probability:g}" for fault in script)


def _menu(source: random.Random, hang_s: float) -> list[tuple[str, Action]]:
    full = PutResult.failed(NoSpaceError("injected: the store is full"))
    return [
        ("*", Raise()),
        ("*", Raise(_os_error)),
        ("put", Raise(after=True)),
        ("get", Raise(after=True)),
        ("*", Return(_none)),
        ("*", Return(_too_short)),
        ("*", Say(None)),
        ("put", Say(full)),
        ("put", Say(PutResult(PutStatus.UNKNOWN))),
        ("put", Say(PutResult(PutStatus.UNKNOWN), after=True)),
        ("put", Say(PutResult(PutStatus.TIMED_OUT))),
        ("put", Say(PutResult(PutStatus.STORED))),
        ("get", Say(GetResult(GetStatus.MISSING))),
        ("get", Say(GetResult(GetStatus.TIMED_OUT))),
        ("exists", Say(source.random() < 0.5)),
        ("*", Hang(hang_s)),
        ("*", Hang(hang_s, after=True)),
        ("*", Hang(hang_s / 20)),
        ("*", ReturnLate(hang_s / 20)),
        ("put", WrongBytes(length=source.choice((1, 8, PAGE)), flip=source.choice((0x01, 0x80, 0xFF)))),
        ("get", WrongBytes(length=source.choice((1, 8, PAGE)), flip=source.choice((0x01, 0x80, 0xFF)))),
        # By a page, so that the backend is put nothing that is not aligned.
        ("put", WrongSize(-PAGE)),
        ("get", WrongSize(-PAGE)),
        ("get", SwapRecords()),
        ("put", InDoubt(hang_s / 20)),
        ("get", InDoubt(hang_s / 20)),
        # Only when they are released, which is when no job is open: nobody can tell a late write from the right bytes between the
        # moment of verification and that of the copy.
        ("get", WriteLate()),
        ("put", ReadLate()),
    ]


def _os_error() -> BaseException:
    return OSError(5, "injected")


def _none(_: Any) -> object:
    return None


def _too_short(results: Any) -> object:
    return results[:-1] if isinstance(results, list) else results


def _text(action: Action) -> str:
    found: Callable[[], BaseException] | None = getattr(action, "error", None)
    return f"{type(action).__name__}({found.__name__})" if found is not None and found is not Raise().error else repr(action)
