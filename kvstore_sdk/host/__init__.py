"""Host memory: a cache of records in one region, with pins, slot sizes and a reserve for running requests."""

from kvstore_sdk.host.policies import open_policy
from kvstore_sdk.host.policy import EvictionPolicy
from kvstore_sdk.host.region import create_region, is_abandoned, join_region, open_region, sweep_regions
from kvstore_sdk.host.slots import SlotPool
from kvstore_sdk.host.tier import HostTier
from kvstore_sdk.host.types import GroupStats, HostStats, Pin, Purpose, Slot, SlotState

__all__ = [
    "EvictionPolicy",
    "GroupStats",
    "HostStats",
    "HostTier",
    "Pin",
    "Purpose",
    "Slot",
    "SlotPool",
    "SlotState",
    "create_region",
    "is_abandoned",
    "join_region",
    "open_policy",
    "open_region",
    "sweep_regions",
]
