"""Keeps the values of secret options out of everything that is shown."""

from __future__ import annotations

from kvstore_sdk_conformance.target import Target

__all__ = ["Redactor"]


class Redactor:
    """Replaces secrets in a text."""

    def __init__(self, target: Target) -> None:
        # The longest first: one may be a part of another.
        self._secrets = sorted(target.secrets().values(), key=len, reverse=True)
        self._query = target.target.partition("?")[2]

    def __call__(self, text: str) -> str:
        # What a URL carries as options may be anything.
        if self._query:
            text = text.replace(f"?{self._query}", "?...")
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text
