"""Any backend in a process of its own: what its code does there costs misses, and never the engine."""

from kvstore_sdk.isolation.backend import IsolatedBackend, open_isolated
from kvstore_sdk.isolation.inside import in_child
from kvstore_sdk.isolation.limits import IsolationLimits
from kvstore_sdk.isolation.protocol import PolledBackend

__all__ = ["IsolatedBackend", "IsolationLimits", "PolledBackend", "in_child", "open_isolated"]
