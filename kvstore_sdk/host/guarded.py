"""A policy of somebody else's, and the one that takes over when it fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from kvstore_sdk.errors import text_of
from kvstore_sdk.host.lru import LRU
from kvstore_sdk.host.policy import EvictionPolicy

__all__ = ["Guarded"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class Guarded:
    """Calls a policy that may fail in any way, and never fails itself.

    An LRU hears the same beside it. The first time that the policy raises, or names a victim that is none, the LRU decides from then on: a
    policy that missed a call no longer knows what is resident. That costs a worse order, and nothing that was promised.
    """

    def __init__(self, policy: EvictionPolicy, name: str, capacity: int) -> None:
        self._policy: EvictionPolicy | None = policy
        self._name = name
        self._lru = LRU(capacity)

    def insert(self, key: bytes) -> None:
        self._lru.insert(key)
        self._tell(lambda policy: policy.insert(key))

    def miss(self, key: bytes) -> None:
        self._tell(lambda policy: policy.miss(key))

    def used(self, keys: Sequence[bytes]) -> None:
        self._lru.used(keys)
        self._tell(lambda policy: policy.used(keys))

    def pin(self, key: bytes) -> None:
        self._lru.pin(key)
        self._tell(lambda policy: policy.pin(key))

    def unpin(self, keys: Sequence[bytes]) -> None:
        self._lru.unpin(keys)
        self._tell(lambda policy: policy.unpin(keys))

    def victim(self, protected: Collection[bytes] = ()) -> bytes | None:
        key = self._tell(lambda policy: self._named(policy, protected))
        return self._lru.victim(protected) if key is None else key

    def evict(self, key: bytes) -> None:
        self._lru.evict(key)
        self._tell(lambda policy: policy.evict(key))

    def remove(self, key: bytes) -> None:
        self._lru.remove(key)
        self._tell(lambda policy: policy.remove(key))

    def clear(self) -> None:
        self._lru.clear()
        self._tell(lambda policy: policy.clear())

    def _named(self, policy: EvictionPolicy, protected: Collection[bytes]) -> bytes | None:
        """The victim that the policy names, if it is one."""
        key = policy.victim(protected)
        if key is not None and self._lru.may_go(key) and key not in protected:
            return key
        if key is not None or self._lru.victim(protected) is not None:
            self._give_up(f"named {key!r} as a victim, which is pinned, protected or not resident, or none though there is one")
        return None

    def _tell(self, call: Callable[[EvictionPolicy], _T]) -> _T | None:
        if self._policy is not None:
            try:
                return call(self._policy)
            except KeyboardInterrupt:
                # Of whoever stops the engine: this is its own thread.
                raise
            except BaseException as error:  # noqa: BLE001  a vendor's code may fail in any way
                self._give_up(f"raised {type(error).__name__} ({text_of(error)})")
        return None

    def _give_up(self, why: str) -> None:
        self._policy = None
        logger.error(
            "eviction policy %s: %s; from now on the least recently used leaves first. That is for its vendor to fix", self._name, why
        )
