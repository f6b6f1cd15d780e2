"""TieredStore: host memory as the first tier, any number of backends below it."""

from kvstore_sdk.store.metrics import COUNTERS, GAUGES, HISTOGRAMS
from kvstore_sdk.store.settings import StoreSettings
from kvstore_sdk.store.store import TieredStore
from kvstore_sdk.store.types import HOST, StoreEvent, StoreTier

__all__ = ["COUNTERS", "GAUGES", "HISTOGRAMS", "HOST", "StoreEvent", "StoreSettings", "StoreTier", "TieredStore"]
