"""The backends of this repository in children, for the conformance suite: `isolated_targets:open_fs` and so on."""

from __future__ import annotations

from typing import Annotated, Any

from kvstore_sdk.backend import Bounds
from kvstore_sdk.isolation import IsolatedBackend, open_isolated

__all__ = ["open_fs", "open_memory"]


def open_fs(
    location: str,
    *,
    max_bytes: Annotated[int | None, Bounds(ge=1), "of backend fs"] = None,
    read_only: Annotated[bool, "of backend fs"] = False,
) -> IsolatedBackend:
    """Backend fs in a child."""
    options: dict[str, Any] = {"read_only": read_only}
    if max_bytes is not None:
        options["max_bytes"] = max_bytes
    return open_isolated("fs", options, location=location, label="isolated fs")


def open_memory(location: str, *, max_bytes: Annotated[int | None, Bounds(ge=1), "of backend memory"] = None) -> IsolatedBackend:
    """Backend memory in a child. Each child has records of its own."""
    options = {} if max_bytes is None else {"max_bytes": max_bytes}
    return open_isolated("memory", options, location=location, label="isolated memory")
