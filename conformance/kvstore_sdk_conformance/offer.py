"""What a backend offers, and with it which requirements apply to it."""

from __future__ import annotations

import contextlib
import importlib.util
from dataclasses import dataclass, replace

from kvstore_sdk.backend import (
    Backend,
    BackendError,
    Capabilities,
    Deadline,
    Durability,
    KVStoreError,
    SupportsDelete,
    SupportsList,
    SupportsRegions,
    SupportsSettle,
    SupportsUsage,
    backend_options,
)
from kvstore_sdk_conformance.callers import Callers, HungError
from kvstore_sdk_conformance.requirement import Level, Need, Profile, Requirement
from kvstore_sdk_conformance.requirements import REQUIREMENTS
from kvstore_sdk_conformance.target import FRESH, Place, Target

__all__ = ["DEFAULT_PROFILES", "Offer"]

LOOK_S = 60.0
CLOSE_S = 10.0
USAGE_S = 10.0
BOUNDED_BYTES = 256 << 20
"""Largest capacity that the suite fills: seconds on any disk."""

DEFAULT_PROFILES = frozenset(Profile) - {Profile.PERFORMANCE, Profile.VLLM}
"""The others take minutes, or an engine, and are asked for by name."""

_SURFACES: dict[Need, type] = {
    Need.DELETE: SupportsDelete,
    Need.LIST: SupportsList,
    Need.USAGE: SupportsUsage,
    Need.REGIONS: SupportsRegions,
}


@dataclass(frozen=True)
class Offer:
    """What an open backend declares and implements.

    Attributes:
        name: Of the class of the backend, without secrets.
        capabilities: As declared.
        surfaces: Names of the optional protocols that it implements.
        lacks: Needs that it does not meet.
        capacity_bytes: What a location holds, as `usage` says; None: it knows no bound, or did not answer.
    """

    name: str
    capabilities: Capabilities
    surfaces: tuple[str, ...]
    lacks: frozenset[Need]
    capacity_bytes: int | None

    @classmethod
    def of(cls, target: Target) -> Offer:
        """Open the target at a fresh location and look.

        Raises:
            KVStoreError: it cannot be opened, or does not come back.
        """
        place = target.fresh()
        callers = Callers()
        try:
            backend = _open(target, place, callers)
            try:
                schema = backend_options(target.target.replace(FRESH, "x"))
                found: Offer = callers.run(lambda: cls._of(backend), LOOK_S)
                capacity_bytes = _capacity_bytes(callers, backend)
                lacks = set(found.lacks)
                if not any(option.secret for option in schema.values()):
                    lacks.add(Need.SECRETS)
                if capacity_bytes is None or capacity_bytes > BOUNDED_BYTES:
                    lacks.add(Need.BOUNDED)
                return replace(found, lacks=frozenset(lacks), capacity_bytes=capacity_bytes)
            finally:
                # How it closes is judged by checks of its own.
                with contextlib.suppress(Exception):
                    callers.run(backend.close, CLOSE_S)
        except HungError:
            raise BackendError(f"{target.shown}: did not open and say what it offers within {LOOK_S:g} s; nothing was checked") from None
        finally:
            callers.stop()
            place.discard()

    @classmethod
    def _of(cls, backend: Backend) -> Offer:
        surfaces = (SupportsDelete, SupportsList, SupportsUsage, SupportsRegions, SupportsSettle)
        offered = tuple(surface.__name__ for surface in surfaces if isinstance(backend, surface))
        return cls(type(backend).__name__, backend.capabilities, offered, frozenset(_lacks(backend)), None)

    def missing(self, requirement: Requirement) -> Need | None:
        """The first thing that the requirement is about and this backend does not offer."""
        return next((need for need in requirement.needs if need in self.lacks), None)

    def claims(self, profile: Profile) -> bool:
        """Whether at least one MUST of the profile applies."""
        return any(r.profile is profile and r.level is Level.MUST and self.missing(r) is None for r in REQUIREMENTS)


def _open(target: Target, place: Place, callers: Callers) -> Backend:
    try:
        backend: Backend = callers.run(place.open, LOOK_S)
        return backend
    except KVStoreError as error:
        if target.hint and getattr(error, "field", "location") == "location":
            raise BackendError(f"{error} ({target.hint})") from error
        raise


def _lacks(backend: Backend) -> set[Need]:
    declared = backend.capabilities
    holds = {
        Need.WRITABLE: not declared.read_only,
        Need.READ_ONLY: declared.read_only,
        Need.SEVERAL_PARTS: declared.max_parts > 1,
        Need.SEVERAL_ITEMS: declared.max_batch > 1,
        Need.SEVERAL_CALLS: declared.max_concurrency > 1,
        Need.SHARED: declared.shared,
        Need.READ_AFTER_WRITE: declared.read_after_write,
        Need.PROCESS_CRASH: declared.durability is Durability.PROCESS_CRASH,
        Need.IN_DOUBT: declared.in_doubt,
        Need.VLLM: importlib.util.find_spec("vllm") is not None,
    }
    holds |= {need: isinstance(backend, surface) for need, surface in _SURFACES.items()}
    return {need for need, held in holds.items() if not held}


def _capacity_bytes(callers: Callers, backend: Backend) -> int | None:
    if not isinstance(backend, SupportsUsage):
        return None
    try:
        found = callers.run(lambda: backend.usage(Deadline.after(USAGE_S)).capacity_bytes, 1.5 * USAGE_S)
    except Exception:  # noqa: BLE001  # whatever it is, the checks of usage will say so
        return None
    return found if isinstance(found, int) and found > 0 else None
