"""Whether a backend and settings fit a model's chunks: found out before anything is called."""

from __future__ import annotations

from typing import NamedTuple

from kvstore_sdk.backend import Backend, ConfigError, SupportsSettle
from kvstore_sdk.format import padded_bytes, record_bytes
from kvstore_sdk.identity import KVIdentity
from kvstore_sdk.keys import GROUP_BYTES, MAX_HASH_BYTES
from kvstore_sdk.tier.settings import TierSettings

__all__ = ["Fit", "fit"]

_NAME_BYTES = len("v1//00/-g4294967295") + 32
"""Of a chunk's name, besides two digits for each byte of its hash."""
_SHORTEST_HASH_BYTES = 16
"""Of the hashes that engines use."""


class Fit(NamedTuple):
    """What follows from a backend, an identity and settings.

    Attributes:
        slot_bytes: Length of a staging slot: the largest record of any group, and the manifest goes through it too.
        slots: How many of them.
        max_key_bytes: Longest key of the engine whose record's name the backend takes.
    """

    slot_bytes: int
    slots: int
    max_key_bytes: int


def fit(where: str, backend: Backend, identity: KVIdentity, settings: TierSettings) -> Fit:
    """Find out.

    Raises:
        ConfigError: they do not fit.
    """
    capabilities = backend.capabilities
    largest = max(record_bytes(group.payload_bytes) for group in identity.groups)
    if largest > capabilities.max_record_bytes:
        problem = f"the backend takes records of {capabilities.max_record_bytes} bytes, this model's chunks need {largest}"
        problem += "; raise it, or what memory the backend was given"
        raise ConfigError(where, "max_record_bytes", problem)
    hash_bytes = min(MAX_HASH_BYTES, (capabilities.max_name_bytes - _NAME_BYTES) // 2)
    if hash_bytes < _SHORTEST_HASH_BYTES:
        needed = _NAME_BYTES + 2 * _SHORTEST_HASH_BYTES
        problem = f"the backend takes names of {capabilities.max_name_bytes} bytes, chunks have names of {needed} at least"
        raise ConfigError(where, "max_name_bytes", problem)
    # A page to spare: a reset makes the identity, and so the manifest, some bytes longer.
    slot_bytes = max(largest, padded_bytes(len(identity.manifest())) + 4096)
    slots = settings.staging_bytes // slot_bytes
    if slots < 2:
        raise ConfigError(where, "staging_bytes", f"{settings.staging_bytes} does not hold two slots of {slot_bytes} bytes")
    if capabilities.in_doubt and not isinstance(backend, SupportsSettle):
        raise ConfigError(where, "backend", "declares in_doubt but has no settle method")
    return Fit(slot_bytes, slots, GROUP_BYTES + hash_bytes)
