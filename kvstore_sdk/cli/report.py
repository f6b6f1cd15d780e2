"""What a command found or did in a store, item by item: lines for people, or one JSON object."""

from __future__ import annotations

import json
from types import TracebackType
from typing import Any

from kvstore_sdk.errors import text_of

__all__ = ["Report"]


class Report:
    """Written to standard output as it goes, so that memory does not grow with what is reported. A context.

    The JSON object has `command`, `dry_run` if the command changes something, `items` and what `end` adds. Broken off, it has `error`
    instead, and is whole nevertheless.
    """

    def __init__(self, command: str, *, as_json: bool, dry_run: bool | None = None) -> None:
        self._json = as_json
        self._head = {"command": command} | ({} if dry_run is None else {"dry_run": dry_run})
        self._items = 0
        self._ended = False

    def __enter__(self) -> Report:
        if self._json:
            print(f'{json.dumps(self._head)[:-1]}, "items": [', end="")
        return self

    def item(self, line: str, **fields: Any) -> None:
        """One thing that was done: `line` for people, `fields` for programs."""
        if not self._json:
            print(line)
            return
        print(f"{',' if self._items else ''}\n{json.dumps(fields)}", end="")
        self._items += 1

    def end(self, *lines: str, **fields: Any) -> None:
        """The sum of it."""
        self._ended = True
        if self._json:
            print("\n], " + json.dumps(fields)[1:])
        else:
            print(*lines, sep="\n")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._json and not self._ended and not isinstance(error, BrokenPipeError):
            said = "interrupted" if kind is KeyboardInterrupt else getattr(kind, "__name__", "unknown")
            self.end(error=text_of(error) if error and str(error) else said)
