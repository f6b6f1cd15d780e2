"""Policies by their names."""

from __future__ import annotations

from collections.abc import Callable

from kvstore_sdk.backend.factories import is_factory_name, load_factory
from kvstore_sdk.errors import ConfigError, KVStoreError, text_of
from kvstore_sdk.host.arc import ARC
from kvstore_sdk.host.guarded import Guarded
from kvstore_sdk.host.lru import LRU
from kvstore_sdk.host.policy import EvictionPolicy

__all__ = ["open_policy"]

_POLICIES: dict[str, Callable[..., EvictionPolicy]] = {"arc": ARC, "lru": LRU}
_METHODS = ("insert", "miss", "used", "pin", "unpin", "victim", "evict", "remove", "clear")


def open_policy(name: str, capacity: int) -> EvictionPolicy:
    """Open a policy for one slot size. One that is not built in is `Guarded`: whatever it does, its host tier goes on.

    Args:
        name: "lru", "arc", or "module:factory", a callable that takes the keyword argument `capacity` and returns a policy.
        capacity: How many keys can be resident, at least 1.

    Raises:
        ConfigError: there is no such policy, it cannot be imported or opened, or what the factory returned is none.
    """
    where = f"eviction policy {name}"
    if capacity < 1:
        raise ConfigError(where, "capacity", f"is {capacity}; it must be at least 1")
    if (factory := _POLICIES.get(name)) is None:
        if not is_factory_name(name):
            raise ConfigError(where, "policy", f"is not known; there are {', '.join(sorted(_POLICIES))}; or write module:factory")
        factory = load_factory(where, "policy", name)
    try:
        policy = factory(capacity=capacity)
    except (KVStoreError, KeyboardInterrupt):
        raise
    except BaseException as cause:
        # A vendor's code may fail in any way.
        problem = f"the factory raised {type(cause).__name__} ({text_of(cause)}); that is for its vendor to fix"
        raise ConfigError(where, "policy", problem) from cause
    if missing := [method for method in _METHODS if not callable(getattr(policy, method, None))]:
        raise ConfigError(where, "policy", f"the factory returned a {type(policy).__name__}, which lacks {', '.join(missing)}")
    return policy if name in _POLICIES else Guarded(policy, name, capacity)
