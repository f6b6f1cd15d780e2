"""What an engine gives to a TieredStore and hears from it."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore_sdk.errors import ConfigError
from kvstore_sdk.tier import Tier

__all__ = ["HOST", "StoreEvent", "StoreTier"]

HOST = "host"
"""Name of host memory where tiers are named."""

_LOCALITIES = ("", "LOCAL", "REMOTE")


@dataclass(frozen=True, slots=True)
class StoreTier:
    """A tier below host memory.

    Attributes:
        name: For metrics, events and the filter of a request; each once in a store, and not `host`.
        tier: In direct mode over the store's HostTier. The store closes it.
        locality: `LOCAL`, `REMOTE`, or empty where that is not known; told with events.
    """

    name: str
    tier: Tier
    locality: str = ""

    def __post_init__(self) -> None:
        if not self.name or self.name == HOST:
            raise ConfigError("store", "tiers", f"{self.name!r} is no name for a tier; host memory is {HOST!r}")
        if self.locality not in _LOCALITIES:
            raise ConfigError(f"store tier {self.name}", "locality", f"{self.locality!r} must be one of {_LOCALITIES}")


@dataclass(frozen=True, slots=True)
class StoreEvent:
    """Chunks that came to a tier, or went from it. Each change is told once.

    Attributes:
        keys: The engine's.
        removed: They went; otherwise they came.
        tier: `host`, or the tier's name.
        locality: Of the tier.
    """

    keys: tuple[bytes, ...]
    removed: bool
    tier: str
    locality: str = ""
