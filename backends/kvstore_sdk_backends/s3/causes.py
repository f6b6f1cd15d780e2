"""What failures of every store have in common: how long it asks to wait, and words that may be shown."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Mapping
from email.utils import parsedate_to_datetime

__all__ = ["one_line", "retry_after_s"]

_MAX_RETRY_AFTER_S = 3600.0
_LEAST_MASKED = 8
"""Characters. A shorter secret is part of ordinary words, which masking would turn into a riddle whose answer is the secret."""
_USERINFO = re.compile(r"//[^/@\s]+@")


def retry_after_s(headers: Mapping[str, str]) -> float:
    """How long the store asks to wait, in seconds from now: at most an hour, 0.0 when it does not say."""
    text = next((str(value) for name, value in headers.items() if name.lower() == "retry-after"), "").strip()
    if not text:
        return 0.0
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(text).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return 0.0
    return min(seconds, _MAX_RETRY_AFTER_S) if seconds > 0 else 0.0


def one_line(text: str, secrets: Collection[str], most: int) -> str:
    """`text` without line breaks, passwords of URLs and `secrets`, cut to `most` characters."""
    for secret in secrets:
        if len(secret) >= _LEAST_MASKED:
            text = text.replace(secret, "***")
    return _USERINFO.sub("//***@", " ".join(text.split()))[:most]
