"""Which chunk leaves host memory next: the protocol of a policy."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

__all__ = ["EvictionPolicy"]


class EvictionPolicy(Protocol):
    """The order in which chunks of one slot size leave host memory.

    One host tier owns it and calls it under a lock, so that it needs none of its own. It holds keys, not bytes, and does no I/O. Every call
    is on the engine's thread: O(1) a key, amortised, at 10^5 keys and whatever is pinned.

    A host tier never makes a call that has to raise. The first time that a policy which is not built in raises all the same, or names no
    victim where there is one, or one that is none, an LRU takes its place for good, and the log says so.

    The calls for a chunk that comes in are, in this order: `miss`, as often as needed `victim` and `evict`, `insert`, and once it may be
    evicted `unpin`. A chunk that comes in together with others may find their calls between its own.

    **One request is one use.** `used` is called once for each request, when it ends, with the whole chain that it stored, loaded or found;
    and for nothing else: not for look-ups, not for the copies to lower tiers, not when a store or a load is complete. The first `used` of a
    key after its `insert` is thus, as a rule, that of the request which brought it in, and no second use.

    **Chains.** A chunk is of use only if every chunk before it in its prefix is there. `used` and `unpin` give keys in the order of the
    chain, the head of the prefix first. Of a chain that `used` named, in whatever batches it was stored or is pinned and unpinned, the tail
    goes before the head. Only a policy that holds some keys dearer than others may take from a head it holds dear while a tail remains.
    """

    def insert(self, key: bytes) -> None:
        """A key became resident. It is pinned: its slot is being filled.

        Raises:
            ValueError: it is resident already.
        """
        ...

    def miss(self, key: bytes) -> None:
        """A key that is not resident is about to be inserted, from the engine or from a lower tier. A policy may learn from it.

        It may come several times before the `insert`, and without one: there may be no room. Only the first may teach something.
        """
        ...

    def used(self, keys: Sequence[bytes]) -> None:
        """One request used these keys, the head of its prefix first. Pinned keys count; those that are not resident are passed over."""
        ...

    def pin(self, key: bytes) -> None:
        """A resident key is no victim until `unpin`. Pins do not add up, and a pin is no use.

        Raises:
            KeyError: it is not resident.
        """
        ...

    def unpin(self, keys: Sequence[bytes]) -> None:
        """Keys may be victims again, where their last use put them. Those that were never used are the most recent, the head last to go.

        Raises:
            KeyError: one is not resident. Those after it in the list have been unpinned.
        """
        ...

    def victim(self, protected: Collection[bytes] = ()) -> bytes | None:
        """The key that goes next, neither pinned nor protected; None if there is no such key. It stays until `evict`.

        Args:
            protected: Keys that are about to be used: a set, because it is searched. A policy may count a protected key that was next to go
                as recent from now on.
        """
        ...

    def evict(self, key: bytes) -> None:
        """A victim went. A policy may remember its name.

        Raises:
            KeyError: it is not resident.
            ValueError: it is pinned.
        """
        ...

    def remove(self, key: bytes) -> None:
        """A key went for another reason, pinned or not: its bytes were bad, or never came. Nothing of it is remembered.

        Raises:
            KeyError: it is not resident.
        """
        ...

    def clear(self) -> None:
        """Forget every key, and all that was learned."""
        ...
