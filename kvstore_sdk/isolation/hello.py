"""The first words: what a child is to open, and what it found."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvstore_sdk.backend import BreachError, Capabilities, KVStoreError
from kvstore_sdk.isolation.crossing import unpack_capabilities, unpack_error
from kvstore_sdk.isolation.wire import WireError

__all__ = ["Offer", "Spec", "error_of", "hello", "offer_of"]

_SURFACES = frozenset({"SupportsDelete", "SupportsList", "SupportsUsage", "SupportsRegions", "SupportsSettle"})


@dataclass(frozen=True, slots=True, repr=False)
class Spec:
    """What a child is to open. Options may be secret: they are shown nowhere."""

    target: str
    options: Mapping[str, object]
    location: str | None


@dataclass(frozen=True, slots=True)
class Offer:
    """What the backend in the child offers."""

    capabilities: Capabilities
    surfaces: frozenset[str]


def hello(spec: Spec, label: str, log_level: int) -> dict[str, Any]:
    """What the child is told first."""
    return {
        "label": label,
        "log_level": log_level,
        "sys_path": list(filter(None, (entry or _working_folder() for entry in sys.path if isinstance(entry, str)))),
        "target": spec.target,
        "options": dict(spec.options),
        "location": spec.location,
    }


def _working_folder() -> str:
    """Nothing, where it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def offer_of(packed: Any) -> Offer:
    """What the child answers to that.

    Raises:
        BreachError: it is no offer.
    """
    try:
        if not isinstance(packed, dict) or not isinstance(packed.get("surfaces"), list):
            raise WireError("what it offers has another form")
        return Offer(unpack_capabilities(packed.get("capabilities")), _SURFACES & {str(name) for name in packed["surfaces"]})
    except WireError as cause:
        raise BreachError(f"open: {cause}") from None


def error_of(packed: object) -> KVStoreError:
    """The error that the child could not open the store for."""
    try:
        return unpack_error(packed)
    except WireError as cause:
        return BreachError(f"open: {cause}")
