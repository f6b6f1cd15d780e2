"""Options whose values must be shown to nobody, and where they might be shown."""

from __future__ import annotations

import contextlib
import logging
import random
import typing
from collections.abc import Iterator
from dataclasses import replace
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from kvstore_sdk.backend import OptionInfo, backend_options
from kvstore_sdk_conformance.store import Store
from kvstore_sdk_conformance.target import FRESH, Target
from kvstore_sdk_conformance.view import View

__all__ = ["MIN_CHARACTERS", "canary", "given", "logged", "open_with", "takes_text", "text_options"]

MIN_CHARACTERS = 6
"""A shorter value turns up in any text by chance."""


def given(target: Target) -> dict[str, str]:
    """The secrets that the run was given, but for those that anybody can see elsewhere."""
    secrets = target.secrets()
    public = [target.shown, target.location or "", *(value for name, value in target.options.items() if name not in secrets)]
    return {name: value for name, value in secrets.items() if len(value) >= MIN_CHARACTERS and not any(value in text for text in public)}


def text_options(target: Target) -> list[str]:
    """Names of the secret options that take any text."""
    schema = backend_options(target.target.replace(FRESH, "x"))
    return [name for name, option in schema.items() if option.secret and takes_text(option)]


def canary(source: random.Random) -> str:
    """A value that nothing else has."""
    return f"canary{source.randbytes(12).hex()}"


def open_with(store: Store, name: str, value: str) -> View:
    """Open a fresh location with another value of one option.

    Raises:
        FixtureError: it could not be opened.
    """
    other = store.elsewhere()
    place = other.place
    url = place.target
    if "?" in url:
        parts = urlsplit(url)
        query = urlencode([(key, text) for key, text in parse_qsl(parts.query, keep_blank_values=True) if key != name])
        url = urlunsplit(parts._replace(query=query))
    other.place = replace(place, target=url, options={**place.options, name: value})
    return other.open()


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Every line that is logged meanwhile, at any level."""
    lines: list[str] = []
    handler = _Lines(lines)
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        yield lines
    finally:
        root.setLevel(level)
        root.removeHandler(handler)


class _Lines(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.DEBUG)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001
            # A line that does not fit its arguments must not fail the call that logs it.
            line = f"{record.msg} {record.args}"
        self._lines.append(line)


def takes_text(option: OptionInfo) -> bool:
    """Whether it takes any text."""
    return option.type is str or str in typing.get_args(option.type)
