"""How far a command is, on standard error, where results never go."""

from __future__ import annotations

import argparse
import sys
import time

__all__ = ["Progress"]

_TERMINAL_S = 0.2
_LOG_S = 5.0


class Progress:
    """One line that is written over on a terminal; elsewhere, when `--progress` asks for it, a line now and then. A context."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._terminal = sys.stderr.isatty()
        wanted = arguments.progress
        self._on = self._terminal if wanted is None else bool(wanted)
        self._every_s = _TERMINAL_S if self._terminal else _LOG_S
        self._next_s = time.monotonic() + self._every_s
        self._shown = 0

    @property
    def due(self) -> bool:
        """Whether a line should be shown now: ask before making its text."""
        return self._on and time.monotonic() >= self._next_s

    def show(self, text: str) -> None:
        """Show `text`, one line of printable text, whether it is due or not."""
        if not self._on:
            return
        self._next_s = time.monotonic() + self._every_s
        if self._terminal:
            print("\r" + text.ljust(self._shown), end="", file=sys.stderr, flush=True)
            self._shown = len(text)
        else:
            print(text, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Take the line away, so that the next output starts where it stood: before each line of results, and at the end."""
        if self._shown:
            print("\r" + " " * self._shown + "\r", end="", file=sys.stderr, flush=True)
            self._shown = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()
