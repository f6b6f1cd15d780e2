"""Which requirement a check proves."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kvstore_sdk_conformance.requirement import Requirement
from kvstore_sdk_conformance.requirements import BY_ID

__all__ = ["proves", "requirement_of"]

Check = TypeVar("Check", bound=Callable[..., object])
_ATTRIBUTE = "kvstore_requirement"


def proves(id_: str) -> Callable[[Check], Check]:
    """Mark a check function: `@proves("KV-CORE-01")`."""

    def mark(check: Check) -> Check:
        setattr(check, _ATTRIBUTE, BY_ID[id_])
        return check

    return mark


def requirement_of(check: object) -> Requirement | None:
    """What a function proves, if it is a check."""
    found = getattr(check, _ATTRIBUTE, None)
    return found if isinstance(found, Requirement) else None
