"""Keeps the values of secret options out of everything that is shown."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from urllib.parse import parse_qsl, quote, quote_plus

from kvstore_sdk.backend import Bounds, OptionInfo
from kvstore_sdk_conformance.target import Target

__all__ = ["Redactor"]

SHORT = 6
"""A value of fewer characters is hidden where it stands alone: within words it would make a text unreadable, and anybody can guess it."""
_HIDDEN = "***"
_USER = re.compile(r"(?<=://)[^/\s@'\"]+@")
"""Who logs in, in a URL, and with what."""
_CODE = re.compile("%[0-9A-Fa-f]{2}")
"""In a URL, of which small letters mean the same."""


class Redactor:
    """Replaces secrets in a text: the values of options whose names say so, whether the backend knows such an option or not."""

    def __init__(self, target: Target) -> None:
        query = target.target.partition("?")[2]
        given = [*target.options.items(), *parse_qsl(query)]
        forms = {form for name, value in given if value and _is_secret(name) for form in _forms(value)}
        # In one pass, so that nothing is found in what has been replaced; the longest first, as one may be a part of another.
        ordered = sorted(forms, key=len, reverse=True)
        self._secrets = re.compile("|".join(map(_pattern, ordered))) if ordered else None
        self._query = query

    def __call__(self, text: str) -> str:
        # What a URL carries as options may be anything.
        if self._query:
            text = text.replace(f"?{self._query}", "?...")
        text = _USER.sub(f"{_HIDDEN}@", text)
        return self._secrets.sub(_HIDDEN, text) if self._secrets else text


def _is_secret(name: str) -> bool:
    return OptionInfo(name, str, None, Bounds(), "").secret


def _forms(value: str) -> Iterator[str]:
    """The value as a text may have it: as it is, in a URL, in a string literal, in JSON, in a shell's quotes, a line at a time."""
    for text in {value, *(line.strip() for line in value.splitlines() if len(line.strip()) >= SHORT)}:
        yield from (quote(text, safe=safe, errors="replace") for safe in ("", "/", "/:@"))
        yield quote_plus(text, errors="replace")
        yield from (text, repr(text)[1:-1], ascii(text)[1:-1], json.dumps(text)[1:-1], text.replace("'", "'\"'\"'"))


def _pattern(form: str) -> str:
    alone = len(form) < SHORT
    escaped = _CODE.sub(lambda code: f"(?i:{code[0]})", re.escape(form))
    # Not `\b`: a short secret may begin or end with what is no letter.
    return rf"(?<!\w){escaped}(?!\w)" if alone else escaped
