"""Settings of a TieredStore, with the reason of each default beside it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated

from kvstore_sdk.backend.options import Bounds

__all__ = ["StoreSettings"]

_Seconds = Bounds(ge=0.001, le=86400)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StoreSettings:
    """How host memory and the tiers below it are driven. Each tier has settings of its own besides."""

    lookup_timeout_s: Annotated[float, _Seconds, "a look-up that waits for tiers, for room or for a store is a miss by then"] = 2.0
    # As that of a tier: a prefill of some thousand tokens is done by then. A load that was begun has the tier's load_timeout_s.
    hold_timeout_s: Annotated[float, _Seconds, "how long a hit is kept for a request that does not load it"] = 30.0
    # Longer than any request waits for device memory while others make progress; bounds what a request that was dropped keeps.
    cascade_fraction: Annotated[float, Bounds(ge=0.01, le=1.0), "part of host memory on its way to tiers at most; more waits"] = 0.5
    # With the reserve of a quarter this leaves a quarter to hits and promotions, whatever hangs.
    drain_timeout_s: Annotated[float, _Seconds, "longest that drain waits"] = 10.0
    # As that of a tier.
    close_timeout_s: Annotated[float, _Seconds, "longest that close waits for stores to tiers, before it closes them"] = 4.0
    # Service managers kill after 10, and each tier's close may take 5 after this.

    def __repr__(self) -> str:
        changed = [f"{field.name}={getattr(self, field.name)!r}" for field in fields(self) if getattr(self, field.name) != field.default]
        return f"StoreSettings({', '.join(changed)})"
