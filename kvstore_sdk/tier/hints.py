"""Requests that name a peer: what they ask, how long that may take, and what is told to the backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvstore_sdk.backend import Hint
from kvstore_sdk.identity import KVIdentity
from kvstore_sdk.keys import GROUP_BYTES, ChunkKey

if TYPE_CHECKING:
    from kvstore_sdk.tier.probe import Probe

__all__ = ["Asker", "Waits", "call_s", "patience_s"]

_SHORTEST_WAIT_S = 0.01
"""What is left of a wait that is shorter is not worth a thread of its own."""


def patience_s(timeout_s: float, hint: Hint | None) -> float:
    """How long a look-up stays PENDING at most, where it is `timeout_s` for those without a hint."""
    return timeout_s if hint is None else max(timeout_s, hint.wait_s + 1.0)


def call_s(patience_s: float) -> float:
    """How long its call may take: a little less, so that what was found by then is not lost with what was not."""
    return patience_s - min(0.1 * patience_s, 0.5)


class Asker:
    """A request with a hint. It shares no question with others: they would be asked elsewhere, or their wait would be over earlier.

    Attributes:
        hint: As the request came with it.
        probes: Its open probe of a key, in the order in which they were asked for.
        since_s: When the first one was, from which on it waits; infinity before.
    """

    __slots__ = ("hint", "probes", "since_s")

    def __init__(self, hint: Hint) -> None:
        self.hint = hint
        self.probes: dict[bytes, Probe] = {}
        self.since_s = float("inf")


class Waits:
    """What the backend is told with the questions of a request, for one namespace after another.

    What is waited for is a chain. Of groups with a window or a state others may never have the head, so that no wait for it would end: of
    the groups without, the first that is asked for counts.
    """

    def __init__(self, identity: KVIdentity) -> None:
        groups = enumerate(identity.groups)
        self._whole = frozenset(
            number.to_bytes(GROUP_BYTES, "big") for number, group in groups if not group.window and not group.state_shapes
        )

    def hint(self, namespace: str, probe: Probe, now: float) -> Hint | None:
        """With what is asked now."""
        asker = probe.asker
        if asker is None:
            return None
        left_s = min(asker.hint.wait_s, asker.since_s + asker.hint.wait_s - now)
        if left_s < _SHORTEST_WAIT_S:
            return dataclasses.replace(asker.hint, wait_s=0.0)
        chain = self._chain([key for key in probe.keys if key not in probe.over])
        return dataclasses.replace(asker.hint, wait_s=left_s, until=tuple(ChunkKey.from_engine(namespace, key).name for key in chain))

    def _chain(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        group = next((key[-GROUP_BYTES:] for key in keys if key[-GROUP_BYTES:] in self._whole), None)
        # Without one, the order is that of the engine, which asks for the end of a window first.
        return keys[:1] if group is None else [key for key in keys if key[-GROUP_BYTES:] == group]
