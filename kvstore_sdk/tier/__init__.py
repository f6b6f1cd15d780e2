"""Tier: one Backend made non-blocking and safe for an engine."""

from kvstore_sdk.tier.settings import TierSettings
from kvstore_sdk.tier.types import EngineMemory, JobResult, Lookup

__all__ = ["EngineMemory", "JobResult", "Lookup", "TierSettings"]
